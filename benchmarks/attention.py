"""How fast is each attention kernel on the batches that servers see? One row per batch and kernel.

TFLOP/s count 4 * pairs * heads * dim forward and 2.5 times that backward, pairs being those the causal mask leaves.
Kernels are prepared once per batch, as they are once per plan. All kernels of a batch are measured in turns, in one
run, and compared with each other's results on the same random numbers; rows hold medians. Shards of one document come
twice: with its keys stored once for all of them, as a server stores them, and with keys of their own. `dense` is
torch's own attention on the cuDNN backend, which takes one document only and is the yardstick for it.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch.nn.attention import SDPBackend, sdpa_kernel

import distca
from distca.cost.work import attention_backward_flops, attention_flops, causal_pairs
from distca.dispatch.build import build
from distca.kernels import TaskRows, choose, kernel_named
from distca.planning.greedy import balance
from distca.profiling import samples, versions
from distca.spec import ModelShape, model_named
from distca.workload.documents import sample_lengths
from distca.workload.packing import pack

RESULTS = Path(__file__).parent / "results"
GPU_KERNELS, CPU_KERNELS = ("varlen", "cudnn", "auto"), ("sdpa", "auto")
ROUNDS = 2
CPU_SHRINK = 32  # batches are this much smaller on a CPU
POOL_RANKS, POOL_TOKENS = 64, 65_536


@dataclass(frozen=True, slots=True)
class Batch:
    """Task rows and the buffers they stand in."""

    name: str
    rows: TaskRows
    num_q: int
    num_k: int

    @property
    def pairs(self) -> int:
        rows = self.rows
        return int(causal_pairs(rows.q_offset, rows.q_offset + rows.q_len, 0, rows.k_len).sum())


@dataclass(frozen=True, slots=True)
class Result:
    """One kernel on one batch."""

    batch: str
    kernel: str         # as asked for
    runs: str           # as chosen
    rows: int
    pairs: int
    forward_seconds: float
    backward_seconds: float
    forward_tflops: float
    backward_tflops: float
    spread: float       # slowest sample over fastest, the worse of forward and backward
    difference: float   # largest relative difference of out and gradients from the batch's first kernel


def batches(shrink: int) -> Iterator[Batch]:
    for count, length in ((1, 32_768), (4, 8_192), (32, 1_024)):
        yield documents(count, length // shrink)
    for count, q_len in ((64, 128), (64, 512), (8, 4_096)):
        for shared in (True, False):
            yield shards(count, q_len // shrink, 16_384 // shrink, shared)
    yield mixed(shrink)


def documents(count: int, length: int) -> Batch:
    return Batch(f"{count} of {length}", TaskRows.documents([length] * count), count * length, count * length)


def shards(count: int, q_len: int, kv_len: int, shared: bool) -> Batch:
    """Shards of q_len queries at the end of kv_len keys: all of the same keys, or each of its own."""
    shard = np.arange(count)
    k_begin = shard * 0 if shared else shard * kv_len
    rows = TaskRows.aligned(shard * q_len, (shard + 1) * q_len, k_begin, k_begin + kv_len)
    keys = "shared" if shared else "own"
    return Batch(f"{count} x q={q_len} kv={kv_len}, {keys} keys", rows, count * q_len, int(rows.k_end.max()))


def mixed(shrink: int) -> Batch:
    """What the median server of a planned pool computes."""
    tokens = POOL_TOKENS // shrink
    longest = None if shrink == 1 else tokens
    lengths = sample_lengths("prolong", POOL_RANKS * tokens, seed=0, max_document=longest)
    plan = balance(pack(lengths, ranks=POOL_RANKS), model_named("llama3-8b"), tolerance=0.05)
    moved = np.bincount(plan.tasks.server, weights=plan.tasks.home != plan.tasks.server, minlength=POOL_RANKS)
    busy = np.lexsort((plan.work(), moved))
    tables = build(plan, int(busy[POOL_RANKS // 2]))
    rows = TaskRows(tables.q_begin, tables.q_end, tables.k_begin, tables.k_end, tables.q_offset)
    return Batch(f"mixed: {len(rows)} tasks of a plan", rows, tables.queries.buffer_tokens, tables.keys.buffer_tokens)


class Inputs:
    """Random q, k, v and dout of one batch, and what the first kernel made of them."""

    def __init__(self, batch: Batch, model: ModelShape, device: torch.device, dtype: torch.dtype) -> None:
        q_shape = (batch.num_q, model.num_heads, model.head_dim)
        k_shape = (batch.num_k, model.num_kv_heads, model.head_dim)
        self.q, self.k, self.v, self.dout = (torch.randn(shape, device=device, dtype=dtype)
                                             for shape in (q_shape, k_shape, k_shape, q_shape))
        self.expected: list[torch.Tensor] = []

    def difference(self, actual: list[torch.Tensor]) -> float:
        if not self.expected:
            self.expected = actual
        worst = 0.0
        for a, e in zip(actual, self.expected, strict=True):
            worst = max(worst, float((a - e).norm(dtype=torch.float32) / e.norm(dtype=torch.float32)))
        return worst


Runs = tuple[Callable[[], object], Callable[[], object], list[torch.Tensor], str]  # forward, backward, results, kernel


def kernel_runs(name: str, batch: Batch, inputs: Inputs) -> Runs:
    q, k, v, dout = inputs.q, inputs.k, inputs.v, inputs.dout
    kernel = choose(q.device, q.dtype, q.shape[-1], name=name)
    prepared = kernel.prepare(batch.rows, q.device)
    out, lse = kernel.forward(q, k, v, prepared)
    gradients = kernel.backward(dout, q, k, v, out, lse, prepared)
    return (lambda: kernel.forward(q, k, v, prepared), lambda: kernel.backward(dout, q, k, v, out, lse, prepared),
            [out, *gradients], kernel.name)


def dense_runs(inputs: Inputs, backend: SDPBackend) -> Runs:
    """torch's attention on a single document, every query head with keys of its own; backward without the forward."""
    group = inputs.q.shape[1] // inputs.k.shape[1]
    expanded = inputs.q, inputs.k.repeat_interleave(group, dim=1), inputs.v.repeat_interleave(group, dim=1)
    q, k, v = (x.transpose(0, 1)[None].detach().requires_grad_() for x in expanded)  # [1, heads, tokens, dim]
    dout = inputs.dout.transpose(0, 1)[None]

    def forward() -> torch.Tensor:
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    def forward_alone() -> torch.Tensor:
        with torch.no_grad():
            return forward()

    out = forward()

    def backward() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)

    out_and_dq, dk_and_dv = (out.detach(), backward()[0]), backward()[1:]
    results = [x[0].transpose(0, 1) for x in out_and_dq]
    results += [x[0].transpose(0, 1).unflatten(1, (-1, group)).sum(dim=2, dtype=torch.float32) for x in dk_and_dv]
    return forward_alone, backward, results, f"torch {backend.name.lower()}"


def measure(batch: Batch, names: list[str], model: ModelShape, device: torch.device, budget: float) -> list[Result]:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    inputs = Inputs(batch, model, device, dtype)
    contestants: dict[str, Runs] = {name: kernel_runs(name, batch, inputs) for name in names}
    if len(batch.rows) == 1:
        backend = SDPBackend.CUDNN_ATTENTION if device.type == "cuda" else SDPBackend.FLASH_ATTENTION
        contestants["dense"] = dense_runs(inputs, backend)
    times: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in contestants}
    for _ in range(ROUNDS):
        for name, (forward, backward, _, _) in contestants.items():
            times[name][0].extend(samples(forward, device, budget_seconds=budget, least=3, most=100))
            times[name][1].extend(samples(backward, device, budget_seconds=budget, least=3, most=100))
    results = []
    for name, (_, _, tensors, runs) in contestants.items():
        forward_seconds, backward_seconds = (median(seconds) for seconds in times[name])
        results.append(Result(
            batch=batch.name,
            kernel=name,
            runs=runs,
            rows=len(batch.rows),
            pairs=batch.pairs,
            forward_seconds=forward_seconds,
            backward_seconds=backward_seconds,
            forward_tflops=attention_flops(batch.pairs, model) / forward_seconds / 1e12,
            backward_tflops=attention_backward_flops(batch.pairs, model) / backward_seconds / 1e12,
            spread=max(max(seconds) / min(seconds) for seconds in times[name]),
            difference=inputs.difference(tensors),
        ))
    return results


def fitting(names: tuple[str, ...], model: ModelShape, device: torch.device, console: Console) -> list[str]:
    """The kernels that run here; says why others do not."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    fit = []
    for name in names:
        reason = None if name == "auto" else kernel_named(name).supports(device, dtype, model.head_dim, None)
        if reason is None:
            fit.append(name)
        else:
            console.print(f"without {name}: {reason}")
    return fit


def result_table(results: list[Result]) -> Table:
    table = Table(title="TFLOP/s", title_justify="left")
    for title in ("batch", "kernel", "runs", "forward", "backward", "fwd ms", "bwd ms", "spread", "difference"):
        left = title in ("batch", "kernel", "runs")
        table.add_column(title, justify="left" if left else "right", no_wrap=True)
    for row in results:
        table.add_row(row.batch, row.kernel, row.runs, f"{row.forward_tflops:.3g}", f"{row.backward_tflops:.3g}",
                      f"{row.forward_seconds * 1e3:.2f}", f"{row.backward_seconds * 1e3:.2f}", f"{row.spread:.2f}",
                      f"{row.difference:.1e}")
    return table


def host_facts(device: torch.device) -> dict[str, object]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {"device": name, "system": platform.system(), "python": platform.python_version(), **versions(),
            "distca": distca.__version__}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure attention kernels on the batches of attention servers.")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--model", default="llama3-8b")
    parser.add_argument("--shrink", type=int, help=f"divide all lengths by this; 1 on a GPU, {CPU_SHRINK} on a CPU")
    parser.add_argument("--quick", action="store_true", help="few samples")
    parser.add_argument("--output", type=Path, help="default: benchmarks/results/attention_<device>.json")
    return parser.parse_args()


def run(options: argparse.Namespace, console: Console) -> None:
    model = model_named(options.model)
    use_gpu = torch.cuda.is_available() if options.device == "auto" else options.device == "cuda"
    if use_gpu and not torch.cuda.is_available():
        raise ValueError("device is 'cuda' but torch finds no GPU; give --device cpu")
    device = torch.device("cuda" if use_gpu else "cpu")
    shrink = options.shrink or (1 if use_gpu else CPU_SHRINK)
    if not 1 <= shrink <= 64:
        raise ValueError(f"shrink is {shrink}; give 1 to 64")
    names = fitting(GPU_KERNELS if use_gpu else CPU_KERNELS, model, device, console)
    torch.manual_seed(0)
    results: list[Result] = []
    for batch in batches(shrink):
        print(f"{batch.name} ...", file=sys.stderr, flush=True)
        results += measure(batch, names, model, device, 0.02 if options.quick else 0.15)
        if use_gpu:
            torch.cuda.empty_cache()
    facts = host_facts(device)
    label = "".join(c if c.isalnum() else "_" for c in str(facts["device"]).lower())
    output = options.output or RESULTS / f"attention_{label}.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    content = {"host": facts, "settings": {"model": model.name, "shrink": shrink, "quick": options.quick},
               "rows": [asdict(result) for result in results]}
    output.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    console.print(result_table(results))
    console.print(f"Written to {output}.")


if __name__ == "__main__":
    screen = Console()
    try:
        run(arguments(), screen if screen.is_terminal else Console(width=150))
    except (ValueError, OSError) as problem:
        sys.exit(f"attention.py: error: {problem}")
