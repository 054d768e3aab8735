"""dQ from gradients of scores that are kept in memory: five matrix products, and every sum in one order.

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
