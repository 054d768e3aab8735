"""Launches of the Hopper kernel: its tables in device memory, its tensor maps, its compiled variants.

Everything that a call needs beside its tensors' addresses is made once and kept, because a launch should cost the host
tens of microseconds: tables per set of rows, tensor maps per place in memory, kernels per head dim and group size.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from ctypes import c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from distca.kernels.cuda_driver import Arguments, Function, Module, TensorMap, compile_cubin, tensor_map
from distca.kernels.hopper_tables import (
    BLOCK_ROWS,
    TILE_KEYS,
    BackwardTables,
    Capacity,
    ForwardTables,
    backward_block_rows,
    backward_tables,
    forward_tables,
    tokens_per_block,
)
from distca.kernels.interface import TaskRows

SOURCES = Path(__file__).parent / "cuda"
FORWARD = ("common.cuh", "forward_softmax.cuh", "forward.cu")
BACKWARD = ("common.cuh", "backward_copy.cuh", "backward.cu", "backward_ends.cu")
BACKWARD_DQ = ("common.cuh", "backward_dq.cu")
PANEL = 64  # columns that a tensor copy brings at once
THREADS = 384
SHARED_BYTES = 227 * 1024
CALLS_KEPT = 512

Heads = tuple[int, int, int]  # query heads, KV heads, head dim


@dataclass(frozen=True, slots=True)
class Tables:
    """The tables of one set of rows for one kind of heads, on the device at fixed addresses."""

    capacity: Capacity
    forward: torch.Tensor  # int32, see ForwardTables.pack
    backward: torch.Tensor  # int32, see BackwardTables.pack
    counters: torch.Tensor  # int32 [3], of forward, backward and dQ by itself; zero between launches
    num_blocks: int  # of queries in backward
    num_sms: int  # multiprocessors that a launch takes

    @classmethod
    def build(cls, rows: TaskRows, window: int | None, heads: Heads, device: torch.device, num_sms: int) -> Tables:
        forward, backward = tables_of(rows, window, heads, num_sms)
        capacity = Capacity.fitting(forward, backward)
        return cls(
            capacity,
            _pinned(forward.pack(capacity), device).to(device, non_blocking=True),
            _pinned(backward.pack(capacity), device).to(device, non_blocking=True),
            torch.zeros(3, dtype=torch.int32, device=device),
            len(backward.blocks),
            num_sms,
        )

    def refilled(self, forward: ForwardTables, backward: BackwardTables) -> Tables:
        """Other rows' tables, which must fit, in the same buffers."""
        for buffer, tables in ((self.forward, forward), (self.backward, backward)):
            buffer.copy_(_pinned(tables.pack(self.capacity), buffer.device), non_blocking=True)
        return replace(self, num_blocks=len(backward.blocks))


def run_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    tables: Tables,
    window: int | None,
    scale: float,
) -> None:
    """Fill the rows' places in out and lse."""
    call = _forward_call(
        q.device, q.shape, k.shape, q.data_ptr(), k.data_ptr(), v.data_ptr(), q.stride(), k.stride(), v.stride(),
        window is not None,
    )
    if call is None:
        run_forward(_contiguous(q), _contiguous(k), _contiguous(v), out, lse, tables, window, scale)
        return
    maps, kernel = call
    tiles_at, segments_at, _ = tables.capacity.forward_offsets()
    kernel.launch(
        tables.num_sms, *maps, out.data_ptr(), lse.data_ptr(), tables.forward.data_ptr(), tables.counters.data_ptr(),
        tiles_at, segments_at, k.shape[1], scale, window or 0, k.data_ptr(), k.stride(0), k.stride(1),
    )


def run_backward(
    saved: tuple[torch.Tensor, ...],
    gradients: tuple[torch.Tensor, ...],
    tables: Tables,
    num_blocks: int,
    window: int | None,
    scale: float,
    deterministic: bool,
) -> None:
    """Fill the rows' places in dq, dk, dv from dout, q, k, v, out, lse; dQ is added up in that many blocks.

    Where it must be deterministic nothing is added up in memory: dQ comes from a kernel of its own.
    """
    dout, q, k, v, out, lse = saved
    dout, out, lse = dout.contiguous(), out.contiguous(), lse.contiguous()
    call = _backward_call(
        q.device, q.shape, k.shape, dout.data_ptr(), q.data_ptr(), k.data_ptr(), v.data_ptr(), dout.stride(),
        q.stride(), k.stride(), v.stride(), window is not None, deterministic,
    )
    if call is None:
        saved = _contiguous(dout), _contiguous(q), _contiguous(k), _contiguous(v), out, lse
        run_backward(saved, gradients, tables, num_blocks, window, scale, deterministic)
        return
    maps, (before, main, after) = call
    dq, dk, dv = gradients
    (num_q, heads, dim), kv_heads = q.shape, k.shape[1]
    num_numbers = num_q * heads
    num_sums = 0 if deterministic else num_blocks * kv_heads * backward_block_rows(dim) * dim
    workspace = torch.empty(num_sums + 2 * num_numbers, dtype=torch.float32, device=q.device)
    dq_sum = workspace.data_ptr()
    lse_log2 = dq_sum + 4 * num_sums
    delta = lse_log2 + 4 * num_numbers
    items_at, rows_at, blocks_at, _ = tables.capacity.backward_offsets()
    before.launch(
        8 * before.num_sms, out.data_ptr(), dout.data_ptr(), lse.data_ptr(), lse_log2, delta, num_numbers, dq_sum,
        num_sums // 4,
    )
    table, counters = tables.backward.data_ptr(), tables.counters.data_ptr()
    main.launch(
        tables.num_sms, *maps[:8], lse_log2, delta, dq_sum, dk.data_ptr(), dv.data_ptr(), table, counters + 4, items_at,
        rows_at, kv_heads, scale, window or 0,
    )
    if deterministic:
        tiles_at, segments_at, _ = tables.capacity.forward_offsets()
        after.launch(
            tables.num_sms, *maps[8:], *maps[4:8], lse_log2, delta, dq.data_ptr(), tables.forward.data_ptr(),
            counters + 8, tiles_at, segments_at, kv_heads, scale, window or 0,
        )
    else:
        after.launch(8 * after.num_sms, dq.data_ptr(), dq_sum, table, blocks_at, kv_heads, scale)


@dataclass(frozen=True, slots=True)
class _Launcher:
    function: Function
    arguments: Arguments
    num_threads: int
    device_index: int
    num_sms: int

    def launch(self, grid: int, *values: int | float | TensorMap) -> None:
        stream = torch._C._cuda_getCurrentRawStream(self.device_index)
        self.function.launch(grid, self.num_threads, stream, self.arguments.set(*values))


def _launchers(
    device: torch.device,
    sources: Sequence[str],
    defines: dict[str, int],
    kernels: dict[str, tuple[list[type], int, int]],
) -> list[_Launcher]:
    text = "".join((SOURCES / name).read_text(encoding="utf-8") for name in sources)
    index = torch.cuda.current_device() if device.index is None else device.index
    num_sms = torch.cuda.get_device_properties(index).multi_processor_count
    with torch.cuda.device(index):
        module = Module(compile_cubin(text, f"distca/kernels/cuda/{sources[-1]}", defines))
        return [
            _Launcher(module.function(name, shared), Arguments(types), num_threads, index, num_sms)
            for name, (types, shared, num_threads) in kernels.items()
        ]


@functools.cache
def _forward_kernel(device: torch.device, head_dim: int, group: int, windowed: bool) -> _Launcher:
    keys: list[type] = [c_void_p, c_int64, c_int64]
    types: list[type] = [TensorMap] * 4 + [c_void_p] * 4 + [c_int32] * 3 + [c_float, c_int32, *keys]
    defines = {"D": head_dim, "G": group, "ROWS": BLOCK_ROWS, "WINDOWED": windowed}
    return _launchers(device, FORWARD, defines, {"attention_forward": (types, SHARED_BYTES, THREADS)})[0]


@functools.cache
def _backward_kernels(
    device: torch.device, head_dim: int, group: int, windowed: bool, deterministic: bool
) -> list[_Launcher]:
    """What runs before, the main kernel, what runs after: dQ's own kernel, or the one that writes what was added."""
    defines = {"D": head_dim, "G": group, "WINDOWED": windowed}
    rows = {"ROWS": backward_block_rows(head_dim), "WITH_DQ": not deterministic}
    main: list[type] = [TensorMap] * 8 + [c_void_p] * 7 + [c_int32] * 3 + [c_float, c_int32]
    kernels: dict[str, tuple[list[type], int, int]] = {
        "attention_delta": ([c_void_p] * 5 + [c_int64, c_void_p, c_int64], 0, 256),
        "attention_backward": (main, SHARED_BYTES, THREADS),
        "attention_write_dq": ([c_void_p] * 3 + [c_int32] * 2 + [c_float], 0, 256),
    }
    before, backward, write_dq = _launchers(device, BACKWARD, {**defines, **rows}, kernels)
    if not deterministic:
        return [before, backward, write_dq]
    types: list[type] = [TensorMap] * 6 + [c_void_p] * 5 + [c_int32] * 3 + [c_float, c_int32]
    alone = {"attention_dq": (types, SHARED_BYTES, THREADS)}
    return [before, backward, *_launchers(device, BACKWARD_DQ, {**defines, "ROWS": BLOCK_ROWS}, alone)]


Stride = tuple[int, ...]


@functools.lru_cache(maxsize=CALLS_KEPT)
def _forward_call(
    device: torch.device,
    q_shape: torch.Size,
    k_shape: torch.Size,
    q: int,
    k: int,
    v: int,
    q_stride: Stride,
    k_stride: Stride,
    v_stride: Stride,
    windowed: bool,
) -> tuple[tuple[TensorMap, ...], _Launcher] | None:
    """The tensor maps and the kernel for q, k, v in these places: layers and steps come back to the same ones.

    None where a tensor cannot be mapped as it lies.
    """
    if not (_mappable(q, q_stride) and _mappable(k, k_stride) and _mappable(v, v_stride)):
        return None
    kv_heads = k_shape[1]
    maps = (
        _query_map(q, q_shape, q_stride, kv_heads),
        _key_map(k, k_shape, k_stride),
        _key_map(v, k_shape, v_stride),
        _key_map(v, k_shape, v_stride, 1),
    )
    return maps, _forward_kernel(device, q_shape[2], q_shape[1] // kv_heads, windowed)


@functools.lru_cache(maxsize=CALLS_KEPT)
def _backward_call(
    device: torch.device,
    q_shape: torch.Size,
    k_shape: torch.Size,
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
) -> tuple[tuple[TensorMap, ...], list[_Launcher]] | None:
    """The same for dout, q, k, v; behind them the maps of q and dout for dQ's own kernel."""
    places = (dout, dout_stride), (q, q_stride), (k, k_stride), (v, v_stride)
    if not all(_mappable(place, stride) for place, stride in places):
        return None
    kv_heads = k_shape[1]
    block_len = tokens_per_block(q_shape[1] // kv_heads, backward_block_rows(q_shape[2]))
    maps = (
        _query_map(q, q_shape, q_stride, kv_heads, block_len),
        _query_map(q, q_shape, q_stride, kv_heads, 1),
        _query_map(dout, q_shape, dout_stride, kv_heads, block_len),
        _query_map(dout, q_shape, dout_stride, kv_heads, 1),
        _key_map(k, k_shape, k_stride),
        _key_map(k, k_shape, k_stride, 1),
        _key_map(v, k_shape, v_stride),
        _key_map(v, k_shape, v_stride, 1),
        _query_map(q, q_shape, q_stride, kv_heads),
        _query_map(dout, q_shape, dout_stride, kv_heads),
    )
    return maps, _backward_kernels(device, q_shape[2], q_shape[1] // kv_heads, windowed, deterministic)


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


def _key_map(place: int, shape: torch.Size, stride: tuple[int, ...], num_tokens: int = TILE_KEYS) -> TensorMap:
    """Tiles of [tokens, kv_heads, dim] that hold one KV head."""
    tokens, kv_heads, dim = shape
    return tensor_map(place, (dim, kv_heads, tokens), (2 * stride[1], 2 * stride[0]), (PANEL, 1, num_tokens))


def free_multiprocessors(device: torch.device, spare: int) -> int:
    """How many multiprocessors launches take; one where there is no GPU."""
    if device.type != "cuda":
        return 1
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    if not 0 <= spare < num_sms:
        raise ValueError(f"spare_multiprocessors is {spare}, of {num_sms} on {device}; give 0 to {num_sms - 1}")
    return num_sms - spare


def tables_of(
    rows: TaskRows, window: int | None, heads: Heads, num_sms: int
) -> tuple[ForwardTables, BackwardTables]:
    group, kv_heads = heads[0] // heads[1], heads[1]
    return (forward_tables(rows, window, group, kv_heads, num_sms),
            backward_tables(rows, window, group, kv_heads, num_sms, backward_block_rows(heads[2])))


def _pinned(packed: np.ndarray, device: torch.device) -> torch.Tensor:
    table = torch.from_numpy(packed)
    return table.pin_memory() if device.type == "cuda" else table
