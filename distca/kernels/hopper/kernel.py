"""distca's attention kernel for Hopper GPUs: tasks of any shape at the speed of dense attention.

A launch walks tables (tables.py), so its cost depends only on the number of pairs, also with tasks of different
lengths, shared keys and several tasks per query. The sources in cuda/ are compiled at first use per head dim, number of
query heads per KV head, and with or without window and softcap.

Backward sums dQ in float32 with atomic adds, in any order. Under torch.use_deterministic_algorithms a separate kernel
sums dQ in registers and gives the same bits every time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from distca.kernels.hopper.buffers import Heads, Tables, multiprocessors
from distca.kernels.hopper.driver import nvrtc
from distca.kernels.hopper.launch import Kind, launches_of, new, run_backward, run_forward
from distca.kernels.hopper.tables import BLOCK_ROWS
from distca.kernels.hopper.variants import DIMS_TEXT, TILES, Masks, tiles_of
from distca.kernels.interface import (
    PLAIN,
    BackwardInputs,
    Gradients,
    Results,
    Scores,
    TaskRows,
    accumulation_dtype,
    check_inputs,
    dims_text,
    joined,
    softmax_scale,
    visible,
)
from distca.validation import UserError


class HopperTasks:
    """Prepared tasks, with one Kind per combination of shapes, built at the first call with these shapes."""

    __slots__ = ("device", "inside", "kinds", "num_sms", "scores", "tasks")

    def __init__(self, tasks: TaskRows, device: torch.device, scores: Scores, num_sms: int) -> None:
        self.tasks, self.device, self.scores, self.num_sms = tasks, device, scores, num_sms
        self.inside = joined(visible(tasks, scores.window), scores.window)
        self.kinds: dict[tuple[object, ...], Kind] = {}

    def kind(self, q: Tensor, k: Tensor, v: Tensor) -> Kind:
        """Return the Kind of these tensors; checks them only when it builds a new one."""
        about = (q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.get_device(), k.get_device(), v.get_device())
        found = self.kinds.get(about)
        return self._new_kind(about, q, k, v) if found is None else found

    def _new_kind(self, about: tuple[object, ...], q: Tensor, k: Tensor, v: Tensor) -> Kind:
        check_inputs(q, k, v, self.tasks)
        if q.device != self.device:
            raise UserError(f"q is on {q.device}, the tasks were prepared for {self.device}; prepare them for q.device")
        heads = Heads(q.shape[1], k.shape[1], q.shape[2])
        if _capturing(q):
            raise UserError(f"tasks have no tables for (query heads, KV heads, head dim) {tuple(heads)} yet; "
                            "run once before capturing a CUDA graph")
        tables = Tables.build(self.inside, self.scores.window, heads, self.device, self.num_sms)
        results = ((*q.shape[:2], v.shape[2]), q.dtype), (q.shape[:2], accumulation_dtype(q.dtype))
        gradients = ((x.shape, x.dtype) for x in (q, k, v))
        found = self.kinds[about] = Kind(
            tables, self.scores, softmax_scale(q, None),
            tuple(new(shape, dtype, q) for shape, dtype in (*results, *gradients)),
            _covered(self.inside.q_begin, self.inside.q_end) < q.shape[0],
            _covered(self.inside.k_begin, self.inside.k_end) < k.shape[0],
            launches_of(q.device, q.shape, k.shape, v.shape,
                        Masks(self.scores.window is not None, self.scores.softcap is not None),
                        tables.tall is not None, tables.num_sms))
        return found


@dataclass(frozen=True, slots=True)
class HopperKernel:
    """Attention tasks on compute capability 9.0."""

    name: str = "hopper"
    num_sms: int | None = None  # multiprocessors that a launch uses; None: all. Profiles measure with fewer.

    def supports(
        self, device: torch.device, dtype: torch.dtype, head_dim: int, scores: Scores = PLAIN,
        value_dim: int | None = None,
    ) -> str | None:
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
        """Return the size of a work item: (query, head) pairs in forward, keys in backward."""
        return 2 * BLOCK_ROWS, tiles_of(head_dim).backward_keys

    def prepare(self, tasks: TaskRows, device: torch.device, scores: Scores = PLAIN) -> HopperTasks:
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        return HopperTasks(tasks, device, scores, self.num_sms or multiprocessors(device))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, prepared: HopperTasks, scale: float | None = None) -> Results:
        if _elsewhere(q):
            with torch.cuda.device(q.device):
                return self.forward(q, k, v, prepared, scale)
        kind = prepared.kind(q, k, v)
        scale = kind.scale if scale is None else _positive(scale)
        new_out, new_lse, *_ = kind.new
        out, lse = new_out(), new_lse()
        if kind.leaves_queries:
            out.zero_()
            lse.fill_(-torch.inf)
        if kind.tables.num_blocks:
            run_forward(q, k, v, out, lse, kind, scale)
        return out, lse

    def backward(self, inputs: BackwardInputs, prepared: HopperTasks, scale: float | None = None) -> Gradients:
        if _elsewhere(inputs.q):
            with torch.cuda.device(inputs.q.device):
                return self.backward(inputs, prepared, scale)
        kind = prepared.kind(inputs.q, inputs.k, inputs.v)
        scale = kind.scale if scale is None else _positive(scale)
        _, _, new_dq, new_dk, new_dv = kind.new
        dq, dk, dv = new_dq(), new_dk(), new_dv()
        if kind.leaves_queries:
            dq.zero_()
        if kind.leaves_keys:
            dk.zero_()
            dv.zero_()
        if kind.tables.num_blocks:
            run_backward(inputs, (dq, dk, dv), kind, scale, torch.are_deterministic_algorithms_enabled())
        return dq, dk, dv


def _elsewhere(x: Tensor) -> bool:
    """Return whether x is on a GPU that is not torch's current one; allocations and launches take the current one."""
    return x.is_cuda and x.get_device() != torch._C._cuda_getDevice()


def _capturing(x: Tensor) -> bool:
    return x.is_cuda and torch._C._cuda_isCurrentStreamCapturing()


def _covered(begin: np.ndarray, end: np.ndarray) -> int:
    """Return the number of tokens that are in at least one of these ranges."""
    order = np.argsort(begin, kind="stable")
    reach = np.maximum.accumulate(np.append(0, end[order]))
    return int(np.maximum(0, end[order] - np.maximum(begin[order], reach[:-1])).sum())


def _positive(scale: float) -> float:
    if not scale > 0:
        raise UserError(f"scale={scale}; kernel='hopper' takes positive scales, use kernel='varlen' for others")
    return scale
