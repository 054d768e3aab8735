"""The greedy plan on any layout and pool: exact, balanced within tolerance or with the reason named, and the same
everywhere.

Servers that differ: speeds are learnt within bounds, and plans give a slower server less.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import distca
from distca.cost.attention_time import AttentionTime, shipped_table
from distca.cost.latency_table import analytic_table
from distca.models import MODELS
from distca.planning.balance import LEAST, MOST, balance, learnt_speeds, rounded_speeds
from distca.planning.choose import plan_step
from distca.planning.plan import Plan, max_over_mean
from distca.planning.tasks import TILE, TaskTable
from distca.spec import ModelShape
from distca.workload.documents import sample_lengths
from distca.workload.layout import layout_from_rows
from distca.workload.packing import pack
from distca.workload.topology import Topology
from tests.support.plans import (
    LAYOUT_KINDS,
    LayoutKind,
    covers_exactly_once,
    random_layout,
    random_lengths,
    random_speeds,
    tokens_moved,
)

LLAMA = MODELS["llama3-8b"]
NO_GROUPS = ModelShape("mha", 2, 256, 8, 8, 32, 704, 257)        # as many KV heads as query heads: wide rectangles
TIMES = {model.name: AttentionTime.of(analytic_table(model, 550e12, max_kv_len=131_072), model)
         for model in (LLAMA, NO_GROUPS)}

seeds = st.integers(0, 2**32)
kinds = st.sampled_from(LAYOUT_KINDS)
tolerances = st.sampled_from([0.0, 0.02, 0.05, 1.0]) | st.floats(0, 1)


@st.composite
def pools(draw: st.DrawFn, ranks: int) -> np.ndarray | None:
    """None for ranks alike, or speeds with zeros and dedicated servers."""
    return draw(st.none() | st.builds(random_speeds, seeds, st.just(ranks), st.integers(0, 3)))


def assert_sound(plan: Plan) -> None:
    """Exact by an oracle of its own, accepted by validate(), and counted as a token-by-token count finds it."""
    assert covers_exactly_once(plan.layout.lengths, plan.tasks)
    plan.validate()
    queries, keys = tokens_moved(plan.layout, plan.tasks, plan.num_servers)
    q_bytes, kv_bytes = plan.model.q_token_bytes(plan.tp), plan.model.kv_token_bytes(plan.tp)
    expected = (queries + queries.T) * q_bytes + keys * kv_bytes
    assert np.array_equal(plan.traffic().matrix_bytes(plan.model, plan.tp), expected)


@settings(max_examples=250, deadline=None)
@given(seeds, kinds, st.integers(1, 8), st.integers(1, 3000), tolerances, st.data())
def test_every_pair_once_and_balanced_or_explained(seed: int, kind: LayoutKind, ranks: int, tokens_per_rank: int,
                                                   tolerance: float, data: st.DataObject) -> None:
    layout = random_layout(seed, kind, ranks, tokens_per_rank)
    plan = balance(layout, LLAMA, tolerance=tolerance, speed=data.draw(pools(ranks)))
    assert_sound(plan)
    summary = plan.summary()
    reached = summary.work_max_over_mean
    assert reached <= max(1 + tolerance, summary.work_max_over_mean_at_home) + 1e-9
    if plan.limit is None:
        assert reached <= 1 + tolerance + 1e-9
    else:
        assert reached > 1 + tolerance
        assert "document" in plan.limit and "rank" in plan.limit


@settings(max_examples=150, deadline=None)
@given(seeds, kinds, st.integers(1, 8), st.integers(1, 3000), tolerances, st.sampled_from([LLAMA, NO_GROUPS]),
       st.data())
@example(2739, "scattered", 7, 2134, 0.05, NO_GROUPS, None)
@example(962, "balanced", 2, 2076, 0.02, LLAMA, None)
def test_seconds_are_balanced_as_well(seed: int, kind: LayoutKind, ranks: int, tokens_per_rank: int, tolerance: float,
                                      model: ModelShape, data: st.DataObject | None) -> None:
    """Cutting changes the seconds in all, so the largest is held against the mean before cutting or after it."""
    layout = random_layout(seed, kind, ranks, tokens_per_rank)
    speed = data.draw(pools(ranks)) if data else None
    plan = balance(layout, model, tolerance=tolerance, speed=speed, cost=TIMES[model.name])
    assert_sound(plan)
    assert plan.cost is not None
    work, at_home = plan.work(), plan.cost.shards(layout.stop - layout.start, layout.stop)
    mean = max(work.sum(), at_home.sum()) / plan.speed.sum()
    if plan.limit is None:
        assert largest_time(work, plan.speed) <= (1 + tolerance) * mean * (1 + 1e-9)
    home = np.bincount(layout.rank, weights=at_home, minlength=plan.num_servers)
    bound = max((1 + tolerance) * mean, largest_time(home, plan.speed))
    assert largest_time(work, plan.speed) <= bound * (1 + 1e-9)


def largest_time(work: np.ndarray, speed: np.ndarray) -> float:
    return max(amount / rate if rate else np.inf for amount, rate in zip(work, speed, strict=True) if amount)


@settings(max_examples=120, deadline=None)
@given(seeds, kinds, st.integers(2, 8), st.integers(3000, 20_000), st.sampled_from([0.02, 0.05, 0.15, 0.5]), st.data())
def test_divisible_work_is_always_balanced(seed: int, kind: LayoutKind, ranks: int, tokens_per_rank: int,
                                           tolerance: float, data: st.DataObject) -> None:
    """While a server is over its cap, the others' room exceeds what is over by tolerance x all work, so one has room
    for tolerance x its share. If that holds a tile of the longest document, something can always move."""
    layout = random_layout(seed, kind, ranks, tokens_per_rank)
    plan = balance(layout, LLAMA, tolerance=tolerance, speed=data.draw(pools(ranks)))
    serving = plan.speed[plan.speed > 0]
    smallest_share = plan.work().sum() / serving.sum() * serving.min()
    if tolerance * smallest_share >= TILE * layout.lengths.max():
        assert plan.limit is None
        assert max_over_mean(plan.work(), plan.speed) <= 1 + tolerance + 1e-9


@pytest.mark.parametrize("placement", ["given", "balanced"])
@pytest.mark.parametrize(("ranks", "seed"), [(8, 0), (8, 4), (32, 2), (32, 5)])
def test_sampled_batches_at_full_size(ranks: int, seed: int, placement: str) -> None:
    lengths = sample_lengths("prolong", ranks * 65_536, seed=seed)
    plan = balance(pack(lengths, ranks=ranks, placement=placement), LLAMA, tolerance=0.05)
    assert_sound(plan)
    summary = plan.summary()
    assert plan.limit is None
    assert summary.work_max_over_mean <= 1.05 + 1e-9
    assert summary.smallest_shard >= TILE


@pytest.mark.parametrize(("lengths", "ranks"), [([131_072] * 4, 8), ([524_288], 8), ([65_536] + [512] * 128, 2)])
@pytest.mark.parametrize("tolerance", [0.02, 0.05, 0.2])
def test_long_documents_are_always_divisible(lengths: list[int], ranks: int, tolerance: float) -> None:
    plan = balance(pack(lengths, ranks=ranks), LLAMA, tolerance=tolerance)
    assert_sound(plan)
    assert plan.limit is None
    assert max_over_mean(plan.work(), plan.speed) <= 1 + tolerance + 1e-9
    assert plan.summary().work_max_over_mean_at_home > 1.4        # there was something to do


def test_more_tolerance_saves_bytes() -> None:
    layout = pack(sample_lengths("prolong", 16 * 65_536, seed=1), ranks=16)
    moved = [balance(layout, LLAMA, tolerance=tolerance).summary().bytes_total for tolerance in (0.02, 0.1, 0.3, 1.0)]
    assert moved == sorted(moved, reverse=True)
    assert moved[-1] < 0.8 * moved[0]


def test_what_is_balanced_stays_at_home() -> None:
    layout = layout_from_rows([[3000, 5], [3000, 5], [3000, 5]])
    plan = balance(layout, LLAMA, tolerance=0.0)
    assert (plan.tasks.home == plan.tasks.server).all()
    assert plan.summary().bytes_total == 0
    assert plan.limit is None


def test_the_limit_names_the_indivisible_piece() -> None:
    """100 queries are under a tile, so they stay together, at twice the mean."""
    plan = balance(layout_from_rows([[100], [1]]), LLAMA, tolerance=0.05)
    plan.validate()
    assert max_over_mean(plan.work(), plan.speed) > 1.9
    assert plan.limit is not None and "rank 0" in plan.limit
    assert "queries [0, 100) of document 0" in plan.limit


@pytest.mark.parametrize("tolerance", [0.0, 0.05])
@pytest.mark.parametrize("cost", [None, TIMES["llama3-8b"]])
@pytest.mark.parametrize("rows", [[[5], [3]], [[685, 300], [500]], [[4000, 100], [6000]], [[16_000], [1]]])
def test_ranks_that_serve_nothing_are_emptied(rows: list[list[int]], cost: AttentionTime | None,
                                              tolerance: float) -> None:
    """Even where no server has room for it: a rank of speed 0 would never finish."""
    for speed in ([0, 1, 0.5], [0, 1, 0], [0, 0, 1]):
        plan = balance(layout_from_rows(rows), LLAMA, tolerance=tolerance, speed=speed, cost=cost)
        assert_sound(plan)
        assert (plan.work()[np.array(speed) == 0] == 0).all()
        assert plan.limit is not None or np.isfinite(plan.summary().work_max_over_mean)


@settings(max_examples=60, deadline=None)
@given(seeds, kinds, st.integers(1, 6), st.integers(1, 2000), st.integers(1, 3), tolerances)
def test_a_dedicated_pool_may_do_all_the_work(seed: int, kind: LayoutKind, ranks: int, tokens_per_rank: int,
                                              dedicated: int, tolerance: float) -> None:
    layout = random_layout(seed, kind, ranks, tokens_per_rank)
    plan = balance(layout, LLAMA, tolerance=tolerance, speed=[0] * ranks + [1] * dedicated)
    assert_sound(plan)
    assert plan.tasks.server.min() >= ranks


def test_speeds_get_work_in_proportion() -> None:
    speed = np.array([4.0, 1.0, 1.0, 2.0])
    plan = balance(pack([32_768] * 2, ranks=4), LLAMA, tolerance=0.02, speed=speed)
    share = plan.work() / plan.work().sum() * speed.sum() / speed
    assert share.max() <= 1.02 + 1e-9
    assert share.min() >= 0.75                                   # only the largest is bound; no server starves here


DIGEST = """
import hashlib
import numpy as np
from distca.cost.attention_time import AttentionTime
from distca.cost.latency_table import analytic_table
from distca.planning.balance import balance
from distca.planning.tasks import TaskTable
from distca.models import MODELS
from tests.support.plans import LAYOUT_KINDS, random_layout, random_speeds
model = MODELS["llama3-8b"]
digest = hashlib.sha256()
for seed in range(24):
    layout = random_layout(seed, LAYOUT_KINDS[seed % 4], 6, 3000)
    cost = AttentionTime.of(analytic_table(model, 550e12), model) if seed % 3 == 0 else None
    plan = balance(layout, model, tolerance=0.03, speed=random_speeds(seed, 6, seed % 3), cost=cost)
    for name in TaskTable.__slots__:
        digest.update(getattr(plan.tasks, name).tobytes())
    digest.update(repr(plan.limit).encode())
print(digest.hexdigest())
"""


def test_every_process_computes_the_same_plan() -> None:
    """On one machine: exp and log of a cost table may round differently on another, so runs compare digests."""
    package = os.path.dirname(os.path.dirname(distca.__file__))
    digests = set()
    for hash_seed in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": package}
        done = subprocess.run([sys.executable, "-c", DIGEST], env=environment, capture_output=True, text=True,
                              check=True)
        digests.add(done.stdout.strip())
    assert len(digests) == 1
    assert len(digests.pop()) == 64


def test_the_same_call_gives_the_same_columns() -> None:
    layout = random_layout(7, "scattered", 6, 5000)
    one, two = (balance(layout, LLAMA, tolerance=0.02) for _ in range(2))
    assert (one.tasks.home != one.tasks.server).any()
    for name in TaskTable.__slots__:
        assert np.array_equal(getattr(one.tasks, name), getattr(two.tasks, name))


@pytest.mark.parametrize(("arguments", "message"), [
    ({"tolerance": -0.01}, "tolerance is -0.01; give a number from 0 to 1"),
    ({"tolerance": 1.5}, "tolerance is 1.5; give a number from 0 to 1"),
    ({"tolerance": float("nan")}, "tolerance is nan; give a number from 0 to 1"),
    ({"tolerance": None}, "tolerance is None; give a number from 0 to 1"),
    ({"speed": [1.0]}, "speed has .*1.* 2 ranks; give one speed per rank"),
    ({"speed": [1.0, -2.0]}, r"speed is \[1.0, -2.0\]; give finite numbers of 0 or more"),
    ({"speed": [1.0, float("nan")]}, r"speed is \[1.0, nan\]; give finite numbers"),
    ({"speed": [1.0, float("inf")]}, r"speed is \[1.0, inf\]; give finite numbers"),
    ({"speed": [0.0, 0.0]}, r"speed is \[0.0, 0.0\]; give .* at least one above 0"),
    ({"speed": [[1.0, 1.0], [1.0, 1.0]]}, "speed has shape .*2, 2.*; give one speed per rank"),
    ({"tp": 3}, "tp is 3 .* choose a tp that divides"),
])
def test_bad_arguments_are_named_with_a_remedy(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        balance(pack([1000, 1000], ranks=2), LLAMA, **arguments)


def test_unknown_models_are_named() -> None:
    with pytest.raises(ValueError, match=r"model 'llama9' is unknown; .*choose one of: .*llama3-8b"):
        distca.plan(pack([100], ranks=1), model="llama9")


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
