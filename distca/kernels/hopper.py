"""Our own task kernel for Hopper: rows of any shape at the speed of dense attention, written for the tensor cores.

A launch walks tables (hopper_tables.py), so rows of different lengths, shared keys and several rows over the same
queries cost what their pairs cost. The sources in cuda/ are compiled at first use for the head dim, the query heads
per KV head, and window or not. Tables live in device buffers that `refill` fills again for other rows: nothing is
compiled, allocated or waited for then, and a captured CUDA graph replays with the new rows.

Backward adds dQ up in float32 with atomic adds, in any order; under torch.use_deterministic_algorithms each key tile
waits for its turn, which gives the same bits every time.
"""

from __future__ import annotations

import functools
from ctypes import c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from distca.kernels.cuda_driver import Arguments, Function, Module, TensorMap, compile_cubin, nvrtc, tensor_map
from distca.kernels.hopper_tables import (
    TILE_KEYS,
    BackwardTables,
    Capacity,
    ForwardTables,
    backward_tables,
    forward_tables,
    tokens_per_block,
)
from distca.kernels.interface import TaskRows, check_inputs, joined, query_disjoint, softmax_scale, visible

SOURCES = Path(__file__).parent / "cuda"
HEAD_DIMS = (64, 128)
PANEL = 64  # columns that a tensor copy brings at once
THREADS = 384
BLOCK_ROWS = 64
SHARED_BYTES = 227 * 1024


@dataclass(frozen=True, slots=True)
class Tables:
    """The tables of one set of rows for one group size, on the device at fixed addresses."""

    capacity: Capacity
    forward: torch.Tensor  # int32, see ForwardTables.pack
    backward: torch.Tensor  # int32, see BackwardTables.pack
    counters: torch.Tensor  # int32 [2], of forward and backward; zero between launches
    num_blocks: int  # of queries in backward

    @classmethod
    def build(cls, rows: TaskRows, window: int | None, group: int, device: torch.device) -> Tables:
        forward, backward = _tables(rows, window, group, device)
        capacity = Capacity.fitting(forward, backward)
        return cls(
            capacity,
            _pinned(forward.pack(capacity), device).to(device, non_blocking=True),
            _pinned(backward.pack(capacity), device).to(device, non_blocking=True),
            torch.zeros(2, dtype=torch.int32, device=device),
            len(backward.blocks),
        )

    def refilled(self, rows: TaskRows, window: int | None, group: int) -> Tables:
        """The tables of other rows in the same buffers."""
        device = self.forward.device
        forward, backward = _tables(rows, window, group, device)
        reason = self.capacity.holds(forward, backward)
        if reason is not None:
            raise ValueError(f"these rows do not fit where others were prepared: {reason}")
        self.forward.copy_(_pinned(forward.pack(self.capacity), device), non_blocking=True)
        self.backward.copy_(_pinned(backward.pack(self.capacity), device), non_blocking=True)
        return Tables(self.capacity, self.forward, self.backward, self.counters, len(backward.blocks))


class Prepared:
    """Rows, and their tables for each group size that has been asked for."""

    __slots__ = ("by_group", "checked", "covered", "device", "inside", "parts", "rows", "window")

    def __init__(self, rows: TaskRows, device: torch.device, window: int | None) -> None:
        self.device, self.window = device, window
        self.by_group: dict[int, Tables] = {}
        self.take(rows)

    def take(self, rows: TaskRows) -> None:
        self.rows, self.inside = rows, joined(visible(rows, self.window), self.window)
        self.covered = {
            "q": _covered(self.inside.q_begin, self.inside.q_end), "k": _covered(self.inside.k_begin, self.inside.k_end)
        }
        self.checked: set[tuple[object, ...]] = set()
        self.parts: list[Prepared] | None = None
        for group, tables in self.by_group.items():
            self.by_group[group] = tables.refilled(self.inside, self.window, group)

    def check(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """check_inputs, once for tensors of the same shapes."""
        key = q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device, k.device, v.device
        if key not in self.checked:
            check_inputs(q, k, v, self.rows)
            self.checked.add(key)

    def tables(self, group: int) -> Tables:
        if group not in self.by_group:
            self.by_group[group] = Tables.build(self.inside, self.window, group, self.device)
        return self.by_group[group]

    def in_turns(self) -> list[Prepared]:
        """Rows in groups without a query in common, whose gradients are added up one after another."""
        if self.parts is None:
            groups = query_disjoint(self.inside)
            self.parts = [self] if len(groups) <= 1 else [Prepared(g, self.device, self.window) for g in groups]
        return self.parts

    def fills(self, side: str, num_tokens: int) -> bool:
        """Whether every token of the buffer is written, whatever rows a captured graph replays with."""
        capturing = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        return not capturing and self.covered[side] == num_tokens


@dataclass(frozen=True, slots=True)
class HopperKernel:
    """Attention tasks on compute capability 9.0."""

    name: str = "hopper"

    def supports(self, device: torch.device, dtype: torch.dtype, head_dim: int, window: int | None) -> str | None:
        if device.type != "cuda" or torch.version.hip is not None:
            return f"device is {device}; it is written for NVIDIA's Hopper GPUs (device cuda)"
        major, minor = torch.cuda.get_device_capability(device)
        if (major, minor) != (9, 0):
            return f"{torch.cuda.get_device_name(device)} is compute capability {major}.{minor}, not 9.0"
        if dtype != torch.bfloat16:
            return f"dtype is {dtype}; give bfloat16"
        if head_dim not in HEAD_DIMS:
            return f"head_dim is {head_dim}; give 64 or 128"
        try:
            nvrtc()
        except RuntimeError as error:
            return str(error)
        return None

    def prepare(self, rows: TaskRows, device: torch.device, window: int | None = None) -> Prepared:
        return Prepared(rows, device, window)

    def refill(self, prepared: Prepared, rows: TaskRows) -> None:
        """Put other rows where these were prepared, also for graphs that were captured with them."""
        prepared.take(rows)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, prepared: Prepared, scale: float | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        prepared.check(q, k, v)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        if not prepared.fills("q", q.shape[0]):
            out.zero_()
            lse.fill_(-torch.inf)
        tables = prepared.tables(q.shape[1] // k.shape[1])
        run_forward(q, k, v, out, lse, tables, prepared.window, _positive(softmax_scale(q, scale)))
        return out, lse

    def backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        prepared: Prepared,
        scale: float | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        prepared.check(q, k, v)
        saved, scale = (dout, q, k, v, out, lse), _positive(softmax_scale(q, scale))
        deterministic = torch.are_deterministic_algorithms_enabled()
        parts = prepared.in_turns() if deterministic else [prepared]
        if len(parts) == 1:
            return _gradients(saved, parts[0], scale, deterministic)
        sums = tuple(torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (q, k, v))
        for part in parts:
            for total, gradient in zip(sums, _gradients(saved, part, scale, deterministic), strict=True):
                total += gradient
        dq, dk, dv = (total.to(q.dtype) for total in sums)
        return dq, dk, dv


def _gradients(
    saved: tuple[torch.Tensor, ...], prepared: Prepared, scale: float, deterministic: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    _, q, k, v, _, _ = saved
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    if not prepared.fills("q", q.shape[0]):
        dq.zero_()
    if not prepared.fills("k", k.shape[0]):
        dk.zero_()
        dv.zero_()
    tables = prepared.tables(q.shape[1] // k.shape[1])
    run_backward(saved, (dq, dk, dv), tables, prepared.window, scale, deterministic)
    return dq, dk, dv


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
    if tables.num_blocks == 0:
        return
    q, k, v = (_copyable(x) for x in (q, k, v))
    kv_heads, tiles_at, segments_at = k.shape[1], *tables.capacity.forward_offsets()[:2]
    kernel = _forward_kernel(q.device, q.shape[-1], q.shape[1] // kv_heads, window is not None)
    kernel.launch(
        q.device, kernel.num_sms, _query_map(q, kv_heads), _key_map(k), _key_map(v), _key_map(v, 1), out.data_ptr(),
        lse.data_ptr(), tables.forward.data_ptr(), tables.counters.data_ptr(), tiles_at, segments_at, kv_heads, scale,
        window or 0,
    )


def run_backward(
    saved: tuple[torch.Tensor, ...],
    gradients: tuple[torch.Tensor, ...],
    tables: Tables,
    window: int | None,
    scale: float,
    deterministic: bool,
) -> None:
    """Fill the rows' places in dq, dk, dv from dout, q, k, v, out, lse."""
    if tables.num_blocks == 0:
        return
    dout, q, k, v = (_copyable(x) for x in saved[:4])
    dout, out, lse = dout.contiguous(), saved[4].contiguous(), saved[5].contiguous()
    dq, dk, dv = gradients
    (num_q, heads, dim), kv_heads, device = q.shape, k.shape[1], q.device
    before, main, after = _backward_kernels(device, dim, heads // kv_heads, window is not None, deterministic)
    capturing = torch.cuda.is_current_stream_capturing()
    num_blocks = (tables.capacity.blocks if capturing else tables.num_blocks) * kv_heads
    lse_log2, delta = torch.empty(2, num_q, heads, dtype=torch.float32, device=device)
    dq_sum = torch.zeros(num_blocks, BLOCK_ROWS, dim, dtype=torch.float32, device=device)
    turns = torch.zeros(2 * num_blocks if deterministic else 0, dtype=torch.int32, device=device)
    items_at, rows_at, blocks_at, _ = tables.capacity.backward_offsets()
    rows, lanes = num_q * heads, dim // 8
    before.launch(
        device, -(-rows * lanes // 256), out.data_ptr(), dout.data_ptr(), lse.data_ptr(), lse_log2.data_ptr(),
        delta.data_ptr(), rows,
    )
    main.launch(
        device, main.num_sms, _query_map(q, kv_heads), _query_map(q, kv_heads, 1), _query_map(dout, kv_heads),
        _query_map(dout, kv_heads, 1), _key_map(k), _key_map(k, 1), _key_map(v), _key_map(v, 1), lse_log2.data_ptr(),
        delta.data_ptr(), dq_sum.data_ptr(), turns.data_ptr(), dk.data_ptr(), dv.data_ptr(), tables.backward.data_ptr(),
        tables.counters.data_ptr() + 4, items_at, rows_at, kv_heads, scale, window or 0,
    )
    after.launch(
        device, 8 * after.num_sms, dq.data_ptr(), dq_sum.data_ptr(), tables.backward.data_ptr(), blocks_at, kv_heads,
        scale,
    )


@dataclass(frozen=True, slots=True)
class _Launcher:
    function: Function
    arguments: Arguments
    num_threads: int
    num_sms: int

    def launch(self, device: torch.device, grid: int, *values: int | float | TensorMap) -> None:
        stream = torch.cuda.current_stream(device).cuda_stream
        self.function.launch(grid, self.num_threads, stream, self.arguments.set(*values))


def _launchers(
    device: torch.device, source: str, defines: dict[str, int], kernels: dict[str, tuple[list[type], int, int]]
) -> list[_Launcher]:
    text = "".join((SOURCES / name).read_text(encoding="utf-8") for name in ("common.cuh", source))
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    with torch.cuda.device(device):
        module = Module(compile_cubin(text, f"distca/kernels/cuda/{source}", defines))
        return [
            _Launcher(module.function(name, shared), Arguments(types), num_threads, num_sms)
            for name, (types, shared, num_threads) in kernels.items()
        ]


@functools.cache
def _forward_kernel(device: torch.device, head_dim: int, group: int, windowed: bool) -> _Launcher:
    types: list[type] = [TensorMap] * 4 + [c_void_p] * 4 + [c_int32] * 3 + [c_float, c_int32]
    defines = {"D": head_dim, "G": group, "WINDOWED": windowed}
    return _launchers(device, "forward.cu", defines, {"attention_forward": (types, SHARED_BYTES, THREADS)})[0]


@functools.cache
def _backward_kernels(
    device: torch.device, head_dim: int, group: int, windowed: bool, deterministic: bool
) -> list[_Launcher]:
    defines = {"D": head_dim, "G": group, "WINDOWED": windowed, "DETERMINISTIC": deterministic}
    main: list[type] = [TensorMap] * 8 + [c_void_p] * 8 + [c_int32] * 3 + [c_float, c_int32]
    kernels = {
        "attention_delta": ([c_void_p] * 5 + [c_int64], 0, 256),
        "attention_backward": (main, SHARED_BYTES, THREADS),
        "attention_write_dq": ([c_void_p] * 3 + [c_int32] * 2 + [c_float], 0, 256),
    }
    return _launchers(device, "backward.cu", defines, kernels)


def _query_map(x: torch.Tensor, kv_heads: int, num_tokens: int | None = None) -> TensorMap:
    """Blocks of x [tokens, heads, dim] that hold all query heads of a KV head; or of single tokens."""
    tokens, heads, dim = x.shape
    group, head_bytes = heads // kv_heads, 2 * x.stride(1)
    sizes, strides = (dim, group, kv_heads, tokens), (head_bytes, group * head_bytes, 2 * x.stride(0))
    return tensor_map(x.data_ptr(), sizes, strides, (PANEL, group, 1, num_tokens or tokens_per_block(group)))


def _key_map(x: torch.Tensor, num_tokens: int = TILE_KEYS) -> TensorMap:
    """Tiles of x [tokens, kv_heads, dim] that hold one KV head."""
    tokens, kv_heads, dim = x.shape
    return tensor_map(x.data_ptr(), (dim, kv_heads, tokens), (2 * x.stride(1), 2 * x.stride(0)), (PANEL, 1, num_tokens))


def _copyable(x: torch.Tensor) -> torch.Tensor:
    """Tensor copies want whole heads, and everything at multiples of 16 bytes."""
    fits = x.stride(2) == 1 and x.stride(1) % 8 == 0 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0
    return x if fits else x.clone(memory_format=torch.contiguous_format)


def _tables(
    rows: TaskRows, window: int | None, group: int, device: torch.device
) -> tuple[ForwardTables, BackwardTables]:
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    return forward_tables(rows, window, group, num_sms), backward_tables(rows, window, group, num_sms)


def _pinned(packed: np.ndarray, device: torch.device) -> torch.Tensor:
    table = torch.from_numpy(packed)
    return table.pin_memory() if device.type == "cuda" else table


def _covered(begin: np.ndarray, end: np.ndarray) -> int:
    """How many tokens stand in at least one of these ranges."""
    order = np.argsort(begin, kind="stable")
    reach = np.maximum.accumulate(np.append(0, end[order]))
    return int(np.maximum(0, end[order] - np.maximum(begin[order], reach[:-1])).sum())


def _positive(scale: float) -> float:
    if not scale > 0:
        raise ValueError(f"scale={scale}; kernel='hopper' takes positive scales, use kernel='varlen' for others")
    return scale
