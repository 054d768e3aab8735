"""Activation checkpointing and torch.compile around attention: the same answers, and nothing left behind."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from distca.dispatch import build
from distca.runtime.attention import CoreAttention
from distca.runtime.transport import LoopbackWorld
from distca.runtime.transport.loopback import LoopbackTransport
from distca.spec import ModelShape
from tests.support.attention import dense_on_one, from_rows, gradient, on_fake_ranks, qkv_of, random_qkv, row_index
from tests.support.plans import scattered_layout, scattered_plan

if TYPE_CHECKING:
    from tests.runtime.conftest import RecordingTransport

MODEL = ModelShape("tiny", 1, 32, 4, 2, 8, 64, 64)
RANKS = 3
LAYOUT = scattered_layout(4, np.array([30, 7, 1, 22]), RANKS)
PLAN = scattered_plan(10, LAYOUT, RANKS, MODEL)
assert all(build(PLAN, rank).queries.send.num_tokens for rank in np.unique(LAYOUT.rank)), "all have work elsewhere"
TENSORS = random_qkv(1, LAYOUT.num_tokens)
STATES = pytest.mark.parametrize("state", ["resend", "keep"])


def check(rows: list[tuple[torch.Tensor, ...]]) -> None:
    for field, want in zip(zip(*rows, strict=True), dense_on_one(*TENSORS, LAYOUT.lengths), strict=True):
        torch.testing.assert_close(from_rows(field, LAYOUT), want, rtol=1e-10, atol=1e-10)


def leaves_of(rank: int) -> list[torch.Tensor]:
    return [x[row_index(LAYOUT, rank)].requires_grad_() for x in TENSORS[:3]]


def dout_of(rank: int) -> torch.Tensor:
    return TENSORS[3][row_index(LAYOUT, rank)]


@STATES
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_replays_an_ordinary_forward(state: str, reentrant: bool,
                                                   recording: type[RecordingTransport]) -> None:
    """Forward twice and backward once, two exchanges each, and the answers of no checkpointing."""

    def body(transport: LoopbackTransport) -> tuple[torch.Tensor, ...]:
        recorded = recording(transport)
        attend = CoreAttention(transport=recorded, state=state)
        leaves = leaves_of(transport.rank)
        out = checkpoint(lambda q, k, v: attend(q * 2.0, k, v, PLAN, scale=0.5 * q.shape[2] ** -0.5) * 1.0, *leaves,
                         use_reentrant=reentrant)
        assert len(recorded.sent_bytes) == 2
        out.backward(dout_of(transport.rank))
        assert len(recorded.sent_bytes) == 6
        return out.detach(), *map(gradient, leaves)

    check(LoopbackWorld(RANKS, timeout_seconds=20).run(body))


def stack(attend: CoreAttention, x: torch.Tensor, replay: bool | None) -> torch.Tensor:
    for layer in range(3):
        def block(x: torch.Tensor, layer: int = layer) -> torch.Tensor:
            q = x * (1.0 + layer)
            return x + attend(q, q[:, :2], x[:, 2:], PLAN)
        x = block(x) if replay is None else checkpoint(block, x, use_reentrant=replay)
    return x


@STATES
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_stack_of_checkpointed_layers(state: str, reentrant: bool) -> None:
    """Layer by layer, each replayed alone; gradients equal those of a stack that kept everything."""

    def body(attend: CoreAttention) -> list[torch.Tensor]:
        grads = []
        for replay in (reentrant, None):
            x = leaves_of(attend.transport.rank)[0]
            stack(attend, x, replay).backward(dout_of(attend.transport.rank))
            grads.append(gradient(x))
        return grads

    for replayed, plain in on_fake_ranks(PLAN, body, state=state):
        torch.testing.assert_close(replayed, plain, rtol=1e-12, atol=1e-12)


def test_dedicated_servers_serve_replays_too() -> None:
    plan = scattered_plan(10, LAYOUT, RANKS + 1, MODEL)
    assert (plan.tasks.server == RANKS).any() and (plan.tasks.server != RANKS).any()

    def body(attend: CoreAttention) -> tuple[torch.Tensor, ...]:
        leaves = leaves_of(attend.transport.rank)
        out = checkpoint(lambda q, k, v: attend(q, k, v, plan), *leaves, use_reentrant=False)
        out.backward(dout_of(attend.transport.rank))
        return out.detach(), *map(gradient, leaves)

    check(on_fake_ranks(plan, body))


@STATES
def test_what_travelled_is_freed_between_steps(state: str, recording: type[RecordingTransport]) -> None:
    """No wire buffer outlives its step, and no tensor of a finished call outlives the caller's own references."""

    def body(transport: LoopbackTransport) -> list[weakref.ref[torch.Tensor]]:
        recorded = recording(transport)
        attend = CoreAttention(transport=recorded, state=state)
        leaves = leaves_of(transport.rank)
        out = attend(*qkv_of(leaves), PLAN)
        everyone.wait()
        assert recorded.alive == 0, "after forward"
        out.backward(dout_of(transport.rank))
        everyone.wait()
        assert recorded.alive == 0, "after backward"
        return [weakref.ref(x) for x in (out, *leaves)]

    everyone = threading.Barrier(RANKS, timeout=20)
    gc.disable()                                                 # a cycle would be seen, not collected
    try:
        for refs in LoopbackWorld(RANKS, timeout_seconds=20).run(body):
            assert [ref() for ref in refs] == [None] * 4
    finally:
        gc.enable()


@STATES
def test_what_autograd_saves_is_the_row_and_what_a_server_keeps(state: str) -> None:
    """Between forward and backward `resend` holds a rank's own row; `keep` adds the server's queries and keys."""
    token_bytes = {"q": 4 * 8 * 8, "kv": 2 * 8 * 8, "lse": 4 * 8}

    def body(attend: CoreAttention) -> None:
        saved = []

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            saved.append(tensor.numel() * tensor.element_size())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            attend(*qkv_of(leaves_of(attend.transport.rank)), PLAN)
        tables = build(PLAN, attend.transport.rank)
        row = tables.row_tokens * (2 * token_bytes["q"] + 2 * token_bytes["kv"] + token_bytes["lse"])
        kept = tables.queries.buffer_tokens * token_bytes["q"] + tables.keys.buffer_tokens * 2 * token_bytes["kv"]
        assert sum(saved) == row + (kept if state == "keep" else 0)

    on_fake_ranks(PLAN, body, state=state)


@STATES
@pytest.mark.parametrize("replay", [None, True, False])
def test_steps_leave_no_tensors_behind(state: str, replay: bool | None) -> None:
    """As many tensors live after six steps as after two."""

    def live() -> int:
        gc.collect()
        return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())

    def step(attend: CoreAttention) -> None:
        x = leaves_of(attend.transport.rank)[0]
        stack(attend, x, replay).backward(dout_of(attend.transport.rank))

    def steps(attend: CoreAttention) -> None:
        for _ in range(2):
            step(attend)
        everyone.wait()
        before = live() if attend.transport.rank == 0 else 0
        everyone.wait()
        for _ in range(4):
            step(attend)
        everyone.wait()
        if attend.transport.rank == 0:
            assert live() <= before
        everyone.wait()

    everyone = threading.Barrier(RANKS, timeout=20)
    on_fake_ranks(PLAN, steps, state=state)


@pytest.mark.skipif(torch.__version__.startswith("2.11."), reason="torch 2.11 crashes where threads compile at once")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("steps", [False, True], ids=["call", "start_serve_finish"])
def test_compiled_around_attention(backend: str, steps: bool) -> None:
    torch._dynamo.reset()

    def body(attend: CoreAttention) -> tuple[torch.Tensor, ...]:
        def block(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            q = q * 2.0
            if not steps:
                return attend(q, k, v, PLAN, scale=0.5 * 8 ** -0.5) * 1.0
            pending = attend.start(q, k, v, PLAN, scale=0.5 * 8 ** -0.5)
            attend.serve(pending)
            return attend.finish(pending) * 1.0

        compiled = torch.compile(block, backend=backend)
        for _ in range(2):                                       # the second call runs what the first one compiled
            leaves = leaves_of(attend.transport.rank)
            out = compiled(*leaves)
            out.backward(dout_of(attend.transport.rank))
        return out.detach(), *map(gradient, leaves)

    check(on_fake_ranks(PLAN, body))
