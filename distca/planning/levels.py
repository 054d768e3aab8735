"""Deal work to the levels of a pool from the outside in: pods, then nodes, then ranks.

Attention over the outer level's cap leaves its node in as few and as large shards as if the node were one rank; what
a node keeps and what it gets are then levelled inside it, where links are fast. The outer level stops a little below
the tolerance, so that a full node's ranks can still be level within whole tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
        unit_of = np.empty(len(self.cap), dtype=np.int64)
        parts = list(self._inside(home, np.arange(len(self.cap)), 0, held, unit_of, limits))
        tasks = TaskTable(*(np.concatenate([getattr(part, name) for part in parts]) for name in TaskTable.__slots__))
        load = np.bincount(tasks.server, weights=self.row_work(tasks), minlength=len(self.cap))
        return Dealt(tasks, load, limits[0] if limits else None)

    def _inside(
        self, rows: TaskTable, members: np.ndarray, depth: int, held: np.ndarray, unit_of: np.ndarray,
        limits: list[str],
    ) -> Iterator[TaskTable]:
        """`rows` over `members`: each starts where its queries live, or outside and must come in.

        `held` are the keys of members. `unit_of` [servers] is written anew by every call, before it is read.
        """
        is_leaf = depth == len(self.levels)
        if is_leaf and self.is_outline:
            yield replace(rows, server=np.full(len(rows), members[0]))
            return
        names, unit = (members, np.arange(len(members))) if is_leaf else np.unique(
            self.levels[depth][members], return_inverse=True)
        if len(names) == 1 and not is_leaf:
            yield from self._inside(rows, members, depth + 1, held, unit_of, limits)
            return
        unit_of[rows.home] = len(names)                          # the last unit is outside
        unit_of[members] = unit
        rows = self._one_level(rows, unit_of[rows.home], np.bincount(unit, weights=self.cap[members]), names, depth,
                               _held_by_unit(held, unit_of), limits)
        if is_leaf:
            yield replace(rows, server=names[rows.server])
            return
        by_unit = (_grouped(column, len(names)) for column in (rows.server, unit, unit_of[held[:, 1]]))
        for mine, here, keys in zip(*by_unit, strict=True):
            yield from self._inside(rows.take(mine), members[here], depth + 1, held[keys], unit_of, limits)

    def _one_level(
        self, rows: TaskTable, unit: np.ndarray, cap: np.ndarray, names: np.ndarray, depth: int, held: list[Held],
        limits: list[str],
    ) -> TaskTable:
        """The rows, which are in `unit` now, with their unit as `server`; none outside."""
        is_leaf = depth == len(self.levels)
        rows = replace(rows, server=unit)
        load = np.bincount(rows.server, weights=self.row_work(rows), minlength=len(names) + 1)
        part = 1.0 if is_leaf else (1.0 + (1.0 - _SLACK) * self.tolerance) / (1.0 + self.tolerance)
        cap = np.append(part * cap, 0.0)                         # nothing stays outside
        if not (load > cap).any():
            return rows
        mover = Mover(rows, load, cap, held, self.prices, _UNIT_NAMES[depth - len(self.levels)], names.tolist())
        mover.run()
        if mover.limit is not None:
            limits.append(mover.limit)
        return mover.tasks()


def _grouped(group: np.ndarray, number: int) -> list[np.ndarray]:
    """Which entries belong to each of so many groups."""
    order = np.argsort(group, kind="stable")
    return np.split(order, np.searchsorted(group[order], np.arange(1, number)))


def _held_by_unit(held: np.ndarray, unit_of: np.ndarray) -> list[Held]:
    """The most keys of each document that any rank of a unit holds."""
    keys: dict[tuple[int, int], int] = {}
    for document, unit, stop in zip(held[:, 0].tolist(), unit_of[held[:, 1]].tolist(), held[:, 2].tolist(),
                                    strict=True):
        keys[document, unit] = max(stop, keys.get((document, unit), 0))
    return [(document, unit, stop) for (document, unit), stop in keys.items()]
