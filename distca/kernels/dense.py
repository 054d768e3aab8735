"""Reference attention: the plain formula, with every score in memory.

It is slow and quadratic on purpose. Tests compare every other path with `dense_attention`; the `dense` kernel computes
the same for tasks, in any dtype on any device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
    cap_slope,
    capped,
    check_inputs,
    check_sinks,
    softmax_scale,
)
from distca.validation import UserError

_DenseTasks = tuple[TaskRows, Scores]


def dense_attention(
    q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], scale: float | None = None, window: int | None = None,
    softcap: float | None = None, sinks: Tensor | None = None,
) -> Tensor:
    """Return causal attention inside packed documents: q [tokens, heads, dim], k and v [tokens, kv_heads, dim].

    The dim of v, and of the result, may differ. `softcap` c replaces each score by c * tanh(score / c). `sinks` [heads]
    add to each query one more score, of a key whose value is 0.
    """
    if sum(lengths) != q.shape[0] or q.shape[0] != k.shape[0]:
        raise UserError(
            f"lengths add up to {sum(lengths)}, q has {q.shape[0]} tokens, k {k.shape[0]}; make them equal"
        )
    check_inputs(q, k, v, TaskRows.documents(lengths))
    Scores(scale, window, softcap)
    check_sinks(sinks, q)
    group = q.shape[1] // k.shape[1]
    outs, begin = [q.new_empty(0, q.shape[1], v.shape[2])], 0
    for length in lengths:
        document = slice(begin, begin + length)
        keys, values = (x[document].repeat_interleave(group, dim=1) for x in (k, v))  # [tokens, heads, dim]
        scores = capped(torch.einsum("qhd,khd->hqk", q[document], keys) * softmax_scale(q, scale), softcap)
        seen = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
        if window is not None:
            seen = seen.triu(1 - window)
        scores = scores.masked_fill(~seen, -torch.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks.to(scores.dtype)[:, None, None].expand(-1, length, 1)], dim=-1)
        probabilities = scores.softmax(dim=-1)[..., :length]  # [heads, q, k]
        outs.append(torch.einsum("hqk,khd->qhd", probabilities, values))
        begin += length
    return torch.cat(outs)


@dataclass(frozen=True, slots=True)
class DenseKernel:
    """Tasks computed by the formula; a (query, key) pair is weighted by the number of tasks that contain it."""

    name: str = "dense"

    def supports(
        self, device: torch.device, dtype: torch.dtype, head_dim: int, scores: Scores = PLAIN,
        value_dim: int | None = None,
    ) -> str | None:
        return None if dtype.is_floating_point else f"dtype is {dtype}; give a floating-point dtype"

    def prepare(self, tasks: TaskRows, device: torch.device, scores: Scores = PLAIN) -> _DenseTasks:
        return tasks, scores

    def forward(self, q: Tensor, k: Tensor, v: Tensor, prepared: _DenseTasks, scale: float | None = None) -> Results:
        tasks, about = prepared
        check_inputs(q, k, v, tasks)
        scores = _scores(q, k, softmax_scale(q, scale), about.softcap)  # [heads, q, k]
        scores = scores + times_shown(q, k, tasks, about.window).log()
        lse = scores.logsumexp(dim=-1)  # [heads, q]
        probabilities = _probabilities(scores, lse)
        out = torch.einsum("hqk,khd->qhd", probabilities, _per_head(v, q))
        return out.to(q.dtype), lse.T.contiguous()

    def backward(self, inputs: BackwardInputs, prepared: _DenseTasks, scale: float | None = None) -> Gradients:
        (dout, q, k, v, out, lse), (tasks, about) = inputs, prepared
        check_inputs(q, k, v, tasks)
        scale = softmax_scale(q, scale)
        scores = _scores(q, k, scale, about.softcap)
        probabilities = _probabilities(scores + times_shown(q, k, tasks, about.window).log(), lse.T)
        dout_wide = dout.to(probabilities.dtype)
        delta = (dout_wide * out).sum(dim=-1).T  # [heads, q]
        dprobabilities = torch.einsum("qhd,khd->hqk", dout_wide, _per_head(v, q))
        dscores = probabilities * (dprobabilities - delta[..., None]) * (scale * cap_slope(scores, about.softcap))
        dq = torch.einsum("hqk,khd->qhd", dscores, _per_head(k, q))
        dk = torch.einsum("hqk,qhd->khd", dscores, q.to(dscores.dtype))
        dv = torch.einsum("hqk,qhd->khd", probabilities, dout_wide)
        group = q.shape[1] // k.shape[1]
        dk, dv = (x.unflatten(1, (k.shape[1], group)).sum(dim=2) for x in (dk, dv))
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _scores(q: Tensor, k: Tensor, scale: float, softcap: float | None) -> Tensor:
    """Return the scores of all pairs, [heads, num_q, num_k]."""
    wide = q.to(accumulation_dtype(q.dtype))
    return capped(torch.einsum("qhd,khd->hqk", wide, _per_head(k, q)) * scale, softcap)


def _per_head(x: Tensor, q: Tensor) -> Tensor:
    return x.to(accumulation_dtype(x.dtype)).repeat_interleave(q.shape[1] // x.shape[1], dim=1)


def times_shown(q: Tensor, k: Tensor, tasks: TaskRows, window: int | None) -> Tensor:
    """Return the number of tasks in which the query sees the key, [num_q, num_k]."""
    count = torch.zeros(q.shape[0], k.shape[0], dtype=accumulation_dtype(q.dtype), device=q.device)
    for q_begin, q_end, k_begin, k_end, q_offset in zip(
        tasks.q_begin, tasks.q_end, tasks.k_begin, tasks.k_end, tasks.q_offset, strict=True
    ):
        q_position = torch.arange(q_end - q_begin, device=q.device)[:, None] + int(q_offset)
        k_position = torch.arange(k_end - k_begin, device=q.device)[None, :]
        seen = k_position <= q_position
        if window is not None:
            seen = seen & (k_position > q_position - window)
        count[q_begin:q_end, k_begin:k_end] += seen
    return count


def _probabilities(scores: Tensor, lse: Tensor) -> Tensor:
    return torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0)[..., None])
