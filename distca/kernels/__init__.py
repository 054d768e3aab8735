"""Attention kernels behind one interface, and the choice among them.

`choose` takes "auto", which is the kernel that was measured fastest on this kind of device (ranking.py) among those
that fit, and says so once; or a kernel's name, which fits or is refused with the reason: nothing falls back in silence.
"""

from __future__ import annotations

import logging

import torch

from distca.kernels.dense import DenseKernel, dense_attention
from distca.kernels.flash import Fa4Kernel, VarlenKernel
from distca.kernels.hopper.kernel import HopperKernel
from distca.kernels.interface import Kernel, Scores, TaskRows, merge
from distca.kernels.ranking import fastest_first
from distca.kernels.sdpa import SdpaKernel
from distca.validation import UserError

__all__ = ["Kernel", "Scores", "TaskRows", "choose", "dense_attention", "kernel_named", "merge"]

_KERNELS: tuple[Kernel, ...] = (HopperKernel(), Fa4Kernel(), VarlenKernel(), SdpaKernel(), DenseKernel())
_announced: set[str] = set()


def kernel_named(name: str) -> Kernel:
    """The kernel of this name, whether or not it fits this machine."""
    for kernel in _KERNELS:
        if kernel.name == name:
            return kernel
    names = ", ".join(kernel.name for kernel in _KERNELS)
    raise UserError(f"kernel={name!r} is unknown; give auto or one of {names}")


def choose(
    device: torch.device | str, dtype: torch.dtype, head_dim: int, window: int | None = None, name: str = "auto",
    value_dim: int | None = None, softcap: float | None = None,
) -> Kernel:
    """The kernel of this name, or with "auto" the fastest, that fits these tensors."""
    device, scores = torch.device(device), Scores(window=window, softcap=softcap)
    if name != "auto":
        kernel = kernel_named(name)
        reason = kernel.supports(device, dtype, head_dim, scores, value_dim)
        if reason is not None:
            raise UserError(f"kernel={name!r} cannot run here: {reason}; or give kernel='auto'")
        return kernel
    refused: list[str] = []
    for kernel in fastest_first(_KERNELS, device, dtype, head_dim, scores.window):
        reason = kernel.supports(device, dtype, head_dim, scores, value_dim)
        if reason is None:
            _announce(kernel, device, dtype, head_dim, scores, refused)
            return kernel
        refused.append(f"{kernel.name}: {reason}")
    raise UserError(f"no kernel takes {dtype} on {device}: {' | '.join(refused)}")


def _announce(
    kernel: Kernel, device: torch.device, dtype: torch.dtype, head_dim: int, scores: Scores, refused: list[str]
) -> None:
    cap = "" if scores.softcap is None else f", softcap {scores.softcap}"
    what = (f"attention kernel {kernel.name} for {dtype}, head_dim {head_dim}, window {scores.window}{cap} on "
            f"{device.type}")
    if what not in _announced:
        _announced.add(what)
        instead = f" (not {'; not '.join(refused)})" if refused else ""
        logging.getLogger("distca").info("%s%s", what, instead)
