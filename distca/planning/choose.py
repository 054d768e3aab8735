"""Plan a step: lay out its micro-batches, balance every attention call, and compare placements and tolerances.

Attention has no weights, so any rank can compute any stage's tasks: the pool of a tick is all ranks of all stages. Idle
stages bring no documents and only serve. Backward ticks have their own plans, because other stages are idle in them and
backward takes other seconds than forward.

Balanced placement keeps queries at home, which saves bytes if short documents fill up the ranks of long ones. If nearly
all documents are long, slices of a document get equal work but unequal length, late ranks gather almost all of its
keys, and moving a few rectangles in the loader's order is cheaper. No known bound separates the two cases before
planning. So both are planned, unless a quick outline of the given order already decides.

If exchanges are hidden behind computation, tighter balance is free; if not, looser balance saves bytes and so time.
Only the predicted seconds of the whole step decide, so `auto` plans at several tolerances and keeps the quickest step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np

from distca.columns import added
from distca.cost.attention_time import AttentionTime
from distca.planning.balance import balance, caps, outline_of_nodes
from distca.planning.orders import same_phase_ticks
from distca.planning.plan import Plan, max_over_mean, server_work
from distca.planning.schedule import IDLE, Ticks, tick_layout
from distca.planning.step import NO_CALL, MicroBatch, StepPlan, step_among_data_ranks
from distca.planning.tasks import tasks_at_home
from distca.planning.traffic import traffic_of_nics
from distca.spec import ModelShape
from distca.validation import UserError, check_whole, short
from distca.workload import packing
from distca.workload.layout import Layout
from distca.workload.topology import Topology

AUTO: Literal["auto"] = "auto"
DEFAULT_TOLERANCE = 0.05
TOLERANCES = (0.01, 0.05, 0.2)  # candidates of auto
_QUIETER = 0.9  # part of the busiest sender's bytes below which a micro-batch of several keeps given placement
StepSeconds = Callable[[StepPlan], float]
KnownCalls = dict[tuple[object, ...], tuple[tuple[int, ...], Plan]]  # see `balance_calls`
KnownPlans = dict[tuple[float, bool], KnownCalls]  # by tolerance and ping-pong


def asked_tolerance(value: float | str) -> float | Literal["auto"]:
    """Parse a tolerance: a number from 0 to 1, also as text, or `auto`."""
    if value == AUTO:
        return AUTO
    try:
        number = float(value)
    except ValueError:
        raise UserError(f"tolerance is {short(value)}; give a number from 0 to 1, such as 0.05, or auto") from None
    packing.check_tolerance(number)
    return number


def plan_step(
    micro_batches: Sequence[np.ndarray], model: ModelShape, *, num_data: int, layers: Sequence[int], tp: int = 1,
    ping_pong: bool = True, placement: str = "balanced", tolerance: float | StepSeconds = DEFAULT_TOLERANCE,
    speed: Sequence[float] | np.ndarray | None = None, cost: AttentionTime | None = None,
    topology: Topology | None = None, ticks: Ticks | None = None, known: KnownPlans | None = None,
) -> StepPlan:
    """Balance a step over the data ranks of all stages and dedicated servers.

    The model has `layers[p]` layers in part p. `ticks` order the parts' work; by default there is one part per stage,
    in the order of `same_phase_ticks`. If ticks mix phases, attention is shared among the data ranks of a stage only,
    and both directions are balanced by forward seconds. `micro_batches[m]` are the document lengths of micro-batch
    m, which fill `num_data` ranks. `speed` defines the pool as in `balance`, and `topology` the nodes of its servers;
    documents are placed by the nodes of the first stage. If balanced placement would send more bytes than given
    placement, in total or from the busiest sender, or with nodes through the busiest NIC, the given one is used. With
    `cost`, forward and backward are balanced by their own seconds, else by causal pairs; with `cost`, given placement
    is not used if its attention takes longer. If `tolerance` is a function that predicts a step's seconds, the quickest
    step of `TOLERANCES` is returned, on a tie the looser one. `known` keeps plans for steps of the same micro-batches
    in other orders, if all else but placement, tolerance and ping-pong is the same.
    """
    ticks = same_phase_ticks(len(layers), len(micro_batches)) if ticks is None else ticks
    if (ticks.num_parts, ticks.num_micro_batches) != (len(layers), len(micro_batches)):
        raise UserError(f"ticks have {ticks.num_parts} parts and {ticks.num_micro_batches} micro-batches, layers have "
                        f"{len(layers)} and documents {len(micro_batches)}; make ticks for these")
    pool = packing.check_pool(speed, ticks.num_stages * num_data)
    if cost is not None:
        cost.check_servers(len(pool))
    for count in layers:
        check_whole("layers of a stage", count)
    lengths = [np.asarray(of_batch, dtype=np.int64) for of_batch in micro_batches]
    if not ticks.same_phase and len(pool) > ticks.num_stages * num_data:
        raise UserError(f"speed has {len(pool)} servers, more than {ticks.num_stages * num_data} ranks, but ticks mix "
                        "forward with backward, which dedicated servers cannot serve; use an order of one phase")
    inputs = [_Inputs(lengths, model, num_data, tuple(layers), ticks, tp, ping_pong, one, pool, cost, topology,
                      {} if known is None else known) for one in (TOLERANCES if callable(tolerance) else (tolerance,))]
    steps = [_placed(one, [placement] * len(lengths)) if placement == "given" or not ticks.same_phase else
             _no_worse_than_given(one, placement) for one in inputs]
    if not callable(tolerance):
        return steps[0]
    tried = tuple((one, tolerance(step)) for one, step in zip(TOLERANCES, steps, strict=True))
    best = min(reversed(range(len(steps))), key=lambda at: tried[at][1])
    return replace(steps[best], tried=tried)


@dataclass(frozen=True, slots=True, eq=False)
class _Inputs:
    """Inputs of a step's planning that do not depend on the placement."""

    lengths: list[np.ndarray]  # [micro-batches][documents]
    model: ModelShape
    num_data: int
    layers: tuple[int, ...]    # [parts]
    ticks: Ticks
    tp: int
    ping_pong: bool
    tolerance: float
    pool: np.ndarray           # [servers] their speeds
    cost: AttentionTime | None
    topology: Topology | None
    known: KnownPlans

    @property
    def speed(self) -> np.ndarray:
        """[servers] `pool` times the relative speeds that `cost` measured."""
        return self.pool if self.cost is None else self.pool * self.cost.speeds(len(self.pool))


def _placed(inputs: _Inputs, placements: Sequence[str]) -> StepPlan:
    """Plan the step with the placement of each micro-batch."""
    return _planned(inputs, placements, _packed(inputs, placements))


def _planned(inputs: _Inputs, placements: Sequence[str], packed: tuple[MicroBatch, ...]) -> StepPlan:
    """Plan the step of micro-batches that were packed with these placements."""
    ticks = inputs.ticks
    used = next((one for one in placements if one != "given"), "given")
    if not ticks.same_phase:
        nodes = None if inputs.topology is None else inputs.topology.first(inputs.num_data)
        step = step_among_data_ranks(
            packed, lambda layout: balance(layout, inputs.model, tolerance=inputs.tolerance, tp=inputs.tp,
                                           speed=inputs.pool[:inputs.num_data], cost=inputs.cost, topology=nodes),
            inputs.model, layers=inputs.layers, tp=inputs.tp, ticks=ticks)
        return replace(step, placement=used)
    calls, number = distinct_calls(ticks, packed, inputs.layers, phases_differ=inputs.cost is not None)
    plans = balance_calls(calls, inputs.model, tolerance=inputs.tolerance, speed=inputs.pool, tp=inputs.tp,
                          cost=inputs.cost, topology=inputs.topology, placements=placements,
                          known=inputs.known.setdefault((inputs.tolerance, inputs.ping_pong), {}))
    return StepPlan(inputs.model, inputs.tp, inputs.layers, packed, ticks, plans, number, True, placement=used)


def _no_worse_than_given(inputs: _Inputs, placement: str) -> StepPlan:
    """Plan the step with a placement, or with given placement where that sends less and does not compute longer.

    First, a micro-batch keeps given placement if the busiest sender of its calls (those in which it has the most work)
    then sends clearly less. After that the step is compared with one in which all are given, by the bytes of all calls
    and those of each call's busiest sender. If the pool has nodes, only each call's busiest NIC counts: it is done
    last, and the bytes of the others cost no time. Given placement is not planned if a lower bound on its bytes, or an
    outline of its plans, already sends at least as much. Outlines count causal pairs: they send about as much as plans
    in seconds, in a tenth of the planning time.
    """
    count, in_seconds = len(inputs.lengths), inputs.cost is not None
    step, given = _placed(inputs, [placement] * count), None
    all_given = ["given"] * count, _packed(inputs, ["given"] * count)
    has_nodes = inputs.topology is not None and len(inputs.topology.levels()) > 0
    calls, number = distinct_calls(step.ticks, all_given[1], inputs.layers, phases_differ=False)
    forward = dict.fromkeys(number[0, step.ticks.forward_ticks()].ravel().tolist())
    here = [calls[at] for at in forward if at != NO_CALL]
    sent = _sent(step.forward_plans())
    if in_seconds or has_nodes:
        theirs = _sent(_outline(inputs, call.layout) for call in here)
    elif (sent.sum(axis=0) <= np.sum([_least_bytes(inputs, call.layout) for call in here], axis=0)).all():
        return step
    else:
        given = _planned(inputs, *all_given)
        theirs = _sent(given.forward_plans())
    work = np.array([packing.causal_work(np.zeros_like(lengths), lengths).sum() for lengths in inputs.lengths])
    heaviest = [max(call.running, key=lambda one: -1.0 if one == IDLE else work[one]) for call in here]
    mine, others = (np.bincount(heaviest, weights=columns[:, -1], minlength=count) for columns in (sent, theirs))
    quieter = others < _QUIETER * mine                           # [micro-batches]
    if quieter.any() and not quieter.all():
        step = _placed(inputs, np.where(quieter, "given", placement).tolist())
        sent = _sent(step.forward_plans())
    if (in_seconds or has_nodes) and (sent.sum(axis=0) <= theirs.sum(axis=0)).all():
        return step
    if given is None:
        given = _planned(inputs, *all_given)
        theirs = _sent(given.forward_plans())
    if (sent.sum(axis=0) <= theirs.sum(axis=0)).all():
        return step
    return step if in_seconds and _slowest_seconds(given) > _slowest_seconds(step) else given


def _packed(inputs: _Inputs, placements: Sequence[str]) -> tuple[MicroBatch, ...]:
    """Pack every micro-batch over the data ranks of a stage, by the mean speeds over stages."""
    stages = inputs.ticks.num_stages
    ranks = stages * inputs.num_data
    share = np.append(inputs.speed[:ranks].reshape(stages, -1).mean(axis=0),  # data ranks of a stage
                      inputs.speed[ranks:].sum() / stages)                    # last: dedicated servers
    cut = packing.pack_ping_pong if inputs.ping_pong else packing.pack_whole
    aim = packing.Aim(inputs.tolerance, share, work_of_documents(inputs.cost),
              packing.NO_CUTS if inputs.cost is None else inputs.cost.cuts(),
              None if inputs.topology is None else inputs.topology.first(inputs.num_data))
    return tuple(MicroBatch(lengths, cut(lengths, ranks=inputs.num_data, placement=placement, aim=aim))
                 for lengths, placement in zip(inputs.lengths, placements, strict=True))


def work_of_documents(cost: AttentionTime | None) -> packing.DocumentWork:
    """Return the work that placement balances: causal pairs, or forward plus backward seconds."""
    if cost is None:
        return packing.causal_work
    return lambda start, stop: cost.shards(stop - start, stop) + cost.shards(stop - start, stop, backward=True)


class TickCall(NamedTuple):
    """An attention call that all stages share."""

    running: tuple[int, ...]  # [stages] micro-batch of each stage, -1 for none
    nano: int
    backward: bool            # balanced by backward seconds
    layout: Layout            # over the ranks of all stages


def distinct_calls(
    ticks: Ticks, micro_batches: Sequence[MicroBatch], layers: Sequence[int], *, phases_differ: bool
) -> tuple[list[TickCall], np.ndarray]:
    """Return the distinct calls of a step, and the index into them as [stages, ticks, nano-batches, depths].

    A layer's depth is its index inside its part. A call at depth d covers the active stages whose part has more than d
    layers, over ranks stage * data ranks + data; depths and ticks that cover the same stages share one call.
    """
    num_nanos = len(micro_batches[0].nano_batches)
    found: dict[tuple[tuple[int, ...], int, bool], int] = {}
    number = np.full((ticks.num_ticks, num_nanos, max(layers)), NO_CALL)
    for tick, nano in np.ndindex(ticks.num_ticks, num_nanos):
        running, backward = ticks.micro_batch[tick], phases_differ and ticks.phase(tick)
        deep = np.asarray(layers)[ticks.part[tick]]              # [stages]
        for depth in range(deep[running != IDLE].max(initial=0)):
            stages = tuple(np.where(deep > depth, running, IDLE).tolist())
            number[tick, nano, depth] = found.setdefault((stages, nano, backward), len(found))
    calls = [TickCall(stages, nano, backward, tick_layout(stages, [one.layouts[nano] for one in micro_batches]))
             for stages, nano, backward in found]
    return calls, np.broadcast_to(number, (ticks.num_stages, *number.shape))


def balance_calls(
    calls: Sequence[TickCall], model: ModelShape, *, tolerance: float = DEFAULT_TOLERANCE,
    speed: Sequence[float] | np.ndarray | None = None, tp: int = 1, cost: AttentionTime | None = None,
    topology: Topology | None = None, placements: Sequence[str] = (), known: KnownCalls | None = None,
) -> tuple[Plan, ...]:
    """Balance every call over the ranks of all stages, followed by dedicated servers.

    If the same micro-batches run together again on other stages, their plan is moved to those stages if servers allow.
    `known` has the plans of earlier calls of the same micro-batches by their `placements`, and gets these.
    """
    plans: list[Plan] = []
    known = {} if known is None else known
    for running, nano, backward, layout in calls:
        here = sorted(running)                                   # on any stages
        together = nano, backward, *here, *(placements[one] for one in here if placements and one != IDLE)
        plan = _on_other_stages(*known[together], running, layout) if together in known else None
        if plan is None:
            plan = balance(layout, model, tolerance=tolerance, speed=speed, tp=tp, cost=cost, backward=backward,
                           topology=topology)
            known.setdefault(together, (running, plan))
        plans.append(plan)
    return tuple(plans)


def _on_other_stages(before: tuple[int, ...], plan: Plan, after: tuple[int, ...], layout: Layout) -> Plan | None:
    """Move a plan to other stages of the same micro-batches, as servers of equal speed are interchangeable.

    Return None if speeds differ, if ranks that share a node or pod would be separated, or if the plan has a limit in
    pairs, whose text names ranks.
    """
    if before == after:
        return plan
    num_data = layout.num_ranks // len(after)
    moves_to = np.empty(len(after), dtype=np.int64)              # [stages] idle stages follow in order
    moves_to[np.argsort(before, kind="stable")] = np.argsort(after, kind="stable")
    rank = np.arange(plan.num_servers)
    rank[:layout.num_ranks] = (moves_to[:, None] * num_data + np.arange(num_data)).ravel()
    groups = () if plan.topology is None else (plan.topology.node, plan.topology.pod)
    if (plan.limit is not None and plan.cost is None) or (plan.speed[rank] != plan.speed).any() or any(
            len(np.unique(np.stack([group, group[rank]]), axis=1).T) != int(group.max()) + 1 for group in groups):
        return None
    return plan.renumbered(layout, rank)


def _outline(inputs: _Inputs, layout: Layout) -> Plan:
    """Plan a layout in causal pairs; if the pool has nodes, only down to the share of each node."""
    if inputs.topology is None or not inputs.topology.levels():
        return balance(layout, inputs.model, tolerance=inputs.tolerance, speed=inputs.speed, tp=inputs.tp)
    return outline_of_nodes(layout, inputs.model, inputs.topology, tolerance=inputs.tolerance, speed=inputs.speed,
                            tp=inputs.tp)


def _sent(plans: Iterable[Plan]) -> np.ndarray:
    """Return the bytes of each call and of its busiest sender; with nodes, only the busiest NIC's.

    A NIC sends and receives at the same time, so its busier direction counts.
    """
    found = []
    for plan in plans:
        if plan.topology is not None and plan.topology.levels():
            crossing = traffic_of_nics(plan.layout, plan.tasks, plan.topology.node)
            found.append([max(crossing.sent_bytes(plan.model, plan.tp).max(),
                              crossing.received_bytes(plan.model, plan.tp).max())])
        else:
            sent = plan.traffic().sent_bytes(plan.model, plan.tp)
            found.append([sent.sum(), sent.max()])
    return np.array(found)


def _least_bytes(inputs: _Inputs, layout: Layout) -> tuple[float, float]:
    """Return lower bounds on the bytes, in total and from the busiest sender, of any plan within the tolerance.

    Moving work F as a rectangle of queries and keys takes at least 2 √(F·q·kv) bytes, of which the home sends all but
    the outputs. The bounds are zero if a document is on several ranks, as all of them own keys of it.
    """
    speed = inputs.speed
    distinct = np.unique(layout.document * len(speed) + layout.rank)
    if len(distinct) > layout.num_documents:
        return 0.0, 0.0
    load = server_work(tasks_at_home(layout), len(speed), None)
    surplus = np.maximum(load - caps(load, speed, inputs.tolerance), 0.0)
    q_bytes, out_bytes, kv_bytes = (size(inputs.tp) for size in (
        inputs.model.q_token_bytes, inputs.model.out_token_bytes, inputs.model.kv_token_bytes))
    return (2.0 * np.sqrt(surplus * (q_bytes + out_bytes) * kv_bytes).sum(),
            2.0 * np.sqrt(surplus * q_bytes * kv_bytes).max())


def _slowest_seconds(step: StepPlan) -> float:
    """Return the seconds of the slowest server, summed over distinct calls."""
    return added(max_over_mean(work, plan.speed) * float(work.sum() / plan.speed.sum())
                 for plan in step.plans for work in (plan.work(),))
