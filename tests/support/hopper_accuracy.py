"""Inputs, rows and a whole call for tests of the Hopper kernel. What its error may be is in tests.support.accuracy."""

from __future__ import annotations

import numpy as np
import torch

from distca.kernels.interface import BackwardInputs, Kernel, Scores, TaskRows
from tests.support.accuracy import check_attention

NAMES = ("out", "lse", "dq", "dk", "dv")
VALUE_DIMS = {192: 128}


def random_inputs(
    num_q: int, num_k: int, heads: int, kv_heads: int, dim: int, device: torch.device, seed: int = 0
) -> list[torch.Tensor]:
    """q, k, v, dout; beside 192 values have a head dim of their own."""
    generator, value_dim = torch.Generator(device=device).manual_seed(seed), VALUE_DIMS.get(dim, dim)
    shapes = ((num_q, heads, dim), (num_k, kv_heads, dim), (num_k, kv_heads, value_dim), (num_q, heads, value_dim))
    return [torch.randn(shape, device=device, generator=generator).to(torch.bfloat16) for shape in shapes]


def attend(
    kernel: Kernel, tensors: list[torch.Tensor], rows: TaskRows, window: int | None = None, scale: float | None = None,
    softcap: float | None = None,
) -> list[torch.Tensor]:
    """out, lse, dq, dk, dv."""
    q, k, v, dout = tensors
    prepared = kernel.prepare(rows, q.device, Scores(window=window, softcap=softcap))
    out, lse = kernel.forward(q, k, v, prepared, scale)
    return [out, lse, *kernel.backward(BackwardInputs(dout, q, k, v, out, lse), prepared, scale)]


def assert_exact(
    actual: list[torch.Tensor], tensors: list[torch.Tensor], rows: TaskRows, window: int | None = None,
    scale: float | None = None, softcap: float | None = None,
) -> None:
    q, k, v, dout = tensors
    check_attention(actual, q, k, v, dout, rows, window=window, scale=scale, softcap=softcap)


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
