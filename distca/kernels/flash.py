"""Packed FlashAttention operators: `varlen` (FlashAttention-2, as torch ships it) and `fa4` (the flash-attn-4 package).

An operator takes many tasks in one call, with queries aligned to the end of their keys. Forward reads key ranges in
place, even if tasks share them. Backward writes one gradient per task and key, so keys that are shared, or not packed
in task order, are copied for it and their gradients are summed. Queries and keys are gathered only if tasks are not
adjacent: adjacent ranges are joined, and a single range is a view.

The operators below torch's varlen_attn are called directly, because they return the log-sum-exp and accept the merged
one in backward, and because their arguments are the same from torch 2.11 on. FlashAttention-4 covers cases that the
hopper kernel does not: other head dims, fp16 and Blackwell. It compiles at first use, in seconds, once per head
dim, group size, kind of mask and softcap. It has no backward for Ampere.
"""

from __future__ import annotations

import importlib
import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from distca.kernels.interface import (
    PLAIN,
    BackwardInputs,
    Gradients,
    Results,
    Scores,
    TaskRows,
    accumulation_dtype,
    causal_and_full,
    check_inputs,
    check_one_dim,
    joined,
    merge,
    no_softcap,
    one_dim_only,
    softmax_scale,
    unit_stride,
    visible,
)

TASKS_AT_ONCE = 2**15  # a launch takes fewer than 2**16
COPIED_KEYS_AT_ONCE = 2**18  # bounds backward's memory if tasks share keys
UNBOUNDED = -1


@dataclass(frozen=True, slots=True)
class Spans:
    """Ranges of a buffer that are concatenated in a packed buffer; adjacent ranges are joined."""

    bounds: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, begin: np.ndarray, end: np.ndarray) -> Spans:
        starts = np.ones(len(begin), dtype=bool)
        starts[1:] = begin[1:] != end[:-1]
        stops = np.roll(starts, -1)
        return cls(tuple(zip(begin[starts].tolist(), end[stops].tolist(), strict=True)))

    def gather(self, x: Tensor) -> Tensor:
        """Return the packed buffer; a view if there is a single range."""
        pieces = [x[begin:end] for begin, end in self.bounds]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def pairs(self, x: Tensor, packed: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each range of x with its part of the packed buffer."""
        at = 0
        for begin, end in self.bounds:
            yield x[begin:end], packed[at : at + end - begin]
            at += end - begin

    def put(self, x: Tensor, packed: Tensor) -> None:
        for there, here in self.pairs(x, packed):
            there.copy_(here)

    def add(self, x: Tensor, packed: Tensor) -> None:
        for there, here in self.pairs(x, packed):
            there += here

    def merge(self, out: Tensor, lse: Tensor, packed_out: Tensor, packed_lse: Tensor) -> None:
        """Merge partial attention into out and lse, range by range, because ranges may overlap."""
        for (out_there, out_here), (lse_there, lse_here) in zip(
            self.pairs(out, packed_out), self.pairs(lse, packed_lse), strict=True
        ):
            merged_out, merged_lse = merge(out_there, lse_there, out_here, lse_here)
            out_there.copy_(merged_out)
            lse_there.copy_(merged_lse)


@dataclass(frozen=True, slots=True)
class PackedCall:
    """One launch over packed queries; keys are read in place by forward and packed for backward."""

    q: Spans
    k: Spans
    q_ends: Tensor  # int32 [tasks + 1] in the packed queries
    k_ends: Tensor  # int32 [tasks + 1] in the packed keys
    k_begin: Tensor  # int32 [tasks + 1] in the key buffer; the last entry is not read
    k_len: Tensor  # int32 [tasks]
    max_q_len: int
    max_k_len: int
    causal: bool
    window_left: int
    softcap: float | None


@dataclass(frozen=True, slots=True)
class PackedTasks:
    tasks: TaskRows
    forward: tuple[PackedCall, ...]
    backward: tuple[PackedCall, ...]
    queries_disjoint: bool


class PackedFlash(ABC):
    """A kernel that calls one packed operator per group of tasks with the same mask."""

    name: str

    @abstractmethod
    def call_forward(self, q: Tensor, k: Tensor, v: Tensor, call: PackedCall, scale: float) -> Results:
        """Attend with packed q to k and v in place -> out like q, lse [packed q, heads]."""

    @abstractmethod
    def call_backward(self, inputs: BackwardInputs, call: PackedCall, scale: float) -> Gradients:
        """Return dq, dk, dv; all tensors are packed in the order of the call's tasks."""

    def prepare(self, tasks: TaskRows, device: torch.device, scores: Scores = PLAIN) -> PackedTasks:
        window, softcap = scores.window, scores.softcap
        inside = joined(visible(tasks, window), window)
        forward, backward = [], []
        for group, causal, left in _groups(inside, window):
            forward += [_call(chunk, causal, left, softcap, device) for chunk in launches(group, TASKS_AT_ONCE)]
            chunks = launches(group, TASKS_AT_ONCE, COPIED_KEYS_AT_ONCE)
            backward += [_call(chunk, causal, left, softcap, device) for chunk in chunks]
        return PackedTasks(tasks, tuple(forward), tuple(backward), disjoint(inside.q_begin, inside.q_end))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, prepared: PackedTasks, scale: float | None = None) -> Results:
        check_inputs(q, k, v, prepared.tasks)
        check_one_dim(self.name, k, v)
        scale, wide = softmax_scale(q, scale), accumulation_dtype(q.dtype)
        q, k, v = (unit_stride(x) for x in (q, k, v))
        whole = ((0, q.shape[0]),)
        if len(prepared.forward) == 1 and prepared.forward[0].q.bounds == whole:
            return self.call_forward(q, k, v, prepared.forward[0], scale)
        out = q.new_zeros(q.shape, dtype=q.dtype if prepared.queries_disjoint else wide)
        lse = q.new_full(q.shape[:2], -torch.inf, dtype=wide)
        for call in prepared.forward:
            packed_out, packed_lse = self.call_forward(call.q.gather(q), k, v, call, scale)
            if prepared.queries_disjoint:
                call.q.put(out, packed_out)
                call.q.put(lse, packed_lse)
            else:
                call.q.merge(out, lse, packed_out, packed_lse)
        return out.to(q.dtype), lse

    def backward(self, inputs: BackwardInputs, prepared: PackedTasks, scale: float | None = None) -> Gradients:
        dout, q, k, v, out, lse = inputs
        check_inputs(q, k, v, prepared.tasks)
        check_one_dim(self.name, k, v)
        scale, wide = softmax_scale(q, scale), accumulation_dtype(q.dtype)
        dout, q, k, v, out = (unit_stride(x) for x in (dout, q, k, v, out))
        if len(prepared.backward) == 1:
            call = prepared.backward[0]
            if call.q.bounds == ((0, q.shape[0]),) and call.k.bounds == ((0, k.shape[0]),):
                return self.call_backward(BackwardInputs(dout, q, k, v, out, lse), call, scale)
        dq, dk, dv = (torch.zeros_like(x, dtype=wide, memory_format=torch.contiguous_format) for x in (q, k, v))
        for call in prepared.backward:
            queries, keys = call.q.gather, call.k.gather
            packed = BackwardInputs(queries(dout), queries(q), keys(k), keys(v), queries(out), queries(lse))
            dq_packed, dk_packed, dv_packed = self.call_backward(packed, call, scale)
            call.q.add(dq, dq_packed)
            call.k.add(dk, dk_packed)
            call.k.add(dv, dv_packed)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def disjoint(begin: np.ndarray, end: np.ndarray) -> bool:
    """Return whether no two of these non-empty ranges share a token."""
    order = np.argsort(begin, kind="stable")
    return bool((end[order][:-1] <= begin[order][1:]).all())


def launches(tasks: TaskRows, most_tasks: int, most_keys: int | None = None) -> Iterator[TaskRows]:
    """Yield tasks in the order of their queries, as many at a time as one launch takes.

    If tasks share keys, `most_keys` bounds the memory of their separately written gradients.
    """
    ordered = tasks.take(np.argsort(tasks.q_begin, kind="stable"))
    launch = np.arange(len(ordered)) // most_tasks
    if most_keys is not None and not disjoint(ordered.k_begin, ordered.k_end):
        launch += np.cumsum(ordered.k_len) // most_keys
    for number in np.unique(launch):
        yield ordered.take(launch == number)


def _groups(tasks: TaskRows, window: int | None) -> Iterator[tuple[TaskRows, bool, int]]:
    """Yield tasks that one launch can take together: causal or not, with the same left bound of the window.

    The operator counts its window from the diagonal through the last query and the last key. For a causal task this is
    the task's diagonal; a rectangle further from its diagonal needs another bound.
    """
    causal, full = causal_and_full(tasks)
    if len(causal):
        yield causal, True, UNBOUNDED if window is None else window - 1
    if window is None:
        left = np.full(len(full), UNBOUNDED)
    else:
        left = full.k_len - full.q_len - full.q_offset + window - 1
        left[left >= full.k_len - 1] = UNBOUNDED  # the window covers all keys of the task
    for bound in np.unique(left).tolist():
        yield full.take(left == bound), False, bound


def _call(tasks: TaskRows, causal: bool, left: int, softcap: float | None, device: torch.device) -> PackedCall:
    def upload(column: np.ndarray) -> Tensor:
        return torch.from_numpy(column.astype(np.int32)).to(device)

    max_q_len, max_k_len = int(tasks.q_len.max()), int(tasks.k_len.max())
    return PackedCall(
        q=Spans.of(tasks.q_begin, tasks.q_end),
        k=Spans.of(tasks.k_begin, tasks.k_end),
        q_ends=upload(np.concatenate([[0], np.cumsum(tasks.q_len)])),
        k_ends=upload(np.concatenate([[0], np.cumsum(tasks.k_len)])),
        k_begin=upload(np.append(tasks.k_begin, 0)),
        k_len=upload(tasks.k_len),
        max_q_len=max(2, max_q_len),  # at 1 the operator switches to its decoding path
        max_k_len=max_k_len if left == UNBOUNDED else max(max_k_len, max_q_len),  # it caps both window bounds
        causal=causal,
        window_left=left,
        softcap=softcap,
    )


@dataclass(frozen=True)
class VarlenKernel(PackedFlash):
    """torch's packed FlashAttention-2."""

    name: str = "varlen"

    def supports(
        self, device: torch.device, dtype: torch.dtype, head_dim: int, scores: Scores = PLAIN,
        value_dim: int | None = None,
    ) -> str | None:
        if (reason := no_softcap(scores)) is not None:
            return reason
        if device.type != "cuda" or torch.version.hip is not None:
            return f"device is {device}; FlashAttention needs an NVIDIA GPU (device cuda)"
        if torch.cuda.get_device_capability(device) < (8, 0):
            return f"{torch.cuda.get_device_name(device)} is too old; FlashAttention needs compute capability 8.0"
        if dtype not in (torch.bfloat16, torch.float16):
            return f"dtype is {dtype}; give bfloat16 or float16"
        if (reason := one_dim_only(head_dim, value_dim)) is not None:
            return reason
        if head_dim % 8 or head_dim > 256:
            return f"head_dim is {head_dim}; give a multiple of 8 up to 256"
        return None

    def call_forward(self, q: Tensor, k: Tensor, v: Tensor, call: PackedCall, scale: float) -> Results:
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, call.q_ends, call.k_begin, call.max_q_len, call.max_k_len, 0.0, call.causal, False, scale=scale,
            window_size_left=call.window_left, window_size_right=0 if call.causal else UNBOUNDED, seqused_k=call.k_len,
        )
        return out, lse.T.contiguous()

    def call_backward(self, inputs: BackwardInputs, call: PackedCall, scale: float) -> Gradients:
        device = inputs.q.device
        return torch.ops.aten._flash_attention_backward(
            *inputs._replace(lse=inputs.lse.T.contiguous()), call.q_ends, call.k_ends, call.max_q_len, call.max_k_len,
            0.0, call.causal, torch.zeros(2, dtype=torch.uint64, device=device),  # dropout state, unused
            torch.empty(0, device=device), scale=scale, window_size_left=call.window_left,
            window_size_right=0 if call.causal else UNBOUNDED,
        )


PACKAGE = "flash_attn.cute"
WIDEST = {9: 256, 10: 128, 11: 128, 12: 128}                     # largest head dim by compute capability
ALSO = {10: (256,), 11: (256,)}


@dataclass(frozen=True)
class Fa4Kernel(PackedFlash):
    """The CuTe kernels of flash-attn-4."""

    name: str = "fa4"

    def supports(
        self, device: torch.device, dtype: torch.dtype, head_dim: int, scores: Scores = PLAIN,
        value_dim: int | None = None,
    ) -> str | None:
        if device.type != "cuda" or torch.version.hip is not None:
            return f"device is {device}; FlashAttention-4 needs an NVIDIA GPU (device cuda)"
        major, minor = torch.cuda.get_device_capability(device)
        if major not in WIDEST:
            return (f"{torch.cuda.get_device_name(device)} is compute capability {major}.{minor}; FlashAttention-4's "
                    f"backward needs {', '.join(map(str, WIDEST))}")
        if dtype not in (torch.bfloat16, torch.float16):
            return f"dtype is {dtype}; give bfloat16 or float16"
        if (reason := one_dim_only(head_dim, value_dim)) is not None:
            return reason
        if head_dim % 8 or (head_dim > WIDEST[major] and head_dim not in ALSO.get(major, ())):
            also = "".join(f" or {dim}" for dim in ALSO.get(major, ()))
            return f"head_dim is {head_dim}; give a multiple of 8 up to {WIDEST[major]}{also}"
        if scores.softcap is not None and (major == 12 or (major != 9 and head_dim == 256)):
            return (f"softcap is {scores.softcap}, for which FlashAttention-4 has no backward with head_dim {head_dim} "
                    f"on compute capability {major}; use kernel='sdpa'")
        if not is_installed():
            return "flash-attn-4 is not installed; pip install --pre flash-attn-4"
        if major == 12 and torch.are_deterministic_algorithms_enabled():
            return "deterministic algorithms are on, which FlashAttention-4 does not have for compute capability 12"
        return None

    def call_forward(self, q: Tensor, k: Tensor, v: Tensor, call: PackedCall, scale: float) -> Results:
        with torch.no_grad():
            out, lse, *_ = _interface()._flash_attn_fwd(
                q, k, v, cu_seqlens_q=call.q_ends, cu_seqlens_k=call.k_begin, seqused_k=call.k_len, return_lse=True,
                softmax_scale=scale, softcap=call.softcap, **_mask_and_sizes(call)
            )
        return out, lse.T.contiguous()

    def call_backward(self, inputs: BackwardInputs, call: PackedCall, scale: float) -> Gradients:
        dout, q, k, v, out, lse = inputs
        dq, dk, dv, *_ = _interface()._flash_attn_bwd(
            q, k, v, out, dout, lse.T.contiguous(), softmax_scale=scale, softcap=call.softcap or 0.0,
            cu_seqlens_q=call.q_ends, cu_seqlens_k=call.k_ends,
            deterministic=torch.are_deterministic_algorithms_enabled(), **_mask_and_sizes(call)
        )
        return dq, dk, dv


def is_installed() -> bool:
    try:
        return importlib.util.find_spec(PACKAGE) is not None
    except ModuleNotFoundError:                                  # a parent package is missing
        return False


def _interface() -> Any:
    return importlib.import_module(f"{PACKAGE}.interface")


def _mask_and_sizes(call: PackedCall) -> dict[str, Any]:
    return {
        "causal": call.causal,
        "window_size_left": None if call.window_left == UNBOUNDED else call.window_left,
        "window_size_right": 0 if call.causal else None,
        "max_seqlen_q": call.max_q_len,
        "max_seqlen_k": call.max_k_len,
    }
