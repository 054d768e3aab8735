"""`distca report`: write one HTML file that shows a run, a prediction of it and its plan, and opens in any browser.

Its inputs are files of other commands: a run's traces, log and summary, a comparison of strategies. They may come from
another machine, so everything in them is checked before it is drawn.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numpy as np
import typer

from distca.cli.batches import BatchesAsked
from distca.cli.options import Column, Format, Tokenizer, number, page_writer
from distca.cli.plan import PlanPool, plan_asked
from distca.corpus.lengths import Reading
from distca.models import model_named
from distca.report.figures import (
    ReportData,
    RunFigures,
    StrategyFigures,
    Timeline,
    byte_text,
    strategies_from_json,
    verdict,
)
from distca.trace import MAX_COUNT, StepTrace
from distca.validation import UserError, check_number, check_whole, parse_json, read_json, read_text
from distca.workload.packing import PLACEMENTS

MAX_TIMELINES = 2
MAX_TRACE_BYTES = 2**28  # about two million spans
MAX_LOG_BYTES = 2**26    # about a hundred thousand steps
MAX_SPEEDS = 8           # servers whose speeds are drawn
TRACE_NAME = re.compile(r"step_(\d{1,15})\.json")
SERIES = {  # fields of steps.jsonl that are drawn, with labels that include the unit
    "loss": "loss, nats",
    "tokens_per_second": "tokens/s",
    "seconds": "step, seconds",
    "work_after": "busiest rank's attention work, × mean",
    "work_before": "the same without a plan, × mean",
    "bytes_per_layer": "bytes a layer, forward",
    "mfu": "model FLOPs utilization",
    "attention_seconds": "attention, seconds",
    "attention_seconds_max": "attention of the slowest rank, seconds",
    "linear_seconds": "the rest of the model, seconds",
    "exposed_seconds": "waiting for exchanges, seconds",
    "host_seconds": "waiting for the batch, seconds",
    "memory_bytes": "memory, bytes",
    "tolerance": "tolerance chosen",
    "grad_norm": "gradient norm",
    "lr": "learning rate",
}
T = TypeVar("T")


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
    logs = [(path, read_log(path)) for path in paths or ()]
    comparison = next((log.comparison for _, log in logs if log.comparison), ())
    write(replace(
        data, title=title or (f"Report of {', '.join(map(str, paths))}" if paths else data.title),
        facts=(*(fact for _, log in logs for fact in log.facts), *data.facts), comparison=comparison,
        timelines=_timelines(logs, predicted, step), verdict=verdict(comparison) or data.verdict,
        run=next((log.run for _, log in logs if log.run is not None), None)))
    print(f"Written to {out}. Open it in a browser.")


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


@dataclass(frozen=True, slots=True, eq=False)
class RunLog:
    """Contents of one PATH."""

    traces: dict[int, Path] = field(default_factory=dict)  # by step
    run: RunFigures | None = None
    facts: tuple[tuple[str, str], ...] = ()
    comparison: tuple[StrategyFigures, ...] = ()


def read_log(path: Path) -> RunLog:
    """Read a folder that `distca train` logged into, or one of its files."""
    if not path.exists():
        raise UserError(f"{path}: no such file or folder; give the log.folder of a run, or a file of it")
    if path.is_dir():
        return _read_folder(path)
    if path.suffix == ".jsonl":
        return RunLog(run=_read_steps(path))
    content = read_json(path, MAX_TRACE_BYTES)
    if isinstance(content, list):
        return RunLog(traces={_named(path, _traces, content)[0].step: path})
    if isinstance(content, dict) and "strategies" in content:
        return RunLog(comparison=_named(path, strategies_from_json, content))
    if isinstance(content, dict) and "tokens_per_second" in content:
        return RunLog(facts=_named(path, _summary_facts, content))
    if isinstance(content, dict) and "traceEvents" in content:
        raise UserError(f"{path}: a Chrome trace, which a report cannot read; give the step_N.json beside it")
    raise UserError(f"{path}: neither a trace, a log nor a summary of a run, nor a comparison; give step_N.json, "
                    "steps.jsonl, summary.json, their folder, or what distca simulate --json printed")


def _named(path: Path, parse: Callable[[Any], T], content: Any) -> T:
    """Parse a file's content; errors name the file."""
    try:
        return parse(content)
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None


def _read_folder(folder: Path) -> RunLog:
    named = {path: TRACE_NAME.fullmatch(path.name) for path in folder.iterdir() if path.is_file()}
    traces = {int(match[1]): path for path, match in named.items() if match}
    steps, summary = folder / "steps.jsonl", folder / "summary.json"
    if not (traces or steps in named or summary in named):
        raise UserError(f"{folder}: holds no step_N.json, steps.jsonl or summary.json; give the log.folder of a run")
    return RunLog(traces, _read_steps(steps) if steps in named else None,
                  _named(summary, _summary_facts, read_json(summary)) if summary in named else ())


def read_traces(path: Path) -> tuple[StepTrace, ...]:
    """Read one step's traces, one per rank."""
    return _named(path, _traces, read_json(path, MAX_TRACE_BYTES))


def _traces(content: Any) -> tuple[StepTrace, ...]:
    if not isinstance(content, list) or not content:
        raise UserError("not a list of step traces, one per rank; trace a step with --log.trace_step N")
    traces = tuple(StepTrace.from_json(one) for one in content)
    if twice := [rank for rank, count in Counter(trace.rank for trace in traces).items() if count > 1]:
        raise UserError(f"rank {twice[0]} is there twice; write the trace again")
    return traces


def _read_steps(path: Path) -> RunFigures | None:
    records: list[dict[str, Any]] = []
    for at, line in enumerate(read_text(path, MAX_LOG_BYTES).splitlines(), 1):
        try:
            record = parse_json(line)
            check_whole("step", record["step"], least=0, most=MAX_COUNT)
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{path}: line {at} is not a step's record; remove the line") from None
        records.append(record)
    if not records:
        return None
    curves = [(label, np.array([_figure(record[name], f"{path}: {name}") for record in records]))
              for name, label in SERIES.items() if all(name in record for record in records)]
    return RunFigures(np.array([record["step"] for record in records], dtype=np.int64),
                      (*curves, *_server_speeds(path, records)))


def _server_speeds(path: Path, records: list[dict[str, Any]]) -> list[tuple[str, np.ndarray]]:
    """Curves of the servers that differ most from the median, if every step has speeds of equally many servers."""
    lists = [record.get("server_speed") for record in records]
    if not all(isinstance(speeds, list) and len(speeds) == len(lists[0] or []) for speeds in lists):
        return []
    by_server = np.array([[_figure(one, f"{path}: server_speed") for one in speeds or []] for speeds in lists]).T
    apart = np.argsort(-np.abs(by_server - 1.0).max(axis=1, initial=0.0), kind="stable")[:MAX_SPEEDS]
    return [(f"speed of server {server}, × the median", by_server[server]) for server in sorted(apart.tolist())]


def _summary_facts(content: Any) -> tuple[tuple[str, str], ...]:
    def figure(name: str) -> float:
        if not isinstance(content, dict) or name not in content:
            raise UserError(f"has no {name}; give a summary.json that a run wrote")
        return _figure(content[name], name)

    return (
        ("steps", f"{figure('steps'):,.0f}"), ("tokens/s", f"{figure('tokens_per_second'):,.0f}"),
        ("busiest rank's work, × mean", f"{figure('work_before'):.2f} → {figure('work_after'):.2f}"),
        ("waiting for exchanges", f"{figure('exposed_share'):.1%} of the steps"),
        ("memory", byte_text(figure("memory_bytes"))), ("last loss", f"{figure('final_loss'):.4f}"))


def _figure(value: Any, field: str) -> float:
    """Check a number; null and non-finite values, as in steps of a run that diverged, become NaN."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return math.nan
    return check_number(field, value)
