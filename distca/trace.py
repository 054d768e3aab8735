"""What a step did, measured or simulated: one row per span of time on one rank.

The runtime and the simulator both write StepTrace, so that one report shows measured and predicted side by side, and a
Chrome or Perfetto trace shows each rank's computing and travelling on rows of their own.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

# rows of a rank, in display order: a pipeline's ticks, those without a micro-batch, what computes, what waits
LANES = ("pipeline", "bubble", "linear", "attention", "wait", "optimizer", "host", "network")


@dataclass(frozen=True, slots=True)
class Span:
    """One stretch of work on one lane of one rank."""

    name: str
    lane: str
    start_seconds: float
    stop_seconds: float
    num_bytes: int = 0

    @property
    def seconds(self) -> float:
        return self.stop_seconds - self.start_seconds


@dataclass(frozen=True, slots=True)
class StepTrace:
    """The spans of one rank in one step, from the step's start."""

    rank: int
    step: int
    spans: tuple[Span, ...] = field(default=())

    def seconds(self, lane: str) -> float:
        """Time spent on one lane."""
        return sum(span.seconds for span in self.spans if span.lane == lane)

    @property
    def exposed_seconds(self) -> float:
        """Time spent waiting for an exchange: communication that nothing hid."""
        return self.seconds("wait")

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> StepTrace:
        return cls(data["rank"], data["step"], tuple(Span(**span) for span in data["spans"]))


def write_chrome_trace(traces: Iterable[StepTrace], path: Path | str) -> None:
    """A file for chrome://tracing or ui.perfetto.dev: one process per rank, one thread per lane."""
    events: list[dict[str, object]] = []
    for trace in traces:
        events.append({"ph": "M", "pid": trace.rank, "name": "process_name", "args": {"name": f"rank {trace.rank}"}})
        for number, lane in enumerate(LANES):
            events.append({"ph": "M", "pid": trace.rank, "tid": number, "name": "thread_name", "args": {"name": lane}})
        events += [
            {"ph": "X", "pid": trace.rank, "tid": LANES.index(span.lane), "name": span.name,
             "ts": span.start_seconds * 1e6, "dur": span.seconds * 1e6, "args": {"bytes": span.num_bytes}}
            for span in trace.spans]
    Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")
