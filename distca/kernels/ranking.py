"""Which kernel is fastest where: figures measured on a device by benchmarks/kernel_ranking.py, which `auto` goes by.

A device that is not in the table gets the kernels in the order in which they are usually fastest.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from distca.kernels.interface import Kernel

MEASURED = Path(__file__).parent / "measured.json"
BACKWARD_FLOPS = 2.5  # times those of forward


@dataclass(frozen=True, slots=True)
class Speed:
    """One kernel on a server's batch of bfloat16 tasks."""

    kernel: str
    head_dim: int
    windowed: bool
    forward_tflops: float
    backward_tflops: float

    @property
    def seconds(self) -> float:
        """Of forward and backward together, in units of forward's operations."""
        return 1 / self.forward_tflops + BACKWARD_FLOPS / self.backward_tflops


@functools.cache
def measured() -> dict[str, tuple[Speed, ...]]:
    """Speeds by the name of the device."""
    devices = json.loads(MEASURED.read_text(encoding="utf-8"))["devices"]
    return {name: tuple(Speed(**row) for row in entry["speeds"]) for name, entry in devices.items()}


def fastest_first(
    kernels: Sequence[Kernel], device: torch.device, dtype: torch.dtype, head_dim: int, window: int | None
) -> list[Kernel]:
    """The kernels by what they took on this kind of device; those without a figure follow in the order given."""
    if device.type != "cuda" or dtype != torch.bfloat16:
        return list(kernels)
    speeds = {
        speed.kernel: speed.seconds
        for speed in measured().get(torch.cuda.get_device_name(device), ())
        if speed.head_dim == head_dim and speed.windowed == (window is not None)
    }
    return sorted(kernels, key=lambda kernel: speeds.get(kernel.name, float("inf")))
