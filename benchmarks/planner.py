"""How good and how quick are plans? One row per batch and placement: balance, bytes, planning time.

Batches are sampled, or read from a folder of workload files. Another planner's figures for the same files can be given
with --reference; every row then also holds the ratio of ours to theirs. Planning runs on one thread; its time is the
median of a few runs of placement and balancing together, after a warm-up, without proof and byte counting.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np
from outputs import RESULTS, host_facts, wide_console, write_json
from rich.console import Console
from rich.table import Table

import distca
from distca.corpus.lengths import read_source
from distca.models import model_named
from distca.planning.plan import Plan, max_over_mean, server_work
from distca.planning.tasks import TILE, tasks_at_home
from distca.spec import ModelShape
from distca.validation import parse_json, read_text
from distca.workload.documents import Workload, sample_lengths
from distca.workload.layout import Layout
from distca.workload.packing import PLACEMENTS, pack

SAMPLED_RANKS = (8, 32, 64, 128, 256, 512)
SWEPT_RANKS = (1024, 2048, 4096)
TOKENS_PER_RANK = 65_536

# their key -> our field, for ratios where smaller is better
COMPARED = {
    "imbalance": "work_max_over_mean",
    "bytes_total": "bytes_total",
    "bytes_sent_max": "bytes_sent_max",
    "bytes_received_max": "bytes_received_max",
    "plan_seconds": "plan_seconds",
}


@dataclass(frozen=True, slots=True)
class Result:
    """One batch under one placement. Bytes are forward, one layer, bf16, and only what crosses ranks."""

    name: str
    placement: str
    ranks: int
    documents: int
    tasks: int
    moved_tasks: int
    valid: bool
    equal_tokens: bool          # every rank owns the same number of tokens
    work_max_over_mean_before: float
    work_max_over_mean: float
    limit: str | None
    bytes_total: int
    bytes_sent_max: int
    bytes_received_max: int
    bytes_all_gather: int
    smallest_shard: int
    shards_under_tile: int      # ends of documents and slices aside
    plan_seconds: float         # median
    plan_seconds_all: list[float]
    microseconds_per_task: float
    ratios: dict[str, float]    # ours over theirs, empty without a reference


@dataclass(frozen=True, slots=True)
class Case:
    """A batch and how each placement lays it out."""

    name: str
    lengths: np.ndarray
    ranks: int
    tokens_per_rank: int
    layout: Callable[..., Layout]  # (placement=)


def sampled_cases(ranks: tuple[int, ...], tolerance: float) -> Iterator[Case]:
    for count in ranks:
        lengths = sample_lengths("prolong", count * TOKENS_PER_RANK, seed=0)
        yield Case(
            f"prolong_t64k_n{count}", lengths, count, TOKENS_PER_RANK,
            partial(pack, lengths, ranks=count, tokens_per_rank=TOKENS_PER_RANK, tolerance=tolerance))


def folder_cases(folder: Path, tolerance: float) -> Iterator[Case]:
    paths = sorted(folder.glob("*.json"))
    if not paths:
        raise ValueError(f"{folder}: no *.json files; give a folder of workload files")
    for path in paths:
        workload = read_source(path)
        if not isinstance(workload, Workload):
            raise ValueError(f"{path}: a list of lengths; give workload files with ranks and sequences")
        lengths = np.concatenate(workload.sequences)
        yield Case(workload.name, lengths, workload.ranks, workload.tokens_per_rank,
                   partial(pack, lengths, ranks=workload.ranks, tolerance=tolerance))


def measure(case: Case, placement: str, model: ModelShape, tolerance: float, repeats: int,
            reference: dict[str, float] | None) -> Result:
    seconds: list[float] = []
    for _ in range(repeats):
        begin = perf_counter()
        plan = distca.plan(case.layout(placement=placement), model, tolerance)
        seconds.append(perf_counter() - begin)
    summary = plan.summary()
    result = Result(
        name=case.name,
        placement=placement,
        ranks=case.ranks,
        documents=len(case.lengths),
        tasks=summary.num_tasks,
        moved_tasks=summary.num_moved,
        valid=_is_valid(plan),
        equal_tokens=bool((plan.layout.tokens_per_rank() == case.tokens_per_rank).all()),
        work_max_over_mean_before=_work_before(case),
        work_max_over_mean=summary.work_max_over_mean,
        limit=plan.limit,
        bytes_total=summary.bytes_total,
        bytes_sent_max=int(summary.bytes_sent.max()),
        bytes_received_max=int(summary.bytes_received.max()),
        bytes_all_gather=summary.bytes_all_gather,
        smallest_shard=summary.smallest_shard,
        shards_under_tile=_shards_under_tile(plan),
        plan_seconds=median(seconds),
        plan_seconds_all=seconds,
        microseconds_per_task=1e6 * median(seconds) / summary.num_tasks,
        ratios={},
    )
    return result if reference is None else _compared(result, reference)


def _compared(result: Result, theirs: dict[str, float]) -> Result:
    ours = asdict(result)
    ratios = {key: ours[field] / theirs[key] for key, field in COMPARED.items() if theirs.get(key)}
    return Result(**{**ours, "ratios": ratios})


def _is_valid(plan: Plan) -> bool:
    try:
        plan.validate()
    except ValueError as error:
        print(f"{error}", file=sys.stderr)
        return False
    return True


def _work_before(case: Case) -> float:
    """max/mean with documents in order and every query computed at home."""
    in_order = pack(case.lengths, ranks=case.ranks, tokens_per_rank=case.tokens_per_rank)
    return max_over_mean(server_work(tasks_at_home(in_order), case.ranks, None), np.ones(case.ranks))


def _shards_under_tile(plan: Plan) -> int:
    ends = set(zip(plan.layout.document.tolist(), plan.layout.stop.tolist(), strict=True))
    short = np.flatnonzero(plan.tasks.q_len < TILE)
    tasks = zip(plan.tasks.document[short].tolist(), plan.tasks.q_stop[short].tolist(), strict=True)
    return sum(end not in ends for end in tasks)


def summarize(results: list[Result]) -> dict[str, dict[str, object]]:
    """By placement: what holds everywhere, and the spread of each ratio."""
    summary: dict[str, dict[str, object]] = {}
    for placement in dict.fromkeys(result.placement for result in results):
        rows = [result for result in results if result.placement == placement]
        by_key = {key: [row.ratios[key] for row in rows if key in row.ratios] for key in COMPARED}
        summary[placement] = {
            "rows": len(rows),
            "all_valid": all(row.valid for row in rows),
            "all_equal_tokens": all(row.equal_tokens for row in rows),
            "work_max_over_mean_worst": max(row.work_max_over_mean for row in rows),
            "shards_under_tile": sum(row.shards_under_tile for row in rows),
            "plan_seconds_worst": max(row.plan_seconds for row in rows),
            "ratios": {key: {"median": median(values), "max": max(values)} for key, values in by_key.items() if values},
        }
    return summary


def result_table(results: list[Result], placement: str) -> Table:
    table = Table(title=f"{placement} placement", title_justify="left")
    with_ratios = any(result.ratios for result in results)
    titles = ["batch", "ranks", "tasks", "before", "after", "GB", "GB sent", "GB rec.", "<128", "ms", "µs/task"]
    for title in (*titles, *(("× GB", "× sent", "× rec.", "× ms") if with_ratios else ())):
        table.add_column(title, justify="left" if title == "batch" else "right", no_wrap=True)
    for row in results:
        if row.placement != placement:
            continue
        ratios = [f"{row.ratios[key]:.2f}" if key in row.ratios else "" for key in COMPARED if key != "imbalance"]
        table.add_row(
            row.name + ("" if row.valid and row.equal_tokens else " INVALID"), str(row.ranks), f"{row.tasks}",
            f"{row.work_max_over_mean_before:.2f}", f"{row.work_max_over_mean:.3f}", f"{row.bytes_total / 1e9:.2f}",
            f"{row.bytes_sent_max / 1e9:.2f}", f"{row.bytes_received_max / 1e9:.2f}", str(row.shards_under_tile),
            f"{row.plan_seconds * 1e3:.1f}", f"{row.microseconds_per_task:.1f}", *(ratios if with_ratios else ()))
    return table


def summary_table(summary: dict[str, dict[str, object]]) -> Table:
    table = Table(title="ours / theirs: median, largest", title_justify="left")
    table.add_column("placement")
    for key in COMPARED:
        table.add_column(key, justify="right")
    for placement, entry in summary.items():
        ratios = entry["ratios"]
        assert isinstance(ratios, dict)
        table.add_row(placement, *(f"{ratios[key]['median']:.2f}, {ratios[key]['max']:.2f}" if key in ratios else ""
                                   for key in COMPARED))
    return table


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure the planner on sampled batches or on workload files.")
    parser.add_argument("folder", nargs="?", type=Path, help="workload files (*.json); sampled batches without it")
    parser.add_argument("--reference", type=Path, help="JSON of another planner's figures for the same files, by name")
    parser.add_argument("--placement", choices=(*PLACEMENTS, "both"), default="both")
    parser.add_argument("--model", default="llama3-8b")
    parser.add_argument("--tolerance", type=float, default=0.05)
    parser.add_argument("--repeats", type=int, default=5, help="timed runs per row, whose median is kept")
    parser.add_argument("--sweep", action="store_true", help=f"also sample batches of up to {SWEPT_RANKS[-1]} ranks")
    parser.add_argument("--output", type=Path, default=RESULTS / "planner.json")
    return parser.parse_args()


def run(options: argparse.Namespace, console: Console) -> None:
    host, model = host_facts(), model_named(options.model)
    if options.repeats < 1:
        raise ValueError(f"repeats is {options.repeats}; give at least 1")
    reference = parse_json(read_text(options.reference)) if options.reference else {}
    placements = PLACEMENTS if options.placement == "both" else (options.placement,)
    cases = [*(folder_cases(options.folder, options.tolerance) if options.folder
               else sampled_cases(SAMPLED_RANKS, options.tolerance))]
    if options.sweep:
        cases += sampled_cases(SWEPT_RANKS, options.tolerance)
    warm_up = next(sampled_cases((4,), options.tolerance))
    results: list[Result] = []
    for placement in placements:
        measure(warm_up, placement, model, options.tolerance, 1, None)
        with console.status("") as status:
            for case in sorted(cases, key=lambda case: case.ranks):
                status.update(f"{case.name}, {placement} placement")
                results.append(
                    measure(case, placement, model, options.tolerance, options.repeats, reference.get(case.name)))
        console.print(result_table(results, placement))
    summary = summarize(results)
    if any(result.ratios for result in results):
        console.print(summary_table(summary))
    write_json(options.output, {
        "host": host,
        "settings": {"model": model.name, "tolerance": options.tolerance, "repeats": options.repeats, "threads": 1},
        "summary": summary,
        "rows": results,
    })
    console.print(f"Written to {options.output}.")


if __name__ == "__main__":
    try:
        run(arguments(), wide_console())
    except (ValueError, OSError) as problem:
        sys.exit(f"planner.py: error: {problem}")
