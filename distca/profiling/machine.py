"""Time calls by device events on CUDA and by the host's clock on a CPU, and name the CPU and package versions.

A GPU at its power limit lowers its clock within some milliseconds and by up to a sixth, more in forward than in
backward. So short calls are repeated for as long as long ones take, and forward and backward alternate, as in training.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter

import torch

QUEUED = 30
SLEEP_CYCLES = 10_000_000  # some milliseconds, in which the host queues all calls

Run = Callable[[], object]


def versions() -> dict[str, str]:
    """Versions of the packages that determine how fast attention runs here."""
    known = {"torch": torch.__version__, "cuda": torch.version.cuda}
    if torch.cuda.is_available():
        known["cudnn"] = str(torch.backends.cudnn.version())
    for package in ("distca", "triton"):
        try:
            known[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            known[package] = None
    return {name: version for name, version in known.items() if version is not None}


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "CPU")


def samples(
    run: Run, device: torch.device, *, budget_seconds: float, least: int = 1, most: int = 30
) -> list[float]:
    """Return as many samples of a run's seconds, after a warm-up, as the budget allows."""
    return in_turns([run], device, budget_seconds=budget_seconds, least=least, most=most)[0]


def in_turns(
    runs: Sequence[Run], device: torch.device, *, budget_seconds: float, least: int = 1, most: int = 30
) -> list[list[float]]:
    """Return samples of the seconds of runs that alternate, as many as the budget allows for all of them together.

    Two first rounds are timed, and the faster time of each run decides how many fit: a first call may be slow, for
    example because it allocates memory.
    """
    time = _on_cuda if device.type == "cuda" else _on_host
    for run in runs:
        run()
    first = [min(pair) for pair in zip(*((one[0] for one in time(runs, 1)) for _ in range(2)), strict=True)]
    if sum(first) > budget_seconds and least == 1:
        return [[one] for one in first]
    return time(runs, min(most, max(least, int(budget_seconds / max(sum(first), 1e-9)))))


def queued_samples(run: Run) -> list[float]:
    """Return device seconds of a call that is shorter than its launch: calls are queued while the device sleeps."""
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
