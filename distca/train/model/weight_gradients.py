"""Compute the gradients of matrix weights apart from backward, so that a pipeline can do it in idle time.

`split_linear` hands over the pairs (x, dy) of a backward; here they become gradients, segment by segment, in FSDP's
accumulators. Biases, norms and the embedding get their gradients in backward. TokenTiles and offloading recompute a
segment tile by tile in order to never hold such pairs: those segments keep dW in backward (`is_supported`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from distca.train.model.decoder import Decoder
from distca.train.model.loss import add_product
from distca.train.model.split_linear import Linear, Probe, Probes


class WeightUnit:
    """The weight gradients of one backward that remain to be computed."""

    def __init__(self, owner: WeightGradients) -> None:
        self.owner = owner
        self.pairs: list[tuple[nn.Linear, torch.Tensor, torch.Tensor]] = []  # layer, x, dy, in the order of backward

    def run(self, segment: nn.Module, last: bool = False) -> None:
        """Add dyᵀ · x of every pair of a segment to its weight's gradient and free the pair.

        `last` marks the part's last unit of a step: the segment's gradients are then reduced over the data ranks while
        the next segment's are computed. What is left is reduced by `deliver`.
        """
        mine = [pair for pair in self.pairs if self.owner.segment[pair[0]] is segment]
        self.pairs = [pair for pair in self.pairs if self.owner.segment[pair[0]] is not segment]
        mine.reverse()
        while mine:
            self.owner.add(*mine.pop())
        if last:
            self.owner.reduce(segment)


class WeightGradients:
    """Collects and computes the gradients of a stage's matrix weights; one per rank, made after `run_segments`.

    Forward calls prepare the split while `enabled` is true. Then wrap each backward in `collecting` and `accumulating`
    (not the last), run its unit at any later time of the step, and call `deliver` after the last unit. A backward
    outside of `collecting` computes its weight gradients at once.
    """

    enabled = True

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self._unit: WeightUnit | None = None                     # of the backward that runs now
        self._anchor = torch.empty((), requires_grad=True)       # probes need a gradient
        self._weights = _fsdp_weights(decoder)
        self.segment: dict[nn.Module, nn.Module] = {}            # of each linear layer
        for segment in decoder.segments if is_supported(decoder) else ():
            segment.weight_gradients = self                      # type: ignore[assignment]
            self.segment |= {module: segment for module in segment.modules() if isinstance(module, Linear)}

    def probes(self, module: nn.Module, num_tokens: int) -> tuple[Probes, ...]:
        """Make the probes of a module's linear layers."""
        return tuple(Probe.apply(self._anchor, self, linear, num_tokens) for linear in module.modules()
                     if isinstance(linear, Linear))

    @contextmanager
    def collecting(self) -> Iterator[WeightUnit]:
        """Wrap one backward; its weight gradients remain in the unit."""
        assert self._unit is None
        unit = self._unit = WeightUnit(self)
        try:
            yield unit
        finally:
            self._unit = None

    def collect(self, linear: nn.Linear, x: torch.Tensor, dy: torch.Tensor) -> None:
        if self._unit is None:
            self.add(linear, x, dy)
        else:
            self._unit.pairs.append((linear, x, dy))

    @torch.no_grad()
    def add(self, linear: nn.Linear, x: torch.Tensor, dy: torch.Tensor) -> None:
        add_product(self.total(linear), dy.T, x)

    def total(self, module: nn.Module) -> torch.Tensor:
        """Return this rank's unreduced gradient of a module's weight, to add to; zeros at first.

        It is in the parameters' dtype, in which FSDP reduces it together with what backward accumulated.
        """
        weight = self._weights[module]
        if weight.unsharded_accumulated_grad is None:
            weight.unsharded_accumulated_grad = torch.zeros_like(weight.unsharded_param, dtype=weight.orig_dtype)
        total: torch.Tensor = weight.unsharded_accumulated_grad
        return total.to_local() if isinstance(total, DTensor) else total

    def reduce(self, segment: nn.Module) -> None:
        """Start reducing a segment's gradients over the data ranks; the root's remain for `deliver`."""
        if isinstance(segment, FSDPModule):
            for group in _groups_of(segment):
                group.post_backward()

    def deliver(self) -> None:
        """Reduce all gradients of the step over the data ranks and set the parameters' `grad`, after the last unit."""
        assert isinstance(self.decoder, FSDPModule)
        self.decoder._get_fsdp_state()._root_post_backward_final_callback()

    def gather_head(self) -> None:
        """Gather the head, which all stages have, for a step."""
        self.decoder(lambda decoder: decoder.output.unshard())

    def release_head(self) -> None:
        self.decoder.output.reshard()                            # type: ignore[operator]


def is_supported(decoder: Decoder) -> bool:
    """Return whether weight gradients can be computed apart: not for segments in tiles of tokens or with offloading."""
    return not any(segment.in_tiles for segment in decoder.segments)


def _groups_of(module: FSDPModule) -> list[Any]:
    """Return FSDP's parameter groups of a module itself."""
    state: Any = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)          # before torch 2.12 there is at most one
    return [group for group in (groups if groups is not None else [state._fsdp_param_group]) if group is not None]


def _fsdp_weights(decoder: nn.Module) -> dict[nn.Module, Any]:
    """Return FSDP's record of the weight of every module; it holds the gradient until that is reduced."""
    modules = [module for module in decoder.modules() if isinstance(module, FSDPModule)]
    found = {parameter._module_info.module: parameter for module in modules for group in _groups_of(module)
             for parameter in group.fsdp_params if parameter._module_info.param_name == "weight"}
    assert all(hasattr(parameter, "unsharded_accumulated_grad") for parameter in found.values())
    return found
