"""Attention at fixed addresses follows one plan after another, exactly; what does not fit is refused on every rank.

Fake ranks are threads that write into each other's tensors; the launches are played by block_walk and hopper_walk.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from distca.kernels.hopper import kernel as hopper
from distca.kernels.hopper.kernel import HopperKernel
from distca.planning.balance import balance
from distca.planning.plan import Plan
from distca.planning.tasks import tasks_at_home
from distca.runtime.call import Shapes
from distca.runtime.steady import SteadyAttention
from distca.runtime.transport import LoopbackTransport, LoopbackWorld
from distca.spec import ModelShape
from distca.workload.layout import Layout
from distca.workload.packing import pack
from tests.support import (
    block_walk,
    dense_on_one,
    from_rows,
    gradient,
    hopper_walk,
    qkv_of,
    random_qkv,
    row_index,
    scattered_plan,
)

RANKS = 3
MODEL = ModelShape("tiny", 1, 32, 4, 2, 8, 64, 64)
SHAPES = Shapes(4, 2, 8, torch.float64, torch.device("cpu"))
LAYOUTS = [pack(lengths, ranks=RANKS) for lengths in ([150, 1, 29], [60, 60, 60], [7, 173])]


class FakeMemory:
    """A tensor a rank, and a barrier of threads."""

    def __init__(self, peers: list[torch.Tensor], barrier: threading.Barrier) -> None:
        self.peers, self._barrier = peers, barrier

    def barrier(self) -> None:
        self._barrier.wait(timeout=20.0)


class FakeNode:
    def __init__(self, transport: LoopbackTransport, peers: list[torch.Tensor], barrier: threading.Barrier) -> None:
        self.transport, self.rank, self.size = transport, transport.rank, transport.size
        self._peers, self._barrier = peers, barrier

    def gather(self, value: int, device: torch.device) -> list[int]:
        return self.transport.gather(value, device)

    def memory(self, num_bytes: int) -> FakeMemory:
        self._peers[self.rank] = torch.full((num_bytes,), 255, dtype=torch.uint8)  # float64 that is not a number
        self._barrier.wait(timeout=20.0)
        return FakeMemory(self._peers, self._barrier)


@pytest.fixture(autouse=True)
def _played(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "distca.runtime.exchange_triton", block_walk)
    monkeypatch.setattr(sys.modules["distca.runtime"], "exchange_triton", block_walk, raising=False)
    monkeypatch.setattr(hopper, "run_forward", hopper_walk.launch_forward)
    monkeypatch.setattr(hopper, "run_backward", hopper_walk.launch_backward)
    monkeypatch.setattr(HopperKernel, "supports", lambda *_: None)


def on_ranks(body: Callable[[FakeNode], Any], ranks: int = RANKS) -> list[Any]:
    peers, barrier = [torch.empty(0)] * ranks, threading.Barrier(ranks)
    return LoopbackWorld(ranks, timeout_seconds=20.0).run(lambda transport: body(FakeNode(transport, peers, barrier)))


def at_home(layout: Layout) -> Plan:
    return Plan(layout, tasks_at_home(layout), np.ones(layout.num_ranks), 0.0, MODEL)


def attended(steady: SteadyAttention, plan: Plan, seed: int) -> tuple[torch.Tensor, ...]:
    q, k, v, dout = random_qkv(seed, plan.layout.num_tokens, 4, 2, 8, torch.float64)
    index = row_index(plan.layout, steady.node.rank)
    row = qkv_of(x[index].requires_grad_() for x in (q, k, v))
    out = steady(*row)
    out.backward(dout[index])
    return out.detach(), *map(gradient, row)


def assert_exact(rows: list[tuple[torch.Tensor, ...]], plan: Plan, seed: int) -> None:
    expected = dense_on_one(*random_qkv(seed, plan.layout.num_tokens, 4, 2, 8, torch.float64), plan.layout.lengths)
    for field, whole in zip(zip(*rows, strict=True), expected, strict=True):
        torch.testing.assert_close(from_rows(field, plan.layout), whole, rtol=1e-10, atol=1e-12)


def test_one_plan_after_another_in_the_same_place() -> None:
    """Scattered, balanced, at home, and gradients by another plan than the outputs."""
    scattered = [scattered_plan(seed, layout, RANKS, MODEL) for seed, layout in enumerate(LAYOUTS)]
    balanced = [balance(layout, MODEL, tolerance=0.05) for layout in LAYOUTS]
    steps: list[tuple[Plan, Plan | None]] = [
        (scattered[0], None), (balanced[1], None), (at_home(LAYOUTS[1]), None), (scattered[2], balanced[2]),
        (balanced[2], scattered[2]), (scattered[1], None), (scattered[0], None)]
    assert sum(bool((plan.tasks.home != plan.tasks.server).any()) for plan, _ in steps) >= 4

    def body(node: FakeNode) -> list[tuple[torch.Tensor, ...]]:
        steady = SteadyAttention(node, *steps[0][:1], SHAPES, room=4.0)
        places = [x.data_ptr() for x in (*steady._buffers, *steady._memory.peers)]
        found = []
        for seed, (plan, backward) in enumerate(steps):
            steady.refill(plan, backward)
            found.append(attended(steady, plan, seed))
        assert [x.data_ptr() for x in (*steady._buffers, *steady._memory.peers)] == places
        return found

    for seed, (rows, (plan, _)) in enumerate(zip(zip(*on_ranks(body), strict=True), steps, strict=True)):
        assert_exact(list(rows), plan, seed)


def test_one_rank_needs_nobody() -> None:
    plan = at_home(pack([40, 3], ranks=1))
    rows = on_ranks(lambda node: attended(SteadyAttention(node, plan, SHAPES), plan, 5), ranks=1)
    assert_exact(rows, plan, 5)


def test_sinks() -> None:
    plan, sinks = scattered_plan(3, LAYOUTS[0], RANKS, MODEL), torch.tensor([0.0, -2.0, 3.0, 0.5], dtype=torch.float64)
    tensors = random_qkv(7, plan.layout.num_tokens)

    def body(node: FakeNode) -> tuple[torch.Tensor, ...]:
        index = row_index(plan.layout, node.rank)
        row, own = qkv_of(x[index].requires_grad_() for x in tensors[:3]), sinks.clone().requires_grad_()
        out = SteadyAttention(node, plan, SHAPES)(*row, own)
        out.backward(tensors[3][index])
        return out.detach(), *map(gradient, row), gradient(own)

    *fields, dsinks = zip(*on_ranks(body), strict=True)
    expected = dense_on_one(*tensors, plan.layout.lengths, sinks=sinks)
    actual = [*(from_rows(field, plan.layout) for field in fields), torch.stack(dsinks).sum(dim=0)]
    for got, want in zip(actual, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


def refusals(first: Plan, then: Callable[[int], Plan], **options: Any) -> list[str]:
    def body(node: FakeNode) -> str:
        steady = SteadyAttention(node, first, SHAPES, **options)
        with pytest.raises(ValueError, match="plan") as caught:
            steady.refill(then(node.rank))
        steady.refill(first)                                     # as good as before
        assert_exact_alone(steady, first)
        return str(caught.value)

    return on_ranks(body)


def assert_exact_alone(steady: SteadyAttention, plan: Plan) -> None:
    out, *_ = attended(steady, plan, 1)
    expected = dense_on_one(*random_qkv(1, plan.layout.num_tokens, 4, 2, 8, torch.float64), plan.layout.lengths)[0]
    torch.testing.assert_close(out, expected[row_index(plan.layout, steady.node.rank)], rtol=1e-10, atol=1e-12)


def test_plans_that_need_more_room_are_refused_by_every_rank() -> None:
    layout = pack([1_800], ranks=RANKS)
    tasks = tasks_at_home(layout)
    crowded = Plan(layout, replace(tasks, server=np.zeros_like(tasks.server)), np.ones(RANKS), 0.0, MODEL)
    said = refusals(at_home(layout), lambda rank: crowded, room=1.0)
    assert "the plan needs 1800 queries of tasks and there is room for 640; begin with the largest" in said[0]
    assert all("room" in one or "ranks [0" in one for one in said)


def test_ranks_that_hold_different_plans_are_told() -> None:
    plans = [scattered_plan(seed, LAYOUTS[0], RANKS, MODEL) for seed in (1, 2)]
    said = refusals(plans[0], lambda rank: plans[1 if rank == 2 else 0], room=6.0)
    assert "rank 0 has another plan than ranks [2]" in said[0] and "ranks [0, 1]" in said[2]


def test_rows_of_other_lengths_are_refused() -> None:
    other = at_home(pack([300], ranks=RANKS))
    said = refusals(at_home(LAYOUTS[0]), lambda rank: other, room=4.0)
    assert "the plan puts (100, 100) queries and keys on rank 0, where there were (60, 60)" in said[0]


def test_a_machine_without_hopper_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HopperKernel, "supports", lambda *_: "device is cpu")
    with pytest.raises(ValueError, match="needs kernel 'hopper', which cannot run here: device is cpu; use Core"):
        on_ranks(lambda node: SteadyAttention(node, at_home(LAYOUTS[0]), SHAPES))
