"""A server receives and holds its queries and the distinct keys of its tasks, once, and the wire carries no more."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distca.dispatch import build
from distca.kernels import kernel_named
from distca.kernels.interface import PLAIN, BackwardInputs
from distca.planning.balance import balance
from distca.planning.plan import Plan
from distca.runtime.attention import CoreAttention
from distca.runtime.exchange import ALIGNMENT, STAMP_BYTES
from distca.runtime.prepared import Prepared, Shapes
from distca.runtime.transport import LoopbackWorld
from distca.runtime.transport.loopback import LoopbackTransport
from distca.spec import ModelShape
from distca.workload.layout import layout_from_rows
from distca.workload.packing import pack
from tests.support.attention import on_fake_ranks, qkv_of, random_qkv, row_index
from tests.support.plans import (
    LAYOUT_KINDS,
    LayoutKind,
    misplaced_plan,
    random_layout,
    scattered_layout,
    scattered_plan,
    tokens_moved,
)

if TYPE_CHECKING:
    from tests.runtime.conftest import RecordingTransport

MODEL = ModelShape("tiny", 1, 32, 4, 2, 8, 64, 64)
Q_BYTES, KV_BYTES, LSE_BYTES = 4 * 8 * 8, 2 * 2 * 8 * 8, 4 * 8  # one token, float64; KV is keys and values


def distinct_tokens(plan: Plan, server: int, start: str, stop: str) -> set[tuple[int, int]]:
    """(document, position) pairs that a server's tasks name."""
    return {(document, position)
            for document, begin, end, where in zip(plan.tasks.document.tolist(), getattr(plan.tasks, start).tolist(),
                                                   getattr(plan.tasks, stop).tolist(), plan.tasks.server.tolist(),
                                                   strict=True)
            if where == server for position in range(begin, end)}


Seen = tuple[list[int], list["weakref.ref[torch.Tensor]"], list["weakref.ref[torch.Tensor]"]]  # sizes, inputs, others


class Watching:
    """The dense kernel, with notes of the buffers it was given and of what became of them and of its results."""

    def __init__(self, seen: list[Seen]) -> None:
        self.kernel, self.seen = kernel_named("dense"), seen

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, prepared: Any,
                scale: float | None) -> tuple[torch.Tensor, torch.Tensor]:
        results = self.kernel.forward(q, k, v, prepared, scale)
        self._note((q, k, v), results)
        return results

    def backward(self, inputs: BackwardInputs, prepared: Any,
                 scale: float | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        results = self.kernel.backward(inputs, prepared, scale)
        dout, q, k, v, out, lse = inputs
        self._note((q, k, v), (dout, out, lse, *results))
        return results

    def _note(self, inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor], others: tuple[torch.Tensor, ...]) -> None:
        sizes = [x.untyped_storage().nbytes() for x in inputs]
        self.seen.append((sizes, [weakref.ref(x) for x in inputs], [weakref.ref(x) for x in others]))


def watch(attend: CoreAttention) -> list[Seen]:
    """Every call of `attend` runs a kernel that takes notes."""
    seen: list[Seen] = []
    begin = attend.plans.begin

    def watched(*args: Any) -> Prepared:
        prepared = begin(*args)
        prepared.kernel = cast(Any, Watching(seen))
        return prepared

    attend.plans.begin = watched  # type: ignore[method-assign, assignment]
    return seen


def alive(refs: list[weakref.ref[torch.Tensor]]) -> int:
    return sum(ref() is not None for ref in refs)


@pytest.mark.parametrize("state", ["resend", "keep"])
@pytest.mark.parametrize("seed", range(6))
def test_a_server_holds_its_queries_and_distinct_keys(seed: int, state: str) -> None:
    layout = scattered_layout(seed, np.array([40, 1, 33, 16]), ranks=3)
    plan = scattered_plan(seed, layout, 3, MODEL)

    def body(attend: CoreAttention) -> list[list[int]]:
        seen = watch(attend)
        row = [x[row_index(layout, attend.transport.rank)].requires_grad_()
               for x in random_qkv(0, layout.num_tokens)[:3]]
        attend(*qkv_of(row), plan).sum().backward()
        return [sizes for sizes, _, _ in seen]

    for server, seen in enumerate(on_fake_ranks(plan, body, kernel="dense", state=state)):
        queries = len(distinct_tokens(plan, server, "q_start", "q_stop"))
        keys = len(distinct_tokens(plan, server, "kv_start", "kv_stop"))
        assert seen == [[queries * Q_BYTES, keys * KV_BYTES // 2, keys * KV_BYTES // 2]] * 2  # forward, backward


@pytest.mark.parametrize("state", ["resend", "keep"])
def test_a_server_keeps_what_its_state_says_and_only_until_backward(state: str) -> None:
    """Between forward and backward `resend` holds nothing it served, `keep` its queries, keys and values."""
    layout = layout_from_rows([[40, 3], [33, 16]])
    plan = scattered_plan(2, layout, 2, MODEL)
    assert not any(side.is_row for rank in range(2) for side in (build(plan, rank).queries, build(plan, rank).keys))

    def body(attend: CoreAttention) -> None:
        seen = watch(attend)
        row = [x[row_index(layout, attend.transport.rank)].requires_grad_()
               for x in random_qkv(0, layout.num_tokens)[:3]]
        out = attend(*qkv_of(row), plan)
        [(_, inputs, results)] = seen
        assert alive(inputs) == (3 if state == "keep" else 0)
        assert alive(results) == 0, "results are home"
        out.sum().backward()
        assert [alive(inputs) + alive(others) for _, inputs, others in seen] == [0, 0]

    on_fake_ranks(plan, body, kernel="dense", state=state)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10_000), st.sampled_from(LAYOUT_KINDS), st.integers(1, 5), st.integers(1, 50), st.booleans())
def test_buffers_hold_distinct_tokens(seed: int, kind: LayoutKind, ranks: int, tokens: int, planned: bool) -> None:
    layout = random_layout(seed, kind, ranks, tokens)
    plan = balance(layout, MODEL, tolerance=0.0) if planned else scattered_plan(seed, layout, ranks + 1, MODEL)
    for server in range(plan.num_servers):
        tables = build(plan, server)
        assert tables.queries.buffer_tokens == len(distinct_tokens(plan, server, "q_start", "q_stop"))
        assert tables.keys.buffer_tokens == len(distinct_tokens(plan, server, "kv_start", "kv_stop"))


@pytest.mark.parametrize("state", ["resend", "keep"])
@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_the_wire_carries_what_the_plan_counted(seed: int, state: str, recording: type[RecordingTransport]) -> None:
    """Q and KV there, out and log-sum-exp back; in backward Q, KV, out, dout and log-sum-exp there, gradients back."""
    layout = scattered_layout(11, np.array([40, 1, 33, 16]), ranks=3)
    plan = scattered_plan(seed, layout, 3, MODEL)
    queries, keys = tokens_moved(layout, plan.tasks, 3)
    assert queries.sum() and keys.sum()

    def body(transport: LoopbackTransport) -> tuple[list[int], list[int]]:
        recorded = recording(transport)
        attend = CoreAttention(transport=recorded, state=state)
        row = [x[row_index(layout, transport.rank)].requires_grad_() for x in random_qkv(0, layout.num_tokens)[:3]]
        attend(*qkv_of(row), plan).sum().backward()
        return recorded.sent_bytes, recorded.received_bytes

    again = state == "resend"
    trips = [                                                    # bytes of one query and of one key; which way
        (Q_BYTES, KV_BYTES, 0), (Q_BYTES + LSE_BYTES, 0, 1),
        ((3 if again else 2) * Q_BYTES + LSE_BYTES, KV_BYTES if again else 0, 0), (Q_BYTES, KV_BYTES, 1)]
    padding = 2 * (6 * ALIGNMENT + STAMP_BYTES)                  # to and from two peers, six fields at most
    for rank, (sent, received) in enumerate(LoopbackWorld(3, timeout_seconds=20).run(body)):
        for (q_bytes, kv_bytes, back), out, into in zip(trips, sent, received, strict=True):
            leaving = queries[rank].sum() * q_bytes + keys[rank].sum() * kv_bytes
            arriving = queries[:, rank].sum() * q_bytes + keys[:, rank].sum() * kv_bytes
            leaving, arriving = (arriving, leaving) if back else (leaving, arriving)
            assert leaving <= out <= leaving + padding and arriving <= into <= arriving + padding


def test_a_plan_that_moves_nothing_exchanges_nothing(recording: type[RecordingTransport]) -> None:
    plan = balance(layout_from_rows([[10], [10]]), MODEL)

    def body(transport: LoopbackTransport) -> list[tuple[str, int]]:
        recorded = recording(transport)
        attend = CoreAttention(transport=recorded)
        row = [x[row_index(plan.layout, transport.rank)].requires_grad_() for x in random_qkv(0, 20)[:3]]
        attend(*qkv_of(row), plan).sum().backward()
        return recorded.log

    assert LoopbackWorld(2, timeout_seconds=20).run(body) == [[], []]


def test_a_long_document_served_in_shards_stands_once() -> None:
    """64 shards against one prefix of 16K tokens: 16K keys received, not 64 times their prefixes."""
    layout = pack([16384, 16384], ranks=2)
    plan = misplaced_plan(layout, 2, MODEL)
    shapes = Shapes(4, 2, 8, torch.float32, torch.device("cpu"))
    prepared = Prepared(plan, 0, LoopbackTransport(LoopbackWorld(2), 1), kernel_named("sdpa"), shapes, PLAIN)
    assert prepared.tables.keys.buffer_tokens == 16384
    expected = 16384 * sum(size for _, size in shapes.fields[:3])
    assert expected <= prepared.inputs.outer.arriving.num_bytes <= expected + 3 * ALIGNMENT + STAMP_BYTES
