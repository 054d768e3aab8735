"""The step plan that a run's settings ask for: ours, or one of those it is compared with."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from distca.baselines.at_home import at_home_step
from distca.baselines.per_document_cp import per_document_cp_step
from distca.cost.attention_time import AttentionTime
from distca.cost.shipped import find_table
from distca.planning.step import StepPlan, plan_step
from distca.planning.tick_plans import layers_of_stages
from distca.spec import ModelShape
from distca.train.settings import Settings


def attention_time(settings: Settings, model: ModelShape) -> AttentionTime | None:
    """What `attention.cost` knows of this model's seconds; None where causal pairs are balanced."""
    if not settings.attention.cost:
        return None
    return AttentionTime.of(find_table(settings.attention.cost), model, settings.parallel.tensor)


def step_plan(
    lengths: Sequence[np.ndarray], settings: Settings, model: ModelShape, num_data: int,
    cost: AttentionTime | None = None,
) -> StepPlan:
    """`lengths[m]` are the documents of micro-batch m, laid over `num_data` ranks.

    Attention at home and per-document context parallelism say themselves where documents live, and have no ping-pong.
    """
    attention, tp = settings.attention, settings.parallel.tensor
    layers = layers_of_stages(model.num_layers, settings.parallel.pipeline)
    if attention.mode == "home":
        return at_home_step(lengths, model, num_data=num_data, layers=layers, tp=tp)
    if attention.mode == "per_document_cp":
        return per_document_cp_step(lengths, model, num_data=num_data, layers=layers, tp=tp)
    return plan_step(lengths, model, num_data=num_data, layers=layers, tp=tp, ping_pong=settings.batch.ping_pong,
                     placement=attention.placement, tolerance=attention.tolerance, cost=cost)
