"""Items drawn from one list, long ones first: when the last of them is done, and which should be cut for it.

A worker takes the next item when it is done with its last. A few items that are longer than a worker's even share keep
the others waiting, so a kernel that can compute an item in parts cuts those. The kernel decides by this before it makes
its tables, and the planner charges what comes of it.

What a kernel that draws its work from one list loses at the list's end.

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
from typing import Any

import numpy as np
import numpy.typing as npt

from distca.columns import spread
from distca.validation import UserError, check_number, check_whole, short

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

WORTH = 1.1               # how much later the last of all is done without cutting, at least
MOST_PARTS = 8            # of all cut items, to a worker
_TRIES = 8                # numbers of parts of the longest item
_SHORT = 1 / 16           # of a worker's share: these fill gaps
_AS_GOOD = 1.02           # fewer parts are better than an end so much sooner
_PART_COST = 0.4          # of what merging costs: sums are written, and the next part begins
_TINY = 1e-300
_MOST_ROUNDS = 40         # of dealing, unless there are more items than workers in each


def cut(
    items: npt.NDArray[Any], workers: int, merge_cost: float, most_parts: int | None = None, rest: float = 0.0
) -> tuple[IntArray, FloatArray]:
    """How many parts each item has, 1 for all of a row where cutting is not worth it; and when the last is done.

    Rows of items, [rows, items], which may end in zeros, are dealt apart. The longest item of a row has a few parts
    more or less, others so many that theirs are no longer than its; parts of one item are equally long. A row with any
    of them pays `merge_cost`, and none is much shorter than that; there are no more than `most_parts`. Beside them is a
    `rest` of items too short to wait for.
    """
    length = np.asarray(items, dtype=np.float64)
    even, longest = (length.sum(axis=1) + rest) / workers, length.max(axis=1, initial=0.0)
    most = MOST_PARTS * workers if most_parts is None else most_parts
    fewest = np.ceil(longest / np.maximum(WORTH * even, _TINY))
    fewest = np.minimum(fewest, most * longest // np.maximum(length.sum(axis=1), _TINY) + 1 - _TRIES)  # in the room
    tried = np.maximum(fewest, 2)[:, None] + np.arange(-1, _TRIES)
    tried[:, 0] = 1
    tried = np.clip(tried, 1, np.maximum(1, longest // max(merge_cost, _TINY))[:, None])
    scale = tried / np.maximum(longest, _TINY)[:, None]
    parts = np.maximum(1, np.ceil(length[:, None] * scale[:, :, None] - 1e-9)).astype(np.int64)  # [rows, tries, items]
    is_cut = parts > 1
    each = length[:, None] / parts + _PART_COST * merge_cost * is_cut
    counted = np.where(each > _SHORT * even[:, None, None], parts, 0)
    ends = np.maximum(_dealt(each, counted, workers), ((each * parts).sum(axis=2) + rest) / workers)
    ends += merge_cost * is_cut.any(axis=2)
    ends[(parts * is_cut).sum(axis=2) > most] = np.inf
    soonest, row = ends.min(axis=1), np.arange(len(length))
    best = np.where(ends[:, 0] < WORTH * soonest, 0, np.argmax(ends <= _AS_GOOD * soonest[:, None], axis=1))
    return parts[row, best], ends[row, best]


def _dealt(each: FloatArray, parts: IntArray, workers: int) -> FloatArray:
    """When the last part is done, of [rows, tries, items]; those of which there are none do not count."""
    shape, each, parts = each.shape[:2], each.reshape(-1, each.shape[2]), parts.reshape(-1, parts.shape[2])
    order = np.argsort(-each, axis=1, kind="stable")
    each, parts = np.take_along_axis(each, order, axis=1), np.take_along_axis(parts, order, axis=1)
    count = parts.sum(axis=1)
    row = np.repeat(np.arange(len(each)), count)
    return makespan(by_row(np.repeat(each.ravel(), parts.ravel()), row, len(each)), workers).reshape(shape)


def by_row(values: FloatArray, row: IntArray, num_rows: int) -> FloatArray:
    """[rows, values], then zeros; `row` ascends."""
    count = np.bincount(row, minlength=num_rows)
    table = np.zeros((num_rows, int(count.max(initial=1))))
    table[row, np.arange(len(row)) - (np.cumsum(count) - count)[row]] = values
    return table


def makespan(items: FloatArray, workers: int) -> FloatArray:
    """When the last is done, per row, if each item goes to the worker that is free first.

    A quarter as many items as workers at a time, or more where they are many: the first of them to the least loaded
    worker, and so on. Where one worker should have taken two of them, the bound of list scheduling holds: every item
    starts before the mean load.
    """
    loads = np.zeros((len(items), workers))
    first = items[:, :workers]
    loads[:, :first.shape[1]] = first
    done, total = loads.max(axis=1), loads.sum(axis=1)
    some = min(workers, max(1, workers // 4, items.shape[1] // _MOST_ROUNDS))
    for at in range(workers, items.shape[1], some):
        part = items[:, at:at + some]
        loads.sort(axis=1)
        loads[:, :part.shape[1]] += part
        total += part.sum(axis=1)
        done = np.maximum(done, np.minimum(loads.max(axis=1), total / workers + part.max(axis=1)))
    return done



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
