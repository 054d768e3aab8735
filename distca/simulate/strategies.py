"""The ways to train on one batch, each at its best, all on the same documents.

Baselines choose among groups: dp replicas of cp data ranks. `choices` lists what a strategy may choose from and `run`
runs one of them; whoever compares keeps the best. Ours are a pool without groups: `disaggregated` is the published
method, documents where the loader puts them, at the tolerance that was asked for; `distca` places documents too, and
may choose another tolerance for the run: a tighter one where the network has time, a looser one where it has not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from distca.baselines.fixed_packing import fixed_rows
from distca.baselines.variable_length import variable_length, variable_length_layout
from distca.baselines.wlb import group_attention
from distca.planning.pipeline_ticks import one_forward_one_backward
from distca.simulate.costs import Costs
from distca.simulate.memory import max_live_tokens, memory, peak_live
from distca.simulate.nano import ping_pong, whole
from distca.simulate.setting import Setting
from distca.simulate.step import Groups, Step, grouped_step, plan_step, served_step
from distca.spec import unknown_name
from distca.workload.layout import Layout

_MOST_SHARDS = 4_000_000  # of one candidate: beyond, context parallelism cuts documents into dust
_CAPS = (8.0, 4.0, 3.0, 2.5, 2.0, 1.75, 1.5, 1.35, 1.2, 1.1, 1.05, 1.02)  # tokens over a chunk's mean, widest first


@dataclass(frozen=True, slots=True)
class Choice:
    """One way to run a strategy."""

    packing: str = "given"        # fixed or variable for groups; given or balanced for ours
    sharding: str = "pool"        # document, sequence or adaptive for groups
    cp: int = 1
    loosened: float = 1.0         # ours: times the tolerance that was asked for; below 1 is tighter

    def describe(self, setting: Setting) -> str:
        grid = f"pp {setting.pp}, {setting.num_micro_batches} micro-batches" if setting.pp > 1 else "no pipeline"
        if self.sharding == "pool":
            loosened = f", tolerance × {self.loosened:g}" if self.loosened != 1.0 else ""
            return f"{self.packing} placement{loosened}, {grid}"
        return f"{self.packing} rows, dp {setting.num_data // self.cp} x cp {self.cp} by {self.sharding}, {grid}"


STRATEGIES = ("fixed_packing", "variable_length", "per_document_cp", "wlb_ideal", "disaggregated", "distca", "bound")
BASELINES = STRATEGIES[:4]
_GROUPED = {  # packings and shardings of each baseline
    "fixed_packing": (("fixed", "sequence"),),
    "variable_length": (("variable", "document"),),
    "per_document_cp": (("fixed", "document"),),
    "wlb_ideal": (("variable", "adaptive"), ("fixed", "adaptive")),
}
_LOOSENED = (0.2, 1.0, 4.0)  # times the tolerance: what distca chooses from
_PLACEMENT = {"disaggregated": "given", "distca": "balanced"}


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """One step's documents: sequences of `context` tokens, in the loader's order."""

    sequences: tuple[np.ndarray, ...]

    def lengths(self) -> np.ndarray:
        return np.concatenate(self.sequences)


def check_strategies(names: Sequence[str]) -> tuple[str, ...]:
    """The names in display order, or a ValueError for one that is unknown."""
    for name in names:
        if name not in STRATEGIES:
            raise unknown_name("strategy", name, STRATEGIES)
    if not names:
        raise ValueError(f"strategies is empty; give one or more of: {', '.join(STRATEGIES)}")
    return tuple(name for name in STRATEGIES if name in names)


def choices(name: str, setting: Setting) -> list[Choice]:
    """What the strategy may choose from in this setting."""
    if name not in _GROUPED:
        loosened = _LOOSENED if name == "distca" else (1.0,)
        return [Choice(_PLACEMENT.get(name, "given"), loosened=times) for times in loosened]
    found = []
    for cp in _divisors(setting.num_data):
        dp = setting.num_data // cp
        for packing, sharding in _GROUPED[name]:
            if packing == "variable" or setting.sequences_per_micro_batch % dp == 0:
                found.append(Choice(packing, sharding, cp))
    return found


def _divisors(number: int) -> list[int]:
    return [value for value in range(1, number + 1) if number % value == 0]


def run(
    name: str, choice: Choice, setting: Setting, costs: Costs, batch: Batch, tolerance: float, *, record: bool = False,
    exposed: bool = False,
) -> tuple[Step, float] | None:
    """The step, and its seconds with free links where `exposed` asks for them; None where the choice does not fit."""
    if name == "bound":
        step = bound_step(setting, costs, batch)
        return step, step.seconds
    if choice.sharding == "pool":
        return _run_served(choice, setting, costs, batch, tolerance, record, exposed)
    groups = _groups(choice, setting, costs, batch)
    if groups is None:
        return None
    step = grouped_step(setting, costs, groups, record=record)
    free = grouped_step(setting, costs.without_network(), groups).seconds if exposed else step.seconds
    return step, free


def _run_served(
    choice: Choice, setting: Setting, costs: Costs, batch: Batch, tolerance: float, record: bool, exposed: bool
) -> tuple[Step, float]:
    each = setting.sequences_per_micro_batch
    nanos = [ping_pong(np.concatenate(batch.sequences[at:at + each]), setting.num_data, choice.packing, tolerance)
             for at in range(0, setting.num_sequences, each)]
    plans = plan_step(setting, costs, list(nanos), min(choice.loosened * tolerance, 1.0))
    step = served_step(setting, costs, list(nanos), plans, record=record)
    free = served_step(setting, costs.without_network(), list(nanos), plans).seconds if exposed else step.seconds
    return step, free


def single_stream(setting: Setting, costs: Costs, batch: Batch, tolerance: float, placement: str = "balanced") -> Step:
    """Ours without ping-pong: every exchange is waited for."""
    each = setting.sequences_per_micro_batch
    rows = [(whole(np.concatenate(batch.sequences[at:at + each]), setting.num_data, placement, tolerance),)
            for at in range(0, setting.num_sequences, each)]
    return served_step(setting, costs, list(rows), plan_step(setting, costs, list(rows), tolerance))


def _groups(choice: Choice, setting: Setting, costs: Costs, batch: Batch) -> Groups | None:
    """The batch laid over groups; None where it does not fit the memory."""
    cp, count = choice.cp, setting.num_micro_batches
    num_chunks = setting.num_data // cp * count
    lengths = batch.lengths()
    if cp > 1 and 2 * cp * len(lengths) > _MOST_SHARDS:
        return None
    if choice.packing == "fixed":
        groups = _timed(choice, costs, _rows_layout(fixed_rows(batch.sequences, num_chunks)), count)
        return groups if _fits(setting, costs, groups) else None
    work = _work(setting, costs, lengths, cp)
    mean = setting.num_tokens / num_chunks
    most = max_live_tokens(setting, costs) * cp
    for cap in _CAPS:
        if cap * mean > 2 * most:
            continue
        chunk = variable_length(lengths, work, num_chunks=num_chunks, max_tokens=int(cap * mean))
        if chunk is None:
            return None
        groups = _timed(choice, costs, variable_length_layout(lengths, chunk, num_chunks), count)
        if _fits(setting, costs, groups):
            return groups
    return None


def _rows_layout(rows: list[np.ndarray]) -> Layout:
    lengths = np.concatenate(rows)
    rank = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
    return Layout(lengths, np.arange(len(lengths)), np.zeros_like(lengths), lengths, rank, len(rows))


def _timed(choice: Choice, costs: Costs, layout: Layout, count: int) -> Groups:
    found = group_attention(layout, costs.table, cp=choice.cp, sharding=choice.sharding)
    scale = costs.attention_scale
    return Groups(choice.cp, scale * found.forward.reshape(count, -1), scale * found.backward.reshape(count, -1),
                  found.tokens.reshape(count, -1))


def _work(setting: Setting, costs: Costs, lengths: np.ndarray, cp: int) -> np.ndarray:
    """Seconds that a document adds to each rank of its group: attention and linear layers, forward and backward."""
    attention = sum(costs.attention_seconds(lengths, lengths, backward=way) for way in (False, True))
    linear = sum(sum(costs.segment_seconds(lengths.astype(np.float64), way)) for way in (False, True))
    return np.asarray((attention + linear) / cp)


def _fits(setting: Setting, costs: Costs, groups: Groups) -> bool:
    ticks = one_forward_one_backward(setting.pp, len(groups.tokens))
    gathered = peak_live(ticks, groups.gathered()) if groups.cp > 1 else None
    held = memory(setting, costs, peak_live(ticks, groups.tokens), live_gathered=gathered)
    return held.peak <= setting.cluster.memory_bytes


def bound_step(setting: Setting, costs: Costs, batch: Batch) -> Step:
    """No plan can be faster: attention perfectly divided over the pool, what it sends free, no gradient to wait for.

    Linear layers, TP traffic and the pipeline's fill and drain remain, as no plan of attention changes them.
    """
    lengths = batch.lengths()
    own = np.full(1, float(setting.tokens_per_rank))
    total = 0.0
    attention = 0.0
    for way in (False, True):
        linear = sum(float(part[0]) for part in costs.segment_seconds(own, way)) * setting.layers_per_stage
        head = float(costs.head_seconds(own, way)[0])
        total += linear * (setting.num_micro_batches + setting.pp - 1) + head * setting.num_micro_batches
        attention += float(costs.attention_seconds(lengths, lengths, backward=way).sum()) * setting.model.num_layers
    attention /= setting.num_pool
    parameters = max(costs.stage_parameters(stage, setting.pp) for stage in range(setting.pp))
    seconds = total + attention + costs.optimizer_seconds(parameters, setting.num_data)
    live = np.full((setting.pp, setting.num_data), float(setting.tokens_per_rank))
    busy = (total * setting.num_micro_batches / (setting.num_micro_batches + setting.pp - 1) + attention) / seconds
    return Step(seconds, min(busy, 1.0), np.full(setting.num_pool, attention), memory(setting, costs, live))
