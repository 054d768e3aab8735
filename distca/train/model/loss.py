"""Cross-entropy without the logits: 64K tokens against a vocabulary of 128K would be 32 GiB of them.

Logits exist for one chunk of tokens at a time, in one buffer. Forward overwrites them with their gradient and adds its
products to the gradients of hidden and of the head at once, so that no logit is computed twice; backward only scales.
Where tensor ranks share the vocabulary each works on its own part of it, and two small reductions for each chunk make
the log-sum-exp and the labels' logits whole. The compiler fuses each of the two passes over the logits.
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
    """Return the sum of -log softmax(hidden · head_weightᵀ)[label] over the tokens with a label, and their number.

    hidden [tokens, hidden], head_weight [vocab, hidden], labels [tokens] with -100 where there is none. The sum is
    float32 (float64 where hidden is). A head_weight whose vocabulary is sharded over tensor ranks that hold the same
    hidden gives each of them the whole sum, and the whole gradient of hidden.
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
    begin: int                                                   # of this rank's part of the vocabulary
    group: dist.ProcessGroup | None                              # of the ranks that have the other parts
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
            logits = hidden[chunk] @ weight.T                    # [chunk, part of the vocabulary]
            column = labels[chunk] - how.begin
            lse, target = sums(logits, column)
            if how.group is not None:
                lse, target = _over_parts(lse, target, how.group)
            losses[chunk] = lse - target
            if any(wanted):
                to_gradient(logits, lse, column, labels[chunk] != IGNORED)
            if dhidden is not None:
                torch.mm(logits, weight, out=dhidden[chunk])
            if dweight is not None:
                _add_product(dweight, logits.T, hidden[chunk])
        if how.group is not None and dhidden is not None:
            dist.all_reduce(dhidden, group=how.group)
        ctx.save_for_backward(dhidden, dweight)
        ctx.dtypes = hidden.dtype, weight.dtype
        losses = losses.masked_fill(labels == IGNORED, 0.0)
        return losses.masked_fill(wrong, torch.nan).sum()        # a GPU's labels are not checked first: NaN shows them

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        scaled = (None if x is None else torch.mul(x, grad, out=torch.empty_like(x, dtype=dtype))
                  for x, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True))
        return *scaled, None, None, None


def _sums(logits: torch.Tensor, column: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each token's log-sum-exp, and its label's logit where the label's column is here; [chunk] each."""
    wide = logits.to(_wide(logits))
    mine = (column >= 0) & (column < logits.shape[1])
    target = wide.gather(1, column.clamp(0, logits.shape[1] - 1)[:, None])[:, 0] * mine
    return wide.logsumexp(dim=1), target


def _to_gradient(logits: torch.Tensor, lse: torch.Tensor, column: torch.Tensor, counted: torch.Tensor) -> None:
    """Overwrite the logits with softmax minus one-hot; with zeros for tokens without a label."""
    gradient = (logits.to(_wide(logits)) - lse[:, None]).exp()
    labelled = torch.arange(logits.shape[1], device=logits.device) == column[:, None]
    logits.copy_((gradient - labelled.to(gradient.dtype)) * counted[:, None])


@cache
def _compiled() -> tuple[Callable[..., Any], Callable[..., Any]]:
    return compile_any_length(_sums), compile_any_length(_to_gradient)


def _add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Add a @ b to total, without rounding the product to a's dtype first where the GPU can do so."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    elif total.device.type == "cuda":
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += a @ b


def _wide(x: torch.Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _over_parts(
    lse: torch.Tensor, target: torch.Tensor, group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor]:
    """Reduce the log-sum-exp and label logits of the vocabulary's parts to those of the whole."""
    largest = lse.clone()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    sums = torch.stack(((lse - largest).exp(), target))
    dist.all_reduce(sums, group=group)
    return largest + sums[0].log(), sums[1]
