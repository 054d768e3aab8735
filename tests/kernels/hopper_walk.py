"""The Hopper kernel's walk through its packed tables, one matrix tile at a time, in plain Python.

Each function reads the flat int32 array alone, as a launch does, and yields what the kernel multiplies next.
"""

from collections.abc import Iterator

import numpy as np

from distca.kernels.hopper_tables import BLOCK_ROWS, TILE_KEYS, Capacity


def work(num_items: int, kv_heads: int, heads_outer: int) -> Iterator[tuple[int, int]]:
    """(item, head) in the order of the grid."""
    for i in range(num_items * kv_heads):
        yield (i % num_items, i // num_items) if heads_outer else (i // kv_heads, i % kv_heads)


def walk_forward(
    packed: np.ndarray, capacity: Capacity, group: int, kv_heads: int, window: int | None
) -> Iterator[tuple[int, int, int, int, int, int, int]]:
    """(head, q_first, q_count, k_tile_first, k_lo, k_hi, shift) of every step: its keys are [k_lo, k_hi)."""
    ints = packed.tolist()
    tiles_at, segments_at, total = capacity.forward_offsets()
    assert len(ints) == total
    num_tiles, heads_outer = ints[:2]
    for tile, head in work(num_tiles, kv_heads, heads_outer):
        q_first, q_count, num_steps, segment = ints[tiles_at + 4 * tile : tiles_at + 4 * tile + 4]
        assert 0 < q_count <= 2 * (BLOCK_ROWS // group)
        assert num_steps > 0
        while num_steps > 0:
            assert segment < capacity.segments
            k_begin, k_end, shift, _ = ints[segments_at + 4 * segment : segments_at + 4 * segment + 4]
            hi = min(k_end, q_first + q_count + shift)
            lo = k_begin if window is None else max(k_begin, q_first + shift - window + 1)
            n_hi, n_lo = -(-(hi - k_begin) // TILE_KEYS), (lo - k_begin) // TILE_KEYS
            for n in range(n_hi - 1, n_lo - 1, -1):
                k_tile_first = k_begin + n * TILE_KEYS
                yield head, q_first, q_count, k_tile_first, k_tile_first, min(k_end, k_tile_first + TILE_KEYS), shift
            num_steps -= max(0, n_hi - n_lo)
            segment += 1
        assert num_steps == 0, "a tile ends inside a segment"


def walk_backward(
    packed: np.ndarray, capacity: Capacity, group: int, kv_heads: int, window: int | None
) -> Iterator[tuple[int, int, int, int, int, int, int, int, int]]:
    """(head, k_first, k_count, block_id, q_first, q_count, k_begin, k_end, shift) of every block that an item visits.

    The item's keys are [k_first, k_first + k_count), of which the row's are those inside [k_begin, k_end).
    """
    ints = packed.tolist()
    items_at, rows_at, blocks_at, total = capacity.backward_offsets()
    assert len(ints) == total
    block_len = BLOCK_ROWS // group
    num_items, heads_outer, num_table_blocks = ints[:3]
    for item, head in work(num_items, kv_heads, heads_outer):
        k_first, k_count, num_blocks, row = ints[items_at + 4 * item : items_at + 4 * item + 4]
        assert 0 < k_count <= TILE_KEYS
        assert num_blocks > 0
        while num_blocks > 0:
            assert row < capacity.rows
            q_begin, q_end, k_begin, k_end, shift, block_base, *_ = ints[rows_at + 8 * row : rows_at + 8 * row + 8]
            row += 1
            a, z = max(k_first, k_begin), min(k_first + k_count, k_end)
            if a >= z or q_end - 1 + shift < a:                  # the last block may be short of a whole one
                continue
            b0, b1 = max(0, a - shift - q_begin) // block_len, (q_end - 1 - q_begin) // block_len
            if window is not None:
                b1 = min(b1, (z - 2 + window - shift - q_begin) // block_len)
            for b in range(b0, b1 + 1):
                q_first = q_begin + b * block_len
                q_count = min(block_len, q_end - q_first)
                assert block_base + b < num_table_blocks
                at = blocks_at + 2 * (block_base + b)
                assert ints[at : at + 2] == [q_first, q_count], "the block's entry is not the row's block"
                yield head, k_first, k_count, block_base + b, q_first, q_count, k_begin, k_end, shift
            num_blocks -= max(0, b1 + 1 - b0)
        assert num_blocks == 0, "an item ends inside a row"
