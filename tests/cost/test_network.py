"""The alpha-beta network by hand, and networks that a profile measured."""

from dataclasses import asdict, replace
from pathlib import Path

import pytest

from distca.cost.latency_table import LatencyTable, analytic_table
from distca.cost.network import MeasuredNetwork, Network
from distca.models import model_named
from distca.spec import cluster_named

NETWORK = Network.of(cluster_named("dgx-h200"))


def test_rings() -> None:
    # 8 ranks in a node: 7 steps of an eighth of the buffer over NVLink.
    assert NETWORK.all_gather_seconds(8 * 450e9, 8) == pytest.approx(7 * (1 + 2e-6))
    # 16 ranks on two nodes: 8 rings over 8 NICs are 400 GB/s, less than NVLink's 450.
    # Each ring crosses from node to node once; its other 14 sends have NVLink's latency.
    assert NETWORK.all_gather_seconds(16 * 400e9, 16) - 15 == pytest.approx(6e-6 + 14 * 2e-6)
    # 4 ranks on as many nodes: each has its own NIC only.
    assert NETWORK.all_gather_seconds(4 * 50e9, 4, gpus_per_node=1) == pytest.approx(3 * (1 + 6e-6))
    assert NETWORK.all_gather_seconds(4 * 50e9, 4, gpus_per_node=1) - 3 == pytest.approx(3 * 6e-6)
    assert NETWORK.all_gather_seconds(1e9, 1) == 0


def table_with(network: object) -> LatencyTable:
    table = analytic_table(model_named("llama3-8b"), 550e12)
    return replace(table, metadata={**table.metadata, "network": network})


def test_a_profile_replaces_the_links_it_measured() -> None:
    cluster = cluster_named("dgx-h200")
    plain = Network.of(cluster)
    assert Network.measured(analytic_table(model_named("llama3-8b"), 550e12), cluster) == plain
    assert Network.measured(table_with(None), cluster) == plain
    about: dict[str, object] = {"backend": "nccl", "num_ranks": 8, "latency_seconds": 3e-5, "bandwidth": 3e11}
    inside = Network.measured(table_with(about), cluster)
    assert (inside.intra_node_bandwidth, inside.intra_node_latency_seconds) == (3e11, 3e-5)
    assert (inside.inter_node_bandwidth, inside.inter_node_latency_seconds) == (50e9, 6e-6)
    between = Network.measured(table_with(about | {"num_ranks": 16, "bandwidth": 4e10}), cluster)
    assert (between.inter_node_bandwidth, between.inter_node_latency_seconds) == (4e10, 3e-5)
    assert between.intra_node_bandwidth == plain.intra_node_bandwidth


@pytest.mark.parametrize("about", [
    [], {}, {"num_ranks": 1, "latency_seconds": 0.0, "bandwidth": 1.0},
    {"num_ranks": 2, "latency_seconds": -1.0, "bandwidth": 1.0},
    {"num_ranks": 2, "latency_seconds": 0.0, "bandwidth": 0},
    {"num_ranks": True, "latency_seconds": 0.0, "bandwidth": 1.0}])
def test_a_network_that_is_none_is_refused(about: object) -> None:
    with pytest.raises(ValueError, match=r"latency table .* has network .*; give .*; or profile again"):
        Network.measured(table_with(about), cluster_named("dgx-h200"))


def test_an_exchange_takes_its_latency_and_its_bytes() -> None:
    measured = MeasuredNetwork.of(table_with({"num_ranks": 2, "latency_seconds": 1e-3, "bandwidth": 1e9}))
    assert measured is not None
    assert measured.seconds(0) == 0.0 and measured.seconds(1e6) == pytest.approx(2e-3)


def test_what_profile_writes_is_read_back(tmp_path: Path) -> None:
    probe = pytest.importorskip("distca.profiling.network")
    cost = probe.ExchangeCost("gloo", 2, 1e-4, 2e9, (4096,), (1e-4,))
    table = analytic_table(model_named("llama3-8b"), 550e12)
    replace(table, metadata={"network": asdict(cost)}).save(tmp_path / "table.json")
    found = Network.measured(LatencyTable.load(tmp_path / "table.json"), cluster_named("dgx-h200"))
    assert (found.intra_node_bandwidth, found.intra_node_latency_seconds) == (2e9, 1e-4)
