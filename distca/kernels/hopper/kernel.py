"""Our own task kernel for Hopper: rows of any shape at the speed of dense attention, written for the tensor cores.

A launch walks tables (hopper_tables.py), so rows of different lengths, shared keys and several rows over the same
queries cost what their pairs cost. The sources in cuda/ are compiled at first use for the head dim, the query heads
per KV head, and window or not. Tables live in device buffers that `refill` fills again for other rows: nothing is
compiled, allocated or waited for then, and a captured CUDA graph replays with the new rows.

Backward adds dQ up in float32 with atomic adds, in any order; under torch.use_deterministic_algorithms dQ has a kernel
of its own instead, which sums it in registers and gives the same bits every time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from distca.kernels.hopper.buffers import Heads, Most, Tables, multiprocessors, tables_of
from distca.kernels.hopper.driver import nvrtc
from distca.kernels.hopper.launch import Kind, launches_of, new, run_backward, run_forward
from distca.kernels.hopper.tables import BLOCK_ROWS
from distca.kernels.hopper.variants import DIMS_TEXT, TILES, tiles_of
from distca.kernels.interface import (
    PLAIN,
    BackwardInputs,
    Scores,
    TaskRows,
    accumulation_dtype,
    check_inputs,
    dims_text,
    joined,
    no_softcap,
    softmax_scale,
    visible,
)
from distca.validation import UserError


class HopperTasks:
    """Rows, and their tables for every kind of heads that has been asked for."""

    __slots__ = ("by_heads", "device", "inside", "kinds", "most", "num_sms", "rows", "window")

    def __init__(self, rows: TaskRows, device: torch.device, window: int | None, num_sms: int | None,
                 most: Most | None = None) -> None:
        self.device, self.window, self.most = device, window, most
        self.num_sms = num_sms or multiprocessors(device)
        self.by_heads: dict[Heads, Tables] = {}
        self.take(rows)

    def take(self, rows: TaskRows) -> None:
        inside = joined(visible(rows, self.window), self.window)
        filled = {}
        for heads, tables in self.by_heads.items():
            filled[heads] = tables_of(inside, self.window, heads, self.num_sms, tables.capacity.parts,
                                      tables.tall is not None)
            reason = tables.capacity.holds(*filled[heads][:2])
            if reason is not None:
                raise UserError(f"these rows do not fit where others were prepared: {reason}")
        for heads, content in filled.items():
            self.by_heads[heads] = self.by_heads[heads].refilled(*content)
        self.rows, self.inside = rows, inside
        self.kinds: dict[tuple[object, ...], Kind] = {}

    def kind(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, capturing: bool) -> Kind:
        """Tensors are checked once for each kind of them."""
        about = (q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.get_device(), k.get_device(), v.get_device())
        found = self.kinds.get(about)
        if found is None:
            check_inputs(q, k, v, self.rows)
            tables = self._of_heads((q.shape[1], k.shape[1], q.shape[2]), capturing)
            results = ((*q.shape[:2], v.shape[2]), q.dtype), (q.shape[:2], accumulation_dtype(q.dtype))
            gradients = ((x.shape, x.dtype) for x in (q, k, v))
            found = self.kinds[about] = Kind(
                tables, self.window, softmax_scale(q, None),
                tuple(new(shape, dtype, q) for shape, dtype in (*results, *gradients)),
                _covered(self.inside.q_begin, self.inside.q_end) < q.shape[0],
                _covered(self.inside.k_begin, self.inside.k_end) < k.shape[0],
                launches_of(q.device, q.shape, k.shape, v.shape, self.window is not None, tables.tall is not None,
                            tables.num_sms))
        return found

    def _of_heads(self, heads: Heads, capturing: bool) -> Tables:
        if heads not in self.by_heads:
            if capturing:
                raise UserError(f"rows have no tables for (query heads, KV heads, head dim) {heads} yet; "
                                "run once before capturing a CUDA graph")
            self.by_heads[heads] = Tables.build(self.inside, self.window, heads, self.device, self.num_sms, self.most)
        return self.by_heads[heads]


@dataclass(frozen=True, slots=True)
class HopperKernel:
    """Attention tasks on compute capability 9.0."""

    name: str = "hopper"
    num_sms: int | None = None  # multiprocessors that a launch takes; None: all. Profiles measure with fewer.

    def supports(
        self, device: torch.device, dtype: torch.dtype, head_dim: int, scores: Scores = PLAIN,
        value_dim: int | None = None,
    ) -> str | None:
        if (reason := no_softcap(scores)) is not None:
            return reason
        if device.type != "cuda" or torch.version.hip is not None:
            return f"device is {device}; it is written for NVIDIA's Hopper GPUs (device cuda)"
        major, minor = torch.cuda.get_device_capability(device)
        if (major, minor) != (9, 0):
            return f"{torch.cuda.get_device_name(device)} is compute capability {major}.{minor}, not 9.0"
        if dtype != torch.bfloat16:
            return f"dtype is {dtype}; give bfloat16"
        if head_dim not in TILES or TILES[head_dim].value_dim != (value_dim or head_dim):
            return f"{dims_text(head_dim, value_dim)}; give {DIMS_TEXT}"
        try:
            nvrtc()
        except RuntimeError as error:
            return str(error)
        return None

    def item_sizes(self, head_dim: int) -> tuple[int, int]:
        """Forward in query rows, backward in keys."""
        return 2 * BLOCK_ROWS, tiles_of(head_dim).backward_keys

    def prepare(
        self, rows: TaskRows, device: torch.device, scores: Scores = PLAIN, most: Most | None = None
    ) -> HopperTasks:
        """`most` makes room for any rows of so many queries, keys and rows whose queries are disjoint.

        Keys of long tiles are split where these rows need it. Rows that are put there later have theirs split as far
        as there is room for it, and not at all where these had none.
        """
        return HopperTasks(rows, device, scores.window, self.num_sms, most)

    def refill(self, prepared: HopperTasks, rows: TaskRows) -> None:
        """Put other rows where these were prepared, also for graphs that were captured with them."""
        prepared.take(rows)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, prepared: HopperTasks, scale: float | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        capturing = _capturing(q)
        kind = prepared.kind(q, k, v, capturing)
        scale = kind.scale if scale is None else _positive(scale)
        new_out, new_lse, *_ = kind.new
        out, lse = new_out(), new_lse()
        if capturing or kind.leaves_queries:                     # a graph is replayed with other rows
            out.zero_()
            lse.fill_(-torch.inf)
        tables = kind.tables
        if tables.num_blocks or capturing:
            run_forward(q, k, v, out, lse, kind, tables.capacity.parts if capturing else tables.num_parts, scale)
        return out, lse

    def backward(
        self, inputs: BackwardInputs, prepared: HopperTasks, scale: float | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        _, q, k, v, _, _ = inputs
        capturing = _capturing(q)
        kind = prepared.kind(q, k, v, capturing)
        scale = kind.scale if scale is None else _positive(scale)
        _, _, new_dq, new_dk, new_dv = kind.new
        dq, dk, dv = new_dq(), new_dk(), new_dv()
        if capturing or kind.leaves_queries:
            dq.zero_()
        if capturing or kind.leaves_keys:
            dk.zero_()
            dv.zero_()
        tables = kind.tables
        if tables.num_blocks or capturing:
            num_blocks, num_parts = ((tables.capacity.blocks, tables.capacity.parts) if capturing else
                                     (tables.num_blocks, tables.num_parts))
            run_backward(inputs, (dq, dk, dv), kind, num_blocks, num_parts, scale, None if capturing else tables.kept,
                         torch.are_deterministic_algorithms_enabled())
        return dq, dk, dv


def _capturing(x: torch.Tensor) -> bool:
    return x.is_cuda and torch._C._cuda_isCurrentStreamCapturing()


def _covered(begin: np.ndarray, end: np.ndarray) -> int:
    """How many tokens stand in at least one of these ranges."""
    order = np.argsort(begin, kind="stable")
    reach = np.maximum.accumulate(np.append(0, end[order]))
    return int(np.maximum(0, end[order] - np.maximum(begin[order], reach[:-1])).sum())


def _positive(scale: float) -> float:
    if not scale > 0:
        raise UserError(f"scale={scale}; kernel='hopper' takes positive scales, use kernel='varlen' for others")
    return scale
