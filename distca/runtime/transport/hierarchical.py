"""Start second hops beside whatever a rank computes: on a GPU on a stream of its own, on CPUs in a thread.

A second hop can only start when the first has arrived. Whoever started the first should not wait for that. On a GPU the
host starts the second at once, on a stream that waits. On CPUs a thread waits; it needs process groups that nobody else
starts anything on, as all ranks must start the same in the same order. Without them the second hop starts when it is
asked for.

Exchanges at two levels: what crosses nodes goes over all ranks' group, what stays inside over the node's own.

A transport only moves bytes, so it is the tables that know what several ranks of a node need alike; they ask this one
which ranks share a node, and route tokens over a gateway (`dispatch/hops.py`). Asked for a plain exchange, it is the
transport between all ranks.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from distca.runtime.transport.c10d import C10dTransport
from distca.runtime.transport.interface import Handle, Transport
from distca.validation import UserError

Started = TypeVar("Started")


class Relay:
    """Starts second hops of one way, in the order of the first ones."""

    def __init__(self, *, threaded: bool) -> None:
        self._thread = ThreadPoolExecutor(1, "distca-relay") if threaded else None
        self._stream: torch.cuda.Stream | None = None

    def follow(self, start: Callable[[], Started], device: torch.device) -> Callable[[], Started]:
        """`start` waits for the first hop and starts the second; called, the answer gives what it gave."""
        if device.type == "cuda":
            return self._on_stream(start, device)
        if self._thread is None:
            return start
        return self._thread.submit(torch.no_grad()(start)).result  # a thread has a grad mode of its own

    def _on_stream(self, start: Callable[[], Started], device: torch.device) -> Callable[[], Started]:
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            started = start()
        return _OnStream(start, started, self._stream.record_event(), device)


@dataclass(frozen=True, slots=True)
class _OnStream(Generic[Started]):
    """What a stream has started; holds what the stream reads until somebody waits for it."""

    start: Callable[[], Started]
    started: Started
    event: torch.cuda.Event
    device: torch.device

    def __call__(self) -> Started:
        torch.cuda.current_stream(self.device).wait_event(self.event)
        return self.started


@dataclass(frozen=True, slots=True)
class Way:
    """The transports of what goes to servers, or of what comes back, and what starts second hops on them."""

    outer: Transport
    inner: Transport
    relay: Relay


class HierarchicalTransport:
    """One rank's end of a group in nodes: `outer` between all ranks, `inner` between those of this rank's node.

    `back` are the same for what comes back to homes, if those are groups of their own: second hops may then be started
    by threads, each the only one to start anything on its group.
    """

    def __init__(
        self, outer: Transport, inner: Transport, node: Sequence[object],
        back: tuple[Transport, Transport] | None = None,
    ) -> None:
        self.outer, self.inner = outer, inner
        self.going = Way(outer, inner, Relay(threaded=back is not None))
        self.coming = Way(*(back or (outer, inner)), Relay(threaded=back is not None))
        numbers = {one: number for number, one in enumerate(dict.fromkeys(node))}
        self.node = np.array([numbers[one] for one in node], dtype=np.int64)  # [ranks] numbered as they come
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

    def tell(self, message: bytes, rank: int) -> None:
        self.outer.tell(message, rank)

    def hear(self) -> bytes:
        return self.outer.hear()


def hosts_of(transport: C10dTransport) -> list[str]:
    """The host of every rank; every rank of the group asks at once.

    They are told over the store that the ranks met at, not over the group, whose tensors may need a GPU that nobody has
    chosen yet. Two ranks have no levels, whatever their hosts, and are not asked.
    """
    if transport.size <= 2:
        return [""] * transport.size
    store = _get_default_store()
    try:
        store.set(f"distca/host/{dist.get_rank()}", platform.node())
        return [store.get(f"distca/host/{rank}").decode() for rank in dist.get_process_group_ranks(transport.group)]
    except RuntimeError as error:
        raise transport.lost(error) from error


def has_levels(node: Sequence[object]) -> bool:
    """Whether ranks are on several nodes, and some of them share one."""
    return 1 < len(set(node)) < len(node)


def group_of_node(transport: C10dTransport, node: Sequence[object]) -> dist.ProcessGroup:
    """A group of the ranks that share this rank's node; every rank of the transport's group asks for it at once."""
    return _group_of(transport, [rank for rank, other in enumerate(node) if other == node[transport.rank]])


def groups_back(transport: C10dTransport, node: Sequence[object]) -> tuple[C10dTransport, C10dTransport] | None:
    """Groups of their own for what comes back; none with NCCL, which needs no threads. Every rank asks at once."""
    if "nccl" in dist.get_backend_config(transport.group):
        return None
    return C10dTransport(_group_of(transport, list(range(transport.size)))), C10dTransport(
        group_of_node(transport, node))


def _group_of(transport: C10dTransport, members: list[int]) -> dist.ProcessGroup:
    everyone = dist.get_process_group_ranks(transport.group)
    group = transport.group
    assert group is not None
    device = torch.device("cuda" if "cuda:nccl" in dist.get_backend_config(group) else "cpu")
    return dist.new_group([everyone[member] for member in members], backend=dist.get_backend_config(group),
                          timeout=group._get_backend(device).options._timeout, use_local_synchronization=True)
