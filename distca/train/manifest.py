"""Tell a good checkpoint folder from a torn or foreign one.

A checkpoint is a folder `step_00000123` whose `manifest.json` is written last, in one rename, and names every file with
its size: without it, or with a file of another size, the folder is torn; with another format or other parameters it
is foreign. Only what this run wrote is ever removed, and only once something newer is complete.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any, Literal

FORMAT = "distca checkpoint"
VERSION = 1
MANIFEST = "manifest.json"
STEP_NAME = re.compile(r"step_(\d{8,})")
OWN_FILE = re.compile(r"__\d+_\d+\.distcp|\.metadata(\.tmp)?|manifest\.json\.tmp")
LOG = logging.getLogger("distca")
Verdict = Literal["good", "torn", "foreign"]


@dataclass(frozen=True, slots=True)
class Manifest:
    format: str
    version: int
    step: int
    num_ranks: int
    torch: str
    model: dict[str, str]        # parameter or buffer of the whole model -> dtype and global shape
    optimizer: bool              # False: saved before the optimizer's first step, when it had no state
    rng: list[str]               # devices whose random state was saved, rank by rank
    loader: dict[str, Any]
    files: dict[str, int]        # name -> bytes


def check_folder(folder: str | Path, *, resume: bool) -> None:
    """Refuse a folder that cannot be written, or that holds another run's checkpoints when this one starts anew."""
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".probe-"):
            pass
    except OSError as error:
        raise ValueError(f"checkpoint.folder = {str(folder)!r} cannot be written ({error.strerror}); "
                         "name a folder that this user may write to") from None
    held = [path.name for path in step_folders(folder) if (path / MANIFEST).exists()]
    if held and not resume:
        raise ValueError(f"checkpoint.folder = {str(folder)!r} already holds {held[-1]}; "
                         "set checkpoint.resume = true to continue it, or name another folder")


def judge(path: Path, model: Mapping[str, str]) -> tuple[Verdict, str]:
    """Whether a folder is a complete checkpoint of a model with these parameters, and if not, why."""
    if not path.is_dir():
        return "torn", "there is no such folder"
    if not (path / MANIFEST).exists():
        strange = sorted(item.name for item in path.iterdir() if not OWN_FILE.fullmatch(item.name))
        if strange:
            return "foreign", f"it has no {MANIFEST} but holds {strange[0]}"
        return "torn", f"it has no {MANIFEST}: its save was cut short"
    try:
        manifest = read_manifest(path)
    except ValueError as error:
        return "foreign", str(error)
    if step_name(manifest.step) != path.name:
        return "foreign", f"its manifest is that of {step_name(manifest.step)}"
    for name in sorted({*manifest.model, *model}):
        there, here = manifest.model.get(name, "nothing"), model.get(name, "nothing")
        if there != here:
            return "foreign", f"another model's: {name} is {there} there and {here} here"
    for name, num_bytes in manifest.files.items():
        if not (path / name).is_file():
            return "torn", f"{name} is missing"
        if (size := (path / name).stat().st_size) != num_bytes:
            return "torn", f"{name} has {size} bytes of {num_bytes}"
    return "good", ""


def read_manifest(path: Path) -> Manifest:
    """The manifest of a folder; ValueError with the reason where it is not one of ours."""
    try:
        fields = json.loads((path / MANIFEST).read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{MANIFEST} cannot be read ({type(error).__name__})") from None
    if not isinstance(fields, dict) or fields.get("format") != FORMAT:
        raise ValueError(f"{MANIFEST} is not of the format {FORMAT!r}")
    if fields.get("version") != VERSION:
        raise ValueError(f"it has version {fields.get('version')!r} and only {VERSION} is read here")
    kinds = {"step": int, "num_ranks": int, "torch": str, "model": dict, "optimizer": bool, "rng": list, "loader": dict,
             "files": dict}
    for name, kind in kinds.items():
        if type(fields.get(name)) is not kind:
            raise ValueError(f"{MANIFEST} has no proper {name!r}")
    return Manifest(**{name: fields[name] for name in ("format", "version", *kinds)})


def write_manifest(path: Path, manifest: Manifest) -> None:
    """In one rename, once everything it speaks of is on disk."""
    partial = path / f"{MANIFEST}.tmp"
    with partial.open("w") as file:
        json.dump(asdict(manifest), file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    partial.rename(path / MANIFEST)
    for folder in (path, path.parent):
        handle = os.open(folder, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


def newest_good(folder: Path, model: Mapping[str, str]) -> Path | None:
    """The checkpoint to go on from; newer ones that are torn or foreign are named in a warning."""
    for path in reversed(step_folders(folder)):
        verdict, reason = judge(path, model)
        if verdict == "good":
            return path
        LOG.warning("checkpoint %s is %s and not used: %s", path, verdict, reason)
    return None


def prune(folder: Path, keep: int, model: Mapping[str, str]) -> None:
    """Drop good checkpoints beyond the newest `keep`, and torn ones older than those kept; never foreign ones."""
    verdicts = [(path, judge(path, model)[0]) for path in step_folders(folder)]
    good = [path for path, verdict in verdicts if verdict == "good"]
    oldest_kept = good[-keep:][0]
    for path, verdict in verdicts:
        if path == oldest_kept:
            return
        if verdict != "foreign":
            _remove(path)


def make_room(path: Path, model: Mapping[str, str]) -> None:
    """What this run wrote of the same step goes, anything else is put aside."""
    if not path.exists():
        return
    if judge(path, model)[0] != "foreign":
        return _remove(path)
    numbered = (path.with_name(f"{path.name}.{number}") for number in count(1))
    aside = next(free for free in numbered if not free.exists())
    LOG.warning("checkpoint %s is not of this run; it is now %s", path, aside)
    path.rename(aside)


def _remove(path: Path) -> None:
    (path / MANIFEST).unlink(missing_ok=True)                    # first, so that half a removal is torn
    shutil.rmtree(path)


def step_folders(folder: Path) -> list[Path]:
    """Oldest first."""
    if not folder.is_dir():
        return []
    named = [(int(match[1]), path) for path in folder.iterdir() if (match := STEP_NAME.fullmatch(path.name))]
    return [path for _, path in sorted(named)]


def step_name(step: int) -> str:
    return f"step_{step:08d}"
