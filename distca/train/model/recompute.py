"""Reduce the activation memory of a part of the decoder: recompute it in backward, compile it, or run it in tiles.

Recomputation keeps a function's inputs, optionally with its matrix products. Residual additions are outside of it:
their results are kept anyway as the next segment's input, so a recomputed feed-forward stops before its last product.

Tiling runs a segment on a few tokens at a time, so that the widest activations never exist for all tokens. Forward
keeps only the inputs; backward recomputes and differentiates tile by tile and sums weight gradients in at least
float32. Under tensor parallelism x is sharded by tokens but q, k, v are not: a tile takes the same part of every shard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

Result = TypeVar("Result")
_PRODUCTS = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]


def call_with_recompute(recompute: str, function: Callable[..., Result], *inputs: Any) -> Result:
    """Call function(*inputs); "full" keeps only the inputs for backward, "selective" also matrix products."""
    if recompute == "selective" and torch.compiler.is_compiling():
        recompute = "none"                                       # the compiler decides what to recompute
    if recompute == "none" or not torch.is_grad_enabled():
        return function(*inputs)
    keep: Any = {"context_fn": partial(create_selective_checkpoint_contexts, _PRODUCTS)}
    result: Result = checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False,
                                **(keep if recompute == "selective" else {}))
    return result


def compile_any_length(function: Callable[..., Any], backend: str = "inductor") -> Callable[..., Any]:
    """Compile a function once for rows of any length: the first dimension of every tensor is marked as dynamic."""
    compiled = torch.compile(function, backend=backend)

    def call(*inputs: Any, **more: Any) -> Any:
        for tensor in tree_leaves((inputs, more)):
            if isinstance(tensor, torch.Tensor) and tensor.ndim:
                torch._dynamo.maybe_mark_dynamic(tensor, 0)
        return compiled(*inputs, **more)

    return call


def pad_tokens(tensor: torch.Tensor, num_shares: int) -> torch.Tensor:
    """Append zeros until the first dimension (tokens) is a multiple of `num_shares`."""
    missing = -tensor.shape[0] % num_shares
    return F.pad(tensor, [0, 0] * (tensor.ndim - 1) + [0, missing]) if missing else tensor


class TokenTiles:
    """Cut tensors of shards of `share_len` tokens into tiles of `tile_len` tokens of each shard."""

    def __init__(self, num_tokens: int, tile_tokens: int, num_shares: int) -> None:
        self.num_tokens, self.num_shares = num_tokens, num_shares
        self.share_len = -(-num_tokens // num_shares)
        self.tile_len = max(1, tile_tokens // num_shares) if tile_tokens else self.share_len

    def __iter__(self) -> Iterator[slice]:
        return (slice(begin, min(begin + self.tile_len, self.share_len))
                for begin in range(0, self.share_len, self.tile_len))

    def pad(self, tensor: torch.Tensor) -> torch.Tensor:
        return pad_tokens(tensor, self.num_shares) if tensor.shape[0] == self.num_tokens else tensor

    def cut(self, tensor: torch.Tensor, tile: slice) -> torch.Tensor:
        return tensor.unflatten(0, (-1, self.share_len))[:, tile].flatten(0, 1)

    def put(self, tensor: torch.Tensor, tile: slice, part: torch.Tensor) -> None:
        tensor.unflatten(0, (-1, self.share_len))[:, tile] = part.unflatten(0, (-1, tile.stop - tile.start))

    def run(self, compute: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> Any:
        """Compute tile by tile; return the results of all tokens, without padding and not as views."""
        results: list[torch.Tensor] = []
        for tile in self:
            parts, structure = tree_flatten(compute(*(self.cut(tensor, tile) for tensor in inputs)))
            results = results or [part.new_empty((part.shape[0] // (tile.stop - tile.start) * self.share_len,
                                                  *part.shape[1:])) for part in parts]
            for tensor, part in zip(results, parts, strict=True):
                self.put(tensor, tile, part)
        unpadded = (self.share_len, self.num_tokens)
        return tree_unflatten([tensor if tensor.shape[0] in unpadded else tensor[: self.num_tokens].clone()
                               for tensor in results], structure)


def in_tiles(
    compute: Callable[..., Any], parameters: Sequence[torch.Tensor], tile_tokens: int, num_shares: int, *inputs: Any
) -> Any:
    """Return compute(*inputs) in tiles of `tile_tokens` tokens (0: all), differentiable in inputs and parameters.

    The first input is this rank's shard of x, or all token ids; the other inputs have all tokens of the row.
    """
    flat, structure = tree_flatten(inputs)
    tiles = TokenTiles(flat[1].shape[0], tile_tokens, num_shares)
    first = flat[0] if flat[0].is_floating_point() else tiles.pad(flat[0])
    flat = [first, *(tiles.pad(tensor) for tensor in flat[1:])]

    def on_tile(*parts: torch.Tensor) -> Any:
        return compute(*tree_unflatten(parts, structure))

    return _InTiles.apply(on_tile, tiles, len(flat), *flat, *parameters)


class _InTiles(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, compute: Callable[..., Any], tiles: TokenTiles, num_inputs: int, *tensors: torch.Tensor
    ) -> Any:
        ctx.call = compute, tiles, tensors[num_inputs:]
        ctx.save_for_backward(*tensors[:num_inputs])
        return tiles.run(compute, tensors[:num_inputs])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        compute, tiles, parameters = ctx.call
        inputs, needed = ctx.saved_tensors, ctx.needs_input_grad[3:]
        douts = [tiles.pad(dout) for dout in gradients]
        dinputs = [torch.empty_like(tensor) if need else None for tensor, need in zip(inputs, needed, strict=False)]
        totals: list[torch.Tensor | None] = [None] * len(parameters)
        for tile in tiles:
            with torch.enable_grad():
                parts = [tiles.cut(tensor, tile).detach().requires_grad_(need)
                         for tensor, need in zip(inputs, needed, strict=False)]
                outs = compute(*parts)
            leaves = [leaf for leaf in (*parts, *parameters) if leaf.requires_grad]
            found = iter(torch.autograd.grad(outs, leaves, [tiles.cut(dout, tile) for dout in douts],
                                             allow_unused=True, materialize_grads=True))
            for dinput in dinputs:
                if dinput is not None:
                    tiles.put(dinput, tile, next(found))
            totals = [_sum(total, next(found)) if parameter.requires_grad else None
                      for total, parameter in zip(totals, parameters, strict=True)]
        dparameters = [None if total is None else total.to(parameter.dtype)
                       for total, parameter in zip(totals, parameters, strict=True)]
        return None, None, None, *dinputs, *dparameters


def _sum(total: torch.Tensor | None, addend: torch.Tensor) -> torch.Tensor:
    wide = torch.promote_types(addend.dtype, torch.float32)
    return addend.to(wide) if total is None else total.add_(addend)
