"""Launches of the Hopper kernel: its tables in device memory, its tensor maps.

Everything that a call needs beside its results' addresses is made once and kept, because a launch should cost the
host little more than the driver does: tables per set of rows, launches with their tensor maps per place in memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from threading import get_ident
from typing import Any

import numpy as np
import torch

from distca.kernels.cuda_driver import Launch, TensorMap, tensor_map
from distca.kernels.hopper_kept import kept_tables, most_places, place_bytes
from distca.kernels.hopper_tables import (
    BLOCK_ROWS,
    TILE_BLOCKS,
    BackwardTables,
    Capacity,
    ForwardTables,
    backward_tables,
    forward_tables,
    tokens_per_block,
)
from distca.kernels.hopper_tiles import DIMS_TEXT, TALL_GAIN, TILES, tiles_of
from distca.kernels.hopper_variants import backward_kernels, forward_kernels
from distca.kernels.interface import TaskRows, dims_text

PANEL = 64  # columns that a tensor copy brings at once
MERGE_BLOCKS = 16  # thread blocks to a multiprocessor
CALLS_KEPT = 512

Heads = tuple[int, int, int]  # query heads, KV heads, head dim
Most = tuple[int, int, int]  # queries, keys and rows


@dataclass(frozen=True, slots=True)
class Kept:
    """Tables for dQ from gradients of scores that are kept in memory, on the device."""

    table: torch.Tensor  # int32, see KeptTables.pack
    pairs_at: int
    num_places: int  # of a KV head
    heads: int  # KV heads at a time
    num_bytes: int  # of all places

    @classmethod
    def build(cls, rows: TaskRows, window: int | None, heads: Heads, device: torch.device, num_sms: int) -> Kept | None:
        """None where there is no room for a head's."""
        tiles = tiles_of(heads[2])
        most = most_places(device, tiles.backward_keys)
        if not most:
            return None
        tables = kept_tables(rows, window, heads[0] // heads[1], heads[1], num_sms, tiles.kept_blocks,
                             tiles.backward_keys, most)
        if tables is None:
            return None
        table = _pinned(tables.pack(), device).to(device, non_blocking=True)
        at_a_time = min(heads[1], most // tables.num_places)
        size = at_a_time * tables.num_places * place_bytes(tiles.backward_keys)
        return cls(table, tables.pairs_at, tables.num_places, at_a_time, size)


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
            Kept.build(rows, window, heads, device, num_sms) if most is None else None,
        )

    def refilled(self, forward: ForwardTables, backward: BackwardTables, tall: ForwardTables | None) -> Tables:
        """Other rows' tables, which must fit, in the same buffers."""
        for buffer, tables in ((self.forward, forward), (self.backward, backward), (self.tall, tall)):
            if buffer is not None and tables is not None:
                buffer.copy_(_pinned(tables.pack(self.capacity), buffer.device), non_blocking=True)
        return replace(self, num_blocks=len(backward.blocks), num_parts=forward.num_parts, kept=None)


def run_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    tables: Tables,
    num_parts: int,
    window: int | None,
    scale: float,
) -> None:
    """Fill the rows' places in out and lse; there is room for that many parts of tiles, or no tile has parts."""
    is_tall = tables.tall is not None  # tall tiles have no parts
    call = _forward_call(
        get_ident(), q.device, q.shape, k.shape, v.shape, q.data_ptr(), k.data_ptr(), v.data_ptr(), q.stride(),
        k.stride(), v.stride(), window is not None, num_parts > 0 and not is_tall, is_tall,
    )
    if call is None:
        run_forward(_contiguous(q), _contiguous(k), _contiguous(v), out, lse, tables, num_parts, window, scale)
        return
    launch, merge, device_index = call
    kv_heads, stream = k.shape[1], torch._C._cuda_getCurrentRawStream(device_index)
    table, counter, tiles_at, segments_at, merges_at = tables.forward_numbers
    part_sums = part_references = 0
    if merge is not None:
        num_rows = num_parts * kv_heads * 2 * BLOCK_ROWS
        workspace = new((num_rows * (v.shape[2] + 2),), torch.float32, q)()
        part_sums = workspace.data_ptr()
        part_references = part_sums + 4 * num_rows * v.shape[2]
    launch(
        tables.num_sms, stream, out.data_ptr(), lse.data_ptr(), table, counter, tiles_at, segments_at, kv_heads, scale,
        window or 0, k.data_ptr(), k.stride(0), k.stride(1), part_sums, part_references,
    )
    if merge is not None:
        merge(MERGE_BLOCKS * tables.num_sms, stream, out.data_ptr(), lse.data_ptr(), part_sums, part_references, table,
              merges_at, kv_heads)


def run_backward(
    saved: tuple[torch.Tensor, ...],
    gradients: tuple[torch.Tensor, ...],
    tables: Tables,
    num_blocks: int,
    num_parts: int,
    window: int | None,
    scale: float,
    kept: Kept | None,
    deterministic: bool,
) -> None:
    """Fill the rows' places in dq, dk, dv from dout, q, k, v, out, lse; dQ is added up in that many blocks.

    Where it must be deterministic, or heads are wide, nothing is added up in memory: dQ comes from a kernel of its own,
    for which there is room for that many parts of forward's tiles.
    """
    dout, q, k, v, out, lse = saved
    deterministic |= kept is not None or tiles_of(q.shape[2]).dq_apart
    dout, out, lse = dout.contiguous(), out.contiguous(), lse.contiguous()
    call = _backward_call(
        get_ident(), q.device, q.shape, k.shape, v.shape, dout.data_ptr(), q.data_ptr(), k.data_ptr(), v.data_ptr(),
        dout.stride(), q.stride(), k.stride(), v.stride(), window is not None, deterministic,
        deterministic and num_parts > 0 and kept is None, kept is not None,
    )
    if call is None:
        saved = _contiguous(dout), _contiguous(q), _contiguous(k), _contiguous(v), out, lse
        run_backward(saved, gradients, tables, num_blocks, num_parts, window, scale, kept, deterministic)
        return
    before, main, after, merge, device_index, all_sms = call
    dq, dk, dv = gradients
    (num_q, heads, dim), kv_heads = q.shape, k.shape[1]
    stream = torch._C._cuda_getCurrentRawStream(device_index)
    num_numbers = num_q * heads
    num_rows = (2 * num_parts if deterministic else num_blocks) * BLOCK_ROWS
    num_sums = num_rows * kv_heads * dim
    workspace = new((num_sums + 2 * num_numbers,), torch.float32, q)()
    dq_sum = workspace.data_ptr()
    lse_log2 = dq_sum + 4 * num_sums
    delta = lse_log2 + 4 * num_numbers
    table, counter, items_at, rows_at, blocks_at = tables.backward_numbers
    before(
        8 * all_sms, stream, out.data_ptr(), dout.data_ptr(), lse.data_ptr(), lse_log2, delta, num_numbers, dq_sum,
        0 if deterministic else num_sums // 4,
    )
    if kept is not None:
        places = new((kept.num_bytes,), torch.uint8, q)()
        kept_table, dq_counter = kept.table.data_ptr(), counter + 4
        for first in range(0, kv_heads, kept.heads):
            some = first, min(kept.heads, kv_heads - first)
            main(
                tables.num_sms, stream, lse_log2, delta, places.data_ptr(), dk.data_ptr(), dv.data_ptr(), table,
                counter, items_at, rows_at, kv_heads, scale, window or 0,
                kept_table + 4 * kept.pairs_at, kept.num_places, *some,
            )
            after(
                tables.num_sms, stream, places.data_ptr(), dq.data_ptr(), kept_table, dq_counter, kept.pairs_at,
                kv_heads, scale, *some,
            )
        return
    main(
        tables.num_sms, stream, lse_log2, delta, dq_sum, dk.data_ptr(), dv.data_ptr(), table, counter, items_at,
        rows_at, kv_heads, scale, window or 0, 0, 0, 0, kv_heads,
    )
    if deterministic:
        _, forward_counter, tiles_at, segments_at, merges_at = tables.forward_numbers
        after(
            tables.num_sms, stream, lse_log2, delta, dq.data_ptr(), tables.dq_table, forward_counter + 8, tiles_at,
            segments_at, kv_heads, scale, window or 0, dq_sum,
        )
        if merge is not None:
            merge(MERGE_BLOCKS * tables.num_sms, stream, dq.data_ptr(), dq_sum, tables.dq_table, merges_at, kv_heads,
                  scale)
    else:
        after(8 * all_sms, stream, dq.data_ptr(), dq_sum, table, blocks_at, kv_heads, scale)


Stride = tuple[int, ...]


@functools.lru_cache(maxsize=CALLS_KEPT)
def _forward_call(
    thread: int,
    device: torch.device,
    q_shape: torch.Size,
    k_shape: torch.Size,
    v_shape: torch.Size,
    q: int,
    k: int,
    v: int,
    q_stride: Stride,
    k_stride: Stride,
    v_stride: Stride,
    windowed: bool,
    split: bool,
    is_tall: bool,
) -> tuple[Launch, Launch | None, int] | None:
    """A thread's launches for q, k, v in these places, to which layers and steps come back, and their device's index.

    None where a tensor cannot be mapped as it lies.
    """
    _check_dims(q_shape, v_shape)
    if not (_mappable(q, q_stride) and _mappable(k, k_stride) and _mappable(v, v_stride)):
        return None
    kv_heads, tile_keys = k_shape[1], tiles_of(q_shape[2]).forward_keys
    maps = (
        _query_map(q, q_shape, q_stride, kv_heads),
        _key_map(k, k_shape, k_stride, tile_keys),
        _key_map(v, v_shape, v_stride, tile_keys),
        _key_map(v, v_shape, v_stride, 1),
    )
    kernel, *merge = forward_kernels(device, q_shape[2], q_shape[1] // kv_heads, windowed, split, is_tall)
    return kernel.launch(*maps), merge[0].launch() if merge else None, kernel.device_index


@functools.lru_cache(maxsize=CALLS_KEPT)
def _backward_call(
    thread: int,
    device: torch.device,
    q_shape: torch.Size,
    k_shape: torch.Size,
    v_shape: torch.Size,
    dout: int,
    q: int,
    k: int,
    v: int,
    dout_stride: Stride,
    q_stride: Stride,
    k_stride: Stride,
    v_stride: Stride,
    windowed: bool,
    deterministic: bool,
    split: bool,
    kept: bool,
) -> tuple[Launch, Launch, Launch, Launch | None, int, int] | None:
    """The same for dout, q, k, v: three or four launches, and how many multiprocessors the device has."""
    _check_dims(q_shape, v_shape)
    places = (dout, dout_stride), (q, q_stride), (k, k_stride), (v, v_stride)
    if not all(_mappable(place, stride) for place, stride in places):
        return None
    kv_heads, tiles = k_shape[1], tiles_of(q_shape[2])
    dout_shape = torch.Size((*q_shape[:2], v_shape[2]))
    block_len = tokens_per_block(q_shape[1] // kv_heads)
    maps = (
        _query_map(q, q_shape, q_stride, kv_heads, block_len),
        _query_map(q, q_shape, q_stride, kv_heads, 1),
        _query_map(dout, dout_shape, dout_stride, kv_heads, block_len),
        _query_map(dout, dout_shape, dout_stride, kv_heads, 1),
        _key_map(k, k_shape, k_stride, tiles.backward_keys),
        _key_map(k, k_shape, k_stride, 1),
        _key_map(v, v_shape, v_stride, tiles.backward_keys),
        _key_map(v, v_shape, v_stride, 1),
    )
    before, main, after, *merge = backward_kernels(device, q_shape[2], q_shape[1] // kv_heads, windowed, deterministic,
                                                    split, kept)
    alone = () if not deterministic else maps[4:6] if kept else (
        _query_map(q, q_shape, q_stride, kv_heads), _query_map(dout, dout_shape, dout_stride, kv_heads),
        _key_map(k, k_shape, k_stride, tiles.dq_keys), maps[5], _key_map(v, v_shape, v_stride, tiles.dq_keys), maps[7])
    return (before.launch(), main.launch(*maps), after.launch(*alone), merge[0].launch() if merge else None,
            main.device_index, main.num_sms)


def _check_dims(q_shape: torch.Size, v_shape: torch.Size) -> None:
    if q_shape[2] not in TILES or TILES[q_shape[2]].value_dim != v_shape[2]:
        raise ValueError(f"{dims_text(q_shape[2], v_shape[2])}; give {DIMS_TEXT}")


def _mappable(place: int, stride: Stride) -> bool:
    """Tensor copies want whole heads, and everything at multiples of 16 bytes."""
    return place % 16 == 0 and stride[2] == 1 and stride[1] % 8 == 0 and stride[0] % 8 == 0


def _contiguous(x: torch.Tensor) -> torch.Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def _query_map(
    place: int, shape: torch.Size, stride: tuple[int, ...], kv_heads: int, num_tokens: int | None = None
) -> TensorMap:
    """Blocks of [tokens, heads, dim] that hold all query heads of a KV head; or of single tokens."""
    tokens, heads, dim = shape
    group, head_bytes = heads // kv_heads, 2 * stride[1]
    sizes, strides = (dim, group, kv_heads, tokens), (head_bytes, group * head_bytes, 2 * stride[0])
    return tensor_map(place, sizes, strides, (PANEL, group, 1, num_tokens or tokens_per_block(group)))


def _key_map(place: int, shape: torch.Size, stride: tuple[int, ...], num_tokens: int) -> TensorMap:
    """Tiles of [tokens, kv_heads, dim] that hold one KV head."""
    tokens, kv_heads, dim = shape
    return tensor_map(place, (dim, kv_heads, tokens), (2 * stride[1], 2 * stride[0]), (PANEL, 1, num_tokens))


_empty_strided: Any = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)


def new(shape: Sequence[int], dtype: torch.dtype, like: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Makes contiguous tensors of this shape beside `like`; on a GPU as torch's compiled code makes its own.

    That takes the host a quarter of torch.empty's time.
    """
    if _empty_strided is None or not like.is_cuda:
        return functools.partial(torch.empty, tuple(shape), dtype=dtype, device=like.device)
    strides = [1]
    for size in shape[:0:-1]:
        strides.insert(0, strides[0] * size)
    return functools.partial(_empty_strided, tuple(shape), tuple(strides), dtype)


def free_multiprocessors(device: torch.device, spare: int) -> int:
    """How many multiprocessors launches take; one where there is no GPU."""
    if device.type != "cuda":
        return 1
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    if not 0 <= spare < num_sms:
        raise ValueError(f"spare_multiprocessors is {spare}, of {num_sms} on {device}; give 0 to {num_sms - 1}")
    return num_sms - spare


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


def _pinned(packed: np.ndarray, device: torch.device) -> torch.Tensor:
    table = torch.from_numpy(packed)
    return table.pin_memory() if device.type == "cuda" else table
