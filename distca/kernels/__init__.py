"""Attention kernels behind one interface, their registry, and the choice among them.

`choose` takes "auto" or a kernel's name. "auto" picks the kernel measured fastest on this kind of device among those
that fit, and logs it once. A named kernel that does not fit is an error with the reason: there is no silent fallback. A
new kernel is a class (interface.Kernel) and an entry in KERNELS; benchmarks/kernel_ranking.py measures it. The names
can be imported without torch.
"""

from __future__ import annotations

import functools
import importlib
import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distca.validation import UserError

if TYPE_CHECKING:
    import torch

    from distca.kernels.dense import dense_attention
    from distca.kernels.interface import Kernel, Scores, TaskRows, merge

__all__ = ["KERNELS", "Kernel", "Scores", "TaskRows", "choose", "dense_attention", "kernel_named", "merge"]

KERNELS = {  # name -> class, in the order in which kernels are tried on devices that nobody measured
    "hopper": "hopper.kernel.HopperKernel",
    "fa4": "flash.Fa4Kernel",
    "varlen": "flash.VarlenKernel",
    "sdpa": "sdpa.SdpaKernel",
    "dense": "dense.DenseKernel",
}
MEASURED = Path(__file__).parent / "measured.json"
BACKWARD_FLOPS = 2.5  # relative to forward

if not TYPE_CHECKING:  # type checkers see the imports above, and unknown names as errors
    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{__name__}.{'dense' if 'dense' in name else 'interface'}"), name)


@functools.cache
def kernel_named(name: str) -> Kernel:
    """Return the kernel of this name, even if it does not fit this machine."""
    if name not in KERNELS:
        raise UserError(f"kernel={name!r} is unknown; give auto or one of {', '.join(KERNELS)}")
    module, _, kind = KERNELS[name].rpartition(".")
    kernel: Kernel = getattr(importlib.import_module(f"{__name__}.{module}"), kind)()
    return kernel


def choose(
    device: torch.device | str, dtype: torch.dtype, head_dim: int, window: int | None = None, name: str = "auto",
    value_dim: int | None = None, softcap: float | None = None,
) -> Kernel:
    """Return the named kernel, or for "auto" the fastest one that fits these tensors."""
    import torch

    from distca.kernels.interface import Scores

    device, scores = torch.device(device), Scores(window=window, softcap=softcap)
    refused: list[str] = []
    for one in fastest_first(device, dtype, head_dim, window) if name == "auto" else [name]:
        kernel = kernel_named(one)
        reason = kernel.supports(device, dtype, head_dim, scores, value_dim)
        if reason is None:
            if name == "auto":
                scored = "".join(f", {word} {value}" for word, value in (("window", window), ("softcap", softcap))
                                 if value is not None)
                shown = [reason for at, reason in enumerate(refused) if at == 0 or "install" in reason]
                instead = f" (not {'; not '.join(shown)})" if shown and device.type == "cuda" else ""
                _log_once(f"attention kernel {one} for {dtype}, head_dim {head_dim}{scored} on {device.type}", instead)
            return kernel
        if name != "auto":
            raise UserError(f"kernel={name!r} cannot run here: {reason}; or give kernel='auto'")
        refused.append(f"{one}: {reason}")
    raise UserError(f"no kernel takes {dtype} on {device}: {' | '.join(refused)}")


_announced: set[str] = set()


def _log_once(what: str, instead: str) -> None:
    if what not in _announced:
        _announced.add(what)
        logging.getLogger("distca").info("%s%s", what, instead)


@dataclass(frozen=True, slots=True)
class Speed:
    """Measured speed of one kernel on a server's bfloat16 tasks."""

    kernel: str
    head_dim: int
    windowed: bool
    forward_tflops: float
    backward_tflops: float

    @property
    def seconds(self) -> float:
        """Relative time of forward plus backward."""
        return 1 / self.forward_tflops + BACKWARD_FLOPS / self.backward_tflops


@functools.cache
def measured() -> dict[str, tuple[Speed, ...]]:
    """Return the measured speeds by device name."""
    devices = json.loads(MEASURED.read_text(encoding="utf-8"))["devices"]
    return {name: tuple(Speed(**row) for row in entry["speeds"]) for name, entry in devices.items()}


def fastest_first(device: torch.device, dtype: torch.dtype, head_dim: int, window: int | None) -> list[str]:
    """Sort kernel names by measured time on this kind of device; unmeasured kernels follow in KERNELS' order."""
    import torch

    if device.type != "cuda" or dtype != torch.bfloat16:
        return list(KERNELS)
    seconds = {speed.kernel: speed.seconds for speed in measured().get(torch.cuda.get_device_name(device), ())
               if speed.head_dim == head_dim and speed.windowed == (window is not None)}
    return sorted(KERNELS, key=lambda name: seconds.get(name, float("inf")))
