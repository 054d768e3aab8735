"""The alpha-beta network against a message-by-message count."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distca.cost.network import Network
from distca.spec import cluster_named

NETWORK = Network.of(cluster_named("dgx-h200"))


def test_one_message():
    assert NETWORK.seconds(450e9, same_node=True) == pytest.approx(1 + 2e-6)
    assert NETWORK.seconds(50e9, same_node=False) == pytest.approx(1 + 6e-6)
    assert NETWORK.seconds(0, same_node=False) == 0


@given(st.integers(1, 9), st.integers(1, 4), st.data())
def test_exchange_is_each_ranks_busiest_direction_of_its_busiest_link(num_ranks, per_node, data):
    entry = st.integers(0, 10**9)
    matrix = np.array(data.draw(st.lists(entry, min_size=num_ranks**2, max_size=num_ranks**2))).reshape(num_ranks, -1)
    actual = NETWORK.exchange_seconds(matrix, per_node)
    assert actual.shape == (num_ranks,)
    for rank in range(num_ranks):
        totals = {(same, way): 0 for same in (True, False) for way in ("out", "in")}
        for other in set(range(num_ranks)) - {rank}:
            same = rank // per_node == other // per_node
            totals[same, "out"] += matrix[rank, other]
            totals[same, "in"] += matrix[other, rank]
        expected = max(NETWORK.seconds(total, same) for (same, _), total in totals.items())
        assert actual[rank] == pytest.approx(expected)


def test_exchange_uses_the_clusters_nodes_by_default():
    matrix = np.zeros((16, 16))
    matrix[0, 7] = 450e9
    matrix[1, 8] = 50e9
    seconds = NETWORK.exchange_seconds(matrix)
    np.testing.assert_allclose(seconds[[0, 7]], 1 + 2e-6)
    np.testing.assert_allclose(seconds[[1, 8]], 1 + 6e-6)
    assert np.count_nonzero(seconds) == 4


def test_rings():
    # 8 ranks in a node: 7 steps of an eighth of the buffer over NVLink.
    assert NETWORK.all_gather_seconds(8 * 450e9, 8) == pytest.approx(7 * (1 + 2e-6))
    # 16 ranks on two nodes: 8 rings over 8 NICs are 400 GB/s, less than NVLink's 450.
    assert NETWORK.all_gather_seconds(16 * 400e9, 16) == pytest.approx(15 * (1 + 6e-6))
    # 4 ranks on as many nodes: each has its own NIC only.
    assert NETWORK.all_gather_seconds(4 * 50e9, 4, gpus_per_node=1) == pytest.approx(3 * (1 + 6e-6))
    assert NETWORK.reduce_scatter_seconds(1e9, 16) == NETWORK.all_gather_seconds(1e9, 16)
    assert NETWORK.all_reduce_seconds(1e9, 16) == 2 * NETWORK.all_gather_seconds(1e9, 16)
    assert NETWORK.all_reduce_seconds(1e9, 1) == 0


@pytest.mark.parametrize("call, message", [
    (lambda: NETWORK.exchange_seconds(np.zeros((2, 3))), r"shape \(2, 3\)"),
    (lambda: NETWORK.exchange_seconds([[0, -1], [0, 0]]), "negative"),
    (lambda: NETWORK.exchange_seconds(np.zeros((2, 2)), 0), "gpus_per_node is 0"),
    (lambda: NETWORK.all_gather_seconds(1, 0), "num_ranks is 0"),
    (lambda: Network(8, 0, 1, 0, 0), "intra_node_bandwidth is 0"),
    (lambda: Network(8, 1, 1, 0, -1), "inter_node_latency_seconds is -1"),
])
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
