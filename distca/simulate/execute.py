"""Run a step plan on a clock: the same plan that the runtime runs, in the same order.

Every tick a stage waits for its micro-batch's input, runs its layers over all nano-batches in turn, and sends its
output on. Where stages share attention, one without a micro-batch, or without a layer so deep, serves what the tick's
plans give it: the last depths of a forward, the first of a backward. Where they do not, stages run their own phases
side by side. With two nano-batches the stream computes segment, segment, attention, attention, so that every exchange
has one turn of the other to hide behind; with one, every exchange is waited for.

Beside it weights come in with the first micro-batch, a layer at a time, and gradients go out with the last; both take
what attention leaves of the NIC.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from distca.planning.pipeline_ticks import IDLE
from distca.planning.step import StepPlan
from distca.simulate.calls import Calls, Placed, PlanCosts
from distca.simulate.clock import Clock
from distca.simulate.costs import Costs
from distca.simulate.memory import Memory, memory
from distca.spec import BF16_BYTES, FLOAT32_BYTES
from distca.trace import StepTrace

_NOTHING, _ENTER, _MIDDLE, _LEAVE = range(4)  # what a stage computes between two attention calls


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """What one step did."""

    seconds: float
    busy_share: float              # of the ranks' time
    attention_seconds: np.ndarray  # [ranks] forward and backward, over the step
    memory: Memory
    sent_bytes: float = 0.0        # by attention's exchanges, of one GPU of each rank
    traces: list[StepTrace] | None = None

    @property
    def work_max_over_mean(self) -> float:
        mean = float(self.attention_seconds.mean())
        return float(self.attention_seconds.max()) / mean if mean > 0 else 1.0


def execute(step: StepPlan, costs: Costs, *, plan_costs: PlanCosts | None = None, record: bool = False) -> Step:
    """Time a step plan; `plan_costs` of the same step and attention save working them out again."""
    return _Execution(step, costs, plan_costs or PlanCosts(step, costs.attention), record).run()


class _Execution:
    def __init__(self, step: StepPlan, costs: Costs, plan_costs: PlanCosts, record: bool) -> None:
        self.step, self.costs, self.plan_costs = step, costs, plan_costs
        self.num_data, self.layers = step.num_data, np.array(step.layers)
        own = step.num_stages * step.num_data
        self.num_ranks = max([own, *(plan.num_servers for plan in step.plans())])
        self.stage = np.minimum(np.arange(self.num_ranks) // self.num_data, step.num_stages - 1)
        self.is_own = np.arange(self.num_ranks) < own            # dedicated servers follow
        self.at_end = self.is_own & (self.stage == step.num_stages - 1)
        self.clock = Clock(self.num_ranks, record)
        self.calls = Calls(plan_costs, costs, self.num_ranks)
        self.tokens = np.array([[layout.tokens_per_rank() for layout in micro_batch.layouts]
                                for micro_batch in step.micro_batches], dtype=np.float64)  # [micro-batches, nanos, data]
        self.seconds, self.head = _linear_tables(costs, self.tokens)
        self.weight_seconds = [np.array([costs.gather_seconds(part * size, self.num_data) for part in
                                         costs.stage_parameters(step.layers) / self.layers])
                               for size in (BF16_BYTES, FLOAT32_BYTES)]  # of a layer, [stages]
        self.arrived = np.zeros((2, len(step.micro_batches), self.num_ranks))  # by phase and micro-batch
        self.leaving = np.zeros(self.num_ranks)                  # when what went out in the tick before has arrived
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
                    clock.traces() if self.record else None)

    def _tick(self, tick: int) -> None:
        number, back = self.step.ticks.micro_batch[tick], self.step.ticks.backward[tick]
        active = number != IDLE
        clock, begin = self.clock, self.clock.compute_free
        runs, way = self.is_own & active[self.stage], back[self.stage]
        clock.hold(np.where(runs, self.arrived[way.astype(int), number[self.stage], np.arange(self.num_ranks)], 0.0),
                   "neighbour")
        slots, own_turn = self._slots(active, back)
        tables, heads = self._seconds_of_rows(number, back)
        ready = [clock.compute_free] * len(tables)
        done = clock.compute_free                                # when a rank is through its own micro-batch
        for turn in range(len(slots)):
            kind = np.where(runs, slots[turn][self.stage], _NOTHING)
            ready = self._segments(kind, way, ready, tables, heads)
            done = np.where(kind == _LEAVE, np.max(ready, axis=0), done)
            if turn + 1 == len(slots):
                break
            calls = [self.calls.of(self._placed(tick, turn, own_turn[turn], position)) for position in
                     range(len(tables))]
            there = [call.start(clock, at) for call, at in zip(calls, ready, strict=True)]
            self._beside(number, back, own_turn[turn] >= 0, ready[-1])
            ready = [call.serve(clock, at) for call, at in zip(calls, there, strict=True)]
        self._note(number, back, begin)
        clock.hold(self.leaving)
        self._send(number, back, done)

    def _slots(self, active: np.ndarray, back: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """[turns + 1, stages] what is computed before each attention call and behind the last.

        And [turns, stages] the how-manieth of its own layers a stage is in, -1 where it is in none.
        """
        num_turns = int(self.layers[active].max(initial=0))
        late = num_turns - self.layers if self.step.is_shared else 0 * self.layers
        own = np.arange(num_turns + 1)[:, None] - np.where(back, late, 0)  # [turns + 1, stages]
        slots = np.select([own == 0, (own > 0) & (own < self.layers), own == self.layers],
                          [_ENTER, _MIDDLE, _LEAVE], _NOTHING)
        inside = active & (own[:-1] >= 0) & (own[:-1] < self.layers)
        return slots, np.where(inside, own[:-1], -1)

    def _seconds_of_rows(self, number: np.ndarray, back: np.ndarray) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """For each nano-batch in its turn, backward the last one first: [kinds, ranks] seconds, and the head's."""
        num_rows = self.tokens.shape[1]
        phase = back.astype(int)
        tables, heads = [], []
        for position in range(num_rows):
            row = np.where(back, num_rows - 1 - position, position)  # [stages]
            table = np.zeros((4, self.num_ranks))
            table[:, self.is_own] = np.moveaxis(self.seconds[phase, number, row], 1, 0).reshape(4, -1)
            tables.append(table)
            head = np.zeros(self.num_ranks)
            head[self.at_end] = self.head[phase[-1], number[-1], row[-1]]
            heads.append(head)
        return tables, heads

    def _segments(
        self, kind: np.ndarray, way: np.ndarray, ready: list[np.ndarray], tables: list[np.ndarray],
        heads: list[np.ndarray],
    ) -> list[np.ndarray]:
        """Every row's segment; the head's gradients come before the last one's, and its loss behind it."""
        def run(seconds: list[np.ndarray], ready: list[np.ndarray]) -> list[np.ndarray]:
            return [self.clock.compute("layers", "linear", at, much) for at, much in zip(ready, seconds, strict=True)]

        def head(where: np.ndarray, ready: list[np.ndarray]) -> list[np.ndarray]:
            where = where & self.at_end
            return run([np.where(where, seconds, 0.0) for seconds in heads], ready) if where.any() else ready

        ready = head((kind == _ENTER) & way, ready)
        ready = run([table[kind, np.arange(self.num_ranks)] for table in tables], ready)
        return head((kind == _LEAVE) & ~way, ready)

    def _placed(self, tick: int, turn: int, own_turn: np.ndarray, position: int) -> Placed:
        """The plans of one call, each from its first rank on."""
        step, back = self.step, self.step.ticks.backward[tick]
        num_rows = self.tokens.shape[1]
        if step.is_shared:
            phase = step.ticks.phase(tick)
            depths = step.by_stage[0][tick][num_rows - 1 - position if phase else position]
            return (0, depths[len(depths) - 1 - turn if phase else turn], phase),
        placed = []
        for stage in np.flatnonzero(own_turn >= 0).tolist():
            row, nth = (num_rows - 1 - position, -1 - own_turn[stage]) if back[stage] else (position, own_turn[stage])
            placed.append((stage * self.num_data, step.by_stage[stage][tick][row][nth], bool(back[stage])))
        return tuple(placed)

    def _beside(self, number: np.ndarray, back: np.ndarray, inside: np.ndarray, ready: np.ndarray) -> None:
        """A layer's weights with the first micro-batch, its gradients with the last."""
        for name, phase, when in (("gather weights", False, 0),
                                  ("reduce gradients", True, len(self.step.micro_batches) - 1)):
            now = inside & (back == phase) & (number == when)
            if now.any():
                seconds = np.where(now, self.weight_seconds[phase], 0.0)[self.stage]
                self.clock.background(name, ready, np.where(self.is_own, seconds, 0.0))

    def _send(self, number: np.ndarray, back: np.ndarray, done: np.ndarray) -> None:
        """Activations to the next stage and gradients to the one before; receives are posted when a tick is over."""
        clock, stages = self.clock, np.arange(len(number))
        tokens = np.zeros(self.num_ranks)
        tokens[self.is_own] = self.tokens[number].sum(axis=1).ravel()
        seconds, posted = self.costs.send_seconds(tokens), clock.compute_free
        self.leaving = np.zeros(self.num_ranks)
        for phase, name, end, step in ((False, "send activations", len(stages) - 1, 1),
                                       (True, "send gradients", 0, -1)):
            moves = (number != IDLE) & (back == phase) & (stages != end)
            if not moves.any():
                continue
            sends = self.is_own & moves[self.stage]
            arrival, sent = clock.shift(name, done, posted, seconds, sends, step * self.num_data)
            self.leaving = np.maximum(self.leaving, sent)
            for stage in np.flatnonzero(moves).tolist():
                to = self.is_own & (self.stage == stage + step)
                self.arrived[int(phase), number[stage], to] = arrival[to]

    def _note(self, number: np.ndarray, back: np.ndarray, begin: np.ndarray) -> None:
        if not self.record:
            return
        end = self.clock.compute_free
        for stage, micro_batch in enumerate(number.tolist()):
            name, lane = ("bubble", "bubble") if micro_batch == IDLE else (
                f"{'backward' if back[stage] else 'forward'} {micro_batch}", "pipeline")
            self.clock.note(name, lane, begin, end, self.is_own & (self.stage == stage))

    def _buffers(self) -> np.ndarray:
        """[ranks] bytes held for others in the fullest tick, by all its nano-batches."""
        fullest = np.zeros(self.num_ranks)
        step = self.step
        for stage, ticks in enumerate(step.by_stage[:1] if step.is_shared else step.by_stage):
            for tick, rows in enumerate(ticks):
                phase = step.ticks.phase(tick) if step.is_shared else bool(step.ticks.backward[tick, stage])
                held: list[np.ndarray] = [np.max([self.plan_costs.buffer_bytes(plan, phase) for plan in
                                                  {id(plan): plan for plan in depths}.values()], axis=0)
                                          for depths in rows if depths]
                if held:
                    ranks = slice(stage * self.num_data, stage * self.num_data + len(held[0]))
                    fullest[ranks] = np.maximum(fullest[ranks], np.sum(held, axis=0))
        return fullest


def _linear_tables(costs: Costs, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[phases, micro-batches, nano-batches, kinds, data ranks] seconds of segments; the head's without kinds."""
    tables, heads = [], []
    for backward in (False, True):
        before, behind = costs.segment_seconds(tokens, backward)
        enter, leave = (behind, before) if backward else (before, behind)
        tables.append(np.stack([np.zeros_like(enter), enter, before + behind, leave], axis=2))
        heads.append(costs.head_seconds(tokens, backward))
    return np.stack(tables), np.stack(heads)
