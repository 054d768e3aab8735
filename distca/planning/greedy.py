"""Balance attention across servers by moving query shards.

Attention cost is quadratic in document length, so equal tokens are unequal work. Only the largest load costs time,
hence the tolerance is room to save bytes: servers over the cap shed just what is over, into the servers with the most
room, in as few and as large shards as possible, because a shard's bytes grow with the square root of its work.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np

from distca.cost.latency_table import LatencyTable
from distca.cost.work import pairs_of_shard
from distca.planning.plan import Plan, task_work
from distca.planning.shard_cut import Measure, Piece, Shard, cheapest_shard
from distca.planning.tasks import TaskTable, tasks_at_home
from distca.spec import ModelShape
from distca.workload.layout import Layout

_PIECES_TRIED = 4  # longest pieces of a rank that compete for a move; shorter ones carry less work per byte


def balance(
    layout: Layout,
    model: ModelShape,
    *,
    tolerance: float = 0.05,
    speed: Sequence[float] | np.ndarray | None = None,
    tp: int = 1,
    cost: LatencyTable | None = None,
) -> Plan:
    """Give every query's attention to a server so that max/mean work is at most 1 + tolerance, in few bytes.

    `speed` names the pool: one relative speed per server, the layout's ranks first, dedicated servers after them;
    0 means that the rank serves nothing. Every rank that calls this with the same arguments gets the same plan.
    """
    pool = np.ones(layout.num_ranks) if speed is None else np.asarray(speed, dtype=np.float64)
    _check(layout, pool, tolerance)
    home = tasks_at_home(layout)
    work = task_work(home, cost)
    load = np.bincount(home.server, weights=work, minlength=len(pool))
    cap = (1.0 + tolerance) * load.sum() * pool / pool.sum()
    measure: Measure = pairs_of_shard if cost is None else cost.seconds
    mover = _Mover(layout, load, cap, measure, float(model.q_token_bytes(tp) + model.out_token_bytes(tp)),
                   float(model.kv_token_bytes(tp)))
    mover.run()
    return Plan(layout, mover.tasks(home), pool, tolerance, model, tp, cost, mover.limit)


def _check(layout: Layout, pool: np.ndarray, tolerance: float) -> None:
    if not 0.0 <= tolerance <= 1.0:
        raise ValueError(f"tolerance is {tolerance}; give a number from 0 to 1, such as 0.05")
    if len(pool) < layout.num_ranks:
        raise ValueError(f"speed has {len(pool)} servers but the layout has {layout.num_ranks} ranks; give one speed "
                         "per rank, 0 for a rank that serves nothing")
    if not (np.isfinite(pool).all() and (pool >= 0).all() and pool.sum() > 0):
        raise ValueError(f"speed is {pool.tolist()}; give finite numbers of 0 or more, at least one above 0")


def _keys_at_home(layout: Layout) -> list[tuple[int, int, int]]:
    """(document, rank, keys): a rank that computes a late slice at home has all keys up to that slice's end."""
    cut = np.flatnonzero((layout.start > 0) | (layout.stop < layout.lengths[layout.document]))
    order = cut[np.lexsort((layout.stop[cut], layout.rank[cut], layout.document[cut]))]
    last: dict[tuple[int, int], int] = {}
    for document, rank, stop in zip(layout.document[order].tolist(), layout.rank[order].tolist(),
                                    layout.stop[order].tolist(), strict=True):
        last[document, rank] = stop
    return [(document, rank, stop) for (document, rank), stop in last.items()]


class _Mover:
    """The greedy's working state: loads, rooms, and which pieces of which slices have moved."""

    def __init__(self, layout: Layout, load: np.ndarray, cap: np.ndarray, measure: Measure, q_bytes: float,
                 kv_bytes: float) -> None:
        self.layout, self.measure, self.q_bytes, self.kv_bytes = layout, measure, q_bytes, kv_bytes
        self.load: list[float] = load.tolist()
        self.cap: list[float] = cap.tolist()
        self.limit: str | None = None
        self.moved: dict[int, list[tuple[int, int, int]]] = {}   # slice -> (start, stop, server)
        self.held: dict[tuple[int, int], int] = {}               # (document, server) -> keys [0, n) travel there
        self.open: dict[int, list[int]] = {}                     # document -> servers that hold its keys, with room
        surplus = np.flatnonzero(load > cap)
        for document, server, keys in _keys_at_home(layout):
            self.held[document, server] = keys
            if cap[server] > load[server]:
                self.open.setdefault(document, []).append(server)
        self.rooms = sorted((float(cap[s] - load[s]), int(s)) for s in np.flatnonzero(cap > load))
        self.order = surplus[np.argsort(load[surplus] - cap[surplus], kind="stable")[::-1]].tolist()

    def run(self) -> None:
        layout = self.layout
        row = np.searchsorted(layout.rank, np.arange(layout.num_ranks + 1))
        for rank in self.order:
            slices = range(row[rank], row[rank + 1])
            pieces = sorted(
                ((int(layout.stop[i]), i, Piece(int(layout.document[i]), int(layout.start[i]), int(layout.stop[i]),
                                                int(layout.start[i]), int(layout.stop[i]))) for i in slices))
            while self.load[rank] > self.cap[rank] and self._move_one(rank, pieces):
                pass

    def _move_one(self, rank: int, pieces: list[tuple[int, int, Piece]]) -> bool:
        """Move the shard with the most work per byte; False, with the reason kept, where none can move."""
        need = self.load[rank] - self.cap[rank]
        best: tuple[Shard, int, int] | None = None               # shard, server, index into pieces
        for index in range(len(pieces) - 1, max(len(pieces) - 1 - _PIECES_TRIED, -1), -1):
            piece = pieces[index][2]
            for server in self._candidates(rank, piece.document, need):
                room = self.cap[server] - self.load[server]
                held = self.held.get((piece.document, server), 0)
                shard = cheapest_shard(piece, need, room, held, self.q_bytes, self.kv_bytes, self.measure)
                if shard and (best is None or shard.work * best[0].num_bytes > best[0].work * shard.num_bytes):
                    best = shard, server, index
        if best is None:
            self.limit = f"rank {rank} is {need / self.cap[rank]:.2%} over its share"
            return False
        shard, server, index = best
        _, slice_index, piece = pieces.pop(index)
        self.moved.setdefault(slice_index, []).append((shard.start, shard.stop, server))
        self.load[rank] -= self.measure(piece.stop - piece.start, piece.stop)
        for start, stop in ((piece.start, shard.start), (shard.stop, piece.stop)):
            if start < stop:
                self.load[rank] += self.measure(stop - start, stop)
                insort(pieces, (stop, slice_index, piece._replace(start=start, stop=stop)))
        self._serve(server, piece.document, shard)
        return True

    def _candidates(self, rank: int, document: int, need: float) -> list[int]:
        """Servers that hold the document's keys, and the emptiest server, or the tightest that takes all of `need`."""
        at = min(bisect_left(self.rooms, (need, -1)), len(self.rooms) - 1)
        fresh = [self.rooms[at][1]] if self.rooms else []
        return fresh + [s for s in self.open.get(document, ()) if s not in fresh]

    def _serve(self, server: int, document: int, shard: Shard) -> None:
        before = (self.cap[server] - self.load[server], server)
        self.load[server] += shard.work
        del self.rooms[bisect_left(self.rooms, before)]
        room = self.cap[server] - self.load[server]
        self.held[document, server] = max(self.held.get((document, server), 0), shard.stop)
        holders = self.open.setdefault(document, [])
        if room > 0:
            insort(self.rooms, (room, server))
            if server not in holders:
                holders.append(server)
        elif server in holders:
            holders.remove(server)

    def tasks(self, home: TaskTable) -> TaskTable:
        """The home tasks with every moved slice replaced by its shards."""
        kept = np.ones(len(home), dtype=bool)
        kept[list(self.moved)] = False
        rows: list[tuple[int, int, int, int]] = []               # slice, start, stop, server
        for index, shards in self.moved.items():
            at, rank = int(self.layout.start[index]), int(self.layout.rank[index])
            for start, stop, server in sorted(shards):
                if at < start:
                    rows.append((index, at, start, rank))
                rows.append((index, start, stop, server))
                at = stop
            if at < self.layout.stop[index]:
                rows.append((index, at, int(self.layout.stop[index]), rank))
        index, start, stop, server = np.array(rows, dtype=np.int64).reshape(-1, 4).T
        return TaskTable(
            document=np.concatenate([home.document[kept], home.document[index]]),
            q_start=np.concatenate([home.q_start[kept], start]),
            q_stop=np.concatenate([home.q_stop[kept], stop]),
            kv_start=np.zeros(int(kept.sum()) + len(index)),
            kv_stop=np.concatenate([home.kv_stop[kept], stop]),
            home=np.concatenate([home.home[kept], home.home[index]]),
            server=np.concatenate([home.server[kept], server]),
        )
