"""Render a report as one HTML file that opens anywhere: no server, no network, no installation.

The file contains the charting library, the style, the scripts and the numbers. Its content security policy forbids
every request, so it is safe to share. A section is text and controls as HTML, and a payload that the script draws;
sections without figures are left out. Everything that a chart shows is also in a text or a table, for readers who
cannot see the chart or use a pointer. Data that grows with the square of the ranks or with the documents is reduced
here, and the section says so.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from distca.planning.plan import Plan
from distca.planning.tasks import TaskTable
from distca.report.figures import (
    PlannedBatch,
    ReportData,
    RunFigures,
    Spread,
    StrategyFigures,
    Timeline,
    byte_text,
    count_text,
    over_mean,
    seconds_text,
)
from distca.report.timeline import MAX_SPANS, timeline_payload
from distca.simulate.memory import Memory
from distca.trace import LANES

LIBRARY = "plotly-cartesian-4.1.1.min.js"  # the partial bundle: a third of the whole in bytes and in time to start
SCRIPTS = (LIBRARY, "base.js", "charts.js", "raster.js", "timeline.js", "start.js")
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
MAX_CELLS = 128        # edge of the matrix of transfers
MAX_COLUMNS = 2048     # bars; with more ranks, a bar is the largest of several neighbours
MAX_DOCUMENTS = 40     # documents drawn
MAX_PIECES = 800       # pieces of documents drawn
NUM_LARGEST = 10       # pairs of ranks listed


def write_page(data: ReportData, path: Path | str) -> None:
    """Write the page, with the charting library inside."""
    Path(path).write_text(render_page(data), encoding="utf-8")


def render_page(data: ReportData) -> str:
    sections = sections_of(data)
    links = "".join(f'<a href="#{section.key}">{escape(section.title)}</a>' for section in sections)
    facts = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in data.facts)
    payload = {section.key: section.payload for section in sections}
    return "\n".join((
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="color-scheme" content="light dark">\n<link rel="icon" href="data:,">',
        f"<title>{escape(data.title)}</title>\n<style>{_asset('page.css')}</style>\n</head>\n<body>",
        f'<a class="skip" href="#main">Skip to the report</a>\n<header><h1>{escape(data.title)}</h1>',
        f'<p class="verdict">{escape(data.verdict)}</p>' if data.verdict else "",
        f"<p>{escape(data.subtitle)}</p>" if data.subtitle else "",
        f"<dl>{facts}</dl>" if facts else "",
        f'</header>\n<nav aria-label="Sections">{links}</nav>\n<main id="main">',
        *(f'<section id="{one.key}" aria-labelledby="title-{one.key}">'
          f'<h2 id="title-{one.key}">{escape(one.title)}</h2>{one.body}</section>' for one in sections),
        '</main>\n<div id="tip" hidden></div>\n<noscript><p>The charts need JavaScript.</p></noscript>',
        f'<script type="application/json" id="report-data">{_json(payload)}</script>',
        *(f"<script>{_asset(name)}</script>" for name in SCRIPTS),
        "</body>\n</html>\n",
    ))


def _json(payload: object) -> str:
    """Encode JSON that cannot close its own script element."""
    return json.dumps(payload, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _asset(name: str) -> str:
    return (files("distca.report") / "assets" / name).read_text(encoding="utf-8")


@dataclass(frozen=True, slots=True, eq=False)
class Section:
    key: str
    title: str
    body: str
    payload: object


def sections_of(data: ReportData) -> tuple[Section, ...]:
    """Sections that have figures, in reading order."""
    plan = data.plan
    found = (
        comparison_section(data.comparison) if data.comparison else None,
        work_section(plan) if plan else None,
        timeline_section(data.timelines, data.stacked) if data.timelines else None,
        transfers_section(*bytes_between(plan.plan), size=plan.num_servers) if plan else None,
        documents_section(plan.plan.layout.lengths, plan.plan.tasks) if plan else None,
        memory_section(data.memory, data.memory_capacity_bytes) if data.memory else None,
        run_section(data.run) if data.run else None,
    )
    return tuple(section for section in found if section is not None)


def comparison_section(strategies: Sequence[StrategyFigures]) -> Section:
    others = {name for one in strategies for name in one.speedup_over}
    baselines = sorted(others, key=[one.name for one in strategies].index)
    heads = ("strategy", "tokens/s", "step", "idle", "exposed communication", "peak memory", "work, max/mean")
    entries = [[
        one.name, _spread(one.tokens_per_second, ",.0f"), seconds_text(one.step_seconds), f"{one.idle_share:.1%}",
        f"{one.exposed_communication_share:.1%}", byte_text(one.peak_memory_bytes), f"{one.work_max_over_mean:.2f}",
    ] for one in strategies]
    ratios = [[one.name, *(_spread(one.speedup_over[name], ".2f", "×") if name in one.speedup_over else "–"
                           for name in baselines)] for one in strategies if one.speedup_over]
    words = "Tokens per second of each strategy: " + ", ".join(
        f"{one.name} {one.tokens_per_second.mean:,.0f}" for one in strategies)
    payload = {"names": [one.name for one in strategies], **{
        key: _short([getattr(one.tokens_per_second, key) for one in strategies]) for key in ("mean", "low", "high")}}
    body = ("<p>The same documents under each strategy. Ranges are what the batches covered.</p>"
            f"{_table(heads, entries)}{_table(('speed over', *baselines), ratios) if ratios else ''}"
            f"{_chart('comparison', words, height=60 + 34 * len(strategies))}")
    return Section("comparison", "Strategies", body, payload)


def work_section(batch: PlannedBatch) -> Section:
    before, after = batch.before.work, batch.after.work
    words = (f"The busiest of {len(before):,} ranks did {over_mean(before).max():.2f} times the mean; after planning "
             f"the busiest of {len(after):,} servers does {over_mean(after).max():.2f} times the mean. All wait for "
             "the busiest.")
    controls = _select("work-order", "Order", (("rank", "by rank"), ("size", "largest first")))
    group = -(-len(after) // MAX_COLUMNS)
    payload = {"before": _short(_largest(before, group)), "after": _short(_largest(after, group)),
               "unit": "causal pairs" if batch.plan.cost is None else "seconds", "group": group,
               "mean": _short([before.mean(), after.mean()]), "tolerance": batch.plan.tolerance}
    chart = _chart("work", f"Attention work per server. {words}")
    body = f"<p>{words}</p>{_controls(controls)}{chart}{_numbers('work')}"
    return Section("work", "Work per server", body, payload)


def bytes_between(plan: Plan) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Source, destination and bytes of all traffic between ranks: queries and keys to servers, outputs back home."""
    moved, model, tp = plan.traffic(), plan.model, plan.tp
    return (np.concatenate([moved.q_home, moved.q_server, moved.kv_home]),
            np.concatenate([moved.q_server, moved.q_home, moved.kv_server]),
            np.concatenate([moved.q_tokens * model.q_token_bytes(tp), moved.q_tokens * model.out_token_bytes(tp),
                            moved.kv_tokens * model.kv_token_bytes(tp)]))


def transfers_section(source: np.ndarray, destination: np.ndarray, num_bytes: np.ndarray, *, size: int) -> Section:
    """Show bytes by source and destination; entries with the same source and destination are added up."""
    distinct, where = np.unique(source * size + destination, return_inverse=True)
    num_bytes = np.bincount(where, weights=num_bytes, minlength=len(distinct))
    source, destination = distinct // size, distinct % size
    sent = np.bincount(source, weights=num_bytes, minlength=size)
    received = np.bincount(destination, weights=num_bytes, minlength=size)
    group = -(-size // MAX_CELLS)
    cells = -(-size // group)
    matrix = np.zeros((cells, cells))
    np.add.at(matrix, (source // group, destination // group), num_bytes)
    largest = np.argsort(-num_bytes, kind="stable")[:NUM_LARGEST]
    words = f"{byte_text(sent.sum())} cross ranks (one layer, forward, bf16)."
    if sent.sum():
        words += (f" Rank {sent.argmax()} sends most, {byte_text(sent.max())}; rank {received.argmax()} receives most, "
                  f"{byte_text(received.max())}.")
    if group > 1:
        words += f" A cell stands for {group} × {group} ranks."
    controls = _select("transfers-view", "Show", (
        ("matrix", "who sends to whom"), ("ranks", "sent and received by rank")))
    pairs = _table(("from rank", "to rank", "bytes"),
                   [[str(source[i]), str(destination[i]), byte_text(num_bytes[i])] for i in largest])
    body = (f"<p>{escape(words)}</p>{_controls(controls)}{_chart('transfers', words, height=480)}"
            f"<details><summary>The {len(largest)} largest transfers</summary>{pairs}</details>{_numbers('transfers')}")
    payload = {"matrix": [_short(line) for line in matrix], "group": group, "size": size,
               "columnGroup": -(-size // MAX_COLUMNS), "sent": _short(_largest(sent, -(-size // MAX_COLUMNS))),
               "received": _short(_largest(received, -(-size // MAX_COLUMNS)))}
    return Section("transfers", "Who sends to whom", body, payload)


def timeline_section(timelines: Sequence[Timeline], stacked: bool = False) -> Section:
    payload = [timeline_payload(timeline, MAX_SPANS // len(timelines)) for timeline in timelines]
    lanes = list(dict.fromkeys(lane for one in payload for lane in one["lanes"]))
    boxes = "".join(
        f'<label class="check" title="{escape(LANES[lane])}"><input type="checkbox" name="lane" value="{lane}" checked>'
        f'<span class="swatch" data-lane="{lane}" aria-hidden="true"></span>{lane}</label>'
        for lane in lanes)
    buttons = "".join(f'<button type="button" data-zoom="{key}">{label}</button>' for key, label in (
        ("in", "Zoom in"), ("out", "Zoom out"), ("left", "Earlier"), ("right", "Later"), ("all", "Whole step")))
    controls = (
        f'<fieldset id="timeline-lanes"><legend>Lanes</legend>{boxes}</fieldset>'
        '<label class="field">Ranks <input id="timeline-ranks" type="text" size="14" placeholder="all, or 0-7, 12" '
        'aria-describedby="timeline-status" autocomplete="off"></label>'
        f'<span class="buttons" role="group" aria-label="Zoom">{buttons}</span>')
    hint = "Drag over the chart to zoom, double-click for the whole step; the buttons do the same from the keyboard."
    charts = "".join(
        f"<figure><figcaption>{escape(f'{one.title}: {_timeline_words(one, drawn)}')}</figcaption>"
        f"{_chart(f'timeline-{number}', f'Timeline, {one.title}. {_timeline_words(one, drawn)}', height=440)}</figure>"
        for number, (one, drawn) in enumerate(zip(timelines, payload, strict=True)))
    list_controls = (
        '<label class="field">Spans of rank <input id="span-rank" type="number" min="0" value="'
        f'{min((trace.rank for one in timelines for trace in one.traces), default=0)}"></label>')
    body = (f'<p>{hint}</p>{_controls(controls)}<p id="timeline-status" class="status" role="status"></p>'
            f'<div class="timelines{"" if stacked else f" timelines-{len(timelines)}"}">{charts}</div>'
            f"{_numbers('timeline', 'Seconds per rank and lane')}"
            f'<details data-table="spans"><summary>Spans of one rank</summary>{_controls(list_controls)}'
            '<div class="table"></div></details>')
    return Section("timeline", "Timeline", body, {"lanes": lanes, "timelines": payload})


def _timeline_words(timeline: Timeline, payload: dict[str, Any]) -> str:
    stop, resolution, ranks = payload["stop"], payload["resolution"], len(timeline.traces)
    words = f"{seconds_text(stop)} on {count_text(ranks, 'rank')}"
    if stop > 0:
        share = np.mean(payload["laneSeconds"], axis=0) / stop
        words += ", on average " + ", ".join(f"{lane} {part:.0%}" for lane, part in zip(payload["lanes"], share,
                                                                                      strict=True))
    if resolution:
        words += f". {payload['numSpans']:,} spans; those shorter than {seconds_text(resolution)} are joined"
    return words + "."


def documents_section(lengths: np.ndarray, tasks: TaskTable) -> Section:
    num_documents = len(lengths)
    pieces = np.bincount(tasks.document, minlength=num_documents)
    away = tasks.home != tasks.server
    moved = np.bincount(tasks.document, weights=away, minlength=num_documents) > 0
    order = np.argsort(-lengths, kind="stable")
    shown = order[: max(1, min(MAX_DOCUMENTS, int((np.cumsum(pieces[order]) <= MAX_PIECES).sum())))]
    bar = np.full(num_documents, -1)                             # [documents] bar of the chart, -1 if not drawn
    bar[shown] = np.arange(len(shown))
    drawn = np.flatnonzero(bar[tasks.document] >= 0)
    drawn = drawn[np.lexsort((tasks.q_start[drawn], bar[tasks.document[drawn]]))][:MAX_PIECES]
    sub_bar, num_sub_bars = _sub_bars(tasks.document[drawn], tasks.q_start[drawn], tasks.q_stop[drawn])
    words = (f"{count_text(num_documents, 'document')}, {int((pieces > 1).sum()):,} of them in more than one piece and "
             f"{int(moved.sum()):,} with queries computed away from home.")
    if len(shown) < num_documents:
        words += f" The {len(shown)} longest are drawn."
    if num_sub_bars.max(initial=1) > 1:
        words += " Pieces below each other are the same queries with different keys."
    controls = _select("documents-color", "Colour", (
        ("moved", "at home or moved"), ("server", "by server"), ("home", "by home")))
    payload = {
        "documents": shown.tolist(), "lengths": lengths[shown].tolist(),
        "row": bar[tasks.document[drawn]].tolist(), "start": tasks.q_start[drawn].tolist(),
        "stop": tasks.q_stop[drawn].tolist(), "home": tasks.home[drawn].tolist(),
        "server": tasks.server[drawn].tolist(), "level": sub_bar.tolist(), "levels": num_sub_bars.tolist()}
    body = (f"<p>{words}</p>{_controls(controls)}"
            f"{_chart('documents', 'How documents were cut. ' + words, height=90 + 15 * max(len(shown), 8))}"
            f"{_numbers('documents')}")
    return Section("documents", "How documents were cut", body, payload)


def _sub_bars(document: np.ndarray, start: np.ndarray, stop: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the sub-bar of each piece and the number of sub-bars of its document: pieces with the same queries and
    different keys are drawn below each other."""
    sub_bar = np.zeros(len(document), dtype=np.int64)
    ends: list[int] = []
    for i in range(len(document)):
        if i == 0 or document[i] != document[i - 1]:
            ends = []
        free = next((number for number, end in enumerate(ends) if end <= start[i]), len(ends))
        ends[free:free + 1] = [int(stop[i])]
        sub_bar[i] = free
    most = np.zeros(int(document.max(initial=0)) + 1, dtype=np.int64)
    np.maximum.at(most, document, sub_bar + 1)
    return sub_bar, most[document]


def memory_section(memory: Memory, capacity_bytes: float | None) -> Section:
    kinds = {"weights, gradients, optimizer": memory.states, "activations": memory.activations,
             "gathered keys": memory.gathered_kv, "exchange buffers": memory.buffers}
    total = memory.total
    words = (f"The fullest rank is {total.argmax()} with {byte_text(total.max())}, the emptiest has "
             f"{byte_text(total.min())}.")
    if capacity_bytes is not None:
        words += f" A rank holds {byte_text(capacity_bytes)}."
    group = -(-len(total) // MAX_COLUMNS)
    fullest = np.array([first + total[first:first + group].argmax() for first in range(0, len(total), group)])
    payload = {"kinds": list(kinds), "bytes": [_short(part[fullest]) for part in kinds.values()],
               "ranks": fullest.tolist(), "capacity": capacity_bytes}
    body = f"<p>{words}</p>{_chart('memory', 'Memory per rank by kind. ' + words)}{_numbers('memory')}"
    return Section("memory", "Memory per rank", body, payload)


def run_section(run: RunFigures) -> Section:
    labels = [label for label, _ in run.series]
    words = f"{count_text(len(run.step), 'step')}, {run.step.min():,} to {run.step.max():,}."
    controls = _select("run-series", "Show", tuple((str(number), label) for number, label in enumerate(labels)))
    kept = np.unique(np.linspace(0, len(run.step) - 1, min(len(run.step), MAX_COLUMNS)).astype(np.int64))
    payload = {"step": run.step[kept].tolist(), "labels": labels,
               "values": [_short(values[kept]) for _, values in run.series]}
    body = f"<p>{words}</p>{_controls(controls)}{_chart('run', 'The run step by step. ' + words)}{_numbers('run')}"
    return Section("run", "The run, step by step", body, payload)


def _chart(key: str, alternative: str, height: int = 340) -> str:
    return (f'<div class="chart" id="chart-{key}" role="img" aria-label="{escape(alternative)}" '
            f'style="height:{height}px"></div>')


def _numbers(key: str, summary: str = "The numbers as a table") -> str:
    return f'<details data-table="{key}"><summary>{summary}</summary><div class="table"></div></details>'


def _select(key: str, label: str, options: Sequence[tuple[str, str]]) -> str:
    choices = "".join(f'<option value="{value}">{escape(text)}</option>' for value, text in options)
    return f'<label class="field">{label} <select id="{key}">{choices}</select></label>'


def _controls(content: str) -> str:
    return f'<div class="controls">{content}</div>'


def _table(heads: Sequence[str], entries: Sequence[Sequence[str]]) -> str:
    head = "".join(f'<th scope="col">{escape(text)}</th>' for text in heads)
    body = "".join(
        f'<tr><th scope="row">{escape(first)}</th>{"".join(f"<td>{escape(text)}</td>" for text in rest)}</tr>'
        for first, *rest in entries)
    return f'<div class="table"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _spread(spread: Spread, form: str, unit: str = "") -> str:
    if spread.low == spread.high:
        return f"{spread.mean:{form}}{unit}"
    return f"{spread.mean:{form}}{unit} ({spread.low:{form}}–{spread.high:{form}})"


def _largest(values: np.ndarray, group: int) -> np.ndarray:
    """Maximum over each group of `group` neighbours."""
    return np.maximum.reduceat(values, np.arange(0, len(values), group)) if group > 1 else values


def _short(values: np.ndarray | Sequence[float]) -> list[float | None]:
    """Round to six digits, more than a chart shows; non-finite values become null."""
    return [float(f"{value:.6g}") if np.isfinite(value) else None for value in np.asarray(values, dtype=float).tolist()]
