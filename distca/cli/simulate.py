"""`distca simulate`: what would balancing save on a cluster that you have not rented yet?"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from distca.cli.batches import COST_HELP, MAX_BATCHES, SOURCE_HELP, STANDARD_LIBRARY, are_typed, read_named
from distca.cli.options import (
    AUTO_HELP,
    COUNT,
    TOLERANCE,
    TOLERANCE_HELP,
    Column,
    Format,
    Tokenizer,
    check_output,
    count,
    counts,
    page_writer,
    progress,
    tolerance_option,
)
from distca.corpus.files import STDIN
from distca.corpus.lengths import Heard, Reading
from distca.cost.mixed_pool import find_cost
from distca.cost.network import find_cluster
from distca.models import model_named
from distca.report.figures import ReportData, Timeline, comparison_page, strategies_of
from distca.report.page import ours_and_best_baseline, verdict
from distca.simulate.execute import Step
from distca.simulate.outcomes import Comparison, Outcome
from distca.simulate.setting import settings
from distca.simulate.strategies import NAMES, STRATEGIES
from distca.simulate.sweep import Question, compare, replay
from distca.spec import CLUSTERS
from distca.trace import write_chrome_trace
from distca.validation import UNITS_HELP, check_whole, plain, write_own
from distca.workload.documents import SAMPLERS, Workload, standard_library_lengths
from distca.workload.sequences import Source

DEFAULT_CONTEXT = 131_072
MAX_WORKERS = 1024


def simulate_command(
    model: Annotated[str, typer.Option(help="Named model.")] = "llama3-8b",
    gpus: Annotated[int, typer.Option(parser=count, metavar=COUNT, help=f"GPUs in all. {UNITS_HELP}")] = 64,
    context: Annotated[int | None, typer.Option(
        parser=count, metavar=COUNT,
        help=f"Tokens of a sequence; {DEFAULT_CONTEXT}, or what the longest document of a file reaches.")] = None,
    tp: Annotated[int, typer.Option(
        parser=count, metavar=COUNT, help="Tensor-parallel size; a pool rank is this many GPUs.")] = 8,
    pp: Annotated[str, typer.Option(
        help="Pipeline stages; with several, as in 2,4, each strategy keeps its best.")] = "1",
    data: Annotated[str, typer.Option(metavar="SOURCE", help=SOURCE_HELP)] = "prolong",
    column: Column = None,
    format_: Format = None,
    tokenizer: Tokenizer = None,
    batches: Annotated[int, typer.Option(help="Sampled batches.")] = 30,
    strategies: Annotated[str, typer.Option(help=f"All, or some of: {', '.join(NAMES)}.")] = "all",
    tolerance: Annotated[Any, typer.Option(
        parser=tolerance_option, metavar=TOLERANCE,
        help=f"{TOLERANCE_HELP}; auto: 0.05, of which distca chooses {AUTO_HELP} for the run.")] = "auto",
    cluster: Annotated[str, typer.Option(help=f"One of {', '.join(CLUSTERS)}, or a TOML file.")] = "dgx-h200",
    cost: Annotated[str, typer.Option(help=COST_HELP)] = "h200",
    sequences: Annotated[int | None, typer.Option(
        parser=count, metavar=COUNT,
        help="Sequences per step; as many as give each data rank 64K tokens of a micro-batch.")] = None,
    micro_batches: Annotated[str | None, typer.Option(
        help="1, or two per pipeline stage; with several, as in 8,16, each strategy keeps its best.")] = None,
    seed: Annotated[int, typer.Option(help="Of the sampled batches.")] = 0,
    workers: Annotated[int | None, typer.Option(help="Processes; as many as there are cores.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the table.")] = False,
    trace: Annotated[Path | None, typer.Option(
        help="Also write the first batch's timeline, for `distca report --predicted`, and beside it trace_FILE for "
             "Perfetto.")] = None,
    html: Annotated[Path | None, typer.Option(help="Also write a report page, which opens offline.")] = None,
) -> None:
    """Predict a training step under every strategy, on the same documents."""
    check_whole("seed", seed, least=0)
    check_whole("batches", batches, most=MAX_BATCHES, why="more of them change no mean")
    check_whole("workers", 1 if workers is None else workers, most=MAX_WORKERS, why="one process for each core")
    if trace is not None:
        check_output("trace", trace)
    write_page = page_writer("html", html) if html else None
    with progress(batches + 2) as step:
        step("reading documents")
        source = read_lengths(data, Reading(format_, column, tokenizer),
                              lambda number: step(f"{number:,} documents", 0))
        tokens = context if context is not None else default_context(source)
        shape, machines = model_named(model), find_cluster(cluster)
        grid = settings(shape, machines, gpus=gpus, context=tokens, tp=tp, pp=counts("pp", pp), sequences=sequences,
                        micro_batches=None if micro_batches is None else counts("micro_batches", micro_batches))
        names = NAMES if strategies == "all" else tuple(name.strip() for name in strategies.split(","))
        question = Question(grid, names, source, find_cost(cost), tolerance, batches, seed)
        if note := question.costs(grid[0]).attention.note:
            print(f"distca: {note}", file=sys.stderr)
        step("simulating")
        comparison = compare(question, workers=workers or os.cpu_count() or 1, step=step)
        shown = _traced(comparison)
        if trace or write_page:
            step("drawing timelines", 0)
        step_shown = replay(question, shown) if (trace or write_page) and shown is not None else None
        if trace is not None and step_shown is not None and step_shown.traces is not None:
            write_own(trace, json.dumps([one.to_json() for one in step_shown.traces]))
            write_chrome_trace(step_shown.traces, trace.with_name(f"trace_{trace.name}"))
        if write_page:
            write_page(_page(question, comparison, shown, step_shown))
    if as_json:
        print(json.dumps({**comparison.as_json(), "verdict": verdict(strategies_of(comparison))}))
    else:
        print_comparison(comparison, Console())
        if trace is not None and shown is not None:
            print(f"Timeline of {shown.name} in {trace}, for Perfetto in trace_{trace.name}.")
        if html is not None:
            print(f"Written to {html}.")


def read_lengths(data: str, reading: Reading, heard: Heard) -> Source:
    """Bare names of samplers are samplers; anything else that exists is a file."""
    if data in SAMPLERS:
        return Source(data)
    if data == STANDARD_LIBRARY:
        return Source(STANDARD_LIBRARY, standard_library_lengths())
    content = read_named(data, reading, heard, "data")
    name = "lengths as typed" if are_typed(data) else "stdin" if data == STDIN else plain(data)
    return Source(name, np.concatenate(content.sequences) if isinstance(content, Workload) else content)


def default_context(source: Source) -> int:
    """What the longest document reaches, in whole 128 tokens, and at most 128K."""
    if source.lengths is None:
        return DEFAULT_CONTEXT
    longest = int(source.lengths.max())
    return min(DEFAULT_CONTEXT, longest // 128 * 128 or longest)


def _traced(comparison: Comparison) -> Outcome | None:
    """Ours where it ran, else the last strategy."""
    return comparison.outcomes[-1] if comparison.outcomes else None


def _page(question: Question, comparison: Comparison, outcome: Outcome | None, step: Step | None) -> ReportData:
    """With the first batch's timelines, the best baseline's above ours, and ours memory, where strategies ran."""
    strategies = strategies_of(comparison)
    data = replace(comparison_page(comparison), verdict=verdict(strategies), stacked=True)
    if outcome is None or step is None:
        return data
    _, best = ours_and_best_baseline(strategies)
    above = () if best is None or best.name == outcome.name else (comparison.outcome(best.name),)
    timelines = tuple(_timeline(other, replay(question, other)) for other in above)
    return replace(data, timelines=(*timelines, _timeline(outcome, step)), memory=step.memory,
                   memory_capacity_bytes=comparison.setting.cluster.memory_bytes)


def _timeline(outcome: Outcome, step: Step) -> Timeline:
    return Timeline(f"{outcome.name}, simulated, first batch", tuple(step.traces or ()))


def print_comparison(comparison: Comparison, console: Console) -> None:
    """The table of strategies, and what each one chose."""
    first = comparison.setting
    stages = ", ".join(sorted({str(outcome.setting.pp) for outcome in comparison.outcomes}))
    console.print(Text.assemble(
        (f"{first.model.name} on {first.gpus:,} GPUs of {first.cluster.name}", "bold"),
        f"\n{comparison.source}, context {first.context:,}, {first.num_tokens:,} tokens a step\ntp {first.tp}, pp "
        f"{stages}, {comparison.num_batches} batches, tolerance {comparison.tolerance}"))
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for title in ("", "tokens/s", "step", "idle", "exposed", "memory", "work"):
        table.add_column(title, justify="right" if title else "left")
    for outcome in comparison.rows:
        table.add_row(outcome.name, f"{outcome.tokens_per_second:,.0f}", f"{outcome.step_seconds:.3g} s",
                      f"{outcome.idle_share:.1%}", f"{outcome.exposed_communication_share:.1%}",
                      f"{outcome.peak_memory_gb:.0f} GB", f"{outcome.work_max_over_mean:.2f}")
    console.print(table)
    console.print(_ratios(comparison))
    for outcome in comparison.outcomes:
        console.print(Text(f"{outcome.name}: {outcome.describe()}", style="dim"))
    if comparison.too_large:
        console.print(Text(f"Too large for the memory: {', '.join(comparison.too_large)}.", style="bold"))
    console.print()
    console.print(Text(verdict(strategies_of(comparison)), style="bold"))


def _ratios(comparison: Comparison) -> Table:
    """How much faster the row is than the column, over all batches and in the worst and best of them."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, title="times as fast as (range over batches)", title_justify="left")
    table.add_column("")
    others = [outcome for outcome in comparison.outcomes if STRATEGIES[outcome.name].is_baseline]
    rows = [outcome for outcome in comparison.rows if outcome not in others] or others
    for other in others:
        table.add_column(other.name, justify="right")
    for outcome in rows:
        cells = []
        for other in others:
            ratio, low, high = outcome.speedup_over(other)
            cells.append(f"{ratio:.2f} ({low:.2f}-{high:.2f})")
        table.add_row(outcome.name, *cells)
    return table
