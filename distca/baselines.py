"""Baselines as ordinary step plans, so that comparisons use the same runtime and the same counts.

A baseline computes attention on its queries' home ranks, and its stages run 1F1B. A micro-batch has one row of whole
documents per replica: rows of equal tokens in the loader's order (`fixed_rows`) or of equal work (`variable_rows`). A
replica is a group of cp data ranks (group g is ranks g * cp to (g + 1) * cp - 1), which gather each other's keys. Its
row is cut over these ranks by sequence, by document, or by the faster of both (`adaptive_layout`). The last is WLB-LLM
without deferred execution.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from distca.cost.attention_time import AttentionTime
from distca.planning.plan import Plan, max_over_mean, server_work
from distca.planning.schedule import Ticks
from distca.planning.step import MicroBatch, StepPlan, step_among_data_ranks
from distca.planning.tasks import tasks_at_home
from distca.spec import ModelShape
from distca.validation import UserError, check_whole
from distca.workload.layout import Layout, cut_stream, layout_from_slices
from distca.workload.packing import NanoBatch, pack, pack_whole


def at_home(layout: Layout, model: ModelShape, *, tp: int = 1) -> Plan:
    """Make the plan that moves no query; its tolerance is 0, and its `limit` says why if work is unequal.

    If documents span ranks, the keys of a slice's prefix are still sent to the slice's rank.
    """
    plan = Plan(layout, tasks_at_home(layout), np.ones(layout.num_ranks), 0.0, model, tp)
    is_balanced = max_over_mean(plan.work(), plan.speed) <= 1.0
    return plan if is_balanced else replace(plan, limit="attention stays where its queries live")


def at_home_step(
    micro_batches: Sequence[np.ndarray], model: ModelShape, *, num_data: int, layers: Sequence[int], tp: int = 1,
    ticks: Ticks | None = None,
) -> StepPlan:
    """Plan a step without balancing: documents in the loader's order over the data ranks, stages by default in 1F1B."""
    packed = [MicroBatch(np.asarray(lengths, dtype=np.int64), pack_whole(lengths, ranks=num_data))
              for lengths in micro_batches]
    return step_among_data_ranks(packed, lambda layout: at_home(layout, model, tp=tp), model, layers=layers, tp=tp,
                                 ticks=ticks)


Cut = Callable[[Layout, int], Layout]  # (rows of replicas, ranks per group) -> rows of ranks


def fixed_rows(micro_batches: Sequence[np.ndarray], replicas: int) -> list[Layout]:
    """Pack documents in the loader's order into rows of equal tokens; no document spans rows."""
    return [pack(lengths, ranks=replicas, spanning=False) for lengths in micro_batches]


def step_of_groups(
    rows: Sequence[Layout], cut: Cut, model: ModelShape, *, cp: int, layers: Sequence[int], tp: int = 1,
    ticks: Ticks | None = None,
) -> StepPlan:
    """Plan a step of groups: `rows[m]` is micro-batch m with one row per replica, which `cut` divides over cp ranks.

    Stages run in the order of `ticks`, by default 1F1B.
    """
    check_whole("cp", cp, remedy="give the number of ranks of a context-parallel group, 1 or more")
    packed = []
    for row in rows:
        layout = cut(row, cp) if cp > 1 else row
        packed.append(MicroBatch(layout.lengths, (NanoBatch(layout, np.arange(layout.num_documents)),)))
    return step_among_data_ranks(packed, lambda layout: at_home(layout, model, tp=tp), model, layers=layers, tp=tp,
                                 gather_ranks=cp, ticks=ticks)


def per_sequence_layout(layout: Layout, cp: int) -> Layout:
    """Cut every row into 2 * cp chunks without regard to documents, chunk i and chunk 2 * cp - 1 - i on rank i.

    Every rank gets equal tokens, and balanced work if the row were one document. Few shards are short, as short
    documents mostly stay in one piece.
    """
    check_whole("cp", cp, remedy="give the number of ranks of a context-parallel group, 1 or more")
    row_tokens = layout.tokens_per_rank()
    chunk = np.arange(2 * cp + 1)
    row_begin = np.cumsum(row_tokens) - row_tokens
    cuts = row_begin[:, None] + row_tokens[:, None] * chunk // (2 * cp)  # [rows, 2 * cp + 1]
    length = layout.stop - layout.start
    ends = np.cumsum(length)                                     # slices are in row order
    owner, at, begins, edges = cut_stream(ends, cuts[:, 1:].ravel())
    row, nth = at // (2 * cp), at % (2 * cp)
    offset = layout.start[owner] - (ends - length)[owner]
    rank = row * cp + np.minimum(nth, 2 * cp - 1 - nth)
    return layout_from_slices(layout.lengths, layout.document[owner], begins + offset, edges + offset, rank,
                              layout.num_ranks * cp)


def per_document_cp_step(
    micro_batches: Sequence[np.ndarray], model: ModelShape, *, num_data: int, layers: Sequence[int], tp: int = 1,
    cp: int | None = None, ticks: Ticks | None = None,
) -> StepPlan:
    """Plan a step that cuts documents over groups of cp data ranks, by default over all of a stage."""
    cp = num_data if cp is None else cp
    return step_of_groups(fixed_rows(micro_batches, num_data // cp), head_tail_layout, model, cp=cp, layers=layers,
                          tp=tp, ticks=ticks)


def head_tail_layout(layout: Layout, cp: int) -> Layout:
    """Cut every document into 2 * cp chunks, chunk i and chunk 2 * cp - 1 - i on rank i of its group.

    Early queries of a causal document are cheap and late ones expensive, so every rank gets nearly equal work. The
    price is that a rank gathers all keys that its queries see. Lengths need not divide: a document's remaining len % cp
    tokens are assigned round-robin, and the next document continues with the next rank, so that the rows of a group
    differ by at most one token. A document shorter than 2 * cp tokens has fewer chunks.
    """
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
    """[slices, cp] tokens of each slice on each rank of its group; remainders are assigned round-robin."""
    length = layout.stop - layout.start
    extra = length % cp
    before = np.cumsum(extra) - extra                            # [slices] remainders of earlier slices
    first = np.searchsorted(layout.rank, layout.rank)            # [slices] first slice of the same group
    turn = (before - before[first]) % cp
    takes = (np.arange(cp) - turn[:, None]) % cp < extra[:, None]
    return (length // cp)[:, None] + takes


_ROUNDS = 200
_TOLERANCE = 1e-3  # of the heaviest chunk above the mean, at which `_improve` stops


def variable_rows(lengths: np.ndarray, chunk: np.ndarray, replicas: int) -> list[Layout]:
    """Make chunk c the row of replica c % replicas in micro-batch c // replicas; empty micro-batches are dropped."""
    rows = []
    for micro_batch in np.unique(chunk // replicas).tolist():
        mine = np.flatnonzero(chunk // replicas == micro_batch)
        own = lengths[mine]
        rows.append(layout_from_slices(own, np.arange(len(own)), np.zeros_like(own), own, chunk[mine] % replicas,
                                       replicas))
    return rows


def variable_length(lengths: np.ndarray, work: np.ndarray, *, num_chunks: int, max_tokens: int) -> np.ndarray | None:
    """[documents] chunk of each, so that chunks have equal work and unequal tokens; None if they do not fit.

    Each document, heaviest first, is assigned to the chunk with the least work that has room for its tokens. Then
    single documents are moved from the heaviest chunk, or swapped for a lighter one, as long as that lowers the
    maximum. A document is never cut, so a chunk's work is at least that of its longest document.
    """
    if num_chunks < 1 or max_tokens < 1:
        raise UserError(f"num_chunks is {num_chunks} and max_tokens {max_tokens}; give at least 1 of each")
    if len(work) != len(lengths):
        raise UserError(f"work has {len(work)} entries but there are {len(lengths)} documents; give one for each")
    chunk = np.full(len(lengths), -1)
    load, free = np.zeros(num_chunks), np.full(num_chunks, max_tokens, dtype=np.int64)
    for document in np.argsort(-work, kind="stable").tolist():
        fits = np.where(free >= lengths[document], load, np.inf)
        target = int(fits.argmin())
        if fits[target] == np.inf:
            return None
        chunk[document] = target
        load[target] += work[document]
        free[target] -= lengths[document]
    _improve(chunk, lengths, work, load, free)
    return chunk


def _improve(chunk: np.ndarray, lengths: np.ndarray, work: np.ndarray, load: np.ndarray, free: np.ndarray) -> None:
    """Lower the heaviest chunk by one move or one swap at a time."""
    for _ in range(_ROUNDS):
        heavy = int(load.argmax())
        if load[heavy] <= (1.0 + _TOLERANCE) * load.mean():
            return
        lightest = np.argsort(load, kind="stable")[:-1].tolist()
        if not any(_shift(chunk, lengths, work, load, free, heavy, light) for light in lightest):
            return


def _shift(chunk: np.ndarray, lengths: np.ndarray, work: np.ndarray, load: np.ndarray, free: np.ndarray, heavy: int,
           light: int) -> bool:
    """Move one document to the lighter chunk, or swap two, so that both end below the heavier; False if impossible."""
    mine, other = np.flatnonzero(chunk == heavy), np.flatnonzero(chunk == light)
    gap = load[heavy] - load[light]
    moved = work[mine][:, None] - np.concatenate([[0.0], work[other]])  # [mine, nothing or one of other]
    tokens = lengths[mine][:, None] - np.concatenate([[0], lengths[other]])
    least = 1e-6 * load[heavy]
    allowed = (moved > least) & (moved < gap - least) & (tokens <= free[light]) & (-tokens <= free[heavy])
    if not allowed.any():
        return False
    best = np.where(allowed, np.abs(moved - gap / 2), np.inf)
    i, j = np.unravel_index(int(best.argmin()), best.shape)
    chunk[mine[i]] = light
    if j > 0:
        chunk[other[j - 1]] = heavy
    load[heavy] -= moved[i, j]
    load[light] += moved[i, j]
    free[heavy] += tokens[i, j]
    free[light] -= tokens[i, j]
    return True


def adaptive_layout(layout: Layout, cp: int, *, cost: AttentionTime) -> Layout:
    """Cut every row by document or by sequence, whichever takes its group fewer seconds by `cost`.

    Cuts by document balance a group's work but cut short documents into very short shards, which kernels run slowly.
    """
    cut = [cutter(layout, cp) for cutter in (head_tail_layout, per_sequence_layout)]
    by_document, by_sequence = (_longest(one, cp, cost) for one in cut)
    better = by_document <= by_sequence                          # [groups]
    taken = [chosen[one.rank // cp] for one, chosen in zip(cut, (better, ~better), strict=True)]
    document, start, stop, rank = (
        np.concatenate([getattr(one, name)[mask] for one, mask in zip(cut, taken, strict=True)])
        for name in ("document", "start", "stop", "rank"))
    return layout_from_slices(layout.lengths, document, start, stop, rank, layout.num_ranks * cp)


def _longest(layout: Layout, cp: int, cost: AttentionTime) -> np.ndarray:
    """[groups] seconds of the slowest rank, forward and backward."""
    tasks, speeds = tasks_at_home(layout), cost.speeds(layout.num_ranks)
    return sum(((server_work(tasks, layout.num_ranks, cost, backward) / speeds).reshape(-1, cp).max(axis=1)
                for backward in (False, True)), np.zeros(layout.num_ranks // cp))
