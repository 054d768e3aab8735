"""Measure what a rank's attention does, from outside: a transport and a kernel that note when they wait and compute.

On a GPU times come from events on the stream, read once the step is over, so that measuring does not wait; on a CPU
from the clock. Exposed communication is the time spent waiting for exchanges that had not finished by themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from time import perf_counter
from typing import Any

import torch

from distca.kernels import Kernel, TaskRows
from distca.runtime.transport import Handle, Transport
from distca.trace import Span, StepTrace


class Recorder:
    """The spans of one rank, step by step."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._spans: list[tuple[str, str, Any, Any, int]] = []
        self._start = self._now()

    def begin_step(self) -> None:
        self._spans = []
        self._start = self._now()

    @contextmanager
    def span(self, name: str, lane: str, num_bytes: int = 0) -> Iterator[None]:
        start = self._now()
        yield
        self._spans.append((name, lane, start, self._now(), num_bytes))

    def end_step(self, rank: int, step: int) -> StepTrace:
        """The step's spans in seconds from its start; on a GPU this waits for the step's last span.

        Linear layers are what a span of theirs leaves between attention and waits.
        """
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        spans = sorted((Span(name, lane, self._since(begin), self._since(end), num_bytes)
                        for name, lane, begin, end, num_bytes in self._spans), key=lambda span: span.start_seconds)
        inner = [span for span in spans if span.lane in ("attention", "wait")]
        linear = [part for span in spans if span.lane == "linear" for part in _between(span, inner)]
        others = [span for span in spans if span.lane != "linear"]
        return StepTrace(rank, step, tuple(sorted([*others, *linear], key=lambda span: span.start_seconds)))

    def _now(self) -> Any:
        if self.device.type != "cuda":
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def _since(self, moment: Any) -> float:
        if self.device.type != "cuda":
            return moment - self._start
        return self._start.elapsed_time(moment) / 1e3


def _between(outer: Span, inner: Sequence[Span]) -> Iterator[Span]:
    """The parts of a span that no inner one covers; those come in the order in which they start."""
    at = outer.start_seconds
    for span in inner:
        if at < span.start_seconds < outer.stop_seconds:
            yield replace(outer, start_seconds=at, stop_seconds=span.start_seconds)
        at = max(at, span.stop_seconds)
    if at < outer.stop_seconds:
        yield replace(outer, start_seconds=at)


class RecordedTransport:
    """A transport whose waits are noted."""

    def __init__(self, transport: Transport, recorder: Recorder) -> None:
        self.transport, self.recorder = transport, recorder

    @property
    def rank(self) -> int:
        return self.transport.rank

    @property
    def size(self) -> int:
        return self.transport.size

    def exchange(self, send: torch.Tensor, send_splits: list[int], recv_splits: list[int]) -> Handle:
        return _RecordedHandle(self.transport.exchange(send, send_splits, recv_splits), self.recorder,
                               sum(send_splits) + sum(recv_splits))

    def gather(self, value: int, device: torch.device) -> list[int]:
        return self.transport.gather(value, device)

    def tell(self, message: Any, rank: int) -> None:
        self.transport.tell(message, rank)

    def hear(self) -> Any:
        return self.transport.hear()


class _RecordedHandle:
    def __init__(self, handle: Handle, recorder: Recorder, num_bytes: int) -> None:
        self.handle, self.recorder, self.num_bytes = handle, recorder, num_bytes

    def wait(self) -> torch.Tensor:
        with self.recorder.span("exchange", "wait", self.num_bytes):
            return self.handle.wait()


class RecordedKernel:
    """A kernel whose computing is noted."""

    def __init__(self, kernel: Kernel, recorder: Recorder) -> None:
        self.kernel, self.recorder = kernel, recorder

    @property
    def name(self) -> str:
        return self.kernel.name

    def supports(self, device: torch.device, dtype: torch.dtype, head_dim: int, window: int | None) -> str | None:
        return self.kernel.supports(device, dtype, head_dim, window)

    def prepare(self, rows: TaskRows, device: torch.device, window: int | None = None) -> Any:
        return self.kernel.prepare(rows, device, window)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, prepared: Any, scale: float | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        with self.recorder.span("attention forward", "attention"):
            return self.kernel.forward(q, k, v, prepared, scale)

    def backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        prepared: Any,
        scale: float | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        with self.recorder.span("attention backward", "attention"):
            return self.kernel.backward(dout, q, k, v, out, lse, prepared, scale)
