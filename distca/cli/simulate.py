"""`distca simulate`: predict what balancing saves on a cluster that you need not have."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from distca.cli import options
from distca.cli.batches import BATCHES_WHY, COST_HELP, MAX_BATCHES, SOURCE_HELP, read_lengths
from distca.corpus.lengths import Reading
from distca.cost.mixed_pool import find_cost
from distca.cost.network import find_cluster
from distca.cost.work import RECOMPUTE
from distca.models import model_named
from distca.report.figures import ReportData, Timeline, comparison_page, ours_and_best_baseline, strategies_of, verdict
from distca.report.render import print_comparison
from distca.simulate.execute import Step
from distca.simulate.fitting import DEFAULT_CONTEXT, DEFAULT_GPUS, StepAsked, fitting_context, fitting_settings
from distca.simulate.outcomes import Comparison, Outcome
from distca.simulate.setting import parse_memory
from distca.simulate.strategies import NAMES
from distca.simulate.sweep import Question, compare, replay
from distca.spec import CLUSTERS
from distca.trace import write_chrome_trace
from distca.validation import UNITS_HELP, check_whole, write_own
from distca.workload.sequences import Source

MAX_WORKERS = 1024
AUTO_HELP = f"0.05, of which distca chooses {options.AUTO_HELP} for the run."


def simulate_command(
    model: Annotated[str, typer.Option(help="Named model.")] = "llama3-8b",
    gpus: Annotated[int | None, options.number(
        f"GPUs in all; {DEFAULT_GPUS}, or as many more as the model needs. {UNITS_HELP}")] = None,
    context: Annotated[int | None, options.number(
        f"Tokens of a sequence; {DEFAULT_CONTEXT}, or what the longest document of a file reaches.")] = None,
    tp: Annotated[int | None, options.number(
        "Tensor-parallel size; a pool rank is this many GPUs. By default a node's, as far as it divides.")] = None,
    pp: Annotated[str | None, typer.Option(
        help="Pipeline stages; 1, or as many as it takes to fit. With several, as in 2,4, each strategy keeps its best."
    )] = None,
    ep: Annotated[int | None, options.number(
        "GPUs of a stage over which a layer's experts are divided; 1, or as many as it takes to fit.")] = None,
    data: Annotated[str, typer.Option(metavar="SOURCE", help=SOURCE_HELP)] = "prolong",
    column: options.Column = None,
    format_: options.Format = None,
    tokenizer: options.Tokenizer = None,
    split: options.Split = None,
    batches: Annotated[int, typer.Option(help="Sampled batches.")] = 30,
    strategies: Annotated[str, typer.Option(help=f"All, or some of: {', '.join(NAMES)}.")] = "all",
    tolerance: Annotated[Any, options.tolerance_option(AUTO_HELP)] = "auto",
    cluster: Annotated[str, typer.Option(help=f"One of {', '.join(CLUSTERS)}, or a TOML file.")] = "dgx-h200",
    cost: Annotated[str, typer.Option(help=COST_HELP)] = "h200",
    sequences: Annotated[int | None, options.number(
        "Sequences per step; as many as give each data rank 64K tokens of a micro-batch.")] = None,
    micro_batches: Annotated[str | None, typer.Option(
        help="1, or two per pipeline stage; with several, as in 8,16, each strategy keeps its best.")] = None,
    recompute: Annotated[str, typer.Option(
        help=f"What backward recomputes: {', '.join(RECOMPUTE)} (to the host), or auto: as little as fits.")] = "auto",
    memory: Annotated[str | None, typer.Option(
        help="The most that our orders may keep: live micro-batches, as in 4, or bytes of a GPU, as in 60GB.")] = None,
    seed: Annotated[int, typer.Option(help="Of the sampled batches.")] = 0,
    workers: Annotated[int | None, typer.Option(help="Processes; as many as there are cores.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the table.")] = False,
    trace: Annotated[Path | None, typer.Option(help="Also write the first batch's timeline, for "
        "`distca report --predicted`, and beside it trace_FILE for Perfetto.")] = None,
    html: Annotated[Path | None, typer.Option(help="Also write a report page, which opens offline.")] = None,
) -> None:
    """Predict how much faster a step gets, over the best baseline on the same documents, and its memory."""
    check_whole("seed", seed, least=0)
    check_whole("batches", batches, most=MAX_BATCHES, why=BATCHES_WHY)
    check_whole("workers", 1 if workers is None else workers, most=MAX_WORKERS, why="one process for each core")
    outputs = Outputs.to(trace, html)
    names = NAMES if strategies == "all" else tuple(name.strip() for name in strategies.split(","))
    with options.progress(batches + 2) as update:
        update("reading documents")
        source = read_lengths(data, Reading(format_, column, tokenizer, split),
                              lambda read: update(f"{read:,} documents", 0))
        asked = StepAsked(
            gpus, tp, _several("pp", pp), ep, _context(source) if context is None else context, sequences,
            _several("micro_batches", micro_batches), recompute, parse_memory(memory))
        table = find_cost(cost)
        grid = fitting_settings(model_named(model), find_cluster(cluster), table, asked)
        question = Question(grid, names, source, table, tolerance, batches, seed)
        if note := question.costs(grid[0]).attention.note:
            print(f"distca: {note}", file=sys.stderr)
        update("trying all choices")
        comparison = compare(question, workers=workers or os.cpu_count() or 1, update=update)
        outputs.write(question, comparison, update)
    show(comparison, outputs, as_json)


def show(comparison: Comparison, outputs: Outputs, as_json: bool) -> None:
    """Print the answer, the files that were written, and what to do next."""
    if as_json:
        print(json.dumps({**comparison.as_json(), "verdict": verdict(strategies_of(comparison))}))
        return
    print_comparison(comparison, Console())
    print()
    if outputs.trace is not None and comparison.outcomes:
        print(f"Timeline of {comparison.outcomes[-1].name} in {outputs.trace}, for Perfetto in "
              f"trace_{outputs.trace.name}.")
    if outputs.html is not None:
        print(f"Written to {outputs.html}.")
    drawn = "" if outputs.html else "--html gain.html draws both timelines; "
    print(f"Next: {drawn}distca train trains so, and distca.integrations balances attention in your own trainer.")


def _context(source: Source) -> int:
    return DEFAULT_CONTEXT if source.lengths is None else fitting_context(int(source.lengths.max()))


def _several(field: str, text: str | None) -> tuple[int, ...] | None:
    return None if text is None else tuple(options.counts(field, text))


@dataclass(frozen=True, slots=True)
class Outputs:
    """Files to write besides the answer; None for those that nobody asked for."""

    trace: Path | None
    html: Path | None
    write_page: Callable[[ReportData], None]

    @classmethod
    def to(cls, trace: Path | None, html: Path | None) -> Outputs:
        """Check the paths before the long computation."""
        if trace is not None:
            options.check_output("trace", trace)
        return cls(trace, html, options.page_writer("html", html))

    def write(self, question: Question, comparison: Comparison, update: options.OnProgress) -> None:
        """Replay the first batch under the last strategy (ours, if it ran) and, for the page, the best baseline."""
        if self.trace is None and self.html is None:
            return
        update("drawing timelines", 0)
        page = comparison_page(comparison)
        if comparison.outcomes:
            shown = comparison.outcomes[-1]
            step = replay(question, shown)
            if self.trace is not None:
                write_own(self.trace, json.dumps([one.to_json() for one in step.traces]))
                write_chrome_trace(step.traces, self.trace.with_name(f"trace_{self.trace.name}"))
            timelines = [_timeline(shown, step)]
            _, best = ours_and_best_baseline(page.comparison)
            if self.html is not None and best is not None and best.name != shown.name:
                baseline = comparison.outcome(best.name)
                timelines.insert(0, _timeline(baseline, replay(question, baseline)))
            page = replace(page, timelines=tuple(timelines), memory=step.memory,
                           memory_capacity_bytes=comparison.setting.cluster.memory_bytes)
        self.write_page(page)


def _timeline(outcome: Outcome, step: Step) -> Timeline:
    return Timeline(f"{outcome.name}, simulated, first batch", step.traces)
