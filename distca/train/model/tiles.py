"""Run a segment over a tile of its tokens at a time, so that what is widest in it never exists for all of them.

Outside of attention tokens do not see each other: a segment over a row is the same segment over its tiles. Forward
keeps the inputs alone; backward computes each tile again, differentiates it on the spot, and adds up the weights'
gradients in float32 at least. Under tensor parallelism a rank holds its share of x and its heads of all tokens: a tile
is then the same part of every share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_flatten, tree_unflatten


class Tiles:
    """A row's tensors cut alike: `num_shares` parts of `share_len` tokens, `tile_len` of each part at a time."""

    def __init__(self, num_tokens: int, tile_tokens: int, num_shares: int) -> None:
        self.num_tokens, self.num_shares = num_tokens, num_shares
        self.share_len = -(-num_tokens // num_shares)
        self.tile_len = max(1, tile_tokens // num_shares) if tile_tokens else self.share_len

    def __iter__(self) -> Iterator[slice]:
        return (slice(begin, min(begin + self.tile_len, self.share_len))
                for begin in range(0, self.share_len, self.tile_len))

    def whole(self, rows: torch.Tensor) -> torch.Tensor:
        """All tokens' rows, padded to whole shares."""
        missing = self.num_shares * self.share_len - rows.shape[0]
        return F.pad(rows, [0, 0] * (rows.ndim - 1) + [0, missing]) if missing else rows

    def cut(self, rows: torch.Tensor, tile: slice) -> torch.Tensor:
        """A tile of a share's rows, or of all tokens' padded ones."""
        if rows.shape[0] == self.share_len:
            return rows[tile]
        return rows.unflatten(0, (self.num_shares, -1))[:, tile].flatten(0, 1)

    def empty(self, like: torch.Tensor, tile: slice) -> torch.Tensor:
        """Room for what one tile's result is a part of."""
        shares = like.shape[0] // (tile.stop - tile.start)
        return like.new_empty((shares * self.share_len, *like.shape[1:]))

    def put(self, rows: torch.Tensor, tile: slice, part: torch.Tensor) -> None:
        if rows.shape[0] == self.share_len:
            rows[tile] = part
        else:
            rows.unflatten(0, (self.num_shares, -1))[:, tile] = part.unflatten(0, (self.num_shares, -1))

    def trimmed(self, rows: torch.Tensor) -> torch.Tensor:
        """Without what was padded; a tensor of its own, no view."""
        padded = rows.shape[0] != self.share_len and rows.shape[0] != self.num_tokens
        return rows[: self.num_tokens].clone() if padded else rows


def in_tiles(
    compute: Callable[..., Any], parameters: Sequence[torch.Tensor], tile_tokens: int, num_shares: int, *inputs: Any
) -> Any:
    """compute(*inputs) by tiles of `tile_tokens` tokens (0: all), differentiable in inputs and parameters.

    The first input is x, one share of the tokens, unless it is tokens; all others have every token of the row.
    """
    flat, structure = tree_flatten(inputs)
    tiles = Tiles(flat[1].shape[0], tile_tokens, num_shares)
    leading = flat[0] if flat[0].is_floating_point() else tiles.whole(flat[0])
    flat = [leading, *(tiles.whole(rows) for rows in flat[1:])]

    def on_tile(*parts: torch.Tensor) -> Any:
        return compute(*tree_unflatten(parts, structure))

    return _InTiles.apply(on_tile, tiles, len(flat), *flat, *parameters)


def over_tiles(compute: Callable[..., Any], tiles: Tiles, inputs: Sequence[torch.Tensor]) -> Any:
    """compute's result for all tokens, put together from its tiles."""
    results: list[torch.Tensor] = []
    single = True
    for tile in tiles:
        parts = compute(*(tiles.cut(rows, tile) for rows in inputs))
        single = isinstance(parts, torch.Tensor)
        parts = [parts] if single else parts
        results = results or [tiles.empty(part, tile) for part in parts]
        for rows, part in zip(results, parts, strict=True):
            tiles.put(rows, tile, part)
    results = [tiles.trimmed(rows) for rows in results]
    return results[0] if single else tuple(results)


class _InTiles(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, compute: Callable[..., Any], tiles: Tiles, num_inputs: int, *tensors: torch.Tensor) -> Any:
        ctx.about = compute, tiles, tensors[num_inputs:]
        ctx.save_for_backward(*tensors[:num_inputs])
        return over_tiles(compute, tiles, tensors[:num_inputs])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        compute, tiles, parameters = ctx.about
        inputs = ctx.saved_tensors
        needed = ctx.needs_input_grad[3:]
        douts = [tiles.whole(dout) if dout.shape[0] == tiles.num_tokens else dout for dout in gradients]
        dinputs = [torch.empty_like(rows) if need else None for rows, need in zip(inputs, needed, strict=False)]
        dparameters: list[torch.Tensor | None] = [None] * len(parameters)
        for tile in tiles:
            with torch.enable_grad():
                parts = [tiles.cut(rows, tile).detach().requires_grad_(need)
                         for rows, need in zip(inputs, needed, strict=False)]
                outs = compute(*parts)
            outs = [outs] if isinstance(outs, torch.Tensor) else outs
            leaves = [leaf for leaf in (*parts, *parameters) if leaf.requires_grad]
            found = iter(torch.autograd.grad(outs, leaves, [tiles.cut(dout, tile) for dout in douts],
                                             allow_unused=True))
            for rows, part in zip(dinputs, parts, strict=True):
                if rows is not None:
                    gradient = next(found)
                    tiles.put(rows, tile, torch.zeros_like(part) if gradient is None else gradient)
            for number, parameter in enumerate(parameters):
                if parameter.requires_grad and (gradient := next(found)) is not None:
                    dparameters[number] = _sum(dparameters[number], gradient)
        own = [None if total is None else total.to(parameter.dtype)
               for total, parameter in zip(dparameters, parameters, strict=True)]
        return None, None, None, *dinputs, *own


def _sum(total: torch.Tensor | None, addend: torch.Tensor) -> torch.Tensor:
    wide = torch.promote_types(addend.dtype, torch.float32)
    return addend.to(wide) if total is None else total.add_(addend)
