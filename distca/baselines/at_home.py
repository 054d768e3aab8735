"""Attention at home: every query is computed on the rank that owns it, as training without a plan does.

Equal tokens are unequal work, and this plan shows how unequal. Where the layout lets documents span ranks, the keys
of a slice's prefix still travel to it; a layout without spanning moves nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from distca.cost.attention_time import AttentionTime
from distca.planning.micro_batch import MicroBatch
from distca.planning.plan import Plan, max_over_mean
from distca.planning.step import StepPlan, step_among_data_ranks
from distca.planning.tasks import tasks_at_home
from distca.spec import ModelShape
from distca.workload.layout import Layout
from distca.workload.packing import pack_whole


def at_home(layout: Layout, model: ModelShape, *, tp: int = 1, cost: AttentionTime | None = None) -> Plan:
    """The plan that moves no query, however unequal the work; its tolerance is 0 and its `limit` says why."""
    plan = Plan(layout, tasks_at_home(layout), np.ones(layout.num_ranks), 0.0, model, tp, cost)
    level = max_over_mean(plan.work(), plan.speed) <= 1.0
    return plan if level else replace(plan, limit="attention stays where its queries live")


def at_home_step(
    micro_batches: Sequence[np.ndarray], model: ModelShape, *, num_data: int, layers: Sequence[int], tp: int = 1
) -> StepPlan:
    """A step without us: documents where a loader puts them, in order over the data ranks, stages in 1F1B."""
    packed = [MicroBatch(np.asarray(lengths, dtype=np.int64), pack_whole(lengths, ranks=num_data))
              for lengths in micro_batches]
    return step_among_data_ranks(packed, lambda layout: at_home(layout, model, tp=tp), model, layers=layers, tp=tp)
