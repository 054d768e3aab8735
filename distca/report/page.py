"""One file that shows a step, a plan or a comparison and opens anywhere: no server, no network, no installation.

The charting library, the style, the script and the numbers are all inside. The page forbids itself every request, so
it is safe to pass on, and a section without figures is not there.
"""

from __future__ import annotations

import json
from html import escape
from importlib.resources import files
from pathlib import Path

from distca.report.figures import ReportData
from distca.report.sections import Section, sections_of

LIBRARY = "plotly-cartesian-4.1.1.min.js"  # the partial bundle: a third of the whole in bytes and in time to start
SCRIPTS = (LIBRARY, "base.js", "charts.js", "raster.js", "timeline.js", "start.js")
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"


def write_page(data: ReportData, path: Path | str) -> None:
    """Write the page, charting library and all."""
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
        *(_section(section) for section in sections),
        '</main>\n<div id="tip" hidden></div>\n<noscript><p>The charts need JavaScript.</p></noscript>',
        f'<script type="application/json" id="report-data">{_json(payload)}</script>',
        *(f"<script>{_asset(name)}</script>" for name in SCRIPTS),
        "</body>\n</html>\n",
    ))


def _section(section: Section) -> str:
    return (f'<section id="{section.key}" aria-labelledby="title-{section.key}">'
            f'<h2 id="title-{section.key}">{escape(section.title)}</h2>{section.body}</section>')


def _json(payload: object) -> str:
    """JSON that cannot end its own script element."""
    return json.dumps(payload, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _asset(name: str) -> str:
    return (files("distca.report") / "assets" / name).read_text(encoding="utf-8")
