"""The trace of a step, measured or simulated: spans of time on the lanes of each rank.

The runtime and the simulator both write StepTrace, so that one report shows measured and predicted steps together. A
run also writes RankFigures: the work, bytes, pieces of documents and memory of every rank in that step. A Chrome or
Perfetto trace shows each lane of a rank as a thread.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

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
    "network": "communication, overlapped with computation or not; measured until computation needs it",
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


@dataclass(frozen=True, slots=True, eq=False)
class RankFigures:
    """What a step gave to its ranks; work and bytes are of all layers, forward."""

    step: int
    unit: str                 # of work
    tolerance: float
    work_before: np.ndarray   # [training ranks of the pool] documents in order, attention at home
    work_after: np.ndarray    # [servers] as planned
    source: np.ndarray        # [pairs] ranks that sent anything to another one
    destination: np.ndarray   # [pairs]
    num_bytes: np.ndarray     # [pairs]
    lengths: np.ndarray       # [documents] of all micro-batches
    document: np.ndarray      # [pieces] queries [q_start, q_stop) of a document
    q_start: np.ndarray       # [pieces]
    q_stop: np.ndarray        # [pieces]
    home: np.ndarray          # [pieces]
    server: np.ndarray        # [pieces]
    memory_bytes: np.ndarray  # [training ranks] peak; of every tensor-parallel rank too

    def to_json(self) -> dict[str, Any]:
        return {one.name: value.tolist() if isinstance(value := getattr(self, one.name), np.ndarray) else value
                for one in fields(self)}

    @classmethod
    def from_json(cls, content: Any) -> RankFigures:
        """Return the figures that `to_json` wrote; refuse any other content."""
        if not isinstance(content, dict):
            raise UserError(f"is {short(content)}; give a ranks_N.json of a run")
        columns = {one.name: _column(one.name, content.get(one.name)) for one in fields(cls)[3:]}
        if missing := [name for name in ("work_before", "work_after", "memory_bytes") if not len(columns[name])]:
            raise UserError(f"{missing[0]} is empty; give a ranks_N.json of a run")
        servers, documents = len(columns["work_after"]), len(columns["lengths"])
        for name, below in (("source", servers), ("destination", servers), ("home", servers), ("server", servers),
                            ("document", documents)):
            if columns[name].max(initial=-1) >= below:
                raise UserError(f"{name} has {columns[name].max()} but there are {below}; give a ranks_N.json of a run")
        for name, same in (("destination", "source"), ("num_bytes", "source"), ("home", "document"),
                           ("server", "document"), ("q_start", "document"), ("q_stop", "document")):
            if len(columns[name]) != len(columns[same]):
                raise UserError(f"{name} and {same} differ in length; give a ranks_N.json of a run")
        step = check_whole("step", content.get("step"), least=0, most=MAX_COUNT)
        tolerance = check_number("tolerance", content.get("tolerance"), least=0)
        return cls(step, check_name("unit", content.get("unit")), tolerance, **columns)


def _column(name: str, values: Any) -> np.ndarray:
    """Return a list of numbers as an array: whole numbers unless they are work."""
    if not isinstance(values, list) or not all(type(one) in (int, float) and 0 <= one <= MAX_COUNT for one in values):
        raise UserError(f"{name} is {short(values)}; give a list of numbers from 0 on")
    return np.array(values, dtype=np.float64 if name.startswith("work") else np.int64)


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
