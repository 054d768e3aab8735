"""Balance attention across servers by moving query shards.

Attention cost is quadratic in document length, so equal tokens are unequal work. Only the largest load costs time,
hence the tolerance is room to save bytes: servers over the cap shed just what is over, into the servers with the most
room, in as few and as large shards as possible, because a shard's bytes grow with the square root of its work.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np

from distca.cost.attention_time import AttentionTime
from distca.cost.work import pairs_of_shard
from distca.planning.plan import Plan, max_over_mean, server_work
from distca.planning.prefix_split import share_prefixes
from distca.planning.shard_cut import Piece, Prices, Shard, cheapest_shard
from distca.planning.tasks import TILE, TaskTable, tasks_at_home
from distca.spec import ModelShape
from distca.workload.layout import Layout
from distca.workload.packing import check_pool, check_tolerance

_PASSES = 6         # in seconds, until the caps fit what calls themselves take
_MORE_BYTES = 2.0   # than the plan in pairs sends, in all and from the busiest sender
_QUICKER = 0.99     # a pass that takes more than this part of the best was in vain
_PATIENCE = 2       # passes in vain in a row end the search
_LEAST_CAP = 1e-6   # of all seconds: a server that serves is never forbidden to
_PIECES_TRIED = 3  # longest pieces of a rank that compete for a move; shorter ones carry less work per byte
_SNUG = 1.02        # a server that is to take all of a surplus needs this much more room, for whole tiles
_WORTH_A_LOOK = 0.05  # a holder of keys with less room than this part of a surplus is not tried
_HOLDERS_TRIED = 2  # latest servers that already hold a document's keys


def balance(
    layout: Layout,
    model: ModelShape,
    *,
    tolerance: float = 0.05,
    speed: Sequence[float] | np.ndarray | None = None,
    tp: int = 1,
    cost: AttentionTime | None = None,
    backward: bool = False,
) -> Plan:
    """Give every query's attention to a server so that max/mean work is at most 1 + tolerance, in few bytes.

    `speed` names the pool: one relative speed per server, the layout's ranks first, dedicated servers after them;
    0 means that the rank serves nothing. Where `cost` knows seconds, forward's or `backward`'s are balanced, else
    causal pairs. Every rank that calls this with the same arguments gets the same plan.
    """
    check_tolerance(tolerance)
    pool = check_pool(speed, layout.num_ranks)
    bytes_of = model.q_token_bytes(tp) + model.out_token_bytes(tp), model.kv_token_bytes(tp)
    if cost is None:
        return _in_pairs(layout, model, tolerance, pool, tp, Prices(*bytes_of, pairs_of_shard))
    prices = Prices(*bytes_of, cache(lambda q_len, kv_len: cost.shard(q_len, max(kv_len, q_len), backward)))
    return _in_seconds(layout, model, tolerance, pool, tp, prices, cost, backward)


def _in_pairs(
    layout: Layout, model: ModelShape, tolerance: float, pool: np.ndarray, tp: int, prices: Prices
) -> Plan:
    home = tasks_at_home(layout)
    load = server_work(home, len(pool), None)
    cap = (1.0 + tolerance) * load.sum() * pool / pool.sum()
    tasks, limit = _moved(layout, home, load, cap, prices)
    plan = Plan(layout, tasks, pool, tolerance, model, tp)
    if max_over_mean(plan.work(), pool) <= 1.0 + tolerance:
        return plan
    return replace(plan, limit=limit)


def _in_seconds(
    layout: Layout, model: ModelShape, tolerance: float, pool: np.ndarray, tp: int, prices: Prices,
    cost: AttentionTime, backward: bool,
) -> Plan:
    """Seconds are not a sum over tasks: cutting changes them, and a call has a launch and a tail.

    So what a server's call took beyond its tasks is taken off its cap in the next pass. The quickest plan counts, that
    of causal pairs and attention at home among them. A pass that sends more than twice what the plan in pairs does is
    left out: attention that waits for bytes gains nothing.
    """
    home = tasks_at_home(layout)
    in_pairs = _in_pairs(layout, model, tolerance, pool, tp, prices._replace(measure=pairs_of_shard))
    load = _seconds_of_tasks(home, len(pool), cost, backward)
    best = replace(in_pairs, cost=cost, backward=backward, limit=None)
    work = best.work()
    if _slowest(load, pool) < _slowest(work, pool):              # a call takes no less than its tasks
        at_home = replace(best, tasks=home)
        best, work = min((best, work), (at_home, at_home.work()), key=lambda one: _slowest(one[1], pool))
    total, beyond, in_vain = float(load.sum()), np.zeros(len(pool)), 0
    for _ in range(_PASSES):
        if max_over_mean(work, pool) <= 1.0 + tolerance or in_vain == _PATIENCE:
            break
        cap = np.maximum((1.0 + tolerance) * total * pool / pool.sum() - beyond, _LEAST_CAP * total * (pool > 0))
        tasks, _ = _moved(layout, home, load, cap, prices)
        plan = Plan(layout, tasks, pool, tolerance, model, tp, cost, None, backward)
        taken = plan.work()
        beyond, total = taken - _seconds_of_tasks(tasks, len(pool), cost, backward), float(taken.sum())
        part = _slowest(taken, pool) / _slowest(work, pool)
        is_better = part < 1 and _sends_no_more(plan, in_pairs)
        in_vain = 0 if is_better and part <= _QUICKER else in_vain + 1
        if is_better:
            best, work = plan, taken
    if max_over_mean(work, pool) <= 1.0 + tolerance:
        return best
    server = int(np.argmax(work / np.where(pool > 0, pool, 1.0)))
    alone = float(_seconds_of_tasks(best.tasks, len(pool), cost, backward)[server])
    return replace(best, limit=f"server {server} takes {work[server]:.3g} s, of which {work[server] - alone:.2g} s are "
                               "the launch and the tail of its work, and no cut that was tried is quicker")


def _sends_no_more(plan: Plan, than: Plan) -> bool:
    mine, theirs = (one.traffic().sent_bytes(one.model, one.tp) for one in (plan, than))
    return bool(mine.sum() <= _MORE_BYTES * theirs.sum() and mine.max() <= _MORE_BYTES * theirs.max())


def _slowest(work: np.ndarray, pool: np.ndarray) -> float:
    return max_over_mean(work, pool) * float(work.sum())


def _moved(
    layout: Layout, home: TaskTable, load: np.ndarray, cap: np.ndarray, prices: Prices
) -> tuple[TaskTable, str | None]:
    """Tasks of which no server has more than its cap, and what forbids it where one has."""
    mover = _Mover(layout, load, cap, prices)
    mover.run()
    return share_prefixes(layout, mover.tasks(home), np.array(mover.load), np.array(mover.cap), prices), mover.limit


def _seconds_of_tasks(tasks: TaskTable, num_servers: int, cost: AttentionTime, backward: bool) -> np.ndarray:
    some = tasks.take(tasks.kv_stop > tasks.kv_start)
    seconds = cost.tasks(some.q_len, some.kv_len, some.kv_stop == some.q_stop, backward)
    return np.bincount(some.server, weights=seconds, minlength=num_servers)


def _keys_at_home(layout: Layout) -> list[tuple[int, int, int]]:
    """(document, rank, keys): a rank that computes a late slice at home has all keys up to that slice's end.

    One that owns a document's beginning as keys only has these.
    """
    cut = np.flatnonzero((layout.start > 0) | (layout.stop < layout.lengths[layout.document]))
    order = cut[np.lexsort((layout.stop[cut], layout.rank[cut], layout.document[cut]))]
    only, opens = layout.key_only, layout.key_only.start == 0
    last = {(document, rank): stop for document, rank, stop in zip(
        only.document[opens].tolist(), only.rank[opens].tolist(), only.stop[opens].tolist(), strict=True)}
    for document, rank, stop in zip(layout.document[order].tolist(), layout.rank[order].tolist(),
                                    layout.stop[order].tolist(), strict=True):
        last[document, rank] = stop
    return [(document, rank, stop) for (document, rank), stop in last.items()]


class _Mover:
    """The greedy's working state: loads, rooms, which pieces of which slices are still home and which have moved."""

    def __init__(self, layout: Layout, load: np.ndarray, cap: np.ndarray, prices: Prices) -> None:
        self.layout, self.prices = layout, prices
        self.additive = prices.measure is pairs_of_shard         # the parts of a piece cost what the piece does
        self.load: list[float] = load.tolist()
        self.cap: list[float] = cap.tolist()
        self.limit: str | None = None
        self.home: dict[int, list[Piece]] = {}                   # slice -> pieces that its home still computes
        self.moved: list[tuple[int, Shard, int]] = []            # slice, shard, server
        self.held: dict[tuple[int, int], tuple[int, int]] = {}   # (document, server) -> keys [start, stop) are there
        self.open: dict[int, list[int]] = {}                     # document -> servers that hold its keys, with room
        for document, server, keys in _keys_at_home(layout):
            self.held[document, server] = 0, keys
            if cap[server] > load[server]:
                self.open.setdefault(document, []).append(server)
        self.rooms = sorted((float(cap[s] - load[s]), int(s)) for s in np.flatnonzero(cap > load))
        surplus = np.flatnonzero(load > cap)
        self.order = surplus[np.argsort(load[surplus] - cap[surplus], kind="stable")[::-1]].tolist()

    def run(self) -> None:
        row = np.searchsorted(self.layout.rank, np.arange(self.layout.num_ranks + 1))
        for rank in self.order:
            pieces = self._pieces_of(range(row[rank], row[rank + 1]))
            while pieces and self.load[rank] > self.cap[rank] and self._move_one(rank, pieces):
                pass
            for _, index, piece in pieces:
                self.home.setdefault(index, []).append(piece)

    def _pieces_of(self, slices: range) -> list[tuple[int, int, Piece]]:
        """A rank's own queries as (depth, slice, piece), deepest last."""
        layout = self.layout
        part = slice(slices.start, slices.stop)
        columns = (layout.document[part].tolist(), layout.start[part].tolist(), layout.stop[part].tolist())
        return sorted((stop, index, Piece(document, start, stop, 0, start))
                      for index, document, start, stop in zip(slices, *columns, strict=True))

    def _move_one(self, rank: int, pieces: list[tuple[int, int, Piece]]) -> bool:
        """Move the shard with the most work per byte; False, with the reason kept, where none can move."""
        need = self.load[rank] - self.cap[rank]
        deepest = range(len(pieces) - 1, max(len(pieces) - 1 - _PIECES_TRIED, -1), -1)
        best = (self._best(pieces, deepest, need, self._snug_server(need), _HOLDERS_TRIED)
                or self._best(pieces, range(len(pieces)), need, self._snug_server(float("inf")), 0))
        if best is None:
            self.limit = self._why_stuck(rank, [piece for _, _, piece in pieces])
            if self.cap[rank] > 0:
                return False
            best = self._overfill(pieces)                        # a rank that serves nothing must be emptied
        shard, server, at = best
        _, index, piece = pieces[at]
        pieces.pop(at)
        self.load[rank] -= self._relief(piece, shard)
        for part in _rest(piece, shard):
            insort(pieces, (part.stop - part.key_start, index, part))
        self.moved.append((index, shard, server))
        self._serve(server, piece.document, shard)
        return True

    def _best(self, pieces: list[tuple[int, int, Piece]], tried: range, need: float, server: int | None,
              num_holders: int) -> tuple[Shard, int, int] | None:
        """(shard, server, index into pieces) over the pieces tried, for one server and those that hold their keys."""
        best: tuple[Shard, int, int] | None = None
        for at in tried:
            piece = pieces[at][2]
            holders = self.open.get(piece.document, [])[-num_holders:] if num_holders else []
            for candidate in [*holders, *([server] if server is not None and server not in holders else [])]:
                room = self.cap[candidate] - self.load[candidate]
                begin, end = self.held.get((piece.document, candidate), (0, 0))
                if candidate != server and room < _WORTH_A_LOOK * need:
                    continue
                shard = cheapest_shard(piece, need, room, end if begin <= piece.key_start else 0, self.prices)
                if shard is None or not (self.additive or self._relief(piece, shard) > 0):
                    continue                                     # what stays would cost as much as the whole did
                if shard.beats(best[0] if best else None):
                    best = shard, candidate, at
            if best is not None and best[0].key_stop < best[0].stop:
                break                                            # a rectangle: no other piece can do better
        return best

    def _relief(self, piece: Piece, shard: Shard) -> float:
        """By how much the home's load falls when the shard leaves."""
        return piece.work(self.prices.measure) - sum(part.work(self.prices.measure) for part in _rest(piece, shard))

    def _overfill(self, pieces: list[tuple[int, int, Piece]]) -> tuple[Shard, int, int]:
        """A whole piece to the server that it takes the least far above its cap."""
        piece = pieces[-1][2]
        work = piece.work(self.prices.measure)
        serving = [server for server, cap in enumerate(self.cap) if cap > 0]
        server = min(serving, key=lambda s: (self.load[s] + work) / self.cap[s])
        return Shard(piece.start, piece.stop, piece.key_start, piece.stop, work, 0.0), server, len(pieces) - 1

    def _snug_server(self, need: float) -> int | None:
        """The server with the least room that takes all of `need`, or else the one with the most room."""
        if not self.rooms:
            return None
        return self.rooms[min(bisect_left(self.rooms, (need * _SNUG, -1)), len(self.rooms) - 1)][1]

    def _why_stuck(self, rank: int, pieces: list[Piece]) -> str:
        over = self.load[rank] - self.cap[rank]
        room = self.rooms[-1][0] if self.rooms else 0.0
        first = min((piece._replace(stop=min(piece.start + TILE, piece.stop)) for piece in pieces),
                    key=lambda piece: piece.work(self.prices.measure))
        return (f"rank {rank} keeps {over:.4g} more work than its cap of {self.cap[rank]:.4g}: its smallest piece, "
                f"queries [{first.start}, {first.stop}) of document {first.document}, carries "
                f"{first.work(self.prices.measure):.4g} and the most room on any server is {room:.4g}")

    def _serve(self, server: int, document: int, shard: Shard) -> None:
        entry = self.cap[server] - self.load[server], server
        at = bisect_left(self.rooms, entry)
        if self.rooms[at:at + 1] == [entry]:
            del self.rooms[at]
        self.load[server] += shard.work
        room = self.cap[server] - self.load[server]
        begin, end = self.held.get((document, server), (shard.key_start, shard.key_stop))
        if begin <= shard.key_start <= end:
            self.held[document, server] = begin, max(end, shard.key_stop)
        holders = self.open.setdefault(document, [])
        if room > 0:
            insort(self.rooms, (room, server))
            if server not in holders:
                holders.append(server)
        elif server in holders:
            holders.remove(server)

    def tasks(self, home: TaskTable) -> TaskTable:
        """The home tasks with every slice that was cut replaced by what stayed and what moved."""
        kept = np.ones(len(home), dtype=bool)
        kept[[index for index, _, _ in self.moved]] = False
        rows = [(index, piece.start, piece.stop, piece.key_start, piece.stop, int(self.layout.rank[index]))
                for index, pieces in self.home.items() if not kept[index] for piece in pieces]
        rows += [(index, shard.start, shard.stop, shard.key_start, shard.key_stop, server)
                 for index, shard, server in self.moved]
        index, start, stop, key_start, key_stop, server = np.array(rows, dtype=np.int64).reshape(-1, 6).T
        return TaskTable(
            document=np.concatenate([home.document[kept], home.document[index]]),
            q_start=np.concatenate([home.q_start[kept], start]),
            q_stop=np.concatenate([home.q_stop[kept], stop]),
            kv_start=np.concatenate([home.kv_start[kept], key_start]),
            kv_stop=np.concatenate([home.kv_stop[kept], key_stop]),
            home=np.concatenate([home.home[kept], home.home[index]]),
            server=np.concatenate([home.server[kept], server]),
        )


def _rest(piece: Piece, shard: Shard) -> list[Piece]:
    """What a piece keeps when a shard leaves: queries before, queries after, and the shard's own later keys."""
    rest = []
    if piece.start < shard.start:
        rest.append(piece._replace(stop=shard.start))
    if shard.stop < piece.stop:
        rest.append(piece._replace(start=shard.stop))
    if shard.key_stop < shard.stop:
        rest.append(piece._replace(start=shard.start, stop=shard.stop, key_start=shard.key_stop))
    return rest
