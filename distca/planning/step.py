"""A step plan: all scheduling decisions of one optimizer step, made from lengths and settings alone.

It holds the micro-batches with their nano-batches, the ticks in which stages run them, and the plan of every attention
call, forward and backward. The runtime runs it and the simulator times it; neither plans again.

If stages share attention, all stages run the same phase in a tick, and one plan divides the tick's attention over the
ranks of all stages. Otherwise stages run 1F1B and attention stays among the data ranks of a stage. Without a pipeline
there is one stage, and the two orders are the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from distca.columns import freeze
from distca.cost.work import attention_backward_flops, attention_flops
from distca.planning.orders import one_forward_one_backward, same_phase_ticks
from distca.planning.plan import Plan, max_over_mean, server_work
from distca.planning.schedule import IDLE, Ticks, tick_layout
from distca.planning.tasks import tasks_at_home
from distca.spec import ModelShape, unknown_name
from distca.validation import UserError, check_number, check_whole, short
from distca.workload.documents import check_lengths
from distca.workload.layout import Layout
from distca.workload.packing import PLACEMENTS, NanoBatch, check_tolerance, pack


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """The documents of one micro-batch, in the loader's order, and their placement."""

    lengths: np.ndarray                  # [documents]
    nano_batches: tuple[NanoBatch, ...]  # one, or ping and pong in running order; each numbers its own documents

    @property
    def layouts(self) -> tuple[Layout, ...]:
        return tuple(nano.layout for nano in self.nano_batches)

    def key_runs(self, nano: int, rank: int) -> tuple[tuple[int, int], ...]:
        """Return the runs [start, stop) of the rank's row in the previous nano-batch that `nano` reads as keys only.

        Runs are in the order of the key-only slices of `nano`.
        """
        here, before, only = self.nano_batches[nano], self.nano_batches[nano - 1], self.layouts[nano].key_only
        offset, found = before.layout.row_offset(), []
        for at in np.flatnonzero(only.rank == rank).tolist():
            slice_before, = np.flatnonzero((before.layout.rank == rank) & (before.layout.start == only.start[at]) & (
                before.document[before.layout.document] == here.document[only.document[at]])).tolist()
            begin = int(offset[slice_before])
            found.append((begin, begin + int(only.stop[at] - only.start[at])))
        return tuple(found)

    def validate(self) -> None:
        """Prove that every token is a query once, and that key-only slices are on the rank that has them as queries."""
        check_lengths(self.lengths)
        held: dict[tuple[int, int, int], int] = {}               # (document, start, stop) -> rank, as queries
        for number, nano in enumerate(self.nano_batches):
            layout = nano.layout
            layout.validate()
            outside = nano.document[(nano.document < 0) | (nano.document >= len(self.lengths))]
            if len(outside) or nano.document.shape != layout.lengths.shape:
                raise UserError(f"nano-batch {number} numbers its {layout.num_documents} documents "
                                f"{short(nano.document.tolist())}; give each its number, from 0 to "
                                f"{len(self.lengths) - 1}")
            if layout.num_ranks != self.layouts[0].num_ranks:
                raise UserError(f"nano-batch {number} has {layout.num_ranks} ranks but the first has "
                                f"{self.layouts[0].num_ranks}; lay all over the same ranks")
            own, read = (zip(zip(nano.document[one.document].tolist(), one.start.tolist(), one.stop.tolist(),
                                 strict=True), one.rank.tolist(), strict=True) for one in (layout, layout.key_only))
            for (document, start, stop), rank in read:
                if held.get((document, start, stop)) != rank:
                    raise UserError(f"nano-batch {number} reads keys [{start}, {stop}) of document {document} on rank "
                                    f"{rank}, where no nano-batch before it has them; name the slices that one has")
            held.update(own)
        if not held:
            raise UserError("a micro-batch has no nano-batches; give one, or ping and pong")
        document, start, stop = np.array(sorted(held), dtype=np.int64).reshape(-1, 3).T
        opens = np.append(True, document[1:] != document[:-1])   # a document's first slice
        bad = (start != np.where(opens, 0, np.roll(stop, 1))) | (np.roll(opens, -1) & (stop != self.lengths[document]))
        count = sum(layout.num_slices for layout in self.layouts)
        if bad.any() or len(held) != count or len(np.unique(document)) != len(self.lengths):
            at = int(document[np.flatnonzero(bad)[0]]) if bad.any() else 0
            raise UserError(f"the nano-batches do not hold every token once: see document {at}; give each token to "
                            "one of them")


NO_CALL = -1


@dataclass(frozen=True, slots=True)
class StepSummary:
    """Key figures of a step; work is causal pairs, or seconds if the cost is known."""

    work_before: float        # max/mean work, both summed over ticks: documents in order, attention at home
    work_after: float         # max/mean work as planned
    bytes_per_layer: int      # forward bytes that cross ranks, summed over ranks, in bf16
    served_in_bubbles: float  # share of attention work that idle stages compute


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """One step of all ranks; rank = stage * data ranks + data rank, followed by dedicated servers."""

    model: ModelShape
    tp: int
    layers: tuple[int, ...]                     # [parts]
    micro_batches: tuple[MicroBatch, ...]
    ticks: Ticks
    plans: tuple[Plan, ...]                     # each once, in the order of their first calls
    calls: np.ndarray                           # [stages, ticks, nano-batches, depths] index into `plans`, -1 for no
                                                # call; a layer's depth is its index inside its part
    is_shared: bool                             # plans span the ranks of all stages, else the data ranks of one stage
    gather_ranks: int = 1                       # neighbours that all-gather keys, as in context parallelism;
                                                # 1: keys are sent only to servers that need them
    placement: str | None = None                # as used: "given" if the requested placement would send more bytes
    tried: tuple[tuple[float, float], ...] = ()  # (tolerance, predicted step seconds) of every candidate

    def __post_init__(self) -> None:
        freeze(self, ("calls",))

    @property
    def num_stages(self) -> int:
        return self.ticks.num_stages

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
        """Tokens that have a next token in their document, over all ranks."""
        return self.num_tokens - sum(len(micro_batch.lengths) for micro_batch in self.micro_batches)

    def plans_of(self, stage: int) -> list[list[list[Plan]]]:
        """Return the plans of a stage's calls as [tick][nano-batch][depth]."""
        return [[[self.plans[at] for at in depths if at != NO_CALL] for depths in nanos]
                for nanos in self.calls[stage].tolist()]

    def forward_plans(self) -> list[Plan]:
        """Return the distinct plans of forward ticks, in tick order, of a step whose stages share attention."""
        return [plan for plan, _ in self._counts(self.calls[0, self.ticks.forward_ticks()])]

    def server_work(self) -> np.ndarray:
        """[servers] Forward and backward attention work of a step whose stages share attention: seconds, or pairs.

        A backward pair is weighted by its FLOPs over those of a forward pair.
        """
        cost = self.plans[0].cost
        ratio = attention_backward_flops(1.0, self.model, self.tp) / attention_flops(1.0, self.model, self.tp)
        times = np.zeros(len(self.plans))
        for tick, calls in enumerate(self.calls[0]):
            weight = ratio if cost is None and self.ticks.phase(tick) else 1.0
            times += weight * np.bincount(calls[calls != NO_CALL], minlength=len(times))
        work = np.sum([count * plan.work() for count, plan in zip(times, self.plans, strict=True)], axis=0)
        return np.asarray(work if cost is None else work / cost.speeds(len(work)))

    def validate(self) -> None:
        """Prove that in every layer, forward and backward, each causal pair of each document is computed once.

        A step may come from another rank or from user code: values out of range are refused here, before they cause
        an index error in the middle of a step or silently wrong attention.
        """
        self.ticks.validate()
        if (self.ticks.num_parts, self.ticks.num_micro_batches) != (len(self.layers), len(self.micro_batches)):
            raise UserError(f"the ticks are for {self.ticks.num_parts} parts and {self.ticks.num_micro_batches} "
                            f"micro-batches but the step has {len(self.layers)} and {len(self.micro_batches)}")
        for micro_batch in self.micro_batches:
            micro_batch.validate()
        _check_fields(self)
        _check_calls(self)
        _check_windows(self)
        for plan in self.plans:
            plan.validate()
        for call in np.argwhere(self.calls[:1 if self.is_shared else None] != NO_CALL).tolist():
            _check_documents(self, *call)

    def summary(self) -> StepSummary:
        in_order = same_phase_ticks(self.num_stages, len(self.micro_batches))
        cost, servers = self.plans[0].cost, self.plans[0].num_servers / self.plans[0].layout.num_ranks
        at_home = [tasks_at_home(pack(micro_batch.lengths, ranks=self.num_data)) for micro_batch in self.micro_batches]
        speeds = 1.0 if cost is None else cost.speeds(self.num_data)
        windows = Counter(self.model.layer_windows)
        before = servers * _imbalance(in_order, [
            [count * server_work(tasks, self.num_data, cost, window=window) / speeds
             for window, count in windows.items()] for tasks in at_home])
        if not self.is_shared:
            calls = [[call for nano in range(self.num_nano_batches) for call in self._forward_calls(number, nano)]
                     for number in range(len(self.micro_batches))]
            after = _imbalance(in_order, [[count * plan.work() for plan, count in plans] for plans in calls])
            crossing = sum(count * _bytes(plan) for plans in calls for plan, count in plans)
            return StepSummary(before, after, crossing // sum(self.layers), 0.0)
        largest, mean, served = self.work_over_ticks()
        depths = min(self.layers)                                # every part has these
        counts = self._counts(self.calls[0, self.ticks.forward_ticks(), :, :depths])
        crossing = sum(count * _bytes(plan) for plan, count in counts)  # a tick runs one layer of each part at a time
        return StepSummary(before, float(largest / mean) if mean else 1.0, crossing // depths // len(self.layers),
                           served)

    def _forward_calls(self, micro_batch: int, nano: int) -> list[tuple[Plan, int]]:
        """Return (plan, number of layers) of a micro-batch's forward, in a step with attention among data ranks."""
        tick, stage = np.nonzero((self.ticks.micro_batch == micro_batch) & ~self.ticks.backward)
        return self._counts(self.calls[stage, tick, nano])

    def _counts(self, calls: np.ndarray) -> list[tuple[Plan, int]]:
        """Return the distinct plans of `calls`, in order, and the number of calls of each."""
        return [(self.plans[at], count) for at, count in Counter(calls.ravel().tolist()).items() if at != NO_CALL]

    def work_over_ticks(self) -> tuple[float, float, float]:
        """Return the servers' maximum and mean work per unit of speed, summed over calls, and the share of idle stages.

        The share is that part of all work that ranks of idle stages compute; dedicated servers do not count as idle.
        """
        work = [plan.work() for plan in self.plans]
        found = []                                               # [nano-batches] largest, mean, share in bubbles
        for nano in range(self.num_nano_batches):
            largest = mean = served = total = 0.0
            for active, depths in zip(self.ticks.active, self.calls[0, :, nano].tolist(), strict=True):
                for at, run in groupby(at for at in depths if at != NO_CALL):
                    plan, done = self.plans[at], len(list(run)) * work[at]
                    share = float(done.sum() / plan.speed.sum())
                    largest += share * max_over_mean(done, plan.speed)
                    mean += share
                    served += float(done[:plan.layout.num_ranks].reshape(self.num_stages, -1)[~active].sum())
                    total += float(done.sum())
            found.append((largest, mean, served / total if total else 0.0))
        largest, mean, _ = np.sum(found, axis=0)
        return largest, mean, sum(share for *_, share in found) / len(found)


def step_among_data_ranks(
    micro_batches: Sequence[MicroBatch], planner: Callable[[Layout], Plan], model: ModelShape, *, layers: Sequence[int],
    tp: int = 1, gather_ranks: int = 1, ticks: Ticks | None = None,
) -> StepPlan:
    """Return a step whose attention stays among a stage's data ranks, as `planner` plans it; by default in 1F1B."""
    ticks = one_forward_one_backward(len(layers), len(micro_batches)) if ticks is None else ticks
    plans = tuple(planner(layout) for micro_batch in micro_batches for layout in micro_batch.layouts)
    number = np.arange(len(plans)).reshape(len(micro_batches), -1)  # [micro-batches, nano-batches]
    running = ticks.micro_batch.T[:, :, None, None]              # [stages, ticks, 1, 1]
    runs = (running != IDLE) & (np.arange(max(layers)) < np.array(layers)[ticks.part.T][:, :, None, None])
    calls = np.where(runs, number[ticks.micro_batch.T][..., None], NO_CALL)
    return StepPlan(model, tp, tuple(layers), tuple(micro_batches), ticks, plans, calls, False, gather_ranks)


def same_columns(one: Layout, other: Layout) -> bool:
    """Return whether two layouts put the same tokens on the same ranks, in the same order."""
    return one.num_ranks == other.num_ranks and all(
        np.array_equal(getattr(a, name), getattr(b, name))
        for a, b, names in ((one, other, ("lengths", "document", "start", "stop", "rank")),
                            (one.key_only, other.key_only, one.key_only.__slots__)) for name in names)


def _check_fields(step: StepPlan) -> None:
    """Check that fields are in range and that micro-batches agree in numbers of nano-batches and ranks."""
    for number_of_layers in step.layers:
        check_whole("layers of a stage", number_of_layers)
    step.model.kv_heads_per_rank(step.tp)
    shapes = {(len(one.nano_batches), one.layouts[0].num_ranks) for one in step.micro_batches}
    if len(shapes) != 1:
        raise UserError(f"micro-batches have (nano-batches, ranks) {sorted(shapes)}; give all as many of both")
    if step.num_data % check_whole("gather_ranks", step.gather_ranks):
        raise UserError(f"gather_ranks is {step.gather_ranks}, which does not divide {step.num_data} data ranks; give "
                        "groups of equal size")
    if step.placement not in (None, *PLACEMENTS):
        raise unknown_name("placement", step.placement, PLACEMENTS)
    for tolerance, seconds in step.tried:
        check_tolerance(tolerance)
        check_number("seconds of a tolerance that was tried", seconds, least=0)


def _check_calls(step: StepPlan) -> None:
    """Check that every stage, tick and nano-batch has one call per layer that runs, all planned for one pool."""
    if step.is_shared and not step.ticks.same_phase:
        raise UserError("ticks mix forward with backward but stages share attention; use same_phase_ticks")
    shape = step.num_stages, step.ticks.num_ticks, step.num_nano_batches, max(step.layers)
    if step.calls.shape != shape:
        raise UserError(f"calls has shape {step.calls.shape} but the step has {shape} stages, ticks, nano-batches and "
                        "layers; plan every tick of each stage")
    if not np.array_equal(np.union1d(step.calls, NO_CALL), np.arange(NO_CALL, len(step.plans))):
        raise UserError(f"calls names plans {step.calls.min()} to {step.calls.max()} but there are {len(step.plans)}; "
                        f"use each from 0 on, and {NO_CALL} for no call")
    if step.is_shared and (step.calls != step.calls[0]).any():
        raise UserError("calls differ between stages that share attention; give them the same plans")
    depths = np.where(step.ticks.active, np.array(step.layers)[step.ticks.part], 0).T  # [stages, ticks]
    if step.is_shared:
        depths = np.broadcast_to(depths.max(axis=0), depths.shape)
    expected = np.arange(shape[-1]) < depths[:, :, None, None]
    if len(wrong := np.argwhere((step.calls != NO_CALL) != expected)):
        stage, tick = wrong[0, :2].tolist()
        found = (step.calls[stage, tick] != NO_CALL).sum(axis=1).tolist()
        raise UserError(f"tick {tick} of stage {stage} has {found} plans for its nano-batches but runs "
                        f"{[int(depths[stage, tick])] * len(found)} layers; plan every layer")
    first = step.plans[0]
    for plan in step.plans:
        if (plan.model, plan.tp, plan.num_servers) != (step.model, step.tp, first.num_servers):
            raise UserError(f"a plan is for {plan.num_servers} servers, {plan.model.name!r} and tp {plan.tp} but the "
                            f"step for {first.num_servers}, {step.model.name!r} and {step.tp}; plan for one pool")


def _check_windows(step: StepPlan) -> None:
    """Check that calls of a layer have one window; a plan whose documents all fit into the window may have none."""
    for part in range(1 if step.is_shared else len(step.layers)):
        of_part = step.calls[0] if step.is_shared else step.calls[
            (step.ticks.active & (step.ticks.part == part)).T]   # [ticks, nano-batches, depths]
        for depth in range(step.calls.shape[-1]):
            plans = [step.plans[at] for at in np.unique(of_part[:, :, depth]).tolist() if at != NO_CALL]
            window = min((plan.window for plan in plans if plan.window is not None), default=None)
            for plan in plans:
                hides = window is not None and window < plan.layout.lengths.max(initial=0)
                if plan.window != window and (plan.window is not None or hides):
                    raise UserError(f"layer {depth} of part {part} has window {window} in one call and {plan.window} "
                                    "in another; plan a layer's calls for one window")


def _check_documents(step: StepPlan, stage: int, tick: int, nano: int, depth: int) -> None:
    """Check that a call's plan has the documents that run in it and was balanced by the seconds of its phase."""
    where = f"tick {tick}, nano-batch {nano}, layer {depth}{'' if step.is_shared else f' of stage {stage}'}"
    plan, running = step.plans[step.calls[stage, tick, nano, depth]], step.ticks.micro_batch[tick]
    if step.is_shared:
        running = np.where(np.array(step.layers)[step.ticks.part[tick]] > depth, running, IDLE)
        layout = tick_layout(running.tolist(), [micro_batch.layouts[nano] for micro_batch in step.micro_batches])
    else:
        layout = step.micro_batches[running[stage]].layouts[nano]
    if not same_columns(plan.layout, layout):
        raise UserError(f"{where} is planned for other documents than run there; plan its micro-batches")
    if plan.cost is not None and step.is_shared and plan.backward != step.ticks.phase(tick):
        raise UserError(f"{where} is balanced by the other direction's seconds; plan forward and backward apart")


def _imbalance(ticks: Ticks, work: Sequence[Sequence[np.ndarray]]) -> float:
    """Return max/mean work, both summed over ticks, if each stage computes its own attention.

    `work` is [micro-batch][nano-batch][data rank].
    """
    largest = mean = 0.0
    for running in ticks.micro_batch.tolist():
        active = [work[number] for number in running if number != IDLE]
        for nanos in zip(*active, strict=True):
            together = np.concatenate(nanos)
            largest += float(together.max())
            mean += float(together.sum()) * len(active) / len(running) / len(together)
    return largest / mean if mean else 1.0


def _bytes(plan: Plan) -> int:
    return int(plan.traffic().sent_bytes(plan.model, plan.tp).sum())
