"""Cut a decoder into pipeline stages where layers meet, inside the segments that join them.

A stage holds whole layers, from attention's entry to its exit. At a cut the segment that joins two layers falls into
the half that ends the earlier stage and the half that begins the later one; x travels between them:

    First or Entry   tokens or x -> x, q, k, v
    Middle           x, out -> x, q, k, v
    Exit or Last     x, out -> x or hidden

Every parameter keeps its name in the whole decoder, so that a checkpoint knows nothing of stages. `StageWork` is what a
rank then computes of a pipeline's micro-batches: its stage's segments, and on the last stage the loss.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from distca.planning.plan import Plan
from distca.runtime import ping_pong
from distca.runtime.attention import CoreAttention
from distca.runtime.prepared import Shapes
from distca.train.batches import Batch
from distca.train.model.decoder import Decoder, First, Last, Middle, Post, Pre, Segment, chunked_cross_entropy
from distca.train.model.offload import Offload
from distca.train.model.parallel import accumulating
from distca.train.model.rotary import Rotary
from distca.validation import UserError

RowPlans = Sequence[Sequence[Plan]]  # [row][depth]


class Entry(Segment):
    """Begins a stage: what precedes attention. x comes as the stage before left it, a share of the tokens where so."""

    def __init__(self, pre: Pre) -> None:
        super().__init__()
        self.pre = pre

    def compute(self, x: torch.Tensor, rotary: Rotary) -> tuple[torch.Tensor, ...]:
        return x, *self.before(x, rotary)


class Exit(Segment):
    """Ends a stage: what follows attention."""

    def __init__(self, post: Post) -> None:
        super().__init__()
        self.post = post

    def compute(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return self.after(x, out)


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
        raise UserError(f"layers is {tuple(layers)} for {num_stages} stages of model {model.name!r} with "
                        f"{model.num_layers} layers; give every stage at least one and share out all of them")
    if not 0 <= stage < num_stages:
        raise UserError(f"stage is {stage}; give one of 0 to {num_stages - 1}")
    if num_stages == 1:
        return decoder
    if decoder.shape.tied:
        raise UserError(f"model.tied is true but {num_stages} pipeline stages hold the embedding and the head apart; "
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


class StageWork:
    """A stage of the decoder on one rank, for one batch after another; `total` is the summed loss of its labels."""

    def __init__(
        self, decoder: Decoder, attention: CoreAttention, *, tensor: int, dtype: torch.dtype, device: torch.device,
        loss_chunk_tokens: int, compiled: bool = False, offload: Offload | None = None,
    ) -> None:
        self.decoder, self.attention, self.loss_chunk_tokens = decoder, attention, loss_chunk_tokens
        self.compiled, self.offload = compiled, offload
        self.device, self.tensor = device, tensor
        model, segments = decoder.shape.model, list(decoder.segments)
        self.first, self.last = isinstance(segments[0], First), isinstance(segments[-1], Last)
        self.num_layers = len(segments) - 1
        self.shapes = Shapes(model.num_heads // tensor, model.num_kv_heads // tensor, model.head_dim, dtype, device)

    def begin(self, batch: Batch) -> None:
        self.num_labels = batch.num_labels
        self.rows = [[(row.tokens.to(self.device), row.labels.to(self.device), row.positions.to(self.device))
                      for row in rows] for rows in batch.micro_batches]
        self.reads = [[row.reads for row in rows] for rows in batch.micro_batches]
        self.total = torch.zeros((), dtype=torch.float64, device=self.device)

    def activations(self, micro_batch: int) -> list[torch.Size]:
        """Under tensor parallelism a rank holds its share of the tokens, padded to whole shares."""
        hidden = self.decoder.shape.model.hidden
        return [torch.Size((-(-len(tokens) // self.tensor), hidden)) for tokens, _, _ in self.rows[micro_batch]]

    def empty(self) -> torch.Tensor:
        return torch.empty(0, dtype=self.shapes.dtype, device=self.device)

    def forward(
        self, micro_batch: int, received: Sequence[torch.Tensor], plans: RowPlans, backward_plans: RowPlans
    ) -> list[torch.Tensor]:
        rows = self.rows[micro_batch]

        def run(decoder: Decoder) -> list[torch.Tensor]:
            inputs = [(tokens,) for tokens, _, _ in rows] if self.first else [(x,) for x in received]
            rotaries = [decoder.rotary(positions) for _, _, positions in rows]
            with nullcontext() if self.offload is None else self.offload.keeping():
                states = ping_pong.forward(list(decoder.segments), inputs, rotaries, plans, self.attention,
                                           backward_plans, self.reads[micro_batch])
            return [self.loss(decoder, states, [labels for _, labels, _ in rows])] if self.last else states

        return self.decoder(run)

    def loss(self, decoder: Decoder, states: Sequence[torch.Tensor], labels: Sequence[torch.Tensor]) -> torch.Tensor:
        """This micro-batch's part of the mean over all labels of all ranks."""
        hidden, wanted = (rows[0] if len(rows) == 1 else torch.cat(list(rows)) for rows in (states, labels))
        total, _ = chunked_cross_entropy(hidden, decoder.head_weight, wanted, self.loss_chunk_tokens, self.compiled)
        self.total += total.detach()
        return total / self.num_labels

    def accumulate(self, last: bool) -> AbstractContextManager[None]:
        return accumulating(self.decoder, last=last)
