"""Keys of one tile of queries, split over several work items of the Hopper kernel.

A tile walks its keys by itself, so two shards of 128 queries before 512K keys would keep half of the multiprocessors
idle. A part of a tile is a work item like others, which walks some of the tile's steps: its segments are the tile's,
cut at tiles of keys. It leaves its sums in float32 and a last kernel merges the parts of a tile in their order, so that
results have the same bits every time. distca.cost.dealing says which tiles are split, and into how many parts.

dQ from gradients of scores that are kept in memory: five matrix products, and every sum in one order.

Adding dQ up in memory has no order, and costs whatever the number of keys: room for sums, zeros, and a last pass over
them. Computing it by itself costs scores and dP again, unless dS is kept, of all pairs of a query and a key. That is
faster with wide heads, whose tiles have so few keys that adds would take longer than computing scores again, where
queries see few keys, and where sums need an order. dS is kept for as many KV heads at a time as a small part of the
device's memory holds; where it does not hold one head's, or long tiles of queries are split, scores are computed again
(backward_dq.cu).

dS of a block of queries and a tile of keys has a place for each row of tasks that has both: the places of a block lie
side by side, in the order of keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from distca.columns import spread
from distca.cost.dealing import MOST_PARTS, WORTH, cut
from distca.kernels.hopper.tables import (
    BLOCK_ROWS,
    HEADER_INTS,
    ceil_div,
    cut_rows,
    heads_in_turn,
    length_class,
    regions_of,
    table_of,
    tokens_per_block,
)
from distca.kernels.interface import TaskRows

MERGE_STEPS = 8.0  # what merging costs, the launch of it and the memory that sums go through, in steps of a tile


@dataclass(frozen=True, slots=True)
class Steps:
    """What tiles walk, tile after tile: columns of [tile, segment pairs]."""

    tile: np.ndarray
    segment: np.ndarray
    num_steps: np.ndarray
    end: np.ndarray  # number of the key tile behind the first one that is walked, in the segment


@dataclass(frozen=True, slots=True)
class Split:
    """Work items, which are whole tiles or parts, in the order of their tiles; and the segments of parts."""

    tile: np.ndarray           # [items]
    part: np.ndarray           # [items] number within the tile
    slot: np.ndarray           # [items] number among all parts, counted from 1; 0 for a whole tile
    num_steps: np.ndarray      # [items]
    segment_begin: np.ndarray  # [items] those of parts stand behind all others
    from_segment: np.ndarray   # [part segments]
    k_begin: np.ndarray        # [part segments]
    k_end: np.ndarray          # [part segments]

    @classmethod
    def of(
        cls, parts: np.ndarray, num_steps: np.ndarray, segment_begin: np.ndarray, walked: Steps, k_begin: np.ndarray,
        k_end: np.ndarray, tile_keys: int,
    ) -> Split:
        """So many parts of each tile, equally long up to a step; `k_begin` and `k_end` are segments'."""
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
        pair, part, tile = pair[order], part[order], tile[order]  # [part segments] a part's side by side
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


def num_parts(
    num_steps: np.ndarray, walked: Steps, kv_heads: int, num_sms: int, most_segments: int | None = None
) -> np.ndarray:
    """Of each tile, 1 where its keys are not split."""
    whole = np.ones(len(num_steps), dtype=np.int64)
    length = -np.sort(-num_steps)
    even = kv_heads * float(length.sum()) / num_sms
    end = (kv_heads * np.cumsum(length) - length) / num_sms + length  # at the latest, since all before are dealt out
    most_segments = MOST_PARTS * num_sms // kv_heads if most_segments is None else most_segments
    if end.max(initial=0) <= WORTH * even or most_segments < 2:
        return whole
    long = np.flatnonzero(num_steps * 16 >= even)                # not many; the others fill gaps
    items = np.repeat(num_steps[long], kv_heads)
    rest = kv_heads * float(num_steps.sum()) - float(items.sum())
    found, _ = cut(items[None], num_sms, MERGE_STEPS, most_segments * kv_heads, rest)
    parts = whole.copy()
    parts[long] = np.minimum(found[0, ::kv_heads], num_steps[long])
    num_segments = np.bincount(walked.tile, minlength=len(parts))
    return parts if ((parts + num_segments - 1) * (parts > 1)).sum() <= most_segments else whole


def _begin(part: np.ndarray, parts: np.ndarray, num_steps: np.ndarray) -> np.ndarray:
    """The first step of a part."""
    return part * num_steps // parts


def _part_of(step: np.ndarray, parts: np.ndarray, num_steps: np.ndarray) -> np.ndarray:
    """The part that has a step."""
    return ((step + 1) * parts - 1) // num_steps


MEMORY_PART = 32                                                 # of the device's memory is kept at most
FEW_TILES = 16                                                   # of keys that a block sees, for it to be faster


@dataclass(frozen=True, slots=True)
class KeptTables:
    """Tiles of queries, long ones first, and what each block of a row sees."""

    tiles: np.ndarray                                            # [tiles, 4] q_first, q_count + 256 * rows,
                                                                 #            first pair, pairs to the next row's
    pairs: np.ndarray                                            # [row, block pairs; 4] first key, tiles of keys,
                                                                 #                       first place, k_end
    heads_outer: bool

    @property
    def num_places(self) -> int:
        return int(self.pairs[:, 1].sum(dtype=np.int64))

    @property
    def pairs_at(self) -> int:
        return HEADER_INTS + 4 * len(self.tiles)

    def pack(self) -> np.ndarray:
        """One flat int32 array: header, tiles, pairs."""
        header = np.zeros(HEADER_INTS, dtype=np.int32)
        header[:3] = len(self.tiles), self.heads_outer, self.num_places
        return np.concatenate([header, self.tiles.ravel(), self.pairs.ravel()])


def kept_tables(
    rows: TaskRows, window: int | None, group: int, kv_heads: int, num_sms: int, tile_blocks: int, tile_keys: int,
    most_places: int,
) -> KeptTables | None:
    """For rows as backward_tables takes them, whose rows say where their pairs begin; None where there is no room."""
    block_len = tokens_per_block(group)
    cut = cut_rows(rows)
    region, region_begin, _ = regions_of(cut.k_begin, cut.k_end)
    block_count = ceil_div(cut.q_end - cut.q_begin, block_len)   # [pieces]
    row, number = spread(block_count[cut.piece])                 # [row, block pairs]
    q_first = cut.q_begin[cut.piece][row] + number * block_len
    q_stop = np.minimum(q_first + block_len, cut.q_end[cut.piece][row])
    lo, hi = cut.seen(row, q_first, q_stop, window)
    begin = region_begin[region][row]
    first_key = begin + (lo - begin) // tile_keys * tile_keys
    count = ceil_div(hi - first_key, tile_keys)
    if not 0 < int(count.sum()) <= most_places:
        return None

    num_rows = np.bincount(cut.piece, minlength=len(block_count))
    first_pair = np.cumsum(num_rows * block_count) - num_rows * block_count  # [pieces]
    piece, number = spread(ceil_div(block_count, tile_blocks))   # [tiles]
    pair = first_pair[piece] + number * tile_blocks
    q_first = cut.q_begin[piece] + number * tile_blocks * block_len
    q_count = np.minimum(tile_blocks * block_len, cut.q_end[piece] - q_first)
    last = np.minimum((number + 1) * tile_blocks, block_count[piece]) - 1 - number * tile_blocks  # block of the tile
    tile, number = spread(num_rows[piece])                       # [tile, row pairs]
    low = pair[tile] + number * block_count[piece[tile]]
    high = low + last[tile]
    steps = (first_key[high] - first_key[low]) // tile_keys + count[high]
    length = np.bincount(tile, weights=steps, minlength=len(piece)).astype(np.int64)
    order = np.lexsort((-q_first, piece, -length_class(length, kv_heads * int(length.sum()), num_sms)))
    return KeptTables(
        table_of((q_first, q_count + 256 * num_rows[piece], pair, block_count[piece]), order),
        table_of((first_key, count, np.cumsum(count) - count, cut.k_end[row])),
        heads_in_turn(length[order], kv_heads, num_sms),
    )


def place_bytes(tile_keys: int) -> int:
    """Of dS of a block of queries and a tile of keys."""
    return 2 * tile_keys * BLOCK_ROWS


def most_places(device: torch.device, tile_keys: int) -> int:
    """How many places may be kept at a time, of all heads together; none where there is no GPU."""
    if device.type != "cuda":
        return 0
    return int(torch.cuda.get_device_properties(device).total_memory) // MEMORY_PART // place_bytes(tile_keys)
