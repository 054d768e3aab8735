"""Sections of a page that show strategies, timelines and runs."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

import numpy as np

from distca.report.figures import (
    RunFigures,
    Spread,
    StrategyFigures,
    Timeline,
    Wait,
    byte_text,
    count_text,
    ours_and_best_baseline,
    seconds_text,
)
from distca.report.sections import MAX_COLUMNS, Section, chart, controls, numbers, select, short_numbers, table
from distca.report.timeline import MAX_SPANS, timeline_payload
from distca.simulate.strategies import BOUND, BOUND_MEANING, STRATEGIES
from distca.trace import LANES

SMOOTHING = (("0", "none"), ("5", "over 5 steps"), ("20", "over 20 steps"), ("100", "over 100 steps"))
LOSS, HELD_OUT = "loss, nats", "held-out loss, nats"  # drawn together


def comparison_section(strategies: Sequence[StrategyFigures]) -> Section:
    ours, best = ours_and_best_baseline(strategies)
    names = [one.name for one in strategies]
    kinds = {name: "bound" if name == BOUND else "other" if name not in STRATEGIES or STRATEGIES[name].is_baseline
             else "ours" for name in names} | ({} if best is None else {best.name: "best"})
    notes = {BOUND: BOUND_MEANING, **{name: one.meaning for name, one in STRATEGIES.items()}}
    heads = ("strategy", "tokens/s", "step", "idle", "exposed communication", "peak memory", "work, max/mean")
    entries = [[
        one.name, _spread(one.tokens_per_second, ",.0f"), seconds_text(one.step_seconds), f"{one.idle_share:.1%}",
        f"{one.exposed_communication_share:.1%}", byte_text(one.peak_memory_bytes), f"{one.work_max_over_mean:.2f}",
    ] for one in strategies]
    compared = {name for one in strategies for name in one.speedup_over}
    baselines = [name for name in names if name in compared and kinds[name] in ("best", "other")]
    ratios = [[one.name, *(_spread(one.speedup_over[name], ".2f", "×") if name in one.speedup_over else "–"
                           for name in baselines)]
              for one in strategies if baselines and one.name not in baselines and one.speedup_over]
    words = "Tokens per second of each strategy: " + ", ".join(
        f"{one.name} {one.tokens_per_second.mean:,.0f}" for one in strategies)
    payload = {"names": names, "kinds": [kinds[name] for name in names], **{
        key: short_numbers([getattr(one.tokens_per_second, key) for one in strategies])
        for key in ("mean", "low", "high")}}
    legend = "" if ours is None or best is None else (
        ' <span class="mark ours">Blue</span> is ours, <span class="mark best">orange</span> the best baseline.')
    body = (f"<p>The same documents under each strategy. Ranges are what the batches covered.{legend}</p>"
            f"{table(heads, entries, 'Strategies', notes, kinds)}"
            f"{table(('times as fast as', *baselines), ratios, 'Speed ratios', kinds=kinds) if ratios else ''}"
            f"{chart('comparison', words, height=60 + 34 * len(strategies))}")
    return Section("comparison", "Strategies", body, payload)


def timeline_section(timelines: Sequence[Timeline]) -> Section:
    payload = [timeline_payload(timeline, MAX_SPANS // len(timelines)) for timeline in timelines]
    lanes = list(dict.fromkeys(lane for one in payload for lane in one["lanes"]))
    boxes = "".join(
        f'<label class="check" title="{escape(LANES[lane])}"><input type="checkbox" name="lane" value="{lane}" checked>'
        f'<span class="swatch" data-lane="{lane}" aria-hidden="true"></span>{lane}</label>'
        for lane in lanes)
    buttons = "".join(f'<button type="button" data-zoom="{key}">{label}</button>' for key, label in (
        ("in", "Zoom in"), ("out", "Zoom out"), ("left", "Earlier"), ("right", "Later"), ("all", "Whole step")))
    fields = (
        f'<fieldset id="timeline-lanes"><legend>Lanes</legend>{boxes}</fieldset>'
        '<label class="field">Ranks <input id="timeline-ranks" type="text" size="14" placeholder="all, or 0-7, 12" '
        'aria-describedby="timeline-status" autocomplete="off"></label>'
        f'<span class="buttons" role="group" aria-label="Zoom">{buttons}</span>')
    hint = "Drag over the chart to zoom, double-click for the whole step; the buttons do the same from the keyboard."
    charts = "".join(
        f"<figure><figcaption>{escape(f'{one.title}: {_timeline_words(one, drawn)}')}</figcaption>"
        f"{chart(f'timeline-{number}', f'Timeline, {one.title}. {_timeline_words(one, drawn)}', height=440)}</figure>"
        for number, (one, drawn) in enumerate(zip(timelines, payload, strict=True)))
    list_controls = (
        '<label class="field">Spans of rank <input id="span-rank" type="number" min="0" value="'
        f'{min((trace.rank for one in timelines for trace in one.traces), default=0)}"></label>')
    spans = numbers("spans", "Spans of one rank").replace("</summary>", f"</summary>{controls(list_controls)}")
    body = (f'<p>{hint}</p>{controls(fields)}<p id="timeline-status" class="status" role="status"></p>'
            f'<div class="timelines">{charts}</div>{numbers("timeline", "Seconds per rank and lane")}{spans}')
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


def lanes_section(timelines: Sequence[Timeline]) -> Section:
    """Show two timelines over each other: each lane's mean seconds, and the second as a ratio of the first."""
    lanes = [lane for lane in LANES if any(trace.seconds(lane) for one in timelines for trace in one.traces)]
    seconds = [[float(np.mean([trace.seconds(lane) for trace in one.traces])) for lane in lanes] for one in timelines]
    first, second = (one.title for one in timelines)
    entries = [[lane, seconds_text(one), seconds_text(other), f"{other / one:.2f}" if one else "–"]
               for lane, one, other in zip(lanes, *seconds, strict=True)]
    words = (f"Seconds of a rank in each lane, mean over the ranks. The wide bar is {first}; the narrow bar over it is "
             f"{second}.")
    body = (f"<p>{escape(words)}</p>{chart('lanes', words, height=80 + 40 * len(lanes))}"
            f"{table(('lane', first, second, 'second / first'), entries, 'Seconds of each lane')}")
    return Section("lanes", "Both timelines, lane by lane", body, {
        "lanes": lanes, "names": [first, second], "seconds": [short_numbers(one) for one in seconds]})


def waits_section(waits: Sequence[Wait]) -> Section:
    entries = [[f"rank {one.rank} waits for {one.waits_for}", seconds_text(one.seconds),
                seconds_text(one.start_seconds), byte_text(one.num_bytes)] for one in waits]
    words = ("A rank waits for the one that began to send last in the same exchange; if all had begun before, it waits "
             "for the network." if waits else "No rank waited for another one.")
    listed = table(("wait", "length", "begins at", "bytes of the rank"), entries, "The largest waits") if waits else ""
    return Section("waits", "The largest waits", f"<p>{words}</p>{listed}")


def run_section(runs: Sequence[RunFigures], sides: Sequence[Sequence[str]] = ()) -> Section:
    labels = list(dict.fromkeys(label for run in runs for label, _ in run.series if label != HELD_OUT))
    words = " ".join(f"{run.name}: {count_text(len(run.step), 'step')}, {run.step.min():,} to {run.step.max():,}."
                     for run in runs)
    held_out = any(label == HELD_OUT for run in runs for label, _ in run.series)
    if held_out:
        words += " Diamonds are the loss on held-out documents."
    fields = (select("run-series", "Show", tuple((str(number), label) for number, label in enumerate(labels)))
              + select("run-smoothing", "Smoothing", SMOOTHING))
    payload = {"labels": labels, "runs": [_run_payload(run, labels) for run in runs]}
    beside = table(("figure", *(run.name for run in runs)), sides, "Both runs side by side") if sides else ""
    body = (f"{beside}<p>{escape(words)}</p>{controls(fields)}{chart('run', 'The run step by step. ' + words)}"
            f"{numbers('run')}")
    return Section("run", "The run, step by step" if len(runs) == 1 else "Both runs, side by side", body, payload)


def _run_payload(run: RunFigures, labels: Sequence[str]) -> dict[str, Any]:
    known = dict(run.series)
    none = np.full(len(run.step), np.nan)
    kept = np.unique(np.linspace(0, len(run.step) - 1, min(len(run.step), MAX_COLUMNS)).astype(np.int64))
    tested = known.get(HELD_OUT, none)
    at = np.flatnonzero(np.isfinite(tested))[-MAX_COLUMNS:]      # few steps are followed by an evaluation
    return {"name": run.name, "step": run.step[kept].tolist(),
            "values": [short_numbers(known.get(label, none)[kept]) for label in labels],
            "heldOut": {"step": run.step[at].tolist(), "values": short_numbers(tested[at]),
                        "label": labels.index(LOSS) if LOSS in labels else -1}}


def settings_section(settings: Sequence[tuple[str, ...]], names: Sequence[str]) -> Section:
    heads = ("setting", *(names if len(settings[0]) > 2 else ["value"]))
    apart = [one for one in settings if len(set(one[1:])) > 1]
    words = "Every setting of the run." if len(heads) == 2 else (
        f"{count_text(len(apart), 'setting')} of {len(settings)} differ." if apart else "All settings are equal.")
    differing = table(heads, apart, "Settings that differ") if apart else ""
    body = (f"<p>{words}</p>{differing}<details><summary>All settings</summary>"
            f"{table(heads, settings, 'All settings')}</details>")
    return Section("settings", "Settings", body)


def _spread(spread: Spread, form: str, unit: str = "") -> str:
    if spread.low == spread.high:
        return f"{spread.mean:{form}}{unit}"
    return f"{spread.mean:{form}}{unit} ({spread.low:{form}}–{spread.high:{form}})"
