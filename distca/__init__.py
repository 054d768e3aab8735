"""Long-context training without attention stragglers: pack documents over ranks, then plan who computes what.

Planning needs numpy alone and runs on a laptop. Whatever needs torch is imported on first use, so that `import distca`
stays quick and works without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import numpy as np

from distca.cost.latency_table import LatencyTable
from distca.planning.greedy import balance
from distca.planning.plan import Plan
from distca.spec import ModelShape, model_named
from distca.workload.layout import Layout
from distca.workload.packing import pack

__version__ = "0.1.0"
__all__ = ["CoreAttention", "LatencyTable", "Layout", "ModelShape", "Plan", "__version__", "kernels", "pack", "plan"]

# public name -> the module that is, or defines, it
_NEED_TORCH = {"CoreAttention": "distca.runtime.core_attention", "kernels": "distca.kernels"}


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
    shape = model_named(model) if isinstance(model, str) else model
    return balance(layout, shape, tolerance=tolerance, speed=speed, tp=tp, cost=cost)


def __getattr__(name: str) -> Any:
    if name not in _NEED_TORCH:
        raise AttributeError(f"module 'distca' has no attribute {name!r}")
    module = import_module(_NEED_TORCH[name])
    return module if module.__name__ == f"distca.{name}" else getattr(module, name)
