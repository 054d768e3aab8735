"""The questions that users ask in one call: a plan, a step's plan, and how strategies compare.

Each takes names where a name will do and fills in what was left out; the packages behind them take objects and nothing
is implicit there. Nothing here needs torch.
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
    from distca.simulate.sweep import Comparison


def plan(
    layout: Layout,
    model: str | ModelShape = "llama3-8b",
    tolerance: float = 0.05,
    speed: Sequence[float] | np.ndarray | None = None,
    tp: int = 1,
    cost: Cost | None = None,
    topology: Topology | None = None,
) -> Plan:
    """Give every query's attention to a server so that max/mean work is at most 1 + tolerance, in few bytes.

    `model` is a name or a shape of your own. `speed` names the pool, one relative speed per server: the layout's ranks
    first, servers that own no tokens after them; all 1 by default. Work is causal pairs, or seconds where
    `cost` gives a latency table. `topology` says which servers share a node: what crosses nodes is then saved first.
    The same arguments give the same plan on every rank.
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
    """Everything one optimizer step does: nano-batches, ticks, and the plan of every attention call, both ways.

    `micro_batches` are the lengths of each micro-batch's documents, which fill the `ranks` data ranks of every stage.
    The other arguments are those of `plan` and `pack`; with `cost`, forward and backward are balanced each in its own
    seconds. What this returns is what `distca train` runs and `distca simulate` times. With `tolerance` "auto" the step
    is planned at a few and the one kept that is predicted to be quickest on `cluster`, by the seconds of `cost`.
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
    gpus: int = 64,
    context: int = 131_072,
    tp: int = 8,
    pp: int = 1,
    strategies: Sequence[str] = ("wlb_ideal", "distca"),
    lengths: str | Sequence[int] | np.ndarray = "prolong",
    batches: int = 1,
    tolerance: float | str = AUTO,
    cost: Cost | None = None,
    seed: int = 0,
) -> Comparison:
    """Predict a training step under several strategies on the same documents, as `distca simulate` does.

    `lengths` names a sampler or gives document lengths to draw from. `cost` None is the table measured on an H200.
    Where `tolerance` is "auto", `distca` chooses it for the run, on the first batches.
    """
    from distca.simulate.setting import setting
    from distca.simulate.sweep import Question
    from distca.simulate.sweep import compare as run
    from distca.workload.sequences import Source

    machines = cluster_named(cluster) if isinstance(cluster, str) else cluster
    where = setting(_shape(model), machines, gpus=gpus, context=context, tp=tp, pp=pp)
    source = Source(lengths) if isinstance(lengths, str) else Source("lengths", np.asarray(lengths))
    table = shipped_table("h200") if cost is None else cost
    return run(Question((where,), tuple(strategies), source, table, tolerance, batches, seed))


def _predicted_on(cluster: str | ClusterShape, model: ModelShape, tp: int, cost: Cost | None) -> StepSeconds:
    from distca.simulate.execute import step_seconds

    if cost is None:
        raise UserError("tolerance is 'auto' but cost is None; give the latency table whose seconds it is chosen by")
    return step_seconds(model, cluster_named(cluster) if isinstance(cluster, str) else cluster, tp, cost)


def _shape(model: str | ModelShape) -> ModelShape:
    return model_named(model) if isinstance(model, str) else model


def _time(cost: Cost | None, model: ModelShape, tp: int) -> AttentionTime | None:
    return None if cost is None else time_of(cost, model, tp)
