"""Training strategies that are compared on the same documents; each turns a batch into step plans.

Baselines divide the data ranks into dp replicas of cp ranks and choose dp and cp. Our strategies share attention among
all ranks: `disaggregated` is the published method at one tolerance, with documents where the loader puts them; `distca`
also places documents, and may run without ping-pong. If the tolerance is `auto`, `distca` chooses it for the run. Both
are planned by `plan_step`, as in a training run, and choose among `planning.orders.orders`.

Every choice also says what backward recomputes (`cost.work.RECOMPUTE`). A baseline runs 1F1B; with its best replicas it
also tries the orders of `planning.orders`, and to move layers off the last stage, which has the head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar

import numpy as np

from distca import baselines
from distca.planning.choose import DEFAULT_TOLERANCE, TOLERANCES, KnownPlans, plan_step
from distca.planning.orders import (
    INTERLEAVED,
    ONE_FORWARD_ONE_BACKWARD,
    ZB_H1,
    ZBV,
    by_work,
    local_order,
    local_orders,
    order_named,
    orders,
)
from distca.planning.schedule import Ticks, layers_of_stages
from distca.planning.step import StepPlan
from distca.simulate.bounds import least_attention, ticks_seconds
from distca.simulate.costs import Costs
from distca.simulate.memory import fits, max_live_tokens, memory
from distca.simulate.setting import Setting
from distca.spec import unknown_name
from distca.validation import UserError
from distca.workload.topology import Topology

BOUND = "bound"           # the lower bound, see `simulate.bounds`
_MOST_MOVED = 4           # layers off the last stage that baselines try
_MOST_ORDERS = 3          # other orders that a baseline tries, by their seconds with free links
_MOST_SHARDS = 4_000_000  # a choice with more is skipped: context parallelism would cut documents too small
_RECOMPUTES = {"none": "", "selective": ", recompute selective", "full": ", recompute full", "offload": ", offload"}
_CAPS = (8.0, 4.0, 3.0, 2.5, 2.0, 1.75, 1.5, 1.35, 1.2, 1.1, 1.05, 1.02)  # of a chunk's tokens over the mean


@dataclass(frozen=True, slots=True, eq=False)
class StepDocuments:
    """One step's documents: sequences of `context` tokens, in the loader's order."""

    sequences: tuple[np.ndarray, ...]
    known: KnownPlans = field(default_factory=dict)  # our plans of these documents in one setting

    def lengths(self) -> np.ndarray:
        return np.concatenate(self.sequences)

    def micro_batches(self, setting: Setting) -> list[np.ndarray]:
        each = setting.sequences_per_micro_batch
        return [np.concatenate(self.sequences[at:at + each]) for at in range(0, len(self.sequences), each)]


@dataclass(frozen=True, slots=True)
class PoolChoice:
    """Our plan: attention is shared by all ranks."""

    packing: ClassVar[str] = "placed"
    cp: ClassVar[int] = 1
    placement: str
    tolerance: float = DEFAULT_TOLERANCE
    ping_pong: bool = True
    order: str = "same_phase"  # see `planning.orders.orders`
    recompute: str = "none"
    splits: bool = True        # interleaved orders: dW units apart, which keep a part's activations until they run

    def savings(self, modes: Sequence[str]) -> list[PoolChoice]:
        """Return the choice with each mode, from the most memory to the least; the last two without dW units.

        A recomputed part's activations wait for its dW in full, and offloading keeps nothing for it.
        """
        apart = [(mode, True) for mode in modes if mode != "offload"]
        whole = [(mode, False) for mode in modes if mode in ("full", "offload")]
        return [replace(self, recompute=mode, splits=splits) for mode, splits in (*apart, *whole)]

    def describe(self, setting: Setting) -> str:
        whole = "" if self.ping_pong else ", no ping-pong"
        fused = ", dW in backward" if not self.splits and self.order.startswith(INTERLEAVED) else ""
        return (f"{self.placement} placement, tolerance {self.tolerance:g}{whole}, {_pipeline(setting, self.order)}"
                f"{fused}{_RECOMPUTES[self.recompute]}")

    def floor(self, setting: Setting, costs: Costs, batch: StepDocuments) -> float:
        """Seconds of the order's ticks with free links and attention that divides evenly."""
        ticks, layers = self.ticks(setting)
        return ticks_seconds(setting, costs, ticks, layers, least_attention(costs, batch.micro_batches(setting)))

    def step_plan(self, setting: Setting, costs: Costs, batch: StepDocuments) -> StepPlan | None:
        """Plan a step; None if its activations cannot fit the memory."""
        ticks, layers = self.ticks(setting)
        if not fits(setting, costs, layers, ticks):
            return None
        documents = batch.micro_batches(setting)
        order = by_work(documents) if setting.pp > 1 else range(len(documents))
        return plan_step(
            [documents[number] for number in order], setting.model, num_data=setting.num_data, layers=layers,
            ticks=ticks, tp=setting.tp, ping_pong=self.ping_pong, placement=self.placement, tolerance=self.tolerance,
            cost=costs.attention, topology=Topology.of_cluster(setting.cluster, setting.num_pool, setting.tp),
            known=batch.known)

    def ticks(self, setting: Setting) -> tuple[Ticks, tuple[int, ...]]:
        """Return the order's ticks and the layers of its parts."""
        ticks = order_named(self.order, setting.pp, setting.num_micro_batches, self.splits)
        return ticks, layers_of_stages(setting.model.num_layers, ticks.num_parts)


@dataclass(frozen=True, slots=True)
class GroupChoice:
    """A baseline's plan: dp replicas of cp data ranks."""

    cp: int
    packing: str   # fixed or variable
    sharding: str  # how a group cuts its row: by sequence, by document, or adaptive
    order: str = ONE_FORWARD_ONE_BACKWARD  # see `planning.orders`
    moved: int = 0  # layers that the last part leaves to others, as it has the head
    recompute: str = "none"

    def savings(self, modes: Sequence[str]) -> list[GroupChoice]:
        """Return the choice with each mode, from the most memory to the least; offloading leaves nothing for dW."""
        return [replace(self, recompute=mode) for mode in modes if mode != "offload" or self.order not in (ZB_H1, ZBV)]

    def describe(self, setting: Setting) -> str:
        moved = f", {self.moved} layer{'s' * (self.moved > 1)} off the last stage" if self.moved else ""
        return (f"{self.packing} rows, dp {setting.num_data // self.cp} x cp {self.cp} by {self.sharding}, "
                f"{_pipeline(setting, self.order)}{moved}{_RECOMPUTES[self.recompute]}")

    def floor(self, setting: Setting, costs: Costs, batch: StepDocuments) -> float:
        """Lower bound on the step: some group runs the layers and gathers the keys of at least the mean tokens."""
        tokens = np.full(1, float(setting.tokens_per_rank))
        keys = setting.tokens_per_rank * self.cp * setting.model.kv_token_bytes(setting.tp)
        layer = sum(float(part[0]) for backward in (False, True) for part in costs.segment_seconds(tokens, backward))
        most = setting.model.num_layers / setting.pp             # of some stage
        return setting.num_micro_batches * most * (layer + 2 * costs.ring_seconds(keys, self.cp))

    def step_plan(self, setting: Setting, costs: Costs, batch: StepDocuments) -> StepPlan | None:
        """Plan a step; None if it cannot fit the memory or would have too many shards."""
        if self.cp > 1 and 2 * self.cp * sum(map(len, batch.sequences)) > _MOST_SHARDS:
            return None
        replicas, lengths = setting.num_data // self.cp, batch.lengths()
        if self.packing == "fixed":
            rows = baselines.fixed_rows(batch.micro_batches(setting), replicas)
            if not self._fits(setting, costs, np.stack([row.tokens_per_rank() for row in rows])):
                return None
        else:
            chunk = self._chunks_that_fit(setting, costs, lengths)
            if chunk is None:
                return None
            rows = baselines.variable_rows(lengths, chunk, replicas)
        cuts: dict[str, baselines.Cut] = {
            "sequence": baselines.per_sequence_layout, "document": baselines.head_tail_layout,
            "adaptive": partial(baselines.adaptive_layout, cost=costs.attention)}
        ticks, layers = self.ticks(setting, len(rows))
        return baselines.step_of_groups(rows, cuts[self.sharding], setting.model, cp=self.cp, tp=setting.tp,
                                        ticks=ticks, layers=layers)

    def ticks(self, setting: Setting, num_micro_batches: int) -> tuple[Ticks, tuple[int, ...]]:
        """Return the order's ticks and the layers of its parts."""
        ticks = local_order(self.order, setting.pp, num_micro_batches)
        num_layers, parts = setting.model.num_layers, ticks.num_parts
        even = layers_of_stages(num_layers, parts)
        last = max(even[-1] - self.moved, 1)
        return ticks, (*layers_of_stages(num_layers - last, parts - 1), last) if self.moved else even

    def _fits(self, setting: Setting, costs: Costs, tokens: np.ndarray) -> bool:
        """Return whether rows of [micro-batches, replicas] tokens fit the memory."""
        ticks, layers = self.ticks(setting, len(tokens))
        tokens = np.repeat(-(-tokens // self.cp), self.cp, axis=1)  # [micro-batches, data ranks]
        held = memory(costs, layers, ticks, tokens, gather_ranks=self.cp)
        return held.peak <= setting.cluster.memory_bytes

    def _chunks_that_fit(self, setting: Setting, costs: Costs, lengths: np.ndarray) -> np.ndarray | None:
        """[documents] chunk of each, with token counts as unequal as the memory allows; None if nothing fits."""
        num_chunks = setting.num_data // self.cp * setting.num_micro_batches
        mean = setting.num_tokens / num_chunks
        most = float(max_live_tokens(setting, costs).min()) * self.cp
        work = _work(costs, lengths) / self.cp
        for cap in _CAPS:
            if cap * mean > 2 * most:
                continue
            chunk = baselines.variable_length(lengths, work, num_chunks=num_chunks, max_tokens=int(cap * mean))
            if chunk is None:
                return None
            tokens = np.bincount(chunk, weights=lengths, minlength=num_chunks).reshape(setting.num_micro_batches, -1)
            if self._fits(setting, costs, tokens[tokens.any(axis=1)]):
                return chunk
        return None


Choice = PoolChoice | GroupChoice


@dataclass(frozen=True, slots=True)
class Strategy:
    """A strategy by its name on the command line; a comparison keeps the best of its choices."""

    name: str
    meaning: str               # what it does with a batch, for people who read the name in a table
    is_baseline: bool
    choices: Callable[[Setting, float | str], Sequence[Choice]]  # for a setting and a tolerance or auto
    variants: Callable[[Setting, Choice, float | str, Costs, StepDocuments], Sequence[Choice]]  # of the best choice,
    # which are tried too


def _grouped(name: str, meaning: str, packings: Sequence[str], sharding: str) -> Strategy:
    def choices(setting: Setting, tolerance: float | str) -> list[Choice]:
        divisors = [cp for cp in range(1, setting.num_data + 1) if setting.num_data % cp == 0]
        return [GroupChoice(cp, packing, sharding) for cp in divisors for packing in packings
                if packing == "variable" or setting.sequences_per_micro_batch % (setting.num_data // cp) == 0]

    def variants(setting: Setting, choice: Choice, tolerance: float | str, costs: Costs, batch: StepDocuments
                 ) -> Sequence[Choice]:
        assert isinstance(choice, GroupChoice)
        names = local_orders(setting.pp, setting.model.num_layers) if setting.pp > 1 else ()
        count = setting.num_micro_batches
        attention = np.repeat(least_attention(costs, [batch.lengths()]) / count, count, axis=1)  # rows of equal work
        others = [replace(choice, order=order, moved=moved) for order in names for moved in range(_MOST_MOVED + 1)]
        seconds = {other: ticks_seconds(setting, costs, *other.ticks(setting, count), attention) for other in others}
        best = [min((other for other in seconds if other.order == order), key=lambda other: seconds[other])
                for order in names]
        return sorted((other for other in best if other != choice), key=lambda other: seconds[other])[:_MOST_ORDERS]

    return Strategy(name, meaning, True, choices, variants)


def _pool(
    name: str, meaning: str, placement: str, tolerances: Sequence[float] = (DEFAULT_TOLERANCE,),
    may_wait: bool = False,
) -> Strategy:
    """Try all orders. With the best, try `tolerances` for auto, and with `may_wait` also no ping-pong, which is faster
    if exchanges are short."""
    def choices(setting: Setting, tolerance: float | str) -> list[Choice]:
        one = DEFAULT_TOLERANCE if isinstance(tolerance, str) else tolerance
        listed = orders(setting.pp, setting.num_micro_batches, setting.model.num_layers)
        return [PoolChoice(placement, one, order=order) for order in listed]

    def variants(setting: Setting, choice: Choice, tolerance: float | str, costs: Costs, batch: StepDocuments
                 ) -> list[Choice]:
        assert isinstance(choice, PoolChoice)
        others = [value for value in tolerances if value != choice.tolerance] if isinstance(tolerance, str) else []
        return [*(replace(choice, tolerance=value) for value in others), *[replace(choice, ping_pong=False)] * may_wait]

    return Strategy(name, meaning, False, choices, variants)


STRATEGIES = {strategy.name: strategy for strategy in (
    _grouped("fixed_packing", "equal tokens on every replica; every sequence is cut over the replica's ranks",
             ("fixed",), "sequence"),
    _grouped("variable_length", "equal work on every replica, with unequal tokens; every document is cut over the "
             "replica's ranks", ("variable",), "document"),
    _grouped("per_document_cp", "equal tokens on every replica; every document is cut over the replica's ranks",
             ("fixed",), "document"),
    _grouped("wlb_ideal", "the better of equal tokens and equal work, with the better cut for every micro-batch",
             ("variable", "fixed"), "adaptive"),
    _pool("disaggregated", "ours as published: documents stay where the loader puts them, attention is balanced over "
          "all ranks", "given"),
    _pool("distca", "ours: documents are also placed to save bytes, and the tolerance is chosen for the run",
          "balanced", TOLERANCES, may_wait=True),
)}
BOUND_MEANING = "no strategy: a time that none can beat"
NAMES = (*STRATEGIES, BOUND)  # in display order


def our_orders(setting: Setting) -> dict[str, tuple[Ticks, tuple[int, ...]]]:
    """Return the ticks and layers of each order of ours, as they are when memory is short."""
    return {name: PoolChoice("given", order=name).savings(setting.modes)[-1].ticks(setting)
            for name in orders(setting.pp, setting.num_micro_batches, setting.model.num_layers)}


def _work(costs: Costs, lengths: np.ndarray) -> np.ndarray:
    """[documents] seconds of attention and linear layers, forward and backward."""
    attention = sum(costs.attention.shards(lengths, lengths, backward) for backward in (False, True))
    linear = sum(sum(costs.segment_seconds(lengths.astype(np.float64), backward)) for backward in (False, True))
    return np.asarray(attention + linear)


def _pipeline(setting: Setting, order: str) -> str:
    named = order.replace("_", " ")
    return f"pp {setting.pp}, {setting.num_micro_batches} micro-batches, {named}" if setting.pp > 1 else "no pipeline"


def check_names(names: Sequence[str]) -> tuple[str, ...]:
    """Sort the names into display order; refuse unknown ones."""
    for name in names:
        if name not in NAMES:
            raise unknown_name("strategy", name, NAMES)
    if not names:
        raise UserError(f"strategies is empty; give one or more of: {', '.join(NAMES)}")
    return tuple(name for name in NAMES if name in names)
