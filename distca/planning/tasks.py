"""Core attention as a table of tasks.

A task is a run of queries against a run of keys of the same document. It has no weights and no state, so any server
can compute it, and the planner is free to choose.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from distca.columns import freeze
from distca.workload.layout import Layout

TILE = 128  # kernels reach full speed once a shard has this many queries; cuts stay on this grid


@dataclass(frozen=True, slots=True)
class TaskTable:
    """One entry per CA-task: queries [q_start, q_stop) of a document see its keys [kv_start, kv_stop), causally."""

    document: np.ndarray  # [tasks]
    q_start: np.ndarray   # [tasks]
    q_stop: np.ndarray    # [tasks]
    kv_start: np.ndarray  # [tasks]
    kv_stop: np.ndarray   # [tasks]
    home: np.ndarray      # [tasks] rank whose linear layers own these queries
    server: np.ndarray    # [tasks] rank that computes this attention

    def __post_init__(self) -> None:
        freeze(self, self.__slots__, same_length=True)

    def __len__(self) -> int:
        return len(self.document)

    def take(self, index: np.ndarray) -> TaskTable:
        """Return the tasks that `index` (numbers or a boolean mask) selects."""
        return TaskTable(*(getattr(self, name)[index] for name in self.__slots__))

    @property
    def q_len(self) -> np.ndarray:
        return self.q_stop - self.q_start

    @property
    def kv_len(self) -> np.ndarray:
        return self.kv_stop - self.kv_start


def tasks_at_home(layout: Layout) -> TaskTable:
    """Return attention without disaggregation: each slice's queries on their home rank, against their whole prefix."""
    return TaskTable(layout.document, layout.start, layout.stop, np.zeros(layout.num_slices), layout.stop,
                     home=layout.rank, server=layout.rank)


def joined(*tables: TaskTable) -> TaskTable:
    """Concatenate task tables."""
    return TaskTable(*(np.concatenate([getattr(table, name) for table in tables]) for name in TaskTable.__slots__))
