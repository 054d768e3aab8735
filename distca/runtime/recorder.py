"""Record one rank's spans of computation and waiting in a step.

On a GPU, times come from stream events that are read after the step, so recording does not synchronize; on a CPU, from
the clock. Exposed communication is the time spent waiting for exchanges that had not yet finished.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from time import perf_counter
from typing import Any

import torch

from distca.trace import Span, StepTrace


class Recorder:
    """Recorder of one rank's spans, one step at a time."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.begin_step()

    def begin_step(self) -> None:
        self._spans: list[tuple[str, str, Any, Any, int]] = []
        self._of_host: list[tuple[str, str, float, float]] = []
        self._start = self.moment()
        self._host_start = self._start if isinstance(self._start, float) else perf_counter()

    def note_of_host(self, name: str, lane: str, start: float, stop: float) -> None:
        """Record what the host measured, by `perf_counter`."""
        self._of_host.append((name, lane, start, stop))

    @contextmanager
    def span(self, name: str, lane: str, num_bytes: int = 0) -> Iterator[None]:
        start = self.moment()
        yield
        self.note(name, lane, start, num_bytes)

    def note(self, name: str, lane: str, start: Any, num_bytes: int = 0) -> None:
        """Record a span from `start`, a `moment`, until now."""
        self._spans.append((name, lane, start, self.moment(), num_bytes))

    def end_step(self, rank: int, step: int) -> StepTrace:
        """Return the step's spans in seconds from its start; on a GPU, synchronize first.

        Spans of linear layers are cut so that they exclude the attention and wait spans inside them.
        """
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        spans = sorted((Span(name, lane, self._since(begin), self._since(end), num_bytes)
                        for name, lane, begin, end, num_bytes in self._spans), key=lambda span: span.start_seconds)
        spans += [Span(name, lane, start - self._host_start, stop - self._host_start)
                  for name, lane, start, stop in self._of_host]
        inner = [span for span in spans if span.lane in ("attention", "wait")]
        linear = [part for span in spans if span.lane == "linear" for part in _between(span, inner)]
        others = [span for span in spans if span.lane != "linear"]
        return StepTrace(rank, step, tuple(sorted([*others, *linear], key=lambda span: span.start_seconds)))

    def moment(self) -> Any:
        """Return the current moment: of the clock, or of the GPU's current stream."""
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
    """Yield the parts of a span that no inner span covers; `inner` is sorted by start."""
    at = outer.start_seconds
    for span in inner:
        if at < span.start_seconds < outer.stop_seconds:
            yield replace(outer, start_seconds=at, stop_seconds=span.start_seconds)
        at = max(at, span.stop_seconds)
    if at < outer.stop_seconds:
        yield replace(outer, start_seconds=at)
