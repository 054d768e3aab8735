"""Run a step plan on a clock: the same plan that the runtime runs, in the same order.

In every tick a stage waits for its micro-batch's input, runs its layers over all nano-batches in turn, and sends its
output to the next stage. If stages share attention, a stage without a micro-batch only serves, and a stage with fewer
layers only serves in the last calls of a forward tick and in the first calls of a backward tick. Otherwise each stage
runs its phase independently. With two nano-batches the stream computes segment, segment, attention, attention, so that
the exchange of one overlaps with the computation of the other; with one, the stream waits for every exchange.

In the background, weights are gathered during the first micro-batch, layer by layer, and gradients are reduced during
the last. Both use the NIC when attention does not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from distca.cost.mixed_pool import Cost
from distca.planning.schedule import IDLE
from distca.planning.step import NO_CALL, StepPlan
from distca.simulate.calls import Calls, PlanCosts, PlanSet
from distca.simulate.clock import NIC, NVLINK, AllToAll, Clock
from distca.simulate.costs import Costs, linear_tables
from distca.simulate.memory import Memory, memory
from distca.spec import BF16_BYTES, FLOAT32_BYTES, ClusterShape, ModelShape
from distca.trace import StepTrace


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """Result of a simulated step."""

    seconds: float
    busy_share: float              # of the ranks' time
    attention_seconds: np.ndarray  # [ranks] forward and backward, over the step
    memory: Memory
    sent_bytes: float = 0.0        # by attention's exchanges, of one GPU of each rank
    traces: tuple[StepTrace, ...] = ()  # [ranks] if recorded

    @property
    def work_max_over_mean(self) -> float:
        mean = float(self.attention_seconds.mean())
        return float(self.attention_seconds.max()) / mean if mean > 0 else 1.0


def execute(step: StepPlan, costs: Costs, *, plan_costs: PlanCosts | None = None, record: bool = False) -> Step:
    """Time a step plan; `plan_costs` may be passed to several executions of one step."""
    return _Execution(step, costs, plan_costs or PlanCosts(step, costs.attention), record).run()


def step_seconds(model: ModelShape, cluster: ClusterShape, tp: int, table: Cost) -> Callable[[StepPlan], float]:
    """Return a prediction of a step's seconds on a cluster, by which `plan_step` can choose a tolerance."""
    costs = Costs.of(model, cluster, tp, table)
    return lambda step: execute(step, costs).seconds


@dataclass(frozen=True, slots=True, eq=False)
class _Units:
    """The units of one tick, [stages] each."""

    micro_batch: np.ndarray
    part: np.ndarray
    backward: np.ndarray
    weight: np.ndarray       # micro-batch of the weight unit
    layers: np.ndarray       # of the part that the stage's unit runs; a weight unit has one for every turn of the tick
    weight_layers: np.ndarray  # of the part that the stage's unit runs, over `layers`

    @classmethod
    def of(cls, step: StepPlan, tick: int) -> _Units:
        ticks, layers = step.ticks, np.array(step.layers)
        part = np.where(ticks.active[tick], ticks.part[tick], ticks.weight_part[tick])
        turns = layers[part][ticks.active[tick]].max(initial=0)
        beside = (ticks.weight[tick] != IDLE) & (turns > 0)      # a weight unit beside attention
        own = np.where(beside, turns, layers[part])
        return cls(ticks.micro_batch[tick], part, ticks.backward[tick], ticks.weight[tick], own, layers[part] / own)

    @property
    def active(self) -> np.ndarray:
        return self.micro_batch != IDLE

    @property
    def weighs(self) -> np.ndarray:
        return self.weight != IDLE

    def name(self, stage: int) -> tuple[str, str]:
        """Return the name and lane of a stage's span."""
        if not self.active[stage]:
            return (f"weights {self.weight[stage]}", "pipeline") if self.weighs[stage] else ("bubble", "bubble")
        return f"{'backward' if self.backward[stage] else 'forward'} {self.micro_batch[stage]}", "pipeline"


_NONE, _FIRST, _MIDDLE, _LAST = range(4)  # segments: none, before the first attention, between two, after the last


@dataclass(frozen=True, slots=True, eq=False)
class _Slot:
    """Computation between two attention calls: kinds of work in order, each for all nano-batches."""

    computes: tuple[tuple[bool, list[np.ndarray]], ...]  # [kinds] seconds or, if True, the bytes of an all-to-all
    leaves: np.ndarray | None               # [ranks] bool: after this the rank's own layers are done

    @classmethod
    def of(cls, segment: np.ndarray, backward: np.ndarray, nano_batches: list[tuple[np.ndarray, np.ndarray]],
           at_end: np.ndarray) -> _Slot:
        """Collect segments and, on the last stage, the head: before its first segment in backward, else at the end."""
        segments = [(piece % 2 == 1, [tables[piece, segment, np.arange(len(segment))] for tables, _ in nano_batches])
                    for piece in range(len(nano_batches[0][0]))]
        ahead, behind = ([(False, [np.where(where, head, 0.0) for _, head in nano_batches])] * bool(where.any()) for
                         where in (at_end & (segment == _FIRST) & backward, at_end & (segment == _LAST) & ~backward))
        leaves = segment == _LAST
        return cls((*ahead, *segments, *behind), leaves if leaves.any() else None)


class _Execution:
    def __init__(self, step: StepPlan, costs: Costs, plan_costs: PlanCosts, record: bool) -> None:
        self.step, self.costs, self.plan_costs = step, costs, plan_costs
        self.num_data, self.layers = step.num_data, np.array(step.layers)  # [parts]
        self.of_stages = np.bincount(step.ticks.stage_of, weights=self.layers, minlength=step.num_stages)
        own = step.num_stages * step.num_data
        self.num_ranks = max([own, *(plan.num_servers for plan in step.plans)])
        self.stage = np.minimum(np.arange(self.num_ranks) // self.num_data, step.num_stages - 1)
        self.is_own = np.arange(self.num_ranks) < own            # dedicated servers follow
        self.at_end = self.is_own & (self.stage == step.ticks.stage_of[-1])  # holds the last part
        self.clock = Clock(self.num_ranks, record)
        self.calls = Calls(plan_costs, costs, self.num_ranks)
        self.tokens = np.array(                                  # [micro-batches, nano-batches, data ranks]
            [[layout.tokens_per_rank() for layout in micro_batch.layouts] for micro_batch in step.micro_batches],
            dtype=np.float64)
        self.seconds, self.head = linear_tables(costs, self.tokens, step.ticks.splits)
        of_layer = costs.stage_parameters(self.of_stages, step.ticks.spreads_head) / self.of_stages
        self.weight_seconds = [np.array([costs.layer_gather_seconds(part, size, self.num_data) for part in of_layer])
                               for size in (BF16_BYTES, FLOAT32_BYTES)]  # of a layer, [stages]
        self.arrived = np.zeros((2, len(step.layers), *self.tokens.shape[:2], self.num_ranks))  # inputs of nano-batches
        self.done = [self.clock.compute_free] * self.tokens.shape[1]  # when the last tick's nano-batches were computed
        self.leaving = np.zeros(self.num_ranks)                  # when the previous tick's output has been sent
        self.record = record

    def run(self) -> Step:
        for tick, head in enumerate(self.step.ticks.head.tolist()):
            if head == IDLE:
                self._tick(tick)
            else:
                self._head_tick(head)
        step, clock = self.step, self.clock
        optimizer = self.costs.optimizer_seconds(self.of_stages, self.num_data)
        seconds = clock.finish(np.where(self.is_own, optimizer[self.stage], 0.0))
        held = memory(self.costs, step.layers, step.ticks, self.tokens.sum(axis=1), gather_ranks=step.gather_ranks,
                      buffers=self._buffers() if step.gather_ranks == 1 else None)
        return Step(seconds, float(clock.busy.mean()) / seconds, clock.attention, held, float(clock.sent_bytes.sum()),
                    tuple(clock.traces()) if self.record else ())

    def _tick(self, tick: int) -> None:
        units = _Units.of(self.step, tick)
        number, back, active = units.micro_batch, units.backward, units.active
        clock, begin = self.clock, self.clock.compute_free
        runs, backward = self.is_own & active[self.stage], back[self.stage]
        arrived = [np.where(runs, self.arrived[backward.astype(int), units.part[self.stage], number[self.stage],
                                               self._nano(backward, position), np.arange(self.num_ranks)], 0.0)
                   for position in range(len(self.done))]
        clock.hold(arrived[0], "neighbour")
        nano_batches, background = self._nano_batches(units), self._background(units)
        slots: dict[bytes, _Slot] = {}
        ready = [np.maximum(clock.compute_free, one) for one in arrived]
        done, nic_free = ready, clock.send_free[NIC].copy()      # when own layers end; NIC's state then
        layer = self._turns(units)
        segment = _segments(units, layer)
        for turn in range(len(layer)):
            if (key := segment[turn].tobytes()) not in slots:
                own = np.where(self.is_own, segment[turn][self.stage], _NONE)
                at_end = self.at_end & (units.part == len(self.layers) - 1)[self.stage] & active[self.stage]
                slots[key] = _Slot.of(own, backward, nano_batches, at_end)
            slot = slots[key]
            for sends, work in slot.computes:
                run = self._to_experts if sends else partial(clock.compute, "layers", "linear")
                ready = [run(at, one) for at, one in zip(ready, work, strict=True)]
            if slot.leaves is not None:
                done = [np.where(slot.leaves, at, one) for at, one in zip(ready, done, strict=True)]
                nic_free = np.where(slot.leaves, clock.send_free[NIC], nic_free)
            if turn + 1 == len(layer):
                break
            calls = [self.calls.of(plan_set) for plan_set in self._plan_sets(tick, turn, layer[turn], units)]
            there = [call.start(clock, at) for call, at in zip(calls, ready, strict=True)]
            for name, of_layer in background:
                inside = (layer[turn] >= 0) & (layer[turn] < units.layers)
                clock.background(name, ready[-1], np.where(inside[self.stage], of_layer, 0.0))
            ready = [call.serve(clock, at) for call, at in zip(calls, there, strict=True)]
        if len(layer) == 1:                                      # a tick of weight units
            for name, of_layer in background:
                clock.background(name, ready[-1], of_layer * units.layers[self.stage])
        for stage in range(self.step.num_stages if self.record else 0):
            here = self.is_own & (self.stage == stage)
            clock.span(*units.name(stage), begin, np.where(here, clock.compute_free, 0))
        clock.hold(self.leaving)
        self.done, self.leaving = done, np.zeros(self.num_ranks)
        for position, one in enumerate(done):
            self._send(units, position, np.maximum(one, nic_free), begin)

    def _to_experts(self, ready: np.ndarray, num_bytes: np.ndarray) -> np.ndarray:
        """Send tokens to their experts, or back; return when each rank has received, with the last of its group."""
        costs = self.costs
        link = NIC if costs.ep > costs.tensor_links.gpus_per_node else NVLINK
        return self.clock.all_to_all("experts", ready, link, num_bytes, costs.expert_seconds(num_bytes),
                                     costs.expert_ranks)

    def _head_tick(self, micro_batch: int) -> None:
        """Scatter the last part's outputs over all stages, compute the head, and gather the gradients.

        A nano-batch is scattered once it is computed, and gathered while the head computes the next.
        """
        clock, stages, begin = self.clock, self.step.num_stages, self.clock.compute_free
        last = np.tile(int(self.step.ticks.stage_of[-1]) * self.num_data + np.arange(self.num_data), stages)
        others = np.arange(stages * self.num_data)
        waiting = []
        for nano, tokens in enumerate(self.tokens[micro_batch] / stages):  # [data ranks]
            share = np.zeros(self.num_ranks)
            share[self.is_own] = np.tile(tokens, stages)
            size = np.tile(tokens * (self.costs.model.hidden * BF16_BYTES / self.costs.tp), stages)
            scatter, gather = (AllToAll.of(source, target, size, self.num_ranks, self.costs.ranks_per_node,
                                           self.costs.ranks_per_pod).over(self.costs.links)
                               for source, target in ((last, others), (others, last)))
            there = clock.exchange("to the head", begin, scatter)
            waiting.append((nano, there, gather, sum(self.costs.head_seconds(share, back) for back in (False, True))))
        for nano, there, gather, seconds in waiting:
            done = clock.compute("head", "linear", there, np.where(self.is_own, seconds, 0.0))
            self.arrived[1, -1, micro_batch, nano] = clock.exchange("from the head", done, gather)
        if self.record:
            clock.span(f"head {micro_batch}", "pipeline", begin, np.where(self.is_own, clock.compute_free, 0))

    def _turns(self, units: _Units) -> np.ndarray:
        """[turns + 1, stages] how many of its own layers a stage has finished before each turn's attention call.

        Negative until the stage starts: in backward with shared attention, stages with fewer layers first only serve.
        """
        num_turns = int(units.layers[units.active].max(initial=0))
        late = num_turns - units.layers if self.step.is_shared else 0 * units.layers
        return np.arange(num_turns + 1)[:, None] - np.where(units.active & units.backward, late, 0)

    def _nano_batches(self, units: _Units) -> list[tuple[np.ndarray, np.ndarray]]:
        """[pieces, segments, ranks] work and the head's, per nano-batch in order of execution: reversed in backward.

        Weight units are divided over the tick's turns, and run whole if the tick has no calls.
        """
        num_nano, whole = self.tokens.shape[1], not units.active.any()
        phase = units.backward.astype(int)
        found = []
        for position in range(num_nano):
            nano = self._nano(units.backward, position)          # [stages]
            head = np.zeros(self.num_ranks)
            tables = np.zeros((len(self.seconds), 4, self.num_ranks))
            for table, of_piece in zip(tables, self.seconds, strict=True):
                seconds = of_piece[phase, units.micro_batch, nano]  # [stages, segments, data ranks]
                if units.weighs.any():
                    apart = of_piece[2 + phase, units.weight, nano] * units.weight_layers[:, None, None]
                    if whole:
                        apart = apart[:, 1:2] * units.layers[:, None, None] * np.ones((1, 3, 1))
                    seconds = np.where(units.weighs[:, None, None], apart, seconds)
                table[1:, self.is_own] = np.moveaxis(seconds, 1, 0).reshape(3, -1)
            if not self.step.ticks.spreads_head:
                last = int(self.step.ticks.stage_of[-1])
                head[self.at_end] = self.head[phase[last], units.micro_batch[last], nano[last]]
            found.append((tables, head))
        return found

    def _nano(self, backward: np.ndarray, position: int) -> np.ndarray:
        """Return the nano-batch that runs at a position in a tick: the last one first in backward."""
        return np.where(backward, self.tokens.shape[1] - 1 - position, position)

    def _plan_sets(self, tick: int, turn: int, layer: np.ndarray, units: _Units) -> list[PlanSet]:
        """Plans of one turn per nano-batch, in order of execution."""
        step, back = self.step, units.backward.tolist()
        if step.is_shared:                                       # idle stages are in the tick's phase too
            stages = [(0, turn)]
        else:
            stages = [(stage, layer[stage]) for stage in np.flatnonzero(units.active & (layer < units.layers)).tolist()]
        plan_sets: list[list[tuple[int, int, bool]]] = [[] for _ in range(self.tokens.shape[1])]
        for stage, nth in stages:
            calls = step.calls[stage, tick]                      # [nano-batches, depths]
            depth = np.count_nonzero(calls[0] != NO_CALL) - 1 - nth if back[stage] else nth
            for position, plan in enumerate(calls[::-1 if back[stage] else 1, depth].tolist()):
                plan_sets[position].append((stage * self.num_data, plan, back[stage]))
        return [tuple(one) for one in plan_sets]

    def _background(self, units: _Units) -> list[tuple[str, np.ndarray]]:
        """[ranks] seconds of background traffic per layer: weights in the first micro-batch, gradients in the last."""
        found, last = [], len(self.step.micro_batches) - 1
        reduces = units.weighs & (units.weight == last) if self.step.ticks.splits else (
            units.active & units.backward & (units.micro_batch == last))
        for name, now, seconds in (
                ("gather weights", units.active & ~units.backward & (units.micro_batch == 0), self.weight_seconds[0]),
                ("reduce gradients", reduces, self.weight_seconds[1])):
            if now.any():
                found.append((name, np.where(self.is_own, np.where(now, seconds, 0.0)[self.stage], 0.0)))
        return found

    def _send(self, units: _Units, position: int, ready: np.ndarray, begin: np.ndarray) -> None:
        """Send a nano-batch's activations to the next part's stage, or its gradients to the previous one's.

        A rank sends when its own layers are done and its NIC is free, even if it computes and serves others after that.
        If stages share attention, receives are posted at a tick's begin; otherwise ahead, and nobody waits for a send.
        """
        clock, of = self.clock, self.step.ticks.stage_of
        tokens = np.zeros(self.num_ranks)
        nano = self._nano(units.backward, position)
        tokens[self.is_own] = self.tokens[units.micro_batch, nano].ravel()
        seconds = self.costs.send_seconds(tokens, self.num_data)
        posted = clock.compute_free if self.step.is_shared else np.zeros(self.num_ranks)
        for phase, name, way in ((False, "send activations", 1), (True, "send gradients", -1)):
            to = units.part + way                                # [stages] part that receives
            moves = units.active & (units.backward == phase) & (to >= 0) & (to < len(of))
            target = of[np.clip(to, 0, len(of) - 1)]
            offset = target - np.arange(self.step.num_stages)
            for distance in np.unique(offset[moves]).tolist():
                group = moves & (offset == distance)
                if distance == 0:                                # both parts are on one stage
                    arrival = ready
                else:
                    arrival, sent = clock.shift(name, ready, posted, seconds, self.is_own & group[self.stage],
                                                distance * self.num_data)
                    self.leaving = np.maximum(self.leaving, sent if self.step.is_shared else 0.0)
                for stage in np.flatnonzero(group).tolist():
                    there = self.is_own & (self.stage == target[stage])
                    self.arrived[int(phase), to[stage], units.micro_batch[stage], nano[stage], there] = arrival[there]

    def _buffers(self) -> np.ndarray:
        """[ranks] bytes of exchange buffers, summed over nano-batches, in the tick that needs most."""
        fullest, step = np.zeros(self.num_ranks), self.step
        for stage, tick in np.ndindex(1 if step.is_shared else step.num_stages, step.ticks.num_ticks):
            phase = step.ticks.phase(tick) if step.is_shared else bool(step.ticks.backward[tick, stage])
            held = [np.max([self.plan_costs.buffer_bytes(at, phase) for at in plans], axis=0)
                    for depths in step.calls[stage, tick].tolist() if (plans := set(depths) - {NO_CALL})]
            if held:
                ranks = slice(stage * self.num_data, stage * self.num_data + len(held[0]))
                fullest[ranks] = np.maximum(fullest[ranks], np.sum(held, axis=0))
        return fullest


def _segments(units: _Units, layer: np.ndarray) -> np.ndarray:
    """[turns + 1, stages] segment that each stage runs before each turn's call."""
    inside = np.where(layer < units.layers, np.where(layer == 0, _FIRST, _MIDDLE), _LAST)
    runs = (units.active | units.weighs) & (layer >= 0) & (layer <= units.layers)
    return np.where(runs, inside, _NONE).astype(np.int8)
