"""How long is a run away after a trainer was killed, and what takes the time?

`distca train` on local ranks; after some steps one of them is killed by SIGKILL, and the run goes on by `run.restarts`,
from host memory (`checkpoint.neighbour_every`) or from disk (`checkpoint.every`), alternating over rounds. Rank 0 notes
when it passes each point; the last is the end of the first step after the restart. CPU seconds are those of the new
rank 0 up to that point, all threads, which other work on the machine hardly changes.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from outputs import RESULTS, host_facts, wide_console, write_json
from rich.table import Table

from distca.train.launch import launch
from distca.train.rank_env import restarts, this_rank
from distca.train.settings import Settings

KILLED_AFTER = 7             # steps
POINTS = ("ended", "started", "imported", "met", "built", "loaded", "stepped")
MEANING = ("survivors' end", "Python", "imports", "process group", "model, data, plans", "checkpoint", "first step")


@dataclass(frozen=True, slots=True)
class Restart:
    source: str              # memory or disk
    parameters: int
    state_bytes: int         # weights and optimizer state, over all ranks
    seconds: float           # from the kill to the end of the first step after it: median over rounds, as all below
    seconds_of: dict[str, float]  # the parts of it, by POINTS: what ended at that point
    cpu_seconds: float
    rounds: int


def timed_rank(settings: Settings) -> int:
    """A rank of the run; rank 0 writes when it passed each point after a restart."""
    if this_rank().rank or not restarts(os.environ)[0]:
        from distca.train import trainer

        return trainer.run(settings)
    ticks, fields = os.sysconf("SC_CLK_TCK"), Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    uptime = float(Path("/proc/uptime").read_text().split()[0])
    passed = {"ended": time.time() - uptime + int(fields[19]) / ticks, "started": time.time()}
    from distca.train import trainer

    passed["imported"] = time.time()

    def noting(owner: Any, name: str, before: str, after: str = "") -> None:
        original: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **options: Any) -> Any:
            passed.setdefault(before, time.time())
            value = original(*args, **options)
            if after and after not in passed:
                passed[after] = time.time()
                if after == "stepped":
                    note = {"passed": passed, "cpu_seconds": time.process_time(),
                            "parameters": sum(one.numel() for one in args[0].decoder.parameters())}
                    (Path(settings.log.folder) / "passed.json").write_text(json.dumps(note))
            return value

        setattr(owner, name, timed)

    noting(trainer.Trainer, "__init__", "met")
    noting(trainer.Trainer, "open_checkpoints", "built", "loaded")
    noting(trainer.Trainer, "one_step", "loaded", "stepped")
    return trainer.run(settings)


def one_round(base: Settings, source: str) -> dict[str, Any]:
    """Run, kill a rank and return what rank 0 noted, with the time of the kill."""
    with tempfile.TemporaryDirectory() as folder:
        every = {"memory": "checkpoint.neighbour_every", "disk": "checkpoint.every"}[source]
        settings = base.with_values({every: 2, "checkpoint.folder": f"{folder}/saved", "log.folder": f"{folder}/log"})
        log, killed = Path(folder, "log/steps.jsonl"), [0.0]

        def kill() -> None:
            while not log.exists() or len(log.read_bytes().splitlines()) < KILLED_AFTER:
                time.sleep(0.01)
            ranks = [int(pid) for pid in Path("/proc/self/task", str(os.getpid()), "children").read_text().split()
                     if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
            killed[0] = time.time()
            os.kill(ranks[-1], signal.SIGKILL)

        threading.Thread(target=kill, daemon=True).start()
        if launch(settings, timed_rank) != 0:
            raise RuntimeError("the run failed; its output says why")
        noted: dict[str, Any] = json.loads((log.parent / "passed.json").read_text())
        saved = max(Path(folder, "saved").glob("step_*"))
        noted["state_bytes"] = sum(path.stat().st_size for path in saved.glob("*.safetensors"))
        return noted | {"killed": killed[0]}


def measure(base: Settings, num_rounds: int) -> list[Restart]:
    rounds: dict[str, list[dict[str, Any]]] = {"memory": [], "disk": []}
    for _ in range(num_rounds):
        for source, found in rounds.items():
            found.append(one_round(base, source))
    results = []
    for source, found in rounds.items():
        parts: list[dict[str, float]] = []
        for noted in found:
            at = [noted["killed"], *(noted["passed"][point] for point in POINTS)]
            parts.append({point: stop - start for point, start, stop in zip(POINTS, at, at[1:], strict=False)})
        results.append(Restart(
            source, found[0]["parameters"], found[0]["state_bytes"], median(sum(part.values()) for part in parts),
            {point: median(part[point] for part in parts) for point in POINTS},
            median(noted["cpu_seconds"] for noted in found), num_rounds))
    return results


def show(results: list[Restart]) -> None:
    table = Table("from", "state", *MEANING, "in all", "CPU s", title="Seconds after a SIGKILL, by part")
    for one in results:
        parts = [f"{one.seconds_of[point]:.2f}" for point in POINTS]
        table.add_row(one.source, f"{one.state_bytes / 1e6:,.0f} MB", *parts, f"{one.seconds:.2f}",
                      f"{one.cpu_seconds:.1f}")
    wide_console().print(table)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hidden", type=int, nargs="+", default=[256, 768], help="widths of the model, one table each")
    parser.add_argument("--json", type=Path, default=RESULTS / "restart.json")
    options = parser.parse_args(arguments)
    results: list[Restart] = []
    for hidden in options.hidden:
        base = Settings().with_values({
            "run.device": "cpu", "run.ranks": options.ranks, "run.threads": 1, "run.steps": 2 * KILLED_AFTER,
            "run.restarts": 1, "run.timeout_seconds": 60, "model.hidden": hidden, "model.ffn": 4 * hidden,
            "data.max_document": 200, "batch.tokens_per_rank": 128})
        found = measure(base, options.rounds)
        results += found
        show(found)
    write_json(options.json, {"host": host_facts(), "ranks": options.ranks,
                              "rows": results})


if __name__ == "__main__":
    main(sys.argv[1:])
