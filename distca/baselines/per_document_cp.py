"""Per-document context parallelism: every document over all ranks of its group, in head and tail pairs.

A causal document's early queries are cheap and its late ones dear. Cut into 2 * cp chunks, with chunk i and chunk
2 * cp - 1 - i on rank i, every rank gets equal tokens and nearly equal work, and pays by gathering the keys of every
document, however short.

Lengths need not divide. A document gives each rank of its group len // cp tokens and the remaining len % cp tokens to
as many ranks in turn, the next document continuing where it stopped, so the rows of a group differ by at most one
token, and not at all where the group's tokens divide by cp. Within a rank a chunk pair differs by at most one token.
A document shorter than 2 * cp tokens has fewer chunks, and one shorter than cp tokens leaves ranks out.

Only the keys that a rank's queries see travel: the tail on the first rank sees the whole document, the middle chunks
see half of it. An all-gather would bring every key everywhere; `plan.summary().bytes_all_gather` counts that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from distca.baselines.at_home import at_home
from distca.baselines.groups import fixed_rows, step_of_groups
from distca.cost.attention_time import AttentionTime
from distca.planning.plan import Plan
from distca.planning.step import StepPlan
from distca.spec import ModelShape
from distca.validation import check_whole
from distca.workload.layout import Layout, layout_from_slices


def per_document_cp(
    layout: Layout, model: ModelShape, *, cp: int, tp: int = 1, cost: AttentionTime | None = None
) -> Plan:
    """Spread each rank of `layout` over a group of cp ranks: rank g becomes ranks g * cp to (g + 1) * cp - 1."""
    plan = at_home(head_tail_layout(layout, cp), model, tp=tp, cost=cost)
    return plan if plan.limit is None else replace(plan, limit="head and tail chunks are dealt by tokens, not by work")


def per_document_cp_step(
    micro_batches: Sequence[np.ndarray], model: ModelShape, *, num_data: int, layers: Sequence[int], tp: int = 1,
    cp: int | None = None,
) -> StepPlan:
    """A step whose documents are cut over groups of cp data ranks, or over all of a stage; stages run 1F1B."""
    cp = num_data if cp is None else cp
    return step_of_groups(fixed_rows(micro_batches, num_data // cp), head_tail_layout, model, cp=cp, layers=layers,
                          tp=tp)


def head_tail_layout(layout: Layout, cp: int) -> Layout:
    """Every slice cut into head and tail chunks over its group's ranks; a row keeps the order of the slices."""
    check_whole("cp", cp, remedy="give the number of ranks of a context-parallel group, 1 or more")
    tokens = _tokens_of_ranks(layout, cp)                        # [slices, cp]
    head = (tokens + 1) // 2
    head[:, -1] = tokens[:, -1]                                  # the last rank's chunks are neighbours: one slice
    chunk = np.concatenate([head, (tokens - head)[:, ::-1]], axis=1)  # [slices, 2 * cp] in document order
    stop = layout.start[:, None] + np.cumsum(chunk, axis=1)
    order = np.concatenate([np.arange(cp), np.arange(cp)[::-1]])
    rank = layout.rank[:, None] * cp + order                     # [slices, 2 * cp]
    used = chunk > 0
    document = np.broadcast_to(layout.document[:, None], chunk.shape)
    return layout_from_slices(
        layout.lengths, document[used], (stop - chunk)[used], stop[used], rank[used], layout.num_ranks * cp)


def _tokens_of_ranks(layout: Layout, cp: int) -> np.ndarray:
    """[slices, cp] tokens of each slice on each rank of its group; remainders go round the group."""
    length = layout.stop - layout.start
    extra = length % cp
    before = np.cumsum(extra) - extra                            # [slices] remainders of earlier slices
    first = np.searchsorted(layout.rank, layout.rank)            # [slices] first slice of the same group
    turn = (before - before[first]) % cp
    takes = (np.arange(cp) - turn[:, None]) % cp < extra[:, None]
    return (length // cp)[:, None] + takes
