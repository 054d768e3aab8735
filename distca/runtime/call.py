"""One attention call in flight, step by step.

Forward is start, serve, finish; backward is finish, serve, start. Every step ends what the step before it sent and
sends what the next one needs. Trainers drive the steps through autograd, dedicated servers drive them by announcement;
either way a call holds only what is under way, and is empty between a forward and its backward.
"""

from __future__ import annotations

import torch

from distca.kernels import Kernel
from distca.runtime.prepared import Prepared
from distca.runtime.transport import Handle, Transport
from distca.runtime.wire import Tensors, ToHomes, ToServers


def another_plan(rank: int, others: list[int]) -> ValueError:
    return ValueError(f"rank {rank} has another plan than ranks {others}; plan from the same lengths, tolerance and "
                      "version on every rank, and make the same calls in the same order")


class Call:
    """The six steps of one call on one rank, which is a home, a server, or both."""

    def __init__(
        self, transport: Transport, kernel: Kernel, prepared: Prepared, scale: float | None, keep: bool, check: bool
    ) -> None:
        self.transport, self.kernel, self.prepared, self.scale, self.keep = transport, kernel, prepared, scale, keep
        self.check = check           # look at the stamps that arrive
        self._row: Tensors = ()      # this rank's own tensors of the step under way
        self._buffers: Tensors = ()  # this server's results, for what stays home
        self._handle: Handle | None = None

    def start_forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Home: send q, k and v to the servers."""
        self._row = self._send((q, k, v), self.prepared.inputs)

    def serve_forward(self) -> Tensors:
        """Server: compute the tasks, send out and log-sum-exp back; returns its q, k and v for those who keep them."""
        q, k, v = self._to_server(self.prepared.inputs)
        self._buffers = self._send(self.kernel.forward(q, k, v, self.prepared.rows, self.scale), self.prepared.outputs)
        return q, k, v

    def finish_forward(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Home: wait for own results and merge the parts of each query."""
        out, lse = self._to_home(self.prepared.outputs)
        return out, lse

    def finish_backward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, dout: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        """Home: send what the servers need for gradients; q, k and v only where servers did not keep them."""
        if self.keep:
            self._row = self._send((out, dout, lse), self.prepared.backward_inputs_kept)
        else:
            self._row = self._send((q, k, v, out, dout, lse), self.prepared.backward_inputs)

    def serve_backward(self, kept: Tensors = ()) -> None:
        """Server: compute the gradients of its tasks and send them back."""
        if self.keep:
            q, k, v = kept
            out, dout, lse = self._to_server(self.prepared.backward_inputs_kept)
        else:
            q, k, v, out, dout, lse = self._to_server(self.prepared.backward_inputs)
        gradients = self.kernel.backward(dout, q, k, v, out, lse, self.prepared.rows, self.scale)
        self._buffers = self._send(gradients, self.prepared.gradients)

    def start_backward(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Home: wait for the gradients and sum what several servers computed for one token."""
        dq, dk, dv = self._to_home(self.prepared.gradients)
        return dq, dk, dv

    def _send(self, tensors: Tensors, trip: ToServers | ToHomes) -> Tensors:
        """Start the trip; returns the tensors, of which this rank still needs what stays home."""
        tensors = trip.ready(tensors)
        if self.prepared.travels:
            self._handle = self.transport.exchange(trip.pack(tensors), trip.leaving.splits, trip.arriving.splits)
        return tensors

    def _arrived(self) -> torch.Tensor | None:
        handle, self._handle = self._handle, None
        return None if handle is None else handle.wait()

    def _to_server(self, trip: ToServers) -> Tensors:
        """The server's buffers of the row's tensors."""
        wire, row, self._row = self._arrived(), self._row, ()
        if self.check and trip.stamp is not None and wire is not None:
            strangers = trip.stamp.strangers(wire, trip.arriving)
            if strangers:
                raise another_plan(self.transport.rank, strangers)
        return trip.unpack(wire, row)

    def _to_home(self, trip: ToHomes) -> Tensors:
        """The row's results."""
        wire, buffers, self._buffers = self._arrived(), self._buffers, ()
        return trip.unpack(wire, buffers)
