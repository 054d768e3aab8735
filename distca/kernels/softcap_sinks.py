"""Softmax beyond plain scores: softcap, which bends every score, and sinks, which take part of every probability.

Softcap c makes c * tanh(score / c) of a score, ahead of the mask, so a kernel has it or does not. A sink is one more
key of a head, with a learned score and a value of 0. That is merged like any other part of the keys, once, into a
query's attention over all of them; backward from the merged out and log-sum-exp then gives the gradients of the softmax
with sinks, since a pair's probability is exp(score - lse) and its delta rowsum(dout * out) as ever. So sinks work with
every kernel, wherever the parts were computed.
"""

from __future__ import annotations

import torch

from distca.kernels.interface import merge
from distca.validation import UserError


def capped(scores: torch.Tensor, softcap: float | None) -> torch.Tensor:
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)


def cap_slope(capped_scores: torch.Tensor, softcap: float | None) -> torch.Tensor | float:
    """How much a capped score changes with the score that it was."""
    return 1.0 if softcap is None else 1 - (capped_scores / softcap).square()


def with_sinks(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """out [tokens, heads, dim] and lse [tokens, heads] over all keys, and over sinks [heads] too."""
    return merge(out, lse, out.new_zeros(()), sinks.to(lse.dtype))


def gradient_of_sinks(dout: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """[heads], from the out and lse that with_sinks gave: a sink's probability times -delta, over all tokens."""
    probability = torch.exp(sinks.to(lse.dtype) - lse.masked_fill(lse == -torch.inf, 0.0))  # [tokens, heads]
    delta = (dout.to(lse.dtype) * out).sum(dim=-1)
    return -(probability * delta).sum(dim=0).to(sinks.dtype)


def check_sinks(sinks: torch.Tensor | None, q: torch.Tensor) -> None:
    if sinks is None:
        return
    if sinks.shape != q.shape[1:2] or not sinks.dtype.is_floating_point:
        raise UserError(f"sinks has shape {tuple(sinks.shape)} and dtype {sinks.dtype}; give one floating-point "
                        f"number for each of the {q.shape[1]} query heads")
    if sinks.device != q.device:
        raise UserError(f"sinks is on {sinks.device} and q on {q.device}; move them to one device")
