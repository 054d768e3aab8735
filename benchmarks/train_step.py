"""What does balancing gain in a whole training step? Two ranks, a skewed batch, attention at home and disaggregated.

One rank owns a long document, the other as many tokens of short ones. Both modes train the same tokens from the same
weights; runs alternate, so that drift of the machine hits both. The losses must agree, and the ratio of tokens/s is the
gain. Ranks are local processes with one thread each on a CPU, or share the GPUs there are.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from common import GivenBatches, skewed_batch
from outputs import RESULTS, host_facts, write_json
from rich.console import Console
from rich.table import Table

from distca.train.launch import launch
from distca.train.settings import Settings, load_settings

MODES = ("home", "disaggregated")


@dataclass(frozen=True, slots=True)
class Result:
    """One mode: medians over the steps of all its runs."""

    mode: str
    tokens: int
    step_seconds: float
    tokens_per_second: float
    work_max_over_mean: float
    exposed_seconds: float
    bytes_per_layer: int
    losses: list[float]


def rank_main(settings: Settings) -> int:
    """Every rank: train both modes in turn, the first rank writes what it saw."""
    from distca.train.groups import start_group
    from distca.train.rank_env import this_rank
    from distca.train.settings.preflight import device_for
    from distca.train.trainer import Trainer

    options = json.loads(Path(settings.log.folder, "options.json").read_text())
    here = this_rank()
    device = device_for(settings, here.local_rank)
    start_group(settings, device, here.local_world)
    records: dict[str, list[Any]] = {mode: [] for mode in MODES}
    for turn in range(options["rounds"]):
        for mode in MODES:
            chosen = settings.with_values({"attention.mode": mode})
            trainer = Trainer(chosen, device)
            trainer.batches = loader = GivenBatches()  # type: ignore[assignment]
            loader.batch = skewed_batch(here.rank, here.world, options["tokens"] // 2, options["short"], chosen,
                                        trainer.decoder.shape.model)
            trainer.one_step()                                   # warm-up
            for _ in range(options["steps"]):
                torch.distributed.barrier()
                records[mode].append(asdict(trainer.one_step()))
            if here.rank == 0:
                print(f"round {turn + 1} of {options['rounds']}: {mode} {records[mode][-1]['seconds']:.2f} s a step",
                      file=sys.stderr, flush=True)
    if here.rank == 0:
        Path(settings.log.folder, "records.json").write_text(json.dumps(records))
    torch.distributed.destroy_process_group()
    return 0


def measure(arguments: argparse.Namespace) -> list[Result]:
    with tempfile.TemporaryDirectory() as folder:
        options = {name: getattr(arguments, name) for name in ("tokens", "short", "steps", "rounds")}
        Path(folder, "options.json").write_text(json.dumps(options))
        settings = load_settings(None, {
            "run.ranks": str(arguments.ranks), "run.threads": "1", "run.steps": "1000", "run.device": arguments.device,
            "batch.tokens_per_rank": str(arguments.tokens), "log.folder": folder, "parallel.fsdp": "true",
            "attention.placement": "given",
        })
        code = launch(settings, rank_main)
        if code:
            raise SystemExit(code)
        records = json.loads(Path(folder, "records.json").read_text())
    return [_result(mode, records[mode]) for mode in MODES]


def _result(mode: str, records: list[dict[str, Any]]) -> Result:
    seconds = median(record["seconds"] for record in records)
    return Result(
        mode=mode, tokens=records[0]["tokens"], step_seconds=seconds, tokens_per_second=records[0]["tokens"] / seconds,
        work_max_over_mean=records[0]["work_after"], exposed_seconds=median(r["exposed_seconds"] for r in records),
        bytes_per_layer=int(records[0]["bytes_per_layer"]), losses=[record["loss"] for record in records])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=24_576, help="per rank; long documents have half of it")
    parser.add_argument("--short", type=int, default=512)
    parser.add_argument("--steps", type=int, default=2, help="timed steps of each mode in each round")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--output", type=Path, default=RESULTS / "train_step.json")
    arguments = parser.parse_args()
    if arguments.tokens % (2 * arguments.short):
        parser.error(f"--tokens is {arguments.tokens}; give a multiple of twice --short, {arguments.short}")
    host, results = host_facts(device=arguments.device), measure(arguments)
    home, planned = results
    speedup = planned.tokens_per_second / home.tokens_per_second
    difference = max(abs(a - b) for a, b in zip(home.losses, planned.losses, strict=True))
    table = Table("attention", "s a step", "tokens/s", "work max/mean", "exposed s", "MB a layer",
                  title=f"{arguments.ranks} ranks of {arguments.tokens} tokens", title_justify="left")
    for row in results:
        table.add_row(row.mode, f"{row.step_seconds:.2f}", f"{row.tokens_per_second:,.0f}",
                      f"{row.work_max_over_mean:.2f}", f"{row.exposed_seconds:.2f}", f"{row.bytes_per_layer / 1e6:.1f}")
    console = Console()
    console.print(table)
    console.print(f"{speedup:.2f}x tokens/s; losses differ by at most {difference:.1e}")
    options = {name: getattr(arguments, name) for name in ("ranks", "tokens", "short", "steps", "rounds")}
    write_json(arguments.output, {"host": host, "options": options, "rows": results, "speedup": speedup,
                                  "largest_loss_difference": difference})


if __name__ == "__main__":
    main()
