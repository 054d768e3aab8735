"""Events against times worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from distca.cost.network import Network
from distca.simulate.calls import PoolCall
from distca.simulate.clock import NIC, AllToAll, Clock, Ring

SLOW = Network(1, 1000.0, 100.0, 0.0, 0.0)  # 100 bytes a second between nodes, 1000 inside, no latency


def _exchange(edges: list[tuple[int, int, int]], num_ranks: int, ranks_per_node: int = 1) -> AllToAll:
    source, target, size = np.array(edges, dtype=np.int64).reshape(-1, 3).T
    return AllToAll.of(source, target, size, num_ranks, ranks_per_node).over(SLOW)


def test_a_receiver_waits_for_its_last_sender_and_for_its_own_link() -> None:
    exchange = _exchange([(0, 2, 100), (1, 2, 300)], 3)
    arrival = Clock(3).exchange("x", np.array([0.0, 1.0, 0.0]), exchange)
    assert arrival.tolist() == [0.0, 1.0, 4.0]  # rank 1 sends from 1 to 4; the receiver's 400 bytes take 4 seconds
    arrival = Clock(3).exchange("x", np.array([0.0, 2.5, 0.0]), exchange)
    assert arrival[2] == 5.5                    # now the last sender is what it waits for


def test_both_directions_run_at_once_and_a_link_serves_in_turn() -> None:
    clock = Clock(2)
    swap = _exchange([(0, 1, 100), (1, 0, 100)], 2)
    assert clock.exchange("x", np.zeros(2), swap).tolist() == [1.0, 1.0]
    assert clock.exchange("y", np.zeros(2), swap).tolist() == [2.0, 2.0]  # the NIC is taken until 1


def test_ranks_of_one_node_use_their_own_link() -> None:
    arrival = Clock(4).exchange("x", np.zeros(4), _exchange([(0, 1, 100), (0, 2, 100)], 4, ranks_per_node=2))
    assert arrival.tolist() == pytest.approx([0.0, 0.1, 1.0, 0.0])


def test_what_stays_on_its_rank_is_no_message() -> None:
    exchange = _exchange([(0, 0, 500), (1, 0, 0)], 2)
    assert exchange.links == () and exchange.sent_bytes.sum() == 0


def _layers(clock: Clock, rows: int, linear: float, attention: float, exchange: AllToAll, num_layers: int = 3) -> float:
    """Segments and calls of all rows in turn, as a tick runs them."""
    call = PoolCall((("attention forward", np.full(2, attention)),), exchange, exchange)
    ready = [np.zeros(2)] * rows
    for layer in range(num_layers + 1):
        seconds = np.full(2, linear if 0 < layer < num_layers else linear / 2)
        ready = [clock.compute("layers", "linear", at, seconds) for at in ready]
        if layer < num_layers:
            there = [call.start(clock, at) for at in ready]
            ready = [call.serve(clock, at) for at in there]
    return float(np.max(ready))


def test_ping_pong_hides_what_one_row_alone_waits_for() -> None:
    swap = _exchange([(0, 1, 100), (1, 0, 100)], 2)  # a second each way
    single, double = Clock(2), Clock(2)
    assert _layers(single, 1, 4.0, 4.0, swap) == 3 * (4 + 4) + 3 * 2.0  # each layer waits for both exchanges
    half = _exchange([(0, 1, 50), (1, 0, 50)], 2)
    assert _layers(double, 2, 2.0, 2.0, half) == pytest.approx(3 * (4 + 4))  # all hidden
    assert double.busy.tolist() == single.busy.tolist() == [24.0, 24.0]


def test_ping_pong_shows_what_is_too_long_to_hide() -> None:
    long = _exchange([(0, 1, 300), (1, 0, 300)], 2)          # 3 seconds behind segments and attention of 2
    assert _layers(Clock(2), 2, 2.0, 2.0, long) > 3 * 8 + 1


def _ring(backward: bool, seconds: list[float], lead: list[float], tail: float, travel: float) -> Ring:
    ranks = len(seconds)
    return Ring(2, np.ones(ranks, dtype=bool), np.full(ranks, backward), np.array(seconds), np.array(lead),
                np.full(ranks, tail), np.full(ranks, travel))


def test_a_ring_waits_for_its_group_alone() -> None:
    ring = _ring(False, [1.0] * 4, [11.0] * 4, 10.0, 10.0)       # all keys first, then a second of attention
    clock = Clock(4)
    assert clock.ring(np.array([0.0, 3.0, 1.0, 2.0]), ring).tolist() == [14.0, 14.0, 13.0, 13.0]
    assert clock.send_free[NIC].tolist() == [13.0, 13.0, 12.0, 12.0]
    assert clock.attention.tolist() == [1.0] * 4


def test_a_backward_ring_scatters_behind_the_groups_last_attention() -> None:
    ring = _ring(True, [1.0, 4.0, 1.0, 1.0], [0.0] * 4, 3.0, 10.0)
    assert Clock(4).ring(np.zeros(4), ring).tolist() == [10.0, 10.0, 10.0, 10.0]  # the link alone takes 10
    ring = _ring(True, [1.0, 8.0, 1.0, 1.0], [0.0] * 4, 3.0, 5.0)
    assert Clock(4).ring(np.zeros(4), ring).tolist() == [11.0, 11.0, 5.0, 5.0]


def test_a_message_between_stages_waits_for_its_receiver_but_holds_no_link() -> None:
    clock = Clock(2)
    sends = np.array([True, False])
    arrival, sent = clock.shift("send", np.array([1.0, 0.0]), np.array([0.0, 5.0]), np.full(2, 2.0), sends, 1)
    assert arrival.tolist() == [0.0, 7.0] and sent.tolist() == [7.0, 0.0]
    assert clock.send_free[NIC].tolist() == [3.0, 0.0]


def test_what_travels_beside_the_step_takes_what_is_left_of_the_link() -> None:
    clock = Clock(2)
    clock.background("reduce", np.zeros(2), np.array([3.0, 0.0]))
    clock.exchange("x", np.ones(2), _exchange([(0, 1, 200)], 2))  # not delayed by it, and two seconds of the link
    assert clock.send_free[NIC].tolist() == [3.0, 0.0]
    assert clock.finish(np.zeros(2)) == 5.0


def test_spans_tell_the_same_times_and_name_the_waiting() -> None:
    clock = Clock(2, record=True)
    swap = _exchange([(0, 1, 100)], 2)
    done = clock.compute("layers", "linear", np.zeros(2), np.array([1.0, 2.0]))
    there = clock.exchange("to servers", done, swap)
    clock.compute("attention forward", "attention", there, np.array([5.0, 3.0]))
    clock.hold(np.array([7.0, 0.0]), "neighbour")
    seconds = clock.finish(np.array([1.0, 1.0]))
    traces = clock.traces()
    assert seconds == 8.0 and [trace.rank for trace in traces] == [0, 1]
    assert traces[0].seconds("linear") == 1.0 and traces[0].seconds("attention") == 5.0
    assert traces[1].exposed_seconds == 0.0  # the keys came at 2, when its own segment ended
    assert [(span.name, span.seconds) for span in traces[0].spans if span.lane == "wait"] == [("neighbour", 1.0)]
    assert [span.num_bytes for span in traces[0].spans if span.lane == "network"] == [100]
    assert [trace.seconds("optimizer") for trace in traces] == [1.0, 3.0]  # it begins with the others' last gradients
