"""Dedicated servers: any number of plans and calls, in any order, until the run ends."""

from __future__ import annotations

import time
import weakref
from typing import Any

import numpy as np
import pytest
import torch

from distca.kernels import TaskRows
from distca.planning.balance import balance
from distca.planning.plan import Plan
from distca.runtime.attention import CoreAttention
from distca.runtime.pool import runner
from distca.runtime.pool.transport import PoolTransport
from distca.runtime.prepared import PLANS_KEPT
from distca.runtime.transport import LoopbackWorld
from distca.runtime.transport.loopback import LoopbackTransport
from distca.spec import ModelShape
from distca.workload.layout import layout_from_rows
from tests.support.accuracy import check_attention
from tests.support.attention import dense_on_one, from_rows, gradient, on_fake_ranks, qkv_of, random_qkv, row_index
from tests.support.plans import misplaced_plan, scattered_layout, scattered_plan
from tests.support.pools import server_for, server_pools, start

MODEL = ModelShape("tiny", 1, 32, 4, 2, 8, 64, 64)
NUM_PLANS = PLANS_KEPT + 4


def pool_plans(count: int = NUM_PLANS) -> list[Plan]:
    """Distinct plans of two trainers and one server that does all the work."""
    return [misplaced_plan(layout_from_rows([[10 + n], [6]]), 3, MODEL, shift=2 if n % 2 else 1) for n in range(count)]


def leaves_of(plan: Plan, rank: int) -> list[torch.Tensor]:
    return [x[row_index(plan.layout, rank)].requires_grad_() for x in random_qkv(0, plan.layout.num_tokens)[:3]]


def dout_of(plan: Plan, rank: int) -> torch.Tensor:
    return random_qkv(0, plan.layout.num_tokens)[3][row_index(plan.layout, rank)]


def check(plan: Plan, rows: list[tuple[torch.Tensor, ...]]) -> None:
    expected = dense_on_one(*random_qkv(0, plan.layout.num_tokens), plan.layout.lengths)
    for field, want in zip(zip(*rows, strict=True), expected, strict=True):
        torch.testing.assert_close(from_rows(field, plan.layout), want, rtol=1e-10, atol=1e-10)


def test_more_plans_in_flight_than_are_remembered() -> None:
    """As in a deep pipeline: all forwards first, then all backwards."""
    plans = pool_plans()

    def body(attend: CoreAttention) -> list[tuple[torch.Tensor, ...]]:
        rank = attend.transport.rank
        leaves = [leaves_of(plan, rank) for plan in plans]
        outs = [attend(*qkv_of(row), plan) for row, plan in zip(leaves, plans, strict=True)]
        torch.autograd.backward(outs, [dout_of(plan, rank) for plan in plans])
        return [(out.detach(), *map(gradient, row)) for out, row in zip(outs, leaves, strict=True)]

    for plan, *rows in zip(plans, *on_fake_ranks(plans[0], body), strict=True):
        check(plan, rows)


def test_one_plan_used_all_along_while_others_pass() -> None:
    plans = pool_plans()

    def body(attend: CoreAttention) -> list[tuple[torch.Tensor, ...]]:
        results = []
        for plan in (plan for other in plans[1:] for plan in (plans[0], other)):
            leaves = leaves_of(plan, attend.transport.rank)
            out = attend(*qkv_of(leaves), plan)
            out.backward(dout_of(plan, attend.transport.rank))
            results.append((out.detach(), *map(gradient, leaves)))
        return results[-2:]

    rows = on_fake_ranks(plans[0], body)
    check(plans[0], [row[0] for row in rows])
    check(plans[-1], [row[1] for row in rows])


def test_servers_count_calls_and_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward roles count; freed memory goes back every so many of both kinds."""
    trimmed: list[bool] = []
    monkeypatch.setattr(runner, "TRIM_CALLS", 2)
    monkeypatch.setattr(runner, "return_freed_memory", lambda: trimmed.append(True))
    plan = misplaced_plan(layout_from_rows([[10], [6]]), 3, MODEL, shift=2)

    def body(transport: LoopbackTransport) -> None:
        attend = CoreAttention(transport=PoolTransport(transport, pools[transport.rank]))
        for backward in (True, False, True, True):
            out = attend(*qkv_of(leaves_of(plan, transport.rank)), plan)
            if backward:
                out.sum().backward()

    with server_pools(2, 1, servers=0) as pools:
        server = server_for(pools)
        thread = start(server)
        assert pools[0].wait_for_servers(1, 20) and pools[1].wait_for_servers(1, 20)
        LoopbackWorld(2, timeout_seconds=20).run(body)
    thread.join(20)
    assert not thread.is_alive() and server.served == 4
    assert len(trimmed) == 3                                     # of 4 forward and 3 backward roles


def test_a_pool_that_serves_everything_leaves_trainers_without_kernels() -> None:
    layout = scattered_layout(0, np.array([300, 20, 1]), 2)
    plan = balance(layout, MODEL, speed=[0, 0, 1, 1])
    assert (plan.tasks.server >= 2).all()

    def body(attend: CoreAttention) -> tuple[torch.Tensor, ...]:
        leaves = leaves_of(plan, attend.transport.rank)
        out = attend(*qkv_of(leaves), plan)
        out.backward(dout_of(plan, attend.transport.rank))
        return out.detach(), *map(gradient, leaves)

    check(plan, on_fake_ranks(plan, body))


def test_windows_scales_and_dtypes_are_announced() -> None:
    plan = scattered_plan(1, layout_from_rows([[30], [16]]), 3, MODEL)

    def body(attend: CoreAttention) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        row = [x.detach() for x in leaves_of(plan, attend.transport.rank)]
        return (attend(*qkv_of(row), plan, window=5, scale=0.3), attend(*qkv_of(row), plan),
                attend(*qkv_of(x.float() for x in row), plan))

    windowed, plain, single = zip(*on_fake_ranks(plan, body), strict=True)
    tensors = random_qkv(0, plan.layout.num_tokens)
    for rows, expected in (
        (windowed, dense_on_one(*tensors, plan.layout.lengths, 0.3, 5)[0]),
        (plain, dense_on_one(*tensors, plan.layout.lengths)[0]),
    ):
        torch.testing.assert_close(from_rows(rows, plan.layout), expected, rtol=1e-10, atol=1e-10)
    q, k, v, dout = (x.float() for x in tensors)
    check_attention([from_rows(single, plan.layout), None, None, None, None], q, k, v, dout,
                    TaskRows.documents(plan.layout.lengths))


def test_servers_hold_nothing_between_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither inputs nor results nor calls, and homes no inputs that everybody is done with."""
    plan = misplaced_plan(layout_from_rows([[10], [6]]), 3, MODEL, shift=2)
    alive: list[weakref.ref[Any]] = []
    inner = runner._RoleCarrier.__init__

    def noted(carrier: Any, *args: Any) -> None:
        inner(carrier, *args)
        alive.extend([weakref.ref(carrier), *map(weakref.ref, carrier.inputs)])

    monkeypatch.setattr(runner._RoleCarrier, "__init__", noted)

    def body(transport: LoopbackTransport) -> None:
        attend = CoreAttention(transport=PoolTransport(transport, pools[transport.rank]))
        attend(*qkv_of(leaves_of(plan, transport.rank)), plan).sum().backward()

    with server_pools(2, 1) as pools:
        for _ in range(2):
            LoopbackWorld(2, timeout_seconds=20).run(body)
        assert len(alive) == 2 * 2 * 2                           # a carrier, and the inputs of the first home
        deadline = time.monotonic() + 20
        while any(ref() is not None for ref in alive) or any(pool.calls.calls for pool in pools):
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_keeping_is_refused_where_servers_keep_nothing() -> None:
    plan = misplaced_plan(layout_from_rows([[10], [6]]), 3, MODEL)
    with pytest.raises(ValueError, match=r"state is 'keep' but the plan has dedicated servers.*use 'resend'"):
        on_fake_ranks(plan, lambda attend: attend(*qkv_of(leaves_of(plan, attend.transport.rank)), plan), state="keep")
