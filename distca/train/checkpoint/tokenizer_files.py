"""A run's tokenizer, kept with its checkpoints, so that an exported model brings it along wherever it goes.

`data.tokenizer` names one file or its folder, with the files that transformers wants beside it; a loaded model has them
in its folder.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from distca.models import read_config
from distca.train.settings import Settings
from distca.train.tokenizing import END_OF_DOCUMENT
from distca.workload.token_counts import TextTokenizer, open_tokenizer

FOLDER = "tokenizer"             # in checkpoint.folder
TOKENIZER, CONFIG = "tokenizer.json", "tokenizer_config.json"
FILES = (TOKENIZER, CONFIG, "special_tokens_map.json", "added_tokens.json", "tokenizer.model", "vocab.json",
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
    if TOKENIZER in files and CONFIG not in files:
        about: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
        end = _opened(settings, files[TOKENIZER]).end
        about |= {} if end is None else {"eos_token": end[0]}
        (partial / CONFIG).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
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
