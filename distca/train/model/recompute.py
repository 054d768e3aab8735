"""Keep activations for backward, keep only what was expensive, or keep nothing and compute it again.

Residual additions stand outside of what is computed again: their results are the next segment's input, which is kept
anyway. So a recomputed feed-forward stops before its last product, whose result no gradient needs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
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
