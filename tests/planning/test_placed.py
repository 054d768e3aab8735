"""Balanced placement is never worse than the loader's own order: in bytes, or at the busiest sender."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distca.models import MODELS
from distca.planning.balance import balance
from distca.planning.placed import plan_placed
from distca.planning.plan import Plan
from distca.testing import random_lengths
from distca.workload.documents import sample_lengths
from distca.workload.layout import Layout
from distca.workload.packing import pack
from distca.workload.topology import Topology

LLAMA = MODELS["llama3-8b"]


def planners(
    lengths: np.ndarray, ranks: int, topology: Topology | None
) -> tuple[Callable[[str], Layout], Callable[[Layout], Plan]]:
    def lay(placement: str) -> Layout:
        return pack(lengths, ranks=ranks, placement=placement, topology=topology)

    return lay, partial(balance, model=LLAMA, topology=topology)


def assert_no_worse(lengths: np.ndarray, ranks: int, topology: Topology | None) -> str:
    lay, planner = planners(lengths, ranks, topology)
    plan, used = plan_placed("balanced", lay, planner)
    mine, theirs = plan.summary(), planner(lay("given")).summary()
    if topology is None or not topology.levels():
        assert mine.bytes_total <= theirs.bytes_total
        assert mine.bytes_sent.max() <= theirs.bytes_sent.max()
        return used
    assert mine.bytes_between_nodes is not None and theirs.bytes_between_nodes is not None
    assert mine.bytes_between_nodes_max is not None and theirs.bytes_between_nodes_max is not None
    assert mine.bytes_between_nodes <= theirs.bytes_between_nodes
    assert mine.bytes_between_nodes_max <= theirs.bytes_between_nodes_max
    return used


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


def test_given_stays_given() -> None:
    lay, planner = planners(np.array([512, 512]), 2, None)
    assert plan_placed("given", lay, planner)[1] == "given"
