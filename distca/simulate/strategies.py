"""The ways to train on one batch, all on the same documents: each makes step plans, and nothing else decides.

Baselines choose among groups: dp replicas of cp data ranks. Ours are a pool without groups: `disaggregated` is the
published method, documents where the loader puts them, at one tolerance; `distca` places documents too, and may do
without ping-pong. Where the tolerance is `auto`, it chooses that for the run as well: a tighter one where the network
has time, a looser one where it has not. Ours are planned by `plan_step` with the arguments that a training run has.

The step that no strategy can beat, whatever the table, the pipeline or the tolerance.

Two things every step must do, however it is planned. The ranks of a stage run the linear layers (and on the last stage
the head) of all tokens: on average so long, and the longest no shorter. And the whole pool runs these and all
attention: its mean is again a floor, with each document's attention at the best rate that its table knows for any
shape with no more keys than the document has. Links between ranks are free, attention may run in any bubble and be cut
anywhere, and rows may have any number of tokens: seconds of segments are proportional to tokens, so that how they are
dealt does not change the sum. The optimizer follows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np

from distca.baselines import (
    fixed_packing_step,
    fixed_rows,
    per_document_cp_step,
    variable_length,
    variable_length_step,
    variable_rows,
    wlb_ideal_step,
)
from distca.cost.work import causal_pairs
from distca.planning.choose import DEFAULT_TOLERANCE, TOLERANCES, plan_step
from distca.planning.schedule import one_forward_one_backward
from distca.planning.step import StepPlan
from distca.simulate.costs import Costs, Memory, max_live_tokens, memory
from distca.simulate.execute import Step
from distca.simulate.setting import Setting
from distca.spec import unknown_name
from distca.validation import UserError
from distca.workload.topology import Topology

BOUND = "bound"           # no strategy: what none can beat
_MOST_SHARDS = 4_000_000  # of one candidate: beyond, context parallelism cuts documents into dust
_CAPS = (8.0, 4.0, 3.0, 2.5, 2.0, 1.75, 1.5, 1.35, 1.2, 1.1, 1.05, 1.02)  # tokens over a chunk's mean, widest first


@dataclass(frozen=True, slots=True, eq=False)
class StepDocuments:
    """One step's documents: sequences of `context` tokens, in the loader's order."""

    sequences: tuple[np.ndarray, ...]

    def lengths(self) -> np.ndarray:
        return np.concatenate(self.sequences)

    def micro_batches(self, setting: Setting) -> list[np.ndarray]:
        each = setting.sequences_per_micro_batch
        return [np.concatenate(self.sequences[at:at + each]) for at in range(0, len(self.sequences), each)]


class Choice(Protocol):
    """One way to run a strategy; hashable."""

    def describe(self, setting: Setting) -> str: ...


Chosen = TypeVar("Chosen", contravariant=True)


class Strategy(Protocol[Chosen]):
    """What a name on the command line stands for."""

    @property
    def name(self) -> str: ...

    @property
    def is_baseline(self) -> bool: ...

    def choices(self, setting: Setting, tolerance: float | str) -> Sequence[Choice]:
        """What it may choose from in this setting; whoever compares keeps the best. A tolerance may be `auto`."""
        ...

    def floor(self, choice: Chosen, setting: Setting, costs: Costs) -> float:
        """Seconds that no step goes below under this choice; 0 where nothing is known without planning."""
        ...

    def step_plan(self, choice: Chosen, setting: Setting, costs: Costs, batch: StepDocuments) -> StepPlan | None:
        """The step under one choice; None where it cannot be made to fit the memory."""
        ...


@dataclass(frozen=True, slots=True)
class PoolChoice:
    """Attention shared by all ranks."""

    placement: str
    tolerance: float = DEFAULT_TOLERANCE
    ping_pong: bool = True

    def describe(self, setting: Setting) -> str:
        whole = "" if self.ping_pong else ", no ping-pong"
        return f"{self.placement} placement, tolerance {self.tolerance:g}{whole}, {_pipeline(setting)}"


@dataclass(frozen=True, slots=True)
class Pool:
    """Ours."""

    name: str
    placement: str
    tolerances: tuple[float, ...] = (DEFAULT_TOLERANCE,)  # where it is auto
    may_wait: bool = False  # where there is little to hide, one whole is quicker than two halves
    is_baseline: bool = False

    def choices(self, setting: Setting, tolerance: float | str) -> list[PoolChoice]:
        tried = self.tolerances if isinstance(tolerance, str) else (tolerance,)
        halves = [PoolChoice(self.placement, one) for one in tried]
        whole = PoolChoice(self.placement, DEFAULT_TOLERANCE if isinstance(tolerance, str) else tolerance, False)
        return [*halves, whole] if self.may_wait else halves

    def floor(self, choice: PoolChoice, setting: Setting, costs: Costs) -> float:
        return 0.0

    def step_plan(self, choice: PoolChoice, setting: Setting, costs: Costs, batch: StepDocuments) -> StepPlan:
        return plan_step(
            batch.micro_batches(setting), setting.model, num_data=setting.num_data, layers=setting.layers,
            tp=setting.tp, ping_pong=choice.ping_pong, placement=choice.placement,
            tolerance=choice.tolerance, cost=costs.attention,
            topology=Topology.of_cluster(setting.cluster, setting.num_data * len(setting.layers), setting.tp))


@dataclass(frozen=True, slots=True)
class GroupChoice:
    """dp replicas of cp data ranks."""

    cp: int
    packing: str   # fixed or variable
    sharding: str  # how a group cuts its row: by sequence, by document, or adaptive

    def describe(self, setting: Setting) -> str:
        return (f"{self.packing} rows, dp {setting.num_data // self.cp} x cp {self.cp} by {self.sharding}, "
                f"{_pipeline(setting)}")


@dataclass(frozen=True, slots=True)
class Grouped:
    """A baseline: its rows, and how it cuts them over a group."""

    name: str
    packings: tuple[str, ...]
    sharding: str
    make: Callable[[GroupChoice, Setting, Costs, StepDocuments], StepPlan | None]
    is_baseline: bool = True

    def choices(self, setting: Setting, tolerance: float | str) -> list[GroupChoice]:
        divisors = [cp for cp in range(1, setting.num_data + 1) if setting.num_data % cp == 0]
        return [GroupChoice(cp, packing, self.sharding) for cp in divisors for packing in self.packings
                if packing == "variable" or setting.sequences_per_micro_batch % (setting.num_data // cp) == 0]

    def floor(self, choice: GroupChoice, setting: Setting, costs: Costs) -> float:
        """Some group has the mean tokens or more: it runs their linear layers and passes their keys round."""
        tokens = np.full(1, float(setting.tokens_per_rank))
        keys = setting.tokens_per_rank * choice.cp * setting.model.kv_token_bytes(setting.tp)
        layer = sum(float(part[0]) for backward in (False, True) for part in costs.segment_seconds(tokens, backward))
        return setting.num_micro_batches * max(setting.layers) * (layer + 2 * costs.ring_seconds(keys, choice.cp))

    def step_plan(
        self, choice: GroupChoice, setting: Setting, costs: Costs, batch: StepDocuments
    ) -> StepPlan | None:
        if choice.cp > 1 and 2 * choice.cp * sum(map(len, batch.sequences)) > _MOST_SHARDS:
            return None
        return self.make(choice, setting, costs, batch)


def _fixed_packing(choice: GroupChoice, setting: Setting, costs: Costs, batch: StepDocuments) -> StepPlan:
    return fixed_packing_step(batch.micro_batches(setting), setting.model, num_data=setting.num_data,
                              layers=setting.layers, tp=setting.tp, cp=choice.cp)


def _per_document_cp(choice: GroupChoice, setting: Setting, costs: Costs, batch: StepDocuments) -> StepPlan:
    return per_document_cp_step(batch.micro_batches(setting), setting.model, num_data=setting.num_data,
                                layers=setting.layers, tp=setting.tp, cp=choice.cp)


def _variable_length(choice: GroupChoice, setting: Setting, costs: Costs, batch: StepDocuments) -> StepPlan | None:
    chunk = _chunks_that_fit(choice.cp, setting, costs, batch.lengths())
    return None if chunk is None else variable_length_step(
        batch.lengths(), chunk, setting.model, num_data=setting.num_data, layers=setting.layers, tp=setting.tp,
        cp=choice.cp)


def _wlb_ideal(choice: GroupChoice, setting: Setting, costs: Costs, batch: StepDocuments) -> StepPlan | None:
    replicas = setting.num_data // choice.cp
    if choice.packing == "fixed":
        rows = fixed_rows(batch.micro_batches(setting), replicas)
    else:
        chunk = _chunks_that_fit(choice.cp, setting, costs, batch.lengths())
        if chunk is None:
            return None
        rows = variable_rows(batch.lengths(), chunk, replicas)
    return wlb_ideal_step(rows, costs.attention, setting.model, layers=setting.layers, tp=setting.tp, cp=choice.cp)


def _chunks_that_fit(cp: int, setting: Setting, costs: Costs, lengths: np.ndarray) -> np.ndarray | None:
    """The chunk of every document, with as unequal tokens as the memory allows; None where none fits."""
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
    """Seconds of a document: attention and linear layers, forward and backward."""
    attention = sum(costs.attention.shards(lengths, lengths, backward) for backward in (False, True))
    linear = sum(sum(costs.segment_seconds(lengths.astype(np.float64), backward)) for backward in (False, True))
    return np.asarray(attention + linear)


def _pipeline(setting: Setting) -> str:
    return f"pp {setting.pp}, {setting.num_micro_batches} micro-batches" if setting.pp > 1 else "no pipeline"


STRATEGIES: dict[str, Strategy[Any]] = {strategy.name: strategy for strategy in (
    Grouped("fixed_packing", ("fixed",), "sequence", _fixed_packing),
    Grouped("variable_length", ("variable",), "document", _variable_length),
    Grouped("per_document_cp", ("fixed",), "document", _per_document_cp),
    Grouped("wlb_ideal", ("variable", "fixed"), "adaptive", _wlb_ideal),
    Pool("disaggregated", "given"),
    Pool("distca", "balanced", TOLERANCES, may_wait=True),
)}
NAMES = (*STRATEGIES, BOUND)  # in display order


def check_names(names: Sequence[str]) -> tuple[str, ...]:
    """The names in display order, or a ValueError for one that is unknown."""
    for name in names:
        if name not in NAMES:
            raise unknown_name("strategy", name, NAMES)
    if not names:
        raise UserError(f"strategies is empty; give one or more of: {', '.join(NAMES)}")
    return tuple(name for name in NAMES if name in names)


def bound(setting: Setting, costs: Costs, lengths: np.ndarray) -> Step:
    """The floor of a step that trains on documents of these lengths."""
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
    return Step(seconds, busy, np.full(setting.num_pool, attention / setting.num_pool), _least_memory(setting, costs))


def _least_memory(setting: Setting, costs: Costs) -> Memory:
    """Equal tokens of one micro-batch on every rank."""
    return memory(costs, setting.layers, one_forward_one_backward(setting.pp, 1),
                  np.full((1, setting.num_data), setting.tokens_per_rank))
