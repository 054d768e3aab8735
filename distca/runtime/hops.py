"""An exchange in one hop, or in two: between nodes, and inside them.

The hop between nodes is the slow one. It is started when there is something to send and waited for when it is needed,
so that it hides behind other work; the hop inside a node follows it at once on the way to servers, and comes before it
on the way back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic

from distca.runtime.exchange_torch import Dispatch, Exchange, Stamp, WireLayout


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
