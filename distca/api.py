"""Public entry points that need no torch: plan one attention call, plan a step, compare strategies.

They accept names of models and clusters and have defaults; the modules that they call take objects and have none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from distca.cost.attention_time import AttentionTime, shipped_table
from distca.cost.mixed_pool import Cost, time_of
from distca.models import model_named
from distca.planning import choose
from distca.planning.balance import balance
from distca.planning.choose import AUTO, DEFAULT_TOLERANCE, StepSeconds, asked_tolerance
from distca.planning.plan import Plan
from distca.planning.schedule import layers_of_stages
from distca.planning.step import StepPlan
from distca.spec import ClusterShape, ModelShape, cluster_named
from distca.validation import UserError
from distca.workload.layout import Layout
from distca.workload.topology import Topology

if TYPE_CHECKING:
    from distca.simulate.outcomes import Comparison


def plan(
    layout: Layout,
    model: str | ModelShape = "llama3-8b",
    tolerance: float = 0.05,
    speed: Sequence[float] | np.ndarray | None = None,
    tp: int = 1,
    cost: Cost | None = None,
    topology: Topology | None = None,
) -> Plan:
    """Assign the attention of every query to a server: max/mean work is at most 1 + tolerance, with few bytes sent.

    `speed` defines the pool: one relative speed per server, the layout's ranks first, dedicated servers (which own no
    tokens) after them; by default the ranks, all with speed 1. Work is counted in causal pairs, or in seconds if `cost`
    is a latency table. `topology` says which servers share a node; bytes between nodes are then avoided first. The same
    arguments give the same plan on every rank.
    """
    shape = _shape(model)
    return balance(layout, shape, tolerance=tolerance, speed=speed, tp=tp, cost=_time(cost, shape, tp),
                   topology=topology)


def plan_step(
    micro_batches: Sequence[Sequence[int] | np.ndarray],
    ranks: int,
    model: str | ModelShape = "llama3-8b",
    *,
    stages: int = 1,
    tp: int = 1,
    ping_pong: bool = True,
    placement: str = "balanced",
    tolerance: float | str = DEFAULT_TOLERANCE,
    speed: Sequence[float] | np.ndarray | None = None,
    cost: Cost | None = None,
    topology: Topology | None = None,
    cluster: str | ClusterShape = "dgx-h200",
) -> StepPlan:
    """Plan one optimizer step: its nano-batches, its ticks, and every attention call, forward and backward.

    `micro_batches` has the document lengths of each micro-batch, which fill the `ranks` data ranks of every stage. The
    other arguments are those of `plan` and `pack`. With `cost`, forward and backward are balanced separately, each by
    its measured seconds. `distca train` runs such a plan and `distca simulate` predicts its time. With `tolerance`
    "auto", the step is planned at several tolerances; the plan with the shortest predicted time on `cluster` is kept.
    """
    shape = _shape(model)
    asked: float | StepSeconds | str = asked_tolerance(tolerance)
    if isinstance(asked, str):
        asked = _predicted_on(cluster, shape, tp, cost)
    return choose.plan_step(
        [np.asarray(lengths) for lengths in micro_batches], shape, num_data=ranks,
        layers=layers_of_stages(shape.num_layers, stages), tp=tp, ping_pong=ping_pong, placement=placement,
        tolerance=asked, speed=speed, cost=_time(cost, shape, tp), topology=topology)


def compare(
    model: str | ModelShape = "llama3-8b",
    cluster: str | ClusterShape = "dgx-h200",
    *,
    gpus: int | None = None,
    context: int = 131_072,
    tp: int | None = None,
    pp: int | None = None,
    strategies: Sequence[str] = ("wlb_ideal", "distca"),
    lengths: str | Sequence[int] | np.ndarray = "prolong",
    batches: int = 1,
    tolerance: float | str = AUTO,
    cost: Cost | None = None,
    seed: int = 0,
    recompute: str = "auto",
    memory: float = 0.0,
    ep: int | None = None,
) -> Comparison:
    """Predict a training step under several strategies on the same documents, as `distca simulate` does.

    `gpus`, `tp`, `pp` and `ep` that are None are chosen such that a step fits, beginning with 64 GPUs.
    `lengths` is the name of a sampler, or document lengths to draw from. `cost` defaults to the table measured on an
    H200. With `tolerance` "auto", the strategy `distca` chooses a tolerance on the first batches and keeps it.
    `recompute` is what backward recomputes: none, selective, full or offload, or auto for as little as fits. `memory`
    limits what our orders keep, in live micro-batches or in bytes. Experts are divided over `ep` GPUs of a stage.
    """
    from distca.simulate.fitting import StepAsked, fitting_settings
    from distca.simulate.sweep import Question
    from distca.simulate.sweep import compare as run
    from distca.workload.sequences import Source

    machines = cluster_named(cluster) if isinstance(cluster, str) else cluster
    table = shipped_table("h200") if cost is None else cost
    asked = StepAsked(gpus, tp, None if pp is None else (pp,), ep, context, recompute=recompute, memory=memory)
    where = fitting_settings(_shape(model), machines, table, asked)
    source = Source(lengths) if isinstance(lengths, str) else Source("lengths", np.asarray(lengths))
    return run(Question(where, tuple(strategies), source, table, tolerance, batches, seed))


def _predicted_on(cluster: str | ClusterShape, model: ModelShape, tp: int, cost: Cost | None) -> StepSeconds:
    from distca.simulate.execute import step_seconds

    if cost is None:
        raise UserError("tolerance is 'auto' but cost is None; give the latency table whose seconds it is chosen by")
    return step_seconds(model, cluster_named(cluster) if isinstance(cluster, str) else cluster, tp, cost)


def _shape(model: str | ModelShape) -> ModelShape:
    return model_named(model) if isinstance(model, str) else model


def _time(cost: Cost | None, model: ModelShape, tp: int) -> AttentionTime | None:
    return None if cost is None else time_of(cost, model, tp)
