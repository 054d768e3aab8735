"""Measure this machine's attention, linear layers and network, so that plans and predictions count its own seconds.

Attention is timed over a grid of (q_len, kv_len), queries at the end of their keys, forward and backward apart. One
short shard alone leaves most of a GPU idle, while a server computes the many shards of its batch in one call. So a grid
point is several identical shards, each with keys of its own, in one call, enough to fill the device, and the time is
divided by their number. Beyond MAX_Q_LEN queries throughput no longer changes and the table charges its peak.

Times are medians after a warm-up: by device events on CUDA, by the host's clock on a CPU.
"""

from __future__ import annotations

import importlib.metadata
import math
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch

from distca.cost.latency_table import LatencyTable, peak_rate
from distca.cost.work import attention_backward_flops, attention_flops, linear_flops, pairs_of_shard
from distca.kernels import Kernel, TaskRows, choose
from distca.spec import ModelShape, model_named

MIN_LEN = 128
MAX_Q_LEN = 2**16  # longer shards run at the rate of these
DEVICES = ("auto", "cpu", "cuda")


@dataclass(frozen=True, slots=True)
class Limits:
    """What is worth measuring on one kind of device."""

    max_kv_len: int       # unless the user says
    num_tiles: int        # tiles of 128 queries, over all heads, that fill the device in a batch of shards
    num_pairs: int        # per call, so that launching it costs little beside it
    most_q_tokens: int    # per batch of shards, as many as a server holds
    most_kv_tokens: int
    budget_seconds: float  # for the samples of one measurement
    linear_tokens: int
    copy_bytes: int


CPU = Limits(2_048, 1, 2**16, 4_096, 8_192, 0.1, 256, 2**26)
CUDA = Limits(524_288, 1_024, 2**26, 65_536, 2**20, 0.15, 8_192, 2**30)


@dataclass(frozen=True, slots=True)
class Settings:
    """One profile's subject."""

    device: torch.device
    dtype: torch.dtype
    model: ModelShape
    tp: int
    kernel: Kernel
    q_len: tuple[int, ...]
    kv_len: tuple[int, ...]
    limits: Limits
    most_samples: int

    @property
    def grid(self) -> list[tuple[int, int]]:
        return [(q, kv) for kv in self.kv_len for q in self.q_len if q <= kv]


def settings(
    device: str = "auto",
    model: str = "llama3-8b",
    tp: int = 1,
    kernel: str = "auto",
    max_kv_len: int | None = None,
    quick: bool = False,
) -> Settings:
    """Check what the user asks for; `quick` takes every second length and few samples."""
    if device not in DEVICES:
        raise ValueError(f"device is {device!r}; choose one of: {', '.join(DEVICES)}")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device is 'cuda' but torch finds no GPU; give --device cpu, or install torch with CUDA")
    use_gpu = torch.cuda.is_available() if device == "auto" else device == "cuda"
    limits = CUDA if use_gpu else CPU
    where = torch.device("cuda", torch.cuda.current_device()) if use_gpu else torch.device("cpu")
    dtype = torch.bfloat16 if use_gpu else torch.float32
    longest = limits.max_kv_len if max_kv_len is None else max_kv_len
    if longest < 2 * MIN_LEN:
        raise ValueError(f"max_kv_len is {longest}; give at least {2 * MIN_LEN} tokens")
    shape = model_named(model)
    shape.kv_heads_per_rank(tp)
    kv_len = lengths_up_to(longest, every=2 if quick else 1)
    q_len = tuple(length for length in kv_len if length <= MAX_Q_LEN)
    chosen = choose(where, dtype, shape.head_dim, name=kernel)
    return Settings(where, dtype, shape, tp, chosen, q_len, kv_len, limits, 5 if quick else 30)


def lengths_up_to(longest: int, every: int = 1) -> tuple[int, ...]:
    """Powers of two from 128 on, and the longest itself."""
    octaves = range(0, max(1, math.ceil(math.log2(longest / MIN_LEN))), every)
    return (*(MIN_LEN << octave for octave in octaves), longest)


def num_steps(chosen: Settings) -> int:
    """How often `profile` reports progress."""
    return len(chosen.grid) + 2


def profile(
    chosen: Settings, step: Callable[[str], None], network: dict[str, object] | None = None
) -> LatencyTable:
    """The latency table of this machine; `step` hears what comes next."""
    tensors = _Tensors.random(chosen)
    forward = np.full((len(chosen.q_len), len(chosen.kv_len)), np.nan)
    backward = forward.copy()
    for q_len, kv_len in chosen.grid:
        step(f"attention {q_len} x {kv_len}")
        at = chosen.q_len.index(q_len), chosen.kv_len.index(kv_len)
        forward[at], backward[at] = attention_seconds(chosen, tensors, q_len, kv_len)
    del tensors
    step("linear layers")
    linear = linear_layers(chosen)
    step("copies")
    metadata = {**_facts(chosen), "linear": linear, "copy_bytes_per_second": copy_rate(chosen), "network": network}
    q_grid, kv_grid = np.array(chosen.q_len), np.array(chosen.kv_len)
    return LatencyTable(
        name=f"{metadata['device']}, {chosen.model.name}" + (f", tp {chosen.tp}" if chosen.tp > 1 else ""),
        q_len=q_grid,
        kv_len=kv_grid,
        forward_seconds=forward,
        backward_seconds=backward,
        peak_pairs_per_second=peak_rate(q_grid, kv_grid, forward),
        metadata=metadata,
    )


@dataclass(frozen=True, slots=True)
class _Tensors:
    """Random inputs, as long as the longest batch; every grid point uses their beginning."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor

    @classmethod
    def random(cls, chosen: Settings) -> _Tensors:
        batches = [(q, kv, num_shards(chosen, q, kv)) for q, kv in chosen.grid]
        heads, kv_heads = chosen.model.heads_per_rank(chosen.tp), chosen.model.kv_heads_per_rank(chosen.tp)
        q_shape = (max(q * count for q, _, count in batches), heads, chosen.model.head_dim)
        k_shape = (max(kv * count for _, kv, count in batches), kv_heads, chosen.model.head_dim)
        q, k, v, dout = (torch.randn(shape, dtype=chosen.dtype, device=chosen.device)
                         for shape in (q_shape, k_shape, k_shape, q_shape))
        return cls(q, k, v, dout)


def num_shards(chosen: Settings, q_len: int, kv_len: int) -> int:
    """Shards of one grid point that fill the device, within what a server would hold."""
    limits = chosen.limits
    tiles = chosen.model.heads_per_rank(chosen.tp) * -(-q_len // MIN_LEN)
    wanted = max(-(-limits.num_tiles // tiles), -(-limits.num_pairs // pairs_of_shard(q_len, kv_len)))
    return max(1, min(wanted, limits.most_q_tokens // q_len, limits.most_kv_tokens // kv_len))


def attention_seconds(chosen: Settings, tensors: _Tensors, q_len: int, kv_len: int) -> tuple[float, float]:
    """Forward and backward seconds of one shard among as many as fill the device."""
    count = num_shards(chosen, q_len, kv_len)
    while True:
        try:
            return _seconds_of_shards(chosen, tensors, q_len, kv_len, count)
        except torch.OutOfMemoryError:
            if count == 1:
                raise ValueError(f"attention of {q_len} queries and {kv_len} keys does not fit the memory of "
                                 f"{chosen.device}; give a smaller --max-kv-len or a larger --tp") from None
        torch.cuda.empty_cache()
        count //= 2


def _seconds_of_shards(
    chosen: Settings, tensors: _Tensors, q_len: int, kv_len: int, count: int
) -> tuple[float, float]:
    shard = np.arange(count)
    rows = TaskRows.aligned(shard * q_len, (shard + 1) * q_len, shard * kv_len, (shard + 1) * kv_len)
    kernel, prepared = chosen.kernel, chosen.kernel.prepare(rows, chosen.device)
    q, dout = tensors.q[:count * q_len], tensors.dout[:count * q_len]
    k, v = tensors.k[:count * kv_len], tensors.v[:count * kv_len]
    out, lse = kernel.forward(q, k, v, prepared)
    forward = _median(chosen, lambda: kernel.forward(q, k, v, prepared))
    backward = _median(chosen, lambda: kernel.backward(dout, q, k, v, out, lse, prepared))
    return forward / count, backward / count


def describe(table: LatencyTable) -> list[str]:
    """A profile in a few lines, for people."""
    about: Any = table.metadata
    model, tp = model_named(about["model"]), about["tp"]
    lines = [f"{table.name}: {about['kernel']} in {about['dtype']}", "attention   queries x keys   forward   backward"]
    last = len(table.kv_len) - 1
    for i in sorted({0, len(table.q_len) // 2, len(table.q_len) - 1}):
        pairs = int(pairs_of_shard(int(table.q_len[i]), int(table.kv_len[last])))
        forward = attention_flops(pairs, model, tp) / table.forward_seconds[i, last]
        assert table.backward_seconds is not None
        backward = attention_backward_flops(pairs, model, tp) / table.backward_seconds[i, last]
        shape = f"{table.q_len[i]} x {table.kv_len[last]}"
        lines.append(f"{shape:>26}   {forward / 1e12:7.4g}   {backward / 1e12:8.4g} TFLOP/s")
    linear, cost = about["linear"], about["network"]
    lines.append(f"linear layers {linear['forward_flops_per_second'] / 1e12:.4g} forward, "
                 f"{linear['backward_flops_per_second'] / 1e12:.4g} backward TFLOP/s; copies "
                 f"{about['copy_bytes_per_second'] / 1e9:.4g} GB/s")
    lines.append("network not measured" if cost is None else
                 f"network {cost['bandwidth'] / 1e9:.4g} GB/s and {cost['latency_seconds'] * 1e6:.4g} µs over "
                 f"{cost['num_ranks']} ranks ({cost['backend']})")
    return lines


def linear_layers(chosen: Settings) -> dict[str, float]:
    """The matrix products of one layer: Q, K, V and output projections, gate, up and down."""
    model, tokens = chosen.model, chosen.limits.linear_tokens
    attention = model.heads_per_rank(chosen.tp) * model.head_dim
    kv = model.kv_heads_per_rank(chosen.tp) * model.head_dim
    ffn = -(-model.ffn // chosen.tp)
    widths = [(model.hidden, attention + 2 * kv), (attention, model.hidden), (model.hidden, 2 * ffn),
              (ffn, model.hidden)]

    def random(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, dtype=chosen.dtype, device=chosen.device) / math.sqrt(columns)

    products = [(random(tokens, wide), random(wide, high), random(tokens, high)) for wide, high in widths]

    def forward() -> None:
        for x, weight, _ in products:
            torch.mm(x, weight)

    def backward() -> None:
        for x, weight, gradient in products:
            torch.mm(gradient, weight.T)
            torch.mm(x.T, gradient)

    forward_seconds, backward_seconds = _median(chosen, forward), _median(chosen, backward)
    flops = float(linear_flops(tokens, model, chosen.tp))
    return {
        "tokens": tokens,
        "forward_seconds": forward_seconds,
        "backward_seconds": backward_seconds,
        "forward_flops_per_second": flops / forward_seconds,
        "backward_flops_per_second": 2 * flops / backward_seconds,
    }


def copy_rate(chosen: Settings) -> float:
    """Bytes read plus bytes written per second by a large copy inside the device."""
    source = torch.randint(0, 256, (chosen.limits.copy_bytes,), dtype=torch.uint8, device=chosen.device)
    target = torch.empty_like(source)
    return 2 * source.numel() / _median(chosen, lambda: target.copy_(source))


def _median(chosen: Settings, run: Callable[[], object]) -> float:
    return median(samples(run, chosen.device, budget_seconds=chosen.limits.budget_seconds, most=chosen.most_samples))


def samples(
    run: Callable[[], object], device: torch.device, *, budget_seconds: float, least: int = 1, most: int = 30
) -> list[float]:
    """Seconds of `run`, timed after a warm-up as often as the budget allows.

    One run alone may be disturbed, by memory allocated late for example, so the better of two says how many fit.
    """
    time = _on_cuda if device.type == "cuda" else _on_host
    run()
    first = min(time(run, 1)[0], time(run, 1)[0])
    if first > budget_seconds and least == 1:
        return [first]
    count = min(most, max(least, int(budget_seconds / max(first, 1e-9))))
    return time(run, count)


def _on_host(run: Callable[[], object], count: int) -> list[float]:
    seconds = []
    for _ in range(count):
        begin = perf_counter()
        run()
        seconds.append(perf_counter() - begin)
    return seconds


def _on_cuda(run: Callable[[], object], count: int) -> list[float]:
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)]
    torch.cuda.synchronize()
    for begin, end in events:
        begin.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) / 1e3 for begin, end in events]


def _facts(chosen: Settings) -> dict[str, Any]:
    gpu = chosen.device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(chosen.device) if gpu else _cpu_name(),
        "date": datetime.now(UTC).date().isoformat(),
        "versions": versions(),
        "kernel": chosen.kernel.name,
        "dtype": str(chosen.dtype).removeprefix("torch."),
        "model": chosen.model.name,
        "tp": chosen.tp,
        "num_heads": chosen.model.heads_per_rank(chosen.tp),
        "num_kv_heads": chosen.model.kv_heads_per_rank(chosen.tp),
        "head_dim": chosen.model.head_dim,
        "threads": None if gpu else torch.get_num_threads(),
    }


def versions() -> dict[str, str]:
    """Of whatever decides how fast attention runs here."""
    known = {"torch": torch.__version__, "cuda": torch.version.cuda}
    if torch.cuda.is_available():
        known["cudnn"] = str(torch.backends.cudnn.version())
    for package in ("distca", "nvidia-cudnn-frontend", "triton"):
        try:
            known[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            known[package] = None
    return {name: version for name, version in known.items() if version is not None}


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "CPU")
