"""Events against times worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from distca.cost.latency_table import analytic_table
from distca.simulate.costs import Costs
from distca.simulate.timeline import Clock, Exchange, Row, run_layers
from distca.spec import ClusterShape, ModelShape

MODEL = ModelShape("m", 2, 256, 8, 2, 32, 512, 1000)
# 100 bytes a second between nodes of one pool rank, 1000 inside, no latency
SLOW = ClusterShape("slow", "g", 1, 1e12, 1e12, 1e12, 1e12, 1e12, 1000.0, 100.0, 0.0, 0.0)


def _costs(cluster: ClusterShape = SLOW) -> Costs:
    return Costs.of(MODEL, cluster, 1, analytic_table(MODEL, 1e12))


def _exchange(edges: list[tuple[int, int, int]], num_ranks: int, cluster: ClusterShape = SLOW) -> Exchange:
    source, target, size = np.array(edges, dtype=np.int64).reshape(-1, 3).T
    return Exchange.of(source, target, size, num_ranks, _costs(cluster))


def test_a_receiver_waits_for_its_last_sender_and_for_its_own_link():
    exchange = _exchange([(0, 2, 100), (1, 2, 300)], 3)
    arrival = Clock(3).exchange("x", np.array([0.0, 1.0, 0.0]), exchange)
    assert arrival.tolist() == [0.0, 1.0, 4.0]  # rank 1 sends from 1 to 4; the receiver's 400 bytes take 4 seconds
    arrival = Clock(3).exchange("x", np.array([0.0, 2.5, 0.0]), exchange)
    assert arrival[2] == 5.5                    # now the last sender is what it waits for


def test_both_directions_run_at_once_and_a_link_serves_in_turn():
    clock = Clock(2)
    swap = _exchange([(0, 1, 100), (1, 0, 100)], 2)
    assert clock.exchange("x", np.zeros(2), swap).tolist() == [1.0, 1.0]
    assert clock.exchange("y", np.zeros(2), swap).tolist() == [2.0, 2.0]  # the NIC is taken until 1


def test_ranks_of_one_node_use_their_own_link():
    node = ClusterShape("n", "g", 2, 1e12, 1e12, 1e12, 1e12, 1e12, 1000.0, 100.0, 0.0, 0.0)
    arrival = Clock(4).exchange("x", np.zeros(4), _exchange([(0, 1, 100), (0, 2, 100)], 4, node))
    assert arrival.tolist() == pytest.approx([0.0, 0.1, 1.0, 0.0])


def test_what_stays_on_its_rank_is_no_message():
    exchange = _exchange([(0, 0, 500), (1, 0, 0)], 2)
    assert exchange.links == () and exchange.sent_bytes.sum() == 0


def _row(name: str, linear: float, attention: float, exchange: Exchange) -> Row:
    two = np.ones(2)
    return Row(name, np.zeros(2), linear / 2 * two, linear / 2 * two, attention * two, exchange, exchange)


def test_ping_pong_hides_what_one_row_alone_waits_for():
    swap = _exchange([(0, 1, 100), (1, 0, 100)], 2)  # a second each way
    none = np.zeros(2)
    single, double = Clock(2), Clock(2)
    alone = run_layers(single, [_row("row", 4.0, 4.0, swap)], 3, first=none, last=none)
    assert alone[0].tolist() == [3 * (4 + 4) + 3 * 2.0] * 2  # each layer waits for both exchanges
    half = _exchange([(0, 1, 50), (1, 0, 50)], 2)
    rows = [_row(name, 2.0, 2.0, half) for name in ("ping", "pong")]
    ends = run_layers(double, rows, 3, first=none, last=none)
    assert np.max(ends) == pytest.approx(3 * (4 + 4))        # all hidden
    assert double.busy.tolist() == single.busy.tolist() == [24.0, 24.0]


def test_ping_pong_shows_what_is_too_long_to_hide():
    long = _exchange([(0, 1, 300), (1, 0, 300)], 2)          # 3 seconds behind segments and attention of 2
    rows = [_row(name, 2.0, 2.0, long) for name in ("ping", "pong")]
    ends = run_layers(Clock(2), rows, 3, first=np.zeros(2), last=np.zeros(2))
    assert np.max(ends) > 3 * 8 + 1


def test_collectives_wait_for_their_group_alone():
    clock = Clock(4)
    runs = np.ones(4, dtype=bool)
    done = clock.collective("gather", np.array([0.0, 3.0, 1.0, 2.0]), np.full(4, 10.0), 2, runs)
    assert done.tolist() == [13.0, 13.0, 12.0, 12.0]


def test_what_travels_beside_the_step_takes_what_is_left_of_the_link():
    clock = Clock(2)
    clock.background("reduce", np.zeros(2), np.array([3.0, 0.0]))
    clock.exchange("x", np.ones(2), _exchange([(0, 1, 200)], 2))  # not delayed by it, and two seconds of the link
    assert clock.send_free[1].tolist() == [3.0, 0.0]
    assert clock.finish("optimizer", np.zeros(2)) == 5.0


def test_spans_tell_the_same_times_and_name_the_waiting():
    clock = Clock(2, record=True)
    swap = _exchange([(0, 1, 100)], 2)
    done = clock.compute("linear", np.zeros(2), np.array([1.0, 2.0]))
    there = clock.exchange("keys", done, swap)
    clock.compute("attention", there, np.array([5.0, 5.0]), attention=True)
    seconds = clock.finish("optimizer", np.zeros(2))
    traces = clock.traces()
    assert seconds == 7.0 and [trace.rank for trace in traces] == [0, 1]
    assert traces[0].seconds("linear") == 1.0 and traces[0].seconds("attention") == 5.0
    assert traces[1].exposed_seconds == 0.0  # the keys came at 2, when its own segment ended
    assert traces[0].exposed_seconds == 1.0  # for the others at the end
    assert [span.num_bytes for span in traces[0].spans if span.lane == "network"] == [100]
