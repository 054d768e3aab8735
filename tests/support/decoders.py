"""Run a decoder without plans, one row after the other, as an oracle for what runs in segments."""

from __future__ import annotations

from collections.abc import Callable

import torch

from distca.kernels import dense_attention
from distca.train.model.decoder import Decoder

LENGTHS = [70, 1, 33, 16]    # of documents that are compared with transformers


def hidden_of(
    decoder: Decoder, tokens: torch.Tensor, positions: torch.Tensor, attend: Callable[..., torch.Tensor]
) -> torch.Tensor:
    """One row straight through a decoder, or a stage of one: tokens [tokens] -> [tokens, hidden].

    `attend` takes q, k, v, and `window` where the layer has one.
    """
    (number, first), *rest = decoder.segments.named_children()
    windows = decoder.shape.model.layer_windows[int(number):]
    rotary = decoder.rotary(positions)
    state = first(tokens, rotary)
    for (_, segment), window in zip(rest, windows, strict=False):
        x, q, k, v = state
        out = attend(q, k, v) if window is None else attend(q, k, v, window=window)
        state = segment(x, out) if segment is rest[-1][1] else segment(x, out, rotary)
    return state


def random_tokens() -> torch.Tensor:
    return torch.randint(0, 97, (sum(LENGTHS),), generator=torch.Generator().manual_seed(1))


def logits_of(decoder: Decoder, tokens: torch.Tensor) -> torch.Tensor:
    """Logits of documents of LENGTHS laid end to end."""
    positions = torch.cat([torch.arange(length) for length in LENGTHS])

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None = None) -> torch.Tensor:
        return dense_attention(q, k, v, LENGTHS, window=window)

    return hidden_of(decoder, tokens, positions, attend) @ decoder.head_weight.T
