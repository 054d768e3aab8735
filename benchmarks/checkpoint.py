"""What checksums cost a checkpoint: seconds to save and to load with them, without, and with another checkout's code.

Every measurement is a process of its own, and variants take turns, so that what else the machine does meets all alike;
the least of the rounds counts. A save is timed until its files are on disk, a load from a folder in the page cache into
a model whose optimizer has state already, as it has nothing else to wait for. Give the other checkout with --old, for
example one made by: git worktree add build/old af9d695
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outputs import RESULTS, host_facts, write_json
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
RESULT = RESULTS / "checkpoint.json"
ROWS, COLUMNS = 1024, 2048  # of each matrix
SAVES, LOADS = 4, 8         # of each process; the least counts, so that first touches of memory do not


@dataclass(frozen=True, slots=True)
class Result:
    variant: str             # checksums, none, or old
    save_seconds: float      # the least of all rounds, to the last byte on disk
    wait_seconds: float      # of them, in which training waits
    load_seconds: float
    gigabytes: float
    rounds: list[dict[str, float]]


def measure(variant: str, folder: Path, num_matrices: int) -> dict[str, float]:
    """In a process of its own: several saves and loads; what is imported is PYTHONPATH's."""
    import torch
    from torch import nn

    from distca.train.checkpoint.checkpointer import Checkpointer

    if variant == "none":
        leave_out_checksums()
    torch.set_num_threads(1)

    def build(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        generator = torch.Generator().manual_seed(seed)
        model = nn.ParameterList([nn.Parameter(torch.randn(ROWS, COLUMNS, generator=generator))
                                  for _ in range(num_matrices)])
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
        return model, optimizer

    def done(saver: Any) -> None:
        saver.close() if hasattr(saver, "close") else saver.finish()

    run = build(0)
    saver = Checkpointer(folder, *run, keep=1)
    saves = []
    for step in range(SAVES):
        begin = time.perf_counter()
        saver.save(step, {})
        waited = time.perf_counter() - begin
        saver.finish()
        saves.append((time.perf_counter() - begin, waited))
    done(saver)
    other = build(1)
    loads = []
    for _ in range(LOADS):
        saver = Checkpointer(folder, *other, keep=1)
        begin = time.perf_counter()
        state = saver.resume()
        loads.append(time.perf_counter() - begin)
        assert state is not None and state.step == SAVES - 1
        done(saver)
    assert all(torch.equal(a, b) for a, b in zip(other[0].parameters(), run[0].parameters(), strict=True))
    return {"save_seconds": min(saves)[0], "wait_seconds": min(saves)[1], "load_seconds": min(loads)}


def leave_out_checksums() -> None:
    """The same code with a hash that looks at nothing."""
    import xxhash

    class Nothing:
        def update(self, content: memoryview) -> None: ...

        def hexdigest(self) -> str:
            return "0" * 16

    xxhash.xxh3_64 = Nothing                                     # type: ignore[assignment, misc]
    xxhash.xxh3_64_hexdigest = lambda content: "0" * 16          # type: ignore[assignment, misc]


def variants(old: Path | None) -> dict[str, Path]:
    """Variant -> the checkout whose package it runs."""
    return {"checksums": ROOT, "none": ROOT} | ({"old": old} if old is not None else {})


def compare(old: Path | None, rounds: int, num_matrices: int, scratch: str | None) -> list[Result]:
    measured: dict[str, list[dict[str, float]]] = {name: [] for name in variants(old)}
    for number in range(rounds):
        order = list(variants(old).items())
        for name, checkout in order[number % len(order):] + order[:number % len(order)]:
            with tempfile.TemporaryDirectory(dir=scratch) as folder:
                done = subprocess.run(
                    [sys.executable, __file__, "--measure", name, folder, "--matrices", str(num_matrices)],
                    env={**os.environ, "PYTHONPATH": str(checkout)}, capture_output=True, text=True)
            if done.returncode:
                raise SystemExit(done.stderr)
            measured[name].append(json.loads(done.stdout.splitlines()[-1]))
    gigabytes = 3 * 4 * ROWS * COLUMNS * num_matrices / 1e9      # weights and both moments, float32
    least = {name: {key: min(one[key] for one in rounds) for key in ("save_seconds", "wait_seconds", "load_seconds")}
             for name, rounds in measured.items()}
    return [Result(name, gigabytes=gigabytes, rounds=rounds, **least[name]) for name, rounds in measured.items()]


def table(results: list[Result]) -> Table:
    shown = Table("variant", "save s", "× old", "training waits s", "load s", "× old", "load GB/s",
                  title=f"A checkpoint of {results[0].gigabytes:.2f} GB, least of {len(results[0].rounds)} rounds")
    old = next((one for one in results if one.variant == "old"), None)
    for one in results:
        ratios = [f"{getattr(one, key) / getattr(old, key):.2f}" if old else "" for key in ("save_seconds",
                                                                                           "load_seconds")]
        shown.add_row(one.variant, f"{one.save_seconds:.3f}", ratios[0], f"{one.wait_seconds:.3f}",
                      f"{one.load_seconds:.3f}", ratios[1], f"{one.gigabytes / one.load_seconds:.2f}")
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--old", type=Path, help="another checkout to compare with")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--matrices", type=int, default=24, help=f"of {ROWS} × {COLUMNS} float32 each")
    parser.add_argument("--scratch", help="folder on the file system to measure; the system's own by default")
    parser.add_argument("--json", type=Path, nargs="?", const=RESULT, help=f"write results; without a path: {RESULT}")
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(arguments.measure[0], Path(arguments.measure[1]), arguments.matrices)))
        return
    host = host_facts()
    results = compare(arguments.old, arguments.rounds, arguments.matrices, arguments.scratch)
    Console().print(table(results))
    with_, without = results[0], results[1]
    share = 1 - without.load_seconds / with_.load_seconds
    print(f"checksums are {share:.1%} of loading and {1 - without.save_seconds / with_.save_seconds:.1%} of saving")
    if arguments.json is not None:
        write_json(arguments.json, {"host": host, "rows": results, "checksum_share_of_load": share})


if __name__ == "__main__":
    main()
