"""Plans by levels: exact, within the tolerance or explained, flat where there are no levels, and few bytes cross.

Nodes in pods: what crosses pods is counted, planned for, and timed at the rate that a cluster file gives.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distca.cost.attention_time import AttentionTime, shipped_table
from distca.cost.latency_table import analytic_table
from distca.cost.network import Network, read_cluster
from distca.cost.work import pairs_of_shard
from distca.models import MODELS
from distca.planning.balance import balance, outline_of_nodes
from distca.planning.choose import plan_step
from distca.planning.levels import shed
from distca.planning.plan import Plan, server_work
from distca.planning.shard_cut import Prices
from distca.planning.tasks import TILE, tasks_at_home
from distca.planning.traffic import traffic_of_nics
from distca.simulate.clock import AllToAll, Clock
from distca.simulate.costs import Costs
from distca.simulate.execute import execute
from distca.simulate.setting import setting
from distca.simulate.strategies import PoolChoice, StepDocuments
from distca.workload.documents import sample_lengths
from distca.workload.layout import layout_from_rows
from distca.workload.packing import pack
from distca.workload.topology import Topology
from tests.support.plans import LAYOUT_KINDS, LayoutKind, covers_exactly_once, random_layout, random_speeds

LLAMA = MODELS["llama3-8b"]
SECONDS = AttentionTime.of(analytic_table(LLAMA, 550e12, max_kv_len=131_072), LLAMA)

seeds = st.integers(0, 2**32)
kinds = st.sampled_from(LAYOUT_KINDS)
tolerances = st.sampled_from([0.0, 0.02, 0.05, 1.0]) | st.floats(0, 1)


def random_topology(seed: int, num_servers: int) -> Topology:
    """Nodes of any sizes, their servers in any order, perhaps in pods."""
    rng = np.random.default_rng([seed, 7])
    hosts = rng.integers(0, max(num_servers // 2, 1), num_servers)
    pods = hosts // int(rng.integers(1, 4))
    return Topology.of_hosts([str(host) for host in hosts], [str(pod) for pod in pods])


def crossing_tokens(plan: Plan) -> tuple[int, int]:
    """Queries and keys that some node needs and does not own, each counted once per node, token by token."""
    assert plan.topology is not None
    node, layout, tasks = plan.topology.node, plan.layout, plan.tasks
    keys = layout.keys()
    home = {(int(d), t): int(node[r]) for d, start, stop, r in zip(
        keys.document, keys.start, keys.stop, keys.rank, strict=True) for t in range(start, stop)}
    q_needed, kv_needed = set(), set()
    for d, q0, q1, k0, k1, server in zip(tasks.document, tasks.q_start, tasks.q_stop, tasks.kv_start, tasks.kv_stop,
                                         tasks.server, strict=True):
        q_needed |= {(int(node[server]), int(d), t) for t in range(q0, q1) if home[int(d), t] != node[server]}
        kv_needed |= {(int(node[server]), int(d), t) for t in range(k0, k1) if home[int(d), t] != node[server]}
    return len(q_needed), len(kv_needed)


@settings(max_examples=150, deadline=None)
@given(seeds, kinds, st.integers(2, 8), st.integers(1, 2000), tolerances, st.integers(0, 2), st.booleans())
def test_every_pair_once_and_the_tolerance_holds_at_every_level_or_is_explained(
    seed: int, kind: LayoutKind, ranks: int, tokens_per_rank: int, tolerance: float, dedicated: int, uneven: bool
) -> None:
    layout = random_layout(seed, kind, ranks, tokens_per_rank)
    speed = random_speeds(seed, ranks, dedicated) if uneven else np.ones(ranks + dedicated)
    topology = random_topology(seed, ranks + dedicated)
    plan = balance(layout, LLAMA, tolerance=tolerance, speed=speed, topology=topology)
    assert covers_exactly_once(layout.lengths, plan.tasks)
    plan.validate()
    work, share = plan.work(), plan.speed / plan.speed.sum()
    for group in (np.arange(len(speed)), topology.node, topology.pod):
        cap = (1 + tolerance) * work.sum() * np.bincount(group, weights=share)
        assert plan.limit is not None or (np.bincount(group, weights=work) <= cap + 1e-6).all()
    if plan.limit is not None:
        assert "document" in plan.limit
        assert any(unit in plan.limit for unit in ("rank", "node", "pod", "outside"))


@settings(max_examples=60, deadline=None)
@given(seeds, kinds, st.integers(2, 8), st.integers(2500, 20_000), st.sampled_from([0.05, 0.15, 0.5]))
def test_divisible_work_is_always_balanced(
    seed: int, kind: LayoutKind, ranks: int, tokens_per_rank: int, tolerance: float
) -> None:
    """What an outer level leaves to the inner one is 0.4 of the tolerance: room for a tile of the longest document."""
    layout = random_layout(seed, kind, ranks, tokens_per_rank)
    plan = balance(layout, LLAMA, tolerance=tolerance, topology=random_topology(seed, ranks))
    share = plan.work().sum() / ranks
    if 0.4 * 0.4 * tolerance * share >= TILE * layout.lengths.max():
        assert plan.limit is None
        assert plan.work().max() <= (1 + tolerance) * share * (1 + 1e-9)


@settings(max_examples=40, deadline=None)
@given(seeds, kinds, st.integers(1, 8), st.integers(1, 3000))
def test_one_node_nodes_of_one_rank_and_no_topology_give_the_same_plan(
    seed: int, kind: LayoutKind, ranks: int, tokens_per_rank: int
) -> None:
    layout = random_layout(seed, kind, ranks, tokens_per_rank)
    flat = balance(layout, LLAMA)
    for ranks_per_node in (1, ranks, ranks + 3):
        plan = balance(layout, LLAMA, topology=Topology.regular(ranks, ranks_per_node))
        assert all(np.array_equal(getattr(plan.tasks, name), getattr(flat.tasks, name))
                   for name in plan.tasks.__slots__)
        assert plan.limit == flat.limit


@settings(max_examples=40, deadline=None)
@given(seeds, kinds, st.integers(2, 6), st.integers(1, 600))
def test_bytes_between_nodes_are_counted_once_per_node(
    seed: int, kind: LayoutKind, ranks: int, tokens_per_rank: int
) -> None:
    plan = balance(random_layout(seed, kind, ranks, tokens_per_rank), LLAMA, topology=random_topology(seed, ranks))
    queries, keys = crossing_tokens(plan)
    summary = plan.summary()
    q_bytes = LLAMA.q_token_bytes() + LLAMA.out_token_bytes()
    assert summary.bytes_between_nodes == queries * q_bytes + keys * LLAMA.kv_token_bytes()
    assert summary.bytes_between_nodes <= summary.bytes_total
    assert summary.bytes_between_nodes_max is not None
    assert summary.bytes_between_nodes_max <= summary.bytes_between_nodes


@settings(max_examples=25, deadline=None)
@given(seeds, kinds, st.integers(2, 8), st.integers(100, 2000))
def test_seconds_by_levels_are_exact_and_no_slower_than_at_home(
    seed: int, kind: LayoutKind, ranks: int, tokens_per_rank: int
) -> None:
    layout = random_layout(seed, kind, ranks, tokens_per_rank)
    plan = balance(layout, LLAMA, cost=SECONDS, topology=random_topology(seed, ranks))
    assert covers_exactly_once(layout.lengths, plan.tasks)
    plan.validate()
    summary = plan.summary()
    at_home = summary.work_max_over_mean_at_home
    assert plan.limit is not None or summary.work_max_over_mean <= 1.05 + 1e-9 or at_home <= 1.05 + 1e-9


@pytest.mark.parametrize(("placement", "most"), [("given", 0.65), ("balanced", 0.35)])
@pytest.mark.parametrize("seed", [0, 3])
def test_little_crosses_nodes_of_eight(placement: str, most: float, seed: int) -> None:
    """Against the flat plan of the same documents, whose ranks each fetch what they need for themselves."""
    lengths = sample_lengths("prolong", 64 * 65_536, seed=seed)
    topology = Topology.regular(64, 8)
    flat = balance(pack(lengths, ranks=64, placement=placement), LLAMA)
    layout = pack(lengths, ranks=64, placement=placement, topology=topology)
    assert (layout.tokens_per_rank() == 65_536).all()
    plan = balance(layout, LLAMA, topology=topology)
    plan.validate()
    matrix = flat.traffic().matrix_bytes(LLAMA)
    crossing = matrix[topology.node[:, None] != topology.node].sum()
    summary = plan.summary()
    assert summary.bytes_between_nodes is not None
    assert summary.bytes_between_nodes <= most * crossing
    assert summary.bytes_total <= 1.3 * matrix.sum()             # inside nodes, so that all NICs send
    assert summary.work_max_over_mean <= 1.05 + 1e-9
    through = traffic_of_nics(layout, plan.tasks, topology.node)
    if placement == "balanced":
        for by_rank in (through.sent_bytes(LLAMA), through.received_bytes(LLAMA)):
            assert by_rank.max() <= 3.1 * by_rank.mean()


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(("ranks", "seed"), [(16, 1), (32, 0), (64, 1)])
def test_calls_with_a_long_document_are_level_in_seconds(ranks: int, seed: int, backward: bool) -> None:
    """Tails of kernels and tasks with few queries and many keys included."""
    long = 2048 * ranks
    lengths = np.append(long, sample_lengths("prolong", ranks * 4096 - long, seed=seed))
    topology = Topology.regular(ranks, 8)
    layout = pack(lengths, ranks=ranks, placement="balanced", topology=topology)
    plan = balance(layout, LLAMA, cost=AttentionTime.of(shipped_table("h200"), LLAMA), backward=backward,
                   topology=topology)
    plan.validate()
    assert plan.summary().work_max_over_mean <= 1.052


PRICES = Prices(8.0, 2.0, pairs_of_shard)


@settings(max_examples=60, deadline=None)
@given(seeds, kinds, st.integers(2, 8), st.integers(500, 3000), st.floats(0.0, 0.3), st.booleans())
def test_only_surplus_is_shed(
    seed: int, kind: LayoutKind, ranks: int, tokens_per_rank: int, more: float, by_nodes: bool
) -> None:
    layout = random_layout(seed, kind, ranks, tokens_per_rank)
    tasks = tasks_at_home(layout)
    work = server_work(tasks, ranks, None)
    load = (1.0 + more) * work                                   # calls take longer than their tasks
    cap = np.full(ranks, 1.05 * load.mean())
    after = shed(tasks, load, cap, PRICES, np.arange(ranks) // 2 if by_nodes else None)
    assert covers_exactly_once(layout.lengths, after)
    assert (load + server_work(after, ranks, None) - work <= np.maximum(load, cap) * (1 + 1e-9)).all()
    moved = after.take(after.server != after.home)
    assert (load[moved.home] > cap[moved.home]).all()


@pytest.mark.parametrize(("cap", "leaves"), [(0.55, False), (0.38, True)])
def test_a_node_with_room_keeps_its_surplus(cap: float, leaves: bool) -> None:
    """Rank 0 has nearly twice the work of rank 1, on the same node; the other node has next to none."""
    layout = layout_from_rows([[4096], [2896, 1200], [128] * 32, [128] * 32])
    tasks = tasks_at_home(layout)
    load = server_work(tasks, 4, None)
    after = shed(tasks, load, np.full(4, cap * load.sum()), PRICES, np.array([0, 0, 1, 1]))
    assert covers_exactly_once(layout.lengths, after)
    assert (after.server != after.home).any() and (after.server // 2 != after.home // 2).any() == leaves


@settings(max_examples=40, deadline=None)
@given(seeds, kinds, st.integers(2, 8), st.integers(1, 3000))
def test_the_outline_of_nodes_crosses_as_much_as_the_plan(
    seed: int, kind: LayoutKind, ranks: int, tokens_per_rank: int
) -> None:
    layout, topology = random_layout(seed, kind, ranks, tokens_per_rank), random_topology(seed, ranks)
    if not topology.levels():
        return
    plan = balance(layout, LLAMA, topology=topology).summary()
    outline = outline_of_nodes(layout, LLAMA, topology).summary()
    assert outline.bytes_between_nodes == plan.bytes_between_nodes
    assert outline.bytes_between_nodes_max == plan.bytes_between_nodes_max


def test_a_node_s_ranks_may_be_anywhere_in_the_pool() -> None:
    """Hosts that alternate: renaming ranks renames the plan's servers and nothing else that is counted."""
    lengths = sample_lengths("prolong", 16 * 16_384, seed=1)
    layout = pack(lengths, ranks=16)
    alternating = Topology.of_hosts([f"host{rank % 2}" for rank in range(16)])
    plan = balance(layout, LLAMA, topology=alternating)
    plan.validate()
    assert plan.summary().work_max_over_mean <= 1.05 + 1e-9
    flat = replace(balance(layout, LLAMA), topology=alternating)
    ours, theirs = plan.summary().bytes_between_nodes, flat.summary().bytes_between_nodes
    assert ours is not None and theirs is not None and ours <= theirs


def test_a_topology_of_another_pool_is_refused() -> None:
    layout = pack([256, 256], ranks=2)
    with pytest.raises(ValueError, match="topology has 3 servers but the pool has 2; give the node of every server"):
        balance(layout, LLAMA, topology=Topology.regular(3, 2))


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("ranks_per_node", [2, 3, 4])
def test_a_step_is_planned_by_levels(stages: int, ranks_per_node: int) -> None:
    """Also where nodes do not divide a stage's ranks: every pair once, and every plan knows its nodes."""
    micro_batches = [sample_lengths("prolong", 4 * 16_384, seed=seed) for seed in range(3)]
    topology = Topology.regular(4 * stages, ranks_per_node)
    step = plan_step(micro_batches, LLAMA, num_data=4, layers=(2,) * stages, topology=topology)
    step.validate()
    assert all(plan.topology is topology for plan in step.plans)
    for plan in step.plans:
        assert plan.limit is not None or plan.summary().work_max_over_mean <= 1.05 + 1e-9


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
    exchange = AllToAll.of(source, target, size, 4, 1, 2).over(network)
    assert Clock(4).exchange("x", np.zeros(4), exchange).tolist() == pytest.approx([0.0, 6.0, 6.0, 0.0])
    assert network.all_gather_seconds(200.0, 2, 1) == pytest.approx(1.0)      # a pod
    assert network.all_gather_seconds(400.0, 4, 1) == pytest.approx(3 * 5.0)  # the ring is as slow as between pods
    same = Network(1, 1000.0, 100.0, 0.0, 0.0, nodes_per_pod=2)
    assert Clock(4).exchange("x", np.zeros(4), AllToAll.of(source, target, size, 4, 1, 2).over(same)).tolist() == (
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
