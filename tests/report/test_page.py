"""The page holds what it was given, says it in words too, stays small, and asks the network for nothing."""

import base64
import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distca.planning.tasks import TaskTable
from distca.report.figures import ReportData, RunFigures, Timeline
from distca.report.page import SCRIPTS, render_page, write_page
from distca.report.sections import (
    MAX_CELLS,
    MAX_PIECES,
    documents_section,
    memory_section,
    transfers_section,
    work_section,
)
from distca.report.timeline import MAX_SPANS, columns_of, names_of, thinned, timeline_payload
from distca.trace import Span, StepTrace

SECTIONS = ("comparison", "run", "work", "timeline", "transfers", "documents", "memory")


class Outline(HTMLParser):
    """Elements in order, with the text of the title."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.unlabelled: list[dict[str, str | None]] = []
        self.labels_open, self.text = 0, ""
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = dict(attributes)
        self.elements.append((tag, values))
        self.labels_open += tag == "label"
        if tag in ("input", "select") and not self.labels_open and "aria-label" not in values:
            self.unlabelled.append(values)

    def handle_endtag(self, tag: str) -> None:
        self.labels_open -= tag == "label"

    def handle_data(self, data: str) -> None:
        self.text += data

    def having(self, tag: str) -> list[dict[str, str | None]]:
        return [values for name, values in self.elements if name == tag]


def payload(page: str) -> dict[str, dict[str, Any]]:
    (data,) = re.findall(r'id="report-data">(.*?)</script>', page, re.DOTALL)
    return json.loads(data)


def test_sections_follow_the_figures(make_report: Callable[..., ReportData]) -> None:
    whole = make_report(4)
    assert [section["id"] for section in Outline(render_page(whole)).having("section")] == list(SECTIONS)
    empty: dict[str, Any] = {"comparison": (), "timelines": (), "plan": None, "memory": None, "runs": ()}
    drawn = {"timelines": ["timeline"], "plan": ["work", "transfers", "documents"], "runs": ["run"]}
    for field in empty:
        keys = drawn.get(field, [field])
        only = render_page(replace(whole, **{name: none for name, none in empty.items() if name != field}))
        assert [section["id"] for section in Outline(only).having("section")] == keys
        assert list(payload(only)) == keys
    assert Outline(render_page(ReportData("nothing"))).having("section") == []


def test_page_stands_alone_and_is_accessible(make_report: Callable[..., ReportData]) -> None:
    page = Outline(render_page(make_report(8, timelines=2)))
    for tag, values in page.elements:
        for attribute in ("src", "href"):
            assert (values.get(attribute, "#") or "").startswith(("#", "data:")), (tag, values)
    assert "default-src 'none'" in next(meta["content"] or "" for meta in page.having("meta") if "http-equiv" in meta)
    assert page.unlabelled == []
    charts = [values for values in page.having("div") if values.get("class") == "chart"]
    assert len(charts) == len(SECTIONS) + 2                      # two timelines, and both lane by lane
    assert all(chart["role"] == "img" and len(chart["aria-label"] or "") > 40 for chart in charts)
    assert max(Counter(values["id"] for _, values in page.elements if "id" in values).values()) == 1


def test_text_from_outside_stays_text() -> None:
    evil = "</script><script>alert(1)</script>&\"'"
    trace = StepTrace(0, 1, (Span(evil, "linear", 0.0, 1.0),))
    page = render_page(ReportData(evil, evil, ((evil, evil),), timelines=(Timeline(evil, (trace,)),),
                                  runs=(RunFigures(np.arange(2), ((evil, np.ones(2)),), evil),)))
    outline = Outline(page)
    assert len(outline.having("script")) == 1 + len(SCRIPTS) and page.count("alert(1)</script>") == 0
    assert payload(page)["timeline"]["timelines"][0]["names"] == [[0, evil]]
    assert outline.text.count("alert(1)") >= 5


@pytest.mark.parametrize("num_ranks", [1, 8, MAX_CELLS, MAX_CELLS + 1, 512, 10_000])
def test_transfers_keep_every_byte_in_few_cells(num_ranks: int) -> None:
    rng = np.random.default_rng(num_ranks)
    source, destination = rng.integers(num_ranks, size=(2, 3000))
    num_bytes = rng.integers(1, 1000, 3000)
    section = transfers_section(source, destination, num_bytes, size=num_ranks)
    shown: Any = section.payload
    matrix = np.array(shown["matrix"])
    assert len(matrix) <= MAX_CELLS and matrix.sum() == pytest.approx(num_bytes.sum(), rel=1e-5)
    i = int(rng.integers(3000))
    group = shown["group"]
    block = (source // group == source[i] // group) & (destination // group == destination[i] // group)
    assert matrix[source[i] // group, destination[i] // group] == pytest.approx(num_bytes[block].sum(), rel=1e-5)
    sent = np.bincount(source, weights=num_bytes, minlength=num_ranks)
    assert max(shown["sent"]) == pytest.approx(sent.max(), rel=1e-5)
    assert f"Rank {sent.argmax()} sends most" in section.body


def test_pieces_on_one_level_never_overlap() -> None:
    """Two tasks with the same queries and different keys lie below each other; different documents do not mix."""
    start, stop = np.array([0, 100, 100, 200, 0]), np.array([100, 200, 200, 300, 100])
    tasks = TaskTable(np.array([1, 1, 1, 1, 0]), start, stop, np.array([0, 0, 50, 0, 0]), stop,
                      np.array([0, 0, 0, 1, 1]), np.array([0, 1, 2, 1, 1]))
    section = documents_section(np.array([100, 300]), tasks)
    shown: Any = section.payload
    assert shown["documents"] == [1, 0] and shown["lengths"] == [300, 100]
    assert shown["row"] == [0, 0, 0, 0, 1] and shown["level"] == [0, 0, 1, 0, 0] and shown["levels"] == [2, 2, 2, 2, 1]
    assert "1 of them in more than one piece and 1 with queries computed away from home" in section.body


def test_one_document_in_too_many_pieces_is_still_drawn() -> None:
    start = np.arange(3 * MAX_PIECES) * 10
    zero = np.zeros(len(start), dtype=int)
    tasks = TaskTable(zero, start, start + 10, zero, start + 10, zero, zero + 1)
    shown: Any = documents_section(np.array([start[-1] + 10]), tasks).payload
    assert len(shown["row"]) == MAX_PIECES


def test_memory_groups_show_the_fullest_rank() -> None:
    num_bytes = np.full((2, 5000), 10.0)
    num_bytes[:, 4321] = (70, 20)
    none = np.zeros(5000)
    section = memory_section({"states": num_bytes[0], "activations": none, "buffers": num_bytes[1]}, 100)
    shown: Any = section.payload
    at = shown["ranks"].index(4321)
    assert [row[at] for row in shown["bytes"]] == [70, 0, 20]
    assert "The fullest rank is 4321 with 90 B" in section.body


def test_what_is_no_number_is_null() -> None:
    page = render_page(ReportData("run", runs=(RunFigures(np.array([1, 2]), (("loss", np.array([np.nan, 2.5])),)),)))
    assert payload(page)["run"]["runs"][0]["values"] == [[None, 2.5]]


def test_work_that_is_all_zero_is_drawn() -> None:
    shown: Any = work_section(np.zeros(3), np.zeros(4), unit="causal pairs", tolerance=0.05).payload
    assert shown["after"] == [0, 0, 0, 0]


def _columns(timeline: dict[str, Any]) -> dict[str, np.ndarray]:
    return {name: np.frombuffer(base64.b64decode(timeline["columns"][name]), dtype) for name, dtype in (
        ("start", "<f4"), ("seconds", "<f4"), ("bytes", "<f4"), ("name", "<u2"), ("joined", "<u4"),
        ("joinedCount", "<u4"))}


def test_a_small_timeline_is_exact() -> None:
    traces = (StepTrace(5, 1, (Span("b", "attention", 0.5, 0.75, 12), Span("a", "linear", 0.0, 0.5))),
              StepTrace(2, 1, (Span("a", "linear", 0.0, 1.0), Span("x", "network", 0.25, 0.5))))
    shown = timeline_payload(Timeline("here", traces), 10)
    columns = _columns(shown)
    assert shown["ranks"] == [2, 5] and shown["offsets"] == [0, 2, 4] and shown["stop"] == 1.0
    assert shown["lanes"] == ["linear", "attention", "network"]
    names = [shown["names"][i][1] for i in columns["name"]]
    assert names == ["a", "x", "a", "b"]
    assert columns["start"].tolist() == [0, 0.25, 0, 0.5] and columns["bytes"].tolist() == [0, 0, 0, 12]
    assert columns["joined"].size == 0 and shown["resolution"] == 0
    assert shown["laneSeconds"] == [[1.0, 0.0, 0.25], [0.5, 0.25, 0.0]]


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 4), st.integers(30, 120), st.integers(12, 60), st.integers(0, 2**32 - 1))
def test_thinning_keeps_time_bytes_and_long_spans(ranks: int, spans: int, limit: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    lanes = ("linear", "attention", "wait")
    traces = []
    for rank in range(ranks):
        start = np.sort(rng.random(spans))
        stop = start + rng.exponential(0.01, spans)
        traces.append(StepTrace(rank, 0, tuple(
            Span("s", lanes[i % 3], a, b, int(i)) for i, (a, b) in enumerate(zip(start, stop, strict=True)))))
    names = names_of(traces)
    whole = columns_of(traces, names)
    few, resolution = thinned(whole, names.lane, limit)
    assert len(few) <= max(limit, ranks * len(lanes))
    assert few.count.sum() == len(whole) and few.num_bytes.sum() == whole.num_bytes.sum()
    for lane in range(3):
        for rank in range(ranks):
            one, other = ((names.lane[side.name] == lane) & (side.rank == rank) for side in (whole, few))
            np.testing.assert_allclose(few.busy[other].sum(), whole.busy[one].sum())
            np.testing.assert_allclose([few.start[other].min(), (few.start + few.seconds)[other].max()],
                                       [whole.start[one].min(), (whole.start + whole.seconds)[one].max()])
    exact = set(zip(few.rank, few.start, few.seconds, strict=True))
    long = whole.seconds >= max(resolution, 1e-12)
    assert set(zip(whole.rank[long], whole.start[long], whole.seconds[long], strict=True)) <= exact
    assert (np.diff(few.rank) >= 0).all()


def test_a_lane_of_another_name_is_refused() -> None:
    with pytest.raises(ValueError, match="lane 'linera' is unknown; did you mean 'linear'"):
        names_of([StepTrace(0, 0, (Span("s", "linera", 0, 1),))])


def test_too_many_names_are_refused() -> None:
    spans = tuple(Span(str(i), "linear", 0, 1) for i in range(2**16 + 1))
    with pytest.raises(ValueError, match="65537 different names"):
        names_of([StepTrace(0, 0, spans)])


def test_512_ranks_stay_under_ten_megabytes(make_report: Callable[..., ReportData],
                                            make_traces: Callable[..., tuple[StepTrace, ...]], tmp_path: Path) -> None:
    traces = make_traces(512, layers=175)
    assert sum(len(trace.spans) for trace in traces) > MAX_SPANS
    write_page(replace(make_report(512, timelines=0), timelines=(Timeline("long", traces),)), tmp_path / "page.html")
    assert (tmp_path / "page.html").stat().st_size < 10e6
