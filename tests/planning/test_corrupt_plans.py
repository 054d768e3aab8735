"""One wrong entry or field of a plan is refused in one line, or attention is still exact by a count of every pair."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import cache
from random import Random
from typing import Any

import numpy as np
import pytest

from distca.cost.attention_time import AttentionTime
from distca.cost.latency_table import analytic_table
from distca.models import MODELS
from distca.planning.balance import balance
from distca.planning.choose import plan_step
from distca.planning.plan import Plan
from distca.planning.schedule import IDLE, tick_layout
from distca.planning.step import StepPlan, same_columns
from distca.planning.tasks import TaskTable, tasks_at_home
from distca.planning.windows import windowed, with_windows
from distca.workload.layout import KeySlices
from distca.workload.packing import pack
from distca.workload.topology import Topology
from tests.support.plans import misplaced_plan

replace: Any = dataclasses.replace  # wrong types on purpose
TINY = MODELS["tiny"]
TIME = AttentionTime.of(analytic_table(TINY, 1e12, max_kv_len=4096), TINY)
ODD = (-2**62, -2**31, -129, -128, -1, 0, 1, 2, 7, 127, 128, 129, 256, 2**31, 2**62)
WRONG: dict[str, Sequence[Any]] = {
    "tolerance": (float("nan"), float("inf"), -0.1, 1.5, "0.05", None), "tp": (0, -1, 3, 1.0, True, 2**40),
    "window": (0, -1, 1, 2, 100, 300, 2.5, float("nan"), True, None, 2**40),
    "num_ranks": (0, -1, 1, 2, 5, 2.0, float("nan"), True, None),
}


@cache
def sound_plans() -> tuple[Plan, ...]:
    """With everything a plan can have: windows, nodes, unlike and dedicated servers, keys only, seconds, many parts."""
    lengths = np.array([900, 130, 380, 64, 62])
    found = [misplaced_plan(pack(lengths, ranks=3), 3, TINY)]
    options: list[dict[str, Any]] = [{}, {"speed": [1.0, 0.0, 2.0, 0.5, 1.0]}, {"cost": TIME}]
    found += [balance(pack(lengths, ranks=3), TINY, tolerance=0.02, **chosen) for chosen in options]
    nodes = Topology.regular(4, 2)
    found.append(balance(pack(lengths, ranks=4, placement="balanced", topology=nodes), TINY, tolerance=0.02,
                         topology=nodes))
    found += [windowed(plan, window) for plan in found[:3] for window in (1, 150)]
    step = plan_step([np.array([1500, 36])], TINY, num_data=2, layers=(1,), tolerance=0.02)
    found += [plan for plan in step.plans if len(plan.layout.key_only)]
    assert len(found) == 12 and any((plan.tasks.home != plan.tasks.server).any() for plan in found)
    for plan in found:
        plan.validate()
        assert is_exact(plan)
    return tuple(found)


def is_whole(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def slices_of(table: Any) -> list[tuple[int, ...]]:
    return list(zip(*(getattr(table, name).tolist() for name in KeySlices.__slots__), strict=True))


def is_exact(plan: Plan) -> bool:
    """Whether every pair that should be seen is computed once, by a server that exists, from tokens that are there."""
    layout, tasks, only = plan.layout, plan.tasks, plan.layout.key_only
    if not (is_whole(plan.tp) and plan.tp > 0 and TINY.num_heads % plan.tp == 0 and is_whole(layout.num_ranks)
            and (plan.window is None or (is_whole(plan.window) and plan.window > 0))
            and isinstance(plan.tolerance, float) and 0 <= plan.tolerance <= 1
            and len(plan.speed) >= layout.num_ranks and np.isfinite(plan.speed).all() and (plan.speed >= 0).all()
            and (plan.topology is None or plan.topology.num_servers == len(plan.speed))):
        return False
    home = [np.full(length, -1) for length in layout.lengths]    # of queries; -2 where a token is a key only
    for table, is_query in ((layout, True), (only, False)):
        rows = slices_of(table)
        if [row[3] for row in rows] != sorted(row[3] for row in rows):
            return False
        for document, start, stop, rank in rows:
            if not (0 <= document < len(home) and 0 <= start < stop <= len(home[document])
                    and 0 <= rank < layout.num_ranks and (home[document][start:stop] == -1).all()):
                return False
            home[document][start:stop] = rank if is_query else -2
    if any((tokens == -1).any() for tokens in home):
        return False
    seen = [np.zeros((len(tokens), len(tokens)), dtype=np.int8) for tokens in home]
    for document, q_start, q_stop, kv_start, kv_stop, at_home, server in zip(
            *(getattr(tasks, name).tolist() for name in TaskTable.__slots__), strict=True):
        if not (0 <= document < len(home) and 0 <= q_start < q_stop <= len(home[document])
                and (home[document][q_start:q_stop] == at_home).all() and 0 <= server < len(plan.speed)
                and 0 <= kv_start <= kv_stop and (kv_stop == q_stop or kv_stop <= q_start)):
            return False
        if kv_start < kv_stop and plan.speed[server] == 0:
            return False
        seen[document][q_start:q_stop, kv_start:kv_stop] += 1
    for tokens, count in zip(home, seen, strict=True):
        hidden = len(tokens) if plan.window is None else min(plan.window, len(tokens))
        should = np.tril(np.ones_like(count)) - np.tril(np.ones_like(count), -hidden)
        if (np.where(should == 1, count, 1)[tokens >= 0] != 1).any():
            return False
    return True


def with_entry(column: np.ndarray, draw: Random) -> Any:
    """The column with one entry changed, or itself as something else than such a column."""
    values: list[Any] = column.tolist()
    how = draw.randrange(12)
    if how == 0:
        return values[:-1]
    if how == 1:
        return [*values, draw.choice((0, *values))]
    if how == 2:
        return [values, values]
    if not values:
        return [draw.choice(ODD)]
    at, other = (draw.randrange(len(values)) for _ in range(2))
    if how == 3:
        values[at] = draw.choice((0.5, float("nan"), float("inf"), "x", None, 1e300, 2**64))
        return values
    if how == 4:
        values[at], values[other] = values[other], values[at]
    else:
        values[at] = draw.choice((draw.choice(ODD), values[at] + draw.choice(ODD), values[other]))
    return values


def with_column(record: Any, draw: Random, names: Sequence[str]) -> Any:
    name = draw.choice(names)
    if draw.randrange(8) == 0:                                   # two columns change places
        other = draw.choice(names)
        return replace(record, **{name: getattr(record, other), other: getattr(record, name)})
    return replace(record, **{name: with_entry(getattr(record, name), draw)})


def corrupted(plan: Plan, draw: Random) -> Plan:
    """With one thing changed; constructors may refuse it."""
    layout, what = plan.layout, draw.randrange(20)
    if what < 8:
        return replace(plan, tasks=with_column(plan.tasks, draw, TaskTable.__slots__))
    if what == 8:                                                # tasks lost, doubled, in another order
        index = list(range(len(plan.tasks)))
        at = draw.randrange(len(index))
        index = draw.choice((index[:at] + index[at + 1:], [*index, at], index[::-1], []))
        return replace(plan, tasks=plan.tasks.take(np.array(index, dtype=np.int64)))
    if what < 12:
        return replace(plan, layout=with_column(layout, draw, ("document", "start", "stop", "rank")))
    if what == 12:
        return replace(plan, layout=replace(layout, lengths=with_entry(layout.lengths, draw)))
    if what == 13:
        return replace(plan, layout=replace(layout, num_ranks=draw.choice(WRONG["num_ranks"])))
    if what == 14:
        return replace(plan, layout=replace(layout, key_only=with_column(layout.key_only, draw, KeySlices.__slots__)))
    if what < 17:
        speed: list[Any] = plan.speed.tolist()
        speed[draw.randrange(len(speed))] = draw.choice((float("nan"), float("inf"), -1.0, 0.0, 1e308, 5.0, "x", None))
        return replace(plan, speed=draw.choice((speed, speed, plan.speed[:-1], [*plan.speed, 1.0], [plan.speed])))
    if what == 17:
        count = draw.randrange(1, 7)
        return replace(plan, topology=Topology(*(np.array(draw.choices((-1, 0, 0, 1), k=count)) for _ in range(2))))
    name = draw.choice(("tolerance", "tp", "window"))
    return replace(plan, **{name: draw.choice(WRONG[name])})


def check(make: Callable[[], Any], is_sound: Callable[[Any], bool]) -> bool | None:
    """Whether it is refused, in one printable line; None where it is accepted and wrong."""
    try:
        made = make()
        made.validate()
    except ValueError as error:
        assert str(error) and "\n" not in str(error) and len(str(error)) < 600, str(error)
        return True
    return False if is_sound(made) else None


def corrupt_plan(seed: int) -> bool | None:
    draw = Random(seed)
    plan = draw.choice(sound_plans())
    return check(lambda: corrupted(plan, draw), is_exact)


@cache
def sound_steps() -> tuple[StepPlan, ...]:
    lengths = [np.array([700, 130, 66]), np.array([300, 596])]
    steps = [plan_step(lengths, TINY, num_data=2, layers=layers, ping_pong=ping_pong, tolerance=0.02, cost=cost,
                       speed=None if servers is None else np.ones(servers))
             for layers, ping_pong, cost, servers in (((2,), True, None, None), ((1, 2), True, TIME, None),
                                                      ((2,), False, None, 3))]
    steps += [with_windows(step, [100] * sum(step.layers)) for step in steps[:2]]
    for step in steps:
        step.validate()
        assert step_is_exact(step, step)
    return tuple(steps)


def step_is_exact(step: StepPlan, sound: StepPlan) -> bool:
    """Whether every layer computes what the sound step computes there, of documents that are the same."""
    if not all(np.array_equal(one.lengths, other.lengths) for one, other in zip(
            step.micro_batches, sound.micro_batches, strict=True)) or step.layers != sound.layers:
        return False
    for micro_batch in step.micro_batches:
        home = [np.full(length, -1) for length in micro_batch.lengths]
        for nano in micro_batch.nano_batches:
            for document, start, stop, rank in slices_of(nano.layout.key_only):
                if (home[nano.document[document]][start:stop] != rank).any():
                    return False
            for document, start, stop, rank in slices_of(nano.layout):
                number = nano.document[document]
                if number < 0 or (home[number][start:stop] != -1).any():
                    return False
                home[number][start:stop] = rank
        if any((tokens < 0).any() for tokens in home):
            return False
    done: dict[tuple[int, int, bool], int] = {}
    for tick, running in enumerate(step.ticks.micro_batch.tolist()):
        for stage, number in enumerate(running):
            if number == IDLE:
                continue
            backward = bool(step.ticks.backward[tick, stage])
            before = (number, stage + 1, True) if backward and stage + 1 < step.num_stages else (
                (number, stage, False) if backward else (number, stage - 1, False))
            if (number, stage, backward) in done or ((backward or stage) and done.get(before, tick) >= tick):
                return False
            done[number, stage, backward] = tick
            for row in range(step.num_nano_batches):
                for depth in range(step.layers[stage]):
                    plan = step.plans_of(stage)[tick][row][depth]
                    placing = [one if step.layers[at] > depth else IDLE for at, one in enumerate(running)]
                    window = sound.plans_of(stage)[tick][row][depth].window
                    if not (is_exact(plan) and plan.window == window and same_columns(plan.layout, tick_layout(
                            placing, [micro_batch.layouts[row] for micro_batch in step.micro_batches]))):
                        return False
    return len(done) == 2 * step.num_stages * len(step.micro_batches)


def corrupted_step(step: StepPlan, draw: Random) -> StepPlan:
    what = draw.randrange(8)
    if what == 0:
        name, value = draw.choice((("tp", 0), ("tp", 2), ("tp", -1), ("layers", ()), ("layers", (0,) * step.num_stages),
                                   ("layers", (*step.layers, 1)), ("layers", tuple(one + 1 for one in step.layers)),
                                   ("gather_ranks", 0), ("gather_ranks", 3), ("placement", "best"), ("calls", []),
                                   ("micro_batches", step.micro_batches[:1]), ("micro_batches", ()),
                                   ("tried", ((0.05, float("nan")),)), ("tried", ((float("nan"), 1.0),)),
                                   ("is_shared", False), ("micro_batches", step.micro_batches[::-1])))
        return replace(step, **{name: value})
    if what in (1, 2):                                           # an entry of the ticks
        column: Any = getattr(step.ticks, name := draw.choice(("micro_batch", "backward"))).copy()
        at = draw.randrange(column.shape[0]), draw.randrange(column.shape[1])
        column[at] = not column[at] if name == "backward" else draw.choice((-2, -1, 0, 1, 5))
        return replace(step, ticks=replace(step.ticks, **{name: column}))
    if what in (3, 4):                                           # documents and where they live
        number = draw.randrange(len(step.micro_batches))
        one = step.micro_batches[number]
        if draw.randrange(4) == 0:
            one = replace(one, lengths=np.array(with_entry(one.lengths, draw)))
        elif draw.randrange(4) == 0:
            one = replace(one, nano_batches=draw.choice((one.nano_batches[:1], one.nano_batches * 2, ())))
        else:
            nanos = list(one.nano_batches)
            at_nano = draw.randrange(len(nanos))
            nano = nanos[at_nano]
            nanos[at_nano] = replace(nano, document=with_entry(nano.document, draw)) if draw.randrange(2) else replace(
                nano, layout=with_column(nano.layout, draw, ("document", "start", "stop", "rank")))
            one = replace(one, nano_batches=tuple(nanos))
        return replace(step, micro_batches=(*step.micro_batches[:number], one, *step.micro_batches[number + 1:]))
    stage, tick = draw.randrange(step.num_stages), draw.randrange(step.ticks.num_ticks)
    nano_at = draw.randrange(step.num_nano_batches)
    plans, calls = list(step.plans), step.calls.copy()
    changes = (slice(None) if draw.randrange(2) else stage, tick, nano_at)  # in all stages, or in one
    if what == 5:                                                # calls too many or too few, or another's
        other = step.calls[0, draw.randrange(step.ticks.num_ticks), draw.randrange(step.num_nano_batches)]
        calls[changes] = draw.choice((np.append(calls[changes][..., :-1], calls[changes][..., -1:] * 0 - 1, axis=-1),
                                      other, other[::-1], np.full_like(other, -1), np.full_like(other, len(plans))))
        return replace(step, calls=draw.choice((calls, calls, calls[:, :, :-1], calls[:, :-1], calls.repeat(2, 3))))
    plan_at = int(calls[stage, tick, nano_at].max())             # one plan corrupted, in one call or wherever it runs
    found = plans[plan_at]
    bad = replace(found, window=draw.choice((1, 50, 200, None))) if what == 6 else draw.choice((
        lambda: corrupted(found, draw), lambda: replace(found, tasks=tasks_at_home(found.layout)),
        lambda: replace(found, backward=not found.backward), lambda: replace(found, speed=[*found.speed, 1.0])))()
    if draw.randrange(2):
        return replace(step, plans=(*plans[:plan_at], bad, *plans[plan_at + 1:]))
    calls[changes] = np.where(calls[changes] == plan_at, len(plans), calls[changes])
    return replace(step, plans=(*plans, bad), calls=calls)


def corrupt_step(seed: int) -> bool | None:
    draw = Random(seed)
    step = draw.choice(sound_steps())
    return check(lambda: corrupted_step(step, draw), lambda made: step_is_exact(made, step))


def test_each_wrong_field_is_named_with_its_value_and_the_remedy() -> None:
    plan = sound_plans()[1]
    tasks, layout = plan.tasks, plan.layout
    at = int(np.flatnonzero(tasks.kv_stop <= tasks.q_start)[0])
    inverted = tasks.kv_start.copy()
    inverted[at] = tasks.kv_stop[at] + 1
    cases: list[tuple[Callable[[], Any], str]] = [
        (lambda: replace(plan, tasks=replace(tasks, kv_start=inverted)), f"task {at} reads keys .*; begin its keys at"),
        (lambda: replace(plan, speed=[1.0, float("nan"), 1.0]), r"speed is \[1.0, nan, 1.0\]; give finite numbers"),
        (lambda: replace(plan, speed=[1.0, float("inf"), 1.0]), r"speed is \[1.0, inf, 1.0\]; give finite numbers"),
        (lambda: replace(plan, speed=[1.0, -1.0, 1.0]), r"speed is \[1.0, -1.0, 1.0\]; give finite numbers"),
        (lambda: replace(plan, speed=[1.0, 1.0]), r"speed has shape \(2,\) but there are 3 ranks; give one speed per"),
        (lambda: replace(plan, window=0), "window is 0; give at least 1 key, the query's own, or None"),
        (lambda: replace(plan, window=-5), "window is -5; give at least 1 key"),
        (lambda: replace(plan, tp=0), "tp is 0 but model 'tiny' has 8 heads; choose a tp that divides them"),
        (lambda: replace(plan, tolerance=float("nan")), "tolerance is nan; give a number from 0 to 1"),
        (lambda: replace(plan, topology=Topology.regular(4, 2)), "the topology has 4 servers but the pool has 3; give"),
        (lambda: Topology(np.array([0, -1]), np.array([0, 0])), "node is -1 for some server; number nodes from 0"),
        (lambda: replace(tasks, home=tasks.home[:-1]), r"home, server of TaskTable have shapes .*; give each the same"),
        (lambda: replace(tasks, server=tasks.server + 0.5), "server of TaskTable is .*; give whole numbers"),
        (lambda: replace(plan, layout=replace(layout, num_ranks=0)), "num_ranks is 0; give a whole number of"),
        (lambda: replace(layout, rank=[*layout.rank, 2]), r"columns document, start, stop, rank of Layout have shapes"),
    ]
    for make, message in cases:
        with pytest.raises(ValueError, match=message):
            make().validate()


def test_a_corrupt_plan_is_refused_or_exact() -> None:
    results = [corrupt_plan(seed) for seed in range(1500)]
    assert [seed for seed, result in enumerate(results) if result is None] == []
    assert results.count(True) > 1000 and results.count(False) > 20  # not vacuous


def test_a_corrupt_step_is_refused_or_exact() -> None:
    results = [corrupt_step(seed) for seed in range(300)]
    assert [seed for seed, result in enumerate(results) if result is None] == []
    assert results.count(True) > 150 and results.count(False) > 5


@pytest.mark.slow
def test_many_corrupt_plans_and_steps_are_refused_or_exact() -> None:
    for one, cases in ((corrupt_plan, 30_000), (corrupt_step, 5_000)):
        assert [seed for seed in range(10_000, 10_000 + cases) if one(seed) is None] == []
