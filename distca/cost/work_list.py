"""What a kernel that draws its work from one list loses at the list's end.

The Hopper kernel cuts a batch into items, forward tiles of queries and backward tiles of keys, and each multiprocessor
draws the next one when it is done with its last, long ones first. With the 32 heads of a whole model there are so many
items that the work spreads evenly. A tensor-parallel rank has 4 query heads and 1 KV head: then a few long items keep
some multiprocessors busy while the others wait. Forward cuts those where it is worth it (dealing.py, by which the
kernel itself decides); backward may take twice its even share. `tail` deals the items of all servers at once and says
by how much they end later.

Keys of one document that several tasks of a server read are one row of items in backward, so documents matter there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from distca.columns import spread
from distca.dealing import WORTH, by_row, cut, makespan
from distca.validation import UserError, check_number, check_whole, short

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

LENGTH_CLASSES = 16  # to a worker's share
MOST_COUNT = 4_096  # of a GPU's multiprocessors and of an item's rows: several times what there is
MOST_FACTOR = 1e3   # seconds to launch, and speed-up of an item
MOST_ITEMS = 2**15  # dealt in one call; where there are more, several items on as many workers count as one on one


@dataclass(frozen=True, slots=True)
class Tasks:
    """Columns of tasks with pairs, in the order of their servers."""

    seconds: FloatArray   # if the work spread evenly over all workers
    q_len: FloatArray
    kv_len: FloatArray
    aligned: npt.NDArray[np.bool_]  # queries at the end of their keys; else all see all
    server: IntArray      # ascending
    document: IntArray    # whose keys they read
    kv_start: FloatArray  # where those begin in the document

    @property
    def pairs(self) -> FloatArray:
        return self.q_len * (self.kv_len - np.where(self.aligned, 0.5 * (self.q_len - 1), 0.0))


@dataclass(frozen=True, slots=True)
class WorkList:
    """How a kernel's items are cut, and who draws them; pairs of numbers are forward, backward."""

    num_workers: int      # multiprocessors
    query_rows: int       # of a forward item: queries times the query heads of a KV head
    key_tokens: int       # of a backward item
    group: int            # query heads per KV head
    kv_heads: int
    launch_seconds: tuple[float, float]
    idle_speedup: tuple[float, float]  # of an item while most workers are idle: cooler, and with more of the cache

    @classmethod
    def of(cls, facts: Mapping[str, object], heads: int, kv_heads: int) -> WorkList:
        """From what a profile says about its kernel."""
        names = ("num_workers", "query_rows", "key_tokens", "launch_seconds", "idle_speedup")
        missing = [name for name in names if name not in facts]
        if missing:
            raise UserError(f"work_list has no {', '.join(missing)}; profile again")
        counts = [check_whole(f"work_list.{name}", facts[name], most=MOST_COUNT) for name in names[:3]]
        launch, speedup = (_both(f"work_list.{name}", facts[name], least)
                           for name, least in (("launch_seconds", 0.0), ("idle_speedup", 1.0)))
        return cls(counts[0], counts[1], counts[2], max(1, heads // kv_heads), kv_heads, launch, speedup)

    @property
    def wave_tokens(self) -> int:
        """Queries whose forward items are one for each worker."""
        return max(1, self.num_workers * self._tile // self.kv_heads)

    @property
    def pairs_at_once(self) -> float:
        """Pairs that the device takes while one worker takes a query of a backward item."""
        return self.num_workers * self.key_tokens / self.kv_heads

    def filled(self, q_len: FloatArray) -> FloatArray:
        """Queries of whole forward tiles, which a partial one takes the time of."""
        return np.ceil(q_len / self._tile) * self._tile

    def tail(self, tasks: Tasks, num_servers: int, backward: bool) -> FloatArray:
        """Seconds beyond the even share, per server."""
        along = tasks.kv_len / self.key_tokens if backward else tasks.q_len / self._tile
        merged = self.kv_heads * float(np.ceil(along).sum()) / MOST_ITEMS
        workers = max(1, round(self.num_workers / max(1.0, merged)))
        items = (self._key_items if backward else self._query_items)(tasks, self.num_workers / workers)
        dealt = by_row(*items, num_servers)
        even = dealt.sum(axis=1) / workers
        end = makespan(_long_first(dealt, even), workers)
        late = np.flatnonzero(end > WORTH * even)
        if not backward and len(late):                           # merging costs about as much as a launch
            end[late] = cut(dealt[late], workers, self.launch_seconds[0])[1]
        return np.asarray(np.maximum(end - even, 0.0) / self.idle_speedup[backward])

    @property
    def _tile(self) -> int:
        return max(1, self.query_rows // self.group)

    def _query_items(self, tasks: Tasks, merged: float) -> tuple[FloatArray, IntArray]:
        """Seconds and server of every forward item: of a causal task, fewer keys for each than for the one before."""
        num_items = np.ceil(tasks.q_len / self._tile) * self.kv_heads
        number = np.maximum(1, np.rint(num_items / merged)).astype(np.int64)
        task, at = spread(number)
        before_end = np.where(tasks.aligned, tasks.q_len, 0.0)[task] * (at + 0.5) / number[task]
        mean_keys = tasks.pairs / tasks.q_len
        item_seconds = tasks.seconds * self.num_workers / num_items
        return (item_seconds / mean_keys)[task] * (tasks.kv_len[task] - before_end), tasks.server[task]

    def _key_items(self, tasks: Tasks, merged: float) -> tuple[FloatArray, IntArray]:
        """The same of backward, where an item walks the queries of all tasks of its server that see its keys."""
        span = int(tasks.document.max(initial=0)) + 1
        _, first, region = np.unique(tasks.server * span + tasks.document, return_index=True, return_inverse=True)
        low, high = np.full(len(first), np.inf), np.zeros(len(first))
        np.minimum.at(low, region, tasks.kv_start)
        np.maximum.at(high, region, tasks.kv_start + tasks.kv_len)
        num_items = np.ceil((high - low) / self.key_tokens) * self.kv_heads
        number = np.maximum(1, np.rint(num_items / merged)).astype(np.int64)  # [regions]
        width, base = (high - low) / number, np.cumsum(number) - number

        begin = (tasks.kv_start - low[region]) / width[region]
        end = begin + tasks.kv_len / width[region]               # an item belongs to a task that has its middle
        from_item = np.minimum(np.ceil(begin - 0.5).astype(np.int64), number[region] - 1)
        to_item = np.clip(np.ceil(end - 0.5).astype(np.int64), from_item + 1, number[region])
        task, at = spread(to_item - from_item)
        at += from_item[task]
        left = (end[task] - at - 0.5) * width[region][task]      # keys to the task's last
        seen = np.where(tasks.aligned[task], np.clip(left, 1.0, tasks.q_len[task]), tasks.q_len[task])
        mean_seen = tasks.pairs / tasks.kv_len
        item_seconds = tasks.seconds * self.num_workers / (np.ceil(tasks.kv_len / self.key_tokens) * self.kv_heads)
        seconds = np.bincount(base[region][task] + at, weights=(item_seconds / mean_seen)[task] * seen,
                              minlength=int(number.sum()))
        return seconds.astype(np.float64), np.repeat(tasks.server[first], number)


def _both(field: str, value: object, least: float) -> tuple[float, float]:
    """Of forward and of backward."""
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise UserError(f"{field} is {short(value)}; give a number for forward and one for backward")
    return (check_number(field, value[0], least=least, most=MOST_FACTOR),
            check_number(field, value[1], least=least, most=MOST_FACTOR))


def _long_first(items: FloatArray, even: FloatArray) -> FloatArray:
    """In the kernel's order: by length in sixteenths of a worker's share, as they came inside of one."""
    scale = LENGTH_CLASSES / np.where(even > 0, even, 1.0)
    length_class = np.minimum(items * scale[:, None], 2**15 - 1).astype(np.int16)
    return np.take_along_axis(items, np.argsort(-length_class, axis=1, kind="stable"), axis=1)
