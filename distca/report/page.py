"""Render a report as one HTML file that opens anywhere: no server, no network, no installation.

The file contains the charting library, the style, the scripts and the numbers. Its content security policy forbids
every request, so it is safe to share. Sections without figures are left out. `distca watch` shows the same page, which
may then ask its own server for newer figures.
"""

from __future__ import annotations

import json
from html import escape
from importlib.resources import files
from pathlib import Path

import numpy as np

from distca.planning.tasks import TaskTable
from distca.report import run_sections, sections
from distca.report.figures import PlannedBatch, ReportData
from distca.trace import RankFigures

LIBRARY = "plotly-cartesian-4.1.1.min.js"  # the partial bundle: a third of the whole in bytes and in time to start
SCRIPTS = (LIBRARY, "base.js", "charts.js", "raster.js", "timeline.js", "start.js")
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"


def write_page(data: ReportData, path: Path | str) -> None:
    """Write the page, with the charting library inside."""
    Path(path).write_text(render_page(data), encoding="utf-8")


def render_page(data: ReportData, *, live: str = "") -> str:
    """Return the page; with `live`, a name of its contents, it asks its server for newer figures."""
    parts = sections_of(data)
    links = "".join(f'<a href="#{section.key}">{escape(section.title)}</a>' for section in parts)
    policy = f"{POLICY}; connect-src 'self'" if live else POLICY
    return "\n".join((
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="color-scheme" content="light dark">\n<link rel="icon" href="data:,">',
        f"<title>{escape(data.title)}</title>\n<style>{_asset('page.css')}</style>\n</head>\n<body>",
        f'<a class="skip" href="#main">Skip to the report</a>\n<header><h1>{escape(data.title)}</h1>',
        f'<div id="summary">{summary(data)}</div>',
        f'<p id="live" role="status" data-contents="{escape(live)}"></p>' if live else "",
        f'</header>\n<nav aria-label="Sections">{links}</nav>\n<main id="main">',
        *(f'<section id="{one.key}" aria-labelledby="title-{one.key}">'
          f'<h2 id="title-{one.key}">{escape(one.title)}</h2>{one.body}</section>' for one in parts),
        '</main>\n<div id="tip" hidden></div>\n<noscript><p>The charts need JavaScript.</p></noscript>',
        f'<script type="application/json" id="report-data">{_json(payload_of(parts))}</script>',
        *(f"<script>{_asset(name)}</script>" for name in (*SCRIPTS, *(["live.js"] if live else []))),
        "</body>\n</html>\n",
    ))


def summary(data: ReportData) -> str:
    """Return the top of the page below its title: the verdict, what is shown, and the key figures."""
    verdict = f'<p class="verdict">{escape(data.verdict)}</p>' if data.verdict else ""
    return f"{verdict}{f'<p>{escape(data.subtitle)}</p>' if data.subtitle else ''}{sections.fact_list(data.facts)}"


def payload_of(parts: tuple[sections.Section, ...]) -> dict[str, object]:
    return {section.key: section.payload for section in parts if section.payload is not None}


def _json(payload: object) -> str:
    """Encode JSON that cannot close its own script element."""
    return json.dumps(payload, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _asset(name: str) -> str:
    return (files("distca.report") / "assets" / name).read_text(encoding="utf-8")


def sections_of(data: ReportData) -> tuple[sections.Section, ...]:
    """Sections that have figures, in reading order: the whole first, then one batch or one step in full."""
    work: list[sections.Section] = []
    if data.plan is not None:
        work = _of_plan(data.plan)
    elif data.ranks is not None:
        work = _of_ranks(data.ranks)
    found = (
        run_sections.comparison_section(data.comparison) if data.comparison else None,
        sections.batches_section(data.batches) if data.batches is not None else None,
        run_sections.run_section(data.runs, data.sides) if data.runs else None,
        sections.detail_section(*data.detail) if data.detail is not None else None,
        *work[:1],
        run_sections.timeline_section(data.timelines) if data.timelines else None,
        run_sections.lanes_section(data.timelines) if len(data.timelines) > 1 else None,
        run_sections.waits_section(data.waits) if data.waits is not None else None,
        *work[1:],
        _memory(data),
        run_sections.settings_section(data.settings, [run.name for run in data.runs]) if data.settings else None,
    )
    return tuple(section for section in found if section is not None)


def _of_plan(batch: PlannedBatch) -> list[sections.Section]:
    plan, moved = batch.plan, batch.plan.traffic()
    model, tp = plan.model, plan.tp
    pairs = (np.concatenate([moved.q_home, moved.q_server, moved.kv_home]),
             np.concatenate([moved.q_server, moved.q_home, moved.kv_server]),
             np.concatenate([moved.q_tokens * model.q_token_bytes(tp), moved.q_tokens * model.out_token_bytes(tp),
                             moved.kv_tokens * model.kv_token_bytes(tp)]))
    unit = "causal pairs" if plan.cost is None else "seconds"
    return [sections.work_section(batch.before.work, batch.after.work, unit=unit, tolerance=plan.tolerance),
            sections.transfers_section(*pairs, size=batch.num_servers),
            sections.documents_section(plan.layout.lengths, plan.tasks)]


def _of_ranks(ranks: RankFigures) -> list[sections.Section]:
    zero = np.zeros_like(ranks.q_start)                          # pieces are drawn by their queries alone
    tasks = TaskTable(ranks.document, ranks.q_start, ranks.q_stop, zero, ranks.q_stop, ranks.home, ranks.server)
    return [sections.work_section(ranks.work_before, ranks.work_after, unit=ranks.unit, tolerance=ranks.tolerance),
            sections.transfers_section(ranks.source, ranks.destination, ranks.num_bytes, size=len(ranks.work_after),
                              what="forward, all layers of the step"), sections.documents_section(ranks.lengths, tasks)]


def _memory(data: ReportData) -> sections.Section | None:
    held = data.memory
    if held is not None:
        return sections.memory_section({
            "weights, gradients, optimizer": held.states, "activations": held.activations,
            "gathered keys": held.gathered_kv, "exchange buffers": held.buffers}, data.memory_capacity_bytes)
    return None if data.ranks is None else sections.memory_section({"peak so far": data.ranks.memory_bytes})
