"""Softcap and sinks are the formula's, gradients included, wherever the parts of a query's keys are computed."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, Never

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distca.kernels import dense_attention
from distca.kernels.interface import gradient_of_sinks, with_sinks
from distca.runtime.attention import CoreAttention
from distca.runtime.transport import LoopbackTransport, LoopbackWorld
from distca.spec import ModelShape
from distca.workload.layout import layout_from_rows
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
from tests.support.plans import LAYOUT_KINDS, misplaced_plan, random_layout, scattered_plan

MODEL = ModelShape("tiny", 1, 32, 4, 2, 8, 64, 64)
NAMES = ("out", "dq", "dk", "dv", "dsinks")


def sinks_of(seed: int, heads: int = 4) -> torch.Tensor:
    return torch.randn(heads, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 2


def agree(actual: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> None:
    for name, got, want in zip(NAMES[:len(expected)], actual, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10, msg=partial("{}: {}".format, name))


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 100_000), st.integers(1, 3), st.integers(0, 2), st.sampled_from(LAYOUT_KINDS),
       st.sampled_from([None, 0.5, 20.0]), st.booleans(), st.sampled_from([None, 1, 7]),
       st.sampled_from([("dense", "resend"), ("sdpa", "resend"), ("sdpa", "keep")]))
def test_parts_of_queries_and_keys_on_any_servers(
    seed: int, ranks: int, dedicated: int, kind: Any, softcap: float | None, has_sinks: bool, window: int | None,
    how: tuple[str, str],
) -> None:
    layout = random_layout(seed, kind, ranks, 30)
    plan = scattered_plan(seed, layout, ranks + dedicated, MODEL)
    tensors, sinks = random_qkv(seed, layout.num_tokens), sinks_of(seed) if has_sinks else None
    kernel, state = how
    agree(attend_on_fake_ranks(*tensors, plan, window=window, softcap=softcap, sinks=sinks, kernel=kernel,
                               state="resend" if dedicated else state),
          dense_on_one(*tensors, layout.lengths, None, window, softcap, sinks))


def test_two_interleaved_calls() -> None:
    """In three nodes each, as nano-batches run; only one of them has sinks."""
    plan = misplaced_plan(layout_from_rows([[10, 3], [9]]), 3, MODEL)  # the third serves alone
    tensors, sinks = random_qkv(0, 22), sinks_of(3)

    def body(attend: CoreAttention) -> tuple[torch.Tensor, ...]:
        index = row_index(plan.layout, attend.transport.rank)
        rows = [qkv_of(x[index].requires_grad_() for x in tensors[:3]) for _ in range(2)]
        own = sinks.clone().requires_grad_()
        calls = [attend.start(*rows[0], plan, softcap=2.0, sinks=own), attend.start(*rows[1], plan)]
        for call in calls:
            attend.serve(call)
        outs = [attend.finish(call) for call in calls]
        torch.autograd.backward(outs, [tensors[3][index]] * 2)
        return (outs[0].detach(), *map(gradient, rows[0]), outs[1].detach(), *map(gradient, rows[1]), gradient(own))

    *fields, dsinks = zip(*on_fake_ranks(plan, body), strict=True)
    whole = [from_rows(field, plan.layout) for field in fields]
    agree((*whole[:4], torch.stack(dsinks).sum(dim=0)), dense_on_one(*tensors, plan.layout.lengths, softcap=2.0,
                                                                     sinks=sinks))
    agree(tuple(whole[4:]), dense_on_one(*tensors, plan.layout.lengths))


def test_the_oracle_of_one_token_is_the_logistic_function() -> None:
    """One key against one sink: its probability is 1 / (1 + exp(sink - score)), of the capped score."""
    q, k, v, dout = random_qkv(1, 1, heads=2, kv_heads=1)
    sinks = sinks_of(1, 2).requires_grad_()
    score = (q[0] @ k[0, 0]) / math.sqrt(8)                      # [heads]
    probability = 1 / (1 + (sinks.detach() - 3 * torch.tanh(score / 3)).exp())
    out = dense_attention(q, k, v, [1], softcap=3.0, sinks=sinks)
    torch.testing.assert_close(out[0], probability[:, None] * v[0], rtol=1e-12, atol=1e-12)
    (dsinks,) = torch.autograd.grad(out, sinks, dout)
    torch.testing.assert_close(dsinks, -probability * (1 - probability) * (dout[0] * v[0]).sum(-1), rtol=1e-12,
                               atol=1e-12)


def test_queries_without_keys_give_nothing_and_pull_at_no_sink() -> None:
    out, lse = torch.zeros(3, 2, 8), torch.full((3, 2), -torch.inf)
    out[2], lse[2] = 1.0, 0.5
    dout = torch.ones_like(out)
    for sinks in (torch.tensor([0.3, -1.0]), torch.full((2,), -torch.inf)):  # the second takes no part
        merged, merged_lse = with_sinks(out, lse, sinks)
        assert not merged[:2].any() and torch.equal(merged_lse[:2], sinks.expand(2, 2))  # x + log1p(exp(-inf)) is x
        share = torch.sigmoid(sinks - 0.5)
        torch.testing.assert_close(merged[2], (1 - share)[:, None].expand(2, 8))
        torch.testing.assert_close(gradient_of_sinks(dout, merged, merged_lse, sinks), -share * (1 - share) * 8)


@pytest.mark.parametrize(("dtype", "sinks_dtype"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)])
def test_sinks_of_another_dtype_keep_it(dtype: torch.dtype, sinks_dtype: torch.dtype) -> None:
    plan = misplaced_plan(layout_from_rows([[20], [12]]), 2, MODEL)
    tensors, sinks = random_qkv(0, 32, dtype=dtype), sinks_of(0).to(sinks_dtype)
    out, *_, dsinks = attend_on_fake_ranks(*tensors, plan, sinks=sinks)
    assert (out.dtype, dsinks.dtype) == (dtype, sinks_dtype) and dsinks.isfinite().all()
    q, k, v, dout = (x.double() for x in tensors)
    expected, *_ = dense_on_one(q, k, v, dout, plan.layout.lengths, sinks=sinks.double())
    # probabilities, out and the out with sinks are rounded, each by half an eps of at most the largest value
    torch.testing.assert_close(out.double(), expected, rtol=0.0, atol=4 * torch.finfo(dtype).eps * float(v.abs().max()))


class Refusing(LoopbackTransport):
    """A rank whose bad input must be refused before the other one is needed."""

    def exchange(self, *args: Any) -> Never:
        raise AssertionError("something was sent")

    def gather(self, *args: Any) -> Never:
        raise AssertionError("something was sent")


@pytest.mark.parametrize(("options", "message"), [
    ({"sinks": torch.zeros(2)}, r"sinks has shape \(2,\) and dtype torch.float32; give one floating-point number for "
                                "each of the 4 query heads"),
    ({"sinks": torch.zeros(4, dtype=torch.int64)}, "dtype torch.int64; give one floating-point number"),
    ({"sinks": torch.zeros(4, device="meta")}, "sinks is on meta and q on cpu; move them to one device"),
    ({"softcap": 0.0}, r"softcap=0.0; give a positive number, or None"),
    ({"softcap": -3.0}, r"softcap=-3.0; give a positive number"),
])
def test_what_does_not_fit_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    attend = CoreAttention(transport=Refusing(LoopbackWorld(2), 0))
    plan = misplaced_plan(layout_from_rows([[10], [6]]), 2, MODEL)
    with pytest.raises(ValueError, match=message):
        attend(torch.zeros(10, 4, 8), torch.zeros(10, 2, 8), torch.zeros(10, 2, 8), plan, **options)
