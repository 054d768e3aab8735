"""Does attention.adapt help where one rank is slow? CPU ranks train, the last one computing all its attention twice.

Two trainers take turns, step by step, on the same documents: one plans for equal servers, the other learns speeds.
What counts is the slowest rank's attention, which everybody waits for. Of R ranks, one of half the speed holds equal
shares up for 2 / R of all the work; shares by speed take 1 / (R - 0.5), and the tolerance.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from outputs import RESULTS, host_facts, write_json
from rich.console import Console
from rich.table import Table

from distca.kernels.interface import Kernel
from distca.runtime import prepared
from distca.train.groups import start_group
from distca.train.launch import launch
from distca.train.rank_env import this_rank
from distca.train.settings import Settings
from distca.train.trainer import Trainer

VARIANTS = ("equal servers", "adapt")


class Twice:
    """A kernel that does everything twice."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    def __getattr__(self, name: str) -> Any:
        return getattr(self.kernel, name)

    def forward(self, *arguments: Any) -> Any:
        self.kernel.forward(*arguments)
        return self.kernel.forward(*arguments)

    def backward(self, *arguments: Any) -> Any:
        self.kernel.backward(*arguments)
        return self.kernel.backward(*arguments)


@dataclass(frozen=True, slots=True)
class Result:
    """One way to plan, over the steps in which speeds have settled."""

    variant: str
    slowest_attention_seconds: float   # of a step, the median
    attention_seconds: float           # of a step, mean over ranks, the median
    server_speed: tuple[float, ...]    # at the end
    seconds_all: tuple[float, ...]     # the slowest rank's attention of every step
    last_loss: float


def one_rank(settings: Settings) -> int:
    """Both variants in turn; the first rank leaves what it saw."""
    rank, ranks = this_rank().rank, this_rank().world
    start_group(settings, torch.device("cpu"), ranks)
    if rank == ranks - 1:
        choose = vars(prepared)["choose"]
        vars(prepared)["choose"] = lambda *arguments: Twice(choose(*arguments))
    trainers = {name: Trainer(settings, torch.device("cpu")) for name in VARIANTS}
    records: dict[str, list[Any]] = {name: [] for name in VARIANTS}
    for _ in range(settings.run.steps):
        for name, trainer in trainers.items():
            dist.barrier()
            records[name].append(trainer.one_step())
            if name != "adapt":
                trainer.batches.speed = None                      # measured all the same
    for trainer in trainers.values():
        trainer.batches.close()
    if rank == 0:
        settled = slice(settings.run.steps // 2, None)
        results = [asdict(Result(
            name, median(one.attention_seconds_max for one in found[settled]),
            median(one.attention_seconds for one in found[settled]), found[-1].server_speed,
            tuple(one.attention_seconds_max for one in found), found[-1].loss)) for name, found in records.items()]
        Path(settings.log.folder, "results.json").write_text(json.dumps(results), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()
    return 0


def run(options: argparse.Namespace) -> None:
    host = host_facts()
    with tempfile.TemporaryDirectory() as folder:
        settings = Settings().with_values({
            "model.name": "tiny", "run.ranks": options.ranks, "run.steps": options.steps, "run.threads": 1,
            "run.device": "cpu", "batch.tokens_per_rank": options.tokens, "attention.adapt": True,
            "log.folder": folder})
        if launch(settings, one_rank):
            raise SystemExit("a rank failed")
        results = json.loads(Path(folder, "results.json").read_text(encoding="utf-8"))
    equal, adapted = results
    ratio = adapted["slowest_attention_seconds"] / equal["slowest_attention_seconds"]
    expected = options.ranks / 2 / (options.ranks - 0.5)
    table = Table(title=f"{options.ranks} ranks, the last of half the speed", title_justify="left")
    for title in ("", "slowest rank's attention", "speeds learnt", "last loss"):
        table.add_column(title, justify="right" if title else "left")
    for one in results:
        table.add_row(one["variant"], f"{one['slowest_attention_seconds']:.3f} s",
                      " ".join(f"{speed:.2f}" for speed in one["server_speed"]), f"{one['last_loss']:.4f}")
    Console().print(table, f"ratio {ratio:.2f}, by speeds alone {expected:.2f}")
    content = {"host": host, "ranks": options.ranks, "tokens_per_rank": options.tokens,
               "steps": options.steps, "slowdown": 2.0, "ratio": ratio, "ratio_of_speeds": expected, "rows": results}
    write_json(options.output, content)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train with one slow rank, with and without attention.adapt.")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=4096, help="of each rank")
    parser.add_argument("--output", type=Path, default=RESULTS / "adapt.json")
    run(parser.parse_args())
