"""Split the keys of one tile of queries over several work items of the Hopper kernel.

Without splitting, one work item walks all keys of a tile, so a few tiles with very many keys leave most multiprocessors
idle. A part of a tile is an ordinary work item that walks some of the tile's iterations; its segments are the tile's,
cut at key tiles. It stores its sums in float32, and a last kernel merges the parts of a tile in order, so results are
reproducible. distca.cost.dealing decides which tiles are split, and into how many parts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from distca.columns import spread
from distca.cost.dealing import MOST_PARTS, WORTH, cut

MERGE_STEPS = 8.0  # cost of merging (its launch and memory traffic), in iterations of a tile


@dataclass(frozen=True, slots=True)
class Steps:
    """Iterations over key tiles, tile by tile: columns of [tile, segment pairs]."""

    tile: np.ndarray
    segment: np.ndarray
    num_steps: np.ndarray
    end: np.ndarray  # first key tile walked in the segment, plus 1; tiles are walked backwards


@dataclass(frozen=True, slots=True)
class Split:
    """Work items (whole tiles or parts) in the order of their tiles, and the segments of parts."""

    tile: np.ndarray           # [items]
    part: np.ndarray           # [items] number within the tile
    slot: np.ndarray           # [items] number among all parts, counted from 1; 0 for a whole tile
    num_steps: np.ndarray      # [items]
    segment_begin: np.ndarray  # [items] segments of parts follow all others
    from_segment: np.ndarray   # [part segments]
    k_begin: np.ndarray        # [part segments]
    k_end: np.ndarray          # [part segments]

    @classmethod
    def of(
        cls, parts: np.ndarray, num_steps: np.ndarray, segment_begin: np.ndarray, walked: Steps, k_begin: np.ndarray,
        k_end: np.ndarray, tile_keys: int,
    ) -> Split:
        """Split each tile into `parts` [tiles], equal up to one iteration; k_begin and k_end are per segment."""
        item_tile, item_part = spread(parts)
        is_part = parts[item_tile] > 1
        item_begin = _begin(item_part, parts[item_tile], num_steps[item_tile])
        item_end = _begin(item_part + 1, parts[item_tile], num_steps[item_tile])

        some = np.flatnonzero(parts[walked.tile] > 1)            # [pairs] of tiles with parts
        before = (np.cumsum(walked.num_steps) - walked.num_steps)[some]
        before -= (np.cumsum(num_steps) - num_steps)[walked.tile[some]]
        count, of_parts, of_steps = (x[some] for x in (walked.num_steps, parts[walked.tile], num_steps[walked.tile]))
        first = _part_of(before, of_parts, of_steps)
        pair, number = spread(_part_of(before + count - 1, of_parts, of_steps) + 1 - first)
        part, tile = first[pair] + number, walked.tile[some][pair]
        order = np.lexsort((pair, part, tile))
        pair, part, tile = pair[order], part[order], tile[order]  # [part segments] grouped by part
        item = (np.cumsum(parts) - parts)[tile] + part
        begin = np.maximum(item_begin[item], before[pair]) - before[pair]
        end = np.minimum(item_end[item], (before + count)[pair]) - before[pair]
        from_segment, top = walked.segment[some][pair], walked.end[some][pair]
        own_begin = len(k_begin) + np.searchsorted(item, np.arange(len(item_tile)))
        return cls(
            item_tile, item_part, np.cumsum(is_part) * is_part, item_end - item_begin,
            np.where(is_part, own_begin, segment_begin[item_tile]), from_segment,
            k_begin[from_segment] + (top - end) * tile_keys,
            np.minimum(k_end[from_segment], k_begin[from_segment] + (top - begin) * tile_keys),
        )


def num_parts(num_steps: np.ndarray, walked: Steps, kv_heads: int, num_sms: int) -> np.ndarray:
    """Return the number of parts of each tile, 1 if its keys are not split."""
    whole = np.ones(len(num_steps), dtype=np.int64)
    length = -np.sort(-num_steps)
    even = kv_heads * float(length.sum()) / num_sms
    end = (kv_heads * np.cumsum(length) - length) / num_sms + length  # latest end, if items before are spread evenly
    most_segments = MOST_PARTS * num_sms // kv_heads
    if end.max(initial=0) <= WORTH * even or most_segments < 2:
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
