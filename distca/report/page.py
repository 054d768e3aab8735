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
from distca.report.figures import PlannedBatch, ReportData
from distca.report.run_sections import (
    comparison_section,
    lanes_section,
    run_section,
    settings_section,
    timeline_section,
    waits_section,
)
from distca.report.sections import (
    Section,
    batches_section,
    detail_section,
    documents_section,
    fact_list,
    memory_section,
    transfers_section,
    work_section,
)
from distca.trace import RankFigures

LIBRARY = "plotly-cartesian-4.1.1.min.js"  # the partial bundle: a third of the whole in bytes and in time to start
SCRIPTS = (LIBRARY, "base.js", "charts.js", "raster.js", "timeline.js", "start.js")
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"


def write_page(data: ReportData, path: Path | str) -> None:
    """Write the page, with the charting library inside."""
    Path(path).write_text(render_page(data), encoding="utf-8")


def render_page(data: ReportData, *, live: str = "") -> str:
    """Return the page; with `live`, a name of its contents, it asks its server for newer figures."""
    sections = sections_of(data)
    links = "".join(f'<a href="#{section.key}">{escape(section.title)}</a>' for section in sections)
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
          f'<h2 id="title-{one.key}">{escape(one.title)}</h2>{one.body}</section>' for one in sections),
        '</main>\n<div id="tip" hidden></div>\n<noscript><p>The charts need JavaScript.</p></noscript>',
        f'<script type="application/json" id="report-data">{_json(payload_of(sections))}</script>',
        *(f"<script>{_asset(name)}</script>" for name in (*SCRIPTS, *(["live.js"] if live else []))),
        "</body>\n</html>\n",
    ))


def summary(data: ReportData) -> str:
    """Return the top of the page below its title: the verdict, what is shown, and the key figures."""
    verdict = f'<p class="verdict">{escape(data.verdict)}</p>' if data.verdict else ""
    return f"{verdict}{f'<p>{escape(data.subtitle)}</p>' if data.subtitle else ''}{fact_list(data.facts)}"


def payload_of(sections: tuple[Section, ...]) -> dict[str, object]:
    return {section.key: section.payload for section in sections if section.payload is not None}


def _json(payload: object) -> str:
    """Encode JSON that cannot close its own script element."""
    return json.dumps(payload, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _asset(name: str) -> str:
    return (files("distca.report") / "assets" / name).read_text(encoding="utf-8")


def sections_of(data: ReportData) -> tuple[Section, ...]:
    """Sections that have figures, in reading order: the whole first, then one batch or one step in full."""
    work: list[Section] = []
    if data.plan is not None:
        work = _of_plan(data.plan)
    elif data.ranks is not None:
        work = _of_ranks(data.ranks)
    found = (
        comparison_section(data.comparison) if data.comparison else None,
        batches_section(data.batches) if data.batches is not None else None,
        run_section(data.runs, data.sides) if data.runs else None,
        detail_section(*data.detail) if data.detail is not None else None,
        *work[:1],
        timeline_section(data.timelines) if data.timelines else None,
        lanes_section(data.timelines) if len(data.timelines) > 1 else None,
        waits_section(data.waits) if data.waits is not None else None,
        *work[1:],
        _memory(data),
        settings_section(data.settings, [run.name for run in data.runs]) if data.settings else None,
    )
    return tuple(section for section in found if section is not None)


def _of_plan(batch: PlannedBatch) -> list[Section]:
    plan, moved = batch.plan, batch.plan.traffic()
    model, tp = plan.model, plan.tp
    pairs = (np.concatenate([moved.q_home, moved.q_server, moved.kv_home]),
             np.concatenate([moved.q_server, moved.q_home, moved.kv_server]),
             np.concatenate([moved.q_tokens * model.q_token_bytes(tp), moved.q_tokens * model.out_token_bytes(tp),
                             moved.kv_tokens * model.kv_token_bytes(tp)]))
    unit = "causal pairs" if plan.cost is None else "seconds"
    return [work_section(batch.before.work, batch.after.work, unit=unit, tolerance=plan.tolerance),
            transfers_section(*pairs, size=batch.num_servers), documents_section(plan.layout.lengths, plan.tasks)]


def _of_ranks(ranks: RankFigures) -> list[Section]:
    zero = np.zeros_like(ranks.q_start)                          # pieces are drawn by their queries alone
    tasks = TaskTable(ranks.document, ranks.q_start, ranks.q_stop, zero, ranks.q_stop, ranks.home, ranks.server)
    return [work_section(ranks.work_before, ranks.work_after, unit=ranks.unit, tolerance=ranks.tolerance),
            transfers_section(ranks.source, ranks.destination, ranks.num_bytes, size=len(ranks.work_after),
                              what="forward, all layers of the step"), documents_section(ranks.lengths, tasks)]


def _memory(data: ReportData) -> Section | None:
    held = data.memory
    if held is not None:
        return memory_section({
            "weights, gradients, optimizer": held.states, "activations": held.activations,
            "gathered keys": held.gathered_kv, "exchange buffers": held.buffers}, data.memory_capacity_bytes)
    return None if data.ranks is None else memory_section({"peak so far": data.ranks.memory_bytes})
