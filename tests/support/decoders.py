"""Run a decoder without plans, one row after the other, as an oracle for what runs in segments."""

from __future__ import annotations

from collections.abc import Callable

import torch

from distca.train.model.decoder import Decoder


def hidden_of(
    decoder: Decoder, tokens: torch.Tensor, positions: torch.Tensor, attend: Callable[..., torch.Tensor]
) -> torch.Tensor:
    """One row straight through a decoder, or a stage of one: tokens [tokens] -> [tokens, hidden].

    `attend` takes q, k, v, and `window` where the layer has one.
    """
    first = int(next(iter(decoder.segments.named_children()))[0])
    windows = decoder.shape.model.layer_windows[first:first + len(decoder.segments) - 1]
    rotary = decoder.rotary(positions)
    state = decoder.segments[0](tokens, rotary)
    for number, (segment, window) in enumerate(zip(list(decoder.segments)[1:], windows, strict=True), start=2):
        x, q, k, v = state
        out = attend(q, k, v) if window is None else attend(q, k, v, window=window)
        state = segment(x, out) if number == len(decoder.segments) else segment(x, out, rotary)
    return state
