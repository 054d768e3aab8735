"""What is gained when stages run micro-batches of like work side by side? The same simulated steps, drawn and sorted.

Our steps sort their micro-batches by causal pairs (`planning.orders.by_work`), so that a tick's stages have about
equal attention. Each row is one setting over a few batches, planned and timed once in the loader's order and once
sorted.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from outputs import RESULTS, host_facts, wide_console, write_json
from paper.cases import CLUSTER, DATA, KIB
from rich.console import Console
from rich.table import Table

from distca.cost.attention_time import shipped_table
from distca.models import model_named
from distca.planning.choose import plan_step
from distca.planning.orders import by_work
from distca.simulate.execute import execute
from distca.simulate.setting import Setting, setting
from distca.simulate.strategies import PoolChoice
from distca.simulate.sweep import Question
from distca.spec import cluster_named
from distca.workload.sequences import Source
from distca.workload.topology import Topology

MODEL, GPUS, TOLERANCE = "llama3-8b", 64, 0.05


@dataclass(frozen=True, slots=True)
class Result:
    """One setting: seconds of a step in both orders, and bytes that attention sends, means over batches."""

    pp: int
    context: int
    micro_batches: int
    data: str
    order: str
    drawn_seconds: float
    sorted_seconds: float
    gain: float              # drawn over sorted
    gains: list[float]       # [batches]
    bytes_ratio: float       # sorted over drawn


def asked(options: argparse.Namespace) -> Iterator[tuple[Setting, str]]:
    for data in options.data:
        for pp in options.pp:
            for context in options.contexts:
                yield setting(model_named(MODEL), cluster_named(CLUSTER), gpus=GPUS, context=context * KIB, pp=pp, tp=8,
                              sequences=options.micro_batches, micro_batches=options.micro_batches), data


def measure(where: Setting, data: str, order: str, num_batches: int) -> Result:
    question = Question((where,), ("distca",), Source(data), shipped_table("h200"), TOLERANCE, num_batches)
    costs = question.costs(where)
    ticks, layers = PoolChoice("balanced", order=order).ticks(where)
    seconds, sent = np.empty((2, num_batches)), np.empty((2, num_batches))
    for number in range(num_batches):
        drawn = question.batch(where, number).micro_batches(where)
        for kind, documents in enumerate((drawn, [drawn[at] for at in by_work(drawn)])):
            plan = plan_step(documents, where.model, num_data=where.num_data, layers=layers, ticks=ticks, tp=where.tp,
                             tolerance=TOLERANCE, cost=costs.attention,
                             topology=Topology.of_cluster(where.cluster, where.num_pool, where.tp))
            step = execute(plan, costs)
            seconds[kind, number], sent[kind, number] = step.seconds, step.sent_bytes
    gains = seconds[0] / seconds[1]
    return Result(where.pp, where.context, where.num_micro_batches, data, order, float(seconds[0].mean()),
                  float(seconds[1].mean()), float(seconds[0].sum() / seconds[1].sum()), gains.tolist(),
                  float(sent[1].sum() / sent[0].sum()))


def result_table(results: list[Result]) -> Table:
    table = Table(title=f"{MODEL} on {GPUS} GPUs, TP 8: micro-batches as drawn, and sorted by work")
    for title in ("PP", "context", "micro-batches", "data", "s drawn", "s sorted", "gain", "least", "most", "bytes"):
        table.add_column(title, justify="right")
    for row in results:
        table.add_row(str(row.pp), f"{row.context // KIB}K", str(row.micro_batches), row.data,
                      f"{row.drawn_seconds:.3f}", f"{row.sorted_seconds:.3f}", f"{row.gain:.3f}×",
                      f"{min(row.gains):.3f}", f"{max(row.gains):.3f}", f"{row.bytes_ratio:.2f}×")
    return table


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Simulate steps with micro-batches as drawn and sorted by work.")
    parser.add_argument("--pp", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--contexts", type=int, nargs="+", default=[128, 256, 512], help="In thousands of tokens.")
    parser.add_argument("--data", nargs="+", choices=DATA, default=list(DATA))
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--order", default="interleaved_2")
    parser.add_argument("--batches", type=int, default=4)
    parser.add_argument("--output", type=Path, default=RESULTS / "micro_batch_order.json")
    return parser.parse_args()


def run(options: argparse.Namespace, console: Console) -> None:
    results = [measure(where, data, options.order, options.batches) for where, data in asked(options)]
    console.print(result_table(results))
    write_json(options.output, {"host": host_facts(), "model": MODEL, "gpus": GPUS, "tolerance": TOLERANCE,
                                "rows": results})


if __name__ == "__main__":
    run(arguments(), wide_console(120))
