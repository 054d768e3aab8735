"""One file that shows a step, a plan or a comparison and opens anywhere: no server, no network, no installation.

The charting library, the style, the script and the numbers are all inside. The page forbids itself every request, so
it is safe to pass on, and a section without figures is not there.

What a comparison of strategies comes to: ours against the best baseline, in one sentence.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import Path

from distca.report.figures import ReportData, Spread, StrategyFigures
from distca.report.sections import Section, sections_of
from distca.simulate.strategies import BOUND, STRATEGIES

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


OURS = "distca"
NO_GAIN = 1.005  # what rounds to 1.00 is no gain


def ours_and_best_baseline(
    strategies: Sequence[StrategyFigures],
) -> tuple[StrategyFigures | None, StrategyFigures | None]:
    """Our strategy, distca where it ran, and the fastest baseline; None where none ran."""
    known = [one for one in strategies if one.name in STRATEGIES]
    ours = [one for one in known if not STRATEGIES[one.name].is_baseline]
    baselines = [one for one in known if STRATEGIES[one.name].is_baseline]
    ours.sort(key=lambda one: one.name == OURS)
    return ours[-1] if ours else None, max(baselines, key=lambda one: one.tokens_per_second.mean, default=None)


def verdict(strategies: Sequence[StrategyFigures]) -> str:
    """One sentence, or nothing where there is nothing to compare."""
    ours, best = ours_and_best_baseline(strategies)
    if ours is None or best is None:
        return _alone(ours or best)
    ratio = ours.tokens_per_second.mean / best.tokens_per_second.mean
    gain = ours.speedup_over.get(best.name, Spread(ratio, ratio, ratio))
    spread = "" if gain.low == gain.high else f" ({gain.low:.2f} to {gain.high:.2f} over the batches)"
    speeds = f"{ours.tokens_per_second.mean:,.0f} tokens/s against {best.tokens_per_second.mean:,.0f}"
    bound = _bound_words(strategies, ours)
    if gain.mean >= NO_GAIN:
        return (f"{ours.name} trains {gain.mean:.2f}× as fast as {best.name}, the best baseline{spread}: {speeds}"
                f"{bound}.")
    return (f"{ours.name} gains nothing here: it trains {gain.mean:.2f}× as fast as {best.name}, the best baseline"
            f"{spread}, {speeds}{bound}.")


def _bound_words(strategies: Sequence[StrategyFigures], ours: StrategyFigures) -> str:
    floor = next((one for one in strategies if one.name == BOUND), None)
    if floor is None:
        return ""
    share = ours.tokens_per_second.mean / floor.tokens_per_second.mean
    return f", {share:.0%} of what no strategy can beat"


def _alone(one: StrategyFigures | None) -> str:
    if one is None:
        return ""
    kind = "baseline" if STRATEGIES[one.name].is_baseline else "strategy of ours"
    other = "strategy of ours" if kind == "baseline" else "baseline"
    return (f"{one.name}, the best {kind}, trains at {one.tokens_per_second.mean:,.0f} tokens/s; no {other} ran and "
            "fitted to compare it with.")
