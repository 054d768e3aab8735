"""Where a step's tokens live, in which ticks its micro-batches run, and who serves their attention.

Made from lengths and settings alone, so every rank makes the same. With attention disaggregated, the stages of a
pipeline run the same phase in each tick and share attention between all of them. Otherwise they run 1F1B, and attention
stays among the data ranks of a stage. Without a pipeline there is one stage, and the two orders are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from distca.baselines.at_home import at_home
from distca.baselines.per_document_cp import per_document_cp
from distca.planning.pipeline_ticks import IDLE, Ticks, one_forward_one_backward, same_phase_ticks
from distca.planning.plan import Plan
from distca.planning.tick_plans import layers_of_stages, plan_ticks, served_in_bubbles, work_over_ticks
from distca.spec import ModelShape
from distca.train.config import Settings
from distca.workload.layout import Layout
from distca.workload.packing import NanoBatch, pack, pack_ping_pong

RowPlans = tuple[tuple[Plan, ...], ...]  # [row][depth]


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """One step of all ranks. A row is a micro-batch, or ping or pong of one."""

    nano_batches: tuple[tuple[NanoBatch, ...], ...]  # [micro-batch][row] where its documents come from
    layouts: tuple[tuple[Layout, ...], ...]          # [micro-batch][row] over the data ranks
    ticks: Ticks
    by_stage: tuple[tuple[RowPlans, ...], ...]       # [stage][tick]; all stages share one where attention is shared
    work_before: float        # largest work over the mean, summed over ticks: documents in order, attention at home
    work_after: float         # the same as planned
    bytes_per_layer: int      # forward bytes that cross ranks, in all, counted in bf16
    served_in_bubbles: float  # share of attention that stages without a micro-batch did

    @property
    def num_labels(self) -> int:
        """Tokens with a next one, over all ranks and rows."""
        return sum(layout.num_tokens - layout.num_documents for rows in self.layouts for layout in rows)

    @property
    def num_tokens(self) -> int:
        return sum(layout.num_tokens for rows in self.layouts for layout in rows)


def plan_step(
    lengths: Sequence[np.ndarray], settings: Settings, model: ModelShape, num_data: int
) -> StepPlan:
    """`lengths[m]` are the documents of micro-batch m, laid over `num_data` ranks."""
    stages, tp, attention = settings.parallel.pipeline, settings.parallel.tensor, settings.attention
    nano_batches = tuple(_nano_batches(documents, settings, num_data) for documents in lengths)
    in_order = same_phase_ticks(stages, len(lengths))
    before = _level(in_order, [[at_home(pack(nano.layout.lengths, ranks=num_data), model).work() for nano in rows]
                               for rows in nano_batches])
    if attention.mode == "disaggregated":
        layouts = tuple(tuple(nano.layout for nano in rows) for rows in nano_batches)
        by_row = [plan_ticks(in_order, [rows[row] for rows in layouts], model, tolerance=attention.tolerance, tp=tp,
                             layers=layers_of_stages(model.num_layers, stages)) for row in range(len(layouts[0]))]
        largest, mean = np.sum([work_over_ticks(plans) for plans in by_row], axis=0)
        served = [served_in_bubbles(in_order, plans) for plans in by_row]
        ticks = tuple(zip(*by_row, strict=True))
        return StepPlan(nano_batches, layouts, in_order, (ticks,) * stages, before,
                        float(largest / mean) if mean else 1.0,
                        _forward_bytes(in_order, ticks), sum(served) / len(served))
    plans = [[_among_data_ranks(nano.layout, settings, model, num_data) for nano in rows] for rows in nano_batches]
    taking_turns = one_forward_one_backward(stages, len(lengths))
    depth = layers_of_stages(model.num_layers, stages)
    by_stage = tuple(tuple(
        () if micro_batch == IDLE else tuple((plan,) * depth[stage] for plan in plans[micro_batch])
        for micro_batch in taking_turns.micro_batch[:, stage].tolist()) for stage in range(stages))
    return StepPlan(
        nano_batches, tuple(tuple(plan.layout for plan in rows) for rows in plans), taking_turns, by_stage, before,
        _level(in_order, [[plan.work() for plan in rows] for rows in plans]),
        sum(_bytes(plan) for rows in plans for plan in rows), 0.0)


def _nano_batches(lengths: np.ndarray, settings: Settings, num_data: int) -> tuple[NanoBatch, ...]:
    """The layouts of a micro-batch; per-document CP lays its own, out of one long row."""
    attention = settings.attention
    ranks = 1 if attention.mode == "per_document_cp" else num_data
    if settings.batch.ping_pong:
        return pack_ping_pong(lengths, ranks=ranks, placement=attention.placement, tolerance=attention.tolerance)
    layout = pack(lengths, ranks=ranks, placement=attention.placement, tolerance=attention.tolerance)
    return (NanoBatch(layout, np.arange(len(lengths)), np.zeros_like(lengths)),)


def _among_data_ranks(layout: Layout, settings: Settings, model: ModelShape, num_data: int) -> Plan:
    tp = settings.parallel.tensor
    if settings.attention.mode == "home":
        return at_home(layout, model, tp=tp)
    return per_document_cp(layout, model, cp=num_data, tp=tp)


def _level(ticks: Ticks, work: Sequence[Sequence[np.ndarray]]) -> float:
    """Largest over mean, summed over ticks and rows, when each stage does its own work[micro-batch][row][data rank]."""
    largest = mean = 0.0
    for micro_batches in ticks.micro_batch.tolist():
        active = [work[micro_batch] for micro_batch in micro_batches if micro_batch != IDLE]
        for rows in zip(*active, strict=True):
            together = np.concatenate(rows)
            largest += float(together.max())
            mean += float(together.sum()) * len(active) / len(micro_batches) / len(together)
    return largest / mean if mean else 1.0


def _forward_bytes(ticks: Ticks, plans: Sequence[RowPlans]) -> int:
    """Every forward tick runs one layer of each stage at a time, so a layer of the whole step is one stage's share."""
    crossing = sum(_bytes(row[0]) for tick, rows in enumerate(plans) if not ticks.phase(tick) for row in rows)
    return crossing // ticks.num_stages


def _bytes(plan: Plan) -> int:
    return int(plan.traffic().sent_bytes(plan.model, plan.tp).sum())
