"""What does distca cost the host a layer, where there is next to nothing to compute? CPU ranks, a small Llama.

Steps of a few tokens per rank, with `sdpa` and with distca in turn: documents that stay at home, and one document over
all ranks, whose layers exchange. Overhead is what a layer adds to `sdpa`, forward and backward, with its share of what
is done once a forward (exchanging lengths, finding the plan). By the clock it contains waiting for other ranks; CPU
seconds are those of the thread that runs the model, of the rank where they are most. Other work on the machine only
ever adds, so the least of all steps counts.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from common import on_ranks
from integrations import Loop
from outputs import RESULTS, host_facts, write_json
from rich.console import Console
from rich.table import Table

WARM_UP_STEPS = 3
TOKENS = 16                                                      # of a rank


@dataclass(frozen=True, slots=True)
class Result:
    """What a layer adds to sdpa."""

    documents: str
    seconds: float
    cpu_seconds: float


def rank_main(layers: int, steps: int) -> dict[str, list[float]]:
    """Every rank: the least seconds and CPU seconds of a step, by the clock and of this thread."""
    loops = {"sdpa": Loop("sdpa", layers, [TOKENS // 2] * 2), "at home": Loop("distca", layers, [TOKENS // 2] * 2),
             "over ranks": Loop("distca", layers, [TOKENS], begin=TOKENS * dist.get_rank())}
    records: dict[str, list[tuple[float, float]]] = {name: [] for name in loops}
    for number in range(WARM_UP_STEPS + steps):
        for name, loop in loops.items():
            busy = time.thread_time()
            seconds, _ = loop.step()
            if number >= WARM_UP_STEPS:
                records[name].append((seconds, time.thread_time() - busy))
    return {name: [min(column) for column in zip(*steps_of, strict=True)] for name, steps_of in records.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=50, help="timed steps of each kind")
    parser.add_argument("--json", type=Path, default=RESULTS / "host_overhead.json")
    arguments = parser.parse_args()
    host = host_facts()                                          # other work is in the clock's seconds
    found = on_ranks(arguments.ranks, rank_main, arguments.layers, arguments.steps)
    results = [Result(name, *(max((one[name][at] - one["sdpa"][at]) / arguments.layers for one in found)
                              for at in range(2))) for name in ("at home", "over ranks")]
    table = Table("documents", "ms a layer", "CPU ms a layer", title_justify="left",
                  title=f"Host overhead over sdpa, {arguments.ranks} CPU ranks of {TOKENS} tokens")
    for row in results:
        table.add_row(row.documents, f"{1e3 * row.seconds:.2f}", f"{1e3 * row.cpu_seconds:.2f}")
    Console().print(table)
    options = {name: getattr(arguments, name) for name in ("ranks", "layers", "steps")}
    write_json(arguments.json, {"host": host, "options": options, "rows": results})


if __name__ == "__main__":
    main()
