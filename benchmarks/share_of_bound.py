"""How near does distca come to the step that no strategy can beat? The paper's batches with TP below 8 as well.

Each row is one setting: a batch of fig9 (no pipeline) or fig10 (stages, at least two where the figure has them), with
heads divided by TP 1, 2, 4 or 8, so that 8, 4, 2 or 1 ranks of a pool share a node. `share` is the bound's time over
the simulated step's. What is lost is told apart:

- `with_free_links`: the same plans where exchanges take no time; what is missing to `share` is exposed.
- `ceiling_of_tasks`: if all ranks were busy all the time with what their tasks take; what is missing to 1 are shapes
  that kernels run below their best rate, cuts, launches and tails, what is missing to `with_free_links` is imbalance.
- `ceiling_of_pipeline`: the chosen order's ticks with free links and attention that divides evenly: the pipeline fills
  and drains, in ticks in which some stages have no linear layers to run and attention does not fill them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import perf_counter

import numpy as np
from outputs import RESULTS, host_facts, wide_console, write_json
from paper.cases import CLUSTER, DATA, KIB, Case, cases
from rich.console import Console
from rich.table import Table

from distca.cost.attention_time import shipped_table
from distca.models import model_named
from distca.simulate.bounds import bound, least_attention, ticks_seconds
from distca.simulate.setting import Setting, settings
from distca.simulate.strategies import PoolChoice
from distca.simulate.sweep import Question, compare
from distca.spec import cluster_named
from distca.validation import UserError
from distca.workload.sequences import Source

TABLE = "h200"


@dataclass(frozen=True, slots=True)
class Result:
    """One setting over a few batches."""

    figure: str
    model: str
    nodes: int
    context: int
    sequences: int
    data: str
    tp: int
    pp: int
    micro_batches: int
    batches: int
    step_seconds: float
    attention_share_of_bound: float
    share: float
    share_worst_batch: float
    with_free_links: float
    ceiling_of_tasks: float
    ceiling_of_pipeline: float
    choice: str
    seconds_to_simulate: float


def asked(options: argparse.Namespace) -> Iterator[tuple[Case, tuple[Setting, ...]]]:
    """Settings of the figures, each with its fewest stages and with all numbers of micro-batches that fill these."""
    for figure in options.figures:
        for case in cases(figure, quick=False):
            if (case.model not in options.models or case.nodes not in options.nodes
                    or case.context // KIB not in options.contexts or case.data not in options.data):
                continue
            pp = case.pipelines[0]
            counts = [count for count in (1, 2, 4, 8, 16, 32) if case.sequences % count == 0 and count >= pp]
            for tp in options.tp:
                try:
                    yield case, settings(
                        model_named(case.model), cluster_named(CLUSTER), gpus=8 * case.nodes, context=case.context,
                        tp=tp, pp=(pp,), sequences=case.sequences,
                        micro_batches=(1,) if figure == "fig9" else counts)
                except UserError:
                    continue


def measure(case: Case, grid: tuple[Setting, ...], num_batches: int, tolerance: str) -> Result:
    begin = perf_counter()
    question = Question(grid, ("distca", "bound"), Source(case.data), shipped_table(TABLE), tolerance, num_batches)
    found = compare(question)
    ours, floor = found.outcome("distca"), found.outcome("bound")
    where = ours.setting
    seconds, least = ours.column("seconds"), floor.column("seconds")
    costs = question.costs(where)
    lengths = [question.batch(where, number).lengths() for number in range(num_batches)]
    attention = [float(bound(where, costs, one).attention_seconds.mean()) for one in lengths]
    assert isinstance(ours.choice, PoolChoice)
    ticks, layers = ours.choice.ticks(where)
    filled = [ticks_seconds(where, costs, ticks, layers, least_attention(costs, question.batch(where, number)
              .micro_batches(where))) for number in range(num_batches)]
    return Result(
        case.figure, case.model, case.nodes, case.context, case.sequences, case.data, where.tp, where.pp,
        where.num_micro_batches, num_batches, float(seconds.mean()), float(np.sum(attention) / least.sum()),
        float(least.sum() / seconds.sum()), float((least / seconds).min()),
        float(least.sum() / ours.column("free_seconds").sum()),
        float(least.sum() / (seconds * ours.column("busy_share")).sum()), float(least.sum() / np.sum(filled)),
        ours.describe(), perf_counter() - begin)


def result_table(results: list[Result]) -> Table:
    table = Table(title="distca of the bound", title_justify="left")
    for title in ("figure", "model", "nodes", "context", "data", "TP", "PP", "share", "worst batch", "free links",
                  "ceiling of tasks", "of pipeline", "choice"):
        table.add_column(title, justify="left" if title in ("figure", "model", "data", "choice") else "right",
                         no_wrap=True)
    for row in results:
        table.add_row(
            row.figure, row.model, str(row.nodes), f"{row.context // KIB}K × {row.sequences}", row.data, str(row.tp),
            str(row.pp), *(f"{value:.3f}" for value in (
                row.share, row.share_worst_batch, row.with_free_links, row.ceiling_of_tasks, row.ceiling_of_pipeline)),
            row.choice)
    return table


def summarize(results: list[Result]) -> dict[str, dict[str, float]]:
    """By figure and TP."""
    found: dict[str, dict[str, float]] = {}
    for figure, tp in dict.fromkeys((row.figure, row.tp) for row in results):
        share, ceiling = (np.array([getattr(row, name) for row in results if (row.figure, row.tp) == (figure, tp)])
                          for name in ("share", "ceiling_of_tasks"))
        found[f"{figure}, TP {tp}"] = {
            "settings": len(share), "share_min": float(share.min()), "share_median": float(np.median(share)),
            "share_max": float(share.max()), "ceiling_of_tasks_min": float(ceiling.min()),
            "part_with_97": float((share >= 0.97).mean()), "part_with_95": float((share >= 0.95).mean())}
    return found


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Simulate the paper's batches with every TP against the bound.")
    parser.add_argument("--figures", nargs="+", choices=("fig9", "fig10"), default=["fig9", "fig10"])
    parser.add_argument("--models", nargs="+", default=["llama3-8b", "llama-34b"])
    parser.add_argument("--nodes", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--contexts", type=int, nargs="+", default=[128, 256, 384, 512], help="In thousands of tokens.")
    parser.add_argument("--data", nargs="+", choices=DATA, default=list(DATA))
    parser.add_argument("--tp", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--batches", type=int, default=3)
    parser.add_argument("--tolerance", default="auto", help="A number, or auto: chosen on the first batches.")
    parser.add_argument("--output", type=Path, default=RESULTS / "share_of_bound.json")
    return parser.parse_args()


def run(options: argparse.Namespace, console: Console) -> None:
    """Rows are written as they come, and those of another run with the same settings are kept."""
    host = host_facts()
    kept = json.loads(options.output.read_text(encoding="utf-8"))["rows"] if options.output.exists() else []
    results = {_key(row): row for row in (Result(**row) for row in kept)}
    for case, grid in asked(options):
        try:
            row = measure(case, grid, options.batches, options.tolerance)
        except UserError as error:                               # it does not fit the memory
            console.print(f"{case.figure} {case.model} {case.nodes} nodes, TP {grid[0].tp}: {error}")
            continue
        results[_key(row)] = row
        console.print(f"{row.figure} {row.model} {row.nodes} × {row.context // KIB}K {row.data} TP {row.tp} PP {row.pp}"
                      f": {row.share:.3f} of the bound, {row.seconds_to_simulate:.0f} s")
        rows = sorted(results.values(), key=_key)
        write_json(options.output, {
            "host": host, "settings": {"cluster": CLUSTER, "table": TABLE, "tolerance": options.tolerance},
            "summary": summarize(rows), "rows": rows})
    console.print(result_table(sorted(results.values(), key=_key)))
    console.print(summarize(list(results.values())))


def _key(row: Result) -> tuple[str, ...]:
    facts = asdict(replace(row, batches=0))
    return tuple(str(facts[name]).zfill(12) for name in ("figure", "model", "nodes", "context", "data", "tp", "pp"))


if __name__ == "__main__":
    run(arguments(), wide_console(170))
