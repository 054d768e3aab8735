"""Nodes and pods of a pool, and placement that keeps documents inside them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distca.models import MODELS
from distca.planning.balance import balance
from distca.spec import cluster_named
from distca.workload import slicing
from distca.workload.packing import pack
from distca.workload.sequences import Source, batch_sequences
from distca.workload.topology import Topology
from tests.support.plans import random_lengths


def test_servers_fill_nodes_and_nodes_fill_pods() -> None:
    topology = Topology.regular(10, 2, 2)
    assert topology.node.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert topology.pod.tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2]
    assert [level.tolist() for level in topology.levels()] == [topology.pod.tolist(), topology.node.tolist()]
    assert (topology.num_nodes, topology.ranks_per_node) == (5, 2)


def test_hosts_are_numbered_as_they_come() -> None:
    topology = Topology.of_hosts(["b", "a", "b", "c"])
    assert topology.node.tolist() == [0, 1, 0, 2]
    assert topology.ranks_per_node == 2


@pytest.mark.parametrize("topology", [Topology.regular(4, 4), Topology.regular(4, 1), Topology.regular(1, 8)])
def test_a_pool_without_levels_has_none(topology: Topology) -> None:
    assert topology.levels() == ()


def test_the_pool_of_a_tp_index_has_fewer_ranks_to_a_node() -> None:
    cluster = cluster_named("dgx-h200")
    assert Topology.of_cluster(cluster, 32, tp=1).ranks_per_node == 8
    assert Topology.of_cluster(cluster, 32, tp=4).ranks_per_node == 2
    assert Topology.of_cluster(cluster, 32, tp=8).levels() == ()


def test_a_node_in_two_pods_is_refused() -> None:
    with pytest.raises(ValueError, match="node 0 is in several pods; put all its servers into one"):
        Topology(np.array([0, 0]), np.array([0, 1]))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 9), st.integers(1, 4), st.integers(0, 2), st.integers(1, 3000))
def test_every_token_has_one_home_and_every_rank_as_many(
    seed: int, ranks: int, ranks_per_node: int, nodes_per_pod: int, tokens_per_rank: int
) -> None:
    lengths = random_lengths(seed, ranks * tokens_per_rank)
    layout = pack(lengths, ranks=ranks, placement="balanced",
                  topology=Topology.regular(ranks, ranks_per_node, nodes_per_pod))
    layout.validate()
    assert (layout.tokens_per_rank() == tokens_per_rank).all()


def test_documents_that_fit_a_node_stay_in_one() -> None:
    """Eight documents of two ranks' tokens each and equal work fill four nodes of four ranks, two to a node."""
    layout = pack([2048] * 8, ranks=16, placement="balanced", topology=Topology.regular(16, 4))
    nodes = [np.unique(layout.rank[layout.document == document] // 4) for document in range(8)]
    assert [len(found) for found in nodes] == [1] * 8


def test_one_node_places_as_no_topology_does() -> None:
    lengths = random_lengths(5, 8 * 1000)
    flat = pack(lengths, ranks=8, placement="balanced")
    layout = pack(lengths, ranks=8, placement="balanced", topology=Topology.regular(8, 8))
    assert all(np.array_equal(getattr(layout, name), getattr(flat, name))
               for name in ("document", "start", "stop", "rank"))


@pytest.mark.parametrize("ranks_per_node", [1, 2, 8])
def test_nodes_of_a_long_document_send_about_the_same(ranks_per_node: int) -> None:
    """All nodes need the document's first keys: no node and no rank has to send most of them."""
    tokens, ranks = 65_536 // ranks_per_node, 16 * ranks_per_node
    lengths = [4 * 65_536] + [512] * (12 * 65_536 // 512)
    layout = pack(lengths, ranks=ranks, placement="balanced", topology=Topology.regular(ranks, ranks_per_node))
    layout.validate()
    assert (layout.tokens_per_rank() == tokens).all()
    long = np.flatnonzero(layout.document == 0)
    node = layout.rank // ranks_per_node
    reach = np.zeros(16)                                         # [nodes] keys that a node needs of the long document
    np.maximum.at(reach, node[long], layout.stop[long])
    needing = (reach[None, :] >= layout.stop[long][:, None]).sum(axis=1) - 1  # other nodes that need a slice
    sent = np.bincount(layout.rank[long], weights=needing * (layout.stop - layout.start)[long], minlength=ranks)
    by_node = sent.reshape(16, -1).sum(axis=1)
    assert (reach > 0).sum() >= 8                                # it needs many nodes' work
    assert by_node.max() <= 2 * by_node[reach > 0].mean()
    assert sent.max() <= 2.5 * sent[np.repeat(reach > 0, ranks_per_node)].mean()


def test_early_keys_of_a_long_document_use_all_nics() -> None:
    """Each node has few of its first keys: neighbours hold them on other local ranks, whose NICs send and receive."""
    lengths = [32_768] + [256] * (12 * 8192 // 256)
    topology = Topology.regular(128, 8)
    layout = pack(lengths, ranks=128, placement="balanced", topology=topology)
    layout.validate()
    early = (layout.document == 0) & (layout.stop <= 16_384)
    held = np.bincount(layout.rank[early] % 8, weights=(layout.stop - layout.start)[early], minlength=8)
    assert len(np.unique(topology.node[layout.rank[early]])) >= 8
    assert held.max() <= 1.5 * held.mean()


def test_documents_are_not_cut_to_fill_the_last_percent_of_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small slice brings all keys before it to its node."""
    lengths = np.concatenate(batch_sequences(Source("pretrain"), 524_288, 4, (0, 0)))
    topology = Topology.regular(256, 8)

    def crossing() -> float:
        layout = pack(lengths, ranks=256, placement="balanced", topology=topology)
        plan = balance(layout, MODELS["llama3-8b"], topology=topology)
        between = plan.traffic_between_nodes()
        assert between is not None
        return float(between.sent_bytes(plan.model).sum())

    sent = crossing()
    monkeypatch.setattr(slicing, "_WORTH_A_SLICE", 0.0)
    assert sent < 0.95 * crossing()
