"""Time what surrounds attention, a layer's matrix products and copies in the device, and say which machine it is.

Seconds of calls, by device events on CUDA and by the host's clock on a CPU.

A GPU at its power limit lowers its clock within some milliseconds and by up to a sixth, and more so in forward than in
backward. So short calls are repeated for as long as long ones take, and forward and backward take turns, as they do in
training.
"""

from __future__ import annotations

import importlib.metadata
import math
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from distca.cost.work import linear_flops

if TYPE_CHECKING:
    from distca.profiling import ProfileSettings


def linear_layers(chosen: ProfileSettings) -> dict[str, float]:
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


def copy_rate(chosen: ProfileSettings) -> float:
    """Bytes read plus bytes written per second by a large copy inside the device."""
    source = torch.randint(0, 256, (chosen.limits.copy_bytes,), dtype=torch.uint8, device=chosen.device)
    target = torch.empty_like(source)
    return 2 * source.numel() / _median(chosen, lambda: target.copy_(source))


def _median(chosen: ProfileSettings, run: Run) -> float:
    return median(samples(run, chosen.device, budget_seconds=chosen.limits.budget_seconds, most=chosen.most_samples))


def facts(chosen: ProfileSettings) -> dict[str, Any]:
    """What a table has to say about where it was measured, and of what."""
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
    for package in ("distca", "triton"):
        try:
            known[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            known[package] = None
    return {name: version for name, version in known.items() if version is not None}


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "CPU")


QUEUED = 30
SLEEP_CYCLES = 10_000_000  # milliseconds, in which the host queues all of them

Run = Callable[[], object]


def samples(
    run: Run, device: torch.device, *, budget_seconds: float, least: int = 1, most: int = 30
) -> list[float]:
    """Seconds of `run`, timed after a warm-up as often as the budget allows."""
    return in_turns([run], device, budget_seconds=budget_seconds, least=least, most=most)[0]


def in_turns(
    runs: Sequence[Run], device: torch.device, *, budget_seconds: float, least: int = 1, most: int = 30
) -> list[list[float]]:
    """Seconds of each, one after another as often as the budget allows for all of them.

    One run alone may be disturbed, by memory allocated late for example, so the better of two says how many fit.
    """
    time = _on_cuda if device.type == "cuda" else _on_host
    for run in runs:
        run()
    first = [min(pair) for pair in zip(*((one[0] for one in time(runs, 1)) for _ in range(2)), strict=True)]
    if sum(first) > budget_seconds and least == 1:
        return [[one] for one in first]
    return time(runs, min(most, max(least, int(budget_seconds / max(sum(first), 1e-9)))))


def queued_samples(run: Run) -> list[float]:
    """Seconds on the device alone of calls that are shorter than launching them."""
    run()
    torch.cuda._sleep(SLEEP_CYCLES)
    return _events([run], QUEUED)[0]


def _on_host(runs: Sequence[Run], count: int) -> list[list[float]]:
    seconds: list[list[float]] = [[] for _ in runs]
    for _ in range(count):
        for run, found in zip(runs, seconds, strict=True):
            begin = perf_counter()
            run()
            found.append(perf_counter() - begin)
    return seconds


def _on_cuda(runs: Sequence[Run], count: int) -> list[list[float]]:
    torch.cuda.synchronize()
    return _events(runs, count)


def _events(runs: Sequence[Run], count: int) -> list[list[float]]:
    pairs = [[tuple(torch.cuda.Event(enable_timing=True) for _ in range(2)) for _ in runs] for _ in range(count)]
    for events in pairs:
        for run, (begin, end) in zip(runs, events, strict=True):
            begin.record()
            run()
            end.record()
    torch.cuda.synchronize()
    return [[begin.elapsed_time(end) / 1e3 for begin, end in column] for column in zip(*pairs, strict=True)]
