"""Move query shards from units over their cap to units with room: the greedy of one level.

A unit is a rank, or a node whose ranks share what it gets. Units over the cap shed just what is over, into the units
with the most room, in as few and as large shards as possible, because a shard's bytes grow with the square root of its
work. A unit whose cap is 0 must be emptied: a rank that serves nothing, or all that a node got from outside.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence

import numpy as np

from distca.columns import added
from distca.cost.work import pairs_of_shard
from distca.planning.shard_cut import Piece, Prices, Shard, cheapest_shard
from distca.planning.tasks import TILE, TaskTable
from distca.workload.layout import Layout

Held = tuple[int, int, int]  # document, unit, keys: the unit has the document's first keys for tasks of its own

_PIECES_TRIED = 3  # longest pieces of a unit that compete for a move; shorter ones carry less work per byte
_SNUG = 1.02        # a server that is to take all of a surplus needs this much more room, for whole tiles
_WORTH_A_LOOK = 0.05  # a holder of keys with less room than this part of a surplus is not tried
_HOLDERS_TRIED = 2  # latest servers that already hold a document's keys
_TAIL = 0.75  # of a document's work is in its second half, which carries a quarter more of it per byte than the whole
_HEAD_AND_TAIL = 4 * TILE  # queries; what is shorter leaves whole


def keys_at_home(layout: Layout) -> list[Held]:
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


class Mover:
    """The greedy's working state: loads, rooms, which pieces of which rows are still there and which have moved.

    `rows` are tasks whose `server` is the unit that has them now, of `load` per unit in all. `numbers` are the units'
    for people, without one for what has to come in from outside.
    """

    def __init__(
        self, rows: TaskTable, load: np.ndarray, cap: np.ndarray, held: Iterable[Held], prices: Prices,
        unit_name: str = "rank", numbers: Sequence[int] | None = None,
    ) -> None:
        self.rows, self.prices = rows, prices
        self.unit_name, self.numbers = unit_name, range(len(cap)) if numbers is None else numbers
        self.by_levels = numbers is not None
        self.additive = prices.measure is pairs_of_shard         # the parts of a piece cost what the piece does
        self.load: list[float] = load.tolist()
        self.cap: list[float] = cap.tolist()
        self.limit: str | None = None
        self.stayed: dict[int, list[Piece]] = {}                 # row -> pieces that its unit still computes
        self.moved: list[tuple[int, Shard, int]] = []            # row, shard, server
        self.held: dict[tuple[int, int], tuple[int, int]] = {}   # (document, server) -> keys [start, stop) are there
        self.open: dict[int, list[int]] = {}                     # document -> servers that hold its keys, with room
        for document, server, keys in held:
            self.held[document, server] = 0, keys
            if cap[server] > load[server]:
                self.open.setdefault(document, []).append(server)
        self.rooms = sorted((float(cap[s] - load[s]), int(s)) for s in np.flatnonzero(cap > load))
        surplus = np.flatnonzero(load > cap)
        self.order = surplus[np.argsort(load[surplus] - cap[surplus], kind="stable")[::-1]].tolist()

    def run(self) -> None:
        order = np.argsort(self.rows.server, kind="stable")
        begin = np.searchsorted(self.rows.server[order], np.arange(len(self.cap) + 1))
        for unit in self.order:
            pieces = self._pieces_of(order[begin[unit]:begin[unit + 1]])
            while pieces and self._sheds(unit) and self._move_one(unit, pieces):
                pass
            for _, index, piece in pieces:
                self.stayed.setdefault(index, []).append(piece)

    def _sheds(self, unit: int) -> bool:
        return self.load[unit] > self.cap[unit] or self._must_empty(unit)

    def _must_empty(self, unit: int) -> bool:
        """Whatever rounding left of its load: nobody may come back for the rest."""
        return self.by_levels and self.cap[unit] <= 0

    def _pieces_of(self, rows: np.ndarray) -> list[tuple[int, int, Piece]]:
        """A unit's own queries as (depth, row, piece), deepest last."""
        table = self.rows
        columns = (column[rows].tolist() for column in (
            table.document, table.q_start, table.q_stop, table.kv_start, table.kv_stop))
        return sorted((kv_stop - kv_start, index, Piece(document, start, stop, kv_start, start,
                                                        None if kv_stop == stop else kv_stop))
                      for index, document, start, stop, kv_start, kv_stop in zip(rows.tolist(), *columns, strict=True)
                      if kv_stop > kv_start)

    def _move_one(self, rank: int, pieces: list[tuple[int, int, Piece]]) -> bool:
        """Move the shard with the most work per byte; False, with the reason kept, where none can move."""
        need = self.load[rank] - self.cap[rank]
        deepest = range(len(pieces) - 1, max(len(pieces) - 1 - _PIECES_TRIED, -1), -1)
        if self._must_empty(rank):                               # the largest piece first, whole where it fits
            works = [piece.work(self.prices.measure) for _, _, piece in pieces]
            need = max(works)
            deepest = range(works.index(need), works.index(need) + 1)
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
            insort(pieces, (part.key_end - part.key_start, index, part))
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
                shard = self._shard(piece, need, room, end if begin <= piece.key_start else 0)
                if shard is None or not (self.additive or self._relief(piece, shard) > 0):
                    continue                                     # what stays would cost as much as the whole did
                if shard.beats(best[0] if best else None):
                    best = shard, candidate, at
            if best is not None and best[0].key_stop < best[0].stop:
                break                                            # a rectangle: no other piece can do better
        return best

    def _shard(self, piece: Piece, need: float, room: float, keys_held: int) -> Shard | None:
        """What leaves a piece at the most work per byte.

        From a node whole documents could leave; then the tails of several are better than one with its head.
        """
        shard = cheapest_shard(piece, need, room, keys_held, self.prices)
        if (not self.by_levels or shard is None or piece.key_stop is not None
                or shard.stop - shard.start < max(piece.stop - piece.start, _HEAD_AND_TAIL)):
            return shard
        tail = cheapest_shard(piece, _TAIL * shard.work, room, keys_held, self.prices)
        return tail if tail is not None and tail.beats(shard) else shard

    def _relief(self, piece: Piece, shard: Shard) -> float:
        """By how much the home's load falls when the shard leaves."""
        return piece.work(self.prices.measure) - added(part.work(self.prices.measure) for part in _rest(piece, shard))

    def _overfill(self, pieces: list[tuple[int, int, Piece]]) -> tuple[Shard, int, int]:
        """A whole piece to the server that it takes the least far above its cap."""
        piece = pieces[-1][2]
        work = piece.work(self.prices.measure)
        serving = [server for server, cap in enumerate(self.cap) if cap > 0]
        server = min(serving, key=lambda s: (self.load[s] + work) / self.cap[s])
        return Shard(piece.start, piece.stop, piece.key_start, piece.key_end, work, 0.0), server, len(pieces) - 1

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
        who = f"{self.unit_name} {self.numbers[rank]}" if rank < len(self.numbers) else "what came in from outside"
        return (f"{who} keeps {over:.4g} more work than its cap of {self.cap[rank]:.4g}: its smallest piece, "
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

    def tasks(self) -> TaskTable:
        """The rows with every one that was cut replaced by what stayed and what moved."""
        table = self.rows
        kept = np.ones(len(table), dtype=bool)
        kept[[index for index, _, _ in self.moved]] = False
        rows = [(index, piece.start, piece.stop, piece.key_start, piece.key_end, int(table.server[index]))
                for index, pieces in self.stayed.items() if not kept[index] for piece in pieces]
        rows += [(index, shard.start, shard.stop, shard.key_start, shard.key_stop, server)
                 for index, shard, server in self.moved]
        index, start, stop, key_start, key_stop, server = np.array(rows, dtype=np.int64).reshape(-1, 6).T
        return TaskTable(
            document=np.concatenate([table.document[kept], table.document[index]]),
            q_start=np.concatenate([table.q_start[kept], start]),
            q_stop=np.concatenate([table.q_stop[kept], stop]),
            kv_start=np.concatenate([table.kv_start[kept], key_start]),
            kv_stop=np.concatenate([table.kv_stop[kept], key_stop]),
            home=np.concatenate([table.home[kept], table.home[index]]),
            server=np.concatenate([table.server[kept], server]),
        )


def _rest(piece: Piece, shard: Shard) -> list[Piece]:
    """What a piece keeps when a shard leaves: queries before, queries after, and the shard's own later keys."""
    rest = []
    if piece.start < shard.start:
        rest.append(piece._replace(stop=shard.start))
    if shard.stop < piece.stop:
        rest.append(piece._replace(start=shard.stop))
    if shard.key_stop < (shard.stop if piece.key_stop is None else piece.key_stop):
        rest.append(piece._replace(start=shard.start, stop=shard.stop, key_start=shard.key_stop))
    return rest
