"""Tiles of the Hopper kernel: what a head dim leaves of registers and shared memory decides how much one step takes.

Values have the head dim of keys, except beside 192, the shape of multi-head latent attention, where they have 128.

Compiled variants of the Hopper kernel: for a head dim, a group size and a kind of rows, compiled when asked for.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from ctypes import c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from pathlib import Path

import torch

from distca.kernels.hopper.driver import Function, Launch, Module, TensorMap, compile_cubin
from distca.kernels.hopper.tables import BLOCK_ROWS, TILE_BLOCKS, TILE_KEYS

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
    forward: tuple[str, ...] = ("common.cuh", "forward_softmax.cuh", "forward_copy.cuh", "forward.cu",
                                "forward_kernel.cu")
    backward: tuple[str, ...] = ("common.cuh", "backward_tasks.cuh", "backward_copy.cuh", "backward_steps.cuh",
                                 "backward.cu", "backward_ends.cu")
    backward_dq: tuple[str, ...] = ("common.cuh", "wide.cuh", "backward_dq.cu")
    kept_dq: tuple[str, ...] = ("common.cuh", "wide.cuh", "kept_dq.cu")


_WIDE_FORWARD = ("common.cuh", "wide.cuh", "forward_softmax.cuh", "wide_forward.cu", "forward_kernel.cu")
_WIDE_BACKWARD = ("common.cuh", "wide.cuh", "backward_tasks.cuh", "wide_backward_copy.cuh", "wide_backward.cu",
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


SOURCES = Path(__file__).parent / "cuda"
WARPGROUP, THREADS = 128, 384
SHARED_BYTES = 227 * 1024
INSTRUCTIONS = "instructions.cuh"  # ahead of all other sources
MERGE, MERGE_THREADS = "merge.cu", 128


@dataclass(frozen=True, slots=True)
class Variant:
    """One kernel of a compiled source, and how it is launched."""

    function: Function
    types: Sequence[type]
    num_threads: int
    num_sms: int

    def launch(self, grid: int, stream: int, *maps: TensorMap) -> Launch:
        return Launch(self.function, grid, self.num_threads, stream, self.types, maps)


def _loaded(
    device: torch.device,
    sources: Sequence[str],
    defines: dict[str, int],
    kernels: dict[str, tuple[list[type], int, int]],
) -> list[Variant]:
    text = "".join((SOURCES / name).read_text(encoding="utf-8") for name in (INSTRUCTIONS, *sources))
    index = torch.cuda.current_device() if device.index is None else device.index
    num_sms = torch.cuda.get_device_properties(index).multi_processor_count
    with torch.cuda.device(index):
        module = Module(compile_cubin(text, f"distca/kernels/hopper/cuda/{sources[-1]}", defines))
        return [
            Variant(module.function(name, shared), types, num_threads, num_sms)
            for name, (types, shared, num_threads) in kernels.items()
        ]


@functools.cache
def forward_kernels(
    device: torch.device, head_dim: int, group: int, windowed: bool, split: bool, is_tall: bool
) -> list[Variant]:
    """The main kernel and, where keys of tiles are split, the one that merges their parts."""
    keys: list[type] = [c_void_p, c_int64, c_int64]  # where they lie; wide heads do not ask
    types: list[type] = [TensorMap] * 4 + [c_void_p] * 4 + [c_int32] * 3 + [c_float, c_int32, *keys] + [c_void_p] * 2
    tiles = tiles_of(head_dim)
    blocks = tiles.tall_blocks if is_tall else TILE_BLOCKS
    defines = {"D": head_dim, "DV": tiles.value_dim, "KEYS": tiles.forward_keys, "G": group, "ROWS": BLOCK_ROWS,
               "BLOCKS": blocks, "WINDOWED": windowed}
    kernels: dict[str, tuple[list[type], int, int]] = {
        "attention_forward": (types, SHARED_BYTES, WARPGROUP * (blocks + 1))}
    if not split:
        return _loaded(device, tiles.forward, defines, kernels)
    kernels["attention_merge"] = ([c_void_p] * 5 + [c_int32] * 2, 0, MERGE_THREADS)
    return _loaded(device, (*tiles.forward, MERGE), {**defines, "SPLIT": 1}, kernels)


@functools.cache
def backward_kernels(
    device: torch.device, head_dim: int, group: int, windowed: bool, deterministic: bool, split: bool, kept: bool
) -> list[Variant]:
    """What runs before, the main kernel, what runs after: the one that writes what was added to dQ, or dQ's own kernel.

    Where dS is kept, that is another one; otherwise, where keys of tiles are split, the one that merges parts follows.
    """
    tiles = tiles_of(head_dim)
    defines = {"D": head_dim, "DV": tiles.value_dim, "G": group, "WINDOWED": windowed}
    rows = {"ROWS": BLOCK_ROWS, "KEYS": tiles.backward_keys, "BLOCKS": tiles.backward_blocks,
            "WITH_DQ": not deterministic, "DS_OUT": kept}
    main: list[type] = [TensorMap] * 8 + [c_void_p] * 7 + [c_int32] * 3 + [c_float, c_int32, c_void_p, *[c_int32] * 3]
    kernels: dict[str, tuple[list[type], int, int]] = {
        "attention_delta": ([c_void_p] * 5 + [c_int64, c_void_p, c_int64], 0, 256),
        "attention_backward": (main, SHARED_BYTES, WARPGROUP * (tiles.backward_blocks + 1)),
        "attention_write_dq": ([c_void_p] * 3 + [c_int32] * 2 + [c_float], 0, 256),
    }
    before, backward, write_dq = _loaded(device, tiles.backward, {**defines, **rows}, kernels)
    if not deterministic:
        return [before, backward, write_dq]
    alone: dict[str, tuple[list[type], int, int]]
    if kept:
        few: list[type] = [TensorMap] * 2 + [c_void_p] * 4 + [c_int32] * 2 + [c_float, c_int32, c_int32]
        alone = {"attention_kept_dq": (few, SHARED_BYTES, WARPGROUP * (tiles.kept_blocks + 1))}
        defines |= {"ROWS": BLOCK_ROWS, "KEYS": tiles.backward_keys, "BLOCKS": tiles.kept_blocks}
        return [before, backward, *_loaded(device, tiles.kept_dq, defines, alone)]
    types: list[type] = [TensorMap] * 6 + [c_void_p] * 5 + [c_int32] * 3 + [c_float, c_int32, c_void_p]
    alone = {"attention_dq": (types, SHARED_BYTES, THREADS)}
    defines |= {"ROWS": BLOCK_ROWS, "KEYS": tiles.dq_keys, "TABLE_KEYS": tiles.forward_keys}
    if not split:
        return [before, backward, *_loaded(device, tiles.backward_dq, defines, alone)]
    alone["attention_merge_dq"] = ([c_void_p] * 3 + [c_int32] * 2 + [c_float], 0, MERGE_THREADS)
    return [before, backward, *_loaded(device, (*tiles.backward_dq, MERGE), {**defines, "SPLIT": 1}, alone)]
