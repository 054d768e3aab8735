"""`distca report`: write one HTML file that shows a run, a prediction of it and its plan, and opens in any browser.

Its inputs are files of other commands: a run's traces, log and summary, a comparison of strategies. They may come from
another machine, so everything in them is checked before it is drawn.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from distca.cli.batches import BatchesAsked
from distca.cli.options import Column, Format, Tokenizer, number, page_writer
from distca.cli.plan import PlanPool, plan_asked
from distca.corpus.lengths import Reading
from distca.models import model_named
from distca.report import runs
from distca.report.figures import ReportData, Timeline, strategies_from_json, verdict
from distca.validation import UserError, read_json
from distca.workload.packing import PLACEMENTS

MAX_TIMELINES = 2


def report_command(
    paths: Annotated[list[Path] | None, typer.Argument(metavar="PATH...", help=(
        "A folder that `distca train` logged into, files of it (step_N.json, steps.jsonl, summary.json), or what "
        "`distca simulate --json` printed."))] = None,
    compare: Annotated[Path | None, typer.Option(
        metavar="OTHER", help="The log folder of another run, to be shown beside the first.")] = None,
    predicted: Annotated[Path | None, typer.Option(
        help="A simulated step_N.json, to be shown over the measured one.")] = None,
    step: Annotated[int | None, typer.Option(help="Which traced step of a folder; the last unless given.")] = None,
    plan: Annotated[str | None, typer.Option(
        metavar="SOURCE", help="Also plan this batch and show it; what `distca plan` takes as SOURCE.")] = None,
    model: Annotated[str, typer.Option(help="Named model of --plan.")] = "llama3-8b",
    tolerance: Annotated[float, typer.Option(help="Tolerance of --plan.")] = 0.05,
    placement: Annotated[str, typer.Option(help=f"Placement of --plan: {' or '.join(PLACEMENTS)}.")] = "balanced",
    ranks: Annotated[int | None, number("Ranks of --plan.")] = None,
    tokens_per_rank: Annotated[int | None, number("Tokens per rank of --plan.")] = None,
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
        data = plan_asked(asked, PlanPool(model_named(model), tolerance=tolerance, placement=placement)).page()
    logs = [(path, read_log(path)) for path in [*(paths or ()), *([compare] if compare else [])]]
    comparison = next((run.comparison for _, run in logs if run.comparison), ())
    page = page_of_runs(logs, predicted=predicted, step=step, compared=compare is not None)
    write(replace(
        page, title=title or (f"Report of {', '.join(map(str, paths))}" if paths else data.title),
        facts=(*page.facts, *data.facts), comparison=comparison, plan=data.plan, batches=data.batches,
        detail=data.detail or page.detail, verdict=verdict(comparison) or page.verdict or data.verdict))
    print(f"Written to {out}. Open it in a browser.")


def page_of_runs(
    logs: list[tuple[Path, runs.RunFiles]], *, predicted: Path | None = None, step: int | None = None,
    compared: bool = False,
) -> ReportData:
    """Build the page of what was logged: one run, in one or several PATHs, or with `compared` two runs."""
    found = [replace(run, figures=replace(run.figures, name=str(path)) if compared else run.figures)
             for path, run in logs if run.figures is not None]
    if compared and len(found) != 2:
        raise UserError(f"compare needs two runs with a steps.jsonl but there are {len(found)}; give the log.folder of "
                        "one as PATH and that of the other as --compare")
    found = found[:1 + compared]
    timelines, shown = _timelines(logs, predicted, step)
    ranks = next((runs.read_ranks(path) for _, run in logs for at, path in run.ranks.items() if at == shown), None)
    return ReportData(
        "distca report", facts=() if compared else tuple(fact for _, run in logs for fact in run.facts),
        timelines=timelines, ranks=ranks, detail=None if shown is None else runs.step_detail(shown, ranks),
        waits=None if shown is None else runs.largest_waits(timelines[0].traces, ranks),
        runs=tuple(run.figures for run in found if run.figures is not None),
        sides=runs.side_by_side([dict(run.facts) for run in found]) if compared else (),
        settings=runs.side_by_side([run.settings for run in found]),
        verdict=runs.verdict_on_two(*found) if compared else runs.run_verdict(found[0]) if found else "")


def _timelines(
    logs: list[tuple[Path, runs.RunFiles]], predicted: Path | None, step: int | None
) -> tuple[tuple[Timeline, ...], int | None]:
    """Return the timelines, measured ones first, and the step of the first one."""
    traced = [(path, run.traces) for path, run in logs if run.traces]
    if step is not None and not any(step in traces for _, traces in traced):
        known = sorted({number for _, traces in traced for number in traces})
        raise UserError(f"step is {step} but the traced steps are: {', '.join(map(str, known)) or 'none'}; name one "
                        "of them, or trace it with --log.trace_step")
    timelines, steps = [], []
    for path, traces in traced:
        chosen = max(traces) if step is None else step
        if chosen in traces:
            name = "measured" if len(traced) == 1 else str(path)
            timelines.append(Timeline(f"{name}, step {chosen}", runs.read_traces(traces[chosen])))
            steps.append(chosen)
    if predicted is not None:
        timelines.append(Timeline("predicted", runs.read_traces(predicted)))
    if len(timelines) > MAX_TIMELINES:
        raise UserError(f"PATH and --predicted hold {len(timelines)} timelines; give at most {MAX_TIMELINES}")
    return tuple(timelines), steps[0] if steps else None


def read_log(path: Path) -> runs.RunFiles:
    """Read a folder that `distca train` logged into, or one of its files."""
    if not path.exists():
        raise UserError(f"{path}: no such file or folder; give the log.folder of a run, or a file of it")
    if path.is_dir():
        return runs.read_folder(path)
    if path.suffix == ".jsonl":
        return runs.RunFiles(figures=runs.read_steps(path))
    content = read_json(path, runs.MAX_TRACE_BYTES)
    if isinstance(content, list):
        return runs.RunFiles({runs.named(path, runs.traces_of, content)[0].step: path})
    if isinstance(content, dict) and "strategies" in content:
        return runs.RunFiles(comparison=runs.named(path, strategies_from_json, content))
    if isinstance(content, dict) and "tokens_per_second" in content:
        runs.named(path, runs.summary_facts, content)
        return runs.RunFiles(summary=content)
    if isinstance(content, dict) and "traceEvents" in content:
        raise UserError(f"{path}: a Chrome trace, which a report cannot read; give the step_N.json beside it")
    raise UserError(f"{path}: neither a trace, a log nor a summary of a run, nor a comparison; give step_N.json, "
                    "steps.jsonl, summary.json, their folder, or what distca simulate --json printed")
