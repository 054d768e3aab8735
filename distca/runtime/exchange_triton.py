"""Pack and unpack exchanges on a GPU, one launch each, because many small copies and unfused sums are slow.

The launches read block tables that are built once per plan. Packing copies all runs of all fields, and the stamps, onto
the wire. A server unpacks received and local runs into its buffers. A home reads every part of a token once, merges or
sums the parts in float32 and writes the result once; the order of parts is fixed, so results are reproducible. The host
never waits for the GPU. Tensors that are not contiguous are copied first.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
import triton
import triton.language as tl

from distca.runtime import copy_tables
from distca.runtime.copy_tables import COPY_BYTES, PART_BYTES, Copies, Merges, Sums
from distca.runtime.exchange import ALIGNMENT, Combine, Dispatch, Packing, Tensors

NUM_WARPS = 8
WORDS = {16: (tl.int64, 2), 8: (tl.int64, 1), 4: (tl.int32, 1), 2: (tl.int16, 1), 1: (tl.int8, 1)}


class _InOneLaunch(Packing):
    """Packs with the table `packing`, which both subclasses have."""

    __slots__ = ()
    packing: Copies

    def ready(self, tensors: Tensors) -> Tensors:
        return tensors if self.passes_through and not self.leaving.num_bytes else tuple(map(dense, tensors))

    def pack(self, tensors: Tensors) -> torch.Tensor:
        wire = self.leaving.empty(tensors[0].device)
        copy(self.packing, tensors if self.stamp is None else (*tensors, self.stamp), (wire,))
        return wire


@dataclass(frozen=True, slots=True)
class TritonDispatch(_InOneLaunch, Dispatch):
    packing: Copies
    unpacking: Copies

    def unpack(self, wire: torch.Tensor | None, row: Tensors) -> Tensors:
        if self.passes_through:
            return row
        buffers = self.buffers(row)
        copy(self.unpacking, (row[0] if wire is None else dense(wire), *row), buffers)
        return buffers


@dataclass(frozen=True, slots=True)
class TritonCombine(_InOneLaunch, Combine):
    packing: Copies
    combining: Sums | Merges

    def unpack(self, wire: torch.Tensor | None, buffers: Tensors) -> Tensors:
        if self.passes_through:
            return buffers
        rows = self.rows(buffers)
        combine(self.combining, buffers[0] if wire is None else dense(wire), buffers, rows)
        return rows


def with_triton(
    packing: Packing, device: torch.device, *, copy_bytes: int = COPY_BYTES, part_bytes: int = PART_BYTES
) -> Packing:
    """Return the same packing in one launch each way; bytes are per program and powers of two."""
    same = {field.name: getattr(packing, field.name) for field in fields(packing)}
    same["packing"] = copy_tables.packing(packing, device, copy_bytes)
    if isinstance(packing, Dispatch):
        return TritonDispatch(**same, unpacking=copy_tables.unpacking(packing, device, copy_bytes))
    assert isinstance(packing, Combine)
    table = copy_tables.sums if packing.merged_heads is None else copy_tables.merges
    return TritonCombine(**same, combining=table(packing, device, part_bytes))


def dense(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_contiguous() and tensor.data_ptr() % ALIGNMENT == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def copy(how: Copies, sources: Tensors, targets: Tensors) -> None:
    if len(how.table):
        word, words_a_unit = WORDS[how.unit]
        with torch.cuda.device_of(how.table):
            _copy_block[(len(how.table),)](
                how.table, sources, targets, WORD=word, WORDS_A_UNIT=words_a_unit,
                BLOCK=how.block // how.unit * words_a_unit, num_warps=NUM_WARPS)


def combine(how: Sums | Merges, wire: torch.Tensor, buffers: Tensors, rows: Tensors) -> None:
    if len(how.table) == 0:
        return
    item, grid = rows[0].element_size(), (len(how.table),)
    with torch.cuda.device_of(how.table):
        if isinstance(how, Sums):
            _sum_block[grid](how.table, how.parts, wire, buffers, rows, UNIT=how.unit // item, BLOCK=how.block // item,
                             num_warps=NUM_WARPS)
        else:
            dim = rows[0].shape[-1]
            _merge_block[grid](how.table, how.parts, wire, *buffers, *rows, UNIT=how.unit // item, DIM=dim,
                               PADDED_DIM=triton.next_power_of_2(dim), PAIRS=how.block, num_warps=NUM_WARPS)


@triton.jit
def _copy_block(
    table: tl.tensor, sources: tl.tuple, targets: tl.tuple, WORD: tl.constexpr, WORDS_A_UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    entry = table + tl.program_id(0).to(tl.int64) * 5
    source = _chosen(sources, tl.load(entry), WORD) + tl.load(entry + 2) * WORDS_A_UNIT
    target = _chosen(targets, tl.load(entry + 1), WORD) + tl.load(entry + 3) * WORDS_A_UNIT
    word = tl.arange(0, BLOCK)
    inside = word < tl.load(entry + 4).to(tl.int32) * WORDS_A_UNIT
    tl.store(target + word, tl.load(source + word, mask=inside), mask=inside)


@triton.jit
def _sum_block(
    table: tl.tensor, parts: tl.tensor, wire: tl.tensor, buffers: tl.tuple, rows: tl.tuple, UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    KIND: tl.constexpr = rows[0].dtype.element_ty
    WIDE: tl.constexpr = tl.float64 if KIND.is_fp64() else tl.float32
    entry = table + tl.program_id(0).to(tl.int64) * 6
    field = tl.load(entry)
    skipped = tl.load(entry + 3)
    element = tl.arange(0, BLOCK)
    inside = element < tl.load(entry + 2).to(tl.int32) * UNIT
    on_wire = wire.to(tl.pointer_type(KIND), bitcast=True)
    buffer = _chosen(buffers, field, KIND)
    total = tl.zeros([BLOCK], WIDE)
    for part in range(tl.load(entry + 4), tl.load(entry + 5)):
        source = tl.where(tl.load(parts + part * 2) != 0, on_wire, buffer)
        source += (tl.load(parts + part * 2 + 1) + skipped) * UNIT
        total += tl.load(source + element, mask=inside).to(WIDE)
    row = _chosen(rows, field, KIND) + tl.load(entry + 1) * UNIT
    tl.store(row + element, total.to(KIND), mask=inside)


@triton.jit
def _merge_block(
    table: tl.tensor, parts: tl.tensor, wire: tl.tensor, buffer: tl.tensor, lse_buffer: tl.tensor, out: tl.tensor,
    lse: tl.tensor, UNIT: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr, PAIRS: tl.constexpr,
) -> None:
    """Merge (token, head) pairs: out [pairs, DIM], lse [pairs]."""
    KIND: tl.constexpr = out.dtype.element_ty
    WIDE: tl.constexpr = lse.dtype.element_ty
    entry = table + tl.program_id(0).to(tl.int64) * 5
    first, last = tl.load(entry + 3), tl.load(entry + 4)
    pair = tl.arange(0, PAIRS)
    dim = tl.arange(0, PADDED_DIM)
    inside = pair < tl.load(entry + 1).to(tl.int32)
    tile_inside = inside[:, None]
    if PADDED_DIM != DIM:
        tile_inside = tile_inside & (dim < DIM)[None, :]
    there = tl.load(entry + 2) + pair                            # offset in a part, from the interval's begin
    lse_wire, out_wire = wire.to(tl.pointer_type(WIDE), bitcast=True), wire.to(tl.pointer_type(KIND), bitcast=True)

    largest = tl.full([PAIRS], float("-inf"), WIDE)
    weight = tl.zeros([PAIRS], WIDE)
    for part in range(first, last):
        source = tl.where(tl.load(parts + part * 3) != 0, lse_wire, lse_buffer) + tl.load(parts + part * 3 + 2)
        one = tl.load(source + there, mask=inside, other=float("-inf"))
        before, largest = largest, tl.maximum(largest, one)
        shift = _finite(largest)
        weight = weight * tl.exp(before - shift) + tl.exp(one - shift)
    together = tl.where(weight == 0, float("-inf"), _finite(largest) + tl.log(weight))

    total = tl.zeros([PAIRS, PADDED_DIM], WIDE)
    tile = there[:, None] * DIM + dim[None, :]
    for part in range(first, last):
        is_on_wire = tl.load(parts + part * 3) != 0
        source = tl.where(is_on_wire, lse_wire, lse_buffer) + tl.load(parts + part * 3 + 2)
        share = tl.exp(tl.load(source + there, mask=inside, other=float("-inf")) - _finite(together))
        source = tl.where(is_on_wire, out_wire, buffer) + tl.load(parts + part * 3 + 1) * UNIT
        total += share[:, None] * tl.load(source + tile, mask=tile_inside, other=0.0).to(WIDE)
    here = tl.load(entry) + pair
    tl.store(lse + here, together, mask=inside)
    tl.store(out + here[:, None] * DIM + dim[None, :], total.to(KIND), mask=tile_inside)


@triton.jit
def _finite(lse: tl.tensor) -> tl.tensor:
    """Replace -inf by 0, since -inf - -inf is nan: a part without visible keys then has weight exp(-inf) = 0."""
    return tl.where(lse == float("-inf"), 0.0, lse)


@triton.jit
def _chosen(tensors: tl.tuple, number: tl.tensor, KIND: tl.constexpr) -> tl.tensor:
    pointer = tensors[0].to(tl.pointer_type(KIND), bitcast=True)
    for i in tl.static_range(1, len(tensors)):
        pointer = tl.where(number == i, tensors[i].to(tl.pointer_type(KIND), bitcast=True), pointer)
    return pointer
