"""Nodes in pods: what crosses pods is counted, planned for, and timed at the rate that a cluster file gives."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distca.cost.attention_time import shipped_table
from distca.cost.network import Network, read_cluster
from distca.models import MODELS
from distca.planning.balance import balance
from distca.planning.plan import Plan
from distca.simulate.clock import Clock, Exchange
from distca.simulate.costs import Costs
from distca.simulate.execute import execute
from distca.simulate.setting import setting
from distca.simulate.strategies import PoolChoice, StepDocuments
from distca.workload.documents import sample_lengths
from distca.workload.packing import pack
from distca.workload.topology import Topology
from tests.support.plans import LAYOUT_KINDS, LayoutKind, random_layout

LLAMA = MODELS["llama3-8b"]
Run = Callable[..., tuple[int, str, str]]


def tokens_between_pods(plan: Plan) -> tuple[int, int]:
    """Queries and keys that a node needs from a node of another pod, each once per node, token by token."""
    assert plan.topology is not None
    node, pod, tasks, keys = plan.topology.node, plan.topology.pod, plan.tasks, plan.layout.keys()
    home = {(int(d), t): int(r) for d, start, stop, r in zip(
        keys.document, keys.start, keys.stop, keys.rank, strict=True) for t in range(start, stop)}
    found: tuple[set[tuple[int, int, int]], set[tuple[int, int, int]]] = (set(), set())
    for d, q0, q1, k0, k1, server in zip(tasks.document, tasks.q_start, tasks.q_stop, tasks.kv_start, tasks.kv_stop,
                                         tasks.server, strict=True):
        for needed, begin, end in ((found[0], q0, q1 if k1 > k0 else q0), (found[1], k0, k1)):
            needed |= {(int(node[server]), int(d), t) for t in range(begin, end)
                       if pod[home[int(d), t]] != pod[server]}
    return len(found[0]), len(found[1])


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from(LAYOUT_KINDS), st.integers(4, 8), st.integers(50, 600))
def test_what_crosses_pods_is_counted_once_per_node(
    seed: int, kind: LayoutKind, ranks: int, tokens_per_rank: int
) -> None:
    topology = Topology.regular(ranks, 2, 2)
    plan = balance(random_layout(seed, kind, ranks, tokens_per_rank), LLAMA, topology=topology)
    queries, keys = tokens_between_pods(plan)
    summary = plan.summary()
    if topology.num_pods == 1:
        assert summary.bytes_between_pods is None and summary.bytes_between_pods_max is None
        return
    q_bytes = LLAMA.q_token_bytes() + LLAMA.out_token_bytes()
    assert summary.bytes_between_pods == queries * q_bytes + keys * LLAMA.kv_token_bytes()
    assert summary.bytes_between_nodes is not None and summary.bytes_between_pods_max is not None
    assert summary.bytes_between_pods_max <= summary.bytes_between_pods <= summary.bytes_between_nodes


def test_equal_pods_keep_their_work() -> None:
    """Every pod has a node of one long document and a node of short ones: what leaves a node need not leave its pod."""
    pod = [65_536, *[512] * 128]
    layout = pack(pod * 4, ranks=32)
    plans = [balance(layout, LLAMA, topology=topology)
             for topology in (Topology.regular(32, 4, 2), Topology.regular(32, 4))]
    between, nodes = plans[0].summary(), plans[1].summary()
    assert plans[0].limit is None and between.work_max_over_mean <= 1.05
    assert between.bytes_between_pods == 0
    assert between.bytes_between_nodes is not None and nodes.bytes_between_nodes is not None
    assert 0 < between.bytes_between_nodes <= 1.1 * nodes.bytes_between_nodes


def test_json_and_table_say_what_crosses_pods(run: Run, tmp_path: Path) -> None:
    cluster = tmp_path / "mine.toml"
    cluster.write_text('base = "dgx-h200"\ngpus_per_node = 2\nnodes_per_pod = 2\n', encoding="utf-8")
    options = ("plan", "prolong", "--ranks", 8, "--tokens-per-rank", 16384, "--seed", 2, "--cluster", cluster)
    said = json.loads(run(*options, "--json")[1])
    assert 0 < said["bytes_between_pods_max"] <= said["bytes_between_pods"] <= said["bytes_between_nodes"]
    out = run(*options)[1]
    assert "in 4 nodes of up to 2 and 2 pods" in out and "of them between pods" in out
    without = json.loads(run(*options[:-2], "--ranks-per-node", 2, "--json")[1])
    assert without["bytes_between_pods"] is None and without["bytes_between_nodes"] > 0


def test_a_message_to_another_pod_takes_what_its_links_leave() -> None:
    """Ranks 0, 1 | 2, 3 in two pods, a rank to a node: 100 bytes/s inside a pod, 20 between."""
    network = Network(1, 1000.0, 100.0, 0.0, 0.0, nodes_per_pod=2, inter_pod_bandwidth=20.0)
    source, target, size = np.array([(0, 1, 100), (0, 2, 100), (3, 2, 100)]).T
    exchange = Exchange.of(source, target, size, 4, 1, 2).over(network)
    assert Clock(4).exchange("x", np.zeros(4), exchange).tolist() == pytest.approx([0.0, 6.0, 6.0, 0.0])
    assert network.all_gather_seconds(200.0, 2, 1) == pytest.approx(1.0)      # a pod
    assert network.all_gather_seconds(400.0, 4, 1) == pytest.approx(3 * 5.0)  # the ring is as slow as between pods
    same = Network(1, 1000.0, 100.0, 0.0, 0.0, nodes_per_pod=2)
    assert Clock(4).exchange("x", np.zeros(4), Exchange.of(source, target, size, 4, 1, 2).over(same)).tolist() == (
        pytest.approx([0.0, 2.0, 2.0, 0.0]))


def test_simulated_steps_take_longer_the_slower_pods_are_linked(tmp_path: Path) -> None:
    lengths = (np.full(1, 131_072), sample_lengths("prolong", 131_072, seed=3))
    seconds = []
    for bandwidth in (0.0, 50e9, 5e9, 1e9):
        path = tmp_path / "mine.toml"
        path.write_text(f'base = "dgx-h200"\nnodes_per_pod = 1\ninter_pod_bandwidth = {bandwidth}\n', encoding="utf-8")
        where = setting(LLAMA, read_cluster(path), gpus=16, context=131_072, tp=2, sequences=2)
        costs = Costs.of(LLAMA, where.cluster, where.tp, shipped_table("h200"))
        plan = PoolChoice("balanced", tolerance=0.05).step_plan(where, costs, StepDocuments(lengths))
        assert plan is not None
        seconds.append(execute(plan, costs).seconds)
    assert seconds[0] == seconds[1] < seconds[2] < seconds[3]  # 0 becomes 50 GB/s, as between nodes: one computation


def test_a_negative_bandwidth_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('base = "dgx-h200"\ninter_pod_bandwidth = -1\n', encoding="utf-8")
    with pytest.raises(ValueError, match="inter_pod_bandwidth"):
        read_cluster(path)
