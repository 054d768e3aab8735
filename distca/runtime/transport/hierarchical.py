"""Transports in two levels: one between all ranks, and one among the ranks of each node.

A transport only moves bytes. The tables (`dispatch/hops.py`) know which tokens several ranks of a node need, and route
these over a gateway; the exchange then takes two hops. A plain exchange goes between all ranks.

The second hop can only start when the first has arrived, and the rank should not wait for that. On a GPU the host
starts the second at once, on a stream that waits for the first. On CPUs a thread waits; it needs process groups on
which nobody else starts anything, because all ranks must start the same operations in the same order. Without such
groups the second hop starts when the rank asks for its results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import torch

from distca.runtime.transport.interface import Handle, Transport
from distca.validation import UserError

Second = TypeVar("Second")


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
