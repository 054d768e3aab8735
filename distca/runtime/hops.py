"""An exchange in one hop, or in two: between nodes, and inside them.

The hop between nodes is the slow one. On the way to servers the hop inside a node follows it, on the way back it comes
before it. Neither stops the rank: the first is started when there is something to send, the second follows when the
first has arrived, beside whatever is computed meanwhile (`transport/relay.py`), and only the second is waited for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic

import torch

from distca.runtime.exchange_torch import Combine, Dispatch, Exchange, Stamp, Tensors, WireLayout
from distca.runtime.transport.hierarchical import Relay
from distca.runtime.transport.interface import Handle, Transport


@dataclass(frozen=True, slots=True)
class Hops(Generic[Exchange]):
    """`outer` between all ranks; `inner`, where there are nodes, between the ranks of one."""

    outer: Exchange
    inner: Exchange | None = None

    @property
    def leaving(self) -> WireLayout:
        return self.outer.leaving

    @property
    def arriving(self) -> WireLayout:
        return self.outer.arriving

    @property
    def stamp(self) -> Stamp | None:
        return self.outer.stamp if isinstance(self.outer, Dispatch) else None


@dataclass(frozen=True, slots=True)
class Leg:
    """One hop of an exchange, and whether any rank sends in it."""

    exchange: Dispatch | Combine
    transport: Transport
    moves: bool

    def start(self, tensors: Tensors) -> UnderWay:
        staying = self.exchange.ready(tensors)
        handle = self.transport.exchange(
            self.exchange.pack(staying), self.exchange.leaving.splits, self.exchange.arriving.splits
        ) if self.moves else None
        return UnderWay(self.exchange, staying, handle)


@dataclass(frozen=True, slots=True)
class UnderWay:
    """A hop that was started: what is on the wire, and this rank's own share, which is not."""

    exchange: Dispatch | Combine
    staying: Tensors
    handle: Handle | None

    def arrived(self, check: Check) -> Tensors:
        """What arrived and what stayed, unpacked."""
        wire = None if self.handle is None else self.handle.wait()
        if wire is not None:
            check(wire, self.exchange.arriving)
        for tensor in self.staying if wire is None else (*self.staying, wire):
            if tensor.is_cuda:                                   # another stream may have made it
                tensor.record_stream(torch.cuda.current_stream(tensor.device))
        return self.exchange.unpack(wire, self.staying)


Check = Callable[[torch.Tensor, WireLayout], None]  # raises where what arrived follows another plan


def relayed(first: Leg, second: Leg, tensors: Tensors, check: Check, relay: Relay) -> Callable[[], UnderWay]:
    """Start the first hop and have the second follow it; called, it gives the second."""
    before = first.start(tensors)

    def start() -> UnderWay:
        return second.start(before.arrived(check))

    return relay.follow(start, tensors[0].device) if first.moves or second.moves else start
