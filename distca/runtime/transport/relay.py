"""Start second hops beside whatever a rank computes: on a GPU on a stream of its own, on CPUs in a thread.

A second hop can only start when the first has arrived. Whoever started the first should not wait for that. On a GPU the
host starts the second at once, on a stream that waits. On CPUs a thread waits; it needs process groups that nobody else
starts anything on, as all ranks must start the same in the same order. Without them the second hop starts when it is
asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

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
