"""Compile what runs between attention calls, once for rows of any length.

The compiler sees a segment's `compute` and nothing around it: FSDP gathers before and shards after, attention exchanges
by lengths that change with every batch. Segments of one class share their graphs, and the number of tokens is marked as
one that changes, so that new packings compile nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves


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
