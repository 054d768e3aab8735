"""Old checkpoints, whose metadata is a pickle, into ones that need none. The one place that unpickles a file.

Whoever wrote such a folder can run code in the process that reads it, so this is asked for by name and nothing else
calls it. The old folder stays beside the new one.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from distca.train.checkpoint_files import held, tensor_table, write_file
from distca.train.checkpoint_folder import (
    FORMAT,
    MANIFEST,
    VERSION,
    DamagedError,
    Manifest,
    OldFormatError,
    read_manifest,
    write_manifest,
)


def convert(paths: Iterable[Path]) -> list[Path]:
    """Convert those checkpoints that are old, trusting them; what was there is then called step_….old.

    A whole checkpoint is in memory meanwhile.
    """
    converted = []
    for path in paths:
        try:
            read_manifest(path)
        except OldFormatError:
            fresh = path.with_name(f"{path.name}.new")
            shutil.rmtree(fresh, ignore_errors=True)             # of a conversion that was cut short
            _convert(path, fresh)
            path.rename(path.with_name(f"{path.name}.old"))
            fresh.rename(path)
            converted.append(path)
        except ValueError:
            continue                                             # torn, damaged or none of ours
    return converted


def _convert(path: Path, fresh: Path) -> None:
    old: dict[str, Any] = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    _check_files(path, old["files"])
    metadata = dcp.FileSystemReader(path).read_metadata()
    state = {name: torch.empty(stored.size, dtype=stored.properties.dtype)
             for name, stored in metadata.state_dict_metadata.items() if isinstance(stored, TensorStorageMetadata)}
    dcp.load(state, storage_reader=dcp.FileSystemReader(path), no_dist=True)
    fresh.mkdir()
    files, blocks = {}, []
    for kind in ("model", "state"):
        parts = [(held(name, tensor), tensor) for name, tensor in state.items()
                 if name.startswith("model.") is (kind == "model")]
        if parts:
            file = fresh / f"{kind}-00000.safetensors"
            files[file.name], written = write_file(file, parts)
            blocks += written
    write_manifest(fresh, Manifest(
        FORMAT, VERSION, old["step"], old["num_ranks"], old["torch"], {}, old["optimizer"], old["rng"], old["loader"],
        {}, files, tensor_table(blocks)))


def _check_files(path: Path, sizes: dict[str, int]) -> None:
    """All that the old format allows to check."""
    for name, num_bytes in sizes.items():
        if not (path / name).is_file() or (path / name).stat().st_size != num_bytes:
            raise DamagedError(f"checkpoint {path} is damaged: {name} has not the {num_bytes} bytes that were written")
