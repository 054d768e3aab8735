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

import numpy as np

from distca.cost.mixed_pool import Cost
from distca.planning.schedule import IDLE
from distca.planning.step import NO_CALL, StepPlan
from distca.simulate.calls import Calls, PlanCosts, PlanSet
from distca.simulate.clock import NIC, Clock
from distca.simulate.costs import Costs, Memory, memory
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


_NONE, _FIRST, _MIDDLE, _LAST = range(4)  # segments: none, before the first attention, between two, after the last


@dataclass(frozen=True, slots=True, eq=False)
class _Slot:
    """Computation between two attention calls: kinds of work in order, each for all nano-batches."""

    computes: tuple[list[np.ndarray], ...]  # [kinds][nano-batches][ranks] seconds
    leaves: np.ndarray | None               # [ranks] bool: after this the rank's own layers are done

    @classmethod
    def of(cls, segment: np.ndarray, backward: np.ndarray, nano_batches: list[tuple[np.ndarray, np.ndarray]],
           at_end: np.ndarray) -> _Slot:
        """Collect segments and, on the last stage, the head: before its first segment in backward, else at the end."""
        segments = [table[segment, np.arange(len(segment))] for table, _ in nano_batches]
        ahead, behind = ([np.where(where, head, 0.0) for _, head in nano_batches] if where.any() else None for where in
                         (at_end & (segment == _FIRST) & backward, at_end & (segment == _LAST) & ~backward))
        leaves = segment == _LAST
        return cls(tuple(part for part in (ahead, segments, behind) if part is not None),
                   leaves if leaves.any() else None)


class _Execution:
    def __init__(self, step: StepPlan, costs: Costs, plan_costs: PlanCosts, record: bool) -> None:
        self.step, self.costs, self.plan_costs = step, costs, plan_costs
        self.num_data, self.layers = step.num_data, np.array(step.layers)
        own = step.num_stages * step.num_data
        self.num_ranks = max([own, *(plan.num_servers for plan in step.plans)])
        self.stage = np.minimum(np.arange(self.num_ranks) // self.num_data, step.num_stages - 1)
        self.is_own = np.arange(self.num_ranks) < own            # dedicated servers follow
        self.at_end = self.is_own & (self.stage == step.num_stages - 1)
        self.clock = Clock(self.num_ranks, record)
        self.calls = Calls(plan_costs, costs, self.num_ranks)
        self.tokens = np.array(                                  # [micro-batches, nano-batches, data ranks]
            [[layout.tokens_per_rank() for layout in micro_batch.layouts] for micro_batch in step.micro_batches],
            dtype=np.float64)
        self.seconds, self.head = _linear_tables(costs, self.tokens)
        self.weight_seconds = [np.array([costs.gather_seconds(part * size, self.num_data) for part in
                                         costs.stage_parameters(step.layers) / self.layers])
                               for size in (BF16_BYTES, FLOAT32_BYTES)]  # of a layer, [stages]
        self.arrived = np.zeros((2, len(step.micro_batches), self.num_ranks))  # when a phase's input has arrived
        self.leaving = np.zeros(self.num_ranks)                  # when the previous tick's output has been sent
        self.record = record

    def run(self) -> Step:
        for tick in range(self.step.ticks.num_ticks):
            self._tick(tick)
        step, clock = self.step, self.clock
        optimizer = self.costs.optimizer_seconds(step.layers, self.num_data)
        seconds = clock.finish(np.where(self.is_own, optimizer[self.stage], 0.0))
        held = memory(self.costs, step.layers, step.ticks, self.tokens.sum(axis=1), gather_ranks=step.gather_ranks,
                      buffers=self._buffers() if step.gather_ranks == 1 else None)
        return Step(seconds, float(clock.busy.mean()) / seconds, clock.attention, held, float(clock.sent_bytes.sum()),
                    tuple(clock.traces()) if self.record else ())

    def _tick(self, tick: int) -> None:
        number, back = self.step.ticks.micro_batch[tick], self.step.ticks.backward[tick]
        active = number != IDLE
        clock, begin = self.clock, self.clock.compute_free
        runs, backward = self.is_own & active[self.stage], back[self.stage]
        arrived = self.arrived[backward.astype(int), number[self.stage], np.arange(self.num_ranks)]
        clock.hold(np.where(runs, arrived, 0.0), "neighbour")
        nano_batches, background = self._nano_batches(number, back), self._background(number, back)
        slots: dict[bytes, _Slot] = {}
        ready = [clock.compute_free] * len(nano_batches)
        done, nic_free = clock.compute_free, clock.send_free[NIC].copy()  # when own layers end; NIC's state then
        layer = self._layers(active, back)
        segment = self._segments(active, layer)
        for turn in range(len(layer)):
            if (key := segment[turn].tobytes()) not in slots:
                own = np.where(self.is_own, segment[turn][self.stage], _NONE)
                slots[key] = _Slot.of(own, backward, nano_batches, self.at_end)
            slot = slots[key]
            for seconds in slot.computes:
                ready = [clock.compute("layers", "linear", at, one) for at, one in zip(ready, seconds, strict=True)]
            if slot.leaves is not None:
                done = np.where(slot.leaves, np.max(ready, axis=0), done)
                nic_free = np.where(slot.leaves, clock.send_free[NIC], nic_free)
            if turn + 1 == len(layer):
                break
            calls = [self.calls.of(plan_set) for plan_set in self._plan_sets(tick, turn, layer[turn], active)]
            there = [call.start(clock, at) for call, at in zip(calls, ready, strict=True)]
            for name, of_layer in background:
                inside = active & (layer[turn] >= 0) & (layer[turn] < self.layers)
                clock.background(name, ready[-1], np.where(inside[self.stage], of_layer, 0.0))
            ready = [call.serve(clock, at) for call, at in zip(calls, there, strict=True)]
        self._record_tick(number, back, begin)
        clock.hold(self.leaving)
        self._send(number, back, np.maximum(done, nic_free))

    def _layers(self, active: np.ndarray, back: np.ndarray) -> np.ndarray:
        """[turns + 1, stages] how many of its own layers' attention calls a stage has finished before each turn.

        Negative until the stage starts: in backward with shared attention, stages with fewer layers first only serve.
        """
        num_turns = int(self.layers[active].max(initial=0))
        late = num_turns - self.layers if self.step.is_shared else 0 * self.layers
        return np.arange(num_turns + 1)[:, None] - np.where(back, late, 0)

    def _segments(self, active: np.ndarray, layer: np.ndarray) -> np.ndarray:
        """[turns + 1, stages] segment that each stage runs before each turn's call."""
        inside = np.where(layer < self.layers, np.where(layer == 0, _FIRST, _MIDDLE), _LAST)
        return np.where(active & (layer >= 0) & (layer <= self.layers), inside, _NONE).astype(np.int8)

    def _nano_batches(self, number: np.ndarray, back: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
        """[segments, ranks] seconds and the head's, per nano-batch in order of execution: reversed in backward."""
        num_nano, phase = self.tokens.shape[1], back.astype(int)
        found = []
        for position in range(num_nano):
            nano = np.where(back, num_nano - 1 - position, position)  # [stages]
            table, head = np.zeros((4, self.num_ranks)), np.zeros(self.num_ranks)
            table[1:, self.is_own] = np.moveaxis(self.seconds[phase, number, nano], 1, 0).reshape(3, -1)
            head[self.at_end] = self.head[phase[-1], number[-1], nano[-1]]
            found.append((table, head))
        return found

    def _plan_sets(self, tick: int, turn: int, layer: np.ndarray, active: np.ndarray) -> list[PlanSet]:
        """Plans of one turn per nano-batch, in order of execution."""
        step, back = self.step, self.step.ticks.backward[tick].tolist()
        if step.is_shared:                                       # idle stages are in the tick's phase too
            stages = [(0, turn)]
        else:
            stages = [(stage, layer[stage]) for stage in np.flatnonzero(active & (layer < self.layers)).tolist()]
        plan_sets: list[list[tuple[int, int, bool]]] = [[] for _ in range(self.tokens.shape[1])]
        for stage, nth in stages:
            calls = step.calls[stage, tick]                      # [nano-batches, depths]
            depth = np.count_nonzero(calls[0] != NO_CALL) - 1 - nth if back[stage] else nth
            for position, plan in enumerate(calls[::-1 if back[stage] else 1, depth].tolist()):
                plan_sets[position].append((stage * self.num_data, plan, back[stage]))
        return [tuple(one) for one in plan_sets]

    def _background(self, number: np.ndarray, back: np.ndarray) -> list[tuple[str, np.ndarray]]:
        """[ranks] seconds of background traffic per layer: weights in the first micro-batch, gradients in the last."""
        found = []
        for name, phase, when in (("gather weights", False, 0),
                                  ("reduce gradients", True, len(self.step.micro_batches) - 1)):
            now = (back == phase) & (number == when)
            if now.any():
                seconds = np.where(now, self.weight_seconds[phase], 0.0)[self.stage]
                found.append((name, np.where(self.is_own, seconds, 0.0)))
        return found

    def _send(self, number: np.ndarray, back: np.ndarray, ready: np.ndarray) -> None:
        """Send activations to the next stage and gradients to the previous one; receives are posted at a tick's end.

        A rank sends when its own layers are done and its NIC is free, even if it serves other stages after that.
        """
        clock, stages = self.clock, np.arange(len(number))
        tokens = np.zeros(self.num_ranks)
        tokens[self.is_own] = self.tokens[number].sum(axis=1).ravel()
        seconds, posted = self.costs.send_seconds(tokens, self.num_data), clock.compute_free
        self.leaving = np.zeros(self.num_ranks)
        for phase, name, end, way in ((False, "send activations", len(stages) - 1, 1), (True, "send gradients", 0, -1)):
            moves = (number != IDLE) & (back == phase) & (stages != end)
            if not moves.any():
                continue
            sends = self.is_own & moves[self.stage]
            arrival, sent = clock.shift(name, ready, posted, seconds, sends, way * self.num_data)
            self.leaving = np.maximum(self.leaving, sent)
            for stage in np.flatnonzero(moves).tolist():
                to = self.is_own & (self.stage == stage + way)
                self.arrived[int(phase), number[stage], to] = arrival[to]

    def _record_tick(self, number: np.ndarray, back: np.ndarray, begin: np.ndarray) -> None:
        if not self.record:
            return
        end = self.clock.compute_free
        for stage, micro_batch in enumerate(number.tolist()):
            name, lane = ("bubble", "bubble") if micro_batch == IDLE else (
                f"{'backward' if back[stage] else 'forward'} {micro_batch}", "pipeline")
            self.clock.span(name, lane, begin, np.where(self.is_own & (self.stage == stage), end, 0))

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


def _linear_tables(costs: Costs, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[phases, micro-batches, nano-batches, first/middle/last, data ranks] seconds of segments, and of the head."""
    tables, heads = [], []
    for backward in (False, True):
        before, behind = costs.segment_seconds(tokens, backward)
        enter, leave = (behind, before) if backward else (before, behind)
        tables.append(np.stack([enter, before + behind, leave], axis=2))
        heads.append(costs.head_seconds(tokens, backward))
    return np.stack(tables), np.stack(heads)
