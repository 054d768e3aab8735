"""Which attention kernel is fastest on this GPU, for each head dim, with a window and without? `auto` goes by it.

Every kernel that fits runs forward and backward on what two servers of a planned pool compute, the median one and the
most fragmented, 32 query heads and 8 KV heads in bfloat16; what counts is the time of both together. The figures
go into distca/kernels/measured.json under the device's name; with --kernels or --head-dims those of others stay.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from attention_batches import POOL_TOKENS, Batch, sampled_plan, servers
from rich.console import Console
from rich.table import Table

from distca.kernels import MEASURED, Speed, TaskRows, kernel_named
from distca.kernels.interface import BackwardInputs, Scores
from distca.profiling.machine import samples, versions

KERNELS = ("hopper", "fa4", "varlen")
HEADS, KV_HEADS, HEAD_DIMS, WINDOWS = 32, 8, (64, 128, 192, 256), (None, 4_096)
VALUE_DIMS = {192: 128}  # of values, where it is not that of keys
ROUNDS = 2


def visible_pairs(rows: TaskRows, window: int | None) -> int:
    """Pairs of queries and keys that the mask leaves."""
    total = 0
    for q_len, k_len, offset in zip(rows.q_len.tolist(), rows.k_len.tolist(), rows.q_offset.tolist(), strict=True):
        position = offset + np.arange(q_len)
        first = np.zeros(q_len, dtype=np.int64) if window is None else np.maximum(0, position - window + 1)
        total += int(np.maximum(0, np.minimum(k_len, position + 1) - first).sum())
    return total


def speeds(
    names: list[str], head_dim: int, window: int | None, device: torch.device, batches: list[Batch], budget: float
) -> list[Speed]:
    """The kernels' speeds over all batches."""
    seconds: dict[str, list[tuple[float, float]]] = {}
    for batch in batches:
        for name, both in batch_seconds(names, head_dim, window, device, batch, budget).items():
            seconds.setdefault(name, []).append(both)
    value_dim = VALUE_DIMS.get(head_dim, head_dim)
    pairs = 2e-12 * sum(visible_pairs(batch.rows, window) for batch in batches) * HEADS
    there, back = pairs * (head_dim + value_dim), pairs * (3 * head_dim + 2 * value_dim)
    totals = {name: [sum(way) for way in zip(*of_batches, strict=True)] for name, of_batches in seconds.items()}
    return [Speed(name, head_dim, window is not None, round(there / forward, 1), round(back / backward, 1))
            for name, (forward, backward) in totals.items()]


def batch_seconds(
    names: list[str], head_dim: int, window: int | None, device: torch.device, batch: Batch, budget: float
) -> dict[str, tuple[float, float]]:
    """What forward and backward of each kernel take, measured in turns."""
    value_dim = VALUE_DIMS.get(head_dim, head_dim)
    shapes = ((batch.num_q, HEADS, head_dim), (batch.num_k, KV_HEADS, head_dim), (batch.num_k, KV_HEADS, value_dim),
              (batch.num_q, HEADS, value_dim))
    q, k, v, dout = (torch.randn(shape, device=device, dtype=torch.bfloat16) for shape in shapes)
    fitting = [kernel for kernel in map(kernel_named, names)
               if kernel.supports(device, q.dtype, head_dim, Scores(window=window), value_dim) is None]
    times: dict[str, tuple[list[float], list[float]]] = {kernel.name: ([], []) for kernel in fitting}
    for _ in range(ROUNDS):
        for kernel in fitting:
            prepared = kernel.prepare(batch.rows, device, Scores(window=window))
            out, lse = kernel.forward(q, k, v, prepared)
            forward, backward = times[kernel.name]
            forward += samples(partial(kernel.forward, q, k, v, prepared), device, budget_seconds=budget, least=3)
            saved = BackwardInputs(dout, q, k, v, out, lse)
            backward += samples(partial(kernel.backward, saved, prepared), device, budget_seconds=budget, least=3)
    return {name: (median(forward), median(backward)) for name, (forward, backward) in times.items()}


def with_others(known: dict[str, Any], about: dict[str, Any], found: list[Speed]) -> dict[str, Any]:
    """A device's entry with these figures, and those of what was not measured now; it says of the run with most."""
    measured = {(speed.kernel, speed.head_dim, speed.windowed) for speed in found}
    others = [row for row in known["speeds"] if (row["kernel"], row["head_dim"], row["windowed"]) not in measured]
    rows = sorted([*others, *map(asdict, found)], key=lambda row: (row["head_dim"], row["windowed"]))
    return {**(known if len(others) > len(found) else about), "speeds": rows}


def main(options: argparse.Namespace, console: Console) -> None:
    if not torch.cuda.is_available():
        raise ValueError("torch finds no GPU; kernels are ranked on the GPU they will run on")
    device = torch.device("cuda")
    batches = list(servers(sampled_plan(POOL_TOKENS)))
    title = ", ".join(batch.name for batch in batches)
    found: list[Speed] = []
    for head_dim in options.head_dims:
        for window in WINDOWS:
            print(f"head dim {head_dim}, window {window} ...", file=sys.stderr, flush=True)
            found += speeds(options.kernels, head_dim, window, device, batches, options.budget)
    table = Table(title=f"TFLOP/s, {title}", title_justify="left")
    for heading in ("head dim", "window", "kernel", "forward", "backward"):
        table.add_column(heading, justify="right")
    for speed in found:
        table.add_row(str(speed.head_dim), str(WINDOWS[1] if speed.windowed else None), speed.kernel,
                      f"{speed.forward_tflops:.0f}", f"{speed.backward_tflops:.0f}")
    console.print(table)
    known = options.output if options.output.exists() else MEASURED
    content = json.loads(known.read_text(encoding="utf-8"))
    about = {"date": datetime.now(UTC).date().isoformat(), **versions(), "batch": title, "window": WINDOWS[1]}
    name = torch.cuda.get_device_name(device)
    content["devices"][name] = with_others(content["devices"].get(name, {"speeds": []}), about, found)
    options.output.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    console.print(f"Written to {options.output}.")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Rank the attention kernels on this GPU.")
    parser.add_argument("--budget", type=float, default=0.15, help="seconds for each kernel, way and round")
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, default=list(KERNELS), help="default: all that fit")
    parser.add_argument("--head-dims", nargs="+", type=int, choices=HEAD_DIMS, default=list(HEAD_DIMS))
    parser.add_argument("--output", type=Path, default=MEASURED)
    try:
        main(parser.parse_args(), Console(width=120))
    except (ValueError, OSError) as problem:
        sys.exit(f"kernel_ranking.py: error: {problem}")
