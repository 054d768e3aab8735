"""The simulator sends what the runtime does: between nodes once per node, then inside them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from distca.cost.attention_time import AttentionTime
from distca.cost.latency_table import analytic_table
from distca.cost.network import read_cluster
from distca.models import MODELS
from distca.planning.choose import plan_step
from distca.simulate.calls import PlanCosts
from distca.workload.documents import sample_lengths
from distca.workload.topology import Topology

MODEL = MODELS["llama3-8b"]
SECONDS = AttentionTime.of(analytic_table(MODEL, 550e12, max_kv_len=131_072), MODEL)


def test_hops_are_those_of_the_plan() -> None:
    topology = Topology.regular(8, 4)
    step = plan_step([sample_lengths("prolong", 8 * 16_384, seed=3)], MODEL, num_data=8, layers=(1,), topology=topology)
    costs = PlanCosts(step, SECONDS)
    crossing = 0
    for at, plan in enumerate(step.plans):
        outer, inner = costs.hops(at, False)
        node = topology.node
        assert (node[outer.home] != node[outer.server]).all() and (node[inner.home] == node[inner.server]).all()
        between = plan.traffic_between_nodes()
        assert between is not None
        q_bytes, kv_bytes = MODEL.q_token_bytes(), MODEL.kv_token_bytes()
        assert outer.going_bytes.sum() == between.q_tokens.sum() * q_bytes + between.kv_tokens.sum() * kv_bytes
        crossing += int(outer.going_bytes.sum())
        together = costs.messages(at, False)
        assert len(together.home) == len(outer.home) + len(inner.home)
    assert crossing > 0                                          # not vacuous


def test_one_hop_without_nodes() -> None:
    step = plan_step([np.array([8192, 8192])], MODEL, num_data=2, layers=(1,), topology=Topology.regular(2, 2))
    assert all(len(PlanCosts(step, SECONDS).hops(at, False)) == 1 for at in range(len(step.plans)))


def test_a_cluster_file_may_name_pods(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('base = "dgx-h200"\nnodes_per_pod = 4\n', encoding="utf-8")
    assert read_cluster(path).nodes_per_pod == 4
    assert Topology.of_cluster(read_cluster(path), 128, tp=1).pod.max() == 3
