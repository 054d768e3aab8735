"""The data files of a folder: a Hugging Face dataset that was saved to disk, or shards of one kind."""

from __future__ import annotations

import os
from pathlib import Path

from distca.validation import read_json, short

SHARDS = (".arrow", ".parquet", ".jsonl", ".jsonl.gz", ".jsonl.zst")
STATE, SPLITS = "state.json", "dataset_dict.json"
MAX_DEPTH = 2
MAX_ENTRIES = 20_000


def dataset_files(folder: Path) -> list[str]:
    """Files to read one after the other. Refusals say what was missing, or which folder to name instead."""
    if (folder / SPLITS).is_file():
        folder = _only_split(folder)
    if (folder / STATE).is_file():
        return _saved_files(folder)
    found = _shards(folder)
    kinds = [kind for kind in SHARDS if found[kind]]
    if not kinds:
        raise ValueError(f"a directory without data; give a file, or a folder with {', '.join(SHARDS)} files or a "
                         "dataset that was saved to disk")
    if len(kinds) > 1:
        raise ValueError(f"a directory with {' and '.join(kinds)} files; name one of them, or a folder with one kind")
    return found[kinds[0]]


def _only_split(folder: Path) -> Path:
    splits = read_json(folder / SPLITS).get("splits")
    if not isinstance(splits, list) or not all(isinstance(name, str) and Path(name).name == name for name in splits):
        raise ValueError(f"{SPLITS} has splits {short(splits)}; save the dataset again")
    if len(splits) != 1:
        raise ValueError(f"a dataset of {len(splits)} splits ({short(', '.join(splits))}); name one: "
                         f"{folder / splits[0] if splits else folder}")
    return folder / splits[0]


def _saved_files(folder: Path) -> list[str]:
    """What the dataset's own list says: an earlier save may have left other shards there."""
    state = read_json(folder / STATE)
    listed = state.get("_data_files") if isinstance(state, dict) else None
    names = [one.get("filename") if isinstance(one, dict) else None for one in listed or ()] if isinstance(
        listed, list) else [None]
    if not names or not all(isinstance(name, str) and Path(name).name == name for name in names):
        raise ValueError(f"{STATE} lists {short(names)} as data files; save the dataset again")
    return [str(folder / name) for name in names if name is not None]


def _shards(folder: Path) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {kind: [] for kind in SHARDS}
    entries = 0
    for place, folders, files in os.walk(folder):
        depth = len(Path(place).relative_to(folder).parts)
        entries += len(files) + len(folders)
        if entries > MAX_ENTRIES:
            raise ValueError(f"a directory of more than {MAX_ENTRIES} entries; name the folder that holds the data")
        folders[:] = sorted(name for name in folders if not name.startswith(".")) if depth < MAX_DEPTH else []
        for name in sorted(files):
            kind = next((kind for kind in SHARDS if name.lower().endswith(kind)), None)
            if kind is not None and not name.startswith("."):
                found[kind].append(str(Path(place, name)))
    return found
