"""FlashAttention-4 from the flash-attn-4 package: for what the own kernel does not do, Blackwell and softcaps.

Its calls are those of the packed FlashAttention before it. A call is compiled at its first use, in seconds, once for a
head dim, a group size, a kind of mask and a softcap. Ampere has no backward there.
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from typing import Any

import torch

from distca.kernels.interface import BackwardInputs, one_dim_only
from distca.kernels.packed_flash import UNBOUNDED, PackedCall, PackedFlash

PACKAGE = "flash_attn.cute"
WIDEST = {9: 256, 10: 128, 11: 128, 12: 128}                     # head dim by compute capability
ALSO = {10: (256,), 11: (256,)}


@dataclass(frozen=True)
class Fa4Kernel(PackedFlash):
    """The CuTe kernels of flash-attn-4."""

    name: str = "fa4"
    softcap: float | None = None

    def supports(
        self, device: torch.device, dtype: torch.dtype, head_dim: int, window: int | None, value_dim: int | None = None
    ) -> str | None:
        if device.type != "cuda" or torch.version.hip is not None:
            return f"device is {device}; FlashAttention-4 needs an NVIDIA GPU (device cuda)"
        major, minor = torch.cuda.get_device_capability(device)
        if major not in WIDEST:
            return (f"{torch.cuda.get_device_name(device)} is compute capability {major}.{minor}; FlashAttention-4's "
                    f"backward needs {', '.join(map(str, WIDEST))}")
        if dtype not in (torch.bfloat16, torch.float16):
            return f"dtype is {dtype}; give bfloat16 or float16"
        if (reason := one_dim_only(head_dim, value_dim)) is not None:
            return reason
        if head_dim % 8 or (head_dim > WIDEST[major] and head_dim not in ALSO.get(major, ())):
            also = "".join(f" or {dim}" for dim in ALSO.get(major, ()))
            return f"head_dim is {head_dim}; give a multiple of 8 up to {WIDEST[major]}{also}"
        if self.softcap is not None and (major == 12 or (major != 9 and head_dim == 256)):
            return (f"softcap is {self.softcap}, for which FlashAttention-4 has no backward with head_dim {head_dim} "
                    f"on compute capability {major}; use kernel='sdpa'")
        if not is_installed():
            return "flash-attn-4 is not installed; pip install --pre flash-attn-4"
        if major == 12 and torch.are_deterministic_algorithms_enabled():
            return "deterministic algorithms are on, which FlashAttention-4 does not have for compute capability 12"
        return None

    def call_forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: PackedCall, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            out, lse, *_ = _interface()._flash_attn_fwd(
                q, k, v, cu_seqlens_q=call.q_ends, cu_seqlens_k=call.k_begin, seqused_k=call.k_len, return_lse=True,
                softmax_scale=scale, softcap=self.softcap, **_mask_and_sizes(call)
            )
        return out, lse.T.contiguous()

    def call_backward(
        self, inputs: BackwardInputs, call: PackedCall, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        dout, q, k, v, out, lse = inputs
        dq, dk, dv, *_ = _interface()._flash_attn_bwd(
            q, k, v, out, dout, lse.T.contiguous(), softmax_scale=scale, softcap=self.softcap or 0.0,
            cu_seqlens_q=call.q_ends,
            cu_seqlens_k=call.k_ends, deterministic=torch.are_deterministic_algorithms_enabled(),
            **_mask_and_sizes(call)
        )
        return dq, dk, dv


def is_installed() -> bool:
    try:
        return importlib.util.find_spec(PACKAGE) is not None
    except ModuleNotFoundError:                                  # a package above it is not there
        return False


def _interface() -> Any:
    return importlib.import_module(f"{PACKAGE}.interface")


def _mask_and_sizes(call: PackedCall) -> dict[str, Any]:
    return {
        "causal": call.causal,
        "window_size_left": None if call.window_left == UNBOUNDED else call.window_left,
        "window_size_right": 0 if call.causal else None,
        "max_seqlen_q": call.max_q_len,
        "max_seqlen_k": call.max_k_len,
    }
