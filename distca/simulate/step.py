"""Whole steps on a clock: ours, whose attention is served by the pool, and groups that gather keys.

Both run the same layers, output head, pipeline sends, weight gathers and gradient reductions, and differ only in who
computes attention and what travels for it. Weights come in with the first micro-batch, a layer at a time, gradients go
out with the last; both take what attention leaves of the NIC.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from distca.planning.pipeline_ticks import Ticks, one_forward_one_backward, same_phase_ticks
from distca.simulate.costs import Costs
from distca.simulate.memory import Memory, memory, peak_live
from distca.simulate.nano import Nano, Served, plan_pool
from distca.simulate.setting import Setting
from distca.simulate.timeline import Beside, Clock, Row, run_layers
from distca.spec import BF16_BYTES, FLOAT32_BYTES
from distca.trace import StepTrace


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """What one strategy did with one batch."""

    seconds: float
    busy_share: float            # of the ranks' time
    attention_seconds: np.ndarray  # [ranks] forward and backward, over the step
    memory: Memory
    traces: list[StepTrace] | None = None

    @property
    def work_max_over_mean(self) -> float:
        mean = float(self.attention_seconds.mean())
        return float(self.attention_seconds.max()) / mean if mean > 0 else 1.0


@dataclass(frozen=True, slots=True, eq=False)
class _Common:
    """What every strategy shares: per-rank seconds that no plan changes."""

    setting: Setting
    costs: Costs

    def stages(self, values: np.ndarray) -> np.ndarray:
        """[stages] -> [ranks]"""
        return np.repeat(values, self.setting.num_data)

    def beside(self, backward: bool, now: np.ndarray) -> Beside | None:
        """Gathers or reductions of one layer's weights, for the stages where this is the time."""
        if not now.any():
            return None
        setting, costs = self.setting, self.costs
        size = FLOAT32_BYTES if backward else BF16_BYTES
        seconds = [costs.gather_seconds(
            costs.stage_parameters(stage, setting.pp) / setting.layers_per_stage * size, setting.num_data)
            for stage in range(setting.pp)]
        return Beside("reduce gradients" if backward else "gather weights", self.stages(np.array(seconds) * now))

    def at_end(self) -> np.ndarray:
        """[ranks] whether the rank is of the last stage, which has the output head."""
        return np.arange(self.setting.num_pool) >= self.setting.num_pool - self.setting.num_data

    def send_seconds(self, tokens: np.ndarray) -> np.ndarray:
        """Hidden states from stage to stage: each GPU sends its own share of them."""
        if self.costs.free:
            return np.zeros_like(tokens)
        network = self.costs.network
        size = tokens * (self.setting.model.hidden * BF16_BYTES / self.setting.tp)
        return np.where(tokens > 0, network.inter_node_latency_seconds + size / network.inter_node_bandwidth, 0.0)

    def finish(self, clock: Clock, held: Memory, record: bool) -> Step:
        setting, costs = self.setting, self.costs
        parameters = np.array([costs.stage_parameters(stage, setting.pp) for stage in range(setting.pp)])
        optimizer = self.stages(parameters) * (costs.optimizer_seconds(1.0, setting.num_data))
        seconds = clock.finish("optimizer", optimizer)
        return Step(seconds, float(clock.busy.mean()) / seconds, clock.attention, held,
                    clock.traces() if record else None)


class _Arrivals:
    """When the input of each (stage, micro-batch) is there, forward and backward."""

    def __init__(self, common: _Common, clock: Clock, ticks: Ticks) -> None:
        self.common, self.clock = common, clock
        self.ready = np.zeros((2, ticks.num_micro_batches, ticks.num_stages, common.setting.num_data))

    def input_of(self, tick: np.ndarray, backward: np.ndarray) -> np.ndarray:
        """[ranks] for the micro-batch that each stage runs; 0 for idle stages."""
        stage = np.arange(len(tick))
        there = self.ready[backward.astype(int), np.maximum(tick, 0), stage]   # [stages, data ranks]
        return np.where(tick[:, None] >= 0, there, 0.0).ravel()

    def send(self, tick: np.ndarray, backward: np.ndarray, done: np.ndarray, tokens: np.ndarray) -> None:
        """Pass a tick's results on: forward to the next stage, backward to the one before."""
        setting, stage = self.common.setting, np.arange(len(tick))
        last = setting.pp - 1
        for way in (False, True):
            runs = (tick >= 0) & (backward == way)
            moves = runs & ((stage > 0) if way else (stage < last))
            seconds = self.common.send_seconds(tokens) * self.common.stages(moves)
            step = -setting.num_data if way else setting.num_data
            if self.common.costs.free:
                arrival = np.roll(done, step)
            else:
                arrival = self.clock.shift("send gradients" if way else "send states", done, seconds, step)
            arrived, ended = arrival.reshape(setting.pp, -1), done.reshape(setting.pp, -1)
            for at in np.flatnonzero(moves).tolist():
                to = at - 1 if way else at + 1
                self.ready[int(way), tick[at], to] = arrived[to]
            if not way and runs[last]:
                self.ready[1, tick[last], last] = ended[last]


def served_step(
    setting: Setting, costs: Costs, micro_batches: list[tuple[Nano, ...]], plans: list[tuple[Served, ...]], *,
    record: bool = False,
) -> Step:
    """Ours: same-phase ticks, one plan per tick and nano-batch over all ranks of all stages."""
    ticks = same_phase_ticks(setting.pp, setting.num_micro_batches)
    common, clock = _Common(setting, costs), Clock(setting.num_pool, record)
    tokens = np.array([[nano.tokens(setting.num_data) for nano in row] for row in micro_batches])  # [mb, nanos, data]
    num_nanos = tokens.shape[1]
    arrivals = [_Arrivals(common, clock, ticks) for _ in range(num_nanos)]
    nth = [0, 0]                                                 # forward and backward ticks so far
    for tick in range(ticks.num_ticks):
        number, phase, way = ticks.micro_batch[tick], ticks.backward[tick], ticks.phase(tick)
        served = plans[nth[way]]
        nth[way] += 1
        rows, nanos = [], list(range(num_nanos))[::-1 if way else 1]
        own = [np.where(number[:, None] >= 0, tokens[np.maximum(number, 0), nano], 0.0).ravel() for nano in nanos]
        for nano, here in zip(nanos, own, strict=True):
            before, behind = costs.segment_seconds(here, way)
            call = served[nano]
            going, coming = call.going[way], call.coming[way]
            if costs.free:
                going, coming = going.without_seconds(), coming.without_seconds()
            rows.append(Row(
                ("ping", "pong")[nano] if num_nanos > 1 else "row", arrivals[nano].input_of(number, phase),
                *((behind, before) if way else (before, behind)),
                call.backward_seconds if way else call.forward_seconds, going, coming))
        head = np.where(common.at_end(), costs.head_seconds(own[0], way), 0.0)
        none = np.zeros(setting.num_pool)
        now = (number == (setting.num_micro_batches - 1 if way else 0))
        ends = run_layers(clock, rows, setting.layers_per_stage, first=head if way else none,
                          last=none if way else head, beside=common.beside(way, now))
        for nano, end, here in zip(nanos, ends, own, strict=True):
            arrivals[nano].send(number, phase, end, here)
    buffers = np.max([np.sum([call.buffer_bytes for call in served], axis=0) for served in plans], axis=0)
    live = peak_live(ticks, tokens.sum(axis=1))
    return common.finish(clock, memory(setting, costs, live, buffers=buffers), record)


def plan_step(
    setting: Setting, costs: Costs, micro_batches: list[tuple[Nano, ...]], tolerance: float
) -> list[tuple[Served, ...]]:
    """One plan per forward tick and nano-batch; backward tick b runs the same micro-batches on the mirrored stages."""
    plans = []
    for tick in range(setting.num_micro_batches + setting.pp - 1):
        active = [(stage, tick - stage) for stage in range(setting.pp) if 0 <= tick - stage < setting.num_micro_batches]
        plans.append(tuple(
            plan_pool([(stage, micro_batches[number][nano]) for stage, number in active], setting.num_data,
                      setting.num_pool, tolerance, costs)
            for nano in range(len(micro_batches[0]))))
    return plans


@dataclass(frozen=True, slots=True, eq=False)
class Groups:
    """Micro-batches of replicas that are groups of cp data ranks: seconds of attention, tokens, keys to gather."""

    cp: int
    forward: np.ndarray   # [micro-batches, data ranks] seconds
    backward: np.ndarray  # [micro-batches, data ranks] seconds
    tokens: np.ndarray    # [micro-batches, data ranks]

    def gathered(self) -> np.ndarray:
        """[micro-batches, data ranks] tokens of the whole group."""
        return np.repeat(self.tokens.reshape(len(self.tokens), -1, self.cp).sum(axis=2), self.cp, axis=1)


def grouped_step(setting: Setting, costs: Costs, groups: Groups, *, record: bool = False) -> Step:
    """1F1B over replicas that only meet at the end; inside one, keys are gathered before attention in every layer.

    Gathered keys are kept for backward, so backward only scatters their gradients. Both are waited for: attention
    needs all keys, and what lies before it all gradients.
    """
    num_micro_batches = len(groups.tokens)
    ticks = one_forward_one_backward(setting.pp, num_micro_batches)
    common, clock = _Common(setting, costs), Clock(setting.num_pool, record)
    arrivals = _Arrivals(common, clock, ticks)
    whole = groups.gathered()
    tables = _group_tables(setting, costs, groups, whole)
    for tick in range(ticks.num_ticks):
        number, phase = ticks.micro_batch[tick], ticks.backward[tick]
        active, back = common.stages(number >= 0), common.stages(phase)
        at = np.maximum(number, 0)

        opening, closing, attention, keys, head = (
            np.where(active, table[phase.astype(int), at].ravel(), 0.0) for table in tables)
        head = np.where(common.at_end(), head, 0.0)
        first, last = np.where(back, head, 0.0), np.where(back, 0.0, head)
        ready = arrivals.input_of(number, phase)
        beside = [common.beside(False, (number == 0) & ~phase),
                  common.beside(True, (number == num_micro_batches - 1) & phase)]
        travels = [travel for travel in beside if travel is not None]
        done = clock.compute("row", ready, opening + first)
        for layer in range(setting.layers_per_stage):
            done = clock.collective("gather keys", done, keys, groups.cp, active & ~back)
            for travel in travels:
                clock.background(travel.name, done, travel.seconds)
            done = clock.compute("attention", done, attention, attention=True)
            done = clock.collective("scatter key gradients", done, keys, groups.cp, active & back)
            done = clock.compute("row", done, closing + (opening if layer + 1 < setting.layers_per_stage else last))
        arrivals.send(number, phase, done, np.where(active, groups.tokens[at].ravel(), 0.0))
    live = peak_live(ticks, groups.tokens)
    gathered = peak_live(ticks, whole) if groups.cp > 1 else None
    return common.finish(clock, memory(setting, costs, live, live_gathered=gathered), record)


def _group_tables(setting: Setting, costs: Costs, groups: Groups, whole: np.ndarray) -> tuple[np.ndarray, ...]:
    """Opening, closing, attention, keys and head: [phases, micro-batches, data ranks] seconds, as a pass meets them."""
    tokens = groups.tokens.astype(np.float64)
    (f_before, f_behind), (b_before, b_behind) = (costs.segment_seconds(tokens, way) for way in (False, True))
    per_byte = costs.gather_seconds(1e9, groups.cp) / 1e9 if groups.cp > 1 else 0.0
    keys = whole * (setting.model.kv_token_bytes(setting.tp) * per_byte)
    return (
        np.stack([f_before, b_behind]),
        np.stack([f_behind, b_before]),
        np.stack([groups.forward, groups.backward]),
        np.stack([keys, keys]),
        np.stack([costs.head_seconds(tokens, way) for way in (False, True)]),
    )
