"""Rotary angles: radians per position for each dimension, with the scalings by which contexts were extended."""

from __future__ import annotations

from math import ceil, floor, log, pi

import torch

from distca.train.model.shape import DecoderShape, LinearScaling, Llama3Scaling, YarnScaling

Rotary = tuple[torch.Tensor, torch.Tensor]                       # cos, sin [tokens, dim], float32


def rotary_table(shape: DecoderShape, positions: torch.Tensor) -> Rotary:
    """cos and sin [tokens, dim] in float32, by each token's position in its own document."""
    angles = positions[:, None].float() * rotary_frequencies(shape, positions.device)  # [tokens, dim / 2]
    angles = torch.cat((angles, angles), dim=1)
    if isinstance(shape.rope_scaling, YarnScaling):
        factor = shape.rope_scaling.attention_factor
        return angles.cos() * factor, angles.sin() * factor
    return angles.cos(), angles.sin()


def rotary_frequencies(shape: DecoderShape, device: torch.device) -> torch.Tensor:
    """[dim / 2] radians per position, in float32 as models are trained with."""
    dim, scaling = shape.model.head_dim, shape.rope_scaling
    frequencies = 1.0 / shape.rope_theta ** (torch.arange(0, dim, 2, device=device).float() / dim)
    if scaling is None:
        return frequencies
    if isinstance(scaling, LinearScaling):
        return frequencies / scaling.factor
    if isinstance(scaling, Llama3Scaling):
        kept = _kept_by_llama3(frequencies, scaling)
    else:
        kept = _kept_by_yarn(dim, shape.rope_theta, scaling, device)
    return kept * frequencies + (1.0 - kept) * frequencies / scaling.factor


def _kept_by_llama3(frequencies: torch.Tensor, scaling: Llama3Scaling) -> torch.Tensor:
    """[dim / 2] 1 for a short wavelength, left as it is; 0 for one that stretches."""
    turns = scaling.original_max_positions * frequencies / (2 * pi)  # in the context it was trained with
    smooth = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return smooth.clamp(0.0, 1.0)


def _kept_by_yarn(dim: int, theta: float, scaling: YarnScaling, device: torch.device) -> torch.Tensor:
    """[dim / 2] likewise, a ramp over the dimensions between those that turn `beta_fast` and `beta_slow` times."""
    def dimension(turns: float) -> float:
        return dim * log(scaling.original_max_positions / (turns * 2 * pi)) / (2 * log(theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = floor(low), ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = (torch.arange(dim // 2, device=device).float() - low) / (high - low or 0.001)
    return 1.0 - ramp.clamp(0.0, 1.0)
