"""A checkpoint's weights as a Hugging Face folder, so that trained models leave: safetensors, config and tokenizer.

Whatever mesh saved them, tensors are put together one at a time and go to disk at once: no GPU, no process group, and
never more in memory than one tensor. Everything is written into a folder beside the target, which is renamed at the
end: an export that is killed leaves no target, and the next one clears away what it left.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import torch

from distca.models import CONFIG
from distca.train.checkpoint.files import SAFETENSORS_DTYPES, Reader, tensor_bytes
from distca.train.checkpoint.folder import DamagedError, Manifest, TornError, cause, read_manifest
from distca.train.checkpoint.tokenizer_files import kept_tokenizer
from distca.train.model.hf_weights import INDEX, SINGLE, hf_name
from distca.validation import UserError

SHARD_BYTES = 5 * 10**9
DTYPES = ("bfloat16", "float16", "float32", "float64")


def export_newest(
    checkpoints: Iterable[Path], folder: Path, *, dtype: str | None = None, say: Callable[[str], None] = print
) -> None:
    """Export the newest that is good of some checkpoints, oldest first; says which, and which are passed over."""
    check_target(folder, "OUT")
    for path in reversed(list(checkpoints)):
        try:
            export_hf(path, folder, dtype=dtype)
        except (DamagedError, TornError) as error:
            say(f"{path.name}  {'torn' if isinstance(error, TornError) else 'damaged'} and not used: {error}")
        else:
            say(f"{path.name}  exported to {folder}")
            return
    raise UserError(f"no checkpoint to export into {folder} is whole; `distca checkpoint verify` says what is wrong "
                    "with each")


def export_hf(checkpoint: Path, folder: Path, *, dtype: str | None = None, shard_bytes: int = SHARD_BYTES) -> None:
    """Write one checkpoint's weights where transformers can load them; `dtype` is by default that of the checkpoint."""
    check_target(folder, "OUT")
    manifest = read_manifest(checkpoint)
    if not manifest.config:
        raise UserError(f"{checkpoint} does not say which model its weights are; save it again with distca train")
    sizes = {name: prod(tensor.shape) * _element_bytes(dtype or tensor.dtype)
             for name, tensor in manifest.tensors.items() if name.startswith("model.")}
    shards = _into_shards(sizes, shard_bytes)
    files = [SINGLE] if len(shards) == 1 else [
        f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
    try:
        with _beside(folder, sum(sizes.values())) as partial, Reader(checkpoint, manifest) as reader:
            for file, names in zip(files, shards, strict=True):
                _write_shard(partial / file, names, reader, manifest, dtype)
            if len(files) > 1:
                index = {hf_name(name.removeprefix("model.")): file
                         for file, names in zip(files, shards, strict=True) for name in names}
                _write_json(partial / INDEX, {"metadata": {"total_size": sum(sizes.values())}, "weight_map": index})
            _write_json(partial / CONFIG, manifest.config | ({} if dtype is None else {"torch_dtype": dtype}))
            for source in kept_tokenizer(checkpoint.parent):
                shutil.copyfile(source, partial / source.name)
    except OSError as error:
        raise UserError(f"{folder} was not written: {cause(error)}") from None


def check_target(folder: str | Path, field: str) -> None:
    """Refuse to export over anything."""
    folder = Path(folder)
    if os.path.lexists(folder) and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{field} is {str(folder)!r}, which already holds something; name a new folder")


@contextmanager
def _beside(folder: Path, num_bytes: int) -> Iterator[Path]:
    """A folder beside another, whose name it takes at the end. What exports that were killed left there goes first."""
    folder = folder.absolute()
    folder.parent.mkdir(parents=True, exist_ok=True)
    begin = f".{folder.name}.partial-"
    for left in folder.parent.glob(f"{begin}*"):
        with _held(left) as alone:
            if alone:
                shutil.rmtree(left, ignore_errors=True)
    free = shutil.disk_usage(folder.parent).free
    if free < num_bytes:
        raise UserError(f"{folder} needs {num_bytes:,} bytes and {free:,} are free; make space, or name a folder "
                        "elsewhere")
    partial = folder.with_name(f"{begin}{os.getpid()}")
    partial.mkdir()
    with _held(partial):
        try:
            yield partial
            for path in (*partial.iterdir(), partial):
                _to_disk(path)
            partial.replace(folder)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    _to_disk(folder.parent)


@contextmanager
def _held(folder: Path) -> Iterator[bool]:
    """Whether no other process holds this folder; then it is held here, for as long as the process lives at most."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield True
    except BlockingIOError:
        yield False
    finally:
        os.close(handle)


def _write_shard(path: Path, names: list[str], reader: Reader, manifest: Manifest, dtype: str | None) -> None:
    """A safetensors file, tensor by tensor."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        stored = manifest.tensors[name]
        kind = dtype or stored.dtype
        begin, end = end, end + prod(stored.shape) * _element_bytes(kind)
        header[hf_name(name.removeprefix("model."))] = {
            "dtype": SAFETENSORS_DTYPES[kind], "shape": stored.shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            tensor = reader.whole(name)
            if dtype is not None:
                tensor = tensor.to(getattr(torch, dtype))
            for chunk in tensor_bytes(tensor):
                file.write(chunk)


def _into_shards(sizes: dict[str, int], shard_bytes: int) -> list[list[str]]:
    """Names in order, as many to a file as fit, at least one."""
    shards: list[list[str]] = []
    room = 0
    for name, size in sizes.items():
        if not shards or size > room:
            shards.append([])
            room = shard_bytes
        shards[-1].append(name)
        room -= size
    return shards


def _element_bytes(dtype: str) -> int:
    kind: torch.dtype = getattr(torch, dtype)
    return kind.itemsize


def _to_disk(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
