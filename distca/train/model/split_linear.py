"""A linear layer whose weight gradient can be computed apart from backward.

Backward of y = x · Wᵀ needs dx at once, because the previous stage waits for it, but dW = dyᵀ · x only before the
optimizer. A split product takes two more inputs, probes with the shapes of y and x, which it never reads. Its backward
returns dy and x as their gradients and none for W, so the pair reaches a collector also from a compiled graph and from
a recomputed part. Pairs share memory with backward's own tensors and are freed once their product is added.

    forward    probes(linear) -> probe of y, probe of x        linear(x, probes) -> y
    backward   dy -> dx now, (x, dy) to the collector                 later: dyᵀ · x is added to dW
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Shard

Probes = tuple[torch.Tensor, torch.Tensor]                       # of y and of x, [tokens, features] of this rank


class Collector(Protocol):
    """Takes what the weight gradients of a backward are made of."""

    enabled: bool

    def probes(self, module: nn.Module, num_tokens: int) -> tuple[Probes, ...]:
        """Return the probes of a module's linear layers, in their order, for rows of `num_tokens` tokens."""

    def collect(self, linear: nn.Linear, x: torch.Tensor, dy: torch.Tensor) -> None: ...


class Linear(nn.Linear):
    """A linear layer on x [tokens, features] whose weight gradient is computed apart if it is called with probes."""

    def forward(self, x: torch.Tensor, probes: Probes | None = None) -> torch.Tensor:
        if probes is None:
            return super().forward(x)
        weight, bias = self.weight, self.bias                    # type: tuple[torch.Tensor, torch.Tensor | None]
        if not isinstance(weight, DTensor):
            y: torch.Tensor = _SplitLinear.apply(x, weight, bias, *probes)
            return y
        assert isinstance(x, DTensor) and weight.device_mesh.ndim == 1
        by_columns = weight.placements[0] == Shard(0)            # else by rows: y is a partial sum
        x = x.to_local(grad_placements=(Partial(),) if by_columns else x.placements)
        bias = bias.to_local() if isinstance(bias, DTensor) else bias
        return DTensor.from_local(_SplitLinear.apply(x, weight.to_local(), bias, *probes), weight.device_mesh,
                                  (Shard(1) if by_columns else Partial(),), run_check=False)


class _SplitLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, of_y: torch.Tensor,
        of_x: torch.Tensor,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        return dy @ weight, None, dy.sum(0) if ctx.has_bias else None, dy, x


class Probe(torch.autograd.Function):
    """Make the probes of a product, whose gradients, dy and x, go to the collector; `anchor` requires a gradient."""

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, collector: Collector, linear: nn.Linear, num_tokens: int
    ) -> Probes:
        ctx.collector, ctx.linear = collector, linear
        weight = linear.weight.to_local() if isinstance(linear.weight, DTensor) else linear.weight
        empty = torch.empty((), dtype=weight.dtype, device=weight.device)
        return empty.expand(num_tokens, weight.shape[0]), empty.expand(num_tokens, weight.shape[1])

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor, x: torch.Tensor) -> tuple[None, ...]:
        ctx.collector.collect(ctx.linear, x, dy)
        return (None,) * 4
