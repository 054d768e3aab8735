"""Tasks of the Hopper kernel, cut into pieces of queries; regions of their keys; and what tiles of keys walk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from distca.columns import spread
from distca.kernels.hopper.split import Steps
from distca.kernels.interface import TaskRows


@dataclass(frozen=True, slots=True)
class Cut:
    """Tasks cut into pieces of queries: two tasks have the same piece or no query in common. Sorted by queries."""

    q_begin: np.ndarray                                          # [pieces]
    q_end: np.ndarray                                            # [pieces]
    piece: np.ndarray                                            # [tasks] ascending
    k_begin: np.ndarray                                          # [tasks]
    k_end: np.ndarray                                            # [tasks]
    shift: np.ndarray                                            # [tasks]

    def seen(
        self, task: np.ndarray, q_first: np.ndarray, q_stop: np.ndarray, window: int | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the contiguous keys [lo, hi) of a task that some of these queries, all in the task, see."""
        lo, shift = self.k_begin[task], self.shift[task]
        hi = np.minimum(self.k_end[task], q_stop + shift)
        if window is not None:
            lo = np.maximum(lo, q_first + shift - window + 1)
        assert (lo < hi).all(), "tasks with queries that see no key: pass visible tasks"
        return lo, hi

    def walked(
        self, task_order: np.ndarray, first_item: np.ndarray, k_first: np.ndarray, k_count: np.ndarray, block_len: int,
        window: int | None,
    ) -> Steps:
        """Return the blocks that each item walks, task by task in `task_order`; first_item is of a task's region."""
        region_begin, tile_keys = k_first[first_item], int(k_count.max())  # less where all regions have one item each
        begin = first_item + (self.k_begin - region_begin) // tile_keys
        task, number = spread(first_item + ceil_div(self.k_end - region_begin, tile_keys) - begin)
        item = begin[task] + number
        q_begin, q_end, shift = self.q_begin[self.piece][task], self.q_end[self.piece][task], self.shift[task]
        low = np.maximum(k_first[item], self.k_begin[task])
        high = np.minimum(np.minimum((k_first + k_count)[item], self.k_end[task]), q_end + shift)
        first = np.maximum(0, low - shift - q_begin) // block_len    # as the kernel finds them: backward_tasks.cuh
        stop = ceil_div(q_end - q_begin, block_len)
        if window is not None:
            stop = np.minimum(stop, ceil_div(np.maximum(0, high + window - 1 - shift - q_begin), block_len))
        place = np.argsort(task_order)[task]
        kept = np.flatnonzero((low < high) & (first < stop))
        kept = kept[np.lexsort((place[kept], item[kept]))]
        return Steps(item[kept], place[kept], (stop - first)[kept], stop[kept])


def cut_tasks(tasks: TaskRows) -> Cut:
    cuts = np.unique(np.concatenate([tasks.q_begin, tasks.q_end]))
    first = np.searchsorted(cuts, tasks.q_begin)
    task, number = spread(np.searchsorted(cuts, tasks.q_end) - first)
    between = first[task] + number                               # the cut where the piece begins
    order = np.argsort(between, kind="stable")
    task, (used, piece) = task[order], np.unique(between[order], return_inverse=True)
    shift = tasks.k_begin + tasks.q_offset - tasks.q_begin
    return Cut(cuts[used], cuts[used + 1], piece, tasks.k_begin[task], tasks.k_end[task], shift[task])


def regions_of(begin: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return each range's region and the regions' bounds; a region is a connected set of overlapping ranges."""
    order = np.argsort(begin, kind="stable")
    reach = np.maximum.accumulate(end[order])
    opens = np.append(True, begin[order][1:] >= reach[:-1])[: len(begin)]
    region = np.empty_like(begin)
    region[order] = np.cumsum(opens) - 1
    closes = np.append(opens[1:], True)[: len(begin)]
    return region, begin[order][opens], reach[closes]


def ceil_div(length: Any, part: int) -> Any:
    return -(-length // part)
