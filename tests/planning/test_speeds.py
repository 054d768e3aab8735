"""Servers that differ: speeds are learnt within bounds, and plans give a slower server less."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distca.cost.attention_time import AttentionTime, shipped_table
from distca.models import MODELS
from distca.planning.balance import LEAST, MOST, balance, learnt_speeds, rounded_speeds
from distca.planning.choose import plan_step
from distca.planning.plan import max_over_mean
from distca.workload.documents import sample_lengths
from distca.workload.packing import pack
from distca.workload.topology import Topology
from tests.support.plans import random_lengths

LLAMA = MODELS["llama3-8b"]
H200 = AttentionTime.of(shipped_table("h200"), LLAMA)
positive = st.floats(1e-6, 1e6)


def after(steps: int, true: np.ndarray, seed: int = 0, noise: float = 0.0) -> np.ndarray:
    """Speeds learnt from servers of true speeds, whatever work the steps give them."""
    speed, rng = np.ones(len(true)), np.random.default_rng(seed)
    for _ in range(steps):
        work = rng.uniform(1, 10, len(true))
        speed = learnt_speeds(speed, work, work / true * rng.uniform(1 - noise, 1 + noise, len(true)))
    return speed


def test_speeds_come_to_what_was_measured() -> None:
    true = np.array([1.0, 1.0, 0.5, 1.0, 1.3])
    np.testing.assert_allclose(after(20, true), true, rtol=2 * 0.7**20)  # all within a factor of two: no surprise
    assert abs(after(1, true)[2] - (1 - 0.3 * 0.5)) < 1e-12      # one step is believed by three tenths
    assert rounded_speeds(after(20, true)).tolist() == [1.0, 1.0, 0.5, 1.0, 1.3]


def test_equal_servers_are_planned_as_equals_through_noise() -> None:
    """Two rates that are 1 % off a median that is 1 % off are within 2.1 %."""
    assert (rounded_speeds(after(50, np.full(8, 3.7), noise=0.01)) == 1.0).all()


@given(st.lists(st.tuples(st.floats(LEAST, MOST), positive | st.just(0.0),
                          positive | st.sampled_from([0.0, np.inf, np.nan])), min_size=1, max_size=9))
def test_a_step_is_bounded_and_silence_changes_nothing(servers: list[tuple[float, float, float]]) -> None:
    speed, work, seconds = map(np.array, zip(*servers, strict=True))
    found = learnt_speeds(speed, work, seconds)
    silent = (work == 0) | ~(np.isfinite(seconds) & (seconds > 0))
    assert (found[silent] == speed[silent]).all()
    assert ((found >= LEAST * (1 - 1e-12)) & (found <= MOST * (1 + 1e-12))).all()
    assert (np.abs(found - speed) <= 0.3 * speed * (1 + 1e-9)).all()  # at most 0.3 of the way to twice the speed


def test_a_lasting_outlier_stays_inside_the_bounds() -> None:
    assert after(60, np.array([1.0, 1.0, 1e-6])).min() == pytest.approx(LEAST, rel=1e-6)
    assert rounded_speeds(np.array([np.inf, 0.1])[1:]).tolist() == [0.1]


def test_all_ranks_compute_the_same_bits() -> None:
    """Whatever the order of servers: no sum over them enters a speed but the median, and + - * / round alike."""
    rng, order = np.random.default_rng(3), np.random.default_rng(4).permutation(9)
    speed, work, seconds = rng.uniform(0.5, 2, 9), rng.uniform(1, 5, 9), rng.uniform(1, 5, 9)
    learnt = learnt_speeds(speed, work, seconds)
    assert (learnt[order] == learnt_speeds(speed[order], work[order], seconds[order])).all()


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32), st.integers(2, 8), st.integers(2000, 9000), st.sampled_from([0, 2, 3]), st.booleans())
def test_work_over_speed_is_level_at_every_level(
    seed: int, ranks: int, tokens: int, per_node: int, in_seconds: bool
) -> None:
    speed = rounded_speeds(np.random.default_rng(seed).uniform(LEAST, MOST, ranks))
    layout = pack(random_lengths(seed, ranks * tokens), ranks=ranks)
    topology = Topology.regular(ranks, per_node) if per_node else None
    plan = balance(layout, LLAMA, speed=speed, cost=H200 if in_seconds else None, topology=topology)
    plan.validate()
    assert plan.limit is not None or max_over_mean(plan.work(), speed) <= 1.05 + 1e-9
    assert plan.summary().work_max_over_mean == max_over_mean(plan.work(), speed)


def test_a_slow_rank_no_longer_holds_up_the_pool() -> None:
    """A rank of half the speed: 8 halves of the work over 8 equals take 2 / 8; over 7.5 at most 1.05 / 7.5."""
    true = np.where(np.arange(8) == 3, 0.5, 1.0)
    lengths = [sample_lengths("prolong", 8 * 32_768, seed=1)]

    def slowest(speed: np.ndarray) -> float:
        step = plan_step(lengths, LLAMA, num_data=8, layers=(2,), speed=speed)
        step.validate()
        work = step.server_work()
        return float((work / true).max() / work.sum())

    assert slowest(np.ones(8)) > 2 * 0.9 / 8
    assert slowest(rounded_speeds(after(20, true))) <= 1.05 / 7.5 * (1 + 1e-9)


def test_a_steps_work_counts_every_layer_both_ways() -> None:
    step = plan_step([np.array([4096]), np.array([1024] * 4)], LLAMA, num_data=2, layers=(2, 1), ping_pong=False)
    pairs = 4096 * 4097 / 2 + 4 * 1024 * 1025 / 2
    assert step.server_work().shape == (4,)
    assert step.server_work().sum() == pytest.approx(3 * pairs * (1 + 2.5))
    timed = plan_step([np.array([4096])], LLAMA, num_data=2, layers=(3,), ping_pong=False, cost=H200)
    forward, backward = timed.plans
    np.testing.assert_allclose(timed.server_work(), 3 * (forward.work() + backward.work()))
