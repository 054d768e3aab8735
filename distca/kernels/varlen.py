"""Packed FlashAttention-2, as torch ships it.

The operators below torch's varlen_attn are called directly, because they hand out the log-sum-exp and take the merged
one back, and because their arguments are the same from torch 2.11 on.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from distca.kernels.interface import BackwardInputs, one_dim_only
from distca.kernels.packed_flash import UNBOUNDED, PackedCall, PackedFlash


@dataclass(frozen=True)
class VarlenKernel(PackedFlash):
    """torch's packed FlashAttention-2."""

    name: str = "varlen"

    def supports(
        self, device: torch.device, dtype: torch.dtype, head_dim: int, window: int | None, value_dim: int | None = None
    ) -> str | None:
        if device.type != "cuda" or torch.version.hip is not None:
            return f"device is {device}; FlashAttention needs an NVIDIA GPU (device cuda)"
        if torch.cuda.get_device_capability(device) < (8, 0):
            return f"{torch.cuda.get_device_name(device)} is too old; FlashAttention needs compute capability 8.0"
        if dtype not in (torch.bfloat16, torch.float16):
            return f"dtype is {dtype}; give bfloat16 or float16"
        if (reason := one_dim_only(head_dim, value_dim)) is not None:
            return reason
        if head_dim % 8 or head_dim > 256:
            return f"head_dim is {head_dim}; give a multiple of 8 up to 256"
        return None

    def call_forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: PackedCall, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q,
            k,
            v,
            call.q_ends,
            call.k_begin,
            call.max_q_len,
            call.max_k_len,
            0.0,
            call.causal,
            False,
            scale=scale,
            window_size_left=call.window_left,
            window_size_right=0 if call.causal else UNBOUNDED,
            seqused_k=call.k_len,
        )
        return out, lse.T.contiguous()

    def call_backward(
        self, inputs: BackwardInputs, call: PackedCall, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        device = inputs.q.device
        return torch.ops.aten._flash_attention_backward(
            *inputs._replace(lse=inputs.lse.T.contiguous()),
            call.q_ends,
            call.k_ends,
            call.max_q_len,
            call.max_k_len,
            0.0,
            call.causal,
            torch.zeros(2, dtype=torch.uint64, device=device),  # the random state of a dropout that is not used
            torch.empty(0, device=device),
            scale=scale,
            window_size_left=call.window_left,
            window_size_right=0 if call.causal else UNBOUNDED,
        )
