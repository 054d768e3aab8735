"""Costs of calls: every plan's tasks once, hops as in the runtime, and rings that hide what they can."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distca.baselines import (
    fixed_rows,
    head_tail_layout,
    per_document_cp_step,
    per_sequence_layout,
    step_of_groups,
)
from distca.cost.latency_table import analytic_table
from distca.cost.work import causal_pairs, pairs_of_shard
from distca.models import model_named
from distca.planning.choose import plan_step
from distca.simulate import calls
from distca.simulate.calls import Calls, ChunkTasks, PlanCosts, token_bytes
from distca.simulate.clock import Ring
from distca.simulate.costs import Costs
from distca.simulate.execute import execute
from distca.spec import cluster_named
from distca.workload.documents import sample_lengths
from distca.workload.layout import layout_from_rows
from distca.workload.topology import Topology

MODEL = model_named("llama3-8b")
COSTS = Costs.of(MODEL, cluster_named("dgx-h200"), 8, analytic_table(MODEL, 550e12))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(1, 9000), min_size=1, max_size=5), min_size=1, max_size=3),
       st.sampled_from((2, 3, 4, 8, 12)), st.sampled_from((head_tail_layout, per_sequence_layout)))
def test_chunks_hold_every_pair_of_a_rank_once_and_its_own_keys_first(rows: list[list[int]], cp: int,
                                                                      cut: Callable[..., Any]) -> None:
    layout = cut(layout_from_rows(rows), cp)
    found = ChunkTasks.of(layout, cp)
    pairs = np.where(found.is_aligned, pairs_of_shard(found.q_len, found.kv_len), found.q_len * found.kv_len)
    assert (np.bincount(found.rank, weights=pairs, minlength=layout.num_ranks)
            == np.bincount(layout.rank, weights=causal_pairs(layout.start, layout.stop),
                           minlength=layout.num_ranks)).all()
    assert found.num_chunks == min(cp, calls.MOST_CHUNKS) and found.chunk.max() < found.num_chunks


def test_short_documents_wait_for_the_last_chunk_and_whole_ones_for_none() -> None:
    found = ChunkTasks.of(head_tail_layout(layout_from_rows([[64, 40_000]]), 4), 4)
    assert found.chunk[found.q_len < 16].tolist() == [3] * len(found.chunk[found.q_len < 16])
    found = ChunkTasks.of(per_sequence_layout(layout_from_rows([[1000] * 8]), 4), 4)
    assert (found.chunk == 0).all()


@pytest.mark.parametrize("backward", [False, True])
def test_a_group_hides_its_keys_where_that_ends_sooner_and_waits_where_not(backward: bool) -> None:
    long, short = (per_document_cp_step([np.array(lengths)], MODEL, num_data=4, layers=(1,), tp=8)
                   for lengths in ([131_072], [512] * 256))
    for step, hides in ((long, True), (short, False)):
        known = PlanCosts(step, COSTS.attention)
        call = Calls(known, COSTS, 4).of(((0, 0, backward),))
        waits = Calls(PlanCosts(step, COSTS.attention, hides=False), COSTS, 4).of(((0, 0, backward),))
        assert isinstance(call, Ring) and isinstance(waits, Ring)
        travel = COSTS.ring_seconds(131_072 * MODEL.kv_token_bytes(8), 4)
        np.testing.assert_allclose(waits.travel, travel)
        np.testing.assert_allclose(waits.lead, travel + known.seconds(0, backward))
        ends = [max(ring.lead.max(), (ring.seconds + ring.tail).max() if backward else 0.0)
                for ring in (call, waits)]
        if hides:
            assert ends[0] < ends[1] and call.seconds.sum() >= waits.seconds.sum()
        else:
            assert ends[0] == ends[1]                            # it is the call that waits
        assert ends[0] >= travel


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(1, 30_000), min_size=1, max_size=8), st.sampled_from((2, 4)), st.booleans())
def test_hiding_never_makes_a_step_longer(drawn: list[int], cp: int, by_document: bool) -> None:
    lengths = np.array([*drawn, 8 - sum(drawn) % 8])
    step = step_of_groups(fixed_rows([lengths], 1), head_tail_layout if by_document else per_sequence_layout, MODEL,
                          layers=(2, 2), tp=8, cp=cp)
    waits = execute(step, COSTS, plan_costs=PlanCosts(step, COSTS.attention, hides=False))
    assert execute(step, COSTS).seconds <= waits.seconds * (1 + 1e-9)


def test_bytes_are_those_of_the_wire() -> None:
    q, kv, out, lse = (size(8) for size in (MODEL.q_token_bytes, MODEL.kv_token_bytes, MODEL.out_token_bytes,
                                            MODEL.lse_token_bytes))
    assert token_bytes(MODEL, 8, False) == ((q, kv), (out + lse, 0))
    assert token_bytes(MODEL, 8, True) == ((q + 2 * out + lse, kv), (q, kv))
    step = plan_step([np.array([196_608, *[1024] * 64])], MODEL, num_data=4, layers=(1,), tp=8)
    for at, plan in enumerate(step.plans):
        moved = plan.traffic()
        found = PlanCosts(step, COSTS.attention).messages(at, False)
        assert found.dispatch_bytes.sum() == moved.q_tokens.sum() * q + moved.kv_tokens.sum() * kv
        assert found.combine_bytes.sum() == moved.q_tokens.sum() * (out + lse)
    assert any(len(plan.layout.key_only) for plan in step.plans)  # pong reads ping's keys, from their homes


def test_hops_are_those_of_the_plan() -> None:
    topology = Topology.regular(8, 4)
    step = plan_step([sample_lengths("prolong", 8 * 16_384, seed=3)], MODEL, num_data=8, layers=(1,), topology=topology)
    costs = PlanCosts(step, COSTS.attention)
    crossing = 0
    for at, plan in enumerate(step.plans):
        outer, inner = costs.hops(at, False)
        node = topology.node
        assert (node[outer.home] != node[outer.server]).all() and (node[inner.home] == node[inner.server]).all()
        between = plan.traffic_between_nodes()
        assert between is not None
        q_bytes, kv_bytes = MODEL.q_token_bytes(), MODEL.kv_token_bytes()
        assert outer.dispatch_bytes.sum() == between.q_tokens.sum() * q_bytes + between.kv_tokens.sum() * kv_bytes
        crossing += int(outer.dispatch_bytes.sum())
        together = costs.messages(at, False)
        assert len(together.home) == len(outer.home) + len(inner.home)
    assert crossing > 0                                          # not vacuous


def test_one_hop_without_nodes() -> None:
    step = plan_step([np.array([8192, 8192])], MODEL, num_data=2, layers=(1,), topology=Topology.regular(2, 2))
    assert all(len(PlanCosts(step, COSTS.attention).hops(at, False)) == 1 for at in range(len(step.plans)))
