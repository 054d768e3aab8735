"""The trace of a step, measured or simulated: spans of time on the lanes of each rank.

The runtime and the simulator both write StepTrace, so that one report shows measured and predicted side by side, and a
Chrome or Perfetto trace shows each rank's computation and communication in lanes of their own.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from distca.validation import UserError, check_name, check_number, check_whole, short, write_own

MAX_COUNT = 2**53    # of bytes, and the largest rank or step: pages count in doubles
MAX_SECONDS = 1e9    # of a step: thirty years

# meaning of each lane, in display order; lanes of one rank overlap only where their meanings say so
LANES = {
    "pipeline": "a tick with a micro-batch of this rank's own; what it does meanwhile is on the lanes below",
    "bubble": "a tick without one, in which the rank only serves attention",
    "linear": "everything of the model but core attention",
    "attention": "core attention, whoever's queries they are",
    "wait": "computing stands still for something that travels",
    "optimizer": "gradient clipping and the parameters' update",
    "network": "something travels, hidden or not",
}


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

    @classmethod
    def from_json(cls, content: Any, where: str) -> Span:
        if not isinstance(content, dict):
            raise UserError(f"{where} has a span {short(content)}; give a step_N.json that a run wrote")
        name = check_name(f"the name of a span of {where}", content.get("name"))
        where, lane = f"{where}, span {name!r}:", content.get("lane")
        if not isinstance(lane, str) or lane not in LANES:
            raise UserError(f"{where} lane is {short(lane)}; choose one of: {', '.join(LANES)}")
        start = check_number(f"{where} start_seconds", content.get("start_seconds"), least=-MAX_SECONDS)
        stop = check_number(f"{where} stop_seconds", content.get("stop_seconds"), least=start, most=MAX_SECONDS)
        num_bytes = check_whole(f"{where} num_bytes", content.get("num_bytes", 0), least=0, most=MAX_COUNT)
        return cls(name, lane, start, stop, num_bytes)


@dataclass(frozen=True, slots=True)
class StepTrace:
    """The spans of one rank in one step, from the step's start."""

    rank: int
    step: int
    spans: tuple[Span, ...] = field(default=())

    def seconds(self, lane: str) -> float:
        """Return the time spent on one lane."""
        return sum(span.seconds for span in self.spans if span.lane == lane)

    @property
    def exposed_seconds(self) -> float:
        """Time spent waiting for an exchange: communication that was not hidden."""
        return self.seconds("wait")

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, content: Any) -> StepTrace:
        """Read what `to_json` wrote; anything else is refused."""
        if not isinstance(content, dict) or not isinstance(content.get("spans"), list):
            raise UserError("not a list of step traces; give a step_N.json that a run wrote")
        rank = check_whole("rank", content.get("rank"), least=0, most=MAX_COUNT)
        step = check_whole("step", content.get("step"), least=0, most=MAX_COUNT)
        return cls(rank, step, tuple(Span.from_json(one, f"rank {rank}") for one in content["spans"]))


def write_chrome_trace(traces: Iterable[StepTrace], path: Path | str) -> None:
    """Write a file for chrome://tracing or ui.perfetto.dev: one process per rank, one thread per lane."""
    threads = {lane: number for number, lane in enumerate(LANES)}
    events: list[dict[str, object]] = []
    for trace in traces:
        events.append({"ph": "M", "pid": trace.rank, "name": "process_name", "args": {"name": f"rank {trace.rank}"}})
        for lane, number in threads.items():
            events.append({"ph": "M", "pid": trace.rank, "tid": number, "name": "thread_name", "args": {"name": lane}})
        events += [
            {"ph": "X", "pid": trace.rank, "tid": threads[span.lane], "name": span.name,
             "ts": span.start_seconds * 1e6, "dur": span.seconds * 1e6, "args": {"bytes": span.num_bytes}}
            for span in trace.spans]
    write_own(path, json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
