"""Keep activations for backward, keep only what was expensive, or keep nothing and compute it again.

Residual additions stand outside of what is computed again: their results are the next segment's input, which is kept
anyway. So a recomputed feed-forward stops before its last product, whose result no gradient needs.

Compile what runs between attention calls, once for rows of any length.

The compiler sees a segment's `compute` and nothing around it: FSDP gathers before and shards after, attention exchanges
by lengths that change with every batch. Segments of one class share their graphs, and the number of tokens is marked as
one that changes, so that new packings compile nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

Result = TypeVar("Result")
_PRODUCTS = frozenset({torch.ops.aten.mm.default, torch.ops.aten.addmm.default})


def again(recompute: str, function: Callable[..., Result], *inputs: Any) -> Result:
    """function(*inputs). Of "full" only the inputs are kept for backward, of "selective" also matrix products."""
    if recompute == "selective" and torch.compiler.is_compiling():
        recompute = "none"                                       # what the compiler does by itself
    if recompute == "none" or not torch.is_grad_enabled():
        return function(*inputs)
    kept = partial(checkpoint, function, *inputs, use_reentrant=False, preserve_rng_state=False)
    result: Result = kept(context_fn=_selective) if recompute == "selective" else kept()
    return result


def _selective() -> Any:
    return create_selective_checkpoint_contexts(_keeps)


def _keeps(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in _PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE


def any_rows(function: Callable[..., Any]) -> Callable[..., Any]:
    """Tell the compiler that the first dimension of every tensor it is given changes."""

    def call(*inputs: Any) -> Any:
        for tensor in tree_leaves(inputs):
            if isinstance(tensor, torch.Tensor) and tensor.ndim:
                torch._dynamo.maybe_mark_dynamic(tensor, 0)
        return function(*inputs)

    return call


def compiled(compute: Callable[..., Any], backend: str = "inductor") -> Callable[..., Any]:
    return any_rows(torch.compile(compute, backend=backend))
