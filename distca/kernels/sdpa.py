"""Portable attention: torch's fused CPU operator, and plain matrix products for all other cases.

torch's public scaled_dot_product_attention does not return the log-sum-exp. The operator below it does, and its
backward accepts the merged out and log-sum-exp. Its causal mask is aligned top-left, so a task whose queries align with
the end of their keys runs as a full rectangle before the diagonal and a square on it. Windows are cut into blocks of
queries with a small mask each. The operator has no softcap, so softcaps use plain products. Memory stays linear in the
length of a task.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from distca.columns import spread
from distca.kernels.interface import (
    PLAIN,
    BackwardInputs,
    Gradients,
    Results,
    Scores,
    TaskRows,
    accumulation_dtype,
    cap_slope,
    capped,
    causal_and_full,
    check_inputs,
    joined,
    merge,
    rectangles_and_squares,
    softmax_scale,
    unit_stride,
    visible,
)

SCORES_AT_ONCE = 2**24  # in plain products: number of scores, over all heads, in memory at a time
WINDOW_BLOCK_MIN, WINDOW_BLOCK_MAX = 128, 1024  # queries of one masked block


@dataclass(frozen=True, slots=True)
class _Part:
    """One operator call: queries against keys with no mask, a top-left causal mask, or mask number `mask`."""

    q: slice
    k: slice
    causal: bool
    mask: int | None
    fresh: bool  # no earlier part has any of these queries


@dataclass(frozen=True, slots=True)
class _SdpaTasks:
    tasks: TaskRows
    softcap: float | None
    parts: tuple[_Part, ...]
    masks: tuple[Tensor, ...]  # bool [q_len, k_len], True where the query sees the key
    tiled: tuple[int | None, int | None]  # queries and keys, if parts have each once in order from 0; else None
    checked: set[tuple[object, ...]] = field(default_factory=set)

    def check(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Run check_inputs once per combination of shapes, dtypes and devices."""
        key = q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device, k.device, v.device
        if key not in self.checked:
            check_inputs(q, k, v, self.tasks)
            self.checked.add(key)


@dataclass(frozen=True, slots=True)
class SdpaKernel:
    """Scaled dot-product attention with log-sum-exp, one operator call per part of a task."""

    name: str = "sdpa"

    def supports(
        self, device: torch.device, dtype: torch.dtype, head_dim: int, scores: Scores = PLAIN,
        value_dim: int | None = None,
    ) -> str | None:
        if dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            return f"dtype is {dtype}; give float64, float32, bfloat16 or float16"
        return None

    def prepare(self, tasks: TaskRows, device: torch.device, scores: Scores = PLAIN) -> _SdpaTasks:
        window = scores.window
        inside = joined(visible(tasks, window), window)
        reach = np.inf if window is None else window
        banded = inside.q_offset + inside.q_len > reach
        causal, full = causal_and_full(inside.take(~banded))
        rectangles, squares = rectangles_and_squares(causal)
        tables = [(full, "full"), (rectangles, "full"), (squares, "causal")]
        if window is not None:
            tables.append((_query_blocks(inside.take(banded), window), "masked"))
        masks: dict[tuple[int, int, int], int] = {}
        parts = []
        covered = np.zeros(int(tasks.q_end.max(initial=0)), dtype=bool)
        for table, kind in tables:
            for q0, q1, k0, k1, offset in zip(
                *(getattr(table, c).tolist() for c in ("q_begin", "q_end", "k_begin", "k_end", "q_offset")), strict=True
            ):
                mask = masks.setdefault((q1 - q0, k1 - k0, offset), len(masks)) if kind == "masked" else None
                fresh = not covered[q0:q1].any()
                parts.append(_Part(slice(q0, q1), slice(k0, k1), kind == "causal", mask, fresh))
                covered[q0:q1] = True
        return _SdpaTasks(tasks, scores.softcap, tuple(parts), tuple(_band(*key, window or 0, device) for key in masks),
                          (_tiled([part.q for part in parts]), _tiled([part.k for part in parts])))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, prepared: _SdpaTasks, scale: float | None = None) -> Results:
        prepared.check(q, k, v)
        scale, wide = softmax_scale(q, scale), accumulation_dtype(q.dtype)
        q, k, v = (unit_stride(x) for x in (q, k, v))
        softcap = prepared.softcap
        attend = _fused_forward if _is_fused(q, v, softcap) else partial(_plain_forward, softcap=softcap)
        masks = [_bias(mask, q.dtype) for mask in prepared.masks]
        results = (attend(q[part.q], k[part.k], v[part.k], part.causal, None if part.mask is None else masks[part.mask],
                          scale) for part in prepared.parts)
        if prepared.tiled[0] == q.shape[0]:
            outs, lses = zip(*results, strict=True)
            return _end_to_end(outs).to(q.dtype), _end_to_end(lses)
        out = q.new_zeros((*q.shape[:2], v.shape[2]),
                          dtype=q.dtype if all(part.fresh for part in prepared.parts) else wide)
        lse = q.new_full(q.shape[:2], -torch.inf, dtype=wide)
        for part, (out_part, lse_part) in zip(prepared.parts, results, strict=True):
            if not part.fresh:
                out_part, lse_part = merge(out[part.q], lse[part.q], out_part, lse_part)
            out[part.q], lse[part.q] = out_part, lse_part
        return out.to(q.dtype), lse

    def backward(self, inputs: BackwardInputs, prepared: _SdpaTasks, scale: float | None = None) -> Gradients:
        prepared.check(inputs.q, inputs.k, inputs.v)
        dtype, wide = inputs.q.dtype, accumulation_dtype(inputs.q.dtype)  # the operator sums in its input dtype
        dout, q, k, v, out = (unit_stride(x if x.dtype is wide else x.to(wide)) for x in inputs[:5])
        scale, lse = softmax_scale(q, scale), inputs.lse
        softcap = prepared.softcap
        attend = _fused_backward if _is_fused(q, v, softcap) else partial(_plain_backward, softcap=softcap)
        masks = [_bias(mask, wide) for mask in prepared.masks]
        results = (attend(BackwardInputs(dout[part.q], q[part.q], k[part.k], v[part.k], out[part.q], lse[part.q]),
                          part.causal, None if part.mask is None else masks[part.mask], scale)
                   for part in prepared.parts)
        if prepared.tiled == (q.shape[0], k.shape[0]):
            dq, dk, dv = (_end_to_end(pieces) for pieces in zip(*results, strict=True))
        else:
            dq, dk, dv = (torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
            for part, (dq_part, dk_part, dv_part) in zip(prepared.parts, results, strict=True):
                dq[part.q].add_(dq_part)
                dk[part.k].add_(dk_part)
                dv[part.k].add_(dv_part)
        return dq.to(dtype), dk.to(dtype), dv.to(dtype)


def _is_fused(q: Tensor, v: Tensor, softcap: float | None) -> bool:
    """Return whether the fused operator fits: on a CPU, equal head dims of queries and values, no softcap."""
    return q.device.type == "cpu" and q.shape[2] == v.shape[2] and softcap is None


def _tiled(ranges: Sequence[slice]) -> int | None:
    """Return the number of tokens if the ranges are consecutive from 0; None if not, or if there are none."""
    at = 0
    for one in ranges:
        if one.start != at:
            return None
        at = one.stop
    return at or None


def _end_to_end(pieces: Sequence[Tensor]) -> Tensor:
    """Concatenate pieces; a single one becomes a non-view, since compiled code guards on views and would recompile."""
    return pieces[0].data if len(pieces) == 1 else torch.cat(list(pieces))


def _query_blocks(tasks: TaskRows, window: int) -> TaskRows:
    """Cut tasks into blocks of queries, so that a block sees few keys beyond its window."""
    block = min(max(window // 2, WINDOW_BLOCK_MIN), WINDOW_BLOCK_MAX)
    num_blocks = -(-tasks.q_len // block)
    task, index = spread(num_blocks)
    whole = tasks.take(task)
    q_begin = whole.q_begin + index * block
    blocks = replace(
        whole, q_begin=q_begin, q_end=np.minimum(whole.q_end, q_begin + block), q_offset=whole.q_offset + index * block
    )
    return visible(blocks, window)


def _band(q_len: int, k_len: int, q_offset: int, window: int, device: torch.device) -> Tensor:
    seen = torch.ones(q_len, k_len, dtype=torch.bool, device=device)
    return seen.tril(q_offset).triu(q_offset - window + 1)


def _bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, -torch.inf)


def _heads_first(x: Tensor) -> Tensor:
    return x.transpose(0, 1).unsqueeze(0)  # [1, heads, tokens, dim]


def _tokens_first(x: Tensor) -> Tensor:
    return x.squeeze(0).transpose(0, 1)  # [tokens, heads, dim]


def _fused_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None, scale: float) -> Results:
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        _heads_first(q), _heads_first(k), _heads_first(v), 0.0, causal, attn_mask=mask, scale=scale
    )
    return _tokens_first(out), _tokens_first(lse)


def _fused_backward(inputs: BackwardInputs, causal: bool, mask: Tensor | None, scale: float) -> Gradients:
    tensors = (_heads_first(x) for x in inputs)
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *tensors, 0.0, causal, attn_mask=mask, scale=scale
    )
    return _tokens_first(dq), _tokens_first(dk), _tokens_first(dv)


def _grouped(x: Tensor, kv_heads: int) -> Tensor:
    """Reshape [tokens, heads, dim] to [kv_heads, group, tokens, dim] in the accumulation dtype."""
    return x.to(accumulation_dtype(x.dtype)).unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)


def _masked(scores: Tensor, first: int, causal: bool, mask: Tensor | None) -> Tensor:
    """Mask scores [kv_heads, group, q, k] of the queries from number `first` on."""
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(first + 1)
        scores = scores.masked_fill(hidden, -torch.inf)
    return scores if mask is None else scores + mask[first : first + scores.shape[2]]


def _queries_at_once(q: Tensor, k: Tensor) -> int:
    return max(16, SCORES_AT_ONCE // (q.shape[1] * max(1, k.shape[0])))


def _plain_forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None, scale: float,
    softcap: float | None = None,
) -> Results:
    step, kv_heads = _queries_at_once(q, k), k.shape[1]
    keys, values = _grouped(k, kv_heads), _grouped(v, kv_heads)
    outs, lses = [], []
    for first in range(0, q.shape[0], step):
        products = _grouped(q[first : first + step], kv_heads) @ keys.transpose(-1, -2)
        scores = _masked(capped(products * scale, softcap), first, causal, mask)
        lse = scores.logsumexp(dim=-1)
        outs.append((torch.exp(scores - lse[..., None]) @ values).permute(2, 0, 1, 3).flatten(1, 2))
        lses.append(lse.permute(2, 0, 1).flatten(1, 2))
    return torch.cat(outs), torch.cat(lses)


def _plain_backward(
    inputs: BackwardInputs, causal: bool, mask: Tensor | None, scale: float, softcap: float | None = None
) -> Gradients:
    dout, q, k, v, out, lse = inputs
    step, kv_heads = _queries_at_once(q, k), k.shape[1]
    keys, values = _grouped(k, kv_heads), _grouped(v, kv_heads)
    dk, dv = torch.zeros_like(keys[:, 0]), torch.zeros_like(values[:, 0])  # [kv_heads, k, dim]
    dqs = []
    for first in range(0, q.shape[0], step):
        block = slice(first, first + step)
        queries, douts, outs = (_grouped(x[block], kv_heads) for x in (q, dout, out))
        lses = _grouped(lse[block, :, None], kv_heads)
        scores = capped((queries @ keys.transpose(-1, -2)) * scale, softcap)
        probabilities = torch.exp(_masked(scores, first, causal, mask) - lses)
        delta = (douts * outs).sum(dim=-1, keepdim=True)
        slope = scale * cap_slope(scores, softcap)
        dscores = probabilities * (douts @ values.transpose(-1, -2) - delta) * slope
        dqs.append((dscores @ keys).permute(2, 0, 1, 3).flatten(1, 2))
        dk += torch.einsum("hgqk,hgqd->hkd", dscores, queries)
        dv += torch.einsum("hgqk,hgqd->hkd", probabilities, douts)
    return torch.cat(dqs), dk.transpose(0, 1), dv.transpose(0, 1)
