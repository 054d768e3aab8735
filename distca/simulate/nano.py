"""Cut a micro-batch in ping and pong, and plan each over the pool, without changing what attends to what.

Documents are dealt longest first to the half with the less attention. Where one document must be cut, ping has its
beginning and pong the rest, whose queries then read keys of ping: known by then, as ping is ahead in every layer, and
in backward pong comes first. So every strategy computes the same pairs, also when one document fills the whole batch.

For the scheduler, the homes of those earlier keys are ranks of a second, virtual pool. Their speed is set so that their
cap is what they hold, so that next to nothing leaves them or comes to them: what does is computed by the rank that
they stand for. Their own tasks, which are ping's, are dropped. Plans balance pairs; a latency table then says what they
take, forward and backward, which no one measure could balance at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from distca.cost.work import causal_pairs
from distca.planning.greedy import balance
from distca.planning.plan import task_work
from distca.planning.tasks import TaskTable, tasks_at_home
from distca.planning.traffic import key_ranges, query_ranges
from distca.simulate.costs import Costs
from distca.simulate.timeline import Exchange
from distca.workload.layout import Layout, layout_from_slices
from distca.workload.packing import pack

_LITTLE = 1.0 + 1e-9


@dataclass(frozen=True, slots=True, eq=False)
class Nano:
    """Slices of one nano-batch over the data ranks; of a document begun in the half before, that half's slices too."""

    lengths: np.ndarray   # [documents] tokens of the whole document up to this half's end
    document: np.ndarray  # [slices]
    start: np.ndarray     # [slices]
    stop: np.ndarray      # [slices]
    rank: np.ndarray      # [slices]
    earlier: np.ndarray   # [slices] bool: these tokens are of the half before; they are keys here, not queries

    def tokens(self, num_ranks: int) -> np.ndarray:
        own = ~self.earlier
        return np.bincount(self.rank[own], weights=(self.stop - self.start)[own], minlength=num_ranks)


@dataclass(frozen=True, slots=True, eq=False)
class Served:
    """One attention call of the pool: seconds per server and what travels, forward and backward.

    In a pipeline the backward tick runs the same micro-batches on the mirrored stages, and so do its servers.
    """

    forward_seconds: np.ndarray   # [ranks]
    backward_seconds: np.ndarray  # [ranks]
    going: tuple[Exchange, Exchange]   # forward, backward: homes to servers
    coming: tuple[Exchange, Exchange]  # forward, backward: servers to homes
    buffer_bytes: np.ndarray      # [ranks] received and returned, at the larger of forward and backward


def ping_pong(lengths: np.ndarray, num_ranks: int, placement: str, tolerance: float) -> tuple[Nano, Nano]:
    """Two halves of equal tokens, each laid over the ranks by `placement`."""
    ping, pong = _halves(lengths)
    first = _laid(ping, num_ranks, placement, tolerance)
    second = _laid(pong, num_ranks, placement, tolerance)
    begun = np.flatnonzero(pong[1] > 0)
    if len(begun) == 0:
        return first, second
    (cut,) = begun.tolist()
    before = np.flatnonzero(ping[0] == pong[0][cut])[0]
    taken = first.document == before
    joined = Nano(
        second.lengths,
        np.concatenate([second.document, np.full(int(taken.sum()), cut)]),
        np.concatenate([second.start, first.start[taken]]),
        np.concatenate([second.stop, first.stop[taken]]),
        np.concatenate([second.rank, first.rank[taken]]),
        np.concatenate([second.earlier, np.ones(int(taken.sum()), dtype=bool)]),
    )
    return first, joined


def whole(lengths: np.ndarray, num_ranks: int, placement: str, tolerance: float) -> Nano:
    """The micro-batch in one piece, for a single stream."""
    parts = np.arange(len(lengths)), np.zeros_like(lengths), lengths
    return _laid(parts, num_ranks, placement, tolerance)


Parts = tuple[np.ndarray, np.ndarray, np.ndarray]  # document, start, tokens


def _halves(lengths: np.ndarray) -> tuple[Parts, Parts]:
    """Documents longest first to the half with the less work; at most one is cut, and ping has its beginning."""
    half = int(lengths.sum()) // 2
    rows: tuple[list[tuple[int, int, int]], list[tuple[int, int, int]]] = ([], [])
    work, free = [0.0, 0.0], [half, half]
    early = 0
    for document in np.argsort(-lengths, kind="stable").tolist():
        tokens = int(lengths[document])
        side = 0 if (work[0], -free[0]) <= (work[1], -free[1]) else 1
        if tokens > free[side]:
            side = 1 - side
        taken = min(tokens, free[side])
        if taken < tokens:
            early = side
        for target, start, part in ((side, 0, taken), (1 - side, taken, tokens - taken)):
            if part:
                rows[target].append((document, start, part))
                free[target] -= part
                work[target] += part * (start + 0.5 * part)
    ping, pong = (np.array(sorted(rows[side]), dtype=np.int64).reshape(-1, 3).T for side in (early, 1 - early))
    return (ping[0], ping[1], ping[2]), (pong[0], pong[1], pong[2])


def _laid(parts: Parts, num_ranks: int, placement: str, tolerance: float) -> Nano:
    _, start, tokens = parts
    work = causal_pairs(start, start + tokens).astype(np.float64)
    layout = pack(tokens, ranks=num_ranks, placement=placement, tolerance=tolerance, document_work=work)
    shift = start[layout.document]
    return Nano(start + tokens, layout.document, layout.start + shift, layout.stop + shift, layout.rank,
                np.zeros(layout.num_slices, dtype=bool))


def plan_pool(
    stages: Sequence[tuple[int, Nano]], num_data: int, num_pool: int, tolerance: float, costs: Costs
) -> Served:
    """Balance the attention of the nano-batches of one forward tick, each on its stage, over the whole pool."""
    layout = _pool_layout(stages, num_data, num_pool)
    home = tasks_at_home(layout)
    load = np.bincount(home.server, weights=task_work(home, None), minlength=2 * num_pool)
    earlier = load[num_pool:]
    if earlier.any():
        share = (1.0 + tolerance) * load[:num_pool].sum()
        total = share + earlier.sum() * _LITTLE
        speed = np.concatenate([np.full(num_pool, share / num_pool), earlier * _LITTLE]) / total
        plan = balance(layout, costs.model, tolerance=min(total / load.sum() - 1.0, 1.0), speed=speed, tp=costs.tp)
    else:
        plain = Layout(layout.lengths, layout.document, layout.start, layout.stop, layout.rank, num_pool)
        plan = balance(plain, costs.model, tolerance=tolerance, tp=costs.tp)
    tasks = plan.tasks.take(plan.tasks.home < num_pool)
    tasks = replace(tasks, server=tasks.server % num_pool)
    mirror = np.arange(num_pool).reshape(-1, num_data)[::-1].ravel()
    return served(layout, tasks, mirror, costs)


def _pool_layout(stages: Sequence[tuple[int, Nano]], num_data: int, num_pool: int) -> Layout:
    """The stages' slices side by side; earlier halves on virtual ranks behind the pool."""
    lengths, document, start, stop, rank = [], [], [], [], []
    num_documents = 0
    for stage, nano in stages:
        lengths.append(nano.lengths)
        document.append(nano.document + num_documents)
        start.append(nano.start)
        stop.append(nano.stop)
        rank.append(nano.rank + stage * num_data + num_pool * nano.earlier)
        num_documents += len(nano.lengths)
    return layout_from_slices(np.concatenate(lengths), np.concatenate(document), np.concatenate(start),
                              np.concatenate(stop), np.concatenate(rank), 2 * num_pool)


def served(layout: Layout, tasks: TaskTable, mirror: np.ndarray, costs: Costs) -> Served:
    """Seconds and bytes of tasks; keys of virtual ranks come from the rank they stand for."""
    num_pool = len(mirror)
    pairs = causal_pairs(tasks.q_start, tasks.q_stop, tasks.kv_start, tasks.kv_stop)
    kv_len = np.where(tasks.kv_stop == tasks.q_stop, tasks.kv_len, tasks.kv_len + 0.5 * (tasks.q_len - 1))
    forward, backward = (
        np.bincount(tasks.server, minlength=num_pool,
                    weights=np.where(pairs > 0, costs.attention_seconds(tasks.q_len, kv_len, backward=way), 0.0))
        for way in (False, True))
    keys, queries = key_ranges(layout, tasks), query_ranges(layout, tasks)
    home = np.concatenate([queries.home, keys.home]) % num_pool
    server = np.concatenate([queries.server, keys.server])
    q_tokens = np.concatenate([queries.stop - queries.start, np.zeros(len(keys.home), dtype=np.int64)])
    kv_tokens = np.concatenate([np.zeros(len(queries.home), dtype=np.int64), keys.stop - keys.start])
    going_bytes, coming_bytes = _token_bytes(costs)
    going: list[Exchange] = []
    coming: list[Exchange] = []
    for way in (False, True):
        at, to = (mirror[home], mirror[server]) if way else (home, server)
        for found, (per_q, per_kv), (source, target) in (
                (going, going_bytes[way], (at, to)), (coming, coming_bytes[way], (to, at))):
            found.append(Exchange.of(source, target, q_tokens * per_q + kv_tokens * per_kv, num_pool, costs))
    held = [there.received_bytes + back.sent_bytes for there, back in zip(going, coming, strict=True)]
    return Served(forward, backward[mirror], (going[0], going[1]), (coming[0], coming[1]), np.maximum(*held))


PerToken = tuple[int, int]  # bytes of a moved query, of a moved key


def _token_bytes(costs: Costs) -> tuple[tuple[PerToken, PerToken], tuple[PerToken, PerToken]]:
    """Forward: Q, K, V go, O and log-sum-exp come. Backward, as `resend` does it: Q, K, V, O, dO and log-sum-exp go.

    Gradients come back.
    """
    model, tp = costs.model, costs.tp
    q, kv, out, lse = (size(tp) for size in (model.q_token_bytes, model.kv_token_bytes, model.out_token_bytes,
                                             model.lse_token_bytes))
    return ((q, kv), (q + 2 * out + lse, kv)), ((out + lse, 0), (q, kv))
