"""Balanced placement is never worse than the loader's own order: in bytes, or at the busiest sender."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distca.cost.attention_time import AttentionTime, shipped_table
from distca.models import MODELS
from distca.planning.choose import plan_step
from distca.planning.step import StepPlan, same_columns
from distca.workload.documents import sample_lengths
from distca.workload.topology import Topology
from tests.support.plans import random_lengths

LLAMA = MODELS["llama3-8b"]


def planned(
    lengths: np.ndarray, ranks: int, placement: str, topology: Topology | None = None,
    cost: AttentionTime | None = None, **options: Any,
) -> StepPlan:
    return plan_step([lengths], LLAMA, num_data=ranks, layers=(1,), placement=placement, topology=topology, cost=cost,
                     **{"ping_pong": False, **options})


def sent(step: StepPlan) -> tuple[float, float]:
    """What forward's calls send, in all and from the busiest: between nodes where there are some, else ranks."""
    total = busiest = 0.0
    for plan in step.forward_plans():
        summary = plan.summary()
        by_node = plan.topology is not None and plan.topology.levels()
        sender = summary.bytes_sent_by_node if by_node else summary.bytes_sent
        assert sender is not None
        total, busiest = total + float(sender.sum()), busiest + float(sender.max())
    return total, busiest


def slowest(step: StepPlan) -> float:
    """Seconds of the slowest server, over all calls both ways."""
    return sum(plan.summary().seconds or 0.0 for plan in step.plans)


def assert_no_worse(lengths: np.ndarray, ranks: int, topology: Topology | None, **options: Any) -> str:
    mine = planned(lengths, ranks, "balanced", topology, **options)
    theirs = planned(lengths, ranks, "given", topology, **options)
    if options.get("cost") is None:
        assert all(one <= other for one, other in zip(sent(mine), sent(theirs), strict=True))
    elif mine.placement == "balanced" and slowest(theirs) <= slowest(mine):  # held against given's plan in pairs
        in_pairs = planned(lengths, ranks, "given", topology, **{**options, "cost": None})
        most = np.maximum(sent(in_pairs), sent(theirs))
        assert (np.array(sent(mine)) <= most).all()
    assert mine.placement is not None and theirs.placement == "given"
    if mine.placement == "given":
        assert same_columns(mine.plans[0].layout, theirs.plans[0].layout)
    return mine.placement


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 8), st.integers(1, 6000), st.sampled_from([0, 1, 2, 3]))
def test_never_worse_than_given(seed: int, ranks: int, tokens_per_rank: int, ranks_per_node: int) -> None:
    topology = Topology.regular(ranks, ranks_per_node) if ranks_per_node else None
    assert_no_worse(random_lengths(seed, ranks * tokens_per_rank), ranks, topology)


def test_one_document_over_many_ranks_falls_back_to_given() -> None:
    assert assert_no_worse(np.array([32 * 65_536]), 32, None) == "given"


@pytest.mark.parametrize("topology", [None, Topology.regular(32, 8)])
def test_short_documents_between_long_ones_are_placed(topology: Topology | None) -> None:
    assert assert_no_worse(sample_lengths("prolong", 32 * 65_536, seed=2), 32, topology) == "balanced"


@pytest.mark.parametrize("topology", [None, Topology.regular(16, 4)])
@pytest.mark.parametrize("sampler", ["prolong", "lognormal"])
def test_never_worse_in_seconds_or_in_halves(sampler: str, topology: Topology | None) -> None:
    lengths = sample_lengths(sampler, 16 * 8192, seed=1)
    assert_no_worse(lengths, 16, topology, cost=AttentionTime.of(shipped_table("h200"), LLAMA))
    assert_no_worse(lengths, 16, topology, ping_pong=True, tolerance=0.2)


def test_never_worse_over_a_pipeline_with_dedicated_servers() -> None:
    lengths = [np.array([32_768]), sample_lengths("prolong", 32_768, seed=4), np.array([8192] * 4)]
    mine, theirs = (plan_step(lengths, LLAMA, num_data=4, layers=(2, 1), placement=placement, speed=np.ones(9))
                    for placement in ("balanced", "given"))
    mine.validate()
    assert all(one <= other for one, other in zip(sent(mine), sent(theirs), strict=True))


def test_balanced_of_documents_like_the_ranks_is_no_busier() -> None:
    """Documents of 8 ranks each over 32: equal slices of a document have unequal keys, whoever cuts them."""
    assert_no_worse(np.full(4, 8 * 65_536), 32, None)
