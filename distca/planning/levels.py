"""Deal work to the levels of a pool from the outside in: pods, then nodes, then ranks.

Attention over the outer level's cap leaves its node in as few and as large shards as if the node were one rank; what
a node keeps and what it gets are then levelled inside it, where links are fast. The outer level stops a little below
the tolerance, so that a full node's ranks can still be level within whole tiles.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from distca.planning.mover import Held, Mover, keys_at_home
from distca.planning.shard_cut import Prices
from distca.planning.tasks import TaskTable
from distca.workload.layout import Layout

_UNIT_NAMES = ("rank", "pod", "node")  # by levels above the ranks, counted from the end
_SLACK = 0.4  # part of the tolerance that an outer level leaves to the one inside it


@dataclass(frozen=True, slots=True)
class Dealt:
    """Tasks with their servers, the load that gives each, and which piece keeps one above its cap."""

    tasks: TaskTable
    load: np.ndarray  # [servers]
    limit: str | None


@dataclass(frozen=True, slots=True, eq=False)
class Dealer:
    """What every level needs: caps of ranks, prices, how much work rows are, and who has which keys for itself."""

    layout: Layout
    levels: tuple[np.ndarray, ...]                # [servers] each, outermost first
    cap: np.ndarray                               # [servers]
    tolerance: float
    prices: Prices
    row_work: Callable[[TaskTable], np.ndarray]   # [tasks]
    is_outline: bool = False                      # stop at nodes: the first rank of each has all that its node gets

    def deal(self, home: TaskTable) -> Dealt:
        """Every task of `home`, cut where a level demands it, on a server."""
        limits: list[str] = []
        held = np.array(keys_at_home(self.layout), dtype=np.int64).reshape(-1, 3)
        parts = self._inside(home, np.arange(len(self.cap)), 0, held, limits)
        tasks = TaskTable(*(np.concatenate([getattr(part, name) for part in parts]) for name in TaskTable.__slots__))
        load = np.bincount(tasks.server, weights=self.row_work(tasks), minlength=len(self.cap))
        return Dealt(tasks, load, limits[0] if limits else None)

    def _inside(
        self, rows: TaskTable, members: np.ndarray, depth: int, held: np.ndarray, limits: list[str]
    ) -> list[TaskTable]:
        """`rows` over `members`: each starts where its queries live, or outside and must come in."""
        is_leaf = depth == len(self.levels)
        if is_leaf and self.is_outline:
            return [replace(rows, server=np.full(len(rows), members[0]))]
        names, unit = (members, np.arange(len(members))) if is_leaf else np.unique(
            self.levels[depth][members], return_inverse=True)
        if len(names) == 1 and not is_leaf:
            return self._inside(rows, members, depth + 1, held, limits)
        unit_of = np.full(len(self.cap), len(names))             # the last unit is outside
        unit_of[members] = unit
        held = held[unit_of[held[:, 1]] < len(names)]
        rows = self._one_level(rows, unit_of, names, depth, held, limits)
        if is_leaf:
            return [replace(rows, server=names[rows.server])]
        order = np.argsort(rows.server, kind="stable")
        begin = np.searchsorted(rows.server[order], np.arange(len(names) + 1))
        parts: list[TaskTable] = []
        for number in range(len(names)):
            mine = rows.take(order[begin[number]:begin[number + 1]])
            parts += self._inside(mine, members[unit == number], depth + 1, held, limits)
        return parts

    def _one_level(
        self, rows: TaskTable, unit_of: np.ndarray, names: np.ndarray, depth: int, held: np.ndarray, limits: list[str]
    ) -> TaskTable:
        """The rows with their unit as `server`; none outside."""
        is_leaf = depth == len(self.levels)
        rows = replace(rows, server=unit_of[rows.home])
        load = np.bincount(rows.server, weights=self.row_work(rows), minlength=len(names) + 1)
        part = 1.0 if is_leaf else (1.0 + (1.0 - _SLACK) * self.tolerance) / (1.0 + self.tolerance)
        cap = part * np.bincount(unit_of, weights=self.cap, minlength=len(names) + 1)
        cap[-1] = 0.0                                            # nothing stays outside
        if not (load > cap).any():
            return rows
        mover = Mover(rows, load, cap, _held_by_unit(held, unit_of), self.prices,
                      _UNIT_NAMES[depth - len(self.levels)], names.tolist())
        mover.run()
        if mover.limit is not None:
            limits.append(mover.limit)
        return mover.tasks()


def _held_by_unit(held: np.ndarray, unit_of: np.ndarray) -> list[Held]:
    """The most keys of each document that any rank of a unit holds."""
    keys: dict[tuple[int, int], int] = {}
    for document, unit, stop in zip(held[:, 0].tolist(), unit_of[held[:, 1]].tolist(), held[:, 2].tolist(),
                                    strict=True):
        keys[document, unit] = max(stop, keys.get((document, unit), 0))
    return [(document, unit, stop) for (document, unit), stop in keys.items()]
