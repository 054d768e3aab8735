"""Cross-entropy without the logits: 64K tokens against a vocabulary of 128K would be 32 GiB of them.

Logits exist for one chunk of tokens at a time. Forward keeps one log-sum-exp per token; backward computes each chunk's
logits again and turns them into gradients on the spot. Where tensor ranks share out the vocabulary each works on its
own part of it, and two small reductions at the end make the log-sum-exp and the labels' logits whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard

IGNORED = -100                                                   # the label of a token that has no next token


def chunked_cross_entropy(
    hidden: torch.Tensor, head_weight: torch.Tensor, labels: torch.Tensor, chunk_tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum of -log softmax(hidden · head_weightᵀ)[label] over the tokens that have a label, and how many have one.

    hidden [tokens, hidden], head_weight [vocab, hidden], labels [tokens] with -100 where there is none. The sum is
    float32 (float64 where hidden is). A head_weight whose vocabulary is sharded over tensor ranks that hold the same
    hidden gives each of them the whole sum, and the whole gradient of hidden.
    """
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens is {chunk_tokens}; give a whole number of at least 1")
    if labels.shape != hidden.shape[:1]:
        raise ValueError(f"labels have shape {tuple(labels.shape)} but hidden has {hidden.shape[0]} tokens; "
                         "give one label per token")
    vocab = head_weight.shape[0]
    wrong = ((labels < 0) & (labels != IGNORED)) | (labels >= vocab)
    if labels.device.type == "cpu" and bool(wrong.any()):
        raise ValueError(f"labels hold {int(labels[wrong][0])} but the vocabulary has {vocab} tokens; give labels "
                         f"below that, or {IGNORED} for none")
    begin, group = 0, None
    if isinstance(head_weight, DTensor):
        assert head_weight.device_mesh.ndim == 1 and head_weight.placements[0] in (Shard(0), Replicate())
        if head_weight.placements[0] == Shard(0):
            mesh = head_weight.device_mesh
            begin, group = mesh.get_local_rank() * -(-vocab // mesh.size()), mesh.get_group()
        head_weight = head_weight.to_local()
    total = _ChunkedCrossEntropy.apply(hidden, head_weight, labels, wrong, chunk_tokens, begin, group)
    return total, (labels != IGNORED).sum()


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, wrong: torch.Tensor,
        chunk_tokens: int, begin: int, group: dist.ProcessGroup | None,
    ) -> torch.Tensor:
        lse = torch.empty(hidden.shape[0], dtype=_wide(hidden), device=hidden.device)
        target = torch.zeros_like(lse)                           # the label's logit, where the label is in this part
        for chunk in _chunks(hidden.shape[0], chunk_tokens):
            logits = _logits(hidden[chunk], weight)              # [chunk, part of the vocabulary]
            lse[chunk] = logits.logsumexp(dim=1)
            column, mine = _columns(labels[chunk], begin, weight.shape[0])
            target[chunk] = (logits.gather(1, column) * mine)[:, 0]
        if group is not None:
            lse, target = _over_parts(lse, target, group)
        ctx.save_for_backward(hidden, weight, labels, lse)
        ctx.about = chunk_tokens, begin, group
        losses = (lse - target).masked_fill(labels == IGNORED, 0.0)
        return losses.masked_fill(wrong, torch.nan).sum()        # on a GPU nobody waits to look at labels: it shows

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, labels, lse = ctx.saved_tensors
        chunk_tokens, begin, group = ctx.about
        dhidden = torch.empty_like(hidden)
        dweight = torch.zeros_like(weight, dtype=_wide(weight)) if ctx.needs_input_grad[1] else None
        for chunk in _chunks(hidden.shape[0], chunk_tokens):
            dlogits = _logits(hidden[chunk], weight).sub_(lse[chunk, None]).exp_()
            column, mine = _columns(labels[chunk], begin, weight.shape[0])
            dlogits.scatter_add_(1, column, -mine.to(dlogits.dtype))
            dlogits *= (grad * (labels[chunk] != IGNORED))[:, None]
            narrow = dlogits.to(hidden.dtype)
            torch.mm(narrow, weight, out=dhidden[chunk])
            if dweight is not None:
                dweight += narrow.T @ hidden[chunk]
        if group is not None:
            dist.all_reduce(dhidden, group=group)
        return dhidden, None if dweight is None else dweight.to(weight.dtype), None, None, None, None, None


def _chunks(num_tokens: int, chunk_tokens: int) -> Iterator[slice]:
    return (slice(begin, min(begin + chunk_tokens, num_tokens)) for begin in range(0, num_tokens, chunk_tokens))


def _wide(x: torch.Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _logits(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return (hidden @ weight.T).to(_wide(hidden))


def _columns(labels: torch.Tensor, begin: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Each label's column in the vocabulary's part [begin, begin + size), and whether it lies there; [chunk, 1]."""
    column = labels[:, None] - begin
    return column.clamp(0, size - 1), (column >= 0) & (column < size)


def _over_parts(
    lse: torch.Tensor, target: torch.Tensor, group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor]:
    """The whole vocabulary's log-sum-exp and label logits from those of its parts."""
    largest = lse.clone()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    sums = torch.stack(((lse - largest).exp(), target))
    dist.all_reduce(sums, group=group)
    return largest + sums[0].log(), sums[1]
