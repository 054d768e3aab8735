"""What a rank computes of a pipeline's micro-batches: its stage's segments, and on the last stage the loss."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from distca.planning.plan import Plan
from distca.runtime import ping_pong
from distca.runtime.attention import CoreAttention
from distca.runtime.prepared import Shapes
from distca.train.batches import Batch
from distca.train.model.decoder import Decoder
from distca.train.model.loss import chunked_cross_entropy
from distca.train.model.parallel import accumulating
from distca.train.model.segment_runs import Offload

RowPlans = Sequence[Sequence[Plan]]  # [row][depth]


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
        self.first, self.last = segments[0].embed is not None, segments[-1].norm is not None
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
