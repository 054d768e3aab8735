"""Training strategies that are compared on the same documents; each turns a batch into step plans.

Baselines divide the data ranks into dp replicas of cp ranks and choose dp and cp. Our strategies share attention among
all ranks: `disaggregated` is the published method at one tolerance, with documents where the loader puts them; `distca`
also places documents, and may run without ping-pong. If the tolerance is `auto`, `distca` chooses it for the run. Both
are planned by `plan_step`, as in a training run, and choose among `planning.orders.orders`.

`bound` is a lower bound on the step time of any strategy. Linear layers, head and attention take at least the mean over
the pool, with each document's attention at the table's best rate for shapes with no more keys than the document has.
Links between ranks are free, work may run in any bubble and on any stage, and attention may be cut anywhere. Seconds of
segments are proportional to tokens, so how tokens are divided over ranks does not change their sum. The optimizer's
seconds are added, as if all stages had equal shares of the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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
from distca.planning.orders import one_forward_one_backward, orders
from distca.planning.schedule import IDLE, Ticks, layers_of_stages
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
    order: str = "same_phase"  # see `planning.orders.orders`

    def describe(self, setting: Setting) -> str:
        whole = "" if self.ping_pong else ", no ping-pong"
        order = f", {self.order.replace('_', ' ')}" if setting.pp > 1 else ""
        return f"{self.placement} placement, tolerance {self.tolerance:g}{whole}, {_pipeline(setting)}{order}"

    def floor(self, setting: Setting, costs: Costs, batch: StepDocuments) -> float:
        """Seconds of the order's ticks with free links and attention that divides evenly."""
        ticks, layers = self._ticks(setting)
        return ticks_seconds(setting, costs, ticks, layers, batch.micro_batches(setting))

    def step_plan(self, setting: Setting, costs: Costs, batch: StepDocuments) -> StepPlan | None:
        """Plan a step; None if its activations cannot fit the memory."""
        ticks, layers = self._ticks(setting)
        tokens = np.full((setting.num_micro_batches, setting.num_data), setting.tokens_per_rank)
        if memory(costs, layers, ticks, tokens).peak > setting.cluster.memory_bytes:
            return None
        return plan_step(
            batch.micro_batches(setting), setting.model, num_data=setting.num_data, layers=layers, ticks=ticks,
            tp=setting.tp, ping_pong=self.ping_pong, placement=self.placement, tolerance=self.tolerance,
            cost=costs.attention, topology=Topology.of_cluster(setting.cluster, setting.num_pool, setting.tp))

    def _ticks(self, setting: Setting) -> tuple[Ticks, tuple[int, ...]]:
        """Return the order's ticks and the layers of its parts."""
        ticks = orders(setting.pp, setting.num_micro_batches, setting.model.num_layers)[self.order]
        return ticks, layers_of_stages(setting.model.num_layers, ticks.num_parts)


@dataclass(frozen=True, slots=True)
class GroupChoice:
    """A baseline's plan: dp replicas of cp data ranks."""

    cp: int
    packing: str   # fixed or variable
    sharding: str  # how a group cuts its row: by sequence, by document, or adaptive

    def describe(self, setting: Setting) -> str:
        return (f"{self.packing} rows, dp {setting.num_data // self.cp} x cp {self.cp} by {self.sharding}, "
                f"{_pipeline(setting)}")

    def floor(self, setting: Setting, costs: Costs, batch: StepDocuments) -> float:
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
    variants: Callable[[Setting, Choice, float | str], Sequence[Choice]]  # of the best choice, which are tried too


def _grouped(name: str, packings: Sequence[str], sharding: str) -> Strategy:
    def choices(setting: Setting, tolerance: float | str) -> list[Choice]:
        divisors = [cp for cp in range(1, setting.num_data + 1) if setting.num_data % cp == 0]
        return [GroupChoice(cp, packing, sharding) for cp in divisors for packing in packings
                if packing == "variable" or setting.sequences_per_micro_batch % (setting.num_data // cp) == 0]

    return Strategy(name, True, choices, lambda setting, choice, tolerance: ())


def _pool(
    name: str, placement: str, tolerances: Sequence[float] = (DEFAULT_TOLERANCE,), may_wait: bool = False
) -> Strategy:
    """Try all orders. With the best, try `tolerances` for auto, and with `may_wait` also no ping-pong, which is faster
    if exchanges are short."""
    def choices(setting: Setting, tolerance: float | str) -> list[Choice]:
        one = DEFAULT_TOLERANCE if isinstance(tolerance, str) else tolerance
        listed = orders(setting.pp, setting.num_micro_batches, setting.model.num_layers)
        return [PoolChoice(placement, one, order=order) for order in listed]

    def variants(setting: Setting, choice: Choice, tolerance: float | str) -> list[Choice]:
        assert isinstance(choice, PoolChoice)
        others = [value for value in tolerances if value != choice.tolerance] if isinstance(tolerance, str) else []
        return [*(replace(choice, tolerance=value) for value in others), *[replace(choice, ping_pong=False)] * may_wait]

    return Strategy(name, False, choices, variants)


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
    num_layers, tokens = setting.model.num_layers, np.full(1, float(lengths.sum()))
    pairs = causal_pairs(np.zeros_like(lengths), lengths) * num_layers
    linear = attention = 0.0                                     # of all ranks
    for backward in (False, True):
        linear += sum(float(part[0]) for part in costs.segment_seconds(tokens, backward)) * num_layers
        linear += float(costs.head_seconds(tokens, backward)[0])
        attention += costs.attention.least(pairs, backward, lengths)
    optimizer = float(costs.optimizer_seconds(setting.layers, setting.num_data).mean())
    seconds = (linear + attention) / setting.num_pool + optimizer
    equal_tokens = memory(costs, setting.layers, one_forward_one_backward(setting.pp, 1),
                          np.full((1, setting.num_data), setting.tokens_per_rank))  # of one micro-batch
    return Step(seconds, 1.0, np.full(setting.num_pool, attention / setting.num_pool), equal_tokens)


def ticks_seconds(
    setting: Setting, costs: Costs, ticks: Ticks, layers: Sequence[int], micro_batches: Sequence[np.ndarray]
) -> float:
    """Return the seconds of an order's ticks with free links and attention that divides evenly.

    If stages share attention, a tick takes as long as its busiest stage's linear layers, and at least the mean of all
    its work over the pool. Otherwise a stage takes as long as its own work, and the slowest counts.
    """
    tokens, parts = np.full(1, float(setting.tokens_per_rank)), np.array(layers)

    def linear(backward: bool, weights: bool | None = None) -> float:
        return sum(float(segment[0]) for segment in costs.segment_seconds(tokens, backward, weights))

    own = parts[ticks.part] * np.where(ticks.backward, linear(True, False if ticks.splits else None), linear(False))
    seconds = own * ticks.active + parts[ticks.weight_part] * (ticks.weight != IDLE) * linear(True, True)
    head = np.array([float(costs.head_seconds(tokens, backward)[0]) for backward in (False, True)])
    if ticks.spreads_head:
        seconds[ticks.head != IDLE] = head.sum() / setting.pp
    else:
        seconds += head[ticks.backward.astype(int)] * (ticks.active & (ticks.part == len(layers) - 1))
    least = np.array([[costs.attention.least(causal_pairs(np.zeros_like(lengths), lengths), backward, lengths)
                       for lengths in micro_batches] for backward in (False, True)])
    attention = ticks.active * parts[ticks.part] * least[ticks.backward.astype(int), ticks.micro_batch]
    work = seconds + attention / setting.num_data                # [ticks, stages] of a rank
    found = np.maximum(seconds.max(axis=1), work.mean(axis=1)).sum() if ticks.same_phase else work.sum(axis=0).max()
    of_stages = np.bincount(ticks.stage_of, weights=parts)
    return float(found) + float(costs.optimizer_seconds(of_stages, setting.num_data).max())
