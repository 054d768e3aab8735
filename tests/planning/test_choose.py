"""Balanced placement is never worse than the loader's own order: in bytes, or at the busiest sender.

Plans of ticks: exact, level over the ranks of all stages, with the documents where the ticks put them.

Tolerance auto: the quickest predicted step of a few, the same for everyone who asks; bytes and links decide it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import distca
from distca.baselines import at_home
from distca.cli import main
from distca.cost.attention_time import AttentionTime, shipped_table
from distca.cost.latency_table import analytic_table
from distca.models import MODELS
from distca.planning import choose
from distca.planning.balance import balance
from distca.planning.choose import AUTO, TOLERANCES, asked_tolerance, balance_calls, distinct_calls, plan_step
from distca.planning.orders import order_named, same_phase_ticks
from distca.planning.plan import Plan, max_over_mean, server_work
from distca.planning.schedule import Ticks, layers_of_stages, tick_layout
from distca.planning.step import MicroBatch, StepPlan, same_columns
from distca.planning.tasks import TaskTable
from distca.planning.traffic import traffic_in_hops
from distca.simulate.costs import Costs
from distca.simulate.execute import execute
from distca.simulate.setting import setting
from distca.simulate.strategies import STRATEGIES, PoolChoice, StepDocuments
from distca.simulate.sweep import Question, compare
from distca.spec import ClusterShape, cluster_named
from distca.train.batches import attention_time, step_plan
from distca.train.settings import Settings, load_settings
from distca.train.settings.checks import check_settings
from distca.workload.documents import sample_lengths
from distca.workload.layout import Layout, layout_from_rows
from distca.workload.packing import NanoBatch, pack
from distca.workload.sequences import Source
from distca.workload.topology import Topology
from tests.support.plans import (
    LAYOUT_KINDS,
    covers_exactly_once,
    misplaced_plan,
    random_layout,
    random_lengths,
    random_speeds,
)

LLAMA = MODELS["llama3-8b"]


def placed_step(
    lengths: np.ndarray, ranks: int, placement: str, topology: Topology | None = None,
    cost: AttentionTime | None = None, **options: Any,
) -> StepPlan:
    return plan_step([lengths], LLAMA, num_data=ranks, layers=(1,), placement=placement, topology=topology, cost=cost,
                     **{"ping_pong": False, **options})


def sent(step: StepPlan) -> tuple[float, float]:
    """What forward's calls send, in all and from the busiest; through the busiest NIC alone where there are nodes."""
    total = busiest = 0.0
    for plan in step.forward_plans():
        if plan.topology is not None and plan.topology.levels():
            outer, _ = traffic_in_hops(plan.layout, plan.tasks, plan.topology.node)
            matrix = outer.matrix_bytes(plan.model, plan.tp)     # [source, destination]
            busiest += float(max(matrix.sum(axis=0).max(), matrix.sum(axis=1).max()))
            continue
        sender = plan.summary().bytes_sent
        total, busiest = total + float(sender.sum()), busiest + float(sender.max())
    return total, busiest


def slowest(step: StepPlan) -> float:
    """Seconds of the slowest server, over all calls both ways."""
    return sum(plan.summary().seconds or 0.0 for plan in step.plans)


def assert_no_worse(lengths: np.ndarray, ranks: int, topology: Topology | None, **options: Any) -> str:
    mine = placed_step(lengths, ranks, "balanced", topology, **options)
    theirs = placed_step(lengths, ranks, "given", topology, **options)
    if options.get("cost") is None:
        assert all(one <= other for one, other in zip(sent(mine), sent(theirs), strict=True))
    elif mine.placement == "balanced" and slowest(theirs) <= slowest(mine):  # held against given's plan in pairs
        in_pairs = placed_step(lengths, ranks, "given", topology, **{**options, "cost": None})
        most = np.maximum(sent(in_pairs), sent(theirs))
        assert (np.array(sent(mine)) <= most).all()
    assert mine.placement is not None and theirs.placement == "given"
    if mine.placement == "given":
        assert same_columns(mine.plans[0].layout, theirs.plans[0].layout)
    return mine.placement


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 8), st.integers(1, 6000), st.sampled_from([0, 1, 2, 3]))
def test_never_worse_than_given(seed: int, ranks: int, tokens_per_rank: int, ranks_per_node: int) -> None:
    topology = Topology.regular(ranks, ranks_per_node) if ranks_per_node else None
    assert_no_worse(random_lengths(seed, ranks * tokens_per_rank), ranks, topology)


def test_one_document_over_many_ranks_falls_back_to_given() -> None:
    assert assert_no_worse(np.array([32 * 65_536]), 32, None) == "given"


@pytest.mark.parametrize("topology", [None, Topology.regular(32, 8)])
def test_short_documents_between_long_ones_are_placed(topology: Topology | None) -> None:
    assert assert_no_worse(sample_lengths("prolong", 32 * 65_536, seed=2), 32, topology) == "balanced"


@pytest.mark.parametrize("topology", [None, Topology.regular(16, 4)])
@pytest.mark.parametrize("sampler", ["prolong", "lognormal"])
def test_never_worse_in_seconds_or_in_halves(sampler: str, topology: Topology | None) -> None:
    lengths = sample_lengths(sampler, 16 * 8192, seed=1)
    assert_no_worse(lengths, 16, topology, cost=AttentionTime.of(shipped_table("h200"), LLAMA))
    assert_no_worse(lengths, 16, topology, ping_pong=True, tolerance=0.2)


def test_never_worse_over_a_pipeline_with_dedicated_servers() -> None:
    lengths = [np.array([32_768]), sample_lengths("prolong", 32_768, seed=4), np.array([8192] * 4)]
    mine, theirs = (plan_step(lengths, LLAMA, num_data=4, layers=(2, 1), placement=placement, speed=np.ones(9))
                    for placement in ("balanced", "given"))
    mine.validate()
    assert all(one <= other for one, other in zip(sent(mine), sent(theirs), strict=True))


def test_each_micro_batch_has_the_placement_that_loads_senders_less() -> None:
    """One document over all ranks is cheaper in the loader's order; short ones between long ones are placed."""
    lengths = [np.array([32 * 65_536]), sample_lengths("prolong", 32 * 65_536, seed=2)]
    steps = {placement: plan_step(lengths, LLAMA, num_data=32, layers=(1,), placement=placement, ping_pong=False)
             for placement in ("balanced", "given")}
    alone = [placed_step(one, 32, "balanced") for one in lengths]
    assert [step.placement for step in alone] == ["given", "balanced"]
    for number, step in enumerate(alone):
        assert same_columns(steps["balanced"].micro_batches[number].layouts[0], step.micro_batches[0].layouts[0])
    assert steps["balanced"].placement == "balanced"
    assert all(one <= other for one, other in zip(sent(steps["balanced"]), sent(steps["given"]), strict=True))


@pytest.mark.parametrize("cost", [None, AttentionTime.of(shipped_table("h200"), LLAMA)])
def test_steps_in_other_orders_share_the_plans_of_equal_calls(
    monkeypatch: pytest.MonkeyPatch, cost: AttentionTime | None
) -> None:
    lengths = [sample_lengths("prolong", 4 * 8192, seed=seed) for seed in range(4)]
    known: choose.KnownPlans = {}
    options: dict[str, Any] = {"model": LLAMA, "num_data": 4, "ping_pong": False, "cost": cost, "placement": "given"}

    def step(order: str, layers: int, known: choose.KnownPlans | None) -> tuple[StepPlan, int]:
        balancing = Mock(wraps=balance)
        monkeypatch.setattr(choose, "balance", balancing)
        ticks = order_named(order, 2, 4)
        return plan_step(lengths, layers=(layers,) * ticks.num_parts, ticks=ticks, known=known, **options), (
            balancing.call_count)

    _, count = step("same_phase", 2, known)
    assert count == (1 if cost is None else 2) * 5               # 0, 01, 12, 23 and 3, both directions
    again, count = step("interleaved_2", 1, known)
    alone, of_all = step("interleaved_2", 1, None)
    assert count == 0 < of_all                                   # groups of two: 0, 01, 12, 23, 3
    again.validate()
    for mine, theirs in zip(again.plans, alone.plans, strict=True):
        assert same_columns(mine.layout, theirs.layout)
        assert mine.work() == pytest.approx(plan_work(mine), rel=1e-12)
        if theirs.limit is None:
            assert max_over_mean(mine.work(), mine.speed) <= 1.05 + 1e-9


def plan_work(plan: Plan) -> list[float]:
    return server_work(plan.tasks, plan.num_servers, plan.cost, plan.backward, plan.window).tolist()


def test_even_nics_are_worth_more_bytes() -> None:
    """Of long documents in the loader's order the home of each sends most keys; placed, all nodes send some."""
    lengths = sample_lengths("prolong", 64 * 65_536, seed=1)
    lengths = np.append(np.full(4, 8 * 65_536), lengths[np.cumsum(lengths) <= 32 * 65_536])
    lengths = np.append(lengths, 64 * 65_536 - lengths.sum())
    topology = Topology.regular(64, 8)
    assert assert_no_worse(lengths, 64, topology) == "balanced"
    nic = [sent(placed_step(lengths, 64, placement, topology))[1] for placement in ("balanced", "given")]
    assert nic[0] < 0.7 * nic[1]


def test_balanced_of_documents_like_the_ranks_is_no_busier() -> None:
    """Documents of 8 ranks each over 32: equal slices of a document have unequal keys, whoever cuts them."""
    assert_no_worse(np.full(4, 8 * 65_536), 32, None)


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


def step_of_layouts(ticks: Ticks, layouts: list[Layout], layers: Sequence[int],
                    planner: Callable[[Layout], Plan] | None = None, **options: Any) -> StepPlan:
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
    made = step_of_layouts(ticks, layouts, layers, tolerance=tolerance, speed=speed, cost=cost)
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
    first, second = (step_of_layouts(ticks, layouts, layers, speed=speed) for _ in range(2))
    assert np.array_equal(first.calls, second.calls)
    for plan, again in zip(first.plans, second.plans, strict=True):
        assert all(np.array_equal(getattr(plan.tasks, name), getattr(again.tasks, name))
                   for name in TaskTable.__slots__)
        assert plan.limit == again.limit
    for row, depths in zip(ticks.micro_batch, plans_of_ticks(first), strict=True):
        for depth in range(1, len(depths)):
            same = all(number < 0 or count != depth for number, count in zip(row, layers, strict=True))
            assert (depths[depth] is depths[depth - 1]) == same
    level = step_of_layouts(ticks, layouts, [3] * ticks.num_stages, speed=speed)
    assert (level.calls == level.calls[..., :1]).all()


def skewed_step(num_stages: int = 4, num_data: int = 2, num_micro_batches: int = 6,
                tokens_per_rank: int = 8192) -> tuple[Ticks, list[Layout]]:
    layouts = [pack(sample_lengths("prolong", num_data * tokens_per_rank, seed=seed), ranks=num_data)
               for seed in range(num_micro_batches)]
    return same_phase_ticks(num_stages, num_micro_batches), layouts


@pytest.mark.parametrize("num_dedicated", [0, 3])
def test_bubbles_serve_their_share(num_dedicated: int) -> None:
    ticks, layouts = skewed_step()
    step = step_of_layouts(ticks, layouts, (2, 3, 3, 2), speed=np.ones(8 + num_dedicated))
    assert all(plan.limit is None for plan in step.plans)
    for tick in range(ticks.num_ticks):
        alone = replace(ticks, micro_batch=ticks.micro_batch[tick:tick + 1], backward=ticks.backward[tick:tick + 1])
        *_, served = replace(step, ticks=alone, calls=step.calls[:, tick:tick + 1]).work_over_ticks()
        num_active = int(ticks.active[tick].sum())
        working = 2 * num_active + num_dedicated                 # at most this many servers are not in a bubble
        assert served >= 1 - 1.05 * working / (8 + num_dedicated)
        assert (served == 0) == (num_active == 4)
    largest, mean, _ = step.work_over_ticks()
    largest_at_home, mean_at_home, _ = step_of_layouts(ticks, layouts, (2, 3, 3, 2), partial(at_home, model=LLAMA)
                                               ).work_over_ticks()
    assert largest <= 1.05 * mean * (1 + 1e-9)
    assert mean_at_home == pytest.approx(mean * (8 + num_dedicated) / 8)
    assert largest_at_home > 2 * mean_at_home                    # there was something to level


def test_the_same_micro_batches_on_other_stages_are_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    balancing = Mock(wraps=balance)
    monkeypatch.setattr(choose, "balance", balancing)
    ticks, layouts = skewed_step()
    plans = plans_of_ticks(step_of_layouts(ticks, layouts, [2] * 4))
    assert balancing.call_count == 6 + 4 - 1
    forward = [depths[0] for tick, depths in enumerate(plans) if not ticks.phase(tick)]
    backward = [depths[0] for tick, depths in enumerate(plans) if ticks.phase(tick)]
    for one, other in zip(forward, backward, strict=True):
        assert np.sort(one.work()).tolist() == np.sort(other.work()).tolist()
        assert one.summary().bytes_total == other.summary().bytes_total
    balancing.reset_mock()
    slow_first = np.array([0.5] * 2 + [1.0] * 6)                 # another pool from the first stage than from the last
    for depths in plans_of_ticks(step_of_layouts(ticks, layouts, [2] * 4, speed=slow_first)):
        depths[0].validate()
        assert max_over_mean(depths[0].work(), slow_first) <= 1.05 + 1e-9
    assert balancing.call_count == 2 * (6 + 4 - 1)


def test_a_limit_names_the_rank_that_has_it() -> None:
    ticks = same_phase_ticks(3, 1)                               # F on stages 0, 1, 2 and B on 2, 1, 0
    plans = plans_of_ticks(step_of_layouts(ticks, [layout_from_rows([[100]])], (1, 1, 1)))
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
    at = step_of_layouts(same_phase_ticks(2, 1), one, (2, 1), partial(at_home, model=LLAMA))
    assert [len(depths) for depths in plans_of_ticks(at)] == [2, 1, 1, 2]
    assert at.work_over_ticks() == (6 * pairs, 3 * pairs, 0.0)   # 6 layers on one of two ranks each

    ticks, two = same_phase_ticks(2, 2), [*one, layout_from_rows([[512]])]
    for servers, share in ((2, 0.5), (3, 0.25)):                 # alone on a stage: all of it on the idle one; with a
        step = step_of_layouts(ticks, two, (1, 1), partial(misplaced_plan, servers=servers, model=LLAMA))
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


LLAMA, TABLE, DGX = MODELS["llama3-8b"], shipped_table("h200"), cluster_named("dgx-h200")


LENGTHS = sample_lengths("prolong", 8 * 16_384, seed=0)


def links(times: float) -> ClusterShape:
    """Links of another bandwidth, without latencies."""
    return replace(DGX, intra_node_bandwidth=times * DGX.intra_node_bandwidth, intra_node_latency_seconds=0.0,
                   inter_node_bandwidth=times * DGX.inter_node_bandwidth, inter_node_latency_seconds=0.0)


def auto_step(cluster: ClusterShape, **options: object) -> StepPlan:
    return distca.plan_step([LENGTHS], 8, tp=8, tolerance="auto", cost=TABLE, cluster=cluster, placement="given",
                            **options)  # type: ignore[arg-type]


def test_free_links_take_the_tightest_and_slow_links_a_looser_one() -> None:
    free, slow = auto_step(links(1e9)), auto_step(links(0.02))
    assert free.plans[0].tolerance == TOLERANCES[0] < slow.plans[0].tolerance
    for step in (free, slow):
        step.validate()
        assert [one for one, _ in step.tried] == list(TOLERANCES)
        assert min(seconds for _, seconds in step.tried) == dict(step.tried)[step.plans[0].tolerance]


def test_the_seconds_are_those_of_each_step_executed() -> None:
    step, costs = auto_step(DGX), Costs.of(LLAMA, DGX, 8, TABLE)
    for tolerance, seconds in step.tried:
        alone = plan_step([LENGTHS], LLAMA, num_data=8, layers=(32,), tp=8, tolerance=tolerance, placement="given",
                          cost=costs.attention)
        assert execute(alone, costs).seconds == seconds          # the same plan and costs: one computation twice


def test_equal_seconds_leave_the_network_to_others() -> None:
    step = plan_step([LENGTHS], LLAMA, num_data=8, layers=(1,), tolerance=lambda _: 1.0)
    assert step.plans[0].tolerance == TOLERANCES[-1]


def test_a_run_chooses_what_the_api_does_from_lengths_alone() -> None:
    run = load_settings(None, {"model.name": "llama3-8b", "parallel.tensor": "8", "attention.tolerance": "auto",
                               "attention.cost": "h200"})
    trained = [step_plan([LENGTHS], run, LLAMA, 8, attention_time(run, LLAMA)) for _ in range(2)]
    asked = distca.plan_step([LENGTHS], 8, tp=8, tolerance="auto", cost=TABLE)
    assert trained[0].tried == trained[1].tried == asked.tried
    assert trained[0].plans[0].tolerance == asked.plans[0].tolerance


def test_a_strategy_chooses_among_the_same_and_a_number_is_that_number() -> None:
    where = setting(LLAMA, DGX, gpus=32, context=32_768, sequences=4)
    costs, batch = Costs.of(LLAMA, DGX, 8, TABLE), StepDocuments((np.full(4, 32_768),))
    for asked, tolerances in ((AUTO, list(TOLERANCES)), (0.1, [0.1])):
        (first,) = STRATEGIES["distca"].choices(where, asked)    # one order: there is no pipeline
        tried = [first, *STRATEGIES["distca"].variants(where, first, asked, costs, batch)]
        assert sorted(one.tolerance for one in tried if isinstance(one, PoolChoice) and one.ping_pong) == tolerances
    outcome = compare(Question((where,), ("distca",), Source("prolong"), TABLE, AUTO, 1)).outcome("distca")
    assert isinstance(outcome.choice, PoolChoice) and f"tolerance {outcome.choice.tolerance:g}" in outcome.describe()


@pytest.mark.parametrize(("value", "said"), [
    ("tight", "tolerance is 'tight'; give a number from 0 to 1, such as 0.05, or auto"),
    (2, r"tolerance is 2\.?0?; give a number from 0 to 1"), ("nan", "tolerance is nan; give a number")])
def test_what_is_no_tolerance_is_refused(value: float | str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        asked_tolerance(value)


def test_auto_needs_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="tolerance is 'auto' but cost is None; give the latency table"):
        distca.plan_step([[512, 512]], 2, tolerance="auto")
    with pytest.raises(ValueError, match=r"attention\.tolerance is 'auto' but attention.cost is empty; name"):
        check_settings(Settings().with_values({"attention.tolerance": "auto"}))
    with pytest.raises(ValueError, match=r"attention\.tolerance is 'tight'; give a number or auto"):
        load_settings(None, {"attention.tolerance": "tight"})
    with pytest.raises(SystemExit) as ended:
        main(["plan", "prolong", "--tolerance", "auto"])
    assert ended.value.code == 2 and "tolerance is 'auto' but cost is not given" in capsys.readouterr().err


def test_a_toml_keeps_auto(tmp_path: Path) -> None:
    chosen = Settings().with_values({"attention.tolerance": "auto", "attention.cost": "h200"})
    path = tmp_path / "run.toml"
    path.write_text(chosen.to_toml())
    assert load_settings(path, {}) == chosen


def test_plan_says_what_it_chose_and_why(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["plan", "prolong", "--ranks", "4", "--tokens-per-rank", "8k", "--tolerance", "auto", "--cost", "h200",
              "--json"])
    assert not ended.value.code
    found = json.loads(capsys.readouterr().out)
    seconds = found["step_seconds_by_tolerance"]
    assert list(seconds) == [f"{one:g}" for one in TOLERANCES]
    assert found["tolerance"] == max(float(one) for one in seconds if seconds[one] == min(seconds.values()))
    assert found["work_max_over_mean"] <= 1 + found["tolerance"] + 1e-9 or found["limit"]
    assert np.isfinite(found["plan_seconds"])
