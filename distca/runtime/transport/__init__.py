"""Transports that move bytes between ranks: c10d (NCCL or gloo), symmetric memory inside a node, or loopback threads.

All transports have the same `exchange` call; `transport_for` returns the one that a setting names.

A hierarchical transport combines two: one connects all ranks, the other the ranks of a node. The tables (`dispatch.py`)
route tokens that several ranks of a node need through a gateway, so the exchange takes two hops. The second hop can
start only when the first has arrived, and the rank should not block on that. On a GPU the host launches the second hop
at once, on a stream that waits for the first. On CPUs a thread waits. Since all ranks must start the operations of a
process group in the same order, the thread needs groups that no other thread uses. Without such groups the second hop
starts when the rank asks for its results.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from distca.runtime.transport.c10d import C10dPointToPoint, C10dTransport
from distca.runtime.transport.interface import Exchanges, Handle, PointToPoint, Transport, TransportError
from distca.runtime.transport.loopback import LoopbackPointToPoint, LoopbackTransport, LoopbackWorld
from distca.validation import UserError

__all__ = [
    "TRANSPORTS", "C10dPointToPoint", "C10dTransport", "Chosen", "Exchanges", "Handle", "HierarchicalTransport",
    "LoopbackPointToPoint", "LoopbackTransport", "LoopbackWorld", "PointToPoint", "Relay", "Transport",
    "TransportError", "over_nodes", "transport_for",
]

Chosen = str | Transport | Callable[[dist.ProcessGroup | None], Transport]  # a name, a transport, or what makes one
TRANSPORTS = ("c10d", "flat", "symmetric", "auto")
Second = TypeVar("Second")


def transport_for(chosen: Chosen, group: dist.ProcessGroup | None = None) -> Transport:
    """Return `chosen` if it is a transport, or the one of that name, or that it makes, over `group`; a collective call.

    "c10d" uses two hops if there are several hosts and some ranks share one, so that tokens needed by several ranks of
    a host cross to it once; "flat" always uses one hop. "auto" is symmetric memory if NCCL connects ranks on one node
    with a GPU each; otherwise it is "c10d" with symmetric memory for the hop inside nodes.
    """
    if not isinstance(chosen, str):
        return chosen(group) if callable(chosen) else chosen
    if chosen not in TRANSPORTS:
        raise UserError(f"transport is {chosen!r}; choose one of: {', '.join(TRANSPORTS)}, or give a transport")
    c10d = C10dTransport(group)
    if chosen == "flat":
        return c10d
    if chosen == "symmetric" or (chosen == "auto" and _on_one_node(c10d)):
        return _symmetric(c10d)
    return over_nodes(c10d, c10d.hosts(), symmetric=chosen == "auto")


def over_nodes(outer: C10dTransport, node: Sequence[object], *, symmetric: bool = False) -> Transport:
    """Return a two-hop transport for ranks on these nodes, or `outer` if there is one node or one rank per node.

    Every rank of the group must call this with the same nodes. `symmetric` uses symmetric memory inside a node if NCCL
    connects ranks with a GPU each. With NCCL no relay threads are needed, and so no separate groups for the way back.
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
    """Return whether these ranks can write into each other's GPU memory; the answer is the same on all of them."""
    if transport.size == 1 or "cuda:nccl" not in dist.get_backend_config(transport.group):
        return False
    from distca.runtime.transport.symmetric import nodes_and_gpus

    node, gpu = nodes_and_gpus(transport, torch.device("cuda", torch.cuda.current_device()))
    answer = len(set(node)) == 1 and len(set(gpu)) == transport.size
    logging.getLogger("distca").info("transport auto: %s", "symmetric memory, all ranks share a node" if answer else
                                     "c10d, ranks are on several nodes or share a GPU")
    return answer


class Relay:
    """Starts the second hops of one direction, in the order of the first hops."""

    def __init__(self, *, threaded: bool) -> None:
        self._thread = ThreadPoolExecutor(1, "distca-relay") if threaded else None
        self._stream: torch.cuda.Stream | None = None

    def follow(self, start: Callable[[], Second], device: torch.device) -> Callable[[], Second]:
        """Run `start`, which waits for the first hop and starts the second; the returned callable gives its result."""
        if device.type == "cuda":
            return self._on_stream(start, device)
        if self._thread is None:
            return start
        return self._thread.submit(torch.no_grad()(start)).result  # grad mode is per thread

    def _on_stream(self, start: Callable[[], Second], device: torch.device) -> Callable[[], Second]:
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            second = start()
        return _OnStream(start, second, self._stream.record_event(), device)


@dataclass(frozen=True, slots=True)
class _OnStream(Generic[Second]):
    """A second hop started on a stream; `start` keeps the stream's inputs alive until the hop is waited for."""

    start: Callable[[], Second]
    second: Second
    event: torch.cuda.Event
    device: torch.device

    def __call__(self) -> Second:
        torch.cuda.current_stream(self.device).wait_event(self.event)
        return self.second


@dataclass(frozen=True, slots=True)
class Way:
    """The transports of one direction, to servers or back to homes, and the relay that starts its second hops."""

    outer: Transport
    inner: Transport
    relay: Relay


class HierarchicalTransport:
    """One rank's end of a multi-node group: `outer` connects all ranks, `inner` the ranks of this rank's node.

    `back` are separate groups (outer, inner) for results that return to homes. If given, threads start the second hops,
    and each group is used by one thread only.
    """

    def __init__(
        self, outer: Transport, inner: Transport, node: Sequence[object],
        back: tuple[Transport, Transport] | None = None,
    ) -> None:
        self.outer = outer
        self.going = Way(outer, inner, Relay(threaded=back is not None))
        self.coming = Way(*(back or (outer, inner)), Relay(threaded=back is not None))
        numbers = {one: number for number, one in enumerate(dict.fromkeys(node))}
        self.node = np.array([numbers[one] for one in node], dtype=np.int64)  # [ranks] in order of appearance
        here = int((self.node == self.node[outer.rank]).sum()) if len(self.node) == outer.size else 0
        if here != inner.size:
            raise UserError(f"node is {list(node)} for {outer.size} ranks, of which {inner.size} share the node of "
                            f"rank {outer.rank}; give the node of every rank")

    @property
    def rank(self) -> int:
        return self.outer.rank

    @property
    def size(self) -> int:
        return self.outer.size

    def exchange(self, send: torch.Tensor, send_splits: list[int], recv_splits: list[int]) -> Handle:
        return self.outer.exchange(send, send_splits, recv_splits)

    def gather(self, value: int, device: torch.device) -> list[int]:
        return self.outer.gather(value, device)
