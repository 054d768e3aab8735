"""Classify checkpoint folders as good, torn, damaged, another run's or foreign, and remove old ones. Needs no torch.

A checkpoint is a folder `step_00000123` of safetensors files and a `manifest.json`, which is written last, by a rename.
The manifest lists every block of every tensor with its file, offset and checksum; its first line is the checksum of the
rest. Content is untrusted until it matches its checksum. Only checkpoints of this run are removed, and only when a
newer one is complete.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from itertools import count
from pathlib import Path
from typing import Any, Literal, NamedTuple

import xxhash

from distca.validation import UserError

FORMAT = "distca checkpoint"
VERSION = 2
MANIFEST = "manifest.json"
STEP_NAME = re.compile(r"step_(\d{8,})")
DATA_FILE = re.compile(r"(model|state)-\d{5,}\.safetensors")
OWN_FILE = re.compile(rf"{DATA_FILE.pattern}|manifest\.json\.tmp")
FIRST_LINE = re.compile(rb'\{"xxh3": "([0-9a-f]{16})",\n')
CHUNK_BYTES = 2**20                                              # small enough to be hashed while in the CPU's cache
LOG = logging.getLogger("distca")
Verdict = Literal["good", "torn", "damaged", "another run's", "foreign"]


class DamagedError(UserError):
    """A checkpoint's content has changed or cannot be read; the message names the file."""


class TornError(UserError):
    """A checkpoint has no manifest: its save was interrupted, or is still running."""


class Block(NamedTuple):
    """The box [offset, offset + shape) of a tensor, stored in `num_bytes` bytes of `file` from `begin` on."""

    file: str
    begin: int
    num_bytes: int
    offset: list[int]
    shape: list[int]
    checksum: str


class FileFacts(NamedTuple):
    num_bytes: int
    header_bytes: int            # offset of the first block
    header_checksum: str


class StoredTensor(NamedTuple):
    dtype: str
    shape: list[int]
    blocks: list[Block]


@dataclass(frozen=True, slots=True)
class Manifest:
    format: str
    version: int
    step: int
    num_ranks: int
    torch: str
    run: dict[str, Any]          # settings that must not change on resume
    optimizer: bool              # False: saved before the optimizer's first step, when it had no state
    rng: list[str]               # kinds of devices whose random states were saved, for every rank
    loader: dict[str, Any]
    config: dict[str, Any]       # config.json of an export; empty if there is none
    files: dict[str, FileFacts]
    tensors: dict[str, StoredTensor]

    @property
    def model(self) -> dict[str, str]:
        """Dtype and global shape of every parameter and buffer of the whole model, by name."""
        return {name.removeprefix("model."): f"{tensor.dtype} {tensor.shape}" for name, tensor in self.tensors.items()
                if name.startswith("model.")}


def checksum(content: bytes) -> str:
    return xxhash.xxh3_64_hexdigest(content)


def cause(error: OSError) -> str:
    """Describe an error in one line; for a full disk it contains "no space", which users search for."""
    words = " ".join(str(error.strerror or error).split())
    if error.errno in (errno.ENOSPC, errno.EDQUOT) and "no space" not in words:
        words = f"no space: {words}"
    return words if error.filename is None else f"{words} ({error.filename})"


def check_folder(folder: str | Path, *, resume: bool) -> None:
    """Raise a UserError if the folder is not writable, or holds checkpoints and `resume` is False."""
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".probe-"):
            pass
    except OSError as error:
        raise UserError(f"checkpoint.folder = {str(folder)!r} cannot be written ({error.strerror}); "
                        "name a folder that this user may write to") from None
    complete = [path.name for path in step_folders(folder) if (path / MANIFEST).exists()]
    if complete and not resume:
        raise UserError(f"checkpoint.folder = {str(folder)!r} already holds {complete[-1]}; "
                        "set checkpoint.resume = true to continue it, or name another folder")


def judge(path: Path, model: Mapping[str, str], run: Mapping[str, Any]) -> tuple[Verdict, str]:
    """Classify a folder by its manifest and file sizes; return the verdict and its reason."""
    if not path.is_dir():
        return "foreign", "it is no folder"
    if not (path / MANIFEST).exists():
        strange = sorted(item.name for item in path.iterdir() if not OWN_FILE.fullmatch(item.name))
        if strange:
            return "foreign", f"it has no {MANIFEST} but holds {strange[0]}"
        return "torn", f"it has no {MANIFEST}: its save was cut short"
    try:
        manifest = read_manifest(path)
        check_sizes(path, manifest)
    except DamagedError as error:
        return "damaged", str(error)
    except ValueError as error:
        return "foreign", str(error)
    different = difference(manifest, model, run)
    return ("another run's", different) if different else ("good", "")


def difference(manifest: Manifest, model: Mapping[str, str], run: Mapping[str, Any]) -> str:
    """Return in what a checkpoint differs from a model and a run; empty if it is of the same run."""
    for name in sorted(manifest.run.keys() & run.keys()):
        if manifest.run[name] != run[name]:
            return f"{name} is {manifest.run[name]!r} there and {run[name]!r} here"
    for name in sorted({*manifest.model, *model}):
        there, here = manifest.model.get(name, "nothing"), model.get(name, "nothing")
        if there != here:
            return f"{name} is {there} there and {here} here"
    return ""


def read_manifest(path: Path) -> Manifest:
    """Read a folder's manifest; raise DamagedError or TornError for a bad checkpoint, UserError for other content."""
    if not os.path.lexists(path / MANIFEST):
        raise TornError(f"it has no {MANIFEST}: its save was cut short, or goes on")
    if not (path / MANIFEST).is_file():
        raise DamagedError(f"{MANIFEST} is no file")
    try:
        content = (path / MANIFEST).read_bytes()
        written = json.loads(content)
    except (OSError, ValueError, RecursionError) as error:
        raise DamagedError(f"{MANIFEST} cannot be read ({type(error).__name__})") from None
    first = FIRST_LINE.match(content)
    if first is None:
        ours = isinstance(written, dict) and written.get("format") == FORMAT
        if ours and written.get("version") == VERSION:
            raise DamagedError(f"{MANIFEST} has lost its checksum")
        raise UserError(f"{MANIFEST} is not of the format {FORMAT!r}")
    if first[1].decode() != checksum(content[first.end():]):
        raise DamagedError(f"{MANIFEST} does not match its checksum")
    if written.get("format") != FORMAT or written.get("version") != VERSION:
        raise UserError(f"it has format {written.get('format')!r} version {written.get('version')!r} and only "
                        f"{FORMAT!r} {VERSION} is read here")
    manifest = _typed(written)
    if step_name(manifest.step) != path.name:
        raise UserError(f"its manifest is that of {step_name(manifest.step)}")
    return manifest


def manifest_bytes(manifest: Manifest) -> bytes:
    """Encode as JSON whose first line is the checksum of the rest."""
    written = {field.name: getattr(manifest, field.name) for field in fields(manifest)}
    rest = json.dumps(written, separators=(",", ":"))[1:].encode() + b"\n"
    return f'{{"xxh3": "{checksum(rest)}",\n'.encode() + rest


def manifest_from(content: bytes) -> Manifest:
    """Decode a manifest that another rank has verified."""
    return _typed(json.loads(content))


def _typed(written: dict[str, Any]) -> Manifest:
    try:
        values = {field.name: written[field.name] for field in fields(Manifest)}
        for name, kind in {"step": int, "num_ranks": int, "run": dict, "optimizer": bool, "rng": list,
                           "loader": dict, "config": dict}.items():
            if type(values[name]) is not kind:
                raise TypeError(name)
        files = {name: FileFacts(*facts) for name, facts in values["files"].items()}
        tensors = {name: StoredTensor(dtype, shape, [Block(*block) for block in blocks])
                   for name, (dtype, shape, blocks) in values["tensors"].items()}
        strange = [name for name in files if not DATA_FILE.fullmatch(name)]
        if strange or any(block.file not in files for tensor in tensors.values() for block in tensor.blocks):
            raise TypeError("files")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DamagedError(f"{MANIFEST} has no proper {str(error).strip(chr(39))!r}") from None
    return Manifest(**(values | {"files": files, "tensors": tensors}))


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Write the manifest by a rename, after all files that it lists are on disk."""
    partial = path / f"{MANIFEST}.tmp"
    with partial.open("wb") as file:
        file.write(manifest_bytes(manifest))
        file.flush()
        os.fsync(file.fileno())
    partial.rename(path / MANIFEST)
    sync(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Flush a file, or a folder's entries, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def check_sizes(path: Path, manifest: Manifest) -> None:
    for name, facts in manifest.files.items():
        if not (path / name).is_file():
            raise DamagedError(f"{name} is missing")
        if (size := (path / name).stat().st_size) != facts.num_bytes:
            raise DamagedError(f"{name} has {size} bytes of {facts.num_bytes}")


def verify(path: Path) -> Manifest:
    """Read every byte of a checkpoint; raise DamagedError if one has changed."""
    manifest = read_manifest(path)
    check_sizes(path, manifest)
    blocks: dict[str, list[tuple[int, int, str]]] = {
        name: [(0, facts.header_bytes, facts.header_checksum)] for name, facts in manifest.files.items()}
    for tensor in manifest.tensors.values():
        for block in tensor.blocks:
            blocks[block.file].append((block.begin, block.num_bytes, block.checksum))
    chunk = memoryview(bytearray(CHUNK_BYTES))
    for name, parts in blocks.items():
        end = 0
        with opened(path / name) as handle:
            for begin, num_bytes, expected in sorted(parts):
                if begin != end:
                    raise DamagedError(f"{MANIFEST} leaves bytes {end} to {begin} of {name} without a checksum")
                end = begin + num_bytes
                into = (chunk[:min(CHUNK_BYTES, end - at)] for at in range(begin, end, CHUNK_BYTES))
                check_bytes(handle, begin, into, expected, name)
        if end != manifest.files[name].num_bytes:
            raise DamagedError(f"{MANIFEST} leaves the end of {name} without a checksum")
    return manifest


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """Yield a file descriptor; raise DamagedError if the file cannot be opened."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise DamagedError(f"{path.name} cannot be read ({error.strerror})") from None
    try:
        yield handle
    finally:
        os.close(handle)


def check_bytes(handle: int, begin: int, into: Iterator[memoryview], expected: str, name: str) -> None:
    """Fill the buffers in order from byte `begin` on; raise DamagedError unless their hash is `expected`."""
    digest, end = xxhash.xxh3_64(), begin
    for buffer in into:
        read_at(handle, end, buffer, name)
        digest.update(buffer)
        end += len(buffer)
    if digest.hexdigest() != expected:
        raise mismatch(name, begin, end)


def read_at(handle: int, begin: int, buffer: memoryview, name: str) -> None:
    try:
        got = os.preadv(handle, [buffer], begin)
    except OSError as error:
        raise DamagedError(f"{name} cannot be read at byte {begin} ({error.strerror})") from None
    if got != len(buffer):
        raise DamagedError(f"{name} ends at byte {begin + got}")


def mismatch(name: str, begin: int, end: int) -> DamagedError:
    return DamagedError(f"{name} does not match its checksum in bytes {begin} to {end}")


def prune(folder: Path, keep: int, model: Mapping[str, str], run: Mapping[str, Any]) -> None:
    """Remove good and torn checkpoints that are older than the newest `keep` good ones."""
    verdicts = [(path, judge(path, model, run)[0]) for path in step_folders(folder)]
    good = [path for path, verdict in verdicts if verdict == "good"]
    oldest_kept = good[-keep:][0]
    for path, verdict in verdicts:
        if path == oldest_kept:
            return
        if verdict in ("good", "torn"):
            remove(path)


def make_room(path: Path, model: Mapping[str, str], run: Mapping[str, Any]) -> None:
    """Remove this run's folder of the same step; rename anything else to a free name."""
    if not path.exists():
        return
    if judge(path, model, run)[0] in ("good", "torn"):
        return remove(path)
    numbered = (path.with_name(f"{path.name}.{number}") for number in count(1))
    aside = next(free for free in numbered if not free.exists())
    LOG.warning("checkpoint %s is not a good one of this run; it is now %s", path, aside)
    path.rename(aside)


def remove(path: Path) -> None:
    (path / MANIFEST).unlink(missing_ok=True)                    # first, so that an interrupted removal leaves it torn
    shutil.rmtree(path)


def step_folders(folder: Path) -> list[Path]:
    """Return the checkpoint folders, oldest first."""
    if not folder.is_dir():
        return []
    named = [(int(match[1]), path) for path in folder.iterdir() if (match := STEP_NAME.fullmatch(path.name))]
    return [path for _, path in sorted(named)]


def step_name(step: int) -> str:
    return f"step_{step:08d}"
