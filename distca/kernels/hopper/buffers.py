"""Tables of the Hopper kernel in device memory: made once for a set of rows, and filled again with others'.

They stay where they are, so that launches and captured graphs that know their addresses go on with the new rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import torch

from distca.kernels.hopper.kept import FEW_TILES, kept_tables, most_places, place_bytes
from distca.kernels.hopper.tables import (
    TILE_BLOCKS,
    BackwardTables,
    Capacity,
    ForwardTables,
    backward_tables,
    forward_tables,
    tokens_per_block,
)
from distca.kernels.hopper.variants import TALL_GAIN, Tiles, tiles_of
from distca.kernels.interface import TaskRows

Heads = tuple[int, int, int]  # query heads, KV heads, head dim
Most = tuple[int, int, int]  # queries, keys and rows


@dataclass(frozen=True, slots=True)
class Kept:
    """Tables for dQ from gradients of scores that are kept in memory."""

    table: torch.Tensor  # int32, see KeptTables.pack
    pairs_at: int
    num_places: int  # of a KV head
    heads: int  # KV heads at a time
    num_bytes: int  # of their places

    @classmethod
    def build(cls, rows: TaskRows, window: int | None, heads: Heads, device: torch.device, num_sms: int) -> Kept | None:
        """None where there is no room for a head's."""
        tiles = tiles_of(heads[2])
        most = most_places(device, tiles.backward_keys)
        tables = kept_tables(rows, window, heads[0] // heads[1], heads[1], num_sms, tiles.kept_blocks,
                             tiles.backward_keys, most)
        if tables is None:
            return None
        table = _pinned(tables.pack(), device).to(device, non_blocking=True)
        at_a_time = min(heads[1], most // tables.num_places)
        return cls(table, tables.pairs_at, tables.num_places, at_a_time,
                   at_a_time * tables.num_places * place_bytes(tiles.backward_keys))


@dataclass(frozen=True, slots=True)
class Tables:
    """The tables of one set of rows for one kind of heads, on the device at fixed addresses."""

    capacity: Capacity
    forward: torch.Tensor  # int32, see ForwardTables.pack
    tall: torch.Tensor | None  # the same in tall tiles, for forward alone, where they are faster
    backward: torch.Tensor  # int32, see BackwardTables.pack
    counters: torch.Tensor  # int32 [3], of forward, backward and dQ by itself; zero between launches
    num_blocks: int  # of queries in backward
    num_parts: int  # of tiles whose keys are split
    num_sms: int  # multiprocessors that a launch takes
    kept: Kept | None  # where dS is kept
    forward_numbers: tuple[int, ...] = field(init=False)  # table, counter, where tiles, segments and merges begin
    dq_table: int = field(init=False)  # where dQ is computed by itself
    backward_numbers: tuple[int, ...] = field(init=False)  # table, counter, where items, rows and blocks begin

    def __post_init__(self) -> None:
        counters = self.counters.data_ptr()
        forward, backward = self.capacity.forward_offsets(), self.capacity.backward_offsets()
        table = self.forward if self.tall is None else self.tall
        object.__setattr__(self, "forward_numbers", (table.data_ptr(), counters, *forward[:-1]))
        object.__setattr__(self, "dq_table", self.forward.data_ptr())
        object.__setattr__(self, "backward_numbers", (self.backward.data_ptr(), counters + 4, *backward[:-1]))

    @classmethod
    def build(
        cls, rows: TaskRows, window: int | None, heads: Heads, device: torch.device, num_sms: int,
        most: Most | None = None,
    ) -> Tables:
        """With room for a little more, or for any rows up to `most`."""
        forward, backward, tall = tables_of(rows, window, heads, num_sms)
        capacity = Capacity.fitting(forward, backward)
        if most is not None:
            block_len = tokens_per_block(heads[0] // heads[1])
            capacity = capacity.or_more(Capacity.bound(*most, block_len, tiles_of(heads[2]).backward_keys))
        return cls(
            capacity,
            _pinned(forward.pack(capacity), device).to(device, non_blocking=True),
            None if tall is None else _pinned(tall.pack(capacity), device).to(device, non_blocking=True),
            _pinned(backward.pack(capacity), device).to(device, non_blocking=True),
            torch.zeros(3, dtype=torch.int32, device=device),
            len(backward.blocks),
            forward.num_parts,
            num_sms,
            None if most or forward.num_parts or not _keeps(tiles_of(heads[2]), backward) else
            Kept.build(rows, window, heads, device, num_sms),
        )

    def refilled(self, forward: ForwardTables, backward: BackwardTables, tall: ForwardTables | None) -> Tables:
        """Other rows' tables, which must fit, in the same buffers; their dS is not kept."""
        for buffer, tables in ((self.forward, forward), (self.backward, backward), (self.tall, tall)):
            if buffer is not None and tables is not None:
                buffer.copy_(_pinned(tables.pack(self.capacity), buffer.device), non_blocking=True)
        return replace(self, num_blocks=len(backward.blocks), num_parts=forward.num_parts, kept=None)


def multiprocessors(device: torch.device) -> int:
    """Of a GPU; one where there is none."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def tables_of(
    rows: TaskRows, window: int | None, heads: Heads, num_sms: int, most_parts: int | None = None,
    is_tall: bool | None = None,
) -> tuple[ForwardTables, BackwardTables, ForwardTables | None]:
    """Forward, backward, and forward in tall tiles: where it is faster, or as is asked for."""
    group, kv_heads, tiles = heads[0] // heads[1], heads[1], tiles_of(heads[2])
    forward = forward_tables(rows, window, group, kv_heads, num_sms, tiles.forward_keys, most_parts)
    backward = backward_tables(rows, window, group, kv_heads, num_sms, tiles.backward_keys)
    if is_tall is False or tiles.tall_blocks == TILE_BLOCKS or (is_tall is None and forward.num_parts):
        return forward, backward, None
    tall = forward_tables(rows, window, group, kv_heads, num_sms, tiles.forward_keys, 0, tiles.tall_blocks)
    taken, usual = (x.latest_end(kv_heads, num_sms) * blocks
                    for x, blocks in ((tall, tiles.tall_blocks), (forward, TILE_BLOCKS)))
    return forward, backward, tall if is_tall or taken < TALL_GAIN * usual else None


def _keeps(tiles: Tiles, backward: BackwardTables) -> bool:
    """Whether keeping dS is faster than adding dQ up, or than computing scores again where sums need an order."""
    few = int(backward.items[:, 2].sum()) <= FEW_TILES * len(backward.blocks)
    return tiles.kept_blocks > 0 and (tiles.dq_apart or few or torch.are_deterministic_algorithms_enabled())


def _pinned(packed: np.ndarray, device: torch.device) -> torch.Tensor:
    table = torch.from_numpy(packed)
    return table.pin_memory() if device.type == "cuda" else table
