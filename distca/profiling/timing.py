"""Seconds of calls, by device events on CUDA and by the host's clock on a CPU.

A GPU at its power limit lowers its clock within some milliseconds and by up to a sixth, and more so in forward than in
backward. So short calls are repeated for as long as long ones take, and forward and backward take turns, as they do in
training.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter

import torch

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
