"""How long does the host take to queue a layer's attention on a GPU? The kernel alone, and everything around it.

A GPU waits where the host queues more slowly than it computes, as short rows do. Medians of calls in a row, without
waiting for the device: the kernel by itself; then chains of layers under autograd, forward and backward, where what is
beside the kernel is what a chain takes beyond the same kernel in a bare autograd function.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from outputs import RESULTS, host_facts, write_json
from rich.console import Console
from rich.table import Table

import distca
from distca.kernels import TaskRows
from distca.kernels.hopper.kernel import HopperKernel, HopperTasks
from distca.kernels.interface import BackwardInputs
from distca.profiling.machine import versions

DEVICE = torch.device("cuda", 0)
KERNEL = HopperKernel()
HEADS, KV_HEADS, DIM = 32, 8, 128
IN_A_ROW, LAYERS = 60, 16
Layer = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Result:
    """Microseconds of the host, medians."""

    what: str
    forward_us: float
    backward_us: float
    forward_beside_us: float | None    # beyond the kernel in a bare autograd function
    backward_beside_us: float | None


class Bare(torch.autograd.Function):
    """The kernel and nothing else."""

    @staticmethod
    def forward(ctx: Any, prepared: HopperTasks, *row: torch.Tensor) -> torch.Tensor:
        out, lse = KERNEL.forward(row[0], row[1], row[2], prepared)
        ctx.prepared = prepared
        ctx.save_for_backward(*row, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, *KERNEL.backward(BackwardInputs(dout, *ctx.saved_tensors), ctx.prepared)


def in_a_row(run: Callable[[], object], rounds: int) -> float:
    seconds = []
    for _ in range(rounds + 2):
        torch.cuda.synchronize()
        begin = perf_counter()
        for _ in range(IN_A_ROW):
            run()
        seconds.append((perf_counter() - begin) / IN_A_ROW)
    return 1e6 * median(seconds[2:])


def chained(layer: Layer, row: list[torch.Tensor], dout: torch.Tensor, rounds: int) -> tuple[float, float]:
    """A layer's share of a chain, forward and backward."""
    q, k, v = (x.detach().requires_grad_() for x in row)
    found = []
    for _ in range(rounds + 4):
        torch.cuda.synchronize()
        begin, x = perf_counter(), q
        for _ in range(LAYERS):
            x = layer(x, k, v)
        middle = perf_counter()
        torch.autograd.grad(x, q, dout)
        found.append((middle - begin, perf_counter() - middle))
    forward, backward = (1e6 * median(column) / LAYERS for column in zip(*found[4:], strict=True))
    return forward, backward


def measure(tokens: int, rounds: int) -> list[Result]:
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    row = [torch.randn(tokens, heads, DIM, dtype=torch.bfloat16, device=DEVICE)
           for heads in (HEADS, KV_HEADS, KV_HEADS)]
    dout, positions = torch.randn_like(row[0]), torch.arange(tokens, device=DEVICE)
    prepared = KERNEL.prepare(TaskRows.documents([tokens]), DEVICE)
    out, lse = KERNEL.forward(row[0], row[1], row[2], prepared)
    saved = BackwardInputs(dout, row[0], row[1], row[2], out, lse)
    results = [Result("the kernel alone", in_a_row(lambda: KERNEL.forward(row[0], row[1], row[2], prepared), rounds),
                      in_a_row(lambda: KERNEL.backward(saved, prepared), rounds), None, None)]
    plan = distca.plan(distca.pack([tokens], ranks=1), model="llama3-8b")
    attend, packed, depth = distca.CoreAttention(), distca.PackedAttention(), count()
    layers: dict[str, Layer] = {
        "a bare autograd function": lambda q, k, v: Bare.apply(prepared, q, k, v),
        "CoreAttention": lambda q, k, v: attend(q, k, v, plan),
        "PackedAttention": lambda q, k, v: packed(q, k, v, positions, layer=next(depth))}
    found: dict[str, list[tuple[float, float]]] = {what: [] for what in layers}
    for _ in range(3):                                           # in turns: the host's clock drifts
        for what, layer in layers.items():
            found[what].append(chained(layer, row, dout, rounds))
    bare, *others = ((what, [min(column) for column in zip(*times, strict=True)]) for what, times in found.items())
    results.append(Result(bare[0], bare[1][0], bare[1][1], None, None))
    return results + [Result(what, forward, backward, forward - bare[1][0], backward - bare[1][1])
                      for what, (forward, backward) in others]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2_048)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, default=RESULTS / "host_time_gpu.json")
    chosen = parser.parse_args()
    torch.cuda.set_device(DEVICE)
    host = host_facts(device=torch.cuda.get_device_name(), **versions())
    results = measure(chosen.tokens, chosen.rounds)
    table = Table("host, µs a call", "forward", "backward", "beside the kernel", title_justify="left",
                  title=f"one document of {chosen.tokens}, {HEADS} / {KV_HEADS} heads of {DIM}")
    for row in results:
        beside = (row.forward_beside_us, row.backward_beside_us)
        table.add_row(row.what, f"{row.forward_us:.1f}", f"{row.backward_us:.1f}",
                      "" if None in beside else " + ".join(f"{one:.1f}" for one in beside))
    Console(width=110).print(table)
    options = {"tokens": chosen.tokens, "rounds": chosen.rounds, "layers": LAYERS}
    write_json(chosen.json, {"host": host, "options": options, "rows": results})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
