"""Expert parallelism on the clock: bytes, seconds, memory and waiting, against arithmetic on paper."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from distca.baselines import at_home_step
from distca.cost.attention_time import shipped_table
from distca.cost.latency_table import analytic_table
from distca.cost.work import activation_bytes, layer_parameters, model_parameters
from distca.models import model_named
from distca.planning.choose import plan_step
from distca.planning.orders import ZB_H1, interleaved_ticks, local_order, one_forward_one_backward, same_phase_ticks
from distca.planning.plan import server_work
from distca.planning.schedule import Ticks
from distca.simulate.clock import NIC, Clock
from distca.simulate.costs import Costs
from distca.simulate.execute import execute
from distca.simulate.memory import state_bytes
from distca.simulate.setting import setting
from distca.simulate.sweep import Question, compare
from distca.spec import cluster_named
from distca.workload.sequences import Source

QWEN, MIXTRAL = model_named("qwen3-30b-a3b"), model_named("mixtral-8x7b")
CLUSTER = cluster_named("dgx-h200")
COSTS = replace(Costs.of(MIXTRAL, CLUSTER, 1, analytic_table(MIXTRAL, 550e12)), ep=2)
FREE = COSTS.without_network()
ATTENTION = 2048 * (32 + 2 * 4 + 32) * 128  # weights of a Qwen3 layer: Q, K, V and output; and of an expert
EXPERT = 3 * 2048 * 768


def qwen(tp: int, ep: int) -> Costs:
    return replace(Costs.of(QWEN, CLUSTER, tp, shipped_table("h200")), ep=ep)


def test_parameters_by_hand() -> None:
    """Of all, of one token, and of one GPU: with ep, whole experts, which tensor parallelism does not divide."""
    assert model_parameters(QWEN) == 48 * (ATTENTION + 2048 * 128 + 128 * EXPERT) + 2 * 2048 * 151_936
    assert model_parameters(QWEN) == pytest.approx(30.5e9, rel=2e-3)                      # as its authors say
    assert model_parameters(QWEN, active=True) == pytest.approx(3.3e9, rel=2e-2)
    assert layer_parameters(QWEN, 1, ep=8) == ATTENTION + 2048 * 128 + 16 * EXPERT
    assert layer_parameters(QWEN, 4, ep=8) == ATTENTION / 4 + 2048 * 128 + 16 * EXPERT
    assert layer_parameters(QWEN, 4) == ATTENTION / 4 + 2048 * 128 + 128 * EXPERT / 4


def test_bytes_and_seconds_of_an_all_to_all_by_hand() -> None:
    """A token goes to eight experts as 2048 bf16 numbers; an eighth or a 64th of them are on its own GPU."""
    tokens = np.array([1000.0])
    inside, across = qwen(1, 8), qwen(1, 64)
    assert inside.expert_bytes(tokens) == 1000 * 8 * 4096 * 7 / 8
    assert inside.expert_seconds(np.array([7e9])) == pytest.approx(2e-6 + 7e9 / 450e9)
    assert across.expert_seconds(np.array([63e9])) == pytest.approx(6e-6 + 56e9 / 50e9)  # 56 of 63 leave the node
    assert qwen(4, 8).expert_bytes(tokens) == 250 * 8 * 4096 * 7 / 8                      # each TP rank sends its share
    assert [qwen(4, ep).expert_ranks for ep in (2, 4, 8, 64)] == [1, 1, 2, 16]
    assert qwen(1, 64).without_network().expert_seconds(np.array([63e9])) == 0


def test_a_layer_keeps_a_copy_of_each_token_for_each_of_its_experts() -> None:
    attention = 2 * (32 + 2 * 4 + 32) * 128 + 4 * 32
    assert activation_bytes(1, QWEN) == 2 * (4 * 2048 + 8 * 2048 + 3 * 8 * 768) + attention
    assert activation_bytes(1, QWEN, recompute="full") == 2 * 2048 + attention


def test_experts_states_are_divided_over_their_gpus_and_sharded_over_those_that_have_the_same() -> None:
    """64 GPUs: with ep 8, eight have the same experts. Master weights and moments take as much however they lie."""
    layers, other = (48,), 48 * (ATTENTION + 2048 * 128) + 2 * 2048 * 151_936
    for ep in (1, 8, 64):
        own = 48 * 128 // ep * EXPERT
        sharded = 12 * (other / 64 + own / (64 / ep))
        assert state_bytes(qwen(1, ep), layers, 64, 2)[0] == pytest.approx((other + own) * (2 + 4) + sharded)
        assert state_bytes(qwen(1, ep), layers, 64, 1)[0] == pytest.approx((other + own) * 2 + sharded * 16 / 12)
    assert qwen(1, 8).optimizer_seconds(layers, 64) == qwen(1, 1).optimizer_seconds(layers, 64)


def test_a_group_waits_for_its_last_rank() -> None:
    """Two groups of two, and a server that belongs to none: all of a group leave when its last has sent."""
    clock, seconds = Clock(5), np.full(5, 0.5)
    ready, num_bytes = np.array([1.0, 3.0, 2.0, 2.5, 0.0]), np.array([8.0, 8.0, 8.0, 8.0, 0.0])
    assert clock.all_to_all("", ready, NIC, num_bytes, seconds, 2).tolist() == [3.5, 3.5, 3.0, 3.0, 0.0]
    assert clock.send_free[NIC].tolist() == clock.receive_free[NIC].tolist() == [1.5, 3.5, 2.5, 3.0, 0.0]
    assert clock.all_to_all("", ready, NIC, num_bytes * 0, seconds, 2) is ready
    again = clock.all_to_all("", ready, NIC, num_bytes, seconds, 1)
    assert again.tolist() == [2.0, 4.0, 3.0, 3.5, 0.0]           # the link is busy until then; each by itself


def test_attention_that_is_balanced_over_a_step_waits_in_every_layer() -> None:
    """One rank's attention is heavy in the first micro-batch, the other's in the second; the same in all on the step.

    Without experts neither waits. With experts over both, all-to-alls lie between attention calls; only the backward of
    a micro-batch's first layer and the forward of the next micro-batch's have none between them.
    """
    layers, tokens = 4, 8192
    one, many = np.array([tokens]), np.full(8, tokens // 8)
    step = at_home_step([np.concatenate([one, many]), np.concatenate([many, one])], MIXTRAL, num_data=2,
                        layers=(layers,))
    heavy, light = (np.array([server_work(step.plans[0].tasks, 2, COSTS.attention, way)[rank] for way in (False, True)])
                    for rank in (0, 1))
    assert (heavy > 1.5 * light).all()
    linear = sum(float(part[0]) for way in (False, True)
                 for part in FREE.segment_seconds(np.array([float(tokens)]), way))
    rest = 2 * layers * linear + FREE.optimizer_seconds((layers,), 2)[0] + 2 * sum(
        float(FREE.head_seconds(np.array([float(tokens)]), way)[0]) for way in (False, True))
    assert execute(step, replace(FREE, ep=1)).seconds == pytest.approx(rest + layers * (heavy + light).sum())
    between = max(heavy[1] + light[0], light[1] + heavy[0])
    waits = (2 * layers - 1) * heavy.sum() + between
    assert execute(step, FREE).seconds == pytest.approx(rest + waits)
    each = float(COSTS.expert_seconds(COSTS.expert_bytes(np.array([float(tokens)])))[0])
    weights = execute(step, COSTS).seconds - execute(step, FREE).seconds - 2 * layers * 4 * each
    assert 0 <= weights < each                                   # two all-to-alls forward, two backward; weights hide
    full = replace(COSTS, recompute="full")
    again = execute(step, full).seconds - execute(step, replace(FREE, recompute="full")).seconds
    assert again == pytest.approx(2 * layers * 5 * each, abs=each)  # experts that are recomputed get their tokens again


def test_level_ranks_compute_as_long_as_without_expert_parallelism() -> None:
    """Also where weights are units of their own, and in pipelines: nothing is lost between the pieces of a segment."""
    lengths = [np.full(16, 1024)] * 4
    parts: list[tuple[tuple[int, ...], Ticks]] = [
        ((4,), one_forward_one_backward(1, 4)), ((2, 2), one_forward_one_backward(2, 4)),
        ((2, 2), local_order(ZB_H1, 2, 4)), ((2, 2), same_phase_ticks(2, 4)), ((1,) * 4, interleaved_ticks(2, 4, 2))]
    for layers, ticks in parts:
        for step in (at_home_step(lengths, MIXTRAL, num_data=2, layers=layers, ticks=ticks),
                     plan_step(lengths, MIXTRAL, num_data=2, layers=layers, ticks=ticks, cost=COSTS.attention)):
            alone, divided = (execute(step, replace(FREE, ep=ep), record=True) for ep in (1, 2))
            assert divided.seconds == pytest.approx(alone.seconds, rel=1e-3)
            for one, other in zip(alone.traces, divided.traces, strict=True):
                assert other.seconds("linear") == pytest.approx(one.seconds("linear"))


def test_experts_over_ranks_compute_the_mean_of_their_tokens() -> None:
    """Rows of 3000 and 1000 tokens: routed experts get 2000 each, and all that is not routed stays."""
    step = at_home_step([np.array([3000, 1000])], MIXTRAL, num_data=2, layers=(1,))
    tokens = step.micro_batches[0].layouts[0].tokens_per_rank().astype(float)
    traces = execute(step, FREE, record=True).traces
    found = [trace.seconds("linear") for trace in traces]
    before, behind = (np.sum(part, axis=0) for part in zip(*(
        FREE.segment_seconds(tokens, way) for way in (False, True)), strict=True))
    routed = behind * FREE.routed_share
    head = np.sum([FREE.head_seconds(tokens, way) for way in (False, True)], axis=0)
    expected = before + behind + head - routed + routed.mean()
    assert found == pytest.approx(expected)
    share = 3 * 4096 * 14336 * 2 / (4096 * 4096 + 4096 * 8 + 3 * 4096 * 14336 * 2)  # output projection and router
    assert FREE.routed_share == pytest.approx(share)


def test_no_strategy_beats_the_bound_which_sends_nothing() -> None:
    found = {}
    for ep in (1, 8):
        where = setting(QWEN, CLUSTER, gpus=16, context=32_768, tp=1, ep=ep)
        names = ("per_document_cp", "wlb_ideal", "disaggregated", "distca", "bound")
        found[ep] = compare(Question((where,), names, Source("prolong"), shipped_table("h200"), 0.05, 1))
        assert all(one.step_seconds > found[ep].outcome("bound").step_seconds for one in found[ep].outcomes)
        assert found[ep].as_json()["ep"] == ep
    assert found[8].outcome("bound").step_seconds == pytest.approx(found[1].outcome("bound").step_seconds, rel=1e-9)


@pytest.mark.parametrize(("arguments", "said"), [
    (("--ep", "2"), "ep is 2 but model 'llama3-8b' has no experts; leave --ep out"),
    (("--model", "mixtral-8x7b", "--ep", "3"), "for 8 experts on a stage's 64 GPUs with tp 8; give --ep 1 or 2 or 4"),
    (("--model", "qwen3-30b-a3b", "--gpus", "48", "--tp", "2", "--ep", "32"), "48 GPUs with tp 2; give --ep 1 or 2 or"),
    (("--model", "mixtral-8x7b", "--ep", "0"), "ep is 0"),
])
def test_ep_divides_experts_and_the_gpus_of_a_stage(run: Callable[..., tuple[int, str, str]],
                                                    arguments: tuple[str, ...], said: str) -> None:
    code, out, err = run("simulate", "--batches", "1", "--workers", "1", *arguments)
    assert (code, out) == (2, "") and err.count("\n") == 1 and said in err


def test_a_model_too_large_for_its_gpus_is_told_of_ep(run: Callable[..., tuple[int, str, str]]) -> None:
    large = ("simulate", "--batches", "1", "--workers", "1", "--strategies", "distca", "--json", "--context", "16k",
             "--model", "qwen3-235b-a22b", "--gpus", "64", "--tp", "2", "--pp", "1", "--ep", "1")
    code, _, err = run(*large)
    assert code == 2 and "give --ep " in err
    told = err.rpartition("give ")[2].split()
    code, out, _ = run(*large, *told)
    assert code == 0 and json.loads(out)["ep"] == int(told[1])
