"""Step plans on the clock, against times worked out by hand and rules that hold for any step."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from distca.baselines import at_home_step, per_document_cp_step
from distca.cost.latency_table import analytic_table
from distca.cost.work import activation_bytes
from distca.models import model_named
from distca.planning.choose import plan_step
from distca.planning.orders import one_forward_one_backward, same_phase_ticks
from distca.planning.plan import server_work
from distca.planning.step import StepPlan
from distca.simulate.calls import PlanCosts
from distca.simulate.costs import Costs
from distca.simulate.execute import execute
from distca.simulate.memory import peak_live
from distca.spec import cluster_named
from distca.trace import LANES

MODEL = model_named("llama3-8b")
COSTS = Costs.of(MODEL, cluster_named("dgx-h200"), 8, analytic_table(MODEL, 550e12))
FREE = COSTS.without_network()
EVEN = np.full(8, 8192)                                          # a micro-batch over two data ranks
SKEWED = np.array([57_344, *[1024] * 8])


def _seconds(tokens: float, backward: bool) -> float:
    return sum(float(part[0]) for part in COSTS.segment_seconds(np.array([tokens]), backward))


def test_one_rank_alone_takes_the_sum_of_its_parts() -> None:
    step = plan_step([np.array([16_384] * 2)], MODEL, num_data=1, layers=(4,), tp=8, ping_pong=False,
                     cost=COSTS.attention)
    plan = step.plans[0]
    wanted = sum(4 * (_seconds(32_768.0, way) + float(server_work(plan.tasks, 1, COSTS.attention, way)[0]))
                 + float(COSTS.head_seconds(np.array([32_768.0]), way)[0]) for way in (False, True))
    found = execute(step, FREE)
    assert found.seconds == pytest.approx(wanted + COSTS.optimizer_seconds((4,), 1)[0])
    assert found.busy_share == pytest.approx(1.0)


def test_a_pipeline_of_equal_micro_batches_takes_as_long_as_1f1b_says() -> None:
    step = at_home_step([EVEN] * 8, MODEL, num_data=2, layers=(8,) * 4, tp=8)
    attention = sum(float(server_work(step.plans[0].tasks, 2, COSTS.attention, way)[0]) for way in (False, True))
    tokens = EVEN.sum() / 2
    slot = 8 * (_seconds(tokens, False) + _seconds(tokens, True) + attention)
    head = sum(float(COSTS.head_seconds(np.array([tokens]), way)[0]) for way in (False, True))
    assert execute(step, FREE).seconds == pytest.approx((8 + 3) * slot + 8 * head, rel=0.01)


def test_gathering_keys_takes_the_time_of_the_ring() -> None:
    step = per_document_cp_step([np.full(8, 65_536)], MODEL, num_data=8, layers=(32,), tp=8)
    waits = PlanCosts(step, COSTS.attention, hides=False)
    with_keys, without = (execute(step, costs, plan_costs=waits).seconds for costs in (COSTS, FREE))
    gathered = 8 * 65_536 * MODEL.kv_token_bytes(8)
    assert with_keys - without == pytest.approx(2 * 32 * 7 / 8 * gathered / 50e9, rel=0.05)


def test_ping_pong_is_no_slower_than_a_single_stream() -> None:
    options: dict[str, Any] = {"num_data": 4, "layers": (32,), "tp": 8, "cost": COSTS.attention}
    lengths = np.array([131_072, *[2048] * 64])
    double, single = (plan_step([lengths], MODEL, ping_pong=both, **options) for both in (True, False))
    assert execute(double, COSTS).seconds < execute(single, COSTS).seconds


def test_stages_with_fewer_layers_serve_and_add_nothing() -> None:
    """The same layers however they lie on two stages: all linear seconds are there, and shared attention is level."""
    steps = {layers: plan_step([SKEWED] * 4, MODEL, num_data=2, layers=layers, tp=8, cost=COSTS.attention)
             for layers in ((4, 4), (5, 3), (2, 6))}
    found = {layers: execute(step, FREE, record=True) for layers, step in steps.items()}
    for layers, done in found.items():
        linear = [trace.seconds("linear") for trace in done.traces]
        head = sum(float(COSTS.head_seconds(np.array([32_768.0]), way)[0]) for way in (False, True))
        each = _seconds(32_768.0, False) + _seconds(32_768.0, True)
        assert linear == pytest.approx([4 * layers[0] * each] * 2 + [4 * (layers[1] * each + head)] * 2)
        assert done.attention_seconds.sum() == pytest.approx(found[4, 4].attention_seconds.sum(), rel=0.05)
        assert done.work_max_over_mean < 1.1
    assert found[4, 4].seconds < found[2, 6].seconds


def test_dedicated_servers_only_serve() -> None:
    step = plan_step([SKEWED], MODEL, num_data=2, layers=(4,), tp=8, speed=np.ones(3), cost=COSTS.attention)
    done = execute(step, COSTS, record=True)
    assert len(done.traces) == len(done.attention_seconds) == len(done.memory.total) == 3
    server = done.traces[2]
    assert {span.lane for span in server.spans} == {"attention", "wait", "network"}
    assert server.seconds("attention") == pytest.approx(done.attention_seconds.sum() / 3, rel=0.1)
    assert done.memory.states[2] == done.memory.activations[2] == 0 and done.memory.buffers[2] > 0
    alone = plan_step([SKEWED], MODEL, num_data=2, layers=(4,), tp=8, cost=COSTS.attention)
    assert done.seconds < execute(alone, COSTS).seconds


def test_forward_and_backward_go_by_their_own_plans() -> None:
    step = plan_step([SKEWED], MODEL, num_data=4, layers=(2,), tp=8, tolerance=0.0, cost=COSTS.attention)
    expected = sum(2 * server_work(depths[0].tasks, 4, COSTS.attention, backward)
                   for tick, backward in ((0, False), (1, True)) for depths in step.plans_of(0)[tick])
    np.testing.assert_allclose(execute(step, COSTS).attention_seconds, expected)


@pytest.mark.parametrize("step", [
    plan_step([SKEWED] * 3, MODEL, num_data=2, layers=(3, 2), tp=8), at_home_step([SKEWED] * 3, MODEL, num_data=2,
                                                                                   layers=(3, 2), tp=8),
    per_document_cp_step([SKEWED] * 3, MODEL, num_data=2, layers=(3, 2), tp=8)], ids=["pool", "home", "ring"])
def test_lanes_mean_what_they_mean_in_the_runtime(step: StepPlan) -> None:
    done = execute(step, COSTS, record=True)
    assert max(span.stop_seconds for trace in done.traces for span in trace.spans) == pytest.approx(done.seconds)
    for trace in done.traces:
        lanes = {lane: [span for span in trace.spans if span.lane == lane] for lane in LANES}
        assert sum(map(len, lanes.values())) == len(trace.spans)
        assert sorted(span.name for span in lanes["pipeline"]) == sorted(
            f"{way} {number}" for way in ("forward", "backward") for number in range(3))
        assert {span.name for span in lanes["bubble"]} <= {"bubble"}
        assert {span.name for span in lanes["linear"]} == {"layers"}
        assert {span.name for span in lanes["attention"]} == {"attention forward", "attention backward"}
        assert {span.name for span in lanes["wait"]} <= {"exchange", "neighbour"}
        assert {span.name for span in lanes["network"]} <= {
            "to servers", "to homes", "gather keys", "scatter key gradients", "send activations", "send gradients",
            "gather weights", "reduce gradients"}
        stream = sorted((span.start_seconds, span.stop_seconds) for lane in ("linear", "attention", "wait", "optimizer")
                        for span in lanes[lane])
        assert all(later[0] >= earlier[1] - 1e-9 for earlier, later in pairwise(stream))
        ticks = sorted((span.start_seconds, span.stop_seconds) for lane in ("pipeline", "bubble")
                       for span in lanes[lane])
        assert all(later[0] >= earlier[1] - 1e-9 for earlier, later in pairwise(ticks))
        busy = sum(span.seconds for lane in ("linear", "attention") for span in lanes[lane])
        assert busy <= sum(stop - start for start, stop in ticks) + 1e-9
    assert any(span.lane == "bubble" for trace in done.traces for span in trace.spans) == step.is_shared


def test_live_micro_batches_are_those_of_the_schedule() -> None:
    tokens = np.full((8, 1), 100)
    assert peak_live(one_forward_one_backward(4, 8), (1,) * 4, tokens).ravel().tolist() == [400, 300, 200, 100]
    assert peak_live(same_phase_ticks(4, 8), (1,) * 4, tokens).ravel().tolist() == [700, 500, 300, 100]


def test_memory_follows_the_layers_of_a_stage() -> None:
    held = execute(plan_step([EVEN] * 2, MODEL, num_data=2, layers=(5, 3), tp=8), COSTS).memory
    per_layer = activation_bytes(EVEN.sum() / 2, MODEL, 8)
    assert held.activations.tolist() == pytest.approx([2 * 5 * per_layer] * 2 + [3 * per_layer] * 2)
    assert (held.states[:2] > held.states[2:]).all() and (held.gathered_kv == 0).all()
    ring = execute(per_document_cp_step([EVEN] * 2, MODEL, num_data=2, layers=(5, 3), tp=8), COSTS).memory
    assert ring.gathered_kv.tolist() == pytest.approx(
        [layers * alive * EVEN.sum() * MODEL.kv_token_bytes(8) for layers, alive in ((5, 2), (3, 1)) for _ in range(2)])
