"""A step plan: everything one optimizer step does, made in one place from lengths and settings alone.

Micro-batches and the nano-batches they are cut into, the ticks in which stages run them, and the plan of every
attention call, forward and backward. The runtime runs it and the simulator times it; nothing downstream plans again.

Where attention is shared, all stages run the same phase in a tick and one plan divides the tick's attention over every
rank of every stage. Otherwise stages take turns (1F1B) and attention stays among the data ranks of a stage. Without a
pipeline there is one stage, and the two orders are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from distca.columns import added
from distca.cost.attention_time import AttentionTime
from distca.cost.work import attention_backward_flops, attention_flops
from distca.planning.balance import DEFAULT_TOLERANCE, StepSeconds, quickest
from distca.planning.micro_batch import MicroBatch
from distca.planning.placed import Planner, is_no_more, sends_no_more
from distca.planning.plan import Plan, max_over_mean, server_work
from distca.planning.schedule import IDLE, Ticks, one_forward_one_backward, same_phase_ticks
from distca.planning.step_checks import check_calls, check_fields
from distca.planning.tasks import tasks_at_home
from distca.planning.tick_plans import plan_ticks, plan_ticks_by, served_in_bubbles, tick_layout, work_over_ticks
from distca.spec import ModelShape
from distca.validation import UserError
from distca.workload.layout import Layout
from distca.workload.packing import NO_CUTS, DocumentWork, causal_work, check_pool, pack, pack_ping_pong, pack_whole
from distca.workload.topology import Topology

NanoPlans = tuple[tuple[Plan, ...], ...]  # [nano-batch][depth], the index of a layer inside its stage


@dataclass(frozen=True, slots=True)
class StepSummary:
    """A step in a few figures; work is causal pairs, or seconds where they are known."""

    work_before: float        # largest work over the pool's mean, summed over ticks: in order, attention at home
    work_after: float         # the same as planned
    bytes_per_layer: int      # forward bytes that cross ranks, in all, counted in bf16
    served_in_bubbles: float  # share of attention that stages without a micro-batch did


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """One step of all ranks; rank = stage * data ranks + data rank, dedicated servers after them."""

    model: ModelShape
    tp: int
    layers: tuple[int, ...]                     # [stages]
    micro_batches: tuple[MicroBatch, ...]
    ticks: Ticks
    by_stage: tuple[tuple[NanoPlans, ...], ...]  # [stage][tick]; one for all stages where they share attention
    is_shared: bool                             # a plan spans the ranks of all stages, or the data ranks of one
    gather_ranks: int = 1                       # neighbours that gather each other's keys whole, as context parallelism
                                                # does; 1: keys go where plans need them
    placement: str | None = None                # of the documents: given where balanced was asked for and sends more
    tried: tuple[tuple[float, float], ...] = ()  # tolerances that were planned, with the step's predicted seconds

    @property
    def num_stages(self) -> int:
        return len(self.layers)

    @property
    def num_data(self) -> int:
        return self.micro_batches[0].layouts[0].num_ranks

    @property
    def num_nano_batches(self) -> int:
        return len(self.micro_batches[0].nano_batches)

    @property
    def num_tokens(self) -> int:
        return sum(int(micro_batch.lengths.sum()) for micro_batch in self.micro_batches)

    @property
    def num_labels(self) -> int:
        """Tokens with a next one, over all ranks."""
        return self.num_tokens - sum(len(micro_batch.lengths) for micro_batch in self.micro_batches)

    def plans(self) -> list[Plan]:
        """Every plan once."""
        return list({id(plan): plan for ticks in self.by_stage[:1 if self.is_shared else None] for nanos in ticks
                     for depths in nanos for plan in depths}.values())

    def forward_plans(self) -> list[Plan]:
        """Every plan of a forward tick once, in the order of ticks; of stages that share attention."""
        return list({id(plan): plan for tick, nanos in enumerate(self.by_stage[0]) if not self.ticks.phase(tick)
                     for depths in nanos for plan in depths}.values())

    def server_work(self) -> np.ndarray:
        """[servers] attention of the step, both ways, where stages share it: seconds, or forward's pairs.

        Of a pair backward counts as so much more as it has more FLOPs.
        """
        ratio = attention_backward_flops(1.0, self.model, self.tp) / attention_flops(1.0, self.model, self.tp)
        times: dict[int, float] = {}
        for tick, nanos in enumerate(self.by_stage[0]):
            weight = ratio if self.ticks.phase(tick) else 1.0
            for plan, count in _counted([plan for depths in nanos for plan in depths]):
                times[id(plan)] = times.get(id(plan), 0.0) + count * (1.0 if plan.cost is not None else weight)
        work, cost = np.sum([times[id(plan)] * plan.work() for plan in self.plans()], axis=0), self.plans()[0].cost
        return np.asarray(work if cost is None else work / cost.speeds(len(work)))

    def validate(self) -> None:
        """Prove that in every layer, forward and backward, each causal pair of each document is computed once."""
        self.ticks.validate()
        if (self.ticks.num_stages, self.ticks.num_micro_batches) != (self.num_stages, len(self.micro_batches)):
            raise UserError(f"the ticks are for {self.ticks.num_stages} stages and {self.ticks.num_micro_batches} "
                            f"micro-batches but the step has {self.num_stages} and {len(self.micro_batches)}")
        for micro_batch in self.micro_batches:
            micro_batch.validate()
        check_fields(self)
        check_calls(self)
        for plan in self.plans():
            plan.validate()
        for stage, num_layers in enumerate(self.layers):
            for tick in np.flatnonzero(self.ticks.active[:, stage]).tolist():
                for nano in range(self.num_nano_batches):
                    for depth in range(num_layers):
                        self._check_call(stage, tick, nano, depth)

    def _check_call(self, stage: int, tick: int, nano: int, depth: int) -> None:
        """The call has the documents of the micro-batches that run in it, and seconds of its direction."""
        where = f"tick {tick}, nano-batch {nano}, layer {depth} of stage {stage}"
        plan, running = self.by_stage[stage][tick][nano][depth], self.ticks.micro_batch[tick]
        if self.is_shared:
            placing = np.where(np.array(self.layers) > depth, running, IDLE).tolist()
            layout = tick_layout(placing, [micro_batch.layouts[nano] for micro_batch in self.micro_batches])
        else:
            layout = self.micro_batches[running[stage]].layouts[nano]
        if not same_columns(plan.layout, layout):
            raise UserError(f"{where} is planned for other documents than run there; plan its micro-batches")
        if plan.cost is not None and self.is_shared and plan.backward != self.ticks.phase(tick):
            raise UserError(f"{where} is balanced by the other direction's seconds; plan forward and backward apart")

    def summary(self) -> StepSummary:
        in_order = same_phase_ticks(self.num_stages, len(self.micro_batches))
        any_plan, num_layers = self.plans()[0], sum(self.layers)
        cost, servers = any_plan.cost, any_plan.num_servers / any_plan.layout.num_ranks  # for each rank with tokens
        at_home = [tasks_at_home(pack(micro_batch.lengths, ranks=self.num_data)) for micro_batch in self.micro_batches]
        speeds = 1.0 if cost is None else cost.speeds(self.num_data)
        before = servers * _level(in_order, [[count * server_work(tasks, self.num_data, cost, window=window) / speeds
                                              for window, count in self._windows().items()] for tasks in at_home])
        if not self.is_shared:
            calls = [[call for nano in range(self.num_nano_batches) for call in self._calls_of(number, nano)]
                     for number in range(len(self.micro_batches))]
            after = _level(in_order, [[count * plan.work() for plan, count in plans] for plans in calls])
            crossing = sum(count * _bytes(plan) for plans in calls for plan, count in plans)
            return StepSummary(before, after, crossing // num_layers, 0.0)
        by_nano = [[nanos[nano] for nanos in self.by_stage[0]] for nano in range(self.num_nano_batches)]
        largest, mean = np.sum([work_over_ticks(plans) for plans in by_nano], axis=0)
        served = [served_in_bubbles(self.ticks, plans) for plans in by_nano]
        depths = min(self.layers)                                # that all stages have
        crossing = sum(count * _bytes(plan) for plans in by_nano for tick in range(self.ticks.num_ticks)
                       if not self.ticks.phase(tick)             # a tick runs one layer of each stage at a time
                       for plan, count in _counted(plans[tick][:depths]))
        return StepSummary(before, float(largest / mean) if mean else 1.0, crossing // depths // self.num_stages,
                           sum(served) / len(served))

    def _calls_of(self, micro_batch: int, nano: int) -> list[tuple[Plan, int]]:
        """The forward plans of a micro-batch and how many layers follow each; attention is among data ranks."""
        first = [int(np.flatnonzero(self.ticks.micro_batch[:, stage] == micro_batch)[0])
                 for stage in range(self.num_stages)]
        return _counted([plan for stage, tick in enumerate(first) for plan in self.by_stage[stage][tick][nano]])

    def _windows(self) -> dict[int | None, int]:
        """Windows and how many layers have each."""
        counted: dict[int | None, int] = {}
        for window in self.model.layer_windows:
            counted[window] = counted.get(window, 0) + 1
        return counted


def plan_step(
    micro_batches: Sequence[np.ndarray],
    model: ModelShape,
    *,
    num_data: int,
    layers: Sequence[int],
    tp: int = 1,
    ping_pong: bool = True,
    placement: str = "balanced",
    tolerance: float | StepSeconds = DEFAULT_TOLERANCE,
    speed: Sequence[float] | np.ndarray | None = None,
    cost: AttentionTime | None = None,
    topology: Topology | None = None,
) -> StepPlan:
    """Balance a step over the data ranks of all stages, `layers[s]` layers on stage s, and dedicated servers.

    `micro_batches[m]` are the lengths of micro-batch m's documents, which fill `num_data` ranks. `speed` names the pool
    as in `balance`, and `topology` the nodes of its servers; documents are placed by those of the first stage. Balanced
    placement never sends more than given, in all or from the busiest sender: where it would, the step is given's. With
    `cost`, forward and backward are balanced each in its own seconds, else in causal pairs; then bytes give way where
    given's attention would take longer. Where `tolerance` is a function that predicts a step's seconds, the quickest of
    `TOLERANCES` is taken.
    """
    pool = check_pool(speed, len(layers) * num_data)
    if cost is not None:
        cost.check_servers(len(pool))
    lengths = [np.asarray(of_batch, dtype=np.int64) for of_batch in micro_batches]

    def plan(tolerance: float) -> StepPlan:
        planner = _Planner(lengths, model, num_data, tuple(layers), tp, ping_pong, tolerance, pool, cost, topology)
        return planner.no_worse_than_given() if placement == "balanced" else planner.step(placement)

    return quickest(plan, tolerance) if callable(tolerance) else plan(tolerance)


@dataclass(frozen=True, slots=True, eq=False)
class _Planner:
    """What every placement of a step is planned with."""

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

    def step(self, placement: str) -> StepPlan:
        return self._step(placement, partial(
            plan_ticks, model=self.model, layers=self.layers, tolerance=self.tolerance, tp=self.tp, speed=self.pool,
            cost=self.cost, topology=self.topology))

    def no_worse_than_given(self) -> StepPlan:
        """Balanced placement's step, or given's where that sends less, and is known to compute no longer."""
        step = self.step("balanced")
        no_more = sends_no_more(step.forward_plans(), self.in_order)
        if no_more:
            return step
        given = self.step("given")
        if no_more is None and is_no_more(step.forward_plans(), given.forward_plans()):
            return step
        return step if self.cost is not None and _slowest_seconds(given) > _slowest_seconds(step) else given

    def in_order(self, planner: Planner) -> list[Plan]:
        """Forward's plans by another planner, with documents in the given order."""
        return self._step("given", partial(plan_ticks_by, planner, layers=self.layers)).forward_plans()

    def _step(self, placement: str, plan: Callable[[Ticks, Sequence[Layout]], list[tuple[Plan, ...]]]) -> StepPlan:
        packed, stages = tuple(self._packed(lengths, placement) for lengths in self.lengths), len(self.layers)
        ticks = same_phase_ticks(stages, len(packed))
        by_nano = [plan(ticks, [micro_batch.layouts[nano] for micro_batch in packed])
                   for nano in range(len(packed[0].nano_batches))]
        return StepPlan(self.model, self.tp, self.layers, packed, ticks, (tuple(zip(*by_nano, strict=True)),) * stages,
                        True, placement=placement)

    def _packed(self, lengths: np.ndarray, placement: str) -> MicroBatch:
        cut, stages = pack_ping_pong if self.ping_pong else pack_whole, len(self.layers)
        ranks = stages * self.num_data
        pool = self.pool if self.cost is None else self.pool * self.cost.speeds(len(self.pool))
        share = np.append(pool[:ranks].reshape(stages, -1).mean(axis=0),  # of one stage
                          pool[ranks:].sum() / stages)                    # the last: dedicated servers
        return MicroBatch(lengths, cut(
            lengths, ranks=self.num_data, placement=placement, tolerance=self.tolerance, speed=share,
            document_work=work_of_documents(self.cost), cuts=NO_CUTS if self.cost is None else self.cost.cuts(),
            topology=None if self.topology is None else self.topology.first(self.num_data)))


def step_among_data_ranks(
    micro_batches: Sequence[MicroBatch],
    planner: Callable[[Layout], Plan],
    model: ModelShape,
    *,
    layers: Sequence[int],
    tp: int = 1,
    gather_ranks: int = 1,
) -> StepPlan:
    """1F1B, in which the data ranks of a stage keep their attention to themselves, as `planner` says."""
    ticks = one_forward_one_backward(len(layers), len(micro_batches))
    plans = [tuple(planner(layout) for layout in micro_batch.layouts) for micro_batch in micro_batches]
    by_stage = tuple(tuple(
        () if number == IDLE else tuple((plan,) * depth for plan in plans[number])
        for number in ticks.micro_batch[:, stage].tolist()) for stage, depth in enumerate(layers))
    return StepPlan(model, tp, tuple(layers), tuple(micro_batches), ticks, by_stage, False, gather_ranks)


def work_of_documents(cost: AttentionTime | None) -> DocumentWork:
    """What placement balances: causal pairs, or forward and backward seconds together, as both share the homes."""
    if cost is None:
        return causal_work
    return lambda start, stop: cost.shards(stop - start, stop) + cost.shards(stop - start, stop, backward=True)


def _slowest_seconds(step: StepPlan) -> float:
    """Of the slowest server of every call."""
    return added(max_over_mean(work, plan.speed) * float(work.sum() / plan.speed.sum())
                 for plan in step.plans() for work in (plan.work(),))


def same_columns(one: Layout, other: Layout) -> bool:
    """Whether two layouts hold the same tokens in the same places."""
    return one.num_ranks == other.num_ranks and all(
        np.array_equal(getattr(a, name), getattr(b, name))
        for a, b, names in ((one, other, ("lengths", "document", "start", "stop", "rank")),
                            (one.key_only, other.key_only, one.key_only.__slots__)) for name in names)


def _level(ticks: Ticks, work: Sequence[Sequence[np.ndarray]]) -> float:
    """Largest over mean, summed over ticks, when each stage does its own work[micro-batch][nano-batch][data rank]."""
    largest = mean = 0.0
    for running in ticks.micro_batch.tolist():
        active = [work[number] for number in running if number != IDLE]
        for nanos in zip(*active, strict=True):
            together = np.concatenate(nanos)
            largest += float(together.max())
            mean += float(together.sum()) * len(active) / len(running) / len(together)
    return largest / mean if mean else 1.0


def _counted(plans: Sequence[Plan]) -> list[tuple[Plan, int]]:
    """Each plan once, with how often it stands there."""
    times: dict[int, int] = {}
    for plan in plans:
        times[id(plan)] = times.get(id(plan), 0) + 1
    return [(plan, times[id(plan)]) for plan in {id(plan): plan for plan in plans}.values()]


def _bytes(plan: Plan) -> int:
    return int(plan.traffic().sent_bytes(plan.model, plan.tp).sum())
