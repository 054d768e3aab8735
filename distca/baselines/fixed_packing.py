"""Fixed packing: rows of equal tokens in the loader's order, attention where its queries live.

Over a context-parallel group the packed row is cut into 2 * cp chunks without regard to documents, chunk i and
chunk 2 * cp - 1 - i on rank i: equal tokens on every rank, balanced work if the row were one document, and cheap
in shards, as a short document stays in one piece. The work of the groups is what their documents make it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from distca.baselines.groups import fixed_rows, step_of_groups
from distca.planning.step import StepPlan
from distca.spec import ModelShape
from distca.validation import check_whole
from distca.workload.layout import Layout, layout_from_slices


def fixed_packing_step(
    micro_batches: Sequence[np.ndarray], model: ModelShape, *, num_data: int, layers: Sequence[int], tp: int = 1,
    cp: int = 1,
) -> StepPlan:
    """num_data / cp groups of cp data ranks with as many tokens each."""
    return step_of_groups(fixed_rows(micro_batches, num_data // cp), per_sequence_layout, model, cp=cp, layers=layers,
                          tp=tp)


def per_sequence_layout(layout: Layout, cp: int) -> Layout:
    """Every row of `layout` as head and tail chunks over cp ranks: rank g becomes ranks g * cp to (g + 1) * cp - 1."""
    check_whole("cp", cp, remedy="give the number of ranks of a context-parallel group, 1 or more")
    row_tokens = layout.tokens_per_rank()
    chunk = np.arange(2 * cp + 1)
    row_begin = np.cumsum(row_tokens) - row_tokens
    cuts = row_begin[:, None] + row_tokens[:, None] * chunk // (2 * cp)  # [rows, 2 * cp + 1]
    length = layout.stop - layout.start
    ends = np.cumsum(length)                                     # slices are in row order
    edges = np.unique(np.concatenate([ends, cuts[:, 1:].ravel()]))
    edges = edges[edges > 0]                                     # a row shorter than its chunks has empty ones
    begins = edges - np.diff(edges, prepend=0)
    owner = np.searchsorted(ends, begins, side="right")          # [pieces] slice that holds each piece
    at = np.searchsorted(cuts[:, 1:].ravel(), begins, side="right")
    row, nth = at // (2 * cp), at % (2 * cp)
    offset = layout.start[owner] - (ends - length)[owner]
    rank = row * cp + np.minimum(nth, 2 * cp - 1 - nth)
    return layout_from_slices(layout.lengths, layout.document[owner], begins + offset, edges + offset, rank,
                              layout.num_ranks * cp)
