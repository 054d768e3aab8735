"""How fast is each attention kernel on the batches that servers see? One row per batch and kernel.

TFLOP/s count 4 * pairs * heads * dim forward and 2.5 times that backward, pairs being those the causal mask leaves.
Kernels are prepared once per batch, as they are once per plan. All kernels of a batch are measured in turns, in one
run, and compared with each other's results on the same random numbers; rows hold medians. On a GPU the host's own time
for a call, until it returns with the device still at work, is measured apart.

`dense` is torch's own attention on the cuDNN backend, every query head with keys of its own: the yardstick where rows
are alike and share nothing. It takes documents as they are; shards before long prefixes it computes without a mask, and
the pairs of that are counted.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
from attention_batches import Batch, batches, shard_lengths
from attention_report import BASELINE, Failure, Result, draw_shard_lengths, of_peak, result_table, saturation
from rich.console import Console
from torch.nn.attention import SDPBackend, sdpa_kernel

import distca
from distca.corpus.lengths import read_source
from distca.cost.work import attention_backward_flops, attention_flops
from distca.kernels import choose, kernel_named
from distca.kernels.interface import BackwardInputs
from distca.models import model_named
from distca.profiling.machine import samples, versions
from distca.spec import ModelShape
from distca.workload.documents import Workload

RESULTS = Path(__file__).parent / "results"
GPU_KERNELS, CPU_KERNELS = ("varlen", "fa4", "hopper", "auto", "dense"), ("sdpa", "auto", "dense")
LEAST_OVER_BASELINE = 1.5  # where a goal counts as reached
GOAL_MODEL, GOAL_DEVICE = "llama3-8b", "H200"
ROUNDS = 2
HOST_CALLS, LEAST_HOST_CALLS, HOST_BUDGET_SECONDS = 50, 5, 0.1
CPU_SHRINK = 32  # batches are this much smaller on a CPU


@dataclass(frozen=True, slots=True)
class Runs:
    """Two calls ready to be timed, and what they compute."""

    forward: Callable[[], object]
    backward: Callable[[], object]
    label: str
    pairs: int
    difference: float | None


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


def kernel_runs(name: str, batch: Batch, inputs: Inputs) -> Runs:
    q, k, v, dout = inputs.q, inputs.k, inputs.v, inputs.dout
    kernel = choose(q.device, q.dtype, q.shape[-1], name=name)
    prepared = kernel.prepare(batch.rows, q.device)
    out, lse = kernel.forward(q, k, v, prepared)
    gradients = kernel.backward(BackwardInputs(dout, q, k, v, out, lse), prepared)
    return Runs(lambda: kernel.forward(q, k, v, prepared),
                lambda: kernel.backward(BackwardInputs(dout, q, k, v, out, lse), prepared),
                kernel.name, batch.pairs, inputs.difference([out, *gradients]))


def dense_runs(batch: Batch, inputs: Inputs, backend: SDPBackend) -> Runs:
    """torch's attention, every query head with keys of its own; backward without the forward."""
    assert batch.uniform is not None
    count, q_len, kv_len = batch.uniform
    group = inputs.q.shape[1] // inputs.k.shape[1]
    causal = q_len == kv_len
    expanded = inputs.q, inputs.k.repeat_interleave(group, dim=1), inputs.v.repeat_interleave(group, dim=1), inputs.dout
    q, k, v, dout = (x.unflatten(0, (count, -1)).transpose(1, 2) for x in expanded)  # [count, heads, tokens, dim]
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))

    def forward() -> torch.Tensor:
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

    def forward_alone() -> torch.Tensor:
        with torch.no_grad():
            return forward()

    out = forward()

    def backward() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)

    label = f"torch {backend.name.lower()}"
    if not causal:
        return Runs(forward_alone, backward, f"{label}, no mask", count * q_len * kv_len, None)
    tensors = [x.transpose(1, 2).flatten(0, 1) for x in (out.detach(), *backward())]
    tensors[2:] = (x.unflatten(1, (-1, group)).sum(dim=2, dtype=torch.float32) for x in tensors[2:])
    return Runs(forward_alone, backward, label, batch.pairs, inputs.difference(tensors))


def failure(batch: Batch, kernel: str, problem: Exception) -> Failure:
    reason = str(problem).strip().split("\n")[0]
    return Failure(batch.name, kernel, f"{type(problem).__name__}: {reason}")


def contestants(batch: Batch, names: Iterable[str], inputs: Inputs) -> tuple[dict[str, Runs], list[Failure]]:
    """Every kernel that can compute the batch, after one run of it; a lost device ends it all."""
    device = inputs.q.device
    backend = SDPBackend.CUDNN_ATTENTION if device.type == "cuda" else SDPBackend.FLASH_ATTENTION
    ready: dict[str, Runs] = {}
    failures = []
    for name in names:
        if name == "dense" and batch.uniform is None:
            continue
        try:
            ready[name] = (dense_runs(batch, inputs, backend) if name == "dense" else kernel_runs(name, batch, inputs))
        except Exception as problem:  # cuDNN's have no base of their own
            failures.append(failure(batch, name, problem))
        if device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
    return ready, failures


def host_seconds(run: Callable[[], object], device: torch.device, run_seconds: float) -> float | None:
    """Median until `run` returns, calls in a row: the device is busy with those before, as it is in training."""
    if device.type != "cuda":
        return None
    seconds: list[float] = []
    torch.cuda.synchronize()
    for _ in range(min(HOST_CALLS, max(LEAST_HOST_CALLS, int(HOST_BUDGET_SECONDS / run_seconds)))):
        start = perf_counter()
        run()
        seconds.append(perf_counter() - start)
    torch.cuda.synchronize()
    return median(seconds)


def measure(
    batch: Batch, names: Iterable[str], model: ModelShape, device: torch.device, budget: float, aims: bool = False
) -> tuple[list[Result], list[Failure]]:
    """`aims` says whether the batch's goal is for this model and device."""
    inputs = Inputs(batch, model, device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    ready, failures = contestants(batch, names, inputs)
    times: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in ready}
    for _ in range(ROUNDS):
        for name, runs in list(ready.items()):
            try:
                times[name][0].extend(samples(runs.forward, device, budget_seconds=budget, least=3, most=100))
                times[name][1].extend(samples(runs.backward, device, budget_seconds=budget, least=3, most=100))
            except torch.OutOfMemoryError as problem:  # with the others' results in memory
                failures.append(failure(batch, name, problem))
                del ready[name]
    rates = {
        name: (float(attention_flops(runs.pairs, model)) / median(times[name][0]) / 1e12,
               float(attention_backward_flops(runs.pairs, model)) / median(times[name][1]) / 1e12)
        for name, runs in ready.items()}
    results = []
    for name, runs in ready.items():
        goal = batch.goal if aims and name != "dense" else None
        ratio = [rates[name][way] / rates[BASELINE][way] if BASELINE in rates else None for way in (0, 1)]
        reached = [None if goal is None else rates[name][way] >= goal[way]
                   and (over is None or over >= LEAST_OVER_BASELINE) for way, over in enumerate(ratio)]
        results.append(Result(
            batch=batch.name,
            kernel=name,
            runs=runs.label,
            rows=len(batch.rows),
            pairs=runs.pairs,
            forward_seconds=median(times[name][0]),
            backward_seconds=median(times[name][1]),
            forward_tflops=rates[name][0],
            backward_tflops=rates[name][1],
            forward_over_varlen=ratio[0],
            backward_over_varlen=ratio[1],
            forward_goal=goal and goal[0],
            backward_goal=goal and goal[1],
            forward_reached=reached[0],
            backward_reached=reached[1],
            forward_host_seconds=host_seconds(runs.forward, device, median(times[name][0])),
            backward_host_seconds=host_seconds(runs.backward, device, median(times[name][1])),
            spread=max(max(seconds) / min(seconds) for seconds in times[name]),
            difference=runs.difference,
        ))
    return results, failures


def fitting(names: Iterable[str], model: ModelShape, device: torch.device, console: Console) -> list[str]:
    """The kernels that run here; says why others do not."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    fit = []
    for name in names:
        reason = None if name in ("auto", "dense") else kernel_named(name).supports(device, dtype, model.head_dim)
        if reason is None:
            fit.append(name)
        else:
            console.print(f"without {name}: {reason}")
    if not fit:
        raise ValueError(f"kernels is {', '.join(names)}, of which none runs on {device}; give others")
    return fit


def host_facts(device: torch.device) -> dict[str, object]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {"device": name, "system": platform.system(), "python": platform.python_version(), **versions(),
            "distca": distca.__version__}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure attention kernels on the batches of attention servers.")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--model", default="llama3-8b")
    parser.add_argument("--kernels", help=f"names with commas; default {','.join(GPU_KERNELS)} on a GPU")
    parser.add_argument("--only", default="", metavar="TEXT", help="only batches whose name holds this")
    parser.add_argument("--workload", type=Path, help="plan the pool of this workload file instead of a sampled one")
    parser.add_argument("--shard-lengths", action="store_true",
                        help="instead: shards of 16 to 4096 queries with 16K keys of their own, and a plot of them")
    parser.add_argument("--shrink", type=int, help=f"divide all lengths by this; 1 on a GPU, {CPU_SHRINK} on a CPU")
    parser.add_argument("--quick", action="store_true", help="few samples")
    parser.add_argument("--deterministic", action="store_true", help="gradients with the same bits in every run")
    parser.add_argument("--output", type=Path, help="default: benchmarks/results/attention_<device>.json, or "
                        "attention_shards_<device>.json; with --only or --kernels none is written unless named here")
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
    asked = options.kernels.split(",") if options.kernels else GPU_KERNELS if use_gpu else CPU_KERNELS
    if options.shard_lengths and not options.kernels:
        asked = [name for name in asked if name not in ("auto", "dense")]
    names = fitting(asked, model, device, console)
    workload = workload_file(options.workload) if options.workload else None
    facts = host_facts(device)
    label = "".join(c if c.isalnum() else "_" for c in str(facts["device"]).lower())
    output = options.output
    if output is None and not options.only and not options.kernels:
        output = RESULTS / f"attention_{'shards_' if options.shard_lengths else ''}{label}.json"
    content = {"host": facts, "settings": {"model": model.name, "shrink": shrink, "quick": options.quick,
                                           "deterministic": options.deterministic,
                                           "workload": workload.name if workload else "sampled"}}
    aims = shrink == 1 and model.name == GOAL_MODEL and GOAL_DEVICE in str(facts["device"])
    torch.use_deterministic_algorithms(options.deterministic)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # costs time, no result
    torch.manual_seed(0)
    results: list[Result] = []
    failures: list[Failure] = []
    lengths: dict[str, tuple[int, int]] = {}
    for batch in shard_lengths(shrink) if options.shard_lengths else batches(shrink, workload):
        if options.only not in batch.name:
            continue
        print(f"{batch.name} ...", file=sys.stderr, flush=True)
        measured, failed = measure(batch, names, model, device, 0.02 if options.quick else 0.15, aims)
        for lost in failed:
            console.print(f"{lost.kernel} does not compute {lost.batch}: {lost.reason}")
        results, failures = results + measured, failures + failed
        lengths[batch.name] = int(batch.rows.q_len[0]), int(batch.rows.k_len[0])
        if use_gpu:
            torch.cuda.empty_cache()
        if output is not None:  # after every batch: what was measured stays, whatever happens to the next
            rows = of_peak(results, lengths) if options.shard_lengths else [asdict(result) for result in results]
            text = json.dumps({**content, "rows": rows, "failures": [asdict(f) for f in failures]}, indent=1)
            output.parent.mkdir(parents=True, exist_ok=True)
            output.write_text(text + "\n", encoding="utf-8")
    if not results:
        raise ValueError(f"only is {options.only!r} and nothing was measured; leave it out to see all batches")
    console.print(result_table(results))
    if options.shard_lengths:
        console.print(*saturation(of_peak(results, lengths)), sep="\n")
    if output is not None:
        console.print(f"Written to {output}.")
        if options.shard_lengths:
            console.print(draw_shard_lengths(output))


def workload_file(path: Path) -> Workload:
    workload = read_source(path)
    if not isinstance(workload, Workload):
        raise ValueError(f"{path}: a list of lengths; give a workload file with ranks and sequences")
    return workload


if __name__ == "__main__":
    screen = Console()
    try:
        run(arguments(), screen if screen.is_terminal else Console(width=220))
    except (ValueError, OSError) as problem:
        sys.exit(f"attention.py: error: {problem}")
