"""Whether a bf16 kernel is as exact as plain PyTorch: against the oracle in float64, at most twice the error.

Error is taken by norm and at the worst place, for out, log-sum-exp and all gradients. "Plain" is the formula with
bf16 matmuls, softmax in float32 and autograd. Both take one KV head and a few queries at a time, so that 32K queries
against 32K keys fit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from distca.kernels.dense import DenseKernel, times_shown
from distca.kernels.interface import Kernel, TaskRows

NAMES = ("out", "lse", "dq", "dk", "dv")
NEGLIGIBLE = 1e-5  # plain PyTorch makes no error at all where every query sees one key
SCORE_BYTES = 2**30  # of one matrix in float64


def random_inputs(
    num_q: int, num_k: int, heads: int, kv_heads: int, dim: int, device: torch.device, seed: int = 0
) -> list[torch.Tensor]:
    generator = torch.Generator(device=device).manual_seed(seed)
    shapes = ((num_q, heads, dim), (num_k, kv_heads, dim), (num_k, kv_heads, dim), (num_q, heads, dim))
    return [torch.randn(shape, device=device, generator=generator).to(torch.bfloat16) for shape in shapes]


def attend(
    kernel: Kernel, tensors: list[torch.Tensor], rows: TaskRows, window: int | None = None, scale: float | None = None
) -> list[torch.Tensor]:
    """out, lse, dq, dk, dv."""
    q, k, v, dout = tensors
    prepared = kernel.prepare(rows, q.device, window)
    out, lse = kernel.forward(q, k, v, prepared, scale)
    return [out, lse, *kernel.backward(dout, q, k, v, out, lse, prepared, scale)]


def plain(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor, rows: TaskRows, window: int | None,
    scale: float | None,
) -> list[torch.Tensor]:
    """k and v hold one KV head."""
    count = times_shown(q, k, rows, window)
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    queries, keys, values = (x.transpose(0, 1) for x in leaves)                      # [heads or 1, tokens, dim]
    scores = (queries @ keys.transpose(1, 2)).float() * (q.shape[-1] ** -0.5 if scale is None else scale) + count.log()
    blank = ~count.any(dim=1)[:, None]
    probabilities = scores.masked_fill(blank, 0.0).softmax(dim=-1).masked_fill(blank, 0.0)
    out = (probabilities.to(q.dtype) @ values).transpose(0, 1)
    return [out.detach(), scores.detach().logsumexp(dim=-1).T, *torch.autograd.grad(out, leaves, dout)]


def in_parts(
    compute: Callable[..., list[torch.Tensor]], tensors: list[torch.Tensor], rows: TaskRows, window: int | None,
    scale: float | None,
) -> list[torch.Tensor]:
    """`compute` over one KV head and a few queries at a time; dk and dv added up."""
    q, k, v, dout = tensors
    group = q.shape[1] // k.shape[1]
    at_once = max(1, SCORE_BYTES // (8 * group * max(1, k.shape[0])))
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    out, dq = torch.zeros_like(q), torch.zeros_like(q)
    lse = torch.zeros(q.shape[:2], dtype=wide, device=q.device)
    dk, dv = (torch.zeros_like(x, dtype=wide) for x in (k, v))
    for head in range(k.shape[1]):
        heads, one = slice(head * group, (head + 1) * group), slice(head, head + 1)
        for begin in range(0, q.shape[0], at_once):
            queries = slice(begin, min(begin + at_once, q.shape[0]))
            here = rows_of_queries(rows, queries.start, queries.stop)
            part = compute(q[queries, heads], k[:, one], v[:, one], dout[queries, heads], here, window, scale)
            out[queries, heads], lse[queries, heads], dq[queries, heads] = part[:3]
            dk[:, one] += part[3]
            dv[:, one] += part[4]
    return [out, lse, dq, dk.to(k.dtype), dv.to(v.dtype)]


def rows_of_queries(rows: TaskRows, begin: int, end: int) -> TaskRows:
    """The rows over a buffer that holds the queries from begin to end alone."""
    q_begin, q_end = np.clip(rows.q_begin, begin, end), np.clip(rows.q_end, begin, end)
    return replace(rows, q_begin=q_begin - begin, q_end=q_end - begin, q_offset=rows.q_offset + q_begin - rows.q_begin)


def oracle(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor, rows: TaskRows, window: int | None,
    scale: float | None,
) -> list[torch.Tensor]:
    return attend(DenseKernel(), [q, k, v, dout], rows, window, scale)


def assert_as_exact_as_plain(
    actual: list[torch.Tensor], tensors: list[torch.Tensor], rows: TaskRows, window: int | None = None,
    scale: float | None = None,
) -> None:
    truth = in_parts(oracle, [x.double() for x in tensors], rows, window, scale)
    peers = in_parts(plain, tensors, rows, window, scale)
    for name, a, p, t in zip(NAMES, actual, peers, truth, strict=True):
        assert a.shape == t.shape and a.dtype == p.dtype, name
        seen = t.isfinite()
        assert torch.equal(a.isfinite(), seen) and torch.equal(a[~seen].double(), t[~seen]), f"{name} is not finite"
        error, allowed = (a.double() - t)[seen], (p.double() - t)[seen]
        if error.numel():
            for how, by in (("rms", lambda x: x.square().mean().sqrt()), ("largest", lambda x: x.abs().max())):
                assert by(error) <= 2 * by(allowed) + NEGLIGIBLE, (
                    f"{name}: {how} error {by(error):.2e}, plain PyTorch's {by(allowed):.2e}")


def random_rows(seed: int, num_rows: int, num_q: int, num_k: int, apart: bool) -> TaskRows:
    """Rows of any kind, a few of them empty or of one token; `apart`: no query stands in two."""
    rng = np.random.default_rng(seed)
    if apart:
        cuts = np.sort(rng.integers(0, num_q + 1, 2 * num_rows))
        q_begin, q_end = cuts[::2], cuts[1::2]
    else:
        q_begin, q_end = np.sort(rng.integers(0, num_q + 1, (2, num_rows)), axis=0)
        q_begin[::3], q_end[::3] = q_begin[0], q_end[0]
    k_begin, k_end = np.sort(rng.integers(0, num_k + 1, (2, num_rows)), axis=0)
    k_begin[::4] = 0
    q_end[1] = q_begin[1] + (q_begin[1] < num_q)
    k_end[2] = k_begin[2]
    aligned = (k_end - k_begin) - (q_end - q_begin)
    kind = rng.integers(0, 4, num_rows)
    offset = np.select([kind == 0, kind == 1], [k_end - k_begin, rng.integers(-num_q, num_k, num_rows)], aligned)
    return TaskRows(q_begin, q_end, k_begin, k_end, offset)


def shards(count: int, q_len: int, kv_len: int) -> TaskRows:
    """Shards over the same first keys, each a few keys further from their end, so that none continues another."""
    shard = np.arange(count)
    return TaskRows.aligned(shard * q_len, (shard + 1) * q_len, shard * 0, kv_len - 7 * shard)
