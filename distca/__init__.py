"""Long-context training without attention stragglers: pack documents over ranks, then plan who computes what.

Planning needs numpy alone and runs on a laptop. Whatever needs torch is imported on first use, so that `import distca`
stays quick and works without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import numpy as np

from distca.cost.attention_time import AttentionTime
from distca.cost.latency_table import LatencyTable
from distca.planning import step as planning_step
from distca.planning.greedy import balance
from distca.planning.plan import Plan
from distca.planning.step import StepPlan
from distca.planning.tick_plans import layers_of_stages
from distca.spec import ModelShape, model_named
from distca.workload.layout import Layout
from distca.workload.packing import pack

__version__ = "0.1.0"
__all__ = [
    "CoreAttention", "LatencyTable", "Layout", "ModelShape", "Plan", "StepPlan", "__version__", "kernels", "pack",
    "plan", "plan_step",
]

# public name -> the module that is, or defines, it
_NEED_TORCH = {"CoreAttention": "distca.runtime.attention", "kernels": "distca.kernels"}


def plan(
    layout: Layout,
    model: str | ModelShape = "llama3-8b",
    tolerance: float = 0.05,
    speed: Sequence[float] | np.ndarray | None = None,
    tp: int = 1,
    cost: LatencyTable | None = None,
) -> Plan:
    """Give every query's attention to a server so that max/mean work is at most 1 + tolerance, in few bytes.

    `model` is a name or a shape of your own. `speed` names the pool, one relative speed per server: the layout's ranks
    first, servers that own no tokens after them; all ranks alike by default. Work is causal pairs, or seconds where
    `cost` gives a latency table. The same arguments give the same plan on every rank.
    """
    shape = _shape(model)
    return balance(layout, shape, tolerance=tolerance, speed=speed, tp=tp, cost=_time(cost, shape, tp))


def plan_step(
    micro_batches: Sequence[Sequence[int] | np.ndarray],
    ranks: int,
    model: str | ModelShape = "llama3-8b",
    *,
    stages: int = 1,
    tp: int = 1,
    ping_pong: bool = True,
    placement: str = "balanced",
    tolerance: float = 0.05,
    speed: Sequence[float] | np.ndarray | None = None,
    cost: LatencyTable | None = None,
) -> StepPlan:
    """Everything one optimizer step does: nano-batches, ticks, and the plan of every attention call, both ways.

    `micro_batches` are the lengths of each micro-batch's documents, which fill the `ranks` data ranks of every stage.
    The other arguments are those of `plan` and `pack`; with `cost`, forward and backward are balanced each in its own
    seconds. What this returns is what `distca train` runs and `distca simulate` times.
    """
    shape = _shape(model)
    return planning_step.plan_step(
        [np.asarray(lengths) for lengths in micro_batches], shape, num_data=ranks,
        layers=layers_of_stages(shape.num_layers, stages), tp=tp, ping_pong=ping_pong, placement=placement,
        tolerance=tolerance, speed=speed, cost=_time(cost, shape, tp))


def _shape(model: str | ModelShape) -> ModelShape:
    return model_named(model) if isinstance(model, str) else model


def _time(cost: LatencyTable | None, model: ModelShape, tp: int) -> AttentionTime | None:
    return None if cost is None else AttentionTime.of(cost, model, tp)


def __getattr__(name: str) -> Any:
    if name not in _NEED_TORCH:
        raise AttributeError(f"module 'distca' has no attribute {name!r}")
    module = import_module(_NEED_TORCH[name])
    return module if module.__name__ == f"distca.{name}" else getattr(module, name)
