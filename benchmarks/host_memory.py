"""How far does a CPU rank's memory grow over many steps, and what does it cost to keep it small?

Exchanges have other sizes in every step, which fragments glibc's heap. The same run with the heap left alone, with a
threshold of 256 KiB above which every tensor is a mapping of its own, and trimmed every few steps as in `distca train`.
Each is a run of fresh processes, since a heap remembers; rounds alternate. Seconds are CPU seconds of one rank, which
other work on the machine hardly changes, and the ratio is to the heap left alone.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from resource import RUSAGE_SELF, getpagesize, getrusage
from statistics import median
from typing import Any

from outputs import RESULTS, host_facts, wide_console, write_json
from rich.table import Table

from distca.train.launch import launch
from distca.train.settings import Settings, load_settings

WAYS = ("left alone", "mmap", "trimmed")
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's mallopt
SKIPPED = 10                                 # steps that build caches
DEMO = {"data.max_document": "1536", "batch.tokens_per_rank": "1024"}
WIDE = {"model.hidden": "512", "model.layers": "2", "model.heads": "8", "model.kv_heads": "2", "model.head_dim": "64",
        "model.ffn": "1408", "data.max_document": "3072", "batch.tokens_per_rank": "2048"}


@dataclass(frozen=True, slots=True)
class Result:
    shape: str
    way: str
    steps: int
    early_bytes: int           # largest resident size over the steps before a quarter of the run, rank 0
    late_bytes: int            # the same over the last quarter
    step_cpu_seconds: float    # median over rounds of a run's mean, user and system
    system_seconds: float
    faults: float              # a step
    cpu_ratio: float           # to the heap left alone


def rank_main(settings: Settings) -> int:
    from distca.train import trainer as training
    from distca.train.groups import start_group
    from distca.train.rank_env import this_rank
    from distca.train.settings.preflight import device_for

    options = json.loads(Path(settings.log.folder, "options.json").read_text(encoding="utf-8"))
    if options["way"] == "mmap":
        for parameter, value in ((M_MMAP_THRESHOLD, 2**18), (M_TRIM_THRESHOLD, 2**20)):
            assert ctypes.CDLL(None).mallopt(parameter, value) == 1, "glibc's mallopt is needed"
    if options["way"] != "trimmed":
        vars(training)["return_freed_memory"] = lambda: None
    here = this_rank()
    device = device_for(settings, here.local_rank)
    start_group(settings, device, here.local_world)
    trainer = training.Trainer(settings, device)
    seen = []
    while trainer.step < settings.run.steps:
        trainer.one_step()
        used = getrusage(RUSAGE_SELF)
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * getpagesize()
        seen.append((resident, used.ru_utime, used.ru_stime, used.ru_minflt))
    if here.rank == 0:
        Path(settings.log.folder, "seen.json").write_text(json.dumps(seen), encoding="utf-8")
    trainer.batches.close()
    return 0


def measure(shape: dict[str, str], way: str, steps: int) -> list[list[float]]:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "options.json").write_text(json.dumps({"way": way}), encoding="utf-8")
        settings = load_settings(None, {"run.ranks": "2", "run.threads": "1", "run.steps": str(steps),
                                        "run.device": "cpu", "log.folder": folder, **shape})
        code = launch(settings, rank_main)
        if code:
            raise SystemExit(code)
        seen: list[list[float]] = json.loads(Path(folder, "seen.json").read_text(encoding="utf-8"))
        return seen


def rows_of(name: str, runs: dict[str, list[list[list[float]]]]) -> list[Result]:
    """One row a way; of several rounds the largest memory and the median of seconds."""
    def mean(seen: list[list[float]], *columns: int) -> float:
        return sum(seen[-1][c] - seen[SKIPPED - 1][c] for c in columns) / (len(seen) - SKIPPED)

    def row(way: str, rounds: list[list[list[float]]]) -> dict[str, Any]:
        steps = len(rounds[0])
        return {"shape": name, "way": way, "steps": steps,
                "early_bytes": max(int(one[0]) for seen in rounds for one in seen[:steps // 4]),
                "late_bytes": max(int(one[0]) for seen in rounds for one in seen[-(steps // 4):]),
                "step_cpu_seconds": median(mean(seen, 1, 2) for seen in rounds),
                "system_seconds": median(mean(seen, 2) for seen in rounds),
                "faults": median(mean(seen, 3) for seen in rounds)}

    found = [row(way, rounds) for way, rounds in runs.items()]
    return [Result(**one, cpu_ratio=one["step_cpu_seconds"] / found[0]["step_cpu_seconds"]) for one in found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="of the demo's shape, at least 20")
    parser.add_argument("--wide-steps", type=int, default=60, help="of the wider shape; 0 leaves it out")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--output", type=Path, default=RESULTS / "host_memory.json")
    arguments = parser.parse_args()
    host, results = host_facts(device="cpu"), list[Result]()
    for name, shape, steps in (("demo", DEMO, arguments.steps), ("wide", WIDE, arguments.wide_steps)):
        if steps:
            runs: dict[str, list[list[list[float]]]] = {way: [] for way in WAYS}
            for _ in range(arguments.rounds):
                for way in WAYS:
                    runs[way].append(measure(shape, way, steps))
                    print(f"{name}, {way}: {runs[way][-1][-1][0] / 1e6:.0f} MB", file=sys.stderr, flush=True)
            results += rows_of(name, runs)
    table = Table("shape", "heap", "MB early", "MB late", "CPU s a step", "system", "faults a step", "CPU ratio")
    for row in results:
        table.add_row(row.shape, row.way, f"{row.early_bytes / 1e6:.0f}", f"{row.late_bytes / 1e6:.0f}",
                      f"{row.step_cpu_seconds:.3f}", f"{row.system_seconds:.3f}", f"{row.faults:,.0f}",
                      f"{row.cpu_ratio:.2f}")
    wide_console().print(table)
    options = {name: getattr(arguments, name) for name in ("steps", "wide_steps", "rounds")}
    write_json(arguments.output, {"host": host, "options": options, "rows": results})


if __name__ == "__main__":
    main()
