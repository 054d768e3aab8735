"""List scheduling of work items: the makespan, which items to split, and the tail of a kernel's work list.

The Hopper kernel divides a batch into items: tiles of queries in forward, tiles of keys in backward. Each
multiprocessor takes the next item when it has finished one, longest first. With the 32 heads of a whole model there are
enough items to spread the work evenly. A tensor-parallel rank with 4 query heads and 1 KV head has few: then some long
items keep a few multiprocessors busy while the others wait. Such items are split if that pays: the kernel and the
planner's costs both use `cut`. `WorkList.tail` returns the seconds by which each server ends later than with evenly
spread work.

In backward, several tasks of a server that read the same keys of a document share their items.
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

WORTH = 1.1               # least ratio of the makespans without and with splitting for which splitting pays
MOST_PARTS = 8            # per worker, of all split items
LENGTH_CLASSES = 16       # per worker's share
MOST_COUNT = 4_096        # of a GPU's multiprocessors and of an item's query rows: several times what exists
MOST_FACTOR = 1e3         # of launch_seconds and of idle_speedup
MOST_ITEMS = 2**15        # dealt in one call; beyond, n items on n workers are merged into one item on one worker

_TRIES = 8                # numbers of parts tried for the longest item
_SHORT = 1 / 16           # of a worker's share: shorter items fill gaps and are not dealt
_AS_GOOD = 1.02           # ratio of makespans below which fewer parts win
_PART_COST = 0.4          # share of the merge cost that each part adds: it writes partial sums
_TINY = 1e-300
_MOST_ROUNDS = 40         # of dealing, unless a round would have more items than workers


def cut(
    items: npt.NDArray[Any], workers: int, merge_cost: float, most_parts: int | None = None, rest: float = 0.0
) -> tuple[IntArray, FloatArray]:
    """Return the number of parts per item (all 1 if splitting does not pay) and the makespan, per list.

    `items` [lists, items] may end in zeros. Several numbers of parts are tried for the longest item of a list; other
    items are split until no part is longer than the longest item's. The parts of an item have equal length. A list with
    split items pays `merge_cost`, no part is much shorter than that, and there are at most `most_parts`. `rest` is the
    length of further items that are too short to matter.
    """
    length = np.asarray(items, dtype=np.float64)
    even, longest = (length.sum(axis=1) + rest) / workers, length.max(axis=1, initial=0.0)
    most = MOST_PARTS * workers if most_parts is None else most_parts
    fewest = np.ceil(longest / np.maximum(WORTH * even, _TINY))
    fewest = np.minimum(fewest, most * longest // np.maximum(length.sum(axis=1), _TINY) + 1 - _TRIES)
    tried = np.maximum(fewest, 2)[:, None] + np.arange(-1, _TRIES)
    tried[:, 0] = 1
    tried = np.clip(tried, 1, np.maximum(1, longest // max(merge_cost, _TINY))[:, None])
    scale = tried / np.maximum(longest, _TINY)[:, None]
    parts = np.maximum(1, np.ceil(length[:, None] * scale[:, :, None] - 1e-9)).astype(np.int64)  # [lists, tries, items]
    is_cut = parts > 1
    each = length[:, None] / parts + _PART_COST * merge_cost * is_cut
    counted = np.where(each > _SHORT * even[:, None, None], parts, 0)
    ends = np.maximum(_dealt(each, counted, workers), ((each * parts).sum(axis=2) + rest) / workers)
    ends += merge_cost * is_cut.any(axis=2)
    ends[(parts * is_cut).sum(axis=2) > most] = np.inf
    soonest, one = ends.min(axis=1), np.arange(len(length))
    best = np.where(ends[:, 0] < WORTH * soonest, 0, np.argmax(ends <= _AS_GOOD * soonest[:, None], axis=1))
    return parts[one, best], ends[one, best]


def _dealt(each: FloatArray, parts: IntArray, workers: int) -> FloatArray:
    """Return the makespan of `parts` parts of length `each`, both [lists, tries, items]."""
    shape, each, parts = each.shape[:2], each.reshape(-1, each.shape[2]), parts.reshape(-1, parts.shape[2])
    order = np.argsort(-each, axis=1, kind="stable")
    each, parts = np.take_along_axis(each, order, axis=1), np.take_along_axis(parts, order, axis=1)
    owner = np.repeat(np.arange(len(each)), parts.sum(axis=1))
    return makespan(_padded(np.repeat(each.ravel(), parts.ravel()), owner, len(each)), workers).reshape(shape)


def _padded(values: FloatArray, owner: IntArray, num_lists: int) -> FloatArray:
    """Return the values of each list, padded with zeros, [lists, values]; `owner` is their list, ascending."""
    count = np.bincount(owner, minlength=num_lists)
    padded = np.zeros((num_lists, int(count.max(initial=1))))
    padded[owner, np.arange(len(owner)) - (np.cumsum(count) - count)[owner]] = values
    return padded


def makespan(items: FloatArray, workers: int) -> FloatArray:
    """Return the makespan per list if each item is assigned to the worker that is free first.

    For speed, items are dealt in rounds of workers / 4 items, or more if there are many: the first to the least loaded
    worker, and so on. This may overestimate if one worker should have taken two items of a round, so the makespan is
    capped by the bound of list scheduling: every item starts before the mean load.
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


@dataclass(frozen=True, slots=True)
class Tasks:
    """Columns of non-empty tasks, sorted by server."""

    seconds: FloatArray   # if work is spread evenly over all workers
    q_len: FloatArray
    kv_len: FloatArray
    aligned: npt.NDArray[np.bool_]  # queries are at the end of their keys; else all queries see all keys
    server: IntArray      # ascending
    document: IntArray    # whose keys the task reads
    kv_start: FloatArray  # position of the task's first key in the document

    @property
    def pairs(self) -> FloatArray:
        return self.q_len * (self.kv_len - np.where(self.aligned, 0.5 * (self.q_len - 1), 0.0))


@dataclass(frozen=True, slots=True)
class WorkList:
    """The items of a kernel and the workers that draw them; pairs of numbers are forward, backward."""

    num_workers: int      # multiprocessors
    query_rows: int       # of a forward item: queries times the query heads of a KV head
    key_tokens: int       # of a backward item
    group: int            # query heads per KV head
    kv_heads: int
    launch_seconds: tuple[float, float]
    idle_speedup: tuple[float, float]  # of an item while most workers are idle: higher clock, more cache per worker

    @classmethod
    def of(cls, facts: Mapping[str, object], heads: int, kv_heads: int) -> WorkList:
        """Read the facts that a profile recorded about its kernel."""
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
        """Number of queries that gives each worker one forward item."""
        return max(1, self.num_workers * self._tile // self.kv_heads)

    @property
    def pairs_at_once(self) -> float:
        """Pairs that the device computes while one worker computes a query of a backward item."""
        return self.num_workers * self.key_tokens / self.kv_heads

    def filled(self, q_len: FloatArray) -> FloatArray:
        """Round queries up to whole forward tiles: a partial tile takes the time of a whole one."""
        return np.ceil(q_len / self._tile) * self._tile

    def tail(self, tasks: Tasks, num_servers: int, backward: bool) -> FloatArray:
        """Return the seconds beyond the even share, per server."""
        along = tasks.kv_len / self.key_tokens if backward else tasks.q_len / self._tile
        merged = self.kv_heads * float(np.ceil(along).sum()) / MOST_ITEMS
        workers = max(1, round(self.num_workers / max(1.0, merged)))
        items = (self._key_items if backward else self._query_items)(tasks, self.num_workers / workers)
        dealt = _padded(*items, num_servers)
        even = dealt.sum(axis=1) / workers
        end = makespan(_long_first(dealt, even), workers)
        late = np.flatnonzero(end > WORTH * even)
        if len(late):                                            # merging costs about as much as a launch
            end[late] = cut(dealt[late], workers, self.launch_seconds[backward])[1]
        return np.asarray(np.maximum(end - even, 0.0) / self.idle_speedup[backward])

    @property
    def _tile(self) -> int:
        return max(1, self.query_rows // self.group)

    def _query_items(self, tasks: Tasks, merged: float) -> tuple[FloatArray, IntArray]:
        """Return seconds and server of every forward item; later items of an aligned task have fewer keys."""
        num_items = np.ceil(tasks.q_len / self._tile) * self.kv_heads
        number = np.maximum(1, np.rint(num_items / merged)).astype(np.int64)
        task, at = spread(number)
        before_end = np.where(tasks.aligned, tasks.q_len, 0.0)[task] * (at + 0.5) / number[task]
        mean_keys = tasks.pairs / tasks.q_len
        item_seconds = tasks.seconds * self.num_workers / num_items
        return (item_seconds / mean_keys)[task] * (tasks.kv_len[task] - before_end), tasks.server[task]

    def _key_items(self, tasks: Tasks, merged: float) -> tuple[FloatArray, IntArray]:
        """Return seconds and server of every backward item: it covers the queries of all tasks that see its keys."""
        span = int(tasks.document.max(initial=0)) + 1
        _, first, region = np.unique(tasks.server * span + tasks.document, return_index=True, return_inverse=True)
        low, high = np.full(len(first), np.inf), np.zeros(len(first))
        np.minimum.at(low, region, tasks.kv_start)
        np.maximum.at(high, region, tasks.kv_start + tasks.kv_len)
        num_items = np.ceil((high - low) / self.key_tokens) * self.kv_heads
        number = np.maximum(1, np.rint(num_items / merged)).astype(np.int64)  # [regions]
        width, base = (high - low) / number, np.cumsum(number) - number

        begin = (tasks.kv_start - low[region]) / width[region]
        end = begin + tasks.kv_len / width[region]               # an item belongs to the tasks that contain its middle
        from_item = np.minimum(np.ceil(begin - 0.5).astype(np.int64), number[region] - 1)
        to_item = np.clip(np.ceil(end - 0.5).astype(np.int64), from_item + 1, number[region])
        task, at = spread(to_item - from_item)
        at += from_item[task]
        left = (end[task] - at - 0.5) * width[region][task]      # keys up to the task's last
        seen = np.where(tasks.aligned[task], np.clip(left, 1.0, tasks.q_len[task]), tasks.q_len[task])
        mean_seen = tasks.pairs / tasks.kv_len
        item_seconds = tasks.seconds * self.num_workers / (np.ceil(tasks.kv_len / self.key_tokens) * self.kv_heads)
        seconds = np.bincount(base[region][task] + at, weights=(item_seconds / mean_seen)[task] * seen,
                              minlength=int(number.sum()))
        return seconds.astype(np.float64), np.repeat(tasks.server[first], number)


def _both(field: str, value: object, least: float) -> tuple[float, float]:
    """Check a number for forward and one for backward."""
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise UserError(f"{field} is {short(value)}; give a number for forward and one for backward")
    return (check_number(field, value[0], least=least, most=MOST_FACTOR),
            check_number(field, value[1], least=least, most=MOST_FACTOR))


def _long_first(items: FloatArray, even: FloatArray) -> FloatArray:
    """Sort items as the kernel does: longest first, by length in sixteenths of a worker's share, stably."""
    scale = LENGTH_CLASSES / np.where(even > 0, even, 1.0)
    length_class = np.minimum(items * scale[:, None], 2**15 - 1).astype(np.int16)
    return np.take_along_axis(items, np.argsort(-length_class, axis=1, kind="stable"), axis=1)
