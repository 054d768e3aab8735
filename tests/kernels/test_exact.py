"""Kernels against the oracle in float64: outputs, log-sum-exp and all gradients, on whatever rows there are.

`dense` and `sdpa` run as they are. The GPU kernels' tables, packing and merging run here too, around stand-ins that do
on the CPU, in float64, what the GPU operators document.
"""

import math
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from distca.kernels import Kernel, TaskRows, dense_attention, kernel_named, merge
from distca.kernels import flash as packed_flash_module
from distca.kernels import sdpa as sdpa_module
from distca.kernels.dense import DenseKernel
from distca.kernels.flash import PackedCall
from distca.kernels.hopper import kernel as hopper_module
from distca.kernels.hopper.kernel import HopperKernel
from distca.kernels.interface import BackwardInputs, Scores
from distca.kernels.sdpa import SdpaKernel
from tests.support import hopper_walk
from tests.support.accuracy import check_attention, expected_attention
from tests.support.attention import determinism, qkv_of, task_rows

CPU = torch.device("cpu")
EXACT: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-10}


def qkv(
    num_q: int, num_k: int, heads: int = 4, kv_heads: int = 2, dim: int = 8, seed: int = 0, value_dim: int = 8
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((num_q, heads, dim), (num_k, kv_heads, dim), (num_k, kv_heads, value_dim), (num_q, heads, value_dim))
    return [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes]  # q, k, v, dout


def by_the_rule(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: TaskRows, window: int | None, scale: float,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One query and one head at a time, from the list of keys that its rows show it; differentiable."""
    group = q.shape[1] // k.shape[1]
    outs, lses = [], []
    for i in range(q.shape[0]):
        keys = [
            k_begin + j
            for q_begin, q_end, k_begin, k_end, offset in zip(
                *(getattr(rows, c).tolist() for c in ("q_begin", "q_end", "k_begin", "k_end", "q_offset")), strict=True
            )
            if q_begin <= i < q_end
            for j in range(k_end - k_begin)
            if j <= offset + i - q_begin and (window is None or j > offset + i - q_begin - window)
        ]
        for h in range(q.shape[1]):
            if not keys:
                outs.append(q[i, h].sum() * v.new_zeros(v.shape[2]))
                lses.append(torch.tensor(-math.inf, dtype=q.dtype))
                continue
            scores = k[keys, h // group] @ q[i, h] * scale
            if softcap is not None:
                scores = softcap * (scores / softcap).tanh()
            outs.append(scores.softmax(dim=0) @ v[keys, h // group])
            lses.append(scores.logsumexp(dim=0))
    return torch.stack(outs).view(*q.shape[:2], -1), torch.stack(lses).view(q.shape[:2])


def assert_exact(
    kernel: Kernel, tensors: list[torch.Tensor], rows: TaskRows, window: int | None = None, scale: float | None = None,
    softcap: float | None = None,
) -> None:
    *inputs, dout = tensors
    q, k, v = inputs
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    expected_out, expected_lse = by_the_rule(*qkv_of(leaves), rows, window, scale or inputs[0].shape[-1] ** -0.5,
                                             softcap)
    expected = torch.autograd.grad(expected_out, leaves, dout, allow_unused=True, materialize_grads=True)
    prepared = kernel.prepare(rows, CPU, Scores(None, window, softcap))
    out, lse = kernel.forward(q, k, v, prepared, scale)
    torch.testing.assert_close(out, expected_out, **EXACT)
    torch.testing.assert_close(lse, expected_lse, **EXACT)
    actual = kernel.backward(BackwardInputs(dout, q, k, v, out, lse), prepared, scale)
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, **EXACT)


def formula_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = (torch.einsum("qhd,khd->hqk", q, k) * scale).masked_fill(~seen, -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(dim=-1), v), scores.logsumexp(dim=-1).T


def formula_backward(
    saved: tuple[torch.Tensor, ...], seen: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dout, q, k, v, out, lse = saved
    group = q.shape[1] // k.shape[1]
    keys, values = (x.repeat_interleave(group, dim=1) for x in (k, v))
    scores = (torch.einsum("qhd,khd->hqk", q, keys) * scale).masked_fill(~seen, -torch.inf)
    p = torch.exp(scores - lse.T[..., None])
    ds = p * (torch.einsum("qhd,khd->hqk", dout, values) - (dout * out).sum(-1).T[..., None]) * scale
    dk, dv = torch.einsum("hqk,qhd->khd", ds, q), torch.einsum("hqk,qhd->khd", p, dout)
    dk, dv = (x.unflatten(1, (-1, group)).sum(dim=2) for x in (dk, dv))
    return torch.einsum("hqk,khd->qhd", ds, keys), dk, dv


def band(q_len: int, k_len: int, left: int, right: int) -> torch.Tensor:
    return torch.ones(q_len, k_len, dtype=torch.bool).tril(k_len - q_len + right).triu(k_len - q_len - left)


def flash_2_band(q_len: int, k_len: int, call: PackedCall) -> torch.Tensor:
    """FlashAttention-2's mask, with the way it caps both window bounds by the longest keys of the launch."""
    left, right = call.window_left, 0 if call.causal else -1
    left = -1 if left >= call.max_k_len else left
    if left < 0 and right < 0:
        return torch.ones(q_len, k_len, dtype=torch.bool)
    return band(q_len, k_len, *(call.max_k_len if bound < 0 else bound for bound in (left, right)))


def flash_4_band(q_len: int, k_len: int, call: PackedCall) -> torch.Tensor:
    """FlashAttention-4's mask: bounds are as they are given."""
    far = q_len + k_len
    return band(q_len, k_len, far if call.window_left < 0 else call.window_left, 0 if call.causal else far)


class Calls:
    """What a packed operator computes, by the formula."""

    def __init__(self, seen: Callable[[int, int, PackedCall], torch.Tensor]) -> None:
        self.seen = seen

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: PackedCall, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = torch.full_like(q, torch.nan), torch.full(q.shape[:2], torch.nan, dtype=q.dtype)
        ends = call.q_ends.tolist()
        for (q0, q1), k0, k_len in zip(pairwise(ends), call.k_begin.tolist(), call.k_len.tolist(), strict=False):
            assert q1 - q0 <= call.max_q_len
            assert k_len <= call.max_k_len
            keys, values = k[k0 : k0 + k_len], v[k0 : k0 + k_len]
            out[q0:q1], lse[q0:q1] = formula_forward(
                q[q0:q1], keys, values, self.seen(q1 - q0, k_len, call), scale
            )
        return out, lse

    def backward(self, inputs: BackwardInputs, call: PackedCall, scale: float) -> tuple[torch.Tensor, ...]:
        dout, q, k, v, out, lse = inputs
        gradients = tuple(torch.full_like(x, torch.nan) for x in (q, k, v))
        for (q0, q1), (k0, k1) in zip(pairwise(call.q_ends.tolist()), pairwise(call.k_ends.tolist()), strict=True):
            saved = (dout[q0:q1], q[q0:q1], k[k0:k1], v[k0:k1], out[q0:q1], lse[q0:q1])
            parts = formula_backward(saved, self.seen(q1 - q0, k1 - k0, call), scale)
            gradients[0][q0:q1], gradients[1][k0:k1], gradients[2][k0:k1] = parts
        return gradients


@pytest.fixture(params=["dense", "sdpa", "sdpa off the CPU", "varlen", "fa4", "hopper", "hopper in turns"])
def kernel(request: pytest.FixtureRequest) -> Iterator[Kernel]:
    with pytest.MonkeyPatch.context() as patch:
        if request.param.startswith("hopper"):
            patch.setattr(hopper_module, "run_forward", hopper_walk.launch_forward)
            patch.setattr(hopper_module, "run_backward", hopper_walk.launch_backward)
        if request.param == "sdpa off the CPU":  # a few queries at a time
            patch.setattr(sdpa_module, "_fused_forward", sdpa_module._plain_forward)
            patch.setattr(sdpa_module, "_fused_backward", sdpa_module._plain_backward)
            patch.setattr(sdpa_module, "_queries_at_once", lambda q, k: 3)
        if request.param in ("varlen", "fa4"):
            packed = type(kernel_named(request.param))
            calls = Calls(flash_2_band if request.param == "varlen" else flash_4_band)
            patch.setattr(packed, "call_forward", staticmethod(calls.forward))
            patch.setattr(packed, "call_backward", staticmethod(calls.backward))
            patch.setattr(packed_flash_module, "COPIED_KEYS_AT_ONCE", 20)
            patch.setattr(packed_flash_module, "TASKS_AT_ONCE", 3)
        with determinism(request.param == "hopper in turns"):    # and then what is empty is nan
            yield kernel_named(request.param.split()[0])


CASES = {
    "no rows": [],
    "empty row": [(3, 3, 2, 2, 0)],
    "queries without keys": [(0, 4, 2, 2, 0)],
    "keys without queries": [(2, 2, 0, 4, 0)],
    "one token": [(5, 6, 7, 8, 0)],
    "one query, many keys": [(5, 6, 0, 16, 15)],
    "shared prefix": [(0, 4, 0, 9, 5), (4, 12, 0, 16, 8), (12, 13, 0, 3, 2)],
    "more queries than keys": [(0, 10, 0, 4, -6)],
    "queries before and past the keys": [(0, 12, 3, 8, -3)],
    "rectangle": [(2, 9, 0, 6, 6)],
    "same queries, partial keys": [(0, 8, 0, 5, 8), (0, 8, 5, 8, 3), (0, 8, 8, 16, 0)],
    "queries overlap in part": [(0, 8, 0, 8, 0), (4, 12, 8, 12, 20)],
    "a pair named twice": [(0, 6, 0, 6, 0), (2, 4, 1, 3, 9)],
    "invisible keys": [(0, 3, 0, 16, 2)],
    "nothing visible": [(0, 3, 0, 4, -9)],
}


@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize("case", CASES)
def test_named_cases(kernel: Kernel, case: str, window: int | None) -> None:
    rows = TaskRows(*np.array(CASES[case], dtype=np.int64).reshape(-1, 5).T)
    assert_exact(kernel, qkv(14, 16), rows, window)


@st.composite
def any_rows(draw: st.DrawFn) -> TaskRows:
    def span(size: int) -> tuple[int, int]:
        begin = draw(st.integers(0, size))
        return begin, draw(st.integers(begin, size))

    spans = [(*span(14), *span(16), draw(st.integers(-16, 18))) for _ in range(draw(st.integers(1, 5)))]
    return TaskRows(*np.array(spans, dtype=np.int64).T)


@given(
    rows=any_rows(),
    window=st.none() | st.integers(1, 20),
    kv_heads=st.sampled_from([1, 2, 8]),
    scale=st.none() | st.floats(0.05, 2.0),
    seed=st.integers(0, 99),
)
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_random_rows(
    kernel: Kernel, rows: TaskRows, window: int | None, kv_heads: int, scale: float | None, seed: int
) -> None:
    tensors = qkv(14, 16, heads=8, kv_heads=kv_heads, seed=seed)
    assert_exact(kernel, tensors, rows, window, scale)


@given(
    rows=any_rows(),
    how=st.sampled_from([(DenseKernel(), 0.4), (SdpaKernel(), 0.4), (SdpaKernel(), 30.0), (HopperKernel(), 0.4),
                         (HopperKernel(), 30.0)]),
    window=st.none() | st.integers(1, 20),
    kv_heads=st.sampled_from([1, 2, 8]),
    at_once=st.sampled_from([1, 3, 100]),
    in_turns=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=60, deadline=None)
def test_random_rows_with_a_softcap(
    how: tuple[Kernel, float], rows: TaskRows, window: int | None, kv_heads: int, at_once: int, in_turns: bool,
    seed: int,
) -> None:
    with pytest.MonkeyPatch.context() as patch, determinism(in_turns):
        patch.setattr(hopper_module, "run_forward", hopper_walk.launch_forward)
        patch.setattr(hopper_module, "run_backward", hopper_walk.launch_backward)
        patch.setattr(sdpa_module, "_queries_at_once", lambda q, k: at_once)
        assert_exact(how[0], qkv(14, 16, heads=8, kv_heads=kv_heads, seed=seed), rows, window, softcap=how[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_softcap_in_low_precision_is_off_by_rounding_alone(dtype: torch.dtype) -> None:
    rows, kernel = TaskRows.documents([70, 26]), SdpaKernel()
    q, k, v, dout = (x.to(dtype) for x in qkv(96, 96))
    q = 3 * q
    prepared = kernel.prepare(rows, CPU, Scores(softcap=2.0))
    out, lse = kernel.forward(q, k, v, prepared)
    actual = [out, lse, *kernel.backward(BackwardInputs(dout, q, k, v, out, lse), prepared)]
    check_attention(actual, q, k, v, dout, rows, softcap=2.0)
    for other in (None, 2.2):                                    # the bounds tell these apart
        with pytest.raises(AssertionError, match="rounding allows"):
            check_attention(actual, q, k, v, dout, rows, softcap=other)


@pytest.mark.parametrize("group", [1, 4, 8])
@pytest.mark.parametrize(("lengths", "window"), [([1], None), ([300, 1, 65, 0, 7], None), ([700, 130], 200)])
def test_documents_match_dense_attention(kernel: Kernel, lengths: list[int], window: int | None, group: int) -> None:
    """Whole documents cut into shards of queries, shards of keys too, in one shuffled table."""
    window = window
    q, k, v, dout = qkv(sum(lengths), sum(lengths), heads=8, kv_heads=8 // group)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    expected_out = dense_attention(*qkv_of(leaves), lengths, window=window)
    expected = torch.autograd.grad(expected_out, leaves, dout)
    table, begin = [], 0
    for length in lengths:
        cuts = sorted({0, length // 3, length // 2, length})
        for q_start, q_stop in pairwise(cuts):
            for k_start, k_stop in pairwise(cuts):
                if k_start < q_stop:
                    table.append((begin + q_start, begin + q_stop, begin + k_start, begin + k_stop, q_start - k_start))
        if length == 1:
            table.append((begin, begin + 1, begin, begin + 1, 0))
        begin += length
    shuffled = np.random.default_rng(0).permutation(np.unique(np.array(table), axis=0))
    prepared = kernel.prepare(TaskRows(*shuffled.T), CPU, Scores(window=window))
    out, lse = kernel.forward(q, k, v, prepared)
    torch.testing.assert_close(out, expected_out, **EXACT)
    for a, e in zip(kernel.backward(BackwardInputs(dout, q, k, v, out, lse), prepared), expected, strict=True):
        torch.testing.assert_close(a, e, **EXACT)


@pytest.mark.parametrize(("dim", "value_dim"), [(12, 8), (6, 10)])
def test_values_may_have_a_head_dim_of_their_own(kernel: Kernel, dim: int, value_dim: int) -> None:
    tensors = qkv(14, 16, dim=dim, value_dim=value_dim)
    for case in ("shared prefix", "queries before and past the keys", "same queries, partial keys"):
        rows = TaskRows(*np.array(CASES[case], dtype=np.int64).T)
        if kernel.name in ("dense", "sdpa", "hopper"):
            for window in (None, 3):
                assert_exact(kernel, tensors, rows, window)
        else:
            q, k, v, dout = tensors
            prepared = kernel.prepare(rows, CPU)
            refusal = f"kernel='{kernel.name}': head_dim is {dim} and that of values {value_dim}.*use kernel='hopper'"
            with pytest.raises(ValueError, match=refusal):
                kernel.forward(q, k, v, prepared)
            with pytest.raises(ValueError, match=refusal):
                kernel.backward(BackwardInputs(dout, q, k, v, dout, q[..., 0]), prepared)


def test_inputs_need_not_be_contiguous(kernel: Kernel) -> None:
    rows = TaskRows.aligned([0, 4], [4, 14], [0, 0], [6, 16])
    q, k, v, dout = qkv(14, 16)
    strided = [q.permute(2, 0, 1).contiguous().permute(1, 2, 0), k.repeat(1, 1, 2)[..., :8], v.flip(0).flip(0)]
    strided[2] = torch.cat([v, v], dim=1)[:, ::2][:, [0, 1]].transpose(0, 1).contiguous().transpose(0, 1)
    strided.append(dout.transpose(0, 1).contiguous().transpose(0, 1))
    assert not any(x.is_contiguous() for x in strided)
    assert_exact(kernel, strided, rows)


def test_rows_of_several_servers_merge_at_home(kernel: Kernel) -> None:
    """Each server sees its own key range alone; backward runs there with the merged out and lse."""
    q, k, v, dout = qkv(40, 40)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    expected_out = dense_attention(*qkv_of(leaves), [40])
    expected = torch.autograd.grad(expected_out, leaves, dout)
    servers = [kernel.prepare(task_rows([0], [40], [k0], [k1], [-k0]), CPU) for k0, k1 in ((0, 9), (9, 30), (30, 40))]
    out, lse = kernel.forward(q, k, v, servers[0])
    for server in servers[1:]:
        out, lse = merge(out, lse, *kernel.forward(q, k, v, server))
    torch.testing.assert_close(out, expected_out, **EXACT)
    parts = [kernel.backward(BackwardInputs(dout, q, k, v, out, lse), server) for server in servers]
    for sides, e in zip(zip(*parts, strict=True), expected, strict=True):
        torch.testing.assert_close(sum(sides), e, **EXACT)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", ["dense", "sdpa"])
def test_low_precision_rounds_and_does_no_worse(name: str, dtype: torch.dtype) -> None:
    kernel = kernel_named(name)
    q, k, v, dout = (x.to(dtype) for x in qkv(1024, 1024, heads=4, kv_heads=2, dim=32))
    prepared = kernel.prepare(concatenated_shards(), CPU)
    out, lse = kernel.forward(q, k, v, prepared)
    assert lse.dtype == torch.float32
    actual = [out, lse, *kernel.backward(BackwardInputs(dout, q, k, v, out, lse), prepared)]
    for expected, x in zip(expected_attention(q, k, v, dout, TaskRows.documents([700, 324])), actual, strict=True):
        assert expected.name == "lse" or x.dtype == dtype
        expected.check(x)
        with pytest.raises(AssertionError, match=expected.name):  # a fiftieth is too much, also in bfloat16
            expected.check(x * 1.02)


def concatenated_shards() -> TaskRows:
    """Documents of 700 and 324 tokens; the first in query shards that share its keys, one of them in two key ranges."""
    return task_rows(
        [0, 270, 270, 700], [270, 700, 700, 1024], [0, 0, 140, 700], [270, 140, 700, 1024], [0, 270, 130, 0]
    )
