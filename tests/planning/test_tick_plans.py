"""Plans of ticks: exact, level over the ranks of all stages, with the documents where the ticks put them."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distca.baselines import at_home
from distca.cost.attention_time import AttentionTime
from distca.cost.latency_table import analytic_table
from distca.models import MODELS
from distca.planning import choose
from distca.planning.balance import balance
from distca.planning.choose import balance_calls, distinct_calls
from distca.planning.plan import Plan, max_over_mean
from distca.planning.schedule import Ticks, layers_of_stages, same_phase_ticks, tick_layout
from distca.planning.step import MicroBatch, StepPlan
from distca.planning.tasks import TaskTable
from distca.workload.documents import sample_lengths
from distca.workload.layout import Layout, layout_from_rows
from distca.workload.packing import NanoBatch, pack
from tests.support.plans import LAYOUT_KINDS, covers_exactly_once, misplaced_plan, random_layout, random_speeds

LLAMA = MODELS["llama3-8b"]
TIME = AttentionTime.of(analytic_table(LLAMA, 550e12, max_kv_len=131_072), LLAMA)
seeds = st.integers(0, 2**32)
Drawn = tuple[Ticks, list[Layout], list[int], np.ndarray | None]


@st.composite
def steps(draw: st.DrawFn) -> Drawn:
    """Ticks, layouts, layers and a pool: ranks alike, unequal, some that serve nothing, dedicated servers."""
    num_stages, num_data, num_micro_batches = draw(st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 6)))
    num_tokens = draw(st.integers(1, 1500))
    layouts = [random_layout(draw(seeds), draw(st.sampled_from(LAYOUT_KINDS)), num_data, num_tokens)
               for _ in range(num_micro_batches)]
    layers = draw(st.lists(st.integers(1, 3), min_size=num_stages, max_size=num_stages))
    num_ranks, num_dedicated = num_stages * num_data, draw(st.integers(0, 2))
    speed = draw(st.sampled_from([None, np.ones(num_ranks + num_dedicated)])
                 | st.builds(random_speeds, seeds, st.just(num_ranks), st.just(num_dedicated)))
    return same_phase_ticks(num_stages, num_micro_batches), layouts, layers, speed


def planned(ticks: Ticks, layouts: list[Layout], layers: Sequence[int], planner: Callable[[Layout], Plan] | None = None,
            **options: Any) -> StepPlan:
    """A step of these layouts, whose calls are balanced or planned by `planner`."""
    packed = tuple(MicroBatch(layout.lengths, (NanoBatch(layout, np.arange(layout.num_documents)),))
                   for layout in layouts)
    calls, number = distinct_calls(ticks, packed, layers, phases_differ=options.get("cost") is not None)
    plans = balance_calls(calls, LLAMA, **options) if planner is None else tuple(
        planner(call.layout) for call in calls)
    return StepPlan(LLAMA, 1, tuple(layers), packed, ticks, plans, number, True)


def plans_of_ticks(step: StepPlan) -> list[list[Plan]]:
    """[tick][depth]"""
    return [depths for depths, in step.plans_of(0)]


def rows_of(layout: Layout, rank: int) -> list[tuple[int, int, int]]:
    """A rank's slices in row order, without the numbers of their documents."""
    mine = layout.rank == rank
    return list(zip(layout.lengths[layout.document[mine]].tolist(), layout.start[mine].tolist(),
                    layout.stop[mine].tolist(), strict=True))


@settings(max_examples=60, deadline=None)
@given(steps(), st.sampled_from([0.0, 0.05, 0.3]), st.sampled_from([None, None, TIME]))
def test_every_tick_is_exact_level_and_holds_its_micro_batches(step: Drawn, tolerance: float,
                                                               cost: AttentionTime | None) -> None:
    ticks, layouts, layers, speed = step
    num_data = layouts[0].num_ranks
    made = planned(ticks, layouts, layers, tolerance=tolerance, speed=speed, cost=cost)
    for row, depths in zip(ticks.micro_batch.tolist(), plans_of_ticks(made), strict=True):
        deep = [layers[stage] if number >= 0 else 0 for stage, number in enumerate(row)]
        assert len(depths) == max(deep)
        for depth, plan in enumerate(depths):
            holds = [number if deep[stage] > depth else -1 for stage, number in enumerate(row)]
            assert plan.layout.num_ranks == len(holds) * num_data
            for rank in range(plan.layout.num_ranks):
                number = holds[rank // num_data]
                assert rows_of(plan.layout, rank) == (rows_of(layouts[number], rank % num_data) if number >= 0 else [])
    for plan in made.plans:
        plan.validate()
        assert covers_exactly_once(plan.layout.lengths, plan.tasks)
        assert np.array_equal(plan.speed, np.ones(plan.layout.num_ranks) if speed is None else speed)
        reached = max_over_mean(plan.work(), plan.speed)
        assert (reached <= 1 + tolerance + 1e-9) if plan.limit is None else (reached > 1 + tolerance)


@settings(max_examples=25, deadline=None)
@given(steps())
def test_equal_sets_share_a_plan_and_equal_inputs_give_equal_plans(step: Drawn) -> None:
    ticks, layouts, layers, speed = step
    first, second = (planned(ticks, layouts, layers, speed=speed) for _ in range(2))
    assert np.array_equal(first.calls, second.calls)
    for plan, again in zip(first.plans, second.plans, strict=True):
        assert all(np.array_equal(getattr(plan.tasks, name), getattr(again.tasks, name))
                   for name in TaskTable.__slots__)
        assert plan.limit == again.limit
    for row, depths in zip(ticks.micro_batch, plans_of_ticks(first), strict=True):
        for depth in range(1, len(depths)):
            same = all(number < 0 or count != depth for number, count in zip(row, layers, strict=True))
            assert (depths[depth] is depths[depth - 1]) == same
    level = planned(ticks, layouts, [3] * ticks.num_stages, speed=speed)
    assert (level.calls == level.calls[..., :1]).all()


def skewed_step(num_stages: int = 4, num_data: int = 2, num_micro_batches: int = 6,
                tokens_per_rank: int = 8192) -> tuple[Ticks, list[Layout]]:
    layouts = [pack(sample_lengths("prolong", num_data * tokens_per_rank, seed=seed), ranks=num_data)
               for seed in range(num_micro_batches)]
    return same_phase_ticks(num_stages, num_micro_batches), layouts


@pytest.mark.parametrize("num_dedicated", [0, 3])
def test_bubbles_serve_their_share(num_dedicated: int) -> None:
    ticks, layouts = skewed_step()
    step = planned(ticks, layouts, (2, 3, 3, 2), speed=np.ones(8 + num_dedicated))
    assert all(plan.limit is None for plan in step.plans)
    for tick in range(ticks.num_ticks):
        alone = replace(ticks, micro_batch=ticks.micro_batch[tick:tick + 1], backward=ticks.backward[tick:tick + 1])
        *_, served = replace(step, ticks=alone, calls=step.calls[:, tick:tick + 1]).work_over_ticks()
        num_active = int(ticks.active[tick].sum())
        working = 2 * num_active + num_dedicated                 # at most this many servers are not in a bubble
        assert served >= 1 - 1.05 * working / (8 + num_dedicated)
        assert (served == 0) == (num_active == 4)
    largest, mean, _ = step.work_over_ticks()
    largest_at_home, mean_at_home, _ = planned(ticks, layouts, (2, 3, 3, 2), partial(at_home, model=LLAMA)
                                               ).work_over_ticks()
    assert largest <= 1.05 * mean * (1 + 1e-9)
    assert mean_at_home == pytest.approx(mean * (8 + num_dedicated) / 8)
    assert largest_at_home > 2 * mean_at_home                    # there was something to level


def test_the_same_micro_batches_on_other_stages_are_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    balancing = Mock(wraps=balance)
    monkeypatch.setattr(choose, "balance", balancing)
    ticks, layouts = skewed_step()
    plans = plans_of_ticks(planned(ticks, layouts, [2] * 4))
    assert balancing.call_count == 6 + 4 - 1
    forward = [depths[0] for tick, depths in enumerate(plans) if not ticks.phase(tick)]
    backward = [depths[0] for tick, depths in enumerate(plans) if ticks.phase(tick)]
    for one, other in zip(forward, backward, strict=True):
        assert np.sort(one.work()).tolist() == np.sort(other.work()).tolist()
        assert one.summary().bytes_total == other.summary().bytes_total
    balancing.reset_mock()
    slow_first = np.array([0.5] * 2 + [1.0] * 6)                 # another pool from the first stage than from the last
    for depths in plans_of_ticks(planned(ticks, layouts, [2] * 4, speed=slow_first)):
        depths[0].validate()
        assert max_over_mean(depths[0].work(), slow_first) <= 1.05 + 1e-9
    assert balancing.call_count == 2 * (6 + 4 - 1)


def test_a_limit_names_the_rank_that_has_it() -> None:
    ticks = same_phase_ticks(3, 1)                               # F on stages 0, 1, 2 and B on 2, 1, 0
    plans = plans_of_ticks(planned(ticks, [layout_from_rows([[100]])], (1, 1, 1)))
    for (plan,), stage in zip(plans, (0, 1, 2, 2, 1, 0), strict=True):
        assert plan.limit is not None and plan.limit.startswith(f"rank {stage} keeps")


def test_documents_are_numbered_by_micro_batch_and_ranks_by_stage() -> None:
    layouts = [layout_from_rows([[5], [7, 2]]), layout_from_rows([[3], [4]])]
    layout = tick_layout((-1, 1, 0), layouts)
    layout.validate()
    assert layout.lengths.tolist() == [5, 7, 2, 3, 4]
    assert layout.document.tolist() == [3, 4, 0, 1, 2]
    assert layout.rank.tolist() == [2, 3, 4, 5, 5]
    assert layout.tokens_per_rank().tolist() == [0, 0, 3, 4, 5, 9]


def test_bubbles_and_work_by_hand() -> None:
    one = [layout_from_rows([[256]])]
    pairs = 256 * 257 // 2
    at = planned(same_phase_ticks(2, 1), one, (2, 1), partial(at_home, model=LLAMA))
    assert [len(depths) for depths in plans_of_ticks(at)] == [2, 1, 1, 2]
    assert at.work_over_ticks() == (6 * pairs, 3 * pairs, 0.0)   # 6 layers on one of two ranks each

    ticks, two = same_phase_ticks(2, 2), [*one, layout_from_rows([[512]])]
    for servers, share in ((2, 0.5), (3, 0.25)):                 # alone on a stage: all of it on the idle one; with a
        step = planned(ticks, two, (1, 1), partial(misplaced_plan, servers=servers, model=LLAMA))
        assert step.work_over_ticks()[2] == share                # third server stage 1's documents go there


@pytest.mark.parametrize("num_layers, num_stages, expected", [
    (8, 4, (2, 2, 2, 2)), (10, 4, (2, 3, 3, 2)), (7, 4, (2, 2, 2, 1)), (3, 2, (2, 1)), (5, 1, (5,)), (3, 3, (1, 1, 1))])
def test_layers_by_hand(num_layers: int, num_stages: int, expected: tuple[int, ...]) -> None:
    assert layers_of_stages(num_layers, num_stages) == expected


@given(st.integers(1, 200), st.data())
def test_layers_are_all_there_and_even(num_layers: int, data: st.DataObject) -> None:
    layers = layers_of_stages(num_layers, data.draw(st.integers(1, num_layers)))
    assert sum(layers) == num_layers
    assert max(layers) - min(layers) <= 1
    assert layers[-1] == min(layers)


def test_bad_inputs_are_named() -> None:
    with pytest.raises(ValueError, match=r"^layers of a stage is 0; give a whole number of at least 1$"):
        choose.plan_step([np.array([128])], LLAMA, num_data=1, layers=(1, 0))
    with pytest.raises(ValueError, match=r"^speed has shape \(3,\) but there are 4 ranks; give one speed per rank"):
        choose.plan_step([np.array([128])], LLAMA, num_data=2, layers=(1, 1), speed=(1, 1, 1))
    with pytest.raises(ValueError, match=r"^num_stages is 5 but the model has 4 layers; use at most 4 stages"):
        layers_of_stages(4, 5)
    with pytest.raises(ValueError, match=r"^num_layers is 0; give a whole number of at least 1$"):
        layers_of_stages(0, 1)
