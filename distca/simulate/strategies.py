"""Training strategies that are compared on the same documents; each turns a batch into step plans.

Baselines divide the data ranks into dp replicas of cp ranks and choose dp and cp. Our strategies share attention among
all ranks: `disaggregated` is the published method at one tolerance, with documents where the loader puts them; `distca`
also places documents, and may run without ping-pong. If the tolerance is `auto`, `distca` chooses it for the run. Both
are planned by `plan_step`, as in a training run.

`bound` is a lower bound on the step time of any strategy. The linear layers of a stage (and the head of the last) take
at least the mean over its ranks. Linear layers and attention together take at least the mean over the pool, with each
document's attention at the table's best rate for shapes with no more keys than the document has. Links between ranks
are free, and attention may run in any bubble and be cut anywhere. Seconds of segments are proportional to tokens, so
how tokens are divided over ranks does not change their sum. The optimizer's seconds are added.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from distca.baselines import (
    Cut,
    adaptive_layout,
    fixed_rows,
    head_tail_layout,
    per_sequence_layout,
    step_of_groups,
    variable_length,
    variable_rows,
)
from distca.cost.work import causal_pairs
from distca.planning.choose import DEFAULT_TOLERANCE, TOLERANCES, plan_step
from distca.planning.orders import one_forward_one_backward
from distca.planning.step import StepPlan
from distca.simulate.costs import Costs, max_live_tokens, memory
from distca.simulate.execute import Step
from distca.simulate.setting import Setting
from distca.spec import unknown_name
from distca.validation import UserError
from distca.workload.topology import Topology

BOUND = "bound"           # the lower bound
_MOST_SHARDS = 4_000_000  # a choice with more is skipped: context parallelism would cut documents too small
_CAPS = (8.0, 4.0, 3.0, 2.5, 2.0, 1.75, 1.5, 1.35, 1.2, 1.1, 1.05, 1.02)  # of a chunk's tokens over the mean


@dataclass(frozen=True, slots=True, eq=False)
class StepDocuments:
    """One step's documents: sequences of `context` tokens, in the loader's order."""

    sequences: tuple[np.ndarray, ...]

    def lengths(self) -> np.ndarray:
        return np.concatenate(self.sequences)

    def micro_batches(self, setting: Setting) -> list[np.ndarray]:
        each = setting.sequences_per_micro_batch
        return [np.concatenate(self.sequences[at:at + each]) for at in range(0, len(self.sequences), each)]


@dataclass(frozen=True, slots=True)
class PoolChoice:
    """Our plan: attention is shared by all ranks."""

    placement: str
    tolerance: float = DEFAULT_TOLERANCE
    ping_pong: bool = True

    def describe(self, setting: Setting) -> str:
        whole = "" if self.ping_pong else ", no ping-pong"
        return f"{self.placement} placement, tolerance {self.tolerance:g}{whole}, {_pipeline(setting)}"

    def floor(self, setting: Setting, costs: Costs) -> float:
        return 0.0

    def step_plan(self, setting: Setting, costs: Costs, batch: StepDocuments) -> StepPlan | None:
        return plan_step(
            batch.micro_batches(setting), setting.model, num_data=setting.num_data, layers=setting.layers,
            tp=setting.tp, ping_pong=self.ping_pong, placement=self.placement, tolerance=self.tolerance,
            cost=costs.attention, topology=Topology.of_cluster(setting.cluster, setting.num_pool, setting.tp))


@dataclass(frozen=True, slots=True)
class GroupChoice:
    """A baseline's plan: dp replicas of cp data ranks."""

    cp: int
    packing: str   # fixed or variable
    sharding: str  # how a group cuts its row: by sequence, by document, or adaptive

    def describe(self, setting: Setting) -> str:
        return (f"{self.packing} rows, dp {setting.num_data // self.cp} x cp {self.cp} by {self.sharding}, "
                f"{_pipeline(setting)}")

    def floor(self, setting: Setting, costs: Costs) -> float:
        """Lower bound on the step: some group runs the layers and gathers the keys of at least the mean tokens."""
        tokens = np.full(1, float(setting.tokens_per_rank))
        keys = setting.tokens_per_rank * self.cp * setting.model.kv_token_bytes(setting.tp)
        layer = sum(float(part[0]) for backward in (False, True) for part in costs.segment_seconds(tokens, backward))
        return setting.num_micro_batches * max(setting.layers) * (layer + 2 * costs.ring_seconds(keys, self.cp))

    def step_plan(self, setting: Setting, costs: Costs, batch: StepDocuments) -> StepPlan | None:
        """Plan a step; None if it cannot fit the memory or would have too many shards."""
        if self.cp > 1 and 2 * self.cp * sum(map(len, batch.sequences)) > _MOST_SHARDS:
            return None
        replicas, lengths = setting.num_data // self.cp, batch.lengths()
        if self.packing == "fixed":
            rows = fixed_rows(batch.micro_batches(setting), replicas)
        else:
            chunk = _chunks_that_fit(self.cp, setting, costs, lengths)
            if chunk is None:
                return None
            rows = variable_rows(lengths, chunk, replicas)
        cuts: dict[str, Cut] = {
            "sequence": per_sequence_layout, "document": head_tail_layout,
            "adaptive": partial(adaptive_layout, cost=costs.attention)}
        return step_of_groups(rows, cuts[self.sharding], setting.model, cp=self.cp, layers=setting.layers,
                              tp=setting.tp)


Choice = PoolChoice | GroupChoice


@dataclass(frozen=True, slots=True)
class Strategy:
    """A strategy by its name on the command line; a comparison keeps the best of its choices."""

    name: str
    is_baseline: bool
    choices: Callable[[Setting, float | str], Sequence[Choice]]  # for a setting and a tolerance or auto


def _grouped(name: str, packings: Sequence[str], sharding: str) -> Strategy:
    def choices(setting: Setting, tolerance: float | str) -> list[Choice]:
        divisors = [cp for cp in range(1, setting.num_data + 1) if setting.num_data % cp == 0]
        return [GroupChoice(cp, packing, sharding) for cp in divisors for packing in packings
                if packing == "variable" or setting.sequences_per_micro_batch % (setting.num_data // cp) == 0]

    return Strategy(name, True, choices)


def _pool(
    name: str, placement: str, tolerances: Sequence[float] = (DEFAULT_TOLERANCE,), may_wait: bool = False
) -> Strategy:
    """Try `tolerances` for auto, and with `may_wait` also no ping-pong, which is faster if exchanges are short."""
    def choices(setting: Setting, tolerance: float | str) -> list[Choice]:
        tried, one = (tolerances, DEFAULT_TOLERANCE) if isinstance(tolerance, str) else ((tolerance,), tolerance)
        return [*(PoolChoice(placement, value) for value in tried), *[PoolChoice(placement, one, False)] * may_wait]

    return Strategy(name, False, choices)


STRATEGIES = {strategy.name: strategy for strategy in (
    _grouped("fixed_packing", ("fixed",), "sequence"),
    _grouped("variable_length", ("variable",), "document"),
    _grouped("per_document_cp", ("fixed",), "document"),
    _grouped("wlb_ideal", ("variable", "fixed"), "adaptive"),
    _pool("disaggregated", "given"),
    _pool("distca", "balanced", TOLERANCES, may_wait=True),
)}
NAMES = (*STRATEGIES, BOUND)  # in display order


def _chunks_that_fit(cp: int, setting: Setting, costs: Costs, lengths: np.ndarray) -> np.ndarray | None:
    """[documents] chunk of each, with token counts as unequal as the memory allows; None if nothing fits."""
    num_chunks = setting.num_data // cp * setting.num_micro_batches
    mean = setting.num_tokens / num_chunks
    most = float(max_live_tokens(setting, costs).min()) * cp
    work = _work(costs, lengths) / cp
    for cap in _CAPS:
        if cap * mean > 2 * most:
            continue
        chunk = variable_length(lengths, work, num_chunks=num_chunks, max_tokens=int(cap * mean))
        if chunk is None:
            return None
        tokens = np.bincount(chunk, weights=lengths, minlength=num_chunks).reshape(setting.num_micro_batches, -1)
        tokens = np.repeat(-(-tokens[tokens.any(axis=1)] // cp), cp, axis=1)  # [micro-batches, data ranks]
        held = memory(costs, setting.layers, one_forward_one_backward(setting.pp, len(tokens)), tokens,
                      gather_ranks=cp)
        if held.peak <= setting.cluster.memory_bytes:
            return chunk
    return None


def _work(costs: Costs, lengths: np.ndarray) -> np.ndarray:
    """[documents] seconds of attention and linear layers, forward and backward."""
    attention = sum(costs.attention.shards(lengths, lengths, backward) for backward in (False, True))
    linear = sum(sum(costs.segment_seconds(lengths.astype(np.float64), backward)) for backward in (False, True))
    return np.asarray(attention + linear)


def _pipeline(setting: Setting) -> str:
    return f"pp {setting.pp}, {setting.num_micro_batches} micro-batches" if setting.pp > 1 else "no pipeline"


def check_names(names: Sequence[str]) -> tuple[str, ...]:
    """Sort the names into display order; refuse unknown ones."""
    for name in names:
        if name not in NAMES:
            raise unknown_name("strategy", name, NAMES)
    if not names:
        raise UserError(f"strategies is empty; give one or more of: {', '.join(NAMES)}")
    return tuple(name for name in NAMES if name in names)


def bound(setting: Setting, costs: Costs, lengths: np.ndarray) -> Step:
    """Return a lower bound on a step that trains on documents of these lengths."""
    layers, tokens = np.array(setting.layers), np.full(1, float(lengths.sum()))
    pairs = causal_pairs(np.zeros_like(lengths), lengths) * setting.model.num_layers
    linear, attention = np.zeros(setting.pp), 0.0                # of all ranks; [stages]
    for backward in (False, True):
        linear += sum(float(part[0]) for part in costs.segment_seconds(tokens, backward)) * layers
        linear[-1] += float(costs.head_seconds(tokens, backward)[0])
        attention += costs.attention.least(pairs, backward, lengths)
    optimizer = costs.optimizer_seconds(setting.layers, setting.num_data)
    floor = max(float(linear.max()) / setting.num_data, (float(linear.sum()) + attention) / setting.num_pool)
    seconds = floor + float(optimizer.max())
    busy = ((float(linear.sum()) + attention) / setting.num_pool + float(optimizer.mean())) / seconds
    equal_tokens = memory(costs, setting.layers, one_forward_one_backward(setting.pp, 1),
                          np.full((1, setting.num_data), setting.tokens_per_rank))  # of one micro-batch
    return Step(seconds, busy, np.full(setting.num_pool, attention / setting.num_pool), equal_tokens)
