"""Packing in one launch does what torch's copies do: sums to the bit, merges to rounding, attention to the formula.

Needs a GPU, or triton's interpreter: TRITON_INTERPRET=1.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import pytest
import torch

from distca.dispatch import build
from distca.planning.balance import balance
from distca.planning.plan import Plan
from distca.runtime import prepared as prepared_module
from distca.runtime.call import BackwardCall, ForwardCall
from distca.runtime.exchange import Combine, Dispatch
from distca.runtime.prepared import PlanCache, Shapes, stamp_of
from distca.spec import ModelShape
from distca.workload.layout import layout_from_rows
from tests.support.attention import dense_on_one, from_rows, random_qkv, row_index
from tests.support.plans import LAYOUT_KINDS, misplaced_plan, random_layout, scattered_layout, scattered_plan

pytest.importorskip("triton", reason="triton is not installed; pip install triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU, or TRITON_INTERPRET=1", allow_module_level=True)

from distca.runtime.exchange_triton import with_triton  # noqa: E402

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
MODEL = ModelShape("tiny", 1, 32, 4, 2, 8, 64, 64)
SEEDS = range(6)
Shape = tuple[int, int, int, torch.dtype]                        # heads, KV heads, dim, dtype
Pair = tuple[torch.Tensor, ...]                                  # out and log-sum-exp
Posted = dict[tuple[int, int], tuple[torch.Tensor, ...]]         # what (exchange, rank) sent to each rank
SHAPES: list[Shape] = [
    (4, 2, 8, torch.bfloat16), (4, 4, 8, torch.float64), (3, 1, 5, torch.float16), (2, 1, 16, torch.bfloat16),
    (4, 1, 12, torch.float32), (1, 1, 1, torch.bfloat16)]  # units of 16, 16, 2, 8, 16 and 2 bytes
SMALL = {"copy_bytes": 256, "part_bytes": 128}                   # so that runs are cut into many blocks


def some_plan(seed: int) -> Plan:
    """Any layout and any pool, planned well or senselessly."""
    rng = np.random.default_rng(seed)
    ranks = int(rng.integers(1, 5))
    layout = random_layout(seed, LAYOUT_KINDS[seed % len(LAYOUT_KINDS)], ranks, int(rng.integers(1, 31)))
    if seed % 3 == 0:
        return balance(layout, MODEL, tolerance=0.0)
    return scattered_plan(seed, layout, ranks + int(rng.integers(0, 3)), MODEL)


def shared_by_three() -> Plan:
    """A plan in which some queries have three parts."""
    layout = scattered_layout(1, np.array([7, 90, 33]), ranks=4)
    return next(plan for seed in range(100)
                if max(build(plan := scattered_plan(seed, layout, 4, MODEL), rank).queries.parts.max(initial=0)
                       for rank in range(4)) >= 3)


def random_tensor(generator: torch.Generator, tokens: int, trailing: tuple[int, ...],
                  dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(tokens, *trailing, generator=generator, dtype=torch.float64).to(dtype).to(DEVICE)


def exchanged(wires: list[torch.Tensor], exchanges: list[Any]) -> list[torch.Tensor]:
    """What arrives at every rank, when each sends its wire."""
    sends = [wire.split(exchange.leaving.splits) for wire, exchange in zip(wires, exchanges, strict=True)]
    for rank, exchange in enumerate(exchanges):
        assert [len(sent[rank]) for sent in sends] == exchange.arriving.splits
    return [torch.cat([sent[rank] for sent in sends]) for rank in range(len(exchanges))]


def same(got: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> None:
    """Bit for bit: of copies, and of sums whose terms are added one by one in the order of the tables either way."""
    assert len(got) == len(want)
    for one, other in zip(got, want, strict=True):
        assert one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("options", [{}, SMALL], ids=["large", "small"])
@pytest.mark.parametrize("shape", SHAPES)
def test_servers_get_what_torch_would_give_them(shape: Shape, options: dict[str, int], seed: int) -> None:
    plan, shapes = some_plan(seed), Shapes(*shape, DEVICE)
    generator = torch.Generator().manual_seed(seed)
    tables = [build(plan, rank) for rank in range(plan.num_servers)]
    plain = [Dispatch.of(table, shapes.fields, stamp_of(-5, DEVICE)) for table in tables]
    fast = [with_triton(exchange, DEVICE, **options) for exchange in plain]
    rows = [tuple(random_tensor(generator, table.row_tokens, size, dtype) for _, size, dtype in shapes.tensors)
            for table in tables]
    arrived = exchanged([exchange.pack(exchange.ready(row)) for exchange, row in zip(fast, rows, strict=True)], fast)
    for row, wire, by_torch, exchange in zip(rows, arrived, plain, fast, strict=True):
        assert exchange.stamp is not None and exchange.mismatched(wire) == []
        same(exchange.unpack(wire, exchange.ready(row)), by_torch.unpack(wire, row))
    in_torch = exchanged([exchange.pack(row) for exchange, row in zip(plain, rows, strict=True)], plain)
    for row, wire, other, exchange in zip(rows, arrived, in_torch, plain, strict=True):
        same(exchange.unpack(wire, row), exchange.unpack(other, row))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("options", [{}, SMALL], ids=["large", "small"])
@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_are_summed_as_torch_sums_them(shape: Shape, options: dict[str, int], seed: int) -> None:
    plan, (heads, kv_heads, dim, dtype) = some_plan(seed), shape
    generator = torch.Generator().manual_seed(seed)
    tables = [build(plan, rank) for rank in range(plan.num_servers)]
    plain = [Combine.of(table, Shapes(*shape, DEVICE).fields[:3]) for table in tables]
    fast = [with_triton(exchange, DEVICE, **options) for exchange in plain]
    results = [(random_tensor(generator, table.queries.buffer_tokens, (heads, dim), dtype),
                *(random_tensor(generator, table.keys.buffer_tokens, (kv_heads, dim), dtype) for _ in range(2)))
               for table in tables]
    arrived = exchanged([exchange.pack(buffers) for exchange, buffers in zip(fast, results, strict=True)], fast)
    for buffers, wire, by_torch, exchange in zip(results, arrived, plain, fast, strict=True):
        got, want = exchange.unpack(wire, buffers), by_torch.unpack(wire, buffers)
        if INTERPRETED and dtype == torch.bfloat16:              # the interpreter truncates to bf16, GPUs round
            torch.testing.assert_close(got, want, rtol=torch.finfo(dtype).eps, atol=0.0)
        else:
            same(got, want)


def merged_both_ways(plan: Plan, shape: Shape, options: dict[str, int], seed: int,
                     unseen: float) -> list[tuple[Pair, Pair]]:
    """(out, lse) of every rank by torch and by one launch; a share of the parts saw no key."""
    heads, _, dim, dtype = shape
    generator = torch.Generator().manual_seed(seed)
    shapes = Shapes(*shape, DEVICE)
    tables = [build(plan, rank) for rank in range(plan.num_servers)]
    plain = [Combine.of(table, shapes.fields[3:], merged_heads=heads) for table in tables]
    fast = [with_triton(exchange, DEVICE, **options) for exchange in plain]
    results = []
    for table in tables:
        out = random_tensor(generator, table.queries.buffer_tokens, (heads, dim), dtype)
        lse = 20 * random_tensor(generator, table.queries.buffer_tokens, (heads,), shapes.tensors[4][2])
        blind = (torch.rand(lse.shape, generator=generator) < unseen).to(DEVICE)
        results.append((out.masked_fill(blind[..., None], 0.0), lse.masked_fill(blind, -torch.inf)))
    arrived = exchanged([exchange.pack(buffers) for exchange, buffers in zip(fast, results, strict=True)], fast)
    return [(exchange.unpack(wire, buffers), by_torch.unpack(wire, buffers))
            for buffers, wire, by_torch, exchange in zip(results, arrived, plain, fast, strict=True)]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("options", [{}, SMALL], ids=["large", "small"])
@pytest.mark.parametrize("shape", SHAPES)
def test_parts_of_a_query_merge_as_in_torch(shape: Shape, options: dict[str, int], seed: int) -> None:
    for got, want in merged_both_ways(some_plan(seed), shape, options, seed, unseen=0.5 * (seed % 2)):
        close_attention(got, want)


def close_attention(got: Pair, want: Pair, parts: int = 5) -> None:
    """Of at most `parts` parts. Each merge rounds log-sum-exps as large as L, by eps L, and weights by exp of that.

    A part's share is then off by 4 eps (L + 2) per merge at most, in torch's chain of merges and in the one at once;
    shares add up to 1, so outs differ by so much of the largest, and by how each is rounded to its dtype.
    """
    (out, lse), (wanted, wanted_lse) = got, want
    assert out.dtype == wanted.dtype and lse.dtype == wanted_lse.dtype
    largest = float(wanted_lse[wanted_lse.isfinite()].abs().max()) if wanted_lse.isfinite().any() else 0.0
    off = 4 * (parts + 1) * torch.finfo(lse.dtype).eps * (largest + 2)
    rounding = 2 * torch.finfo(out.dtype).eps if out.dtype != lse.dtype else 0.0
    torch.testing.assert_close(lse, wanted_lse, rtol=0.0, atol=off)
    torch.testing.assert_close(out, wanted, rtol=rounding, atol=off * float(wanted.abs().max()) if out.numel() else 0.0)


@pytest.mark.parametrize("shape", SHAPES)
def test_three_parts_merge_and_single_ones_stay_as_they_are(shape: Shape) -> None:
    plan = shared_by_three()
    single = combined = 0
    for rank, (got, want) in enumerate(merged_both_ways(plan, shape, SMALL, 0, 0.2)):
        close_attention(got, want)
        alone = torch.from_numpy(build(plan, rank).queries.parts == 1).to(DEVICE)
        same([x[alone] for x in got], [x[alone] for x in want])
        single, combined = single + int(alone.sum()), combined + int((~alone).sum())
    assert single and combined


class Stepping:
    """Ranks that take turns: whoever waits finds that all others have sent."""

    def __init__(self, rank: int, size: int, posted: Posted) -> None:
        self.rank, self.size, self.posted, self.number = rank, size, posted, 0

    def exchange(self, send: torch.Tensor, send_splits: list[int], recv_splits: list[int]) -> Stepping:
        self.posted[self.number, self.rank] = send.split(send_splits)
        self.awaited, self.number = self.number, self.number + 1
        return self

    def gather(self, value: int, device: torch.device) -> list[int]:
        return [value]

    def wait(self) -> torch.Tensor:
        ranks = sorted(rank for number, rank in self.posted if number == self.awaited)
        return torch.cat([self.posted[self.awaited, rank][self.rank] for rank in ranks])


def strided(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([x, -x], dim=-1)[..., 0]


def misaligned(x: torch.Tensor) -> torch.Tensor:
    flat = torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)[1:]
    return flat.view(x.shape).copy_(x)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("form", [torch.Tensor.contiguous, strided, misaligned])
@pytest.mark.parametrize("make", [
    shared_by_three,
    lambda: misplaced_plan(layout_from_rows([[], [20, 3], [9]]), 3, MODEL),
    lambda: balance(layout_from_rows([[60], [20, 3, 7]]), MODEL, tolerance=0.0),
    lambda: balance(layout_from_rows([[10], [10]]), MODEL),
], ids=["shared", "misplaced", "balanced", "at_home"])
def test_attention_is_exact(make: Callable[[], Plan], form: Callable[[torch.Tensor], torch.Tensor], keep: bool,
                            monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared_module, "packed_on", lambda device, exchange: with_triton(exchange, device))
    plan = make()
    q, k, v, dout = (x.to(DEVICE) for x in random_qkv(0, plan.layout.num_tokens))
    posted: Posted = {}
    shapes = Shapes(4, 2, 8, torch.float64, DEVICE)
    ranks = range(plan.num_servers)
    plans = [PlanCache(cast(Any, Stepping(rank, plan.num_servers, posted)), "dense") for rank in ranks]
    calls = [ForwardCall(one, plan, shapes, keep=keep) for one in plans]
    index = [row_index(plan.layout, rank).to(DEVICE) for rank in ranks]
    rows = [[form(x[here]) for x in (q, k, v)] for here in index]
    for call, row in zip(calls, rows, strict=True):
        call.dispatch(*row)
    kept = [call.serve() for call in calls]
    results = [call.combine() for call in calls]
    back = [BackwardCall(one, plan, shapes, keep=keep) for one in plans]
    for turn, row, (out, lse), here in zip(back, rows, results, index, strict=True):
        turn.dispatch(*row, out, form(dout[here]), lse)
    for turn, held in zip(back, kept, strict=True):
        turn.serve(*(held if keep else ()))
    gradients = [turn.combine() for turn in back]
    actual = [(out, *grads) for (out, _), grads in zip(results, gradients, strict=True)]
    expected = dense_on_one(q, k, v, dout, plan.layout.lengths)
    for got, want in zip(zip(*actual, strict=True), expected, strict=True):
        torch.testing.assert_close(from_rows(got, plan.layout), want, rtol=1e-10, atol=1e-10)


def test_what_is_all_at_home_is_not_copied() -> None:
    plan = balance(layout_from_rows([[10], [10]]), MODEL)
    exchange = with_triton(Combine.of(build(plan, 0), [("q", 64), ("k", 32)]), DEVICE)
    buffers = torch.ones(10, 4, 8, dtype=torch.bfloat16, device=DEVICE), torch.ones(10, 2, 8, device=DEVICE)
    assert all(row is buffer for row, buffer in zip(exchange.unpack(None, buffers), buffers, strict=True))
