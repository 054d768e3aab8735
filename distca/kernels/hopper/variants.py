"""Variants of the Hopper kernel: tile sizes per head dim, and kernels compiled for them on demand.

The head dim determines how many keys fit into registers and shared memory. Values have the head dim of keys, except for
192, the shape of multi-head latent attention, where values have 128.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from distca.kernels.hopper.driver import Function, compile_cubin, load_functions
from distca.kernels.hopper.tables import BLOCK_ROWS, TILE_BLOCKS, TILE_KEYS

TALL_GAIN = 1.1  # speed of tall tiles relative to others per unit of work; measured 1.12 and 1.19
DIMS_TEXT = "64, 128 or 256, or 192 with values of 128"


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tile sizes for one head dim, and the sources in cuda/ that implement them."""

    value_dim: int
    forward_keys: int = TILE_KEYS
    tall_blocks: int = TILE_BLOCKS  # blocks of queries in a tall tile of forward, if tasks are long enough
    backward_keys: int = TILE_KEYS
    backward_blocks: int = TILE_BLOCKS  # warpgroups that compute backward
    dq_keys: int = TILE_KEYS  # in the separate dQ kernel
    dq_apart: bool = False  # always use the separate dQ kernel, since atomic adds would be slower
    kept_blocks: int = 0  # blocks of queries in a tile of dQ from kept dS; 0 if that is never faster
    forward: tuple[str, ...] = ("common.cuh", "softcap.cuh", "forward_softmax.cuh", "forward_copy.cuh", "forward.cu",
                                "forward_kernel.cu")
    backward: tuple[str, ...] = ("common.cuh", "softcap.cuh", "backward_tasks.cuh", "backward_copy.cuh",
                                 "backward_steps.cuh", "backward.cu", "backward_ends.cu")
    backward_dq: tuple[str, ...] = ("common.cuh", "softcap.cuh", "wide.cuh", "backward_dq.cu")
    kept_dq: tuple[str, ...] = ("common.cuh", "wide.cuh", "kept_dq.cu")


_WIDE_FORWARD = ("common.cuh", "softcap.cuh", "wide.cuh", "forward_softmax.cuh", "wide_forward.cu",
                 "forward_kernel.cu")
_WIDE_BACKWARD = ("common.cuh", "softcap.cuh", "wide.cuh", "backward_tasks.cuh", "wide_backward_copy.cuh",
                  "wide_backward.cu", "backward_ends.cu")

TILES = {  # by the head dim of queries and keys
    64: Tiles(64, tall_blocks=3, backward_keys=192, backward_blocks=3),
    128: Tiles(128, kept_blocks=4),
    192: Tiles(128, backward_keys=64, dq_keys=64, dq_apart=True, kept_blocks=3, forward=_WIDE_FORWARD,
               backward=_WIDE_BACKWARD),
    256: Tiles(256, forward_keys=80, backward_keys=64, dq_keys=64, dq_apart=True, kept_blocks=2, forward=_WIDE_FORWARD,
               backward=_WIDE_BACKWARD),
}


def tiles_of(head_dim: int) -> Tiles:
    """Return the tiles of the next supported head dim, so that tables can be built for any head dim."""
    return TILES[min((dim for dim in TILES if dim >= head_dim), default=max(TILES))]


SOURCES = Path(__file__).parent / "cuda"
WARPGROUP = 128  # threads
SHARED_BYTES = 227 * 1024
INSTRUCTIONS = "instructions.cuh"  # precedes all other sources
MERGE = "merge.cu"
Signatures = dict[str, tuple[str, int, int]]  # kernel name -> types, threads, shared bytes


def _loaded(
    device: torch.device, sources: Sequence[str], defines: dict[str, int], signatures: Signatures
) -> list[Function]:
    text = "".join((SOURCES / name).read_text(encoding="utf-8") for name in (INSTRUCTIONS, *sources))
    with torch.cuda.device(device):
        cubin = compile_cubin(text, f"distca/kernels/hopper/cuda/{sources[-1]}", {**defines, "ROWS": BLOCK_ROWS})
        return load_functions(cubin, signatures)


class Masks(NamedTuple):
    """What kernels are compiled for besides the shapes of tensors."""

    windowed: bool
    capped: bool

    @property
    def defines(self) -> dict[str, int]:
        return {"WINDOWED": self.windowed} | ({"SOFTCAP": 1} if self.capped else {})


class Mode(NamedTuple):
    """What launches backward consists of."""

    deterministic: bool  # dQ is not added up in memory
    kept: bool  # it is computed from kept dS, else by the separate dQ kernel
    dq_split: bool  # tiles of that kernel have parts
    keys_split: bool  # tiles of keys have parts


@functools.cache
def forward_kernels(
    device: torch.device, head_dim: int, group: int, masks: Masks, split: bool, is_tall: bool
) -> list[Function]:
    """Return the main kernel and, if keys of tiles are split, the kernel that merges parts."""
    tiles = tiles_of(head_dim)
    blocks = tiles.tall_blocks if is_tall else TILE_BLOCKS
    defines = {"D": head_dim, "DV": tiles.value_dim, "KEYS": tiles.forward_keys, "G": group, "BLOCKS": blocks,
               **masks.defines}
    signatures = {"attention_forward": ("TTTT" "PPPP" "iiiffi" "Pqq" "PP", WARPGROUP * (blocks + 1), SHARED_BYTES)}
    if not split:
        return _loaded(device, tiles.forward, defines, signatures)
    signatures["attention_merge"] = ("PPPPP" "ii", WARPGROUP, 0)
    return _loaded(device, (*tiles.forward, MERGE), {**defines, "SPLIT": 1}, signatures)


@functools.cache
def backward_kernels(
    device: torch.device, head_dim: int, group: int, masks: Masks, mode: Mode
) -> list[Function]:
    """Return the kernel that runs before the main one, the main one, the one that computes dQ, and those that merge.

    dQ's kernel writes the atomic sums, or is the separate dQ kernel, or computes dQ from kept dS. If tiles have parts,
    one kernel merges those of keys, and then one those of dQ.
    """
    tiles = tiles_of(head_dim)
    defines = {"D": head_dim, "DV": tiles.value_dim, "G": group, **masks.defines}
    blocks = {"KEYS": tiles.backward_keys, "BLOCKS": tiles.backward_blocks, "WITH_DQ": not mode.deterministic,
              "DS_OUT": mode.kept}
    signatures = {
        "attention_delta": ("PPPPP" "qPq", 256, 0),
        "attention_backward": ("TTTTTTTT" "PPPPPPP" "iiiffi" "PiiiP", WARPGROUP * (tiles.backward_blocks + 1),
                               SHARED_BYTES),
        "attention_write_dq": ("PPP" "iif", 256, 0),
    }
    sources, split = tiles.backward, {"SPLIT": 1}
    if mode.keys_split:
        sources, blocks = (*sources, MERGE), blocks | split
        signatures["attention_merge_keys"] = ("PPPP" "iif", WARPGROUP, 0)
    before, main, write_dq, *merge_keys = _loaded(device, sources, defines | blocks, signatures)
    if not mode.deterministic:
        return [before, main, write_dq, *merge_keys]
    if mode.kept:
        defines |= {"KEYS": tiles.backward_keys, "BLOCKS": tiles.kept_blocks}
        signatures = {"attention_kept_dq": ("TT" "PPPP" "iifii", WARPGROUP * (tiles.kept_blocks + 1), SHARED_BYTES)}
        return [before, main, *_loaded(device, tiles.kept_dq, defines, signatures), *merge_keys]
    defines |= {"KEYS": tiles.dq_keys, "TABLE_KEYS": tiles.forward_keys}
    sources = tiles.backward_dq
    signatures = {"attention_dq": ("TTTTTT" "PPPPP" "iiiffi" "P", 3 * WARPGROUP, SHARED_BYTES)}
    if mode.dq_split:
        sources, defines = (*sources, MERGE), defines | split
        signatures["attention_merge_dq"] = ("PPP" "iif", WARPGROUP, 0)
    dq, *merge_dq = _loaded(device, sources, defines, signatures)
    return [before, main, dq, *merge_keys, *merge_dq]
