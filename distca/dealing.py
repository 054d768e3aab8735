"""Items drawn from one list, long ones first: when the last of them is done, and which should be cut for it.

A worker takes the next item when it is done with its last. A few items that are longer than a worker's even share keep
the others waiting, so a kernel that can compute an item in parts cuts those. The kernel decides by this before it makes
its tables, and the planner charges what comes of it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

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
