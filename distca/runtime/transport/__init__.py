"""Move bytes between ranks: c10d over NCCL or gloo, symmetric memory inside a node, a loopback between threads.

An exchange is one call, whoever carries it; `transport_for` finds the carrier that a setting names.
"""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist

from distca.runtime.transport.c10d import C10dPointToPoint, C10dTransport
from distca.runtime.transport.interface import Handle, PointToPoint, Transport, TransportError
from distca.runtime.transport.loopback import LoopbackPointToPoint, LoopbackTransport, LoopbackWorld

__all__ = [
    "TRANSPORTS", "C10dPointToPoint", "C10dTransport", "Handle", "LoopbackPointToPoint", "LoopbackTransport",
    "LoopbackWorld", "PointToPoint", "Transport", "TransportError", "transport_for",
]

TRANSPORTS = ("c10d", "symmetric", "auto")


def transport_for(chosen: str | Transport, group: dist.ProcessGroup | None = None) -> Transport:
    """The transport itself, or the one of that name over `group`; every rank of the group asks for it at once.

    "auto" is symmetric memory where NCCL connects ranks that have a GPU each on one node, and c10d elsewhere.
    """
    if not isinstance(chosen, str):
        return chosen
    if chosen not in TRANSPORTS:
        raise ValueError(f"transport is {chosen!r}; choose one of: {', '.join(TRANSPORTS)}, or give a transport")
    c10d = C10dTransport(group)
    if chosen == "c10d" or (chosen == "auto" and not _on_one_node(c10d)):
        return c10d
    from distca.runtime.transport.symmetric import SymmetricTransport

    return SymmetricTransport(group)


def _on_one_node(transport: C10dTransport) -> bool:
    """Whether these ranks could write into each other's GPU memory; the same answer on all of them."""
    if transport.size == 1 or "cuda:nccl" not in dist.get_backend_config(transport.group):
        return False
    from distca.runtime.transport.symmetric import places

    node, gpu = places(transport, torch.device("cuda", torch.cuda.current_device()))
    answer = len(set(node)) == 1 and len(set(gpu)) == transport.size
    logging.getLogger("distca").info("transport auto: %s", "symmetric memory, all ranks share a node" if answer else
                                     "c10d, ranks are on several nodes or share a GPU")
    return answer
