"""Tables of the Hopper kernel in device memory, for given numbers and dim of heads."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from distca.kernels.hopper.tables import (
    BLOCK_ROWS,
    TILE_BLOCKS,
    BackwardTables,
    ForwardTables,
    KeptTables,
    backward_tables,
    forward_tables,
    kept_tables,
)
from distca.kernels.hopper.variants import TALL_GAIN, tiles_of
from distca.kernels.interface import TaskRows

KEPT_MEMORY = 32                                                 # dS takes at most 1/32 of device memory
FEW_TILES = 24                                                   # mean key tiles per block up to which dS is kept


class Heads(NamedTuple):
    """Number of query heads, number of KV heads, and the head dim."""

    query: int
    kv: int
    dim: int


class DeviceTable(NamedTuple):
    """A packed table on the device, and the offsets of its sections in ints."""

    ints: Tensor
    offsets: tuple[int, ...]

    @classmethod
    def of(cls, tables: ForwardTables | BackwardTables | KeptTables, device: torch.device) -> DeviceTable:
        packed, offsets = tables.pack()
        ints = torch.from_numpy(packed)
        return cls((ints.pin_memory() if device.type == "cuda" else ints).to(device, non_blocking=True), offsets)


class Kept(NamedTuple):
    """Tables for computing dQ from dS stored in memory, for a few KV heads at a time."""

    table: DeviceTable
    num_places: int  # dS tiles of a KV head
    heads: int  # KV heads at a time
    num_bytes: int  # of the dS tiles of these heads


@dataclass(frozen=True, slots=True)
class Counters:
    """The counters from which launches draw their work, one set per stream, so that streams may overlap.

    A set is int32 [3] for forward, backward and the separate dQ kernel, and zero between launches. The first launch on
    another stream than the tables' own waits until the tables are copied.
    """

    copied: list[Tensor]  # all tables
    event: torch.cuda.Event | None  # recorded behind the copies
    first: Tensor  # of the stream on which the tables are copied
    others: dict[int, Tensor] = field(default_factory=dict)
    addresses: dict[int, int] = field(default_factory=dict)  # of the set of a stream

    @classmethod
    def of(cls, copied: list[Tensor], device: torch.device) -> Counters:
        first, event = torch.zeros(3, dtype=torch.int32, device=device), None
        addresses: dict[int, int] = {}
        if device.type == "cuda":
            stream = torch.cuda.current_stream(device)
            event = torch.cuda.Event()
            event.record(stream)
            addresses[stream.cuda_stream] = first.data_ptr()
        return cls(copied, event, first, {}, addresses)

    def address(self, stream: int) -> int:
        """Return the address of the set of `stream`, the current stream of the tables' device."""
        found = self.addresses.get(stream)
        return self._added(stream) if found is None else found

    def _added(self, stream: int) -> int:
        if self.event is None or torch._C._cuda_isCurrentStreamCapturing():
            return self.first.data_ptr()  # a capture executes nothing, so zeros of its own would not be there
        here = torch.cuda.current_stream(self.first.device)
        here.wait_event(self.event)
        for table in self.copied:
            table.record_stream(here)
        self.others[stream] = torch.zeros_like(self.first)
        self.addresses[stream] = self.others[stream].data_ptr()
        return self.addresses[stream]


@dataclass(frozen=True)
class Tables:
    """The tables of one prepared set of tasks."""

    forward: DeviceTable  # also used by the separate dQ kernel
    tall: DeviceTable | None  # the same with tall tiles, for forward only, if these are faster
    backward: DeviceTable
    num_blocks: int  # of queries in backward
    num_parts: int  # of tiles of queries whose keys are split
    num_key_parts: int  # of tiles of keys whose queries are split, in backward
    num_sms: int  # multiprocessors that a launch uses
    kept: Kept | None
    counters: Counters

    @classmethod
    def build(cls, tasks: TaskRows, window: int | None, heads: Heads, device: torch.device, num_sms: int) -> Tables:
        """Build the tables for visible, joined tasks; forward also gets tall tiles if these are faster."""
        tiles, grid = tiles_of(heads.dim), (heads.query // heads.kv, heads.kv, num_sms)
        forward = forward_tables(tasks, window, *grid, tiles.forward_keys)
        backward = backward_tables(tasks, window, *grid, tiles.backward_keys)
        tall = None
        if tiles.tall_blocks > TILE_BLOCKS and not forward.num_parts:
            tall = forward_tables(tasks, window, *grid, tiles.forward_keys, tiles.tall_blocks)
            taken, usual = (x.latest_end(heads.kv, num_sms) * blocks
                            for x, blocks in ((tall, tiles.tall_blocks), (forward, TILE_BLOCKS)))
            tall = tall if taken < TALL_GAIN * usual else None
        few = int(backward.items[:, 2].sum()) <= FEW_TILES * len(backward.blocks)
        keeps = tiles.dq_apart or few or torch.are_deterministic_algorithms_enabled()
        kept = _kept(tasks, window, heads, device, num_sms) if keeps and not forward.num_parts else None
        forward_table, backward_table = DeviceTable.of(forward, device), DeviceTable.of(backward, device)
        tall_table = None if tall is None else DeviceTable.of(tall, device)
        copied = [table.ints for table in (forward_table, tall_table, backward_table) if table is not None]
        if kept is not None:
            copied.append(kept.table.ints)
        return cls(forward_table, tall_table, backward_table, len(backward.blocks), forward.num_parts,
                   backward.num_parts, num_sms, kept, Counters.of(copied, device))

    @cached_property
    def forward_numbers(self) -> tuple[int, ...]:
        """Arguments of a forward launch: address of its table, offsets of tiles, segments, merges."""
        table = self.forward if self.tall is None else self.tall
        return table.ints.data_ptr(), *table.offsets

    @cached_property
    def backward_numbers(self) -> tuple[int, ...]:
        """Arguments of a backward launch: address of its table, offsets of items, tasks, merges, blocks."""
        return self.backward.ints.data_ptr(), *self.backward.offsets

    @cached_property
    def dq_numbers(self) -> tuple[int, ...]:
        """Arguments of the separate dQ kernel: address of its table, offsets of tiles, segments, merges."""
        return self.forward.ints.data_ptr(), *self.forward.offsets


def _kept(tasks: TaskRows, window: int | None, heads: Heads, device: torch.device, num_sms: int) -> Kept | None:
    """Build the tables for kept dS; None if it is never faster for this head dim, or too large for one KV head."""
    tiles = tiles_of(heads.dim)
    place_bytes = 2 * tiles.backward_keys * BLOCK_ROWS
    most = most_places(device, place_bytes)
    tables = None if tiles.kept_blocks == 0 else kept_tables(
        tasks, window, heads.query // heads.kv, heads.kv, num_sms, tiles.kept_blocks, tiles.backward_keys, most)
    if tables is None:
        return None
    at_a_time = min(heads.kv, most // tables.num_places)
    return Kept(DeviceTable.of(tables, device), tables.num_places, at_a_time,
                at_a_time * tables.num_places * place_bytes)


def most_places(device: torch.device, place_bytes: int) -> int:
    """Return how many dS tiles, over all heads, may be stored at a time; 0 without a GPU."""
    if device.type != "cuda":
        return 0
    return int(torch.cuda.get_device_properties(device).total_memory) // KEPT_MEMORY // place_bytes


def multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU; 1 without a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
