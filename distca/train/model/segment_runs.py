"""Say how a decoder's segments run: compiled, over tiles of their tokens, with their inputs kept on the host.

Attach it after the decoder is spread over its mesh. Whatever is chosen, the loss is that of plain segments to the
dtype's rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from distca.train.model.decoder import Decoder, Segment
from distca.train.model.offload import Offload
from distca.train.model.recompute import compiled
from distca.train.model.rotary import Rotary
from distca.train.model.tiles import Tiles, in_tiles, over_tiles


def run_segments(
    decoder: Decoder, *, compile: bool = False, tile_tokens: int = 0, offload: Offload | None = None,
    backend: str = "inductor",
) -> None:
    """Tiles and offloading keep a segment's inputs alone, so that they take the place of its `recompute`."""
    for segment in decoder.segments:
        assert isinstance(segment, Segment)
        compute = compiled(segment.compute, backend) if compile else segment.compute
        if tile_tokens or offload is not None:
            segment.recompute = "none"
            segment.run = partial(_by_tiles, segment, compute, tile_tokens, offload)
        else:
            segment.run = compute if compile else None


def _by_tiles(
    segment: Segment, compute: Callable[..., Any], tile_tokens: int, offload: Offload | None, *inputs: Any
) -> Any:
    run = partial(in_tiles, compute, list(segment.parameters()), tile_tokens, segment.rows_multiple, *inputs)
    if offload is None or not torch.is_grad_enabled():
        return run()
    entering = [x for x in inputs if isinstance(x, torch.Tensor) and x.requires_grad]  # x and attention's output
    for tensor in entering:
        offload.send(tensor)
    results = run()
    for tensor in entering:
        offload.settle(tensor)
    if isinstance(results, tuple):
        x, *attended = results
        offload.send(x)
        offload.recomputed(x, attended, partial(_before, segment, inputs[-1], tile_tokens))
    return results


def _before(segment: Segment, rotary: Rotary, tile_tokens: int, x: torch.Tensor) -> Any:
    """Queries, keys and values once more, for attention's backward; it comes before the segment's own."""
    if isinstance(segment, FSDPModule):
        segment.unshard()
    tiles = Tiles(rotary[0].shape[0], tile_tokens, segment.rows_multiple)
    return over_tiles(lambda x, cos, sin: segment.pre(x, (cos, sin)), tiles, [x, *map(tiles.whole, rotary)])
