"""Split the keys of one tile of queries, or the queries of one tile of keys, over several work items.

Without splitting, one work item of the Hopper kernel walks all keys of a tile of queries, in backward all queries of a
tile of keys, so a few tiles with very many of them leave most multiprocessors idle. A part of a tile is an ordinary
work item that walks some of the tile's iterations; its segments (in backward its tasks) are the tile's, cut at tiles of
keys (blocks of queries). It stores its sums in float32, and a last kernel merges the parts of a tile in order, so
results are reproducible. distca.cost.dealing decides which tiles are split, and into how many parts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from distca.columns import spread
from distca.cost.dealing import MOST_PARTS, WORTH, cut

MERGE_STEPS = 8.0  # cost of merging (its launch and memory traffic), in iterations of a tile


@dataclass(frozen=True, slots=True)
class Steps:
    """Iterations over tiles of keys, or blocks of queries, tile by tile: columns of [tile, segment pairs]."""

    tile: np.ndarray
    segment: np.ndarray
    num_steps: np.ndarray
    end: np.ndarray  # what is walked first in the segment, plus 1; it is walked backwards


NO_STEPS = Steps(*np.zeros((4, 0), dtype=np.int64))


@dataclass(frozen=True, slots=True)
class Split:
    """Work items (whole tiles or parts) in the order of their tiles, and the segments of parts."""

    tile: np.ndarray           # [items]
    part: np.ndarray           # [items] number within the tile
    slot: np.ndarray           # [items] number among all parts, counted from 1; 0 for a whole tile
    num_steps: np.ndarray      # [items]
    segment_begin: np.ndarray  # [items] segments of parts follow all others
    from_segment: np.ndarray   # [part segments]
    begin: np.ndarray          # [part segments] first key, or first query
    end: np.ndarray            # [part segments]

    @classmethod
    def of(
        cls, parts: np.ndarray, num_steps: np.ndarray, segment_begin: np.ndarray, walked: Steps,
        first: np.ndarray, stop: np.ndarray, step_len: int,
    ) -> Split:
        """Split each tile into `parts` [tiles], equal up to one iteration of `step_len` keys or queries.

        Keys or queries [first, stop) are those of a segment.
        """
        item_tile, item_part = spread(parts)
        is_part = parts[item_tile] > 1
        item_begin = _begin(item_part, parts[item_tile], num_steps[item_tile])
        item_end = _begin(item_part + 1, parts[item_tile], num_steps[item_tile])

        some = np.flatnonzero(parts[walked.tile] > 1)            # [pairs] of tiles with parts
        before = (np.cumsum(walked.num_steps) - walked.num_steps)[some]
        before -= (np.cumsum(num_steps) - num_steps)[walked.tile[some]]
        count, of_parts, of_steps = (x[some] for x in (walked.num_steps, parts[walked.tile], num_steps[walked.tile]))
        lowest = _part_of(before, of_parts, of_steps)
        pair, number = spread(_part_of(before + count - 1, of_parts, of_steps) + 1 - lowest)
        part, tile = lowest[pair] + number, walked.tile[some][pair]
        order = np.lexsort((pair, part, tile))
        pair, part, tile = pair[order], part[order], tile[order]  # [part segments] grouped by part
        item = (np.cumsum(parts) - parts)[tile] + part
        begin = np.maximum(item_begin[item], before[pair]) - before[pair]
        end = np.minimum(item_end[item], (before + count)[pair]) - before[pair]
        from_segment, top = walked.segment[some][pair], walked.end[some][pair]
        own_begin = len(first) + np.searchsorted(item, np.arange(len(item_tile)))
        return cls(
            item_tile, item_part, np.cumsum(is_part) * is_part, item_end - item_begin,
            np.where(is_part, own_begin, segment_begin[item_tile]), from_segment,
            first[from_segment] + (top - end) * step_len,
            np.minimum(stop[from_segment], first[from_segment] + (top - begin) * step_len),
        )


def ends_late(num_steps: np.ndarray, kv_heads: int, num_sms: int) -> bool:
    """Return whether whole tiles may end late; each begins at the latest after an even spread of all before."""
    length = -np.sort(-num_steps)
    end = (kv_heads * np.cumsum(length) - length) / num_sms + length
    return bool(end.max(initial=0) * num_sms > WORTH * kv_heads * float(length.sum()))


def num_parts(num_steps: np.ndarray, walked: Steps, kv_heads: int, num_sms: int) -> np.ndarray:
    """Return the number of parts of each tile, 1 if it is not split."""
    whole = np.ones(len(num_steps), dtype=np.int64)
    even = kv_heads * float(num_steps.sum()) / num_sms
    most_segments = MOST_PARTS * num_sms // kv_heads
    if most_segments < 2 or not ends_late(num_steps, kv_heads, num_sms):
        return whole
    long = np.flatnonzero(num_steps * 16 >= even)                # few; the others fill gaps
    items = np.repeat(num_steps[long], kv_heads)
    rest = kv_heads * float(num_steps.sum()) - float(items.sum())
    found, _ = cut(items[None], num_sms, MERGE_STEPS, most_segments * kv_heads, rest)
    parts = whole.copy()
    parts[long] = np.minimum(found[0, ::kv_heads], num_steps[long])
    num_segments = np.bincount(walked.tile, minlength=len(parts))
    return parts if ((parts + num_segments - 1) * (parts > 1)).sum() <= most_segments else whole


def _begin(part: np.ndarray, parts: np.ndarray, num_steps: np.ndarray) -> np.ndarray:
    """Return the first iteration of a part."""
    return part * num_steps // parts


def _part_of(step: np.ndarray, parts: np.ndarray, num_steps: np.ndarray) -> np.ndarray:
    """Return the part that contains an iteration."""
    return ((step + 1) * parts - 1) // num_steps
