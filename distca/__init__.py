"""Long-context training without attention stragglers: pack documents over ranks, then plan which rank computes what.

Planning needs numpy alone and runs on a laptop. Names that need torch are imported on first use, so that
`import distca` stays quick and works without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from distca.api import compare, plan, plan_step
from distca.cost.attention_time import shipped_table
from distca.cost.latency_table import LatencyTable, analytic_table
from distca.models import model_named
from distca.planning.plan import Plan
from distca.planning.step import StepPlan
from distca.spec import ClusterShape, ModelShape, cluster_named
from distca.trace import Span, StepTrace
from distca.validation import UserError
from distca.workload.documents import sample_lengths
from distca.workload.layout import Layout
from distca.workload.packing import pack
from distca.workload.topology import Topology

if TYPE_CHECKING:
    from distca import data, kernels
    from distca.integrations.packed import PackedAttention, latest_plan
    from distca.runtime.attention import CoreAttention
    from distca.runtime.liveness import end_process
    from distca.runtime.pool.server import Server
    from distca.runtime.pool.transport import PoolTransport, connect_servers
    from distca.runtime.transport import C10dTransport, LoopbackWorld, Transport, TransportError
    from distca.runtime.transport.symmetric import SymmetricTransport

__version__ = "0.1.0"
__all__ = [
    "C10dTransport", "ClusterShape", "CoreAttention", "LatencyTable", "Layout", "LoopbackWorld", "ModelShape",
    "PackedAttention", "Plan", "PoolTransport", "Server", "Span", "StepPlan", "StepTrace", "SymmetricTransport",
    "Topology", "Transport", "TransportError", "UserError", "__version__", "analytic_table", "cluster_named", "compare",
    "connect_servers", "data", "end_process", "kernels", "latest_plan", "model_named", "pack", "plan", "plan_step",
    "sample_lengths", "shipped_table",
]

_NEED_TORCH = {name: module for module, names in {  # public name -> the module that defines it, or that it is
    "distca.data": ("data",),
    "distca.kernels": ("kernels",),
    "distca.integrations.packed": ("PackedAttention", "latest_plan"),
    "distca.runtime.attention": ("CoreAttention",),
    "distca.runtime.liveness": ("end_process",),
    "distca.runtime.pool.server": ("Server",),
    "distca.runtime.pool.transport": ("PoolTransport", "connect_servers"),
    "distca.runtime.transport": ("C10dTransport", "LoopbackWorld", "Transport", "TransportError"),
    "distca.runtime.transport.symmetric": ("SymmetricTransport",),
}.items() for name in names}

if not TYPE_CHECKING:  # type checkers use the imports above and report unknown names as errors

    def __getattr__(name: str) -> Any:
        if name not in _NEED_TORCH:
            raise AttributeError(f"module 'distca' has no attribute {name!r}")
        module = import_module(_NEED_TORCH[name])
        return module if module.__name__ == f"distca.{name}" else getattr(module, name)


def __dir__() -> list[str]:
    return __all__
