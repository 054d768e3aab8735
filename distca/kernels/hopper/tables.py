"""Task tables of the Hopper kernel: flat int32 arrays that a launch reads.

Task lengths differ greatly, so a launch processes one list of work items, long ones first, each with its exact number
of matrix products, instead of one thread block per task. In forward an item is a tile of queries that walks the keys of
its tasks. In backward an item is a tile of keys that walks the queries of every task that has these keys: a key's
gradient is summed in registers and written once, and only gradients of queries are summed in memory.

Tasks come as `joined(visible(tasks, window), window)`. With shift = k_begin + q_offset - q_begin, the query at buffer
index q sees the key at buffer index k iff

    k_begin <= k < k_end   and   k <= q + shift   and, with a window w,   k > q + shift - w.

If a few tiles would delay the end of a launch, what they walk is split into parts (split.py).

There are three ways to compute dQ. Atomic adds in memory have no fixed order, and need a float32 workspace, zeroing it
and a last pass over it, however few keys there are. A separate dQ kernel has a fixed order but computes scores and dP
again. Storing the gradients of scores (dS) of all pairs has a fixed order and needs only five matrix products. Stored
dS is used with wide heads, whose small key tiles need many atomic adds, if queries see few keys, and if the order must
be fixed.

All tables are built with a few numpy calls, without loops over tasks or tiles.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from distca.columns import spread
from distca.kernels.hopper.pieces import ceil_div, cut_tasks, regions_of
from distca.kernels.hopper.split import NO_STEPS, Split, Steps, ends_late, num_parts
from distca.kernels.interface import TaskRows
from distca.validation import UserError

TILE_KEYS = 128                                                  # keys of one matrix tile; fewer with wide heads
BLOCK_ROWS = 64                                                  # (token, head of the group) pairs of one block
TILE_BLOCKS = 2                                                  # blocks of queries in a tile; three in tall tiles
HEADER_INTS = 16
LATE = 1.075                                                     # acceptable makespan / even share, for cache hits
LARGEST = 2**30                                                  # a query's index plus its task's shift stays an int32


@dataclass(frozen=True, slots=True)
class ForwardTables:
    """Tiles of queries or parts of them, long ones first; the segments of keys that they walk; and tiles to merge.

    A part's number, counted from 1, times 256 is added to its q_count. Segments of a part belong to it only.
    """

    tiles: np.ndarray                                            # [tiles, 4] q_first, q_count, num_steps, segment_begin
    segments: np.ndarray                                         # [segments, 4] k_begin, k_end, shift, 0
    merges: np.ndarray                                           # [split tiles, 4] q_first, q_count, first part, parts
    heads_outer: bool                                            # all tiles of one KV head before the next head's

    def latest_end(self, kv_heads: int, num_sms: int) -> float:
        """Return the latest end of an item, in iterations, if each begins after an even spread of all items before."""
        length = self.tiles[:, 2].astype(np.int64)
        return float(((kv_heads * np.cumsum(length) - length) / num_sms + length).max(initial=0))

    @property
    def num_parts(self) -> int:
        return int(self.merges[:, 3].sum())

    def pack(self) -> tuple[np.ndarray, tuple[int, ...]]:
        """Return one flat int32 array, and the offsets of tiles, segments and merges in it."""
        return _packed((len(self.tiles), self.heads_outer, len(self.merges)), self.tiles, self.segments, self.merges)


@dataclass(frozen=True, slots=True)
class BackwardTables:
    """Tiles of keys or parts of them, long ones first; the tasks that they walk; tiles to merge; blocks of queries.

    A part's number, counted from 1, times 256 is added to its k_count. Tasks of a part belong to it only.
    """

    items: np.ndarray                                            # [items, 4] k_first, k_count, num_blocks, task_begin
    tasks: np.ndarray                                            # [tasks, 8] q_begin, q_end, k_begin, k_end, shift,
                                                                 #            block_base, pair_base, 0
    merges: np.ndarray                                           # [split tiles, 4] k_first, k_count, first part, parts
    blocks: np.ndarray                                           # [blocks, 2] q_first, q_count
    heads_outer: bool                                            # all items of one KV head before the next head's

    @property
    def num_parts(self) -> int:
        return int(self.merges[:, 3].sum())

    def pack(self) -> tuple[np.ndarray, tuple[int, ...]]:
        """Return one flat int32 array, and the offsets of items, tasks, merges and blocks in it."""
        return _packed((len(self.items), self.heads_outer, len(self.blocks), len(self.merges)),
                       self.items, self.tasks, self.merges, self.blocks)


@dataclass(frozen=True, slots=True)
class KeptTables:
    """Tiles of queries, long ones first, and the keys that each block of a task sees.

    Each (task, block of queries, tile of keys) that has visible pairs has one slot for its dS (here "place"). The
    places of a block are adjacent, in the order of keys.
    """

    tiles: np.ndarray                                            # [tiles, 4] q_first, q_count + 256 * tasks,
                                                                 #            first pair, pairs to the next task's
    pairs: np.ndarray                                            # [task, block pairs; 4] first key, tiles of keys,
                                                                 #                        first place, k_end
    heads_outer: bool

    @property
    def num_places(self) -> int:
        return int(self.pairs[:, 1].sum(dtype=np.int64))

    def pack(self) -> tuple[np.ndarray, tuple[int, ...]]:
        """Return one flat int32 array, and the offsets of tiles and pairs in it."""
        return _packed((len(self.tiles), self.heads_outer, self.num_places), self.tiles, self.pairs)


def _packed(header: tuple[int, ...], *sections: np.ndarray) -> tuple[np.ndarray, tuple[int, ...]]:
    """Concatenate the header and the sections; every section begins at a multiple of 16 bytes."""
    ends = HEADER_INTS + np.cumsum([section.size for section in sections])
    first = np.zeros(HEADER_INTS, dtype=np.int32)
    first[: len(header)] = header
    return np.concatenate([first, *(section.ravel() for section in sections)]), (HEADER_INTS, *ends[:-1].tolist())


def tokens_per_block(group: int) -> int:
    """Return the number of tokens whose query heads of one KV head fill a block."""
    if not 1 <= group <= BLOCK_ROWS:
        raise UserError(f"group={group} query heads share a KV head; give 1 to {BLOCK_ROWS}, or choose another kernel")
    return BLOCK_ROWS // group


def forward_tables(
    tasks: TaskRows, window: int | None, group: int, kv_heads: int, num_sms: int, tile_keys: int = TILE_KEYS,
    blocks: int = TILE_BLOCKS,
) -> ForwardTables:
    """Build tables for tiles of `blocks` blocks of queries; each tile walks the key tiles that its queries see.

    Keys of long tiles are split, except with tall tiles.
    """
    tile_len = blocks * tokens_per_block(group)
    cut = cut_tasks(tasks)
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
    parts = (num_parts(num_steps, walked, kv_heads, num_sms) if blocks == TILE_BLOCKS else
             np.ones(len(num_steps), dtype=np.int64))
    split = Split.of(parts, num_steps, segment_begin[piece], walked, cut.k_begin, cut.k_end, tile_keys)
    tile, num_steps = split.tile, split.num_steps                # now per item, parts included
    classes = length_class(num_steps, kv_heads * int(num_steps.sum()), num_sms)
    order = np.lexsort((tile, split.part, piece[tile], -classes))  # parts with the same keys adjacent
    nothing = np.zeros(len(cut.shift) + len(split.from_segment), dtype=np.int64)
    return ForwardTables(
        table_of((q_first[tile], q_count[tile] + 256 * split.slot, num_steps, split.segment_begin), order),
        table_of((np.append(cut.k_begin, split.begin), np.append(cut.k_end, split.end),
                  np.append(cut.shift, cut.shift[split.from_segment]), nothing)),
        merges_of(parts, q_first, q_count),
        int(num_steps.sum()) >= 2 * num_sms * int(num_steps.max(initial=0)),  # keeps a head's keys in cache
    )


def backward_tables(
    tasks: TaskRows, window: int | None, group: int, kv_heads: int, num_sms: int, tile_keys: int = TILE_KEYS
) -> BackwardTables:
    """Build tables for tiles of keys; each walks the blocks of queries, task by task, that see some of its keys."""
    block_len = tokens_per_block(group)
    cut = cut_tasks(tasks)
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
    task, number = spread(pair_count)                            # [task, block pairs]
    block = block_base[cut.piece][task] + number
    lo, hi = cut.seen(task, q_first[block], (q_first + q_count)[block], window)
    item, k_begin = first_item[region][task], region_begin[region][task]
    enters = np.bincount(item + (lo - k_begin) // tile_keys, minlength=len(k_first) + 1)
    leaves = np.bincount(item + ceil_div(hi - k_begin, tile_keys), minlength=len(k_first) + 1)
    num_blocks = np.cumsum(enters - leaves)[:-1]                 # items that visit a block are adjacent
    assert (num_blocks > 0).all(), "tasks with keys that no query sees: pass visible tasks"

    pair_base = np.cumsum(pair_count) - pair_count               # [tasks] in KeptTables.pairs
    task_order = np.lexsort((-cut.k_end, region))
    task_count = np.bincount(region, minlength=len(region_begin))
    task_begin = (np.cumsum(task_count) - task_count)[item_region]
    q_begin, q_end = cut.q_begin[cut.piece][task_order], cut.q_end[cut.piece][task_order]
    late = ends_late(num_blocks, kv_heads, num_sms)
    walked = cut.walked(task_order, first_item[region], k_first, k_count, block_len, window) if late else NO_STEPS
    parts = num_parts(num_blocks, walked, kv_heads, num_sms)
    split = Split.of(parts, num_blocks, task_begin, walked, q_begin, q_end, block_len)
    item, num_blocks = split.tile, split.num_steps               # now parts included
    order = np.lexsort((item, split.part, -length_class(num_blocks, kv_heads * int(num_blocks.sum()), num_sms)))
    base = np.concatenate([np.zeros_like(q_begin), (split.begin - q_begin[split.from_segment]) // block_len])
    task = np.append(task_order, task_order[split.from_segment])
    return BackwardTables(
        table_of((k_first[item], k_count[item] + 256 * split.slot, num_blocks, split.segment_begin), order),
        table_of((np.append(q_begin, split.begin), np.append(q_end, split.end), cut.k_begin[task], cut.k_end[task],
                  cut.shift[task], block_base[cut.piece][task] + base, pair_base[task] + base, np.zeros_like(task))),
        merges_of(parts, k_first, k_count),
        table_of((q_first, q_count)),
        heads_in_turn(num_blocks[order], kv_heads, num_sms),
    )


def kept_tables(
    tasks: TaskRows, window: int | None, group: int, kv_heads: int, num_sms: int, tile_blocks: int, tile_keys: int,
    most_places: int,
) -> KeptTables | None:
    """Build tables for computing dQ from the dS that backward stores; None if dS needs more than `most_places`."""
    block_len = tokens_per_block(group)
    cut = cut_tasks(tasks)
    region, region_begin, _ = regions_of(cut.k_begin, cut.k_end)
    block_count = ceil_div(cut.q_end - cut.q_begin, block_len)   # [pieces]
    task, number = spread(block_count[cut.piece])                # [task, block pairs]
    q_first = cut.q_begin[cut.piece][task] + number * block_len
    q_stop = np.minimum(q_first + block_len, cut.q_end[cut.piece][task])
    lo, hi = cut.seen(task, q_first, q_stop, window)
    begin = region_begin[region][task]
    first_key = begin + (lo - begin) // tile_keys * tile_keys
    count = ceil_div(hi - first_key, tile_keys)
    if not 0 < int(count.sum()) <= most_places:
        return None

    num_tasks = np.bincount(cut.piece, minlength=len(block_count))
    first_pair = np.cumsum(num_tasks * block_count) - num_tasks * block_count  # [pieces]
    piece, number = spread(ceil_div(block_count, tile_blocks))   # [tiles]
    pair = first_pair[piece] + number * tile_blocks
    q_first = cut.q_begin[piece] + number * tile_blocks * block_len
    q_count = np.minimum(tile_blocks * block_len, cut.q_end[piece] - q_first)
    last = np.minimum((number + 1) * tile_blocks, block_count[piece]) - 1 - number * tile_blocks  # block of the tile
    tile, number = spread(num_tasks[piece])                      # [tile, task pairs]
    low = pair[tile] + number * block_count[piece[tile]]
    high = low + last[tile]
    steps = (first_key[high] - first_key[low]) // tile_keys + count[high]
    length = np.bincount(tile, weights=steps, minlength=len(piece)).astype(np.int64)
    order = np.lexsort((-q_first, piece, -length_class(length, kv_heads * int(length.sum()), num_sms)))
    return KeptTables(
        table_of((q_first, q_count + 256 * num_tasks[piece], pair, block_count[piece]), order),
        table_of((first_key, count, np.cumsum(count) - count, cut.k_end[task])),
        heads_in_turn(length[order], kv_heads, num_sms),
    )


def length_class(length: np.ndarray, total: int, num_sms: int) -> np.ndarray:
    """Return lengths in sixteenths of one multiprocessor's even share of the work.

    The longest classes come first, so that no multiprocessor starts a long item at the end. Inside a class items keep
    their order, so items that read the same keys or add to the same queries are adjacent and share the cache.
    """
    return length * 16 * num_sms // max(1, total)


def heads_in_turn(length: np.ndarray, kv_heads: int, num_sms: int) -> bool:
    """Return whether processing heads one after another, with items in this order, delays the end too little to matter.

    This order keeps one head's queries and their sums in cache. An item begins at the latest when all items before it
    are spread evenly, so the last head's items determine the end.
    """
    total = int(length.sum())
    end = ((kv_heads - 1) * total + np.cumsum(length) - length) / num_sms + length
    return bool(end.max(initial=0) <= LATE * max(kv_heads * total / num_sms, int(length.max(initial=0))))


def merges_of(parts: np.ndarray, first: np.ndarray, count: np.ndarray) -> np.ndarray:
    """Return the table of tiles that have parts: what they begin with and hold, their first part, their parts."""
    is_split = parts > 1
    return table_of((first, count, np.cumsum(parts * is_split) - parts, parts), np.flatnonzero(is_split))


def table_of(columns: tuple[np.ndarray, ...], order: np.ndarray | slice = slice(None)) -> np.ndarray:
    table = np.stack(columns, axis=1)[order]
    largest = int(np.abs(table).max(initial=0))
    if largest > LARGEST:
        raise UserError(f"task rows hold the index or shift {largest}; keep buffers and q_offset within {LARGEST}")
    table = table.astype(np.int32)
    table.setflags(write=False)
    return table
