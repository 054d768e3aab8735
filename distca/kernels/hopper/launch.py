"""Launches of the Hopper kernel: which kernels run, with which tensor maps and numbers.

Launches and their tensor maps are cached by shapes and by addresses, so that a launch costs the host little more than
the driver call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import get_ident
from typing import Any

import torch
from torch import Tensor

from distca.kernels.hopper.buffers import Tables, multiprocessors
from distca.kernels.hopper.driver import Function, Launch, TensorMap, tensor_map
from distca.kernels.hopper.tables import BLOCK_ROWS, tokens_per_block
from distca.kernels.hopper.variants import DIMS_TEXT, TILES, Masks, Mode, backward_kernels, forward_kernels, tiles_of
from distca.kernels.interface import BackwardInputs, Scores, dims_text
from distca.validation import UserError

PANEL = 64  # columns per tensor copy
MERGE_BLOCKS = 16  # thread blocks per multiprocessor
SHAPES_KEPT, CALLS_KEPT = 16, 512  # cached shapes, and calls per shape


@dataclass(frozen=True, slots=True)
class Kind:
    """Data shared by all calls with the same shapes, for one prepared set of tasks."""

    tables: Tables
    scores: Scores
    scale: float  # default
    new: tuple[Callable[[], Tensor], ...]  # allocate out, lse, dq, dk, dv
    leaves_queries: bool  # some queries are in no task
    leaves_keys: bool  # some keys are in no task
    launches: Launches


def run_forward(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, kind: Kind, scale: float) -> None:
    """Fill out and lse of queries that are in tasks."""
    tables, launches = kind.tables, kind.launches
    stream = torch._C._cuda_getCurrentRawStream(launches.device_index)
    k_address, k_stride = memory = k.data_ptr(), k.stride()
    call = launches.forward(get_ident(), stream, tables.num_parts > 0, (q.data_ptr(), q.stride()), memory,
                            (v.data_ptr(), v.stride()))
    if call is None:
        run_forward(_contiguous(q), _contiguous(k), _contiguous(v), out, lse, kind, scale)
        return
    launch, merge = call
    out_address, lse_address, kv_heads = out.data_ptr(), lse.data_ptr(), launches.kv_heads
    part_sums = part_references = 0
    table, tiles_at, segments_at, merges_at = tables.forward_numbers
    counter = tables.counters.address(stream)
    if merge is not None:
        num_rows = tables.num_parts * kv_heads * 2 * BLOCK_ROWS
        workspace = _floats(num_rows * (v.shape[2] + 2), launches.device)
        part_sums = workspace.data_ptr()
        part_references = part_sums + 4 * num_rows * v.shape[2]
    launch(out_address, lse_address, table, counter, tiles_at, segments_at, kv_heads, scale,
           kind.scores.softcap or 0.0, kind.scores.window or 0, k_address, k_stride[0], k_stride[1], part_sums,
           part_references)
    if merge is not None:
        merge(out_address, lse_address, part_sums, part_references, table, merges_at, kv_heads)


def run_backward(
    saved: BackwardInputs, gradients: tuple[Tensor, ...], kind: Kind, scale: float, deterministic: bool
) -> None:
    """Fill dq, dk and dv of queries and keys that are in tasks.

    dQ is summed in memory with atomic adds. If it must be deterministic, if dS is kept, or if heads are wide, a
    separate kernel computes it instead. dK and dV of tiles of keys whose queries are split are merged at the end.
    """
    dout, q, k, v, out, lse = saved
    dq, dk, dv = gradients
    tables, launches, window, softcap = kind.tables, kind.launches, kind.scores.window or 0, kind.scores.softcap or 0.0
    kept, num_parts, num_key_parts = tables.kept, tables.num_parts, tables.num_key_parts
    deterministic = deterministic or kept is not None or launches.tiles.dq_apart
    stream = torch._C._cuda_getCurrentRawStream(launches.device_index)
    dout, out, lse = dout.contiguous(), out.contiguous(), lse.contiguous()
    mode = Mode(deterministic, kept is not None, deterministic and num_parts > 0 and kept is None, num_key_parts > 0)
    call = launches.backward(get_ident(), stream, mode, (dout.data_ptr(), dout.stride()), (q.data_ptr(), q.stride()),
                             (k.data_ptr(), k.stride()), (v.data_ptr(), v.stride()))
    if call is None:
        saved = BackwardInputs(_contiguous(dout), _contiguous(q), _contiguous(k), _contiguous(v), out, lse)
        run_backward(saved, gradients, kind, scale, deterministic)
        return
    before, main, after, merge_keys, merge_dq = call
    kv_heads, num_numbers = launches.kv_heads, launches.num_numbers
    num_sums = (2 * num_parts if deterministic else tables.num_blocks) * BLOCK_ROWS * kv_heads * launches.q[2]
    num_key_sums = num_key_parts * kv_heads * launches.tiles.backward_keys * (launches.q[2] + launches.v[2])
    workspace = _floats(num_sums + num_key_sums + 2 * num_numbers, launches.device)
    dq_address, dk_address, dv_address, dq_sum = dq.data_ptr(), dk.data_ptr(), dv.data_ptr(), workspace.data_ptr()
    key_sums = dq_sum + 4 * num_sums
    lse_log2 = key_sums + 4 * num_key_sums
    delta = lse_log2 + 4 * num_numbers
    table, items_at, tasks_at, merges_at, blocks_at = tables.backward_numbers
    counter = tables.counters.address(stream) + 4
    before(out.data_ptr(), dout.data_ptr(), lse.data_ptr(), lse_log2, delta, num_numbers, dq_sum,
           0 if deterministic else num_sums // 4)
    if kept is not None:
        places = torch.empty(kept.num_bytes, dtype=torch.uint8, device=launches.device)
        kept_table, (_, pairs_at) = kept.table.ints.data_ptr(), kept.table.offsets
        for first in range(0, kv_heads, kept.heads):
            some = first, min(kept.heads, kv_heads - first)
            main(lse_log2, delta, places.data_ptr(), dk_address, dv_address, table, counter, items_at, tasks_at,
                 kv_heads, scale, softcap, window, kept_table + 4 * pairs_at, kept.num_places, *some, key_sums)
            after(places.data_ptr(), dq_address, kept_table, counter + 4, pairs_at, kv_heads, scale, *some)
    else:
        main(lse_log2, delta, dq_sum, dk_address, dv_address, table, counter, items_at, tasks_at, kv_heads, scale,
             softcap, window, 0, 0, 0, kv_heads, key_sums)
    if merge_keys is not None:
        merge_keys(dk_address, dv_address, key_sums, table, merges_at, kv_heads, scale)
    if not deterministic:
        after(dq_address, dq_sum, table, blocks_at, kv_heads, scale)
    elif kept is None:
        table, tiles_at, segments_at, merges_at = tables.dq_numbers
        after(lse_log2, delta, dq_address, table, counter + 4, tiles_at, segments_at, kv_heads, scale, softcap, window,
              dq_sum)
    if merge_dq is not None:
        merge_dq(dq_address, dq_sum, table, merges_at, kv_heads, scale)


Memory = tuple[int, tuple[int, ...]]  # address and strides of a tensor


class Launches:
    """Launches for tensors of given shapes, cached by thread and by the tensors' addresses, which recur across layers.

    `forward` and `backward` return None if a tensor's strides or alignment allow no tensor map.
    """

    def __init__(self, device: torch.device, q: torch.Size, k: torch.Size, v: torch.Size, masks: Masks, is_tall: bool,
                 num_sms: int) -> None:
        self.device, self.device_index = device, device.index
        self.q, self.k, self.v, self.kv_heads, self.num_numbers = q, k, v, k[1], q[0] * q[1]
        self.masks, self.is_tall, self.num_sms, self.tiles = masks, is_tall, num_sms, tiles_of(q[2])
        self.forward = functools.lru_cache(CALLS_KEPT)(self._forward)
        self.backward = functools.lru_cache(CALLS_KEPT)(self._backward)

    def _forward(
        self, thread: int, stream: int, split: bool, q: Memory, k: Memory, v: Memory
    ) -> tuple[Launch, Launch | None] | None:
        """Return the launch of the main kernel and, if keys of tiles are split, of the kernel that merges parts."""
        self._check_dims()
        if not all(map(_mappable, (q, k, v))):
            return None
        tile_keys = self.tiles.forward_keys
        maps = (
            _query_map(q, self.q, self.kv_heads),
            _key_map(k, self.k, tile_keys),
            _key_map(v, self.v, tile_keys),
            _key_map(v, self.v, 1),
        )
        kernel, *merge = forward_kernels(self.device, self.q[2], self.q[1] // self.kv_heads, self.masks, split,
                                         self.is_tall)
        return kernel.launch(self.num_sms, stream, *maps), self._merge(merge, stream)

    def _backward(
        self, thread: int, stream: int, mode: Mode, dout: Memory, q: Memory, k: Memory, v: Memory
    ) -> tuple[Launch, Launch, Launch, Launch | None, Launch | None] | None:
        """Return the launches before the main kernel, of it, after it, and of merging parts of keys and of dQ."""
        self._check_dims()
        if not all(map(_mappable, (dout, q, k, v))):
            return None
        kv_heads, tiles, group = self.kv_heads, self.tiles, self.q[1] // self.kv_heads
        dout_shape = torch.Size((*self.q[:2], self.v[2]))
        block_len = tokens_per_block(group)
        maps = (
            _query_map(q, self.q, kv_heads, block_len),
            _query_map(q, self.q, kv_heads, 1),
            _query_map(dout, dout_shape, kv_heads, block_len),
            _query_map(dout, dout_shape, kv_heads, 1),
            _key_map(k, self.k, tiles.backward_keys),
            _key_map(k, self.k, 1),
            _key_map(v, self.v, tiles.backward_keys),
            _key_map(v, self.v, 1),
        )
        before, main, after, *merges = backward_kernels(self.device, self.q[2], group, self.masks, mode)
        alone = () if not mode.deterministic else maps[4:6] if mode.kept else (
            _query_map(q, self.q, kv_heads), _query_map(dout, dout_shape, kv_heads),
            _key_map(k, self.k, tiles.dq_keys), maps[5], _key_map(v, self.v, tiles.dq_keys), maps[7])
        ends = 8 * multiprocessors(self.device)
        return (before.launch(ends, stream), main.launch(self.num_sms, stream, *maps),
                after.launch(self.num_sms if mode.deterministic else ends, stream, *alone),
                self._merge(merges[:mode.keys_split], stream), self._merge(merges[mode.keys_split:], stream))

    def _merge(self, kernels: Sequence[Function], stream: int) -> Launch | None:
        return kernels[0].launch(MERGE_BLOCKS * self.num_sms, stream) if kernels else None

    def _check_dims(self) -> None:
        dim, value_dim = self.q[2], self.v[2]
        if dim not in TILES or TILES[dim].value_dim != value_dim:
            raise UserError(f"{dims_text(dim, value_dim)}; give {DIMS_TEXT}")


launches_of = functools.lru_cache(SHAPES_KEPT)(Launches)


def _mappable(memory: Memory) -> bool:
    """Return whether heads are contiguous and all offsets are multiples of 16 bytes, as tensor copies require."""
    address, stride = memory
    return address % 16 == 0 and stride[2] == 1 and stride[1] % 8 == 0 and stride[0] % 8 == 0


def _contiguous(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def _query_map(memory: Memory, shape: torch.Size, kv_heads: int, num_tokens: int | None = None) -> TensorMap:
    """Map blocks of [tokens, heads, dim] with all query heads of a KV head; `num_tokens` defaults to a full block."""
    (address, stride), (tokens, heads, dim) = memory, shape
    group, head_bytes = heads // kv_heads, 2 * stride[1]
    sizes, strides = (dim, group, kv_heads, tokens), (head_bytes, group * head_bytes, 2 * stride[0])
    return tensor_map(address, sizes, strides, (PANEL, group, 1, num_tokens or tokens_per_block(group)))


def _key_map(memory: Memory, shape: torch.Size, num_tokens: int) -> TensorMap:
    """Map tiles of [tokens, kv_heads, dim] with one KV head."""
    (address, stride), (tokens, kv_heads, dim) = memory, shape
    return tensor_map(address, (dim, kv_heads, tokens), (2 * stride[1], 2 * stride[0]), (PANEL, 1, num_tokens))


_empty_strided: Any = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)


def new(shape: Sequence[int], dtype: torch.dtype, like: Tensor) -> Callable[[], Tensor]:
    """Return a function that allocates contiguous tensors of this shape on `like`'s device.

    On a GPU it uses the allocator of torch's compiled code, which takes a quarter of torch.empty's host time.
    """
    if _empty_strided is None or not like.is_cuda:
        return functools.partial(torch.empty, tuple(shape), dtype=dtype, device=like.device)
    strides = [1]
    for size in shape[:0:-1]:
        strides.insert(0, strides[0] * size)
    return functools.partial(_empty_strided, tuple(shape), tuple(strides), dtype)


def _floats(count: int, device: torch.device) -> Tensor:
    if _empty_strided is None:
        return torch.empty(count, dtype=torch.float32, device=device)
    return _empty_strided((count,), (1,), torch.float32)
