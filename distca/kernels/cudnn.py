"""cuDNN's packed attention through nvidia-cudnn-frontend: the fastest kernel on Hopper and later.

A row begins anywhere in its buffers, since every tensor carries its own row offsets; so keys that rows share are read
in place, and gradients of rows that share tokens go to places of their own and are added up. Forward takes causal rows
aligned with the end of their keys in one call. Backward does not skip masked tiles under that alignment, but does
under the top-left one: there a row runs as a full rectangle before the diagonal and a square on it, at up to twice the
speed, and needs no merging because both use the row's final out and log-sum-exp. A graph's sizes are rounded up to
powers of two, so that batches that differ share one (cudnn_graphs.py).
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field

import numpy as np
import torch

from distca.kernels.cudnn_graphs import GraphShape, Mask, Uid, cudnn, execute
from distca.kernels.interface import (
    PLAIN,
    BackwardInputs,
    Scores,
    TaskRows,
    accumulation_dtype,
    causal_and_full,
    check_inputs,
    check_one_dim,
    concatenate,
    disjoint,
    joined,
    launches,
    no_softcap,
    one_dim_only,
    query_disjoint,
    rectangles_and_squares,
    softmax_scale,
    visible,
)
from distca.kernels.spans import Spans
from distca.validation import UserError

ROWS_AT_ONCE = 2**15
COPIED_KEYS_AT_ONCE = 2**17  # bounds backward's memory where rows share keys
MIN_LEN = 128
OLDEST_BACKEND = 90600  # packed grouped-query backward


@dataclass(frozen=True, slots=True)
class CudnnBatch:
    """The rows of one call. Reads start where the rows begin, writes at the rows' places: there too, or packed."""

    rows: TaskRows
    mask: Mask
    in_place: bool
    device: torch.device
    q: Spans
    k: Spans
    _uploaded: dict[tuple[str, int], torch.Tensor] = field(default_factory=dict, repr=False, compare=False)

    @property
    def num_rows(self) -> int:
        return bucket(len(self.rows))

    def lengths(self, column: str) -> torch.Tensor:
        """int32 [num_rows] of q_len or k_len; rows that only fill the bucket have none."""
        if (column, 0) not in self._uploaded:
            padded = np.zeros(self.num_rows, dtype=np.int32)
            padded[: len(self.rows)] = getattr(self.rows, column)
            self._uploaded[column, 0] = torch.from_numpy(padded).to(self.device)
        return self._uploaded[column, 0]

    def offsets(self, column: str, width: int) -> torch.Tensor:
        """int64 [num_rows + 1] of q_begin, k_begin, q_place or k_place, at `width` elements a token."""
        if (column, width) not in self._uploaded:
            side, where = column.split("_")
            begin, length = getattr(self.rows, f"{side}_begin"), getattr(self.rows, f"{side}_len")
            if where == "place" and not self.in_place:
                begin = np.cumsum(length) - length
            padded = np.full(self.num_rows + 1, begin[-1] + length[-1])
            padded[: len(begin)] = begin
            self._uploaded[column, width] = torch.from_numpy(padded * width).to(self.device)
        return self._uploaded[column, width]


@dataclass(frozen=True, slots=True)
class _CudnnTasks:
    rows: TaskRows
    forward: tuple[CudnnBatch, ...]
    backward: tuple[CudnnBatch, ...]
    forward_in_place: bool  # no query stands in two rows
    keys_in_place: bool  # no key stands in two rows of backward
    num_queries: int  # in the visible rows
    num_keys: int  # in the rows of backward


@dataclass(frozen=True, slots=True)
class CudnnKernel:
    """cuDNN's packed scaled dot-product attention."""

    name: str = "cudnn"

    def supports(
        self, device: torch.device, dtype: torch.dtype, head_dim: int, scores: Scores = PLAIN,
        value_dim: int | None = None,
    ) -> str | None:
        if (reason := no_softcap(scores)) is not None:
            return reason
        if device.type != "cuda" or torch.version.hip is not None:
            return f"device is {device}; cuDNN needs an NVIDIA GPU (device cuda)"
        major = torch.cuda.get_device_capability(device)[0]
        if major not in (9, 10):
            return f"{torch.cuda.get_device_name(device)} is compute capability {major}.x; packed cuDNN needs 9 or 10"
        if dtype not in (torch.bfloat16, torch.float16):
            return f"dtype is {dtype}; give bfloat16 or float16"
        if (reason := one_dim_only(head_dim, value_dim)) is not None:
            return reason
        limit = 256 if major == 9 else 128
        if head_dim % 16 or head_dim > limit:
            return f"head_dim is {head_dim}; give a multiple of 16 up to {limit}"
        if scores.window is not None:
            return f"window is {scores.window}; use kernel='varlen' for windows"
        if importlib.util.find_spec("cudnn") is None:
            return "nvidia-cudnn-frontend is not installed; pip install nvidia-cudnn-frontend"
        version = cudnn().backend_version()
        if version < OLDEST_BACKEND:
            return f"cuDNN is version {version}; install {OLDEST_BACKEND} or newer"
        return None

    def prepare(self, rows: TaskRows, device: torch.device, scores: Scores = PLAIN) -> _CudnnTasks:
        if scores.window is not None:
            raise UserError(f"kernel='cudnn' got window={scores.window}, it takes None; use kernel='varlen'")
        inside = joined(visible(rows))
        causal, full = causal_and_full(inside)
        rectangles, squares = rectangles_and_squares(causal)
        before = joined(concatenate(rectangles, full))
        tables = [(table, mask) for table, mask in ((squares, Mask.TOP_LEFT), (before, Mask.NONE)) if len(table)]
        forward_in_place = disjoint(inside.q_begin, inside.q_end)
        every = concatenate(squares, before)
        keys_in_place = disjoint(every.k_begin, every.k_end)

        def batch(rows: TaskRows, mask: Mask, in_place: bool) -> CudnnBatch:
            q, k = Spans.of(rows.q_begin, rows.q_end), Spans.of(rows.k_begin, rows.k_end)
            return CudnnBatch(rows, mask, in_place, device, q, k)

        forward = [
            batch(chunk, mask, forward_in_place)
            for table, mask in ((causal, Mask.BOTTOM_RIGHT), (full, Mask.NONE))
            for chunk in launches(table, ROWS_AT_ONCE)
        ]
        backward = [
            batch(chunk, mask, keys_in_place)
            for table, mask in tables
            for apart in query_disjoint(table)
            for chunk in launches(apart, ROWS_AT_ONCE, None if keys_in_place else COPIED_KEYS_AT_ONCE)
        ]
        return _CudnnTasks(
            rows, tuple(forward), tuple(backward), forward_in_place, keys_in_place, int(inside.q_len.sum()),
            int(every.k_len.sum()),
        )

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, prepared: _CudnnTasks, scale: float | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        check_inputs(q, k, v, prepared.rows)
        check_one_dim(self.name, k, v)
        scale, wide = softmax_scale(q, scale), accumulation_dtype(q.dtype)
        q, k, v = (x.contiguous() for x in (q, k, v))
        if prepared.forward_in_place:
            out, lse = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=wide)
            if prepared.num_queries < q.shape[0]:
                out.zero_()
                lse.fill_(-torch.inf)
            for batch in prepared.forward:
                run_forward(q, k, v, out, lse, batch, scale)
            return out, lse
        out, lse = q.new_zeros(q.shape, dtype=wide), q.new_full(q.shape[:2], -torch.inf, dtype=wide)
        for batch in prepared.forward:
            out_rows, lse_rows = batch.q.empty(q), batch.q.empty(lse)
            run_forward(q, k, v, out_rows, lse_rows, batch, scale)
            batch.q.merge(out, lse, out_rows, lse_rows)
        return out.to(q.dtype), lse

    def backward(
        self, inputs: BackwardInputs, prepared: _CudnnTasks, scale: float | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        dout, q, k, v, out, lse = inputs
        check_inputs(q, k, v, prepared.rows)
        check_one_dim(self.name, k, v)
        scale, wide = softmax_scale(q, scale), accumulation_dtype(q.dtype)
        dout, q, k, v, out, lse = (x.contiguous() for x in (dout, q, k, v, out, lse))
        saved = dout, q, k, v, out, lse
        if prepared.keys_in_place:
            covered = prepared.num_keys == k.shape[0]
            dk, dv = (torch.empty_like(x) if covered else torch.zeros_like(x) for x in (k, v))
        else:
            dk, dv = (torch.zeros_like(x, dtype=wide) for x in (k, v))
        dq: torch.Tensor | None = None
        for batch in prepared.backward:
            dq_rows = torch.empty_like(q)                        # cuDNN sums dq where q stands, so it is written there
            if prepared.keys_in_place:
                run_backward(saved, (dq_rows, dk, dv), batch, scale)
            else:
                dk_rows, dv_rows = batch.k.empty(k), batch.k.empty(v)
                run_backward(saved, (dq_rows, dk_rows, dv_rows), batch, scale)
                batch.k.add(dk, dk_rows)
                batch.k.add(dv, dv_rows)
            if dq is None and batch.q.bounds == ((0, q.shape[0]),):
                dq = dq_rows if len(prepared.backward) <= 2 else dq_rows.to(wide)  # two addends round alike
            else:
                dq = torch.zeros_like(q, dtype=wide) if dq is None else dq
                batch.q.add_same(dq, dq_rows)
        dq = torch.zeros_like(q) if dq is None else dq
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def bucket(count: int, least: int = 1) -> int:
    """The next power of two."""
    return max(least, 1 << (count - 1).bit_length())


def run_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, batch: CudnnBatch,
    scale: float,
) -> None:
    """Fill the rows' places in out and lse."""
    q_width, k_width = q[0].numel(), k[0].numel()
    pack = dict(zip((Uid.Q, Uid.K, Uid.V, Uid.OUT, Uid.LSE), (q, k, v, out, lse), strict=True))
    pack |= {
        Uid.OFFSET_Q: batch.offsets("q_begin", q_width),
        Uid.OFFSET_K: batch.offsets("k_begin", k_width),
        Uid.OFFSET_OUT: batch.offsets("q_place", q_width),
        Uid.OFFSET_LSE: batch.offsets("q_place", q.shape[1]),
    }
    _execute(pack, batch, scale, totals=None)


def run_backward(
    saved: tuple[torch.Tensor, ...], gradients: tuple[torch.Tensor, ...], batch: CudnnBatch, scale: float
) -> None:
    """Fill the rows' places in dq, dk, dv from dout, q, k, v, out, lse."""
    q, k = saved[1], saved[2]
    q_width, k_width = q[0].numel(), k[0].numel()
    uids = (Uid.DOUT, Uid.Q, Uid.K, Uid.V, Uid.OUT, Uid.LSE, Uid.DQ, Uid.DK, Uid.DV)
    pack = dict(zip(uids, (*saved, *gradients), strict=True))
    pack |= {
        Uid.OFFSET_Q: batch.offsets("q_begin", q_width),
        Uid.OFFSET_K: batch.offsets("k_begin", k_width),
        Uid.OFFSET_LSE: batch.offsets("q_begin", q.shape[1]),
        Uid.OFFSET_DK: batch.offsets("k_place", k_width),
    }
    totals = bucket(q.shape[0], MIN_LEN), bucket(gradients[1].shape[0], MIN_LEN)
    _execute(pack, batch, scale, totals)


def _execute(pack: dict[Uid, torch.Tensor], batch: CudnnBatch, scale: float, totals: tuple[int, int] | None) -> None:
    q, k = pack[Uid.Q], pack[Uid.K]
    q_dim = (batch.num_rows, q.shape[1], bucket(int(batch.rows.q_len.max()), MIN_LEN), q.shape[2])
    k_dim = (batch.num_rows, k.shape[1], bucket(int(batch.rows.k_len.max()), MIN_LEN), k.shape[2])
    deterministic = torch.are_deterministic_algorithms_enabled()
    pack = {**pack, Uid.Q_LEN: batch.lengths("q_len"), Uid.K_LEN: batch.lengths("k_len")}
    execute(GraphShape(q.device, q.dtype, q_dim, k_dim, batch.mask, scale, totals, deterministic), pack)
