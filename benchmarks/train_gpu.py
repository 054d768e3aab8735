"""How close to its matrix products is a training step on one GPU? Eager, compiled, recomputed, and the products alone.

A slice of llama3-8b, 8 layers, trains 32K packed tokens a step the way the trainer does: with a vocabulary of 32,000
(2.0B parameters) and with its own of 128,256 (2.8B). The same weights take turns: plain eager, compiled, compiled with
activations recomputed. In the same run, by themselves: every matrix product of forward and backward at the step's
shapes, and every attention call. Afterwards batches of other lengths show whether anything is compiled again.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import torch
from one_gpu import PEAK_FLOPS, OneGpu, model_flops
from outputs import RESULTS, host_facts, write_json
from rich.console import Console
from rich.table import Table
from torch._dynamo.utils import counters

from distca.kernels import TaskRows, choose
from distca.kernels.interface import BackwardInputs
from distca.models import model_named
from distca.profiling.machine import versions
from distca.spec import ModelShape

LENGTHS = [8192, 6144, 4096, 4096, 3072, 2048, 2048, 1024, 1024, 512, 512]  # 32,768 tokens
OTHERS = [[32_768], [16_384, 8_000, 5_000, 1_111], [777] * 40, [20_000, 12_345], [4_096] * 8, [9_000, 23_001]]
WAYS = {
    "eager": {}, "compiled": {"compile": True},
    "compiled, recompute full": {"compile": True, "recompute": "full"},
    "compiled, recompute selective": {"compile": True, "recompute": "selective"},
    "eager, recompute full": {"recompute": "full"}, "eager, recompute selective": {"recompute": "selective"},
}


@dataclass(frozen=True, slots=True)
class Result:
    """One way to run the step; medians."""

    vocab: int
    way: str
    step_seconds: float
    tokens_per_second: float
    model_flops_utilization: float
    alone_over_step: float  # time of products and attention alone over this step's
    memory_bytes: int
    first_step_seconds: float  # with compilation
    losses: list[float]
    graphs_after_warm_up: int  # compiled for batches of other lengths


@dataclass(frozen=True, slots=True)
class Alone:
    """A step's matrix products and attention by themselves."""

    vocab: int
    products_seconds: float
    attention_seconds: float
    seconds: float
    model_flops: float
    flops_per_second: float

    @classmethod
    def measured(cls, model: ModelShape, chunk: int) -> Alone:
        products_seconds, attention_seconds = products(model, sum(LENGTHS), chunk), attention(model, LENGTHS)
        seconds, flops = products_seconds + attention_seconds, model_flops(model, LENGTHS)
        return cls(model.vocab, products_seconds, attention_seconds, seconds, flops, flops / seconds)


def timed(run: Callable[[], object], repeats: int = 5) -> float:
    """Median seconds on the GPU."""
    run()
    seconds = []
    for _ in range(repeats):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        stop.record()
        torch.cuda.synchronize()
        seconds.append(start.elapsed_time(stop) / 1e3)
    return median(seconds)


def products(model: ModelShape, num_tokens: int, chunk: int) -> float:
    """Seconds of every matrix product of a step, forward, gradient of the input and gradient of the weight."""
    widths = [(model.hidden, model.num_heads * model.head_dim), (model.num_heads * model.head_dim, model.hidden),
              *[(model.hidden, model.num_kv_heads * model.head_dim)] * 2,
              *[(model.hidden, model.ffn)] * 2, (model.ffn, model.hidden)]
    layer = sum(_products(num_tokens, *width) for width in widths)
    chunks, rest = divmod(num_tokens, chunk)
    head = chunks * _products(chunk, model.hidden, model.vocab) + (_products(rest, model.hidden, model.vocab)
                                                                  if rest else 0.0)
    return model.num_layers * layer + head


def _products(num_tokens: int, num_in: int, num_out: int) -> float:
    x, weight, dy = (torch.randn(shape, dtype=torch.bfloat16, device="cuda")
                     for shape in ((num_tokens, num_in), (num_out, num_in), (num_tokens, num_out)))
    times = 8  # in a row, so that the clock is that of a GPU at work

    def run() -> None:
        for _ in range(times):
            torch.mm(x, weight.T)
            torch.mm(dy, weight)
            torch.mm(dy.T, x)

    return timed(run, repeats=3) / times


def attention(model: ModelShape, lengths: list[int]) -> float:
    """Seconds of every attention call of a step, forward and backward."""
    device, num = torch.device("cuda", 0), sum(lengths)
    kernel = choose(device, torch.bfloat16, model.head_dim)
    rows = kernel.prepare(TaskRows.documents(lengths), device)
    q, dout = (torch.randn(num, model.num_heads, model.head_dim, dtype=torch.bfloat16, device=device) for _ in range(2))
    k, v = (torch.randn(num, model.num_kv_heads, model.head_dim, dtype=torch.bfloat16, device=device) for _ in range(2))
    out, lse = kernel.forward(q, k, v, rows)

    def run() -> None:
        for _ in range(model.num_layers):
            kernel.forward(q, k, v, rows)
            kernel.backward(BackwardInputs(dout, q, k, v, out, lse), rows)

    return timed(run)


def measure(gpu: OneGpu, way: str, steps: int, alone: float, peak: float, others: bool) -> Result:
    gpu.choose(**WAYS[way])  # type: ignore[arg-type]
    torch.cuda.reset_peak_memory_stats()
    batch = gpu.batch(LENGTHS)
    first, _ = gpu.step(batch)
    gpu.step(gpu.batch(LENGTHS, seed=1))
    records = [gpu.step(batch) for _ in range(steps)]
    seconds, memory = median(second for second, _ in records), torch.cuda.max_memory_allocated()
    graphs = counters["stats"]["unique_graphs"]
    for number, lengths in enumerate(OTHERS if others else []):
        gpu.step(gpu.batch(lengths, seed=number))
    return Result(
        vocab=gpu.model.vocab, way=way, step_seconds=seconds, tokens_per_second=sum(LENGTHS) / seconds,
        model_flops_utilization=model_flops(gpu.model, LENGTHS) / seconds / peak, alone_over_step=alone / seconds,
        memory_bytes=memory, first_step_seconds=first, losses=[loss for _, loss in records],
        graphs_after_warm_up=counters["stats"]["unique_graphs"] - graphs)


def profile(gpu: OneGpu, way: str, folder: Path) -> None:
    """A table of the kernels of a step, as it was measured last, by their time on the GPU."""
    batch = gpu.batch(LENGTHS)
    gpu.step(batch)
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as seen:
        gpu.step(batch)
    table = seen.key_averages().table(sort_by="self_cuda_time_total", row_limit=60, max_name_column_width=110)
    (folder / f"profile_{way.replace(', ', '_').replace(' ', '_')}.txt").write_text(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocab", type=int, nargs="+", default=[32_000, 128_256])
    parser.add_argument("--steps", type=int, default=8, help="timed steps of each way")
    parser.add_argument("--chunk", type=int, default=4096, help="optimizer.loss_chunk_tokens")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS)[:3])
    parser.add_argument("--profile", type=Path, help="also write tables of the kernels into this folder")
    parser.add_argument("--output", type=Path, default=RESULTS / "train_gpu.json")
    arguments = parser.parse_args()
    began, console = time.perf_counter(), Console(width=150)
    name = torch.cuda.get_device_name()
    peak, results, alone = PEAK_FLOPS.get(name, float("nan")), [], []
    for vocab in arguments.vocab:
        model = replace(model_named("llama3-8b"), num_layers=arguments.layers, vocab=vocab)
        alone.append(Alone.measured(model, arguments.chunk))
        console.print(f"{alone[-1]} ({time.perf_counter() - began:.0f} s)")
        gpu = OneGpu(model, arguments.chunk)
        for way in arguments.ways:
            results.append(measure(gpu, way, arguments.steps, alone[-1].seconds, peak, others="compiled" in way))
            console.print(f"{results[-1]} ({time.perf_counter() - began:.0f} s)")
            if arguments.profile:
                profile(gpu, way, arguments.profile)
        del gpu
        gc.collect()
        torch.cuda.empty_cache()
    table = Table("vocabulary", "way", "s a step", "tokens/s", "MFU", "alone / step", "GiB", "new graphs",
                  "first step s",
                  title=f"{arguments.layers} layers of llama3-8b, {sum(LENGTHS):,} packed tokens, {name}")
    for row in results:
        table.add_row(f"{row.vocab:,}", row.way, f"{row.step_seconds:.3f}", f"{row.tokens_per_second:,.0f}",
                      f"{row.model_flops_utilization:.1%}", f"{row.alone_over_step:.1%}",
                      f"{row.memory_bytes / 2**30:.1f}", str(row.graphs_after_warm_up),
                      f"{row.first_step_seconds:.1f}")
    console.print(table)
    options = {name: getattr(arguments, name) for name in ("layers", "vocab", "steps", "chunk")}
    write_json(arguments.output, {
        "host": host_facts(device=name, **versions()), "options": options | {"lengths": LENGTHS, "others": OTHERS},
        "alone": alone, "rows": results})


if __name__ == "__main__":
    main()
