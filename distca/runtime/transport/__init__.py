"""Move bytes between ranks: c10d over NCCL or gloo, symmetric memory inside a node, both, or a loopback of threads.

An exchange is one call, whatever carries it; `transport_for` finds the transport that a setting names.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
import torch.distributed as dist

from distca.runtime.transport.c10d import C10dPointToPoint, C10dTransport
from distca.runtime.transport.hierarchical import HierarchicalTransport
from distca.runtime.transport.interface import Handle, PointToPoint, Transport, TransportError
from distca.runtime.transport.loopback import LoopbackPointToPoint, LoopbackTransport, LoopbackWorld
from distca.validation import UserError

__all__ = [
    "TRANSPORTS", "C10dPointToPoint", "C10dTransport", "Handle", "HierarchicalTransport", "LoopbackPointToPoint",
    "LoopbackTransport", "LoopbackWorld", "PointToPoint", "Transport", "TransportError", "over_nodes",
    "transport_for",
]

TRANSPORTS = ("c10d", "flat", "symmetric", "auto")


def transport_for(chosen: str | Transport, group: dist.ProcessGroup | None = None) -> Transport:
    """The transport itself, or the one of that name over `group`; every rank of the group asks for it at once.

    "c10d" goes in two hops where ranks are on several hosts and some share one, so that what several ranks of a host
    need crosses to it once; "flat" never does. "auto" is symmetric memory where NCCL connects ranks that have a GPU
    each on one node, and "c10d" elsewhere, with symmetric memory for its hop inside nodes.
    """
    if not isinstance(chosen, str):
        return chosen
    if chosen not in TRANSPORTS:
        raise UserError(f"transport is {chosen!r}; choose one of: {', '.join(TRANSPORTS)}, or give a transport")
    c10d = C10dTransport(group)
    if chosen == "flat":
        return c10d
    if chosen == "symmetric" or (chosen == "auto" and _on_one_node(c10d)):
        return _symmetric(c10d)
    return over_nodes(c10d, c10d.hosts(), symmetric=chosen == "auto")


def over_nodes(outer: C10dTransport, node: Sequence[object], *, symmetric: bool = False) -> Transport:
    """Two levels over a group whose ranks are on these nodes; the group itself if there is one node, or a rank to each.

    Every rank of the group asks for it at once, with the same nodes. `symmetric` uses symmetric memory inside a node
    where NCCL connects ranks that have a GPU each. NCCL needs no threads to relay, and so no groups of its own for what
    comes back.
    """
    if not 1 < len(set(node)) < len(node):
        return outer
    here = [rank for rank, other in enumerate(node) if other == node[outer.rank]]
    inner = outer.subgroup(here)
    logging.getLogger("distca").info("transport: %d ranks on %d nodes, in two hops", outer.size, len(set(node)))
    carrier = _symmetric(inner) if symmetric and _on_one_node(inner) else inner
    has_nccl = "nccl" in dist.get_backend_config(outer.group)
    back = None if has_nccl else (outer.subgroup(range(outer.size)), outer.subgroup(here))
    return HierarchicalTransport(outer, carrier, node, back)


def _symmetric(c10d: C10dTransport) -> Transport:
    from distca.runtime.transport.symmetric import SymmetricTransport

    return SymmetricTransport(c10d.group)


def _on_one_node(transport: C10dTransport) -> bool:
    """Whether these ranks could write into each other's GPU memory; the same answer on all of them."""
    if transport.size == 1 or "cuda:nccl" not in dist.get_backend_config(transport.group):
        return False
    from distca.runtime.transport.symmetric import nodes_and_gpus

    node, gpu = nodes_and_gpus(transport, torch.device("cuda", torch.cuda.current_device()))
    answer = len(set(node)) == 1 and len(set(gpu)) == transport.size
    logging.getLogger("distca").info("transport auto: %s", "symmetric memory, all ranks share a node" if answer else
                                     "c10d, ranks are on several nodes or share a GPU")
    return answer
