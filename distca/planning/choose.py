"""Plan a step: lay out its micro-batches, balance every attention call, choose placement and tolerance by the plans.

Attention has no weights, so any rank can compute any stage's tasks: the pool of a tick is every rank of every stage.
Active stages bring the documents of their micro-batches, idle stages bring none and serve, and the work of a tick is
balanced over all of them. Backward ticks have their own plans, as other stages are idle in them and backward's seconds
are not forward's.

Balanced placement saves bytes by keeping queries at home, which pays where short documents fill up the ranks of long
ones. Where nearly all documents are long there is nothing to fill up with: the slices of a document then have equal
work but unequal length, late ranks gather almost all of its keys, and moving a few rectangles out of the loader's
order is cheaper. No bound known before planning separates the two cases in general. So both are planned, unless an
outline of the given order, which takes a small part of the time, is enough.

Where exchanges hide behind computing, tighter balance is free; where they do not, the bytes that looser balance saves
are time. Only a whole step's predicted seconds decide it, so `auto` plans at a few tolerances and keeps the quickest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np

from distca.columns import added
from distca.cost.attention_time import AttentionTime
from distca.planning.balance import balance, outline_of_nodes
from distca.planning.plan import Plan, max_over_mean, server_work
from distca.planning.schedule import IDLE, Ticks, same_phase_ticks, tick_layout
from distca.planning.step import NO_CALL, MicroBatch, StepPlan
from distca.planning.tasks import tasks_at_home
from distca.spec import ModelShape
from distca.validation import UserError, check_whole, short
from distca.workload.layout import Layout
from distca.workload.packing import (
    NO_CUTS,
    Aim,
    DocumentWork,
    causal_work,
    check_pool,
    check_tolerance,
    pack_ping_pong,
    pack_whole,
)
from distca.workload.topology import Topology

AUTO: Literal["auto"] = "auto"
DEFAULT_TOLERANCE = 0.05
TOLERANCES = (0.01, 0.05, 0.2)  # that auto chooses from
StepSeconds = Callable[[StepPlan], float]


def asked_tolerance(value: float | str) -> float | Literal["auto"]:
    """A number from 0 to 1, also as text, or `auto`."""
    if value == AUTO:
        return AUTO
    try:
        number = float(value)
    except ValueError:
        raise UserError(f"tolerance is {short(value)}; give a number from 0 to 1, such as 0.05, or auto") from None
    check_tolerance(number)
    return number


def plan_step(
    micro_batches: Sequence[np.ndarray], model: ModelShape, *, num_data: int, layers: Sequence[int], tp: int = 1,
    ping_pong: bool = True, placement: str = "balanced", tolerance: float | StepSeconds = DEFAULT_TOLERANCE,
    speed: Sequence[float] | np.ndarray | None = None, cost: AttentionTime | None = None,
    topology: Topology | None = None,
) -> StepPlan:
    """Balance a step over the data ranks of all stages, `layers[s]` layers on stage s, and dedicated servers.

    `micro_batches[m]` are the lengths of micro-batch m's documents, which fill `num_data` ranks. `speed` names the pool
    as in `balance`, and `topology` the nodes of its servers; documents are placed by those of the first stage. Balanced
    placement never sends more than given, in all or from the busiest sender: where it would, the step is given's. With
    `cost`, forward and backward are balanced each in its own seconds, else in causal pairs; then bytes give way where
    given's attention would take longer. Where `tolerance` is a function that predicts a step's seconds, the quickest of
    `TOLERANCES` is taken, the looser of equals.
    """
    pool = check_pool(speed, len(layers) * num_data)
    if cost is not None:
        cost.check_servers(len(pool))
    for count in layers:
        check_whole("layers of a stage", count)
    lengths = [np.asarray(of_batch, dtype=np.int64) for of_batch in micro_batches]
    choose = _planned if placement == "given" else _no_worse_than_given
    inputs = [_Inputs(lengths, model, num_data, tuple(layers), tp, ping_pong, one, pool, cost, topology)
              for one in (TOLERANCES if callable(tolerance) else (tolerance,))]
    steps = [choose(one, placement) for one in inputs]
    if not callable(tolerance):
        return steps[0]
    tried = tuple((one, tolerance(step)) for one, step in zip(TOLERANCES, steps, strict=True))
    best = min(reversed(range(len(steps))), key=lambda at: tried[at][1])
    return replace(steps[best], tried=tried)


@dataclass(frozen=True, slots=True, eq=False)
class _Inputs:
    """What a step is planned from, whatever its placement."""

    lengths: list[np.ndarray]  # [micro-batches][documents]
    model: ModelShape
    num_data: int
    layers: tuple[int, ...]
    tp: int
    ping_pong: bool
    tolerance: float
    pool: np.ndarray           # [servers] their speeds
    cost: AttentionTime | None
    topology: Topology | None

    @property
    def speed(self) -> np.ndarray:
        """[servers] `pool` and what `cost` knows of servers that differ."""
        return self.pool if self.cost is None else self.pool * self.cost.speeds(len(self.pool))


def _planned(inputs: _Inputs, placement: str) -> StepPlan:
    """The step of one placement."""
    packed = _packed(inputs, placement)
    ticks = same_phase_ticks(len(inputs.layers), len(packed))
    calls, number = distinct_calls(ticks, packed, inputs.layers, phases_differ=inputs.cost is not None)
    plans = balance_calls(calls, inputs.model, tolerance=inputs.tolerance, speed=inputs.pool, tp=inputs.tp,
                          cost=inputs.cost, topology=inputs.topology)
    return StepPlan(inputs.model, inputs.tp, inputs.layers, packed, ticks, plans, number, True, placement=placement)


def _no_worse_than_given(inputs: _Inputs, placement: str) -> StepPlan:
    """The step of a placement, or given's where that sends less and is known to compute no longer.

    Compared are the bytes of all calls, and those of each call's busiest sender: between nodes where the pool has
    nodes, as everybody waits for these. Given need not be planned where a lower bound on its bytes, or an outline of
    its plans, sends as much already. Outlines are in causal pairs, which send about as much as plans in seconds and
    take a tenth of the time to make.
    """
    step, in_seconds = _planned(inputs, placement), inputs.cost is not None
    sent, has_nodes = _sent(step.forward_plans()), inputs.topology is not None and len(inputs.topology.levels()) > 0
    calls, number = distinct_calls(step.ticks, _packed(inputs, "given"), inputs.layers, phases_differ=False)
    forward = dict.fromkeys(number[0, step.ticks.forward_ticks()].ravel().tolist())
    layouts = [calls[at].layout for at in forward if at != NO_CALL]
    if not in_seconds and (sent <= np.sum([_least_bytes(inputs, layout) for layout in layouts], axis=0)).all():
        return step
    if (in_seconds or has_nodes) and (sent <= _sent(_outline(inputs, layout) for layout in layouts)).all():
        return step
    given = _planned(inputs, "given")
    if (in_seconds or not has_nodes) and (sent <= _sent(given.forward_plans())).all():
        return step
    return step if in_seconds and _slowest_seconds(given) > _slowest_seconds(step) else given


def _packed(inputs: _Inputs, placement: str) -> tuple[MicroBatch, ...]:
    """Every micro-batch over the data ranks of a stage; its share of the pool is the mean over stages."""
    stages = len(inputs.layers)
    ranks = stages * inputs.num_data
    share = np.append(inputs.speed[:ranks].reshape(stages, -1).mean(axis=0),  # of one stage
                      inputs.speed[ranks:].sum() / stages)                    # the last: dedicated servers
    cut = pack_ping_pong if inputs.ping_pong else pack_whole
    aim = Aim(inputs.tolerance, share, work_of_documents(inputs.cost),
              NO_CUTS if inputs.cost is None else inputs.cost.cuts(),
              None if inputs.topology is None else inputs.topology.first(inputs.num_data))
    return tuple(MicroBatch(lengths, cut(lengths, ranks=inputs.num_data, placement=placement, aim=aim))
                 for lengths in inputs.lengths)


def work_of_documents(cost: AttentionTime | None) -> DocumentWork:
    """What placement balances: causal pairs, or forward and backward seconds together, as both share the homes."""
    if cost is None:
        return causal_work
    return lambda start, stop: cost.shards(stop - start, stop) + cost.shards(stop - start, stop, backward=True)


class TickCall(NamedTuple):
    """An attention call that all stages share."""

    running: tuple[int, ...]  # [stages] the micro-batch that each stage brings, -1 for none
    nano: int
    backward: bool            # whether backward's seconds are balanced
    layout: Layout            # over the ranks of all stages


def distinct_calls(
    ticks: Ticks, micro_batches: Sequence[MicroBatch], layers: Sequence[int], *, phases_differ: bool
) -> tuple[list[TickCall], np.ndarray]:
    """The distinct calls of a step, and the index of every call [stages, ticks, nano-batches, depths] into them.

    A layer's depth is its index inside its stage. A call of depth d holds the active stages that have more than d
    layers, over ranks stage * data ranks + data; depths and ticks that hold the same stages have the same call.
    """
    deep, num_nanos = np.asarray(layers), len(micro_batches[0].nano_batches)
    found: dict[tuple[tuple[int, ...], int, bool], int] = {}
    number = np.full((ticks.num_ticks, num_nanos, max(layers)), NO_CALL)
    for tick, nano in np.ndindex(ticks.num_ticks, num_nanos):
        running, backward = ticks.micro_batch[tick], phases_differ and ticks.phase(tick)
        for depth in range(deep[running != IDLE].max(initial=0)):
            stages = tuple(np.where(deep > depth, running, IDLE).tolist())
            number[tick, nano, depth] = found.setdefault((stages, nano, backward), len(found))
    calls = [TickCall(stages, nano, backward, tick_layout(stages, [one.layouts[nano] for one in micro_batches]))
             for stages, nano, backward in found]
    return calls, np.broadcast_to(number, (len(deep), *number.shape))


def balance_calls(
    calls: Sequence[TickCall], model: ModelShape, *, tolerance: float = DEFAULT_TOLERANCE,
    speed: Sequence[float] | np.ndarray | None = None, tp: int = 1, cost: AttentionTime | None = None,
    topology: Topology | None = None,
) -> tuple[Plan, ...]:
    """The plan of every call, as `balance` makes it over the ranks of all stages and dedicated servers after them.

    Micro-batches that run together again on other stages get the same plan, moved to these, where servers allow it.
    """
    plans: list[Plan] = []
    known: dict[tuple[int, bool, tuple[int, ...]], tuple[tuple[int, ...], Plan]] = {}
    for running, nano, backward, layout in calls:
        together = nano, backward, tuple(sorted(running))        # whatever their stages
        plan = _on_other_stages(*known[together], running, layout) if together in known else None
        if plan is None:
            plan = balance(layout, model, tolerance=tolerance, speed=speed, tp=tp, cost=cost, backward=backward,
                           topology=topology)
            known.setdefault(together, (running, plan))
        plans.append(plan)
    return tuple(plans)


def _on_other_stages(before: tuple[int, ...], plan: Plan, after: tuple[int, ...], layout: Layout) -> Plan | None:
    """A plan for the same micro-batches on other stages, as servers of equal speed are interchangeable.

    None where the speeds differ, where ranks that shared a node or pod would not, or where the plan has a limit: its
    text names ranks.
    """
    num_data = layout.num_ranks // len(after)
    moves_to = np.empty(len(after), dtype=np.int64)              # [stages] idle stages follow in order
    moves_to[np.argsort(before, kind="stable")] = np.argsort(after, kind="stable")
    rank = np.arange(plan.num_servers)
    rank[:layout.num_ranks] = (moves_to[:, None] * num_data + np.arange(num_data)).ravel()
    groups = () if plan.topology is None else (plan.topology.node, plan.topology.pod)
    if plan.limit is not None or (plan.speed[rank] != plan.speed).any() or any(
            len(np.unique(np.stack([group, group[rank]]), axis=1).T) != int(group.max()) + 1 for group in groups):
        return None
    tasks = replace(plan.tasks, home=rank[plan.tasks.home], server=rank[plan.tasks.server])
    return replace(plan, layout=layout, tasks=tasks)


def _outline(inputs: _Inputs, layout: Layout) -> Plan:
    """A plan in causal pairs; where the pool has nodes, only of what each node gets."""
    if inputs.topology is None or not inputs.topology.levels():
        return balance(layout, inputs.model, tolerance=inputs.tolerance, speed=inputs.speed, tp=inputs.tp)
    return outline_of_nodes(layout, inputs.model, inputs.topology, tolerance=inputs.tolerance, speed=inputs.speed,
                            tp=inputs.tp)


def _sent(plans: Iterable[Plan]) -> np.ndarray:
    """Bytes of all calls, and the busiest sender's of each call summed: between nodes where there are, else ranks."""
    found = []
    for plan in plans:
        crossing = plan.traffic_between_nodes() if plan.topology is not None and plan.topology.levels() else None
        sent = (plan.traffic() if crossing is None else crossing).sent_bytes(plan.model, plan.tp)
        found.append((sent.sum(), sent.max()))
    return np.sum(found, axis=0)


def _least_bytes(inputs: _Inputs, layout: Layout) -> tuple[float, float]:
    """Bytes that leave ranks, or nodes, in any plan of a layout within the tolerance: in all, and from the busiest.

    Work F leaves as a rectangle of queries and keys in at least 2 √(F·q·kv) bytes, of which its home sends all but the
    outputs. Zero where no bound is known: a document on several ranks or nodes has keys on all of them.
    """
    speed, levels = inputs.speed, () if inputs.topology is None else inputs.topology.levels()
    group = levels[-1] if levels else np.arange(len(speed))
    distinct = np.unique(layout.document * len(speed) + group[layout.rank])
    if len(distinct) > layout.num_documents:
        return 0.0, 0.0
    load = np.bincount(group, weights=server_work(tasks_at_home(layout), len(speed), None))
    cap = (1.0 + inputs.tolerance) * load.sum() * np.bincount(group, weights=speed) / speed.sum()
    surplus = np.maximum(load - cap, 0.0)
    q_bytes, out_bytes, kv_bytes = (size(inputs.tp) for size in (
        inputs.model.q_token_bytes, inputs.model.out_token_bytes, inputs.model.kv_token_bytes))
    return (2.0 * np.sqrt(surplus * (q_bytes + out_bytes) * kv_bytes).sum(),
            2.0 * np.sqrt(surplus * q_bytes * kv_bytes).max())


def _slowest_seconds(step: StepPlan) -> float:
    """Of the slowest server of every distinct call."""
    return added(max_over_mean(work, plan.speed) * float(work.sum() / plan.speed.sum())
                 for plan in step.plans for work in (plan.work(),))
