"""One attention call on one rank: three phases forward, and the same three backward.

    dispatch   homes send q, k and v to servers; in backward also out, its gradient and the log-sum-exp
    serve      servers wait for these tensors, run the kernel and send the results back
    combine    homes wait for results; if several servers computed parts of a token, the parts are merged or summed

A rank is both a home and a server, possibly with nothing to do as one of them. A call holds tensors only between its
phases, while they are in flight. Backward is a separate call and may follow another plan, since servers store nothing
of the forward unless they `keep` their inputs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from enum import Enum
from typing import Any, Protocol

import torch

from distca.kernels.interface import PLAIN, BackwardInputs, Scores
from distca.planning.plan import Plan
from distca.runtime.exchange import Exchange, Tensors, UnderWay
from distca.runtime.prepared import PlanCache, Prepared, Shapes
from distca.runtime.recorder import Recorder
from distca.runtime.transport import Handle


class Phase(Enum):
    """The phases of one direction of a call, in order."""

    DISPATCH = "dispatch"
    SERVE = "serve"
    COMBINE = "combine"


class Carrier(Protocol):
    """Carries the exchanges of one call in place of the pool's transport: first the inputs, then the results."""

    def begin(self, expected: Sequence[int]) -> None:
        """Begin the call; `expected` are the bytes of results that will come from each rank of the pool."""

    def exchange(self, send: torch.Tensor, send_splits: list[int], recv_splits: list[int]) -> Handle: ...


class Call(ABC):
    """One direction of a call, on the transport of `plans` or by a `carrier`."""

    def __init__(
        self, plans: PlanCache, plan: Plan, shapes: Shapes, *, scores: Scores = PLAIN, keep: bool = False,
        recorder: Recorder | None = None, carrier: Carrier | None = None,
    ) -> None:
        self.plans, self.plan, self.shapes = plans, plan, shapes
        self.scores, self.keep, self.recorder, self.carrier = scores, keep, recorder, carrier
        self._prepared: Prepared | None = None
        self._started: tuple[Exchange, Callable[[], UnderWay], Any] | None = None

    @abstractmethod
    def dispatch(self, *row: torch.Tensor) -> None:
        """Home: begin the call and send this row's tensors to the servers."""

    @abstractmethod
    def serve(self, *kept: torch.Tensor) -> Tensors:
        """Server: compute this rank's tasks and send the results back."""

    def combine(self) -> Tensors:
        """Home: wait for this row's results and return them."""
        self._enter(Phase.COMBINE)
        return self._receive()

    @abstractmethod
    def empty_row(self) -> Tensors:
        """Return the tensors that a rank without tokens dispatches."""

    @abstractmethod
    def results_of(self, prepared: Prepared) -> Exchange:
        """Return the exchange that brings results back."""

    def run_without_tokens(self, phase: Phase) -> None:
        """Run a phase without tokens: as a dedicated server or an idle stage."""
        if phase is Phase.DISPATCH:
            self.dispatch(*self.empty_row())
        elif phase is Phase.SERVE:
            self.serve()
        else:
            self.combine()

    def _enter(self, phase: Phase) -> Prepared:
        if phase is Phase.DISPATCH:
            self._prepared = self.plans.begin(self.plan, self.shapes, self.scores)
            if self.carrier is not None:
                self.carrier.begin(self.results_of(self._prepared).outer.arriving.splits)
        assert self._prepared is not None, "dispatch comes first"
        return self._prepared

    def _send(self, exchange: Exchange, tensors: Tensors, check: bool = False) -> None:
        moment = None if self.recorder is None else self.recorder.moment()
        self._started = exchange, exchange.start(tensors, check, self.carrier), moment

    def _receive(self) -> Tensors:
        """Wait for the exchange and unpack the received and the local tensors."""
        assert self._started is not None
        (exchange, last_hop, sent), self._started = self._started, None
        with self._noted("exchange", "wait", exchange.num_bytes) if exchange.moves else nullcontext():
            hop = last_hop()
            hop.wait()
        if self.recorder is not None and exchange.moves:         # tells which rank sent last
            self.recorder.note("exchange", "network", sent, exchange.num_bytes)
        return hop.unpack(streams=exchange.relay is not None)

    def _noted(self, name: str, lane: str, num_bytes: int = 0) -> AbstractContextManager[None]:
        return nullcontext() if self.recorder is None else self.recorder.span(name, lane, num_bytes)


class ForwardCall(Call):
    """q, k, v -> out and log-sum-exp."""

    def dispatch(self, *row: torch.Tensor) -> None:
        """Send the row's q, k and v."""
        prepared = self._enter(Phase.DISPATCH)
        is_new = self.plans.comes_up_anew(self.plan)
        self._send(prepared.inputs, row, is_new or self.shapes.device.type == "cpu")  # a check synchronizes with a GPU

    def serve(self, *kept: torch.Tensor) -> Tensors:
        """Run the kernel, send out and lse; return this server's q, k and v, which `keep` saves for backward."""
        prepared = self._enter(Phase.SERVE)
        q, k, v = self._receive()
        with self._noted("attention forward", "attention"):
            results = prepared.kernel.forward(q, k, v, prepared.rows, self.scores.scale)
        self._send(prepared.outputs, results)
        return q, k, v

    def empty_row(self) -> Tensors:
        return self.shapes.empty_row()[:3]

    def results_of(self, prepared: Prepared) -> Exchange:
        return prepared.outputs


class BackwardCall(Call):
    """q, k, v, out, its gradient and log-sum-exp -> dq, dk, dv."""

    def dispatch(self, *row: torch.Tensor) -> None:
        """Send the row's q, k, v, out, dout and lse; without q, k and v if the servers keep them."""
        prepared = self._enter(Phase.DISPATCH)
        if self.keep:
            self._send(prepared.kept_backward_inputs, row[3:])
        else:
            self._send(prepared.backward_inputs, row)

    def serve(self, *kept: torch.Tensor) -> Tensors:
        """Run the kernel and send gradients; `kept` are forward's q, k and v, if the server keeps them."""
        prepared = self._enter(Phase.SERVE)
        q, k, v, out, dout, lse = *kept, *self._receive()
        with self._noted("attention backward", "attention"):
            results = prepared.kernel.backward(BackwardInputs(dout, q, k, v, out, lse), prepared.rows,
                                               self.scores.scale)
        self._send(prepared.gradients, results)
        return ()

    def empty_row(self) -> Tensors:
        q, k, v, out, lse = self.shapes.empty_row()
        return q, k, v, out, out, lse

    def results_of(self, prepared: Prepared) -> Exchange:
        return prepared.gradients
