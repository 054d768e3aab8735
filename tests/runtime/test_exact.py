"""Whatever the plan, every rank gets what attention in one piece would have given: outputs and gradients, to 1e-10."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distca.baselines import at_home, head_tail_layout
from distca.dispatch import build
from distca.kernels import TaskRows, kernel_named
from distca.kernels.interface import BackwardInputs
from distca.planning.balance import balance
from distca.planning.plan import Plan
from distca.runtime.attention import CoreAttention
from distca.spec import ModelShape
from distca.workload.layout import Layout, layout_from_rows
from distca.workload.packing import pack
from tests.support.accuracy import check_attention, expected_attention
from tests.support.attention import (
    attend_on_fake_ranks,
    dense_on_one,
    from_rows,
    gradient,
    on_fake_ranks,
    qkv_of,
    random_qkv,
    row_index,
)
from tests.support.plans import (
    LAYOUT_KINDS,
    covers_exactly_once,
    misplaced_plan,
    random_layout,
    random_speeds,
    scattered_layout,
    scattered_plan,
)

MODEL = ModelShape("tiny", 1, 32, 4, 2, 8, 64, 64)
SEEDS = st.integers(0, 100_000)
HEADS = st.sampled_from([(4, 1), (4, 2), (4, 4), (3, 1)])        # query and KV heads


def agree(actual: list[torch.Tensor] | tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> None:
    assert len(actual) == len(expected) == 4
    for name, got, want in zip(("out", "dq", "dk", "dv"), actual, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10, msg=partial("{}: {}".format, name))


def check(plan: Plan, seed: int = 0, heads: tuple[int, int] = (4, 2), scale: float | None = None,
          window: int | None = None, **options: Any) -> None:
    tensors = random_qkv(seed, plan.layout.num_tokens, *heads)
    agree(attend_on_fake_ranks(*tensors, plan, scale=scale, window=window, **options),
          dense_on_one(*tensors, plan.layout.lengths, scale, window))


@st.composite
def pools(draw: st.DrawFn, least: int = 1, most: int = 50) -> tuple[int, Layout, int]:
    """A layout with the number of servers of its pool."""
    seed, ranks = draw(SEEDS), draw(st.integers(1, 4))
    layout = random_layout(seed, draw(st.sampled_from(LAYOUT_KINDS)), ranks, draw(st.integers(least, most)))
    return seed, layout, ranks + draw(st.integers(0, 2))


@settings(deadline=None, max_examples=120)
@given(pools(), HEADS, st.sampled_from(["dense", "sdpa"]), st.sampled_from(["resend", "keep"]),
       st.sampled_from([None, 0.05, 1.0]), st.sampled_from([None, 1, 3, 20, 1000]))
def test_parts_of_queries_and_keys_on_any_servers(pool: tuple[int, Layout, int], heads: tuple[int, int], kernel: str,
                                                  state: str, scale: None, window: int | None) -> None:
    seed, layout, servers = pool
    plan = scattered_plan(seed, layout, servers, MODEL)
    if servers > layout.num_ranks:
        state = "resend"                                         # dedicated servers keep nothing
    check(plan, seed, heads, scale, window, kernel=kernel, state=state)


@settings(deadline=None, max_examples=60)
@given(pools(least=40, most=300), st.sampled_from([0.0, 0.02, 0.3]), st.sampled_from(["resend", "keep"]))
def test_balanced_plans_over_any_pool(pool: tuple[int, Layout, int], tolerance: float, state: str) -> None:
    seed, layout, servers = pool
    speed = random_speeds(seed, layout.num_ranks, servers - layout.num_ranks)
    plan = balance(layout, MODEL, tolerance=tolerance, speed=speed)
    plan.validate()
    check(plan, seed, (2, 1), kernel="sdpa", state="resend" if servers > layout.num_ranks else state)


@settings(deadline=None, max_examples=30)
@given(pools(), st.integers(1, 4), st.sampled_from(["resend", "keep"]))
def test_every_task_on_a_wrong_server(pool: tuple[int, Layout, int], shift: int, state: str) -> None:
    seed, layout, servers = pool
    check(misplaced_plan(layout, servers, MODEL, shift), seed,
          state="resend" if servers > layout.num_ranks else state)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=5), min_size=1, max_size=2), st.integers(1, 4))
def test_baselines(rows: list[list[int]], cp: int) -> None:
    layout = layout_from_rows(rows)
    check(at_home(head_tail_layout(layout, cp), MODEL))
    check(at_home(layout, MODEL), kernel="sdpa")


@pytest.mark.parametrize("state", ["resend", "keep"])
@pytest.mark.parametrize("lengths", [[1], [1] * 12, [128, 128], [7, 300, 65]])
def test_several_servers_share_one_query(lengths: list[int], state: str) -> None:
    """The hardest case on purpose, and not by luck: queries whose parts come from three servers or more."""
    layout = scattered_layout(11, np.array(lengths), ranks=4)
    plan = next(plan for seed in range(100)
                if most_parts(plan := scattered_plan(seed, layout, 4, MODEL)) >= min(3, max(lengths))
                and (plan.tasks.home != plan.tasks.server).any())
    assert covers_exactly_once(layout.lengths, plan.tasks)
    check(plan, state=state, kernel="sdpa")
    check(plan, state=state, kernel="dense", window=5)


def most_parts(plan: Plan) -> int:
    return max(int(build(plan, rank).queries.parts.max(initial=0)) for rank in range(plan.num_servers))


@pytest.mark.parametrize("placement", ["given", "balanced"])
def test_planned_work_really_moves(placement: str) -> None:
    layout = pack([1500, 100, 1, 340, 59], ranks=4, placement=placement)
    plan = balance(layout, MODEL, tolerance=0.01)
    assert plan.summary().bytes_total > 0
    check(plan, heads=(2, 1), kernel="sdpa")


def test_one_rank_alone() -> None:
    check(balance(layout_from_rows([[5, 1, 60]]), MODEL))


def test_ranks_without_tokens() -> None:
    check(misplaced_plan(layout_from_rows([[], [20, 3], [], [9]]), 4, MODEL))
    check(scattered_plan(3, layout_from_rows([[], [20, 3], [], [9]]), 6, MODEL))


def as_given(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return list(tensors)


def fused(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Views of one fused projection, [tokens, heads + 2 kv_heads, dim]."""
    q, k, v = tensors
    return list(torch.cat(tensors, dim=1).split([q.shape[1], k.shape[1], v.shape[1]], dim=1))


def heads_first(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """[heads, tokens, dim] in memory, as attention layers often hold them."""
    return [x.transpose(0, 1).contiguous().transpose(0, 1) for x in tensors]


def dim_strided(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Not even the last dimension is dense."""
    return [torch.stack([x, -x], dim=-1)[..., 0] for x in tensors]


@pytest.mark.parametrize("kernel", ["dense", "sdpa"])
@pytest.mark.parametrize("state", ["resend", "keep"])
@pytest.mark.parametrize("form", [as_given, fused, heads_first, dim_strided])
@pytest.mark.parametrize("make", [scattered_plan, None], ids=["scattered", "at_home"])
def test_inputs_need_not_be_contiguous(form: Callable[..., Any], state: str, kernel: str,
                                       make: Callable[..., Any] | None) -> None:
    layout = scattered_layout(11, np.array([40, 1, 33, 16]), ranks=3)
    plan = at_home(layout, MODEL) if make is None else make(10, layout, 3, MODEL)
    q, k, v, dout = random_qkv(0, layout.num_tokens)

    def body(attend: CoreAttention) -> tuple[torch.Tensor, ...]:
        index = row_index(layout, attend.transport.rank)
        leaves = [x[index].requires_grad_() for x in (q, k, v)]
        inputs = form(leaves)
        assert form is as_given or len(index) == 0 or not any(x.is_contiguous() for x in inputs)
        out = attend(*qkv_of(inputs), plan)
        (heads_first([out])[0] * dout[index]).sum().backward()
        return out.detach(), *map(gradient, leaves)

    rows = on_fake_ranks(plan, body, state=state, kernel=kernel)
    agree([from_rows(field, layout) for field in zip(*rows, strict=True)], dense_on_one(q, k, v, dout, layout.lengths))


@pytest.mark.parametrize("kernel", ["dense", "sdpa"])
def test_a_gradient_that_is_one_number_repeated(kernel: str) -> None:
    """out.sum() hands backward an expanded tensor without memory of its own."""
    layout = layout_from_rows([[20], [9, 4]])
    plan = scattered_plan(2, layout, 2, MODEL)
    q, k, v, dout = random_qkv(0, layout.num_tokens)

    def body(attend: CoreAttention) -> tuple[torch.Tensor, ...]:
        leaves = [x[row_index(layout, attend.transport.rank)].requires_grad_() for x in (q, k, v)]
        out = attend(*qkv_of(leaves), plan)
        out.sum().backward()
        return out.detach(), *map(gradient, leaves)

    rows = on_fake_ranks(plan, body, kernel=kernel)
    agree([from_rows(field, layout) for field in zip(*rows, strict=True)],
          dense_on_one(q, k, v, torch.ones_like(dout), layout.lengths))


def test_inputs_that_need_no_gradient_get_none() -> None:
    layout = layout_from_rows([[20], [9, 4]])
    plan = misplaced_plan(layout, 2, MODEL)
    q, k, v, dout = random_qkv(0, layout.num_tokens)
    expected = dense_on_one(q, k, v, dout, layout.lengths)

    def body(attend: CoreAttention) -> tuple[torch.Tensor, torch.Tensor]:
        index = row_index(layout, attend.transport.rank)
        row = [x[index] for x in (q, k, v)]
        with torch.no_grad():
            silent = attend(*qkv_of(row), plan)
        row[0].requires_grad_()
        out = attend(*qkv_of(row), plan)
        out.backward(dout[index])
        assert not silent.requires_grad and torch.equal(silent, out)  # one kernel, the same shapes and offsets
        assert row[1].grad is None and row[2].grad is None
        return out.detach(), gradient(row[0])

    rows = on_fake_ranks(plan, body)
    for got, want in zip(zip(*rows, strict=True), expected[:2], strict=True):
        torch.testing.assert_close(from_rows(got, layout), want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("heads", "dim"), [(1, 5), (3, 3), (2, 8)])
def test_half_precision_with_odd_sizes(dtype: torch.dtype, heads: int, dim: int) -> None:
    """Fields of 2 and of 4 bytes share the wire, whatever odd numbers of tokens, heads and dims they come in."""
    layout = layout_from_rows([[9], [7], [5, 3]])
    plan = scattered_plan(4, layout, 3, MODEL)
    tensors = random_qkv(0, layout.num_tokens, heads, heads, dim, dtype)
    for kernel in ("dense", "sdpa"):
        out, *gradients = attend_on_fake_ranks(*tensors, plan, kernel=kernel)
        check_attention([out, None, *gradients], *tensors, TaskRows.documents(layout.lengths))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_one_dropped_key_or_part_is_more_than_rounding(dtype: torch.dtype) -> None:
    """What the check above is for: a key that one query misses, a key whose gradient one query misses, a lost part."""
    layout = layout_from_rows([[9], [7], [5, 3]])
    tensors = random_qkv(0, layout.num_tokens, 2, 2, 8, dtype)
    whole, rows = (0, 9, 0, 9, 0), [(9, 16, 9, 16, 0), (16, 21, 16, 21, 0), (21, 24, 21, 24, 0)]
    kernel = kernel_named("dense")

    def attend(*first: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
        prepared = kernel.prepare(TaskRows(*np.array([*first, *rows]).T), tensors[0].device)
        out, lse = kernel.forward(*qkv_of(tensors[:3]), prepared)
        return out, lse, *kernel.backward(BackwardInputs(tensors[3], *tensors[:3], out, lse), prepared)

    right = attend(whole)
    check_attention(right, *tensors, TaskRows.documents(layout.lengths))
    missing = attend((0, 8, 0, 8, 0), (8, 9, 0, 3, 8), (8, 9, 4, 9, 4))  # query 8 sees all keys but number 3
    lost = attend((0, 5, 0, 5, 0), (5, 9, 0, 5, 5))              # queries from 5 on lack the keys from 5 on
    for wrong in (missing, lost):
        for i, name in enumerate(("out", "lse", "dq", "dk", "dv")):
            with pytest.raises(AssertionError, match=name):
                check_attention([x if i == j else y for j, (x, y) in enumerate(zip(wrong, right, strict=True))],
                                *tensors, TaskRows.documents(layout.lengths))


@pytest.mark.parametrize(("lengths", "heads", "dim"), [
    ([1500, 100, 1, 340, 59], (4, 2), 8), ([900, 1, 1, 30], (4, 2), 16), ([700, 130], (8, 1), 8)])
def test_rounding_in_float64_stays_below_what_these_tests_allow(lengths: list[int], heads: tuple[int, int],
                                                                dim: int) -> None:
    """The largest sizes that are held to 1e-10."""
    tensors = random_qkv(0, sum(lengths), *heads, dim)
    for expected in expected_attention(*tensors, TaskRows.documents(lengths)):
        assert float(expected.bound[expected.value.isfinite()].max()) < 1e-10, expected.name


def test_one_plan_with_changing_windows_scales_and_dtypes() -> None:
    layout = layout_from_rows([[30], [12, 5]])
    plan = scattered_plan(7, layout, 2, MODEL)
    tensors = random_qkv(0, layout.num_tokens)
    cases = [(None, None), (0.3, None), (None, 4), (None, None), (0.1, 9)]

    def body(attend: CoreAttention) -> tuple[torch.Tensor, ...]:
        index = row_index(layout, attend.transport.rank)
        outs = [attend(*qkv_of(x[index] for x in tensors[:3]), plan, scale=scale, window=window)
                for scale, window in cases]
        return *outs, attend(*qkv_of(x[index].float() for x in tensors[:3]), plan)

    *outs, single = (from_rows(field, layout) for field in zip(*on_fake_ranks(plan, body), strict=True))
    for out, (scale, window) in zip(outs, cases, strict=True):
        expected = dense_on_one(*tensors, layout.lengths, scale, window)[0]
        torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
    q, k, v, dout = (x.float() for x in tensors)
    check_attention([single, None, None, None, None], q, k, v, dout, TaskRows.documents(layout.lengths))
