"""Move bytes between ranks: c10d over NCCL or gloo, symmetric memory inside a node, both, or a loopback of threads.

An exchange is one call, whatever carries it; `transport_for` finds the transport that a setting names.

In two levels, one transport connects all ranks and another one those of a node. The tables (`dispatch.py`) know
which tokens several ranks of a node need, and route these over a gateway; the exchange then takes two hops. The second
hop can only start when the first has arrived, and the rank should not wait for that. On a GPU the host starts the
second at once, on a stream that waits for the first. On CPUs a thread waits; it needs process groups on which nobody
else starts anything, because all ranks must start the same operations in the same order. Without such groups the second
hop starts when the rank asks for its results.
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
from distca.runtime.transport.interface import Handle, PointToPoint, Transport, TransportError
from distca.runtime.transport.loopback import LoopbackPointToPoint, LoopbackTransport, LoopbackWorld
from distca.validation import UserError

__all__ = [
    "TRANSPORTS", "C10dPointToPoint", "C10dTransport", "Handle", "HierarchicalTransport", "LoopbackPointToPoint",
    "LoopbackTransport", "LoopbackWorld", "PointToPoint", "Relay", "Transport", "TransportError", "over_nodes",
    "transport_for",
]

TRANSPORTS = ("c10d", "flat", "symmetric", "auto")
Second = TypeVar("Second")


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


class Relay:
    """Starts the second hops of one direction, in the order of the first ones."""

    def __init__(self, *, threaded: bool) -> None:
        self._thread = ThreadPoolExecutor(1, "distca-relay") if threaded else None
        self._stream: torch.cuda.Stream | None = None

    def follow(self, start: Callable[[], Second], device: torch.device) -> Callable[[], Second]:
        """Run `start`, which waits for the first hop and starts the second; the callable returned gives its result."""
        if device.type == "cuda":
            return self._on_stream(start, device)
        if self._thread is None:
            return start
        return self._thread.submit(torch.no_grad()(start)).result  # a thread has a grad mode of its own

    def _on_stream(self, start: Callable[[], Second], device: torch.device) -> Callable[[], Second]:
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            second = start()
        return _OnStream(start, second, self._stream.record_event(), device)


@dataclass(frozen=True, slots=True)
class _OnStream(Generic[Second]):
    """What a stream has started; keeps what the stream reads until somebody waits for it."""

    start: Callable[[], Second]
    second: Second
    event: torch.cuda.Event
    device: torch.device

    def __call__(self) -> Second:
        torch.cuda.current_stream(self.device).wait_event(self.event)
        return self.second


@dataclass(frozen=True, slots=True)
class Way:
    """The transports of one direction, to servers or back to homes, and what starts second hops on them."""

    outer: Transport
    inner: Transport
    relay: Relay


class HierarchicalTransport:
    """One rank's end of a group in nodes: `outer` between all ranks, `inner` between those of this rank's node.

    `back` are the same two for what comes back to homes, if they are groups of their own: threads may then start second
    hops, each thread the only one to start anything on its group.
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

    def send_message(self, message: bytes, rank: int) -> None:
        self.outer.send_message(message, rank)

    def receive_message(self) -> bytes:
        return self.outer.receive_message()
