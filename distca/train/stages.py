"""Cut a decoder into pipeline stages where layers meet, inside the segments that join them.

A stage holds whole layers, from attention's entry to its exit. At a cut the segment that joins two layers falls into
the half that ends the earlier stage and the half that begins the later one; x travels between them:

    First or Entry   tokens or x -> x, q, k, v
    Middle           x, out -> x, q, k, v
    Exit or Last     x, out -> x or hidden

Every parameter keeps its name in the whole decoder, so that a checkpoint knows nothing of stages.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from distca.train.model import Decoder, Middle, Post, Pre, Rotary, Segment


class Entry(Segment):
    """Begins a stage: what precedes attention. x comes as the stage before left it, a share of the tokens where so."""

    def __init__(self, pre: Pre) -> None:
        super().__init__()
        self.pre = pre

    def compute(self, x: torch.Tensor, rotary: Rotary) -> tuple[torch.Tensor, ...]:
        return x, *self.pre(x, rotary)


class Exit(Segment):
    """Ends a stage: what follows attention."""

    def __init__(self, post: Post) -> None:
        super().__init__()
        self.post = post

    def compute(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return self.post(x, self.pad(out))


class Segments(nn.ModuleList):
    """In order, under their numbers in the whole decoder."""

    def __init__(self, segments: Iterable[nn.Module], first: int) -> None:
        super().__init__()
        for number, segment in enumerate(segments, start=first):
            self.add_module(str(number), segment)

    def __getitem__(self, index: int | slice) -> Any:
        return list(self)[index]


def stage_of(decoder: Decoder, stage: int, num_stages: int, layers: Sequence[int]) -> Decoder:
    """The part of a whole decoder that one stage runs, with `layers[s]` layers on stage s; driven like the whole.

    Its parameters are the decoder's own. Cut first and spread over a mesh then: the whole decoder is of no use after
    that. Only the first stage takes tokens and only the last has the head; others take and give x.
    """
    model = decoder.shape.model
    if len(layers) != num_stages or min(layers) < 1 or sum(layers) != model.num_layers:
        raise ValueError(f"layers is {tuple(layers)} for {num_stages} stages of model {model.name!r} with "
                         f"{model.num_layers} layers; give every stage at least one and share out all of them")
    if not 0 <= stage < num_stages:
        raise ValueError(f"stage is {stage}; give one of 0 to {num_stages - 1}")
    if num_stages == 1:
        return decoder
    if decoder.shape.tied:
        raise ValueError(f"model.tied is true but {num_stages} pipeline stages hold the embedding and the head apart; "
                         "set model.tied = false, or use one stage")
    begin, end = sum(layers[:stage]), sum(layers[:stage + 1])
    segments = list(decoder.segments)[begin:end + 1]
    if isinstance(segments[0], Middle):
        segments[0] = Entry(segments[0].pre)
    if isinstance(segments[-1], Middle):
        segments[-1] = Exit(segments[-1].post)
    part = Decoder(decoder.shape, device="meta")                 # without memory: its own parts are not used
    part.segments = Segments(segments, first=begin)
    part.head = decoder.head if end == model.num_layers else None
    return part
