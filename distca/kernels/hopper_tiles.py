"""Tiles of the Hopper kernel: what a head dim leaves of registers and shared memory decides how much one step takes.

Values have the head dim of keys, except beside 192, the shape of multi-head latent attention, where they have 128.
"""

from __future__ import annotations

from dataclasses import dataclass

from distca.kernels.hopper_tables import TILE_BLOCKS, TILE_KEYS

TALL_GAIN = 1.1  # of tall tiles' speed over others', with as many steps; 1.12 and 1.19 were measured
DIMS_TEXT = "64, 128 or 256, or 192 with values of 128"


@dataclass(frozen=True, slots=True)
class Tiles:
    """Keys of a tile for one head dim, and the sources in cuda/ that are written for them."""

    value_dim: int
    forward_keys: int = TILE_KEYS
    tall_blocks: int = TILE_BLOCKS  # of queries in a tile of forward, where rows are long enough
    backward_keys: int = TILE_KEYS
    backward_blocks: int = TILE_BLOCKS  # warpgroups that compute backward
    dq_keys: int = TILE_KEYS  # where dQ is computed by itself
    dq_apart: bool = False  # always by itself, since adding it up in memory would be slower
    kept_blocks: int = 0  # of queries in a tile of dQ, where dS is kept; none where that is never faster
    forward: tuple[str, ...] = ("common.cuh", "forward_softmax.cuh", "forward_copy.cuh", "forward.cu")
    backward: tuple[str, ...] = ("common.cuh", "backward_maps.cuh", "backward_copy.cuh", "backward_steps.cuh",
                                 "backward.cu", "backward_ends.cu")
    backward_dq: tuple[str, ...] = ("common.cuh", "wide.cuh", "backward_dq.cu")
    kept_dq: tuple[str, ...] = ("common.cuh", "wide.cuh", "kept_dq.cu")


_WIDE_FORWARD = ("common.cuh", "wide.cuh", "forward_softmax.cuh", "wide_forward.cu")
_WIDE_BACKWARD = ("common.cuh", "wide.cuh", "backward_maps.cuh", "wide_backward_copy.cuh", "wide_backward.cu",
                  "backward_ends.cu")

TILES = {  # by the head dim of queries and keys
    64: Tiles(64, tall_blocks=3, backward_keys=192, backward_blocks=3),
    128: Tiles(128, kept_blocks=4),
    192: Tiles(128, backward_keys=64, dq_keys=64, dq_apart=True, kept_blocks=3, forward=_WIDE_FORWARD,
               backward=_WIDE_BACKWARD),
    256: Tiles(256, forward_keys=80, backward_keys=64, dq_keys=64, dq_apart=True, kept_blocks=2, forward=_WIDE_FORWARD,
               backward=_WIDE_BACKWARD),
}


def tiles_of(head_dim: int) -> Tiles:
    """The tiles of the next head dim that has some, so that tables can be walked for any."""
    return TILES[min((dim for dim in TILES if dim >= head_dim), default=max(TILES))]
