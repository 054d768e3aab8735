"""One attention call in flight, step by step.

Forward is start, serve, finish; backward is finish, serve, start. Every step ends what the step before it sent and
sends what the next one needs. Trainers drive the steps through autograd, dedicated servers drive them by announcement;
either way a call holds only what is under way, and is empty between a forward and its backward.
"""

from __future__ import annotations

import torch

from distca.kernels import Kernel
from distca.runtime.prepared import Prepared, Trip
from distca.runtime.transport import Handle, Transport
from distca.runtime.wire import Stamp, add, bring_together, copy_local, merge_attention, pack, run_views, unpack

Tensors = tuple[torch.Tensor, ...]


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
        self._row = q, k, v
        self._send(self._row, self.prepared.inputs, self.prepared.sent_stamp)

    def serve_forward(self) -> Tensors:
        """Server: compute the tasks, send out and log-sum-exp back; returns its q, k and v for those who keep them."""
        q, k, v = self._to_server("qkk", self.prepared.inputs, self.prepared.expected_stamp if self.check else None)
        self._buffers = self.kernel.forward(q, k, v, self.prepared.rows, self.scale)
        self._send(self._buffers, self.prepared.outputs)
        return q, k, v

    def finish_forward(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Home: wait for own results and merge the parts of each query."""
        outs, lses = self._sources(self.prepared.outputs)
        tokens = self.prepared.tables.row_tokens
        out, lse = (parts[0].new_empty((tokens, *parts[0].shape[1:])) for parts in (outs, lses))
        bring_together((out, lse), (outs, lses), self.prepared.queries, merge_attention, (0.0, -torch.inf))
        return out, lse

    def finish_backward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, dout: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        """Home: send what the servers need for gradients; q, k and v only where servers did not keep them."""
        self._row = (out, dout, lse) if self.keep else (q, k, v, out, dout, lse)
        self._send(self._row, self.prepared.backward_inputs_kept if self.keep else self.prepared.backward_inputs)

    def serve_backward(self, kept: Tensors = ()) -> None:
        """Server: compute the gradients of its tasks and send them back."""
        if self.keep:
            q, k, v = kept
            out, dout, lse = self._to_server("qqq", self.prepared.backward_inputs_kept)
        else:
            q, k, v, out, dout, lse = self._to_server("qkkqqq", self.prepared.backward_inputs)
        self._buffers = self.kernel.backward(dout, q, k, v, out, lse, self.prepared.rows, self.scale)
        self._send(self._buffers, self.prepared.gradients)

    def start_backward(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Home: wait for the gradients and sum what several servers computed for one token."""
        dqs, dks, dvs = self._sources(self.prepared.gradients)
        tokens = self.prepared.tables.row_tokens
        dq, dk, dv = (parts[0].new_empty((tokens, *parts[0].shape[1:])) for parts in (dqs, dks, dvs))
        bring_together((dq,), (dqs,), self.prepared.queries, add, (0.0,))
        bring_together((dk, dv), (dks, dvs), self.prepared.keys, add, (0.0, 0.0))
        return dq, dk, dv

    def _send(self, tensors: Tensors, trip: Trip, stamp: Stamp | None = None) -> None:
        if self.prepared.travels:
            wire = pack(tensors, trip.leaving, tensors[0].device)
            if stamp is not None:
                stamp.put(wire)
            self._handle = self.transport.exchange(wire, trip.leaving.splits, trip.arriving.splits)

    def _arrived(self) -> torch.Tensor | None:
        handle, self._handle = self._handle, None
        return None if handle is None else handle.wait()

    def _to_server(self, sides: str, trip: Trip, stamp: Stamp | None = None) -> Tensors:
        """The server's buffers of the row's tensors: what arrived and what stays home, in task order."""
        wire, row, self._row = self._arrived(), self._row, ()
        strangers = stamp.strangers(wire) if stamp is not None and wire is not None else []
        if strangers:
            raise another_plan(self.transport.rank, strangers)
        tables = self.prepared.tables
        buffers = []
        for name, tensor in zip(sides, row, strict=True):
            side = tables.queries if name == "q" else tables.keys
            if side.is_row:
                buffers.append(tensor)
                continue
            buffer = tensor.new_empty((side.buffer_tokens, *tensor.shape[1:]))
            copy_local(tensor, buffer, side.local)
            buffers.append(buffer)
        if wire is not None:
            unpack(wire, buffers, trip.arriving)
        return tuple(buffers)

    def _sources(self, trip: Trip) -> tuple[list[torch.Tensor], ...]:
        """For every field that comes home: this rank's own buffer, then the runs that arrived."""
        wire, buffers, self._buffers = self._arrived(), self._buffers, ()
        if wire is None:
            return tuple([buffer] for buffer in buffers)
        return tuple([buffer, *run_views(wire, buffer, copies)]
                     for buffer, copies in zip(buffers, trip.arriving.copies, strict=True))
