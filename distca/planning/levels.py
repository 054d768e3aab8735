"""Move query shards from units over their cap to units with room, level by level of the pool.

A unit is a rank, or a node or pod as a whole. Units over the cap move only their surplus, to the units with the most
room, in as few and as large shards as possible, because a shard's bytes grow with the square root of its work. A unit
with cap 0 is emptied: a rank that serves nothing, or the tasks that entered a node from outside. An outer level uses
only part of the tolerance, so that a full node can still be balanced inside in whole tiles.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from distca.columns import added
from distca.cost.work import pairs_of_shard
from distca.planning.shard_cut import Piece, Prices, Shard, cheapest_shard
from distca.planning.tasks import TILE, TaskTable, joined
from distca.workload.layout import Layout

Held = tuple[int, int, int]  # document, unit, keys: the unit already holds this many of the document's first keys
Dealt = tuple[TaskTable, np.ndarray, str | None]  # tasks, load [servers], and the reason if a server is above its cap

_PIECES_TRIED = 3  # longest pieces of a unit that compete for a move; shorter ones carry less work per byte
_SNUG = 1.02  # a server must have this much more room than the surplus it takes, as tiles are whole
_WORTH_A_LOOK = 0.05  # servers that hold the keys are skipped if their room is below this part of the surplus
_HOLDERS_TRIED = 2  # most recent servers that already hold a document's keys
_TAIL = 0.75  # share of a document's work in its second half, which carries 25 % more work per byte than the whole
_HEAD_AND_TAIL = 4 * TILE  # queries; shorter pieces move whole
_UNIT_NAMES = ("rank", "pod", "node")  # indexed by depth minus number of levels: 0, -2, -1
_NEARLY = 1.005  # over their cap by less than this, servers shed only inside their node
_SLACK = 0.4  # part of the tolerance that an outer level leaves to the next inner one


def keys_at_home(layout: Layout) -> list[Held]:
    """List (document, rank, keys): a rank that computes a slice at home holds all keys up to the slice's end.

    A rank that owns the beginning of a document as keys only holds those keys.
    """
    cut = np.flatnonzero((layout.start > 0) | (layout.stop < layout.lengths[layout.document]))
    order = cut[np.lexsort((layout.stop[cut], layout.rank[cut], layout.document[cut]))]
    last: dict[tuple[int, int], int] = {}
    for slices, some in ((layout.key_only, np.flatnonzero(layout.key_only.start == 0)), (layout, order)):
        last.update(zip(zip(slices.document[some].tolist(), slices.rank[some].tolist(), strict=True),
                        slices.stop[some].tolist(), strict=True))
    return [(*key, stop) for key, stop in last.items()]


class Mover:
    """Greedy balancing of one level: the units' loads and room, and the pieces of tasks that stayed or moved.

    The `server` of `tasks` is their current unit, and `load` is the total of each unit. Messages name units by
    `numbers`; an additional last unit, without a number, holds the tasks from outside.
    """

    def __init__(
        self, tasks: TaskTable, load: np.ndarray, cap: np.ndarray, held: Iterable[Held], prices: Prices,
        unit_name: str = "rank", numbers: Sequence[int] | None = None,
    ) -> None:
        self.tasks, self.prices = tasks, prices
        self.unit_name, self.numbers = unit_name, range(len(cap)) if numbers is None else numbers
        self.by_levels = numbers is not None
        self.additive = prices.measure is pairs_of_shard         # the work of a piece is the sum of its parts
        self.load: list[float] = load.tolist()
        self.cap: list[float] = cap.tolist()
        self.limit: str | None = None
        self.stayed: dict[int, list[Piece]] = {}                 # task -> pieces that its unit keeps
        self.moved: list[tuple[int, Shard, int]] = []            # task, shard, server
        self.held: dict[tuple[int, int], tuple[int, int]] = {}   # (document, server) -> keys [start, stop) it holds
        self.open: dict[int, list[int]] = {}                     # document -> servers with room that hold its keys
        for document, server, keys in held:
            self.held[document, server] = 0, keys
            if cap[server] > load[server]:
                self.open.setdefault(document, []).append(server)
        self.rooms = sorted((float(cap[s] - load[s]), int(s)) for s in np.flatnonzero(cap > load))
        surplus = np.flatnonzero(load > cap)
        self.order = surplus[np.argsort(load[surplus] - cap[surplus], kind="stable")[::-1]].tolist()

    def run(self) -> Dealt:
        of_unit = _grouped(self.tasks.server, len(self.cap))
        for unit in self.order:
            pieces = self._pieces_of(of_unit[unit])
            while pieces and (self.load[unit] > self.cap[unit] or self._must_empty(unit)):
                if not self._move_one(unit, pieces):
                    break
            for _, index, piece in pieces:
                self.stayed.setdefault(index, []).append(piece)
        return self._moved_tasks(), np.array(self.load), self.limit

    def _must_empty(self, unit: int) -> bool:
        """Units with a cap of zero are emptied completely, even if rounding leaves a residual load."""
        return self.by_levels and self.cap[unit] <= 0

    def _pieces_of(self, some: np.ndarray) -> list[tuple[int, int, Piece]]:
        """Return a unit's pieces as (number of keys, task, piece), most keys last."""
        columns = (column[some].tolist() for column in (
            self.tasks.document, self.tasks.q_start, self.tasks.q_stop, self.tasks.kv_start, self.tasks.kv_stop))
        return sorted((kv_stop - kv_start, index, Piece(document, start, stop, kv_start, start,
                                                        None if kv_stop == stop else kv_stop))
                      for index, document, start, stop, kv_start, kv_stop in zip(some.tolist(), *columns, strict=True)
                      if kv_stop > kv_start)

    def _move_one(self, rank: int, pieces: list[tuple[int, int, Piece]]) -> bool:
        """Move the shard with the most work per byte; if none can move, record the reason and return False."""
        need = self.load[rank] - self.cap[rank]
        deepest = range(len(pieces) - 1, max(len(pieces) - 1 - _PIECES_TRIED, -1), -1)
        if self._must_empty(rank):                               # the largest piece first, whole if it fits
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
        """Return the best (shard, server, index into pieces) over `server` and the servers that hold a piece's keys."""
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
                    continue                                     # the remainder would take as long as the whole
                if shard.beats(best[0] if best else None):
                    best = shard, candidate, at
            if best is not None and best[0].key_stop < best[0].stop:
                break                                            # a rectangle: no other piece can do better
        return best

    def _shard(self, piece: Piece, need: float, room: float, keys_held: int) -> Shard | None:
        """Return the shard of a piece with the most work per byte.

        If a node would send a whole document, sending the tails of several documents costs fewer bytes.
        """
        shard = cheapest_shard(piece, need, room, keys_held, self.prices)
        if (not self.by_levels or shard is None or piece.key_stop is not None
                or shard.stop - shard.start < max(piece.stop - piece.start, _HEAD_AND_TAIL)):
            return shard
        tail = cheapest_shard(piece, _TAIL * shard.work, room, keys_held, self.prices)
        return tail if tail is not None and tail.beats(shard) else shard

    def _relief(self, piece: Piece, shard: Shard) -> float:
        """Return how much the unit's load falls if the shard moves."""
        return piece.work(self.prices.measure) - added(part.work(self.prices.measure) for part in _rest(piece, shard))

    def _overfill(self, pieces: list[tuple[int, int, Piece]]) -> tuple[Shard, int, int]:
        """Return a whole piece and the server whose load over cap is then the least."""
        piece = pieces[-1][2]
        work = piece.work(self.prices.measure)
        serving = [server for server, cap in enumerate(self.cap) if cap > 0]
        server = min(serving, key=lambda s: (self.load[s] + work) / self.cap[s])
        return Shard(piece.start, piece.stop, piece.key_start, piece.key_end, work, 0.0), server, len(pieces) - 1

    def _snug_server(self, need: float) -> int | None:
        """Return the server with the least room that fits `need`, or else the server with the most room."""
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

    def _moved_tasks(self) -> TaskTable:
        """Return the tasks, with cut ones replaced by the parts that stayed and moved."""
        kept = np.ones(len(self.tasks), dtype=bool)
        kept[[index for index, _, _ in self.moved]] = False
        parts = [(index, piece.start, piece.stop, piece.key_start, piece.key_end, int(self.tasks.server[index]))
                 for index, pieces in self.stayed.items() if not kept[index] for piece in pieces]
        parts += [(index, shard.start, shard.stop, shard.key_start, shard.key_stop, server)
                  for index, shard, server in self.moved]
        index, start, stop, key_start, key_stop, server = np.array(parts, dtype=np.int64).reshape(-1, 6).T
        return joined(self.tasks.take(kept), TaskTable(
            self.tasks.document[index], start, stop, key_start, key_stop, self.tasks.home[index], server))


def _rest(piece: Piece, shard: Shard) -> list[Piece]:
    """Return the rest of a piece without a shard: queries before and after it, and later keys of its queries."""
    rest = []
    if piece.start < shard.start:
        rest.append(piece._replace(stop=shard.start))
    if shard.stop < piece.stop:
        rest.append(piece._replace(start=shard.stop))
    if shard.key_stop < (shard.stop if piece.key_stop is None else piece.key_stop):
        rest.append(piece._replace(start=shard.start, stop=shard.stop, key_start=shard.key_stop))
    return rest


def shed(
    tasks: TaskTable, load: np.ndarray, cap: np.ndarray, prices: Prices, node: np.ndarray | None
) -> TaskTable:
    """Move the surplus of servers over their cap to servers of the same node, then to any; all other tasks stay.

    `load` may exceed the work of a server's tasks, for example by the launch and the tail of its kernel call.
    """
    if node is not None:
        full = np.unique(node[load > cap])
        tables, load = [tasks.take(~np.isin(node[tasks.server], full))], load.copy()
        for one in full.tolist():
            members = np.flatnonzero(node == one)
            mine = tasks.take(node[tasks.server] == one)
            mine = replace(mine, server=np.searchsorted(members, mine.server))
            moved, load[members], _ = Mover(mine, load[members], cap[members], _keys_served(mine), prices).run()
            tables.append(replace(moved, server=members[moved.server]))
        tasks = joined(*tables)
    if (load > _NEARLY * cap).any():
        tasks, _, _ = Mover(tasks, load, cap, _keys_served(tasks), prices).run()
    return tasks


def _keys_served(tasks: TaskTable) -> list[Held]:
    """List (document, server, keys): the first keys of documents that servers have received or own."""
    first = np.flatnonzero(tasks.kv_start == 0)
    return _most_keys(tasks.document[first], tasks.server[first], tasks.kv_stop[first])


def _most_keys(document: np.ndarray, unit: np.ndarray, keys: np.ndarray) -> list[Held]:
    """List the largest number of keys for each document and unit."""
    most: dict[tuple[int, int], int] = {}
    for one, where, stop in zip(document.tolist(), unit.tolist(), keys.tolist(), strict=True):
        most[one, where] = max(stop, most.get((one, where), 0))
    return [(*key, stop) for key, stop in most.items()]


class Dealer:
    """Assign tasks to servers from the outermost level of a pool inwards: pods, then nodes, then ranks.

    Each node first sheds its surplus as if it were one rank; all tasks of a node are then balanced inside it, where
    links are fast. `levels` are the group of each server [servers], outermost level first. With `is_outline` the
    assignment stops at nodes: the first rank of a node gets all of the node's tasks.
    """

    def __init__(
        self, layout: Layout, levels: tuple[np.ndarray, ...], cap: np.ndarray, tolerance: float, prices: Prices,
        task_work: Callable[[TaskTable], np.ndarray], *, is_outline: bool = False,
    ) -> None:
        self.levels, self.cap, self.prices, self.task_work, self.is_outline = levels, cap, prices, task_work, is_outline
        self.outer_part = (1.0 + (1.0 - _SLACK) * tolerance) / (1.0 + tolerance)
        self.held = np.array(keys_at_home(layout), dtype=np.int64).reshape(-1, 3)
        self.unit_of = np.empty(len(cap), dtype=np.int64)        # [servers] scratch: every `_inside` writes it first
        self.limits: list[str] = []

    def deal(self, home: TaskTable) -> Dealt:
        """Return all tasks of `home` with their servers, cut where balancing a level requires it."""
        tasks = joined(*self._inside(home, np.arange(len(self.cap)), 0, self.held))
        load = np.bincount(tasks.server, weights=self.task_work(tasks), minlength=len(self.cap))
        return tasks, load, self.limits[0] if self.limits else None

    def _inside(self, tasks: TaskTable, members: np.ndarray, depth: int, held: np.ndarray) -> Iterator[TaskTable]:
        """Assign tasks to `members`, which hold the keys `held`; tasks start at their home, or outside."""
        is_leaf = depth == len(self.levels)
        if is_leaf and self.is_outline:
            yield replace(tasks, server=np.full(len(tasks), members[0]))
            return
        names, unit = (members, np.arange(len(members))) if is_leaf else np.unique(
            self.levels[depth][members], return_inverse=True)
        if len(names) == 1 and not is_leaf:
            yield from self._inside(tasks, members, depth + 1, held)
            return
        self.unit_of[tasks.home] = len(names)                    # the last unit: outside
        self.unit_of[members] = unit
        tasks = self._one_level(replace(tasks, server=self.unit_of[tasks.home]),
                                np.bincount(unit, weights=self.cap[members]), names, depth, held)
        if is_leaf:
            yield replace(tasks, server=names[tasks.server])
            return
        by_unit = (_grouped(column, len(names)) for column in (tasks.server, unit, self.unit_of[held[:, 1]]))
        for mine, here, keys in zip(*by_unit, strict=True):
            yield from self._inside(tasks.take(mine), members[here], depth + 1, held[keys])

    def _one_level(
        self, tasks: TaskTable, cap: np.ndarray, names: np.ndarray, depth: int, held: np.ndarray
    ) -> TaskTable:
        """Move tasks, whose `server` is their unit, until no unit is over its cap and no task is outside."""
        load = np.bincount(tasks.server, weights=self.task_work(tasks), minlength=len(names) + 1)
        cap = np.append((1.0 if depth == len(self.levels) else self.outer_part) * cap, 0.0)  # nothing stays outside
        if not (load > cap).any():
            return tasks
        keys = _most_keys(held[:, 0], self.unit_of[held[:, 1]], held[:, 2])  # of any rank of the unit
        moved, _, limit = Mover(tasks, load, cap, keys, self.prices, _UNIT_NAMES[depth - len(self.levels)],
                                names.tolist()).run()
        self.limits += [] if limit is None else [limit]
        return moved


def _grouped(group: np.ndarray, number: int) -> list[np.ndarray]:
    """Return the indices of each group's entries, for groups 0 to number - 1."""
    order = np.argsort(group, kind="stable")
    begin = np.searchsorted(group[order], np.arange(number)).tolist()
    return [order[first:last] for first, last in pairwise([*begin, len(order)])]
