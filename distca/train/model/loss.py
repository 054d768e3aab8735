"""Compute cross-entropy in chunks of tokens: all logits of 64K tokens and a 128K vocabulary would take 32 GiB.

Forward overwrites a chunk's logits with their gradient and adds at once to the gradients of hidden and of the head, so
that logits are computed only once; backward only scales. If tensor ranks shard the vocabulary, two small all-reduces
per chunk combine the log-sum-exp and the labels' logits. The compiler fuses each of the two passes over the logits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard

from distca.train.model.recompute import compile_any_length
from distca.validation import UserError
from distca.workload.documents import IGNORED


def chunked_cross_entropy(
    hidden: torch.Tensor, head_weight: torch.Tensor, labels: torch.Tensor, chunk_tokens: int, compiled: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum of -log softmax(hidden · head_weightᵀ)[label] over the labelled tokens, and their number.

    hidden [tokens, hidden], head_weight [vocab, hidden], labels [tokens] with -100 for none. The sum is float32, or
    float64 if hidden is. If the vocabulary is sharded over tensor ranks, all must have the same hidden, and each gets
    the complete sum and gradient of hidden.
    """
    vocab = head_weight.shape[0]
    wrong = ((labels < 0) & (labels != IGNORED)) | (labels >= vocab)
    if labels.device.type == "cpu" and bool(wrong.any()):
        raise UserError(f"labels hold {int(labels[wrong][0])} but the vocabulary has {vocab} tokens; give labels "
                        f"below that, or {IGNORED} for none")
    begin, group = 0, None
    if isinstance(head_weight, DTensor):
        assert head_weight.device_mesh.ndim == 1 and head_weight.placements[0] in (Shard(0), Replicate())
        if head_weight.placements[0] == Shard(0):
            mesh = head_weight.device_mesh
            begin, group = mesh.get_local_rank() * -(-vocab // mesh.size()), mesh.get_group()
        head_weight = head_weight.to_local()
    how = _Options(chunk_tokens, begin, group, compiled, torch.is_grad_enabled())
    total = _ChunkedCrossEntropy.apply(hidden, head_weight, labels, wrong, how)
    return total, (labels != IGNORED).sum()


class _Options(NamedTuple):
    chunk_tokens: int
    begin: int                                                   # first token of this rank's vocabulary shard
    group: dist.ProcessGroup | None                              # ranks that shard the vocabulary
    compiled: bool
    differentiate: bool


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, wrong: torch.Tensor, how: _Options
    ) -> torch.Tensor:
        wanted = [how.differentiate and needed for needed in ctx.needs_input_grad[:2]]
        dhidden = torch.empty_like(hidden) if wanted[0] else None
        dweight = torch.zeros_like(weight, dtype=_wide(weight)) if wanted[1] else None
        sums, to_gradient = (_compiled() if how.compiled else (_sums, _to_gradient))
        losses = torch.empty(hidden.shape[0], dtype=_wide(hidden), device=hidden.device)
        for begin in range(0, hidden.shape[0], how.chunk_tokens):
            chunk = slice(begin, begin + how.chunk_tokens)
            logits = hidden[chunk] @ weight.T                    # [chunk, vocabulary shard]
            column = labels[chunk] - how.begin
            lse, target = sums(logits, column)
            if how.group is not None:
                lse, target = _combine_shards(lse, target, how.group)
            losses[chunk] = lse - target
            if any(wanted):
                to_gradient(logits, lse, column, labels[chunk] != IGNORED)
            if dhidden is not None:
                torch.mm(logits, weight, out=dhidden[chunk])
            if dweight is not None:
                add_product(dweight, logits.T, hidden[chunk])
        if how.group is not None and dhidden is not None:
            dist.all_reduce(dhidden, group=how.group)
        ctx.save_for_backward(dhidden, dweight)
        ctx.dtypes = hidden.dtype, weight.dtype
        losses = losses.masked_fill(labels == IGNORED, 0.0)
        return losses.masked_fill(wrong, torch.nan).sum()        # labels on a GPU are not checked above

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        scaled = (None if x is None else torch.mul(x, grad, out=torch.empty_like(x, dtype=dtype))
                  for x, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True))
        return *scaled, None, None, None


def _sums(logits: torch.Tensor, column: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each token's log-sum-exp and its label's logit (0 if in another rank's shard), [chunk] each."""
    wide = logits.to(_wide(logits))
    in_shard = (column >= 0) & (column < logits.shape[1])
    target = wide.gather(1, column.clamp(0, logits.shape[1] - 1)[:, None])[:, 0] * in_shard
    return wide.logsumexp(dim=1), target


def _to_gradient(logits: torch.Tensor, lse: torch.Tensor, column: torch.Tensor, counted: torch.Tensor) -> None:
    """Overwrite the logits with softmax minus one-hot, or with zeros for tokens without a label."""
    gradient = (logits.to(_wide(logits)) - lse[:, None]).exp()
    labelled = torch.arange(logits.shape[1], device=logits.device) == column[:, None]
    logits.copy_((gradient - labelled.to(gradient.dtype)) * counted[:, None])


@cache
def _compiled() -> tuple[Callable[..., Any], Callable[..., Any]]:
    return compile_any_length(_sums), compile_any_length(_to_gradient)


def add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Add a @ b to total; on a GPU without rounding the product to a's dtype first."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    elif total.device.type == "cuda":
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += a @ b


def _wide(x: torch.Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _combine_shards(
    lse: torch.Tensor, target: torch.Tensor, group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor]:
    """Combine the log-sum-exp and label logits of vocabulary shards into those of the whole vocabulary."""
    largest = lse.clone()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    sums = torch.stack(((lse - largest).exp(), target))
    dist.all_reduce(sums, group=group)
    return largest + sums[0].log(), sums[1]
