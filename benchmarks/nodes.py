"""What do plans by levels save between nodes? Flat and levelled plans of the same documents, and balanced placement
beside given, on batches that are made here.

Flat plans are counted as ranks that each fetch what they need for themselves, levelled plans once per node, as the two
are executed. Times are the median of a few runs of placement and balancing, on one thread.

`--workloads` takes batches from a folder of workload files instead. With `--reference`, a JSON object of what another
planner sends on each of these files (`bytes_total`), what crosses nodes is held against that too: nobody says which of
the other's bytes cross, so a server is taken to be any other rank with the same chance, and (ranks - ranks of a node) /
(ranks - 1) of them do.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np
from outputs import RESULTS, host_facts, wide_console, write_json
from rich.console import Console
from rich.table import Table

from distca.models import model_named
from distca.planning.choose import plan_step
from distca.planning.plan import Plan
from distca.spec import ModelShape
from distca.workload.documents import fill, workload_from_json
from distca.workload.packing import PLACEMENTS
from distca.workload.sequences import Source, batch_sequences
from distca.workload.topology import Topology

RANKS = (32, 64, 256, 512)
ROW, CONTEXT = 65_536, 524_288  # tokens
LONG = ("one document", "documents of 512K", "half the tokens in 256K", "uniform to 2M")


@dataclass(frozen=True, slots=True)
class Result:
    """One batch under one placement. Bytes are forward, one layer, bf16."""

    name: str
    placement: str
    placement_used: str
    ranks: int
    documents: int
    valid: bool
    work_max_over_mean: float
    limit: str | None
    bytes_total: int
    bytes_sent_max: int
    bytes_between_nodes: int
    bytes_between_nodes_max: int
    flat_bytes_total: int
    flat_bytes_between_nodes: int           # as each rank fetches for itself
    flat_bytes_between_nodes_max: int
    between_nodes_over_flat: float
    total_over_flat: float
    plan_seconds: float
    reference_bytes_between_nodes: float | None = None  # of another planner, by chance
    between_nodes_over_reference: float | None = None


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    lengths: np.ndarray
    ranks: int


def sampled_cases(ranks: tuple[int, ...]) -> Iterator[Case]:
    """Sequences as long as a rank's row, and sequences of 512K tokens over eight ranks, of prolong's lengths."""
    for count in ranks:
        for name, context in (("fit 64K", ROW), ("span 512K", CONTEXT)):
            for seed in (0, 1):
                parts = batch_sequences(Source("prolong"), context, count * ROW // context, (seed, count))
                yield Case(f"{name}, seed {seed}", np.concatenate(parts), count)


def long_cases(ranks: int) -> Iterator[Case]:
    """Batches with little to fill up long documents' ranks with, where balanced placement has the least to gain."""
    total = ranks * ROW
    rng = np.random.default_rng(0)
    lengths = (
        np.array([total]), np.full(total // CONTEXT, CONTEXT),
        np.append(np.full(total // CONTEXT, CONTEXT // 2),
                  fill(rng.integers(500, 8000, total // 2 // 500), total // 2)),
        fill(rng.integers(1, 2**21, 64 + total // 2**18), total))
    yield from (Case(name, one, ranks) for name, one in zip(LONG, lengths, strict=True))


def file_cases(folder: Path, ranks: tuple[int, ...]) -> Iterator[Case]:
    """Workload files of a folder that have one of these numbers of ranks."""
    for path in sorted(folder.glob("*.json")):
        found = workload_from_json(json.loads(path.read_text(encoding="utf-8")))
        if found.ranks in ranks:
            yield Case(path.stem, np.concatenate(found.sequences), found.ranks)


def against(result: Result, reference: dict[str, dict[str, float]], per_node: int) -> Result:
    """With what another planner sends between nodes, where it is known for this batch."""
    if result.name not in reference:
        return result
    crossing = reference[result.name]["bytes_total"] * (result.ranks - per_node) / (result.ranks - 1)
    return replace(result, reference_bytes_between_nodes=crossing,
                   between_nodes_over_reference=result.bytes_between_nodes / crossing)


def measure(case: Case, placement: str, model: ModelShape, tolerance: float, per_node: int, repeats: int) -> Result:
    topology = Topology.regular(case.ranks, per_node)
    flat, _, _ = planned(case, placement, model, tolerance, None, 1)
    plan, used, seconds = planned(case, placement, model, tolerance, topology, repeats)
    crossing = flat.traffic().matrix_bytes(model) * (topology.node[:, None] != topology.node)
    by_node = np.bincount(topology.node, weights=crossing.sum(axis=1))
    summary, flat_total = plan.summary(), flat.summary().bytes_total
    assert summary.bytes_between_nodes is not None and summary.bytes_between_nodes_max is not None
    plan.validate()
    return Result(
        case.name, placement, used, case.ranks, len(case.lengths), True, summary.work_max_over_mean, plan.limit,
        summary.bytes_total, int(summary.bytes_sent.max()), summary.bytes_between_nodes,
        summary.bytes_between_nodes_max, flat_total, int(crossing.sum()), int(by_node.max()),
        summary.bytes_between_nodes / max(crossing.sum(), 1.0), summary.bytes_total / max(flat_total, 1), seconds)


def planned(
    case: Case, placement: str, model: ModelShape, tolerance: float, topology: Topology | None, repeats: int
) -> tuple[Plan, str, float]:
    seconds: list[float] = []
    for _ in range(repeats):
        begin = perf_counter()
        step = plan_step([case.lengths], model, num_data=case.ranks, layers=(1,), ping_pong=False,
                         placement=placement, tolerance=tolerance, topology=topology)
        seconds.append(perf_counter() - begin)
    assert step.placement is not None
    return step.plans[0], step.placement, median(seconds)


def summarize(results: list[Result]) -> dict[str, dict[str, float]]:
    """Of the sampled batches, or of those in files, by placement."""
    found: dict[str, dict[str, float]] = {}
    for placement in PLACEMENTS:
        rows = [row for row in results if row.placement == placement and row.name not in LONG]
        between, total = [row.between_nodes_over_flat for row in rows], [row.total_over_flat for row in rows]
        found[placement] = {
            "between_nodes_over_flat_median": median(between), "between_nodes_over_flat_max": max(between),
            "total_over_flat_max": max(total), "work_max_over_mean": max(row.work_max_over_mean for row in rows),
            "plan_seconds_max": max(row.plan_seconds for row in rows)}
        over = [row.between_nodes_over_reference for row in rows if row.between_nodes_over_reference is not None]
        if over:
            found[placement] |= {"between_nodes_over_reference_median": median(over),
                                 "between_nodes_over_reference_max": max(over)}
    return found


def result_table(results: list[Result], per_node: int) -> Table:
    table = Table(title=f"{per_node} ranks to a node", title_justify="left")
    for title in ("batch", "ranks", "placement", "max/mean", "GB between nodes", "× flat", "busiest node", "× flat",
                  "GB in all", "× flat", "ms"):
        table.add_column(title, justify="left" if title in ("batch", "placement") else "right", no_wrap=True)
    for row in results:
        used = "" if row.placement_used == row.placement else f" ({row.placement_used})"
        table.add_row(
            row.name, str(row.ranks), row.placement + used, f"{row.work_max_over_mean:.3f}",
            f"{row.bytes_between_nodes / 1e9:.2f}", f"{row.between_nodes_over_flat:.3f}",
            f"{row.bytes_between_nodes_max / 1e9:.2f}",
            f"{row.bytes_between_nodes_max / max(row.flat_bytes_between_nodes_max, 1):.3f}",
            f"{row.bytes_total / 1e9:.1f}", f"{row.total_over_flat:.3f}", f"{1e3 * row.plan_seconds:.0f}")
    return table


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure plans by levels against flat ones.")
    parser.add_argument("--ranks", type=int, nargs="+", default=list(RANKS))
    parser.add_argument("--ranks-per-node", type=int, default=8)
    parser.add_argument("--model", default="llama3-8b")
    parser.add_argument("--tolerance", type=float, default=0.05)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--workloads", type=Path, help="Folder of workload files to plan instead.")
    parser.add_argument("--reference", type=Path, help="JSON of another planner's bytes_total by the files' names.")
    parser.add_argument("--output", type=Path, default=RESULTS / "nodes.json")
    return parser.parse_args()


def run(options: argparse.Namespace, console: Console) -> None:
    host, model, ranks = host_facts(), model_named(options.model), tuple(options.ranks)
    cases = [*file_cases(options.workloads, ranks)] if options.workloads else [
        *sampled_cases(ranks), *long_cases(ranks[0]), *(long_cases(ranks[-1]) if len(ranks) > 1 else ())]
    reference = json.loads(options.reference.read_text(encoding="utf-8")) if options.reference else {}
    results: list[Result] = []
    with console.status("") as status:
        for case in cases:
            for placement in PLACEMENTS:
                status.update(f"{case.name}, {case.ranks} ranks, {placement} placement")
                results.append(against(measure(case, placement, model, options.tolerance, options.ranks_per_node,
                                               options.repeats), reference, options.ranks_per_node))
    console.print(result_table(results, options.ranks_per_node))
    console.print(summarize(results))
    write_json(options.output, {
        "host": host,
        "settings": {"model": model.name, "tolerance": options.tolerance, "ranks_per_node": options.ranks_per_node,
                     "repeats": options.repeats, "threads": 1},
        "summary": summarize(results),
        "rows": results,
    })
    console.print(f"Written to {options.output}.")


if __name__ == "__main__":
    run(arguments(), wide_console())
