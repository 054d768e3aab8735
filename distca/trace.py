"""The trace of a step, measured or simulated: spans of time on the lanes of each rank.

The runtime and the simulator both write StepTrace, so that one report shows measured and predicted steps side by side.
A Chrome or Perfetto trace shows each lane of a rank as a thread.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from distca.validation import UserError, check_name, check_number, check_whole, short, write_own

MAX_COUNT = 2**53    # for bytes, ranks and steps: JavaScript computes in doubles
MAX_SECONDS = 1e9    # for a step

LANES = {  # lane -> meaning, in display order
    "pipeline": "a tick with a micro-batch of this rank; the lanes below show its parts",
    "bubble": "a tick without a micro-batch of this rank, which only serves attention",
    "linear": "everything of the model but core attention",
    "attention": "core attention, for queries of this and other ranks",
    "wait": "computation waits for communication",
    "repeated": "from a dedicated server's loss until others have computed what it owed",
    "optimizer": "gradient clipping and the update of the parameters",
    "network": "communication, overlapped with computation or not",
}


@dataclass(frozen=True, slots=True)
class Span:
    """A time interval on one lane of a rank."""

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
    """The spans of one rank in one step, in seconds since the step began."""

    rank: int
    step: int
    spans: tuple[Span, ...] = field(default=())

    def seconds(self, lane: str) -> float:
        """Return the time spent on one lane."""
        return sum(span.seconds for span in self.spans if span.lane == lane)

    @property
    def exposed_seconds(self) -> float:
        """Time spent waiting for communication that computation did not overlap."""
        return self.seconds("wait")

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, content: Any) -> StepTrace:
        """Return the trace that `to_json` wrote; refuse any other content."""
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
