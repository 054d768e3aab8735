"""A rank's tensors as safetensors files, every block hashed while it is written and while it is read.

What a rank holds of a tensor is a box [offset, offset + shape) of its global shape, so that ranks which cut the tensor
otherwise find their boxes among those that were written. Where several ranks hold the same box one of them writes it.
Bytes go from the file into the tensor's own memory where the boxes are the same.
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
MOST_WAITING = 64  # chunks to be hashed, and blocks: what a reader may be ahead


class Held(NamedTuple):
    """What a rank holds of one tensor, as ranks tell each other."""

    name: str
    dtype: str
    shape: list[int]             # of the whole tensor
    offset: list[int]
    box: list[int]               # the shape of this rank's part

    @property
    def num_bytes(self) -> int:
        return prod(self.box) * getattr(torch, self.dtype).itemsize


def dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def held(name: str, tensor: torch.Tensor) -> Held:
    offset, box = [0] * tensor.ndim, list(tensor.shape)
    if isinstance(tensor, DTensor):
        box, offset = map(list, compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh,
                                                                      tensor.placements))
    return Held(name, dtype_name(tensor), list(tensor.shape), offset, box)


def describe(model: torch.nn.Module) -> dict[str, str]:
    """Name, dtype and global shape of all that this rank's model holds."""
    return {name: f"{dtype_name(value)} {list(value.shape)}" for name, value in get_model_state_dict(model).items()
            if isinstance(value, torch.Tensor)}


def writers(everyone: Sequence[Sequence[Held]]) -> list[set[str]]:
    """The names that each rank writes of what it holds: every box once, where several hold it by who has least."""
    holders: dict[tuple[str, tuple[int, ...], tuple[int, ...]], list[int]] = {}
    num_bytes: dict[tuple[str, tuple[int, ...], tuple[int, ...]], int] = {}
    for rank, parts in enumerate(everyone):
        for part in parts:
            if part.num_bytes:
                key = part.name, tuple(part.offset), tuple(part.box)
                holders.setdefault(key, []).append(rank)
                num_bytes[key] = part.num_bytes
    load, names = [0] * len(everyone), [set[str]() for _ in everyone]
    for key, ranks in sorted(holders.items(), key=lambda item: len(item[1])):
        writer = min(ranks, key=lambda rank: load[rank])
        load[writer] += num_bytes[key]
        names[writer].add(key[0])
    return names


def write_file(
    path: Path, tensors: Iterable[tuple[Held, torch.Tensor]]
) -> tuple[FileFacts, list[tuple[Held, Block]]]:
    """Write these parts, on the CPU, as one safetensors file, on disk when this returns."""
    parts = [(about, tensor.contiguous()) for about, tensor in tensors]
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for about, _ in parts:
        header[about.name.removeprefix("model.")] = {
            "dtype": SAFETENSORS_DTYPES[about.dtype], "shape": about.box, "data_offsets": [end, end + about.num_bytes]}
        end += about.num_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    blocks, at = [], len(head)
    with path.open("wb", buffering=0) as file:
        _write(file.fileno(), memoryview(head))
        for about, tensor in parts:
            digest = xxhash.xxh3_64()
            for chunk in tensor_bytes(tensor):
                digest.update(chunk)
                _write(file.fileno(), chunk)
            blocks.append((about, Block(path.name, at, about.num_bytes, about.offset, about.box, digest.hexdigest())))
            at += about.num_bytes
        os.fsync(file.fileno())
    return FileFacts(at, len(head), checksum(head)), blocks


class Reader:
    """Reads boxes of a checkpoint's tensors. A context: what was read is known to be whole once it ends.

    A thread hashes what was read while the next is being read, so that checking takes next to no time.
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
        about, into = held(name, tensor), local_part(tensor)
        stored = self.stored(name)
        if (stored.dtype, stored.shape) != (about.dtype, about.shape):
            raise DamagedError(f"{name} is {stored.dtype} {stored.shape} there and {about.dtype} {about.shape} here")
        found = 0
        for block in stored.blocks:
            start = [max(a, b) for a, b in zip(about.offset, block.offset, strict=True)]
            stop = [min(a + n, b + m) for a, n, b, m in zip(about.offset, about.box, block.offset, block.shape,
                                                            strict=True)]
            size = [max(0, b - a) for a, b in zip(start, stop, strict=True)]
            if prod(size) == 0 or prod(block.shape) * into.element_size() != block.num_bytes:
                continue
            found += prod(size)
            if size == about.box == block.shape and into.device.type == "cpu" and into.is_contiguous():
                self._read(block, into)
                continue
            whole = torch.empty(block.shape, dtype=into.dtype)
            self._read(block, whole)
            theirs = tuple(slice(a - b, a - b + n) for a, b, n in zip(start, block.offset, size, strict=True))
            ours = tuple(slice(a - b, a - b + n) for a, b, n in zip(start, about.offset, size, strict=True))
            into[ours].copy_(whole[theirs])
        if found != prod(about.box):
            raise DamagedError(f"{name} has {found} of the {prod(about.box)} elements that this rank needs")

    def whole(self, name: str) -> torch.Tensor:
        """A tensor put together from all its blocks."""
        stored = self.stored(name)
        tensor = torch.empty(stored.shape, dtype=getattr(torch, stored.dtype))
        self.fill(name, tensor)
        return tensor

    def stored(self, name: str) -> StoredTensor:
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
        """Chunks of a block, then the block, until None; the first block whose chunks do not match its checksum."""
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


def tensor_table(written: Iterable[tuple[Held, Block]]) -> dict[str, StoredTensor]:
    """The blocks of all ranks by tensor."""
    table: dict[str, StoredTensor] = {}
    for about, block in written:
        table.setdefault(about.name, StoredTensor(about.dtype, about.shape, [])).blocks.append(block)
    return table


def tensor_bytes(tensor: torch.Tensor) -> Iterator[memoryview]:
    """A contiguous CPU tensor's own memory, piece by piece."""
    if tensor.numel() == 0:
        return iter(())
    memory = memoryview(cast(Any, tensor.reshape(-1).view(torch.uint8).numpy()))
    return (memory[at:at + CHUNK_BYTES] for at in range(0, len(memory), CHUNK_BYTES))


def _write(handle: int, content: memoryview) -> None:
    while content:
        content = content[os.write(handle, content):]
