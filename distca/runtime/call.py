"""One attention call on one rank: three phases forward, and the same three backward.

    dispatch   homes send the servers what they need: q, k and v; in backward also out, its gradient and log-sum-exp
    serve      servers wait for it, run the kernel and send the results back
    combine    homes wait for their results; the parts of a token that several servers computed are merged or summed

A rank is a home and a server at once, or one of them with nothing to do as the other. A call holds only what is under
way: it is empty before dispatch and after combine. Backward is a call of its own, which may follow another plan, since
nothing of the forward stays with its servers unless they `keep` their inputs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from enum import Enum
from functools import partial

import torch

from distca.kernels.interface import PLAIN, BackwardInputs, Scores
from distca.planning.plan import Plan
from distca.runtime.exchange_torch import Combine, Dispatch, Stamp, Tensors, WireLayout
from distca.runtime.hops import Hops, Leg, UnderWay, relayed
from distca.runtime.prepared import PlanCache, Prepared, Shapes, different_plans
from distca.runtime.recorder import Recorder
from distca.runtime.transport import Handle, HierarchicalTransport


class Phase(Enum):
    """What a call does in one direction, in this order."""

    DISPATCH = "dispatch"
    SERVE = "serve"
    COMBINE = "combine"


class Call(ABC):
    """One direction of a call. `announce` tells dedicated servers of each phase before this rank runs it."""

    def __init__(
        self,
        plans: PlanCache,
        plan: Plan,
        shapes: Shapes,
        *,
        scores: Scores = PLAIN,
        keep: bool = False,
        recorder: Recorder | None = None,
        announce: Callable[[Phase], None] | None = None,
    ) -> None:
        self.plans, self.plan, self.shapes = plans, plan, shapes
        self.scores, self.keep, self.recorder, self.announce = scores, keep, recorder, announce
        self._prepared: Prepared | None = None
        self._staying: Tensors = ()  # what was sent; this rank's own share of it does not travel
        self._handle: Handle | None = None
        self._second_hop: Callable[[], UnderWay] | None = None

    @abstractmethod
    def dispatch(self, *row: torch.Tensor) -> None:
        """Home: begin, and send this row's tensors to the servers."""

    @abstractmethod
    def serve(self, *kept: torch.Tensor) -> Tensors:
        """Server: compute its tasks and send the results back."""

    @abstractmethod
    def combine(self) -> Tensors:
        """Home: the results of this row."""

    @abstractmethod
    def empty_row(self) -> Tensors:
        """What a rank without tokens dispatches."""

    def run_without_tokens(self, phase: Phase) -> None:
        """The phase of a rank that brings no tokens: a dedicated server, or a stage that would idle."""
        if phase is Phase.DISPATCH:
            self.dispatch(*self.empty_row())
        elif phase is Phase.SERVE:
            self.serve()
        else:
            self.combine()

    def _enter(self, phase: Phase) -> Prepared:
        if self.announce is not None:
            self.announce(phase)
        if phase is Phase.DISPATCH:
            self._prepared = self.plans.begin(self.plan, self.shapes, self.scores)
        assert self._prepared is not None, "dispatch comes first"
        return self._prepared

    def _send(
        self, tensors: Tensors, hops: Hops[Dispatch] | Hops[Combine], stamp: Stamp | None = None
    ) -> None:
        assert self._prepared is not None
        if hops.inner is not None:
            self._second_hop = self._relayed(tensors, hops, stamp)
            return
        exchange = hops.outer
        self._staying = exchange.ready(tensors)
        if self._prepared.queries_travel or (self._prepared.travels and exchange.moves_keys):
            self._handle = self.plans.transport.exchange(
                exchange.pack(self._staying), exchange.leaving.splits, exchange.arriving.splits)

    def _receive(self, hops: Hops[Dispatch] | Hops[Combine], stamp: Stamp | None = None) -> Tensors:
        """What arrived and what stayed, unpacked; raises where a split does not carry the stamp."""
        second_hop, self._second_hop = self._second_hop, None
        if second_hop is not None:
            with self._noted("exchange", "wait", hops.leaving.num_bytes + hops.arriving.num_bytes):
                return second_hop().arrived(partial(self._check, stamp))
        handle, self._handle = self._handle, None
        staying, self._staying = self._staying, ()
        exchange = hops.outer
        if handle is None:
            return exchange.unpack(None, staying)
        with self._noted("exchange", "wait", exchange.leaving.num_bytes + exchange.arriving.num_bytes):
            wire = handle.wait()
        self._check(stamp, wire, exchange.arriving)
        return exchange.unpack(wire, staying)

    def _relayed(
        self, tensors: Tensors, hops: Hops[Dispatch] | Hops[Combine], stamp: Stamp | None
    ) -> Callable[[], UnderWay]:
        """Between nodes and then inside them; results come together in the node before they cross."""
        prepared, transport = self._prepared, self.plans.transport
        assert prepared is not None and hops.inner is not None and isinstance(transport, HierarchicalTransport)
        way = transport.going if isinstance(hops.outer, Dispatch) else transport.coming
        outer, inner = Leg(hops.outer, way.outer, prepared.travels), Leg(hops.inner, way.inner, prepared.passes)
        first, second = (outer, inner) if isinstance(hops.outer, Dispatch) else (inner, outer)
        return relayed(first, second, tensors, partial(self._check, stamp), way.relay)

    def _check(self, stamp: Stamp | None, wire: torch.Tensor, arriving: WireLayout) -> None:
        if stamp is not None and (others := stamp.mismatched(wire, arriving)):
            raise different_plans(self.plans.transport.rank, others)

    def _noted(self, name: str, lane: str, num_bytes: int = 0) -> AbstractContextManager[None]:
        return nullcontext() if self.recorder is None else self.recorder.span(name, lane, num_bytes)


class ForwardCall(Call):
    """q, k, v -> out and log-sum-exp."""

    _stamp: Stamp | None = None  # to look for on what arrives

    def dispatch(self, *row: torch.Tensor) -> None:
        """The row's q, k and v."""
        inputs = self._enter(Phase.DISPATCH).inputs
        is_new = self.plans.comes_up_anew(self.plan)
        self._stamp = inputs.stamp if is_new or self.shapes.device.type == "cpu" else None  # looking waits for a GPU
        self._send(row, inputs, self._stamp)

    def serve(self, *kept: torch.Tensor) -> Tensors:
        """Gives this server's q, k and v, for those who keep them."""
        prepared = self._enter(Phase.SERVE)
        q, k, v = self._receive(prepared.inputs, self._stamp)
        with self._noted("attention forward", "attention"):
            results = prepared.kernel.forward(q, k, v, prepared.rows, self.scores.scale)
        self._send(results, prepared.outputs)
        return q, k, v

    def combine(self) -> Tensors:
        """The row's out and lse."""
        return self._receive(self._enter(Phase.COMBINE).outputs)

    def empty_row(self) -> Tensors:
        return self.shapes.empty_row()[:3]


class BackwardCall(Call):
    """q, k, v, out, its gradient and log-sum-exp -> dq, dk, dv."""

    def dispatch(self, *row: torch.Tensor) -> None:
        """The row's q, k, v, out, dout and lse; where servers keep q, k and v, these stay."""
        prepared = self._enter(Phase.DISPATCH)
        self._send(row[3:] if self.keep else row, self._inputs(prepared))

    def serve(self, *kept: torch.Tensor) -> Tensors:
        """`kept` are the q, k and v that this server's forward gave, where it keeps them."""
        prepared = self._enter(Phase.SERVE)
        q, k, v, out, dout, lse = *kept, *self._receive(self._inputs(prepared))
        with self._noted("attention backward", "attention"):
            results = prepared.kernel.backward(BackwardInputs(dout, q, k, v, out, lse), prepared.rows,
                                               self.scores.scale)
        self._send(results, prepared.gradients)
        return ()

    def combine(self) -> Tensors:
        """The row's dq, dk and dv."""
        return self._receive(self._enter(Phase.COMBINE).gradients)

    def empty_row(self) -> Tensors:
        q, k, v, out, lse = self.shapes.empty_row()
        return q, k, v, out, out, lse

    def _inputs(self, prepared: Prepared) -> Hops[Dispatch]:
        return prepared.kept_backward_inputs if self.keep else prepared.backward_inputs
