"""A step plan holds every pair once, however documents are cut between nano-batches, ranks and stages."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from distca.baselines import at_home_step, per_document_cp_step
from distca.cost.attention_time import AttentionTime, shipped_table
from distca.cost.latency_table import analytic_table
from distca.models import model_named
from distca.planning.choose import plan_step
from distca.planning.plan import max_over_mean
from distca.planning.schedule import IDLE
from distca.planning.step import StepPlan
from distca.workload.documents import sample_lengths
from distca.workload.layout import NO_KEYS
from tests.support.plans import random_lengths

LLAMA = model_named("llama3-8b")
H200 = AttentionTime.of(shipped_table("h200"), LLAMA)
seeds = st.integers(0, 2**32)


def pairs_computed(step: StepPlan, stage: int, layer: int, backward: bool) -> list[list[np.ndarray]]:
    """[micro-batch][document] how often each (query, key) pair is computed in one layer and direction, by counting."""
    counts = [[np.zeros((length, length), dtype=int) for length in micro_batch.lengths]
              for micro_batch in step.micro_batches]
    for tick in range(step.ticks.num_ticks):
        number = int(step.ticks.micro_batch[tick, stage])
        if number == IDLE or bool(step.ticks.backward[tick, stage]) != backward:
            continue
        others = [] if not step.is_shared else sorted(
            int(other) for at, other in enumerate(step.ticks.micro_batch[tick])
            if other != IDLE and step.layers[at] > layer and other < number)
        for nano in range(step.num_nano_batches):
            first = sum(step.micro_batches[other].layouts[nano].num_documents for other in others)
            tasks = step.plans_of(stage)[tick][nano][layer].tasks
            for at, document in enumerate(step.micro_batches[number].nano_batches[nano].document.tolist()):
                for row in np.flatnonzero(tasks.document == first + at).tolist():
                    counts[number][document][tasks.q_start[row]:tasks.q_stop[row],
                                             tasks.kv_start[row]:tasks.kv_stop[row]] += 1
    return counts


@st.composite
def steps(draw: st.DrawFn) -> StepPlan:
    layers = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    num_data, tokens = draw(st.integers(1, 4)), draw(st.sampled_from([2, 10, 64, 300]))
    documents = [random_lengths(draw(seeds), num_data * tokens) for _ in range(draw(st.integers(1, 4)))]
    options: dict[str, Any] = {"num_data": num_data, "layers": layers}
    kind = draw(st.sampled_from(["ours", "ours", "ours", "home", "per_document_cp"]))
    if kind == "home":
        return at_home_step(documents, LLAMA, **options)
    if kind == "per_document_cp":
        return per_document_cp_step(documents, LLAMA, **options)
    speed = np.ones(num_data * len(layers) + draw(st.integers(0, 2)))
    return plan_step(documents, LLAMA, **options, ping_pong=draw(st.booleans()), speed=speed,
                     placement=draw(st.sampled_from(["given", "balanced"])),
                     tolerance=draw(st.sampled_from([0.0, 0.05, 0.5])), cost=draw(st.sampled_from([None, H200])))


@settings(max_examples=60, deadline=None)
@given(steps())
@example(plan_step([np.array([1200])], LLAMA, num_data=2, layers=(1, 2)))  # one document fills the batch
def test_every_pair_is_computed_once_in_every_layer_forward_and_backward(step: StepPlan) -> None:
    step.validate()
    for stage, num_layers in enumerate(step.layers):
        for layer in range(num_layers):
            for backward in (False, True):
                for documents in pairs_computed(step, stage, layer, backward):
                    for count in documents:
                        assert (np.tril(count) == np.tril(np.ones_like(count))).all()


@settings(max_examples=20, deadline=None)
@given(seeds, st.sampled_from(["given", "balanced"]), st.sampled_from([None, H200]))
def test_both_halves_are_level_over_the_servers_and_hold_as_many_tokens(seed: int, placement: str,
                                                                        cost: AttentionTime | None) -> None:
    lengths = sample_lengths("prolong", 8 * 65_536, seed=seed)
    step = plan_step([lengths], LLAMA, num_data=8, layers=(1,), placement=placement, cost=cost)
    step.validate()
    for tick in range(2):
        for (plan,) in step.plans_of(0)[tick]:
            assert plan.layout.tokens_per_rank().tolist() == [32_768] * 8
            assert plan.limit is not None or max_over_mean(plan.work(), plan.speed) <= 1.05


def test_forward_and_backward_are_balanced_each_in_its_own_seconds() -> None:
    lengths = np.concatenate([[65_536], np.full(448, 1_024)])
    plain = analytic_table(LLAMA, 550e12)
    short = np.where(plain.q_len < 2_048, 3.0, 1.0)[:, None]     # a kernel whose backward is slow for short shards
    cost = AttentionTime.of(replace(plain, backward_seconds=short * plain.backward_seconds), LLAMA)
    step = plan_step([lengths], LLAMA, num_data=8, layers=(1,), placement="given", ping_pong=False, cost=cost)
    ((forward,),), ((backward,),) = step.plans_of(0)
    assert (forward.backward, backward.backward) == (False, True)
    for plan in (forward, backward):
        turned = replace(plan, backward=not plan.backward)
        assert max_over_mean(plan.work(), plan.speed) <= 1.05 < max_over_mean(turned.work(), plan.speed)
    in_pairs = plan_step([lengths], LLAMA, num_data=8, layers=(1,))
    assert in_pairs.plans_of(0)[0][0][0] is in_pairs.plans_of(0)[1][0][0]  # pairs are the same both ways


def test_labels_are_counted_over_whole_documents() -> None:
    step = plan_step([np.array([1200]), np.array([700, 499, 1])], LLAMA, num_data=2, layers=(1,))
    assert (step.num_tokens, step.num_labels, step.num_nano_batches) == (2400, 2400 - 4, 2)


def broken(step: StepPlan, **changes: Any) -> StepPlan:
    micro_batch = step.micro_batches[0]
    ping, pong = micro_batch.nano_batches
    pong = replace(pong, layout=replace(pong.layout, **changes))
    return replace(step, micro_batches=(replace(micro_batch, nano_batches=(ping, pong)),))


def test_a_step_that_loses_or_doubles_anything_is_refused() -> None:
    step = plan_step([np.array([1200])], LLAMA, num_data=2, layers=(1,))
    pong = step.micro_batches[0].layouts[1]
    assert len(pong.key_only)
    with pytest.raises(ValueError, match="document 0 of 1200 tokens is not covered once"):
        broken(step, key_only=NO_KEYS).validate()
    with pytest.raises(ValueError, match=r"nano-batch 1 reads keys .* of document 0 on rank 1, where no nano-batch"):
        only = pong.key_only
        broken(step, key_only=replace(only, rank=np.ones_like(only.rank))).validate()
    with pytest.raises(ValueError, match="other documents than run there"):
        replace(step, calls=step.calls[:, :, ::-1]).validate()
    with pytest.raises(ValueError, match=r"tick 1 of stage 0 has \[0, 0\] plans .* but runs \[1, 1\] layers; plan e"):
        replace(step, calls=np.where(np.arange(2)[:, None, None] == 1, -1, step.calls)).validate()
    with pytest.raises(ValueError, match=r"calls has shape \(1, 1, 2, 1\) but the step has \(1, 2, 2, 1\) stages"):
        replace(step, calls=step.calls[:, :1]).validate()
    with pytest.raises(ValueError, match=r"calls names plans -2 to 1 but there are 2; use each from 0 on, and -1 for"):
        replace(step, calls=np.where(step.calls == 0, -2, step.calls)).validate()
    both = plan_step([np.array([1200])], LLAMA, num_data=2, layers=(1,), cost=H200)
    with pytest.raises(ValueError, match="balanced by the other direction's seconds; plan forward and backward apart"):
        replace(both, calls=both.calls[:, ::-1]).validate()
    twice = replace(step.micro_batches[0], nano_batches=step.micro_batches[0].nano_batches[:1])
    with pytest.raises(ValueError, match="the nano-batches do not hold every token once"):
        replace(step, micro_batches=(twice,)).validate()
