"""What the Hopper kernel walks: task rows as flat int32 tables that a launch reads and a later step refills.

Rows differ wildly in length, so a launch is not one thread block per row but one list of work items, long ones first,
each with its exact number of matrix products. Forward, an item is a tile of queries that walks the keys of its rows.
Backward, it is a tile of keys that walks the queries of every row that reaches it: a key's gradient is summed in
registers and written once, however many rows share it, and only the gradients of queries meet in memory.

Rows come as `joined(visible(rows, window), window)`. With shift = k_begin + q_offset - q_begin, the query at buffer
index q sees the key at buffer index k iff

    k_begin <= k < k_end   and   k <= q + shift   and, with a window w,   k > q + shift - w.

Where a few tiles of queries would keep a launch waiting, their keys are split (hopper_split.py).

Everything here is a handful of numpy calls: no loop over rows, tiles or pairs of them.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from distca.columns import spread
from distca.kernels.hopper.split import Split, Steps, num_parts
from distca.kernels.interface import TaskRows
from distca.validation import UserError

TILE_KEYS = 128                                                  # keys of one matrix tile; fewer with wide heads
BLOCK_ROWS = 64                                                  # (token, head of the group) pairs of one block
TILE_BLOCKS = 2                                                  # of queries in a tile; three in tall ones
HEADER_INTS = 16
LATE = 1.075                                                     # of the even share, for what the cache gains
LARGEST = 2**30                                                  # a query's index plus its row's shift stays an int32


@dataclass(frozen=True, slots=True)
class Capacity:
    """How many entries each section has room for; sections start at fixed places, each a multiple of 16 bytes."""

    tiles: int
    segments: int
    items: int
    rows: int
    blocks: int
    parts: int = 0                                               # of tiles whose keys are split, in segments

    @classmethod
    def fitting(cls, forward: ForwardTables, backward: BackwardTables) -> Capacity:
        """Room for these tables and for a little more: every count rounded up to a power of two."""
        rooms = {name: 1 << max(0, count - 1).bit_length() for name, count in _counts(forward, backward).items()}
        return cls(**{**rooms, "parts": rooms["parts"] if forward.num_parts else 0})

    @classmethod
    def bound(cls, num_q: int, num_k: int, num_rows: int, tokens_per_block: int, tile_keys: int) -> Capacity:
        """Room for any rows whose queries are disjoint, with at most that many queries, keys and rows; no parts."""
        most_rows = min(num_rows, num_q)
        most_regions = min(most_rows, num_k)

        def most_parts(length: int, num_ranges: int, part: int) -> int:
            return (length + num_ranges * (part - 1)) // part

        return cls(
            tiles=most_parts(num_q, most_rows, 2 * tokens_per_block),
            segments=most_rows,
            items=most_parts(num_k, most_regions, tile_keys),
            rows=most_rows,
            blocks=most_parts(num_q, most_rows, tokens_per_block),
        )

    def or_more(self, other: Capacity) -> Capacity:
        """Room for what either has room for."""
        return Capacity(*(max(getattr(self, one.name), getattr(other, one.name)) for one in fields(self)))

    def holds(self, forward: ForwardTables, backward: BackwardTables) -> str | None:
        """None when both tables fit, else what does not and what to do."""
        for name, count in _counts(forward, backward).items():
            if count > getattr(self, name):
                return (f"the rows need {count} {name} but the tables have room for {getattr(self, name)}; "
                        "prepare with the largest step's rows")
        return None

    def forward_offsets(self) -> tuple[int, int, int, int]:
        """Where tiles, segments and merges begin, and how long the whole is, in ints."""
        segments_at = HEADER_INTS + 4 * (self.tiles + self.parts)
        merges_at = segments_at + 4 * (self.segments + self.parts)
        return HEADER_INTS, segments_at, merges_at, merges_at + 4 * (self.parts // 2)

    def backward_offsets(self) -> tuple[int, int, int, int]:
        """Where items, rows and blocks begin, and how long the whole is, in ints."""
        rows_at = HEADER_INTS + 4 * self.items
        blocks_at = rows_at + 8 * self.rows
        return HEADER_INTS, rows_at, blocks_at, blocks_at + 4 * ceil_div(self.blocks, 2)


@dataclass(frozen=True, slots=True)
class ForwardTables:
    """Tiles of queries and parts of them, long ones first, the rows of keys that they walk, and what is merged.

    A part's q_count has its number, counted from 1, times 256 besides, and its segments are for it alone.
    """

    tiles: np.ndarray                                            # [tiles, 4] q_first, q_count, num_steps, segment_begin
    segments: np.ndarray                                         # [segments, 4] k_begin, k_end, shift, 0
    merges: np.ndarray                                           # [split tiles, 4] q_first, q_count, first part, parts
    num_part_segments: int
    heads_outer: bool                                            # all tiles of one KV head before the next head's

    def latest_end(self, kv_heads: int, num_sms: int) -> float:
        """When the last item ends, in steps, where each begins when all before it are dealt out evenly."""
        length = self.tiles[:, 2].astype(np.int64)
        return float(((kv_heads * np.cumsum(length) - length) / num_sms + length).max(initial=0))

    @property
    def num_parts(self) -> int:
        return int(self.merges[:, 3].sum())

    def pack(self, capacity: Capacity) -> np.ndarray:
        """One flat int32 array: header, tiles, segments, merges."""
        header = [len(self.tiles), self.heads_outer, len(self.merges)]
        return _packed(header, [self.tiles, self.segments, self.merges], list(capacity.forward_offsets()))


@dataclass(frozen=True, slots=True)
class BackwardTables:
    """Tiles of keys, long ones first, the rows whose queries they walk, and all blocks of queries."""

    items: np.ndarray                                            # [items, 4] k_first, k_count, num_blocks, row_begin
    rows: np.ndarray                                             # [rows, 8] q_begin, q_end, k_begin, k_end, shift,
                                                                 #           block_base, pair_base, 0
    blocks: np.ndarray                                           # [blocks, 2] q_first, q_count
    heads_outer: bool                                            # all items of one KV head before the next head's

    def pack(self, capacity: Capacity) -> np.ndarray:
        """One flat int32 array: header, items, rows, blocks."""
        header = [len(self.items), self.heads_outer, len(self.blocks)]
        return _packed(header, [self.items, self.rows, self.blocks], list(capacity.backward_offsets()))


def tokens_per_block(group: int) -> int:
    """Tokens whose query heads of one KV head fill a block."""
    if not 1 <= group <= BLOCK_ROWS:
        raise UserError(f"group={group} query heads share a KV head; give 1 to {BLOCK_ROWS}, or choose another kernel")
    return BLOCK_ROWS // group


def forward_tables(
    rows: TaskRows, window: int | None, group: int, kv_heads: int, num_sms: int, tile_keys: int = TILE_KEYS,
    most_parts: int | None = None, blocks: int = TILE_BLOCKS,
) -> ForwardTables:
    """Tiles of some blocks of queries; each walks, row after row, the key tiles that its queries see.

    Keys of long tiles are split into no more than `most_parts` segments in all.
    """
    tile_len = blocks * tokens_per_block(group)
    cut = cut_rows(rows)
    segment_count = np.bincount(cut.piece, minlength=len(cut.q_begin))
    segment_begin = np.cumsum(segment_count) - segment_count     # [pieces]
    tile_count = ceil_div(cut.q_end - cut.q_begin, tile_len)
    piece, number = spread(tile_count)
    number = tile_count[piece] - 1 - number                      # the longest of a causal piece first
    q_first = cut.q_begin[piece] + number * tile_len             # [tiles]
    q_count = np.minimum(tile_len, cut.q_end[piece] - q_first)
    tile, number = spread(segment_count[piece])                  # [tile, segment pairs]
    segment = segment_begin[piece][tile] + number
    lo, hi = cut.seen(segment, q_first[tile], (q_first + q_count)[tile], window)
    k_begin = cut.k_begin[segment]
    steps = ceil_div(hi - k_begin, tile_keys) - (lo - k_begin) // tile_keys
    num_steps = np.add.reduceat(steps, np.flatnonzero(number == 0))
    walked = Steps(tile, segment, steps, ceil_div(hi - k_begin, tile_keys))
    parts = num_parts(num_steps, walked, kv_heads, num_sms, most_parts)
    split = Split.of(parts, num_steps, segment_begin[piece], walked, cut.k_begin, cut.k_end, tile_keys)
    tile, num_steps = split.tile, split.num_steps                # of parts too
    classes = length_class(num_steps, kv_heads * int(num_steps.sum()), num_sms)
    order = np.lexsort((tile, split.part, piece[tile], -classes))  # parts with the same keys side by side
    nothing = np.zeros(len(cut.shift) + len(split.from_segment), dtype=np.int64)
    is_split = parts > 1
    return ForwardTables(
        table_of((q_first[tile], q_count[tile] + 256 * split.slot, num_steps, split.segment_begin), order),
        table_of((np.append(cut.k_begin, split.k_begin), np.append(cut.k_end, split.k_end),
                np.append(cut.shift, cut.shift[split.from_segment]), nothing)),
        table_of((q_first[is_split], q_count[is_split], (np.cumsum(parts * is_split) - parts)[is_split],
                parts[is_split])),
        len(split.from_segment),
        _heads_outer(num_steps, num_sms),
    )


def backward_tables(
    rows: TaskRows, window: int | None, group: int, kv_heads: int, num_sms: int, tile_keys: int = TILE_KEYS
) -> BackwardTables:
    """Tiles of keys; each walks, row after row of its region, the blocks of queries that see some of its keys."""
    block_len = tokens_per_block(group)
    cut = cut_rows(rows)
    region, region_begin, region_end = regions_of(cut.k_begin, cut.k_end)
    item_region, number = spread(ceil_div(region_end - region_begin, tile_keys))
    k_first = region_begin[item_region] + number * tile_keys     # [items]
    k_count = np.minimum(tile_keys, region_end[item_region] - k_first)
    first_item = np.flatnonzero(number == 0)                     # [regions]

    block_count = ceil_div(cut.q_end - cut.q_begin, block_len)
    block_base = np.cumsum(block_count) - block_count            # [pieces]
    block_piece, number = spread(block_count)
    q_first = cut.q_begin[block_piece] + number * block_len      # [blocks]
    q_count = np.minimum(block_len, cut.q_end[block_piece] - q_first)

    pair_count = block_count[cut.piece]
    row, number = spread(pair_count)                             # [row, block pairs]
    block = block_base[cut.piece][row] + number
    lo, hi = cut.seen(row, q_first[block], (q_first + q_count)[block], window)
    item, k_begin = first_item[region][row], region_begin[region][row]
    enters = np.bincount(item + (lo - k_begin) // tile_keys, minlength=len(k_first) + 1)
    leaves = np.bincount(item + ceil_div(hi - k_begin, tile_keys), minlength=len(k_first) + 1)
    num_blocks = np.cumsum(enters - leaves)[:-1]                 # the items that visit a block are neighbours
    assert (num_blocks > 0).all(), "rows with keys that no query sees: pass visible rows"

    pair_base = np.cumsum(pair_count) - pair_count               # [rows] where dS is kept (hopper_kept.py)
    row_order = np.lexsort((-cut.k_end, region))
    row_count = np.bincount(region, minlength=len(region_begin))
    row_begin = np.cumsum(row_count) - row_count                 # [regions]
    item_order = np.argsort(-length_class(num_blocks, kv_heads * int(num_blocks.sum()), num_sms), kind="stable")
    nothing = np.zeros_like(cut.shift)
    return BackwardTables(
        table_of((k_first, k_count, num_blocks, row_begin[item_region]), item_order),
        table_of((cut.q_begin[cut.piece], cut.q_end[cut.piece], cut.k_begin, cut.k_end, cut.shift,
                block_base[cut.piece], pair_base, nothing), row_order),
        table_of((q_first, q_count)),
        heads_in_turn(num_blocks[item_order], kv_heads, num_sms),
    )


@dataclass(frozen=True, slots=True)
class Cut:
    """Rows cut so that any two have the same queries, a piece, or none in common; in the order of their queries."""

    q_begin: np.ndarray                                          # [pieces]
    q_end: np.ndarray                                            # [pieces]
    piece: np.ndarray                                            # [rows] ascending
    k_begin: np.ndarray                                          # [rows]
    k_end: np.ndarray                                            # [rows]
    shift: np.ndarray                                            # [rows]

    def seen(
        self, row: np.ndarray, q_first: np.ndarray, q_stop: np.ndarray, window: int | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """The keys of a row that some of these queries, all of the row, see: [lo, hi), without a hole."""
        lo, shift = self.k_begin[row], self.shift[row]
        hi = np.minimum(self.k_end[row], q_stop + shift)
        if window is not None:
            lo = np.maximum(lo, q_first + shift - window + 1)
        assert (lo < hi).all(), "rows with queries that see no key: pass visible rows"
        return lo, hi


def cut_rows(rows: TaskRows) -> Cut:
    cuts = np.unique(np.concatenate([rows.q_begin, rows.q_end]))
    first = np.searchsorted(cuts, rows.q_begin)
    row, number = spread(np.searchsorted(cuts, rows.q_end) - first)
    between = first[row] + number                                # the cut that the piece follows
    order = np.argsort(between, kind="stable")
    row, (used, piece) = row[order], np.unique(between[order], return_inverse=True)
    shift = rows.k_begin + rows.q_offset - rows.q_begin
    return Cut(cuts[used], cuts[used + 1], piece, rows.k_begin[row], rows.k_end[row], shift[row])


def regions_of(begin: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Each range's region, and the regions' bounds: ranges that share a key, also by way of others, are in one."""
    order = np.argsort(begin, kind="stable")
    reach = np.maximum.accumulate(end[order])
    opens = np.append(True, begin[order][1:] >= reach[:-1])[: len(begin)]
    region = np.empty_like(begin)
    region[order] = np.cumsum(opens) - 1
    closes = np.append(opens[1:], True)[: len(begin)]
    return region, begin[order][opens], reach[closes]


def length_class(length: np.ndarray, total: int, num_sms: int) -> np.ndarray:
    """Lengths in sixteenths of what one multiprocessor computes in all.

    The longest classes come first, so that no multiprocessor is left with a long item at the end. Inside a class items
    stay in their own order: side by side with those that read the same keys or add to the same queries, in the cache.
    """
    return length * 16 * num_sms // max(1, total)


def _heads_outer(length: np.ndarray, num_sms: int) -> bool:
    """Whether one head's work is long enough to run by itself: its keys stay in cache and its tail is short."""
    return int(length.sum()) >= 2 * num_sms * int(length.max(initial=0))


def heads_in_turn(length: np.ndarray, kv_heads: int, num_sms: int) -> bool:
    """Whether each head's items, in this order, may come before the next head's without a late end.

    Queries and their sums of one head stay in cache then. An item begins at the latest when all before it are dealt out
    evenly, and so the last head's decide.
    """
    total = int(length.sum())
    end = ((kv_heads - 1) * total + np.cumsum(length) - length) / num_sms + length
    return bool(end.max(initial=0) <= LATE * max(kv_heads * total / num_sms, int(length.max(initial=0))))


def ceil_div(length: Any, part: int) -> Any:
    return -(-length // part)


def table_of(columns: tuple[np.ndarray, ...], order: np.ndarray | slice = slice(None)) -> np.ndarray:
    table = np.stack(columns, axis=1)[order]
    largest = int(np.abs(table).max(initial=0))
    if largest > LARGEST:
        raise UserError(f"task rows hold the index or shift {largest}; keep buffers and q_offset within {LARGEST}")
    table = table.astype(np.int32)
    table.setflags(write=False)
    return table


def _counts(forward: ForwardTables, backward: BackwardTables) -> dict[str, int]:
    return {
        "tiles": len(forward.tiles) - forward.num_parts + len(forward.merges),
        "segments": len(forward.segments) - forward.num_part_segments,
        "items": len(backward.items),
        "rows": len(backward.rows),
        "blocks": len(backward.blocks),
        "parts": forward.num_part_segments,
    }


def _packed(header: list[int], sections: list[np.ndarray], offsets: list[int]) -> np.ndarray:
    packed = np.zeros(offsets[-1], dtype=np.int32)
    packed[: len(header)] = header
    for section, begin, end in zip(sections, offsets[:-1], offsets[1:], strict=True):
        assert section.size <= end - begin, "ask Capacity.holds before packing"
        packed[begin : begin + section.size] = section.ravel()
    return packed
