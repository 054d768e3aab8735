"""Two nano-batches in flight: any order of steps is exact, and backward mirrors it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from distca.planning.plan import Plan
from distca.runtime.attention import CoreAttention
from distca.runtime.transport import LoopbackWorld
from distca.runtime.transport.loopback import LoopbackTransport
from distca.spec import ModelShape
from tests.support.attention import dense_on_one, from_rows, gradient, on_fake_ranks, qkv_of, random_qkv, row_index
from tests.support.plans import scattered_layout, scattered_plan

if TYPE_CHECKING:
    from tests.runtime.conftest import RecordingTransport

Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]  # q, k, v, dout
MODEL = ModelShape("tiny", 1, 32, 4, 2, 8, 64, 64)
STEPS = ("start", "serve", "finish")
RANKS = 3


def orders() -> Iterator[list[tuple[str, str]]]:
    """Every order of ping's and pong's steps in which each keeps its own order."""
    for mine in combinations(range(6), 3):
        ping, pong = iter(STEPS), iter(STEPS)
        yield [("ping", next(ping)) if turn in mine else ("pong", next(pong)) for turn in range(6)]


def exchanges_of(order: list[tuple[str, str]]) -> list[tuple[str, int]]:
    """What the transport sees: first steps send, last ones wait, serving does both; backward is the mirror image."""
    log: list[tuple[str, int]] = []
    under_way: dict[str, int] = {}
    number = 0
    mirrored = {"start": "finish", "serve": "serve", "finish": "start"}
    backward = [(name, mirrored[step]) for name, step in reversed(order)]
    for name, step in order + backward:
        if step != "start":
            log.append(("wait", under_way[name]))
        if step != "finish":
            log.append(("send", number))
            under_way[name] = number
            number += 1
    return log


def nano_batches(servers: int = RANKS) -> dict[str, tuple[Plan, Batch]]:
    ping = scattered_plan(10, scattered_layout(11, np.array([30, 7, 1]), RANKS), servers, MODEL)
    pong = scattered_plan(0, scattered_layout(6, np.array([12, 25]), RANKS), servers, MODEL)
    for plan in (ping, pong):
        assert (plan.tasks.home != plan.tasks.server).any() and (plan.tasks.server == servers - 1).any()
    return {"ping": (ping, random_qkv(1, ping.layout.num_tokens)),
            "pong": (pong, random_qkv(2, pong.layout.num_tokens))}


def run_in_order(attend: CoreAttention, order: list[tuple[str, str]],
                 batches: dict[str, tuple[Plan, Batch]]) -> dict[str, tuple[torch.Tensor, ...]]:
    """Both nano-batches through their steps, one loss, one backward; out, dq, dk, dv of each."""
    leaves, pending, outs = {}, {}, {}
    for name, (plan, tensors) in batches.items():
        leaves[name] = [x[row_index(plan.layout, attend.transport.rank)].requires_grad_() for x in tensors[:3]]
    for name, step in order:
        if step == "start":
            pending[name] = attend.start(*qkv_of(leaves[name]), batches[name][0])
        elif step == "serve":
            attend.serve(pending[name])
        else:
            outs[name] = attend.finish(pending[name])
    losses = [(outs[name] * tensors[3][row_index(plan.layout, attend.transport.rank)]).sum()
              for name, (plan, tensors) in batches.items()]
    torch.stack(losses).sum().backward()
    return {name: (outs[name].detach(), *map(gradient, leaves[name])) for name in batches}


def check_all(results: list[dict[str, tuple[torch.Tensor, ...]]],
              batches: dict[str, tuple[Plan, Batch]]) -> None:
    for name, (plan, tensors) in batches.items():
        expected = dense_on_one(*tensors, plan.layout.lengths)
        for field, want in zip(zip(*(result[name] for result in results), strict=True), expected, strict=True):
            torch.testing.assert_close(from_rows(field, plan.layout), want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("order", list(orders()), ids=lambda order: " ".join(f"{name}.{step}" for name, step in order))
def test_any_order_of_steps_is_exact_and_backward_mirrors_it(order: list[tuple[str, str]],
                                                             recording: type[RecordingTransport]) -> None:
    batches = nano_batches()

    def body(transport: LoopbackTransport) -> dict[str, tuple[torch.Tensor, ...]]:
        recorded = recording(transport)
        results = run_in_order(CoreAttention(transport=recorded), order, batches)
        assert recorded.log == exchanges_of(order)
        return results

    check_all(LoopbackWorld(RANKS, timeout_seconds=20).run(body), batches)


INTERLEAVED = [("ping", "start"), ("pong", "start"), ("ping", "serve"), ("pong", "serve"), ("ping", "finish"),
               ("pong", "finish")]


def test_the_expected_log_is_what_interleaving_means() -> None:
    assert exchanges_of(INTERLEAVED)[:8] == [
        ("send", 0), ("send", 1), ("wait", 0), ("send", 2), ("wait", 1), ("send", 3), ("wait", 2), ("wait", 3)]
    assert exchanges_of(INTERLEAVED)[8:] == [
        ("send", 4), ("send", 5), ("wait", 4), ("send", 6), ("wait", 5), ("send", 7), ("wait", 6), ("wait", 7)]


@pytest.mark.parametrize("order", list(orders())[::4])
def test_servers_that_keep_interleave_as_well(order: list[tuple[str, str]]) -> None:
    batches = nano_batches()
    check_all(on_fake_ranks(batches["ping"][0], lambda attend: run_in_order(attend, order, batches), state="keep"),
              batches)


@pytest.mark.parametrize("order", list(orders())[::4])
def test_dedicated_servers_follow_any_order(order: list[tuple[str, str]]) -> None:
    batches = nano_batches(servers=RANKS + 2)
    check_all(on_fake_ranks(batches["ping"][0], lambda attend: run_in_order(attend, order, batches)), batches)


def test_gradients_accumulate_over_nano_batches_and_steps() -> None:
    """One weight makes q, k and v of both nano-batches; two steps without zeroing its gradient."""
    batches = nano_batches()
    heads, kv_heads, dim = 4, 2, 8
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(6, (heads + 2 * kv_heads) * dim, generator=generator, dtype=torch.float64)
    inputs = {name: torch.randn(plan.layout.num_tokens, 6, generator=generator, dtype=torch.float64)
              for name, (plan, _) in batches.items()}

    def project(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return (x @ weight).view(len(x), heads + 2 * kv_heads, dim).split([heads, kv_heads, kv_heads], dim=1)

    def body(attend: CoreAttention) -> torch.Tensor:
        mine = weight.clone().requires_grad_()
        for _ in range(2):
            pending, losses = {}, []
            for name, (plan, _) in batches.items():
                row = inputs[name][row_index(plan.layout, attend.transport.rank)]
                pending[name] = attend.start(*qkv_of(project(row, mine)), plan)
            for name in batches:
                attend.serve(pending[name])
            for name, (plan, tensors) in batches.items():
                losses.append((attend.finish(pending[name])
                               * tensors[3][row_index(plan.layout, attend.transport.rank)]).sum())
            torch.stack(losses).sum().backward()
        return gradient(mine)

    expected = torch.zeros_like(weight)
    for name, (plan, tensors) in batches.items():
        leaf = weight.clone().requires_grad_()
        q, k, v = project(inputs[name], leaf)
        _, dq, dk, dv = dense_on_one(q, k, v, tensors[3], plan.layout.lengths)
        torch.autograd.backward([q, k, v], [dq, dk, dv])
        expected += 2 * gradient(leaf)
    torch.testing.assert_close(sum(on_fake_ranks(batches["ping"][0], body)), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("state", ["resend", "keep"])
def test_backward_may_run_twice_over_a_retained_graph(state: str) -> None:
    batches = nano_batches()
    plan, tensors = batches["ping"]

    def body(attend: CoreAttention) -> tuple[torch.Tensor, ...]:
        index = row_index(plan.layout, attend.transport.rank)
        leaves = [x[index].requires_grad_() for x in tensors[:3]]
        out = attend(*qkv_of(leaves), plan)
        first = torch.autograd.grad(out, leaves, tensors[3][index], retain_graph=True)
        second = torch.autograd.grad(out, leaves, tensors[3][index])
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))  # one call twice over
        return out.detach(), *second

    rows = on_fake_ranks(plan, body, state=state)
    for field, want in zip(zip(*rows, strict=True), dense_on_one(*tensors, plan.layout.lengths), strict=True):
        torch.testing.assert_close(from_rows(field, plan.layout), want, rtol=1e-10, atol=1e-10)


def test_gradients_of_gradients_are_refused_and_first_ones_given() -> None:
    plan, tensors = nano_batches()["ping"]

    def body(attend: CoreAttention) -> None:
        index = row_index(plan.layout, attend.transport.rank)
        leaves, dout = [x[index].requires_grad_() for x in tensors[:3]], tensors[3][index].requires_grad_()
        plain = torch.autograd.grad(attend(*qkv_of(leaves), plan), leaves, dout)
        first = torch.autograd.grad(attend(*qkv_of(leaves), plan), leaves, dout, create_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(first, plain, strict=True))  # one call twice over
        with pytest.raises(RuntimeError, match="differentiate twice"):
            first[0].sum().backward()

    on_fake_ranks(plan, body)
