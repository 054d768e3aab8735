"""A checkpoint's weights as a Hugging Face folder, so that trained models leave: safetensors, config and tokenizer.

Whatever mesh saved them, tensors are put together one at a time and go to disk at once: no GPU, no process group, and
never more in memory than one tensor. Everything is written into a folder beside the target, which is renamed at the
end: an export that is killed leaves no target, and the next one clears away what it left.

A run's tokenizer, kept with its checkpoints, so that an exported model brings it along wherever it goes.

`data.tokenizer` names one file or its folder, with the files that transformers wants beside it; a loaded model has them
in its folder.
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

from distca.corpus.tokenizers import END_OF_DOCUMENT, TextTokenizer, open_tokenizer
from distca.models import CONFIG, read_config
from distca.train.checkpoint.files import SAFETENSORS_DTYPES, Reader, tensor_bytes
from distca.train.checkpoint.folder import DamagedError, Manifest, TornError, cause, read_manifest
from distca.train.model.huggingface import INDEX, SINGLE, hf_name
from distca.train.settings import Settings
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


FOLDER = "tokenizer"             # in checkpoint.folder
TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
FILES = (TOKENIZER, TOKENIZER_CONFIG, "special_tokens_map.json", "added_tokens.json", "tokenizer.model", "vocab.json",
         "merges.txt", "chat_template.jinja", "generation_config.json")


def keep_tokenizer(settings: Settings, checkpoints: Path) -> None:
    """Copy the run's tokenizer beside its checkpoints, in one rename, once."""
    kept = checkpoints / FOLDER
    files = _files(settings)
    if kept.exists() or not files:
        return
    partial = checkpoints / f".{FOLDER}-{os.getpid()}"
    shutil.rmtree(partial, ignore_errors=True)                   # of a process that had this number
    partial.mkdir(parents=True)
    for name, source in files.items():
        shutil.copyfile(source, partial / name)
    if TOKENIZER in files and TOKENIZER_CONFIG not in files:
        about: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
        end = _opened(settings, files[TOKENIZER]).end
        about |= {} if end is None else {"eos_token": end[0]}
        (partial / TOKENIZER_CONFIG).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    partial.rename(kept)


def kept_tokenizer(checkpoints: Path) -> list[Path]:
    """The files that `keep_tokenizer` left there, by name."""
    return [file for name in FILES if (file := checkpoints / FOLDER / name).is_file()]


def token_ids(settings: Settings) -> dict[str, Any]:
    """What config.json says of special tokens: a loaded model's own, or the one that ends a document of the data."""
    if settings.model.load:
        config = read_config(settings.model.load)
        return {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id") if name in config}
    end: int | None = END_OF_DOCUMENT
    if settings.data.tokenizer:
        file = _files(settings).get(TOKENIZER)
        found = None if file is None else _opened(settings, file).end
        end = None if found is None else found[1]
    elif settings.data.source == "megatron" or settings.data.content == "tokens":
        end = None
    return {"bos_token_id": None, "eos_token_id": end}


def _files(settings: Settings) -> dict[str, Path]:
    """Name in the export -> file; of a named tokenizer, else of a loaded model."""
    named = Path(settings.data.tokenizer) if settings.data.tokenizer else None
    folder = Path(settings.model.load) if settings.model.load else None
    if named is not None:
        folder = named if named.is_dir() else named.parent
    if folder is None:
        return {}
    found = {name: folder / name for name in FILES if (folder / name).is_file()}
    if named is not None and named.is_file():
        return found | {TOKENIZER: named}
    return found if TOKENIZER in found or "tokenizer.model" in found else {}


def _opened(settings: Settings, file: Path) -> TextTokenizer:
    option = "data.tokenizer" if settings.data.tokenizer else "model.load"
    return open_tokenizer(str(file), option, special_tokens=False)
