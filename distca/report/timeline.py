"""Reduce a step's spans to a number that fits a page.

If a step has more spans than a page holds, the shortest are joined with their neighbours of the same rank and lane. A
joined span keeps its count, its bytes and the time it was busy; long spans stay exact.
"""

from __future__ import annotations

import base64
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from distca.report.figures import Timeline
from distca.spec import unknown_name
from distca.trace import LANES, StepTrace
from distca.validation import UserError

MAX_SPANS = 350_000  # of all timelines of a page together: about 6.5 MB
MAX_NAMES = 2**16


@dataclass(frozen=True, slots=True, eq=False)
class SpanColumns:
    """One entry per span, ordered by rank and start."""

    rank: np.ndarray       # [spans] index into the timeline's ranks
    name: np.ndarray       # [spans] index into the timeline's names
    start: np.ndarray      # [spans] seconds
    seconds: np.ndarray    # [spans] from start to end
    busy: np.ndarray       # [spans] seconds without the gaps between joined spans
    num_bytes: np.ndarray  # [spans]
    count: np.ndarray      # [spans] how many were joined

    def __len__(self) -> int:
        return len(self.rank)

    def take(self, index: np.ndarray) -> SpanColumns:
        return SpanColumns(*(getattr(self, name)[index] for name in self.__slots__))


@dataclass(frozen=True, slots=True, eq=False)
class Names:
    """Lanes of a timeline in display order, and its distinct (lane, name) pairs."""

    lanes: tuple[str, ...]
    pairs: tuple[tuple[str, str], ...]

    @property
    def lane(self) -> np.ndarray:
        """[names] index into the lanes."""
        return np.array([self.lanes.index(lane) for lane, _ in self.pairs], dtype=np.int64)


def timeline_payload(timeline: Timeline, max_spans: int) -> dict[str, Any]:
    """Encode a timeline for the page's script; columns are little-endian base64, a quarter the size of JSON lists."""
    traces = sorted(timeline.traces, key=lambda trace: trace.rank)
    names = names_of(traces)
    whole = columns_of(traces, names)
    drawn, resolution = thinned(whole, names.lane, max_spans)
    joined = np.flatnonzero(drawn.count > 1)
    return {
        "title": timeline.title,
        "ranks": [trace.rank for trace in traces],
        "lanes": list(names.lanes),
        "names": [[int(lane), name] for lane, (_, name) in zip(names.lane, names.pairs, strict=True)],
        "stop": float((whole.start + whole.seconds).max(initial=0.0)),
        "laneSeconds": lane_seconds(whole, names, len(traces)).round(9).tolist(),
        "offsets": np.searchsorted(drawn.rank, np.arange(len(traces) + 1)).tolist(),
        "numSpans": len(whole),
        "resolution": resolution,
        "columns": {
            "start": _packed(drawn.start, "<f4"), "seconds": _packed(drawn.seconds, "<f4"),
            "bytes": _packed(drawn.num_bytes, "<f4"), "name": _packed(drawn.name, "<u2"),
            "joined": _packed(joined, "<u4"), "joinedBusy": _packed(drawn.busy[joined], "<f4"),
            "joinedCount": _packed(drawn.count[joined], "<u4"),
        },
    }


def names_of(traces: Sequence[StepTrace]) -> Names:
    pairs = tuple(dict.fromkeys((span.lane, span.name) for trace in traces for span in trace.spans))
    if len(pairs) > MAX_NAMES:
        raise UserError(f"the spans have {len(pairs)} different names; name them by what they do, at most {MAX_NAMES}")
    found = {lane for lane, _ in pairs}
    if unknown := found - LANES.keys():
        raise unknown_name("lane", min(unknown), LANES)
    return Names(tuple(lane for lane in LANES if lane in found), pairs)


def columns_of(traces: Sequence[StepTrace], names: Names) -> SpanColumns:
    index = {pair: number for number, pair in enumerate(names.pairs)}
    spans = [(rank, index[span.lane, span.name], span.start_seconds, span.stop_seconds, span.num_bytes)
             for rank, trace in enumerate(traces) for span in trace.spans]
    rank, name, start, stop, num_bytes = np.array(spans, dtype=np.float64).reshape(-1, 5).T
    seconds = np.maximum(stop - start, 0.0)
    columns = SpanColumns(rank.astype(np.int64), name.astype(np.int64), start, seconds, seconds, num_bytes,
                          np.ones(len(spans), dtype=np.int64))
    return columns.take(np.lexsort((start, rank)))


def lane_seconds(spans: SpanColumns, names: Names, num_ranks: int) -> np.ndarray:
    """[ranks, lanes] seconds spent."""
    num_lanes = len(names.lanes)
    cell = spans.rank * num_lanes + names.lane[spans.name] if len(spans) else spans.rank
    return np.bincount(cell, weights=spans.busy, minlength=num_ranks * num_lanes).reshape(num_ranks, num_lanes)


def thinned(spans: SpanColumns, lane: np.ndarray, max_spans: int) -> tuple[SpanColumns, float]:
    """Join short spans until at most `max_spans` are left, if possible; return the spans and the resolution, or 0."""
    if len(spans) <= max_spans:
        return spans, 0.0
    stop = float((spans.start + spans.seconds).max())
    resolutions = 2.0 * stop * 2.0 ** np.arange(-17, 0.5, 0.5)   # the last one joins all of a lane
    best = bisect_left(resolutions, True, hi=len(resolutions) - 1,
                       key=lambda resolution: len(join_short(spans, lane, resolution)) <= max_spans)
    return join_short(spans, lane, resolutions[best]), float(resolutions[best])


def join_short(spans: SpanColumns, lane: np.ndarray, resolution: float) -> SpanColumns:
    """Join spans shorter than `resolution` of one rank, lane and bin of that width, under the longest one's name."""
    short = spans.seconds < resolution
    bins = (spans.start / resolution).astype(np.int64)
    kind = spans.rank * (int(lane.max()) + 1) + lane[spans.name]  # [spans] rank and lane
    alone = np.where(short, 0, np.arange(1, len(spans) + 1))
    order = np.lexsort((-spans.seconds, bins, kind, alone))
    alone, kind, bins = alone[order], kind[order], bins[order]
    opens = np.ones(len(order), dtype=bool)
    opens[1:] = (alone[1:] != alone[:-1]) | (kind[1:] != kind[:-1]) | (bins[1:] != bins[:-1])
    first = np.flatnonzero(opens)
    ordered = spans.take(order)
    start = np.minimum.reduceat(ordered.start, first)
    stop = np.maximum.reduceat(ordered.start + ordered.seconds, first)
    joined = SpanColumns(ordered.rank[first], ordered.name[first], start, stop - start, *(
        np.add.reduceat(column, first) for column in (ordered.busy, ordered.num_bytes, ordered.count)))
    return joined.take(np.lexsort((joined.start, joined.rank)))


def _packed(column: np.ndarray, dtype: str) -> str:
    return base64.b64encode(column.astype(dtype).tobytes()).decode("ascii")
