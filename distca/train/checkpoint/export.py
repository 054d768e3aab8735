"""Export a checkpoint as a Hugging Face folder: safetensors, config and tokenizer.

An export assembles and writes one tensor at a time, without GPU or process group, for any sharding. It writes into a
temporary folder beside the target and renames that folder at the end; the next export removes the temporary folder of
one that was killed. A run copies its tokenizer's files beside its checkpoints, so that an export includes them.
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
from distca.train.checkpoint.files import Reader, element_bytes, safetensors_header, tensor_bytes
from distca.train.checkpoint.folder import DamagedError, Manifest, TornError, cause, read_manifest, sync
from distca.train.model.huggingface import INDEX, SINGLE, hf_name
from distca.train.settings import Settings
from distca.validation import UserError

SHARD_BYTES = 5 * 10**9
DTYPES = ("bfloat16", "float16", "float32", "float64")
FOLDER = "tokenizer"             # in checkpoint.folder
TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
FILES = (TOKENIZER, TOKENIZER_CONFIG, "special_tokens_map.json", "added_tokens.json", "tokenizer.model", "vocab.json",
         "merges.txt", "chat_template.jinja", "generation_config.json")


def export_newest(
    checkpoints: Iterable[Path], folder: Path, *, dtype: str | None = None, say: Callable[[str], None] = print
) -> None:
    """Export the newest good checkpoint of a list, oldest first; print its name and those of skipped checkpoints."""
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
    """Write one checkpoint's weights in the format of transformers; `dtype` is by default the checkpoint's."""
    check_target(folder, "OUT")
    manifest = read_manifest(checkpoint)
    if not manifest.config:
        raise UserError(f"{checkpoint} does not say which model its weights are; save it again with distca train")
    sizes = {name: prod(tensor.shape) * element_bytes(dtype or tensor.dtype)
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
            for name in FILES:
                if (source := checkpoint.parent / FOLDER / name).is_file():
                    shutil.copyfile(source, partial / name)
    except OSError as error:
        raise UserError(f"{folder} was not written: {cause(error)}") from None


def check_target(folder: str | Path, field: str) -> None:
    """Raise a UserError if an export would overwrite something."""
    folder = Path(folder)
    if os.path.lexists(folder) and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{field} is {str(folder)!r}, which already holds something; name a new folder")


@contextmanager
def _beside(folder: Path, num_bytes: int) -> Iterator[Path]:
    """Yield a temporary folder that is renamed to `folder` at the end; first remove those of killed exports."""
    folder = folder.absolute()
    folder.parent.mkdir(parents=True, exist_ok=True)
    begin = f".{folder.name}.partial-"
    for left in folder.parent.glob(f"{begin}*"):
        with _locked(left) as locked:
            if locked:
                shutil.rmtree(left, ignore_errors=True)
    free = shutil.disk_usage(folder.parent).free
    if free < num_bytes:
        raise UserError(f"{folder} needs {num_bytes:,} bytes and {free:,} are free; make space, or name a folder "
                        "elsewhere")
    partial = folder.with_name(f"{begin}{os.getpid()}")
    partial.mkdir()
    with _locked(partial):
        try:
            yield partial
            for path in (*partial.iterdir(), partial):
                sync(path)
            partial.replace(folder)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    sync(folder.parent)


@contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Lock a folder within the `with` block; yield False if another process has the lock."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield True
    except BlockingIOError:
        yield False
    finally:
        os.close(handle)


def _write_shard(path: Path, names: list[str], reader: Reader, manifest: Manifest, dtype: str | None) -> None:
    """Write a safetensors file, tensor by tensor."""
    stored = [(name, manifest.tensors[name]) for name in names]
    with path.open("wb") as file:
        file.write(safetensors_header((hf_name(name.removeprefix("model.")), dtype or tensor.dtype, tensor.shape)
                                      for name, tensor in stored))
        for name in names:
            tensor = reader.whole(name)
            for chunk in tensor_bytes(tensor if dtype is None else tensor.to(getattr(torch, dtype))):
                file.write(chunk)


def _into_shards(sizes: dict[str, int], shard_bytes: int) -> list[list[str]]:
    """Fill shards with tensor names in order, up to `shard_bytes` and at least one name per shard."""
    shards: list[list[str]] = []
    room = 0
    for name, size in sizes.items():
        if not shards or size > room:
            shards.append([])
            room = shard_bytes
        shards[-1].append(name)
        room -= size
    return shards


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def keep_tokenizer(settings: Settings, checkpoints: Path) -> None:
    """Copy the run's tokenizer beside its checkpoints, by one rename, unless a copy exists."""
    kept = checkpoints / FOLDER
    files = _files(settings)
    if kept.exists() or not files:
        return
    partial = checkpoints / f".{FOLDER}-{os.getpid()}"
    shutil.rmtree(partial, ignore_errors=True)                   # left by an earlier process with the same id
    partial.mkdir(parents=True)
    for name, source in files.items():
        shutil.copyfile(source, partial / name)
    if TOKENIZER in files and TOKENIZER_CONFIG not in files:
        about: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
        end = _opened(settings, files[TOKENIZER]).end
        about |= {} if end is None else {"eos_token": end[0]}
        _write_json(partial / TOKENIZER_CONFIG, about)
    partial.rename(kept)


def token_ids(settings: Settings) -> dict[str, Any]:
    """Return config.json's special tokens: those of the loaded model, or the data's end-of-document token."""
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
    """Return name in the export -> file, for the tokenizer of `data.tokenizer`, else of the loaded model."""
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
