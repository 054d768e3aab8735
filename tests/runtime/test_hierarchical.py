"""Two hops give what one does: the dense answer, outputs and gradients, to 1e-10, whatever shares a node.

And they carry across nodes what the plan says: each key and query once per node, each result once.
"""

from __future__ import annotations

import platform
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from distca.dispatch import build_hops
from distca.kernels.dense import DenseKernel
from distca.kernels.interface import PLAIN
from distca.planning.balance import balance
from distca.planning.plan import Plan
from distca.planning.traffic import traffic_between_nodes, two_hops_pay
from distca.runtime.attention import CoreAttention
from distca.runtime.prepared import Prepared, Shapes
from distca.runtime.transport import C10dTransport, HierarchicalTransport, LoopbackTransport, LoopbackWorld, over_nodes
from distca.spec import ModelShape
from distca.workload.packing import pack
from distca.workload.topology import Topology
from tests.support.attention import attend_on_fake_ranks, dense_on_one, random_qkv, row_index
from tests.support.plans import LAYOUT_KINDS, LayoutKind, misplaced_plan, random_layout, scattered_plan
from tests.support.processes import run_processes, values

MODEL = ModelShape("tiny", 1, 32, 4, 2, 8, 64, 64)
LENGTHS = [400, 40, 1, 55, 16]
NODES = ([0, 0], [0, 0, 1, 1], [0, 1, 0, 1], [0, 0, 0, 1], [0, 0, 1, 1, 2, 2], [0, 0, 0, 1, 1, 2], [2, 0, 1, 0, 2, 0],
         [0] * 8, [0] * 4 + [1] * 4, [0, 1, 2, 3], [0, 0, 0, 1, 1, 1, 2, 2])


def check(plan: Plan, node: Sequence[int], seed: int, **options: Any) -> None:
    tensors = random_qkv(seed, plan.layout.num_tokens, 4, 2)
    actual = attend_on_fake_ranks(*tensors, plan, node=node, **options)
    for name, got, want in zip(("out", "dq", "dk", "dv"), actual, dense_on_one(*tensors, plan.layout.lengths),
                               strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10, msg=f"{name} differs")


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 100_000), st.sampled_from(LAYOUT_KINDS), st.sampled_from(NODES), st.integers(1, 40),
       st.sampled_from(["resend", "keep"]))
def test_senseless_plans_are_exact_in_two_hops(
    seed: int, kind: LayoutKind, node: list[int], tokens_per_rank: int, state: str
) -> None:
    layout = random_layout(seed, kind, len(node), tokens_per_rank)
    plan = scattered_plan(seed, layout, len(node), MODEL)
    check(plan, node, seed, kernel="dense", state=state)


@settings(deadline=None, max_examples=12)
@given(st.integers(0, 100_000), st.sampled_from(LAYOUT_KINDS), st.sampled_from(NODES), st.integers(40, 150))
def test_plans_by_levels_are_exact_in_two_hops(
    seed: int, kind: LayoutKind, node: list[int], tokens_per_rank: int
) -> None:
    layout = random_layout(seed, kind, len(node), tokens_per_rank)
    plan = balance(layout, MODEL, tolerance=0.02, topology=Topology.of_hosts([str(one) for one in node]))
    check(plan, node, seed, kernel="sdpa")


@pytest.mark.parametrize("node", NODES, ids=str)
@pytest.mark.parametrize("kind", ["scattered", "misplaced"])
def test_a_token_crosses_to_a_node_once(node: list[int], kind: str) -> None:
    """What the tables send between nodes is what the plan counts, and none of it goes between ranks of one node."""
    layout = pack([60] * len(node), ranks=len(node))
    plan = (scattered_plan(3, layout, len(node), MODEL) if kind == "scattered"
            else misplaced_plan(layout, len(node), MODEL))
    places = np.unique(node, return_inverse=True)[1]
    tables = [build_hops(plan, rank, places) for rank in range(len(node))]
    counted = traffic_between_nodes(layout, plan.tasks, places)
    for side, tokens in (("queries", counted.q_tokens), ("keys", counted.kv_tokens)):
        sent = [getattr(one.outer, side).send for one in tables]
        assert sum(runs.num_tokens for runs in sent) == tokens.sum()
        assert all(places[peer] != places[rank] for rank, runs in enumerate(sent) for peer in runs.peer.tolist())
        inside = [getattr(one.inner, side) for one in tables]
        assert sum(one.send.num_tokens for one in inside) == sum(one.receive.num_tokens for one in inside)
    assert all(one.crosses == (len(counted.q_tokens) + len(counted.kv_tokens) > 0) for one in tables)


def test_a_plan_whose_ranks_need_nothing_alike_goes_in_one_hop() -> None:
    """Each rank's documents are served by one rank of the other node: a gateway would only be a detour."""
    node = np.array([0, 0, 1, 1])
    layout = pack([60] * 4, ranks=4)
    at_home = scattered_plan(3, layout, 4, MODEL).tasks
    apart = replace(scattered_plan(3, layout, 4, MODEL), tasks=replace(at_home, server=(at_home.home + 2) % 4))
    alike = balance(pack([240], ranks=4), MODEL, topology=Topology.of_hosts([str(one) for one in node]))
    inside = replace(apart, tasks=replace(at_home, server=at_home.home ^ 1))
    shapes = Shapes(4, 2, 8, torch.float64, torch.device("cpu"))
    for plan, hops in ((apart, 1), (alike, 2), (inside, 2)):
        assert two_hops_pay(plan.layout, plan.tasks, node, MODEL) == (hops == 2)
        outer, inner = (LoopbackTransport(LoopbackWorld(size), 0) for size in (4, 2))
        transport = HierarchicalTransport(outer, inner, node.tolist())
        prepared = Prepared(plan, 0, transport, DenseKernel(), shapes, PLAIN)
        assert len(prepared.inputs.hops) == hops
        if plan is inside:
            assert [hop.moves for hop in prepared.inputs.hops] == [False, True]
        check(plan, node.tolist(), 5, kernel="dense")


def waits_for_the_last_hop_only(transport: C10dTransport, plan: Plan, node: list[int]) -> list[str]:
    """Which threads started what: the second hop of each way has one of its own."""
    hierarchical = over_nodes(transport, node)
    assert isinstance(hierarchical, HierarchicalTransport)
    started: list[str] = []
    for way, name in ((hierarchical.going, "going"), (hierarchical.coming, "coming")):
        for leg in ("outer", "inner"):
            carrier = getattr(way, leg)
            carrier.exchange = partial(_noting, started, f"{name} {leg}", carrier.exchange)
    attend = CoreAttention(transport=hierarchical)
    tensors = random_qkv(0, plan.layout.num_tokens)
    index = row_index(plan.layout, transport.rank)
    q, k, v = (x[index].requires_grad_() for x in tensors[:3])
    attend(q, k, v, plan).backward(tensors[3][index])
    return sorted(started)


def _noting(started: list[str], leg: str, exchange: Callable[..., Any], *arguments: Any) -> Any:
    started.append(f"{leg}: {'relay' if threading.current_thread().name.startswith('distca-relay') else 'caller'}")
    return exchange(*arguments)


@pytest.mark.multiprocess
def test_the_second_hop_does_not_stop_the_caller() -> None:
    node = [0, 0, 1, 1]
    plan = balance(pack([800], ranks=4), MODEL, topology=Topology.of_hosts([str(one) for one in node]))
    each_way = ["coming inner: caller", "coming outer: relay", "going inner: relay", "going outer: caller"]
    for outcome in run_processes(4, waits_for_the_last_hop_only, plan, node):
        assert outcome.error is None
        assert outcome.value == sorted(2 * each_way)             # forward and backward


def test_nodes_that_do_not_fit_the_ranks_are_refused() -> None:
    def body(transport: LoopbackTransport) -> None:
        HierarchicalTransport(transport, LoopbackTransport(LoopbackWorld(2), transport.rank % 2), [0, 0, 0, 1])

    with pytest.raises(ValueError, match=r"node is \[0, 0, 0, 1\] for 4 ranks, of which 2 share the node of rank"):
        LoopbackWorld(4).run(body)


def as_two_nodes(transport: C10dTransport, cases: list[tuple[list[int], list[Plan]]]) -> list[float]:
    dist.new_group([0, 1, 2], timeout=timedelta(seconds=20))     # ranks in more groups than the last one
    errors, attends = [], [CoreAttention(transport=over_nodes(transport, node)) for node, _ in cases]
    assert all(isinstance(attend.transport, HierarchicalTransport) for attend in attends)
    for attend, plan in [(attend, plan) for attend, (_, plans) in zip(attends, cases, strict=True) for plan in plans]:
        tensors = random_qkv(0, plan.layout.num_tokens)
        index = row_index(plan.layout, transport.rank)
        leaves = [x[index].requires_grad_() for x in tensors[:3]]
        out = attend(leaves[0], leaves[1], leaves[2], plan)
        out.backward(tensors[3][index])
        found = out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)
        expected = dense_on_one(*tensors, plan.layout.lengths)
        errors += [float((got - want[index]).abs().max()) for got, want in zip(found, expected, strict=True)]
    return errors


@pytest.mark.multiprocess
def test_four_processes_as_two_nodes_are_exact() -> None:
    cases = []
    for node in ([0, 0, 1, 1], [0, 1, 1, 1]):
        topology = Topology.of_hosts([str(one) for one in node])
        layouts = [pack(LENGTHS, ranks=4), pack(LENGTHS, ranks=4, placement="balanced", topology=topology)]
        plans = [balance(layout, MODEL, tolerance=0.02, topology=topology) for layout in layouts]
        cases.append((node, [*plans, misplaced_plan(layouts[0], 4, MODEL), scattered_plan(1, layouts[1], 4, MODEL)]))
    for errors in values(run_processes(4, as_two_nodes, cases)):
        assert len(errors) == 2 * 4 * 4 and max(errors) < 1e-10


def found_from_hosts(transport: C10dTransport, names: list[str]) -> tuple[str, list[int] | None]:
    """What "c10d" and "flat" are on a rank that is told its host's name."""
    platform.node = lambda: names[transport.rank]
    chosen = CoreAttention(transport="c10d")
    assert type(CoreAttention(transport="flat").transport) is C10dTransport
    return type(chosen.transport).__name__, None if chosen.topology is None else chosen.topology.node.tolist()


@pytest.mark.multiprocess
@pytest.mark.parametrize(("names", "expected"), [
    (["a", "a", "b"], ("HierarchicalTransport", [0, 0, 1])), (["a", "a", "a"], ("C10dTransport", None))])
def test_nodes_are_found_from_the_ranks_hosts(names: list[str], expected: tuple[str, list[int] | None]) -> None:
    assert [outcome.value for outcome in run_processes(3, found_from_hosts, names)] == [expected] * 3
