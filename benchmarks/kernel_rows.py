"""How fast are attention kernels on every kind of batch, head count and head dim? All contestants in one run, in turns.

Contestants are kernels of this checkout and, with --before, the Hopper kernel of another one, which is how a change to
its sources is judged. Every checkout has a process of its own, and they take turns batch by batch, forward and backward
in turns too, since a GPU at its power limit is slower after a hot call. TFLOP/s count the pairs that the causal mask
leaves, 2 * (dim + value dim) each forward and 2 * (3 * dim + 2 * value dim) backward. Results are compared with those
of the first contestant by norm, over out, dq, dk and dv.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from attention_batches import POOL_TOKENS, Batch, documents, sampled_plan, servers, shards
from outputs import wide_console, write_json
from rich.console import Console
from rich.table import Table

from distca.kernels import TaskRows, choose
from distca.kernels.interface import BackwardInputs, Scores
from distca.profiling.machine import Run, in_turns, versions

KERNELS, BEFORE = ("hopper", "fa4", "varlen"), "before"
UNEVEN_DOCUMENTS = (20_001, 7_777, 3_333, 1_111, 300, 129, 17, 100)
UNEVEN_SHARDS = ((8_192, 65_536), (4_000, 30_000), (2_048, 16_384), (1_024, 32_768), (512, 8_192), (256, 60_000),
                 (128, 128), (128, 4_096), (640, 20_000), (896, 12_000))
ROUNDS = 2


@dataclass(frozen=True, slots=True)
class Case:
    """A batch and its heads."""

    batch: Batch
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    value_dim: int = 128
    softcap: float | None = None

    @property
    def name(self) -> str:
        dims = f"{self.dim}" if self.dim == self.value_dim else f"{self.dim}/{self.value_dim}"
        cap = "" if self.softcap is None else f" | softcap {self.softcap:g}"
        return f"{self.batch.name} | {self.heads}/{self.kv_heads} heads | dim {dims}{cap}"

    def flops(self) -> tuple[float, float]:
        pairs = 2.0 * self.batch.pairs * self.heads
        return pairs * (self.dim + self.value_dim), pairs * (3 * self.dim + 2 * self.value_dim)


def cases(shrink: int = 1) -> Iterator[Case]:
    """All lengths divided by `shrink`."""
    long = documents(1, 32_768 // shrink)
    yield Case(long)
    yield Case(documents(4, 8_192 // shrink))
    yield Case(documents(32, 1_024 // shrink))
    yield Case(uneven("uneven documents", [(length, length) for length in UNEVEN_DOCUMENTS], shrink))
    for count, q_len in ((8, 4_096), (64, 512), (64, 128)):
        yield Case(shards(count, q_len // shrink, 16_384 // shrink, shared=False))
    yield Case(shards(64, 128 // shrink, 16_384 // shrink, shared=True))
    yield Case(uneven("uneven shards", list(UNEVEN_SHARDS), shrink))
    yield Case(shards(2, 128 // shrink, 524_288 // shrink, shared=False))
    for server in servers(sampled_plan(POOL_TOKENS // shrink)):
        yield Case(server)
    yield Case(long, 4, 1)
    yield Case(long, 8, 1)
    yield Case(documents(1, 16_384 // shrink), 8, 1)
    yield Case(documents(1, 8_192 // shrink), 4, 1)
    yield Case(long, 32, 32, 64, 64)
    for dim, value_dim in ((256, 256), (192, 128)):
        yield Case(documents(1, 16_384 // shrink), 32, 8, dim, value_dim)
    for case in (Case(long), Case(documents(32, 1_024 // shrink)), Case(long, 32, 32, 64, 64),
                 Case(documents(1, 16_384 // shrink), 32, 8, 256, 256)):
        yield replace(case, softcap=50.0)


def uneven(name: str, lengths: list[tuple[int, int]], shrink: int) -> Batch:
    q_len, k_len = (np.maximum(1, np.array(column) // shrink) for column in zip(*lengths, strict=True))
    q_end, k_end = np.cumsum(q_len), np.cumsum(k_len)
    return Batch(name, TaskRows.aligned(q_end - q_len, q_end, k_end - k_len, k_end), int(q_end[-1]), int(k_end[-1]))


def measured(kernel_name: str, case: Case, device: torch.device, budget: float) -> dict[str, Any]:
    """Seconds of both ways and the results' norms and samples; or why the kernel does not compute the case."""
    batch, dtype = case.batch, torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(shape, dtype=dtype, device=device) for shape in (
        (batch.num_q, case.heads, case.dim), (batch.num_k, case.kv_heads, case.dim),
        (batch.num_k, case.kv_heads, case.value_dim), (batch.num_q, case.heads, case.value_dim)))
    try:
        kernel = choose(device, dtype, case.dim, name=kernel_name, value_dim=case.value_dim, softcap=case.softcap)
        prepared = kernel.prepare(batch.rows, device, Scores(softcap=case.softcap))
        out, lse = kernel.forward(q, k, v, prepared)
        saved = BackwardInputs(dout, q, k, v, out, lse)
        results = (out, *kernel.backward(saved, prepared))
        runs: list[Run] = [partial(kernel.forward, q, k, v, prepared), partial(kernel.backward, saved, prepared)]
        forward, backward = in_turns(runs, device, budget_seconds=budget, least=3, most=100)
    except Exception as problem:  # a package's own, of any kind
        return {"problem": f"{type(problem).__name__}: {str(problem).strip().splitlines()[0]}"}
    generator = torch.Generator(device).manual_seed(1)
    probes = [torch.randn(x.shape[-1], 8, dtype=torch.float32, device=device, generator=generator) for x in results]
    sketches = [(x.float().flatten(0, 1) @ probe)[:: max(1, x.shape[0] * x.shape[1] // 4_096)].cpu()
                for x, probe in zip(results, probes, strict=True)]
    return {"seconds": [median(forward), median(backward)], "sketches": [x.flatten().tolist() for x in sketches]}


def serve(device: torch.device, budget: float, shrink: int) -> None:
    """A checkout's process: kernel and number of a case in, figures out."""
    known = list(cases(shrink))
    print("ready", flush=True)
    for line in sys.stdin:
        name, number = line.split()
        print(json.dumps(measured(name, known[int(number)], device, budget)), flush=True)
        if device.type == "cuda":
            torch.cuda.empty_cache()


class Checkout:
    """A process that measures the kernels of one checkout."""

    def __init__(self, root: Path, options: argparse.Namespace) -> None:
        paths = [str(root), str(root / "benchmarks"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        command = [sys.executable, __file__, "--serve", "--device", options.device, "--budget", str(options.budget),
                   "--shrink", str(options.shrink)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                                        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)})
        self.receive(root)

    def receive(self, what: object) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise ValueError(f"the process for {what} ended with status {self.process.wait()}")
        return line

    def measure(self, kernel: str, number: int) -> dict[str, Any]:
        assert self.process.stdin is not None
        print(kernel, number, file=self.process.stdin, flush=True)
        found: dict[str, Any] = json.loads(self.receive(f"{kernel}, case {number}"))
        return found

    def close(self) -> None:
        with suppress(OSError):
            self.process.communicate()


def compare(case: Case, found: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """One row of the results: TFLOP/s by contestant, differences from the first one."""
    rows: dict[str, Any] = {}
    expected = None
    for name, rounds in found.items():
        problem = next((one["problem"] for one in rounds if "problem" in one), None)
        if problem is not None:
            rows[name] = {"problem": problem}
            continue
        seconds = [min(one["seconds"][way] for one in rounds) for way in (0, 1)]
        sketches = [np.array(x) for x in rounds[0]["sketches"]]
        expected = expected or sketches
        rows[name] = {
            **{f"{way}_tflops": round(flops / taken / 1e12, 1)
               for way, flops, taken in zip(("forward", "backward"), case.flops(), seconds, strict=True)},
            "difference": max(float(np.linalg.norm(a - e) / np.linalg.norm(e))
                              for a, e in zip(sketches, expected, strict=True)),
        }
    return {"case": case.name, "contestants": rows}


def main(options: argparse.Namespace, console: Console) -> None:
    here = Path(__file__).resolve().parents[1]
    chosen = [(number, case) for number, case in enumerate(cases(options.shrink))
              if not options.only or any(text in case.name for text in options.only)]
    if not chosen:
        raise ValueError(f"only is {options.only} and no case's name holds it; leave it out to see all cases")
    checkouts = {"": Checkout(here, options)}
    if options.before is not None:
        checkouts[BEFORE] = Checkout(options.before.resolve(), options)
    contestants = [(name, checkouts[""], name) for name in options.kernels]
    if options.before is not None:
        contestants.insert(1, (BEFORE, checkouts[BEFORE], options.kernels[0]))
    table = Table(title="TFLOP/s, forward / backward (and the results' distance from the first's)")
    for heading in ("case", *(name for name, *_ in contestants)):
        table.add_column(heading)
    rows = []
    for number, case in chosen:
        print(f"{case.name} ...", file=sys.stderr, flush=True)
        found: dict[str, list[dict[str, Any]]] = {name: [] for name, *_ in contestants}
        for _ in range(ROUNDS):
            for name, checkout, kernel in contestants:
                found[name].append(checkout.measure(kernel, number))
        rows.append(compare(case, found))
        cells = [f"{x['forward_tflops']:.0f} / {x['backward_tflops']:.0f} ({x['difference']:.0e})" if "problem" not in x
                 else x["problem"][:60] for x in rows[-1]["contestants"].values()]
        table.add_row(case.name, *cells)
        if options.output is not None:
            about = {"device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu", **versions(),
                     "budget_seconds": options.budget, "rounds": ROUNDS, "statistic": "median, better of two rounds"}
            write_json(options.output, {"about": about, "rows": rows})
    for checkout in checkouts.values():
        checkout.close()
    console.print(table)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Attention kernels on every kind of batch, in one run.")
    parser.add_argument("--kernels", type=lambda text: text.split(","), default=["hopper"],
                        help=f"names with commas, of {', '.join(KERNELS)}; default hopper")
    parser.add_argument("--before", type=Path, help="another checkout, whose kernel runs beside the first of --kernels")
    parser.add_argument("--only", action="append", default=[], metavar="TEXT", help="cases whose name holds this")
    parser.add_argument("--budget", type=float, default=0.15, help="seconds for both ways of a case, each of 2 rounds")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shrink", type=int, default=1, help="divide all lengths by this")
    parser.add_argument("--output", type=Path, help="JSON")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    try:
        if arguments.serve:
            serve(torch.device(arguments.device), arguments.budget, arguments.shrink)
        else:
            main(arguments, wide_console(180))
    except (ValueError, OSError) as problem:
        sys.exit(f"kernel_rows.py: error: {problem}")
