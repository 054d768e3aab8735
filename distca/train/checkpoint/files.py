"""Write a rank's tensors as safetensors files, and read them back under any sharding, with checksums per block.

A rank's part of a tensor is a box [offset, offset + shape) of the global shape; a reader with another sharding
intersects its box with the stored ones. If several ranks have the same box, one of them writes it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from math import prod
from pathlib import Path
from queue import Queue
from typing import Any, NamedTuple, cast

import torch
import xxhash
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from distca.train.checkpoint.folder import (
    CHUNK_BYTES,
    Block,
    DamagedError,
    FileFacts,
    Manifest,
    StoredTensor,
    check_bytes,
    checksum,
    mismatch,
    opened,
    read_at,
)
from distca.train.groups import in_background

SAFETENSORS_DTYPES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64",
                      "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL"}
MOST_WAITING = 64  # most items in the queue of the hashing thread


class Part(NamedTuple):
    """A rank's part of one tensor; ranks exchange it as JSON."""

    name: str
    dtype: str
    shape: list[int]             # global shape
    offset: list[int]
    box: list[int]               # shape of this part

    @property
    def num_bytes(self) -> int:
        return prod(self.box) * element_bytes(self.dtype)


def dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def element_bytes(dtype: str) -> int:
    kind: torch.dtype = getattr(torch, dtype)
    return kind.itemsize


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def part_of(name: str, tensor: torch.Tensor) -> Part:
    offset, box = [0] * tensor.ndim, list(tensor.shape)
    if isinstance(tensor, DTensor):
        box, offset = map(list, compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh,
                                                                      tensor.placements))
    return Part(name, dtype_name(tensor), list(tensor.shape), offset, box)


def describe(model: torch.nn.Module) -> dict[str, str]:
    """Return dtype and global shape of every tensor in this rank's model, by name."""
    return {name: f"{dtype_name(value)} {list(value.shape)}" for name, value in get_model_state_dict(model).items()
            if isinstance(value, torch.Tensor)}


def writers(by_rank: Sequence[Sequence[Part]]) -> list[set[str]]:
    """Return the names that each rank writes: every box once, by the owner with the fewest bytes so far."""
    owners: dict[tuple[str, tuple[int, ...], tuple[int, ...]], list[tuple[int, int]]] = {}
    for rank, parts in enumerate(by_rank):
        for part in parts:
            if part.num_bytes:
                owners.setdefault((part.name, tuple(part.offset), tuple(part.box)), []).append((rank, part.num_bytes))
    load, names = [0] * len(by_rank), [set[str]() for _ in by_rank]
    for (name, _, _), ranks in sorted(owners.items(), key=lambda item: len(item[1])):
        writer, num_bytes = min(ranks, key=lambda owner: load[owner[0]])
        load[writer] += num_bytes
        names[writer].add(name)
    return names


def overlap(part: Part, block: Block) -> tuple[list[int], list[int]]:
    """Return offset and shape of the elements that a part and a stored block share; the shape may have zeros."""
    start = [max(a, b) for a, b in zip(part.offset, block.offset, strict=True)]
    stop = [min(a + n, b + m) for a, n, b, m in zip(part.offset, part.box, block.offset, block.shape, strict=True)]
    return start, [max(0, b - a) for a, b in zip(start, stop, strict=True)]


def safetensors_header(tensors: Iterable[tuple[str, str, list[int]]]) -> bytes:
    """Return the header of a safetensors file with tensors (name, dtype, shape) in this order."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, dtype, shape in tensors:
        begin, end = end, end + prod(shape) * element_bytes(dtype)
        header[name] = {"dtype": SAFETENSORS_DTYPES[dtype], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_file(path: Path, tensors: Sequence[tuple[Part, torch.Tensor]]) -> tuple[FileFacts, list[tuple[Part, Block]]]:
    """Write CPU tensors as one safetensors file and fsync it."""
    head = safetensors_header((part.name.removeprefix("model."), part.dtype, part.box) for part, _ in tensors)
    blocks, at = [], len(head)
    with path.open("wb", buffering=0) as file:
        _write(file.fileno(), memoryview(head))
        for part, tensor in tensors:
            digest = xxhash.xxh3_64()
            for chunk in tensor_bytes(tensor.contiguous()):
                digest.update(chunk)
                _write(file.fileno(), chunk)
            blocks.append((part, Block(path.name, at, part.num_bytes, part.offset, part.box, digest.hexdigest())))
            at += part.num_bytes
        os.fsync(file.fileno())
    return FileFacts(at, len(head), checksum(head)), blocks


class Reader:
    """Reads boxes of a checkpoint's tensors; the end of its `with` block raises if a block that was read is damaged.

    A thread hashes each chunk while the next one is read, so verification costs almost no time.
    """

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path, self.manifest = path, manifest
        self._files = ExitStack()
        self._handles: dict[str, int] = {}
        self._to_hash: Queue[memoryview | Block | None] = Queue(MOST_WAITING)
        self._hashing = in_background(self._hash)

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._files.close()
        self._to_hash.put(None)
        damaged = self._hashing.result()
        if damaged is not None and kind is None:
            raise mismatch(damaged.file, damaged.begin, damaged.begin + damaged.num_bytes)

    def fill(self, name: str, tensor: torch.Tensor) -> None:
        """Fill this rank's part of a tensor in place."""
        part, into = part_of(name, tensor), local_part(tensor)
        stored = self._stored(name)
        if (stored.dtype, stored.shape) != (part.dtype, part.shape):
            raise DamagedError(f"{name} is {stored.dtype} {stored.shape} there and {part.dtype} {part.shape} here")
        found = 0
        for block in stored.blocks:
            start, size = overlap(part, block)
            if prod(size) == 0 or prod(block.shape) * into.element_size() != block.num_bytes:
                continue
            found += prod(size)
            if size == part.box == block.shape and into.device.type == "cpu" and into.is_contiguous():
                self._read(block, into)
                continue
            whole = torch.empty(block.shape, dtype=into.dtype)
            self._read(block, whole)
            in_block = tuple(slice(a - b, a - b + n) for a, b, n in zip(start, block.offset, size, strict=True))
            in_part = tuple(slice(a - b, a - b + n) for a, b, n in zip(start, part.offset, size, strict=True))
            into[in_part].copy_(whole[in_block])
        if found != prod(part.box):
            raise DamagedError(f"{name} has {found} of the {prod(part.box)} elements that this rank needs")

    def whole(self, name: str) -> torch.Tensor:
        """Return a tensor assembled from all its blocks."""
        stored = self._stored(name)
        tensor = torch.empty(stored.shape, dtype=getattr(torch, stored.dtype))
        self.fill(name, tensor)
        return tensor

    def _stored(self, name: str) -> StoredTensor:
        if name not in self.manifest.tensors:
            raise DamagedError(f"it has no {name}")
        return self.manifest.tensors[name]

    def _read(self, block: Block, into: torch.Tensor) -> None:
        handle, at = self._handle(block.file), block.begin
        for chunk in tensor_bytes(into):
            read_at(handle, at, chunk, block.file)
            at += len(chunk)
            self._to_hash.put(chunk)
        self._to_hash.put(block)

    def _hash(self) -> Block | None:
        """Hash the queue's chunks, compare with the block that follows them, until None; return the first mismatch."""
        digest, damaged = xxhash.xxh3_64(), None
        while (item := self._to_hash.get()) is not None:
            if isinstance(item, memoryview):
                digest.update(item)
                continue
            if digest.hexdigest() != item.checksum:
                damaged = damaged or item
            digest = xxhash.xxh3_64()
        return damaged

    def _handle(self, name: str) -> int:
        if name not in self._handles:
            facts = self.manifest.files[name]
            handle = self._files.enter_context(opened(self.path / name))
            check_bytes(handle, 0, iter([memoryview(bytearray(facts.header_bytes))]), facts.header_checksum, name)
            self._handles[name] = handle
        return self._handles[name]


def tensor_table(written: Iterable[tuple[Part, Block]]) -> dict[str, StoredTensor]:
    """Return the blocks of all ranks by tensor."""
    table: dict[str, StoredTensor] = {}
    for part, block in written:
        table.setdefault(part.name, StoredTensor(part.dtype, part.shape, [])).blocks.append(block)
    return table


def tensor_bytes(tensor: torch.Tensor) -> Iterator[memoryview]:
    """Yield the memory of a contiguous CPU tensor in chunks, without copies."""
    if tensor.numel() == 0:
        return iter(())
    memory = memoryview(cast(Any, tensor.reshape(-1).view(torch.uint8).numpy()))
    return (memory[at:at + CHUNK_BYTES] for at in range(0, len(memory), CHUNK_BYTES))


def _write(handle: int, content: memoryview) -> None:
    while content:
        content = content[os.write(handle, content):]
