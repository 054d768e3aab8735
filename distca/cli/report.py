"""`distca report`: one file that shows a run, a prediction of it and its plan, and opens without anything installed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from distca.cli.batches import BatchesAsked
from distca.cli.logs import RunLog, read_log, read_traces
from distca.cli.options import COUNT, Column, Format, Tokenizer, count
from distca.cli.outputs import page_writer
from distca.cli.plan import PlanPool, plan_asked
from distca.models import model_named
from distca.report.figures import ReportData, Timeline
from distca.report.verdict import verdict
from distca.validation import UserError
from distca.workload.length_files import Reading

MAX_TIMELINES = 2


def report_command(
    paths: Annotated[list[Path] | None, typer.Argument(metavar="PATH...", help=(
        "A folder that `distca train` logged into, files of it (step_N.json, steps.jsonl, summary.json), or what "
        "`distca simulate --json` printed."))] = None,
    predicted: Annotated[Path | None, typer.Option(
        help="A simulated step_N.json, to be shown beside the measured one.")] = None,
    step: Annotated[int | None, typer.Option(help="Which traced step of a folder; the last unless given.")] = None,
    plan: Annotated[str | None, typer.Option(
        metavar="SOURCE", help="Also plan this batch and show it; what `distca plan` takes as SOURCE.")] = None,
    model: Annotated[str, typer.Option(help="Named model of --plan.")] = "llama3-8b",
    tolerance: Annotated[float, typer.Option(help="Tolerance of --plan.")] = 0.05,
    placement: Annotated[str, typer.Option(help="Placement of --plan: given or balanced.")] = "given",
    ranks: Annotated[int | None, typer.Option(parser=count, metavar=COUNT, help="Ranks of --plan.")] = None,
    tokens_per_rank: Annotated[int | None, typer.Option(
        parser=count, metavar=COUNT, help="Tokens per rank of --plan.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of --plan's sampler, or of a file's order.")] = None,
    column: Column = None,
    format_: Format = None,
    tokenizer: Tokenizer = None,
    title: Annotated[str | None, typer.Option(help="Title of the page.")] = None,
    out: Annotated[Path, typer.Option(help="Where the page goes.")] = Path("report.html"),
) -> None:
    """Write a report that opens in any browser, offline."""
    if not (paths or predicted or plan):
        raise UserError("nothing to report; give the log folder of a run, a step_N.json, or --plan SOURCE")
    write = page_writer("out", out)
    data = ReportData("distca report")
    if plan:
        asked = BatchesAsked(plan, ranks, tokens_per_rank, seed, reading=Reading(format_, column, tokenizer))
        data = plan_asked(asked, PlanPool(model_named(model), 1, tolerance, 0, None), placement).page()
    logs = [(path, read_log(path)) for path in paths or ()]
    comparison = next((log.comparison for _, log in logs if log.comparison), ())
    data = replace(
        data,
        title=title or (f"Report of {', '.join(map(str, paths))}" if paths else data.title),
        facts=(*(fact for _, log in logs for fact in log.facts), *data.facts),
        timelines=_timelines(logs, predicted, step),
        comparison=comparison,
        verdict=verdict(comparison) or data.verdict,
        run=next((log.run for _, log in logs if log.run is not None), None))
    write(data)
    print(f"Written to {out}.")


def _timelines(logs: list[tuple[Path, RunLog]], predicted: Path | None, step: int | None) -> tuple[Timeline, ...]:
    traced = [(path, log.traces) for path, log in logs if log.traces]
    if step is not None and not any(step in traces for _, traces in traced):
        known = sorted({number for _, traces in traced for number in traces})
        raise UserError(f"step is {step} but the traced steps are: {', '.join(map(str, known)) or 'none'}; name one "
                        "of them, or trace it with --log.trace_step")
    timelines = []
    for path, traces in traced:
        chosen = max(traces) if step is None else step
        if chosen in traces:
            name = "measured" if len(traced) == 1 else str(path)
            timelines.append(Timeline(f"{name}, step {chosen}", read_traces(traces[chosen])))
    if predicted is not None:
        timelines.append(Timeline("predicted", read_traces(predicted)))
    if len(timelines) > MAX_TIMELINES:
        raise UserError(f"PATH and --predicted hold {len(timelines)} timelines; give at most {MAX_TIMELINES}")
    return tuple(timelines)
