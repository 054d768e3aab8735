"""Read document lengths out of whatever people keep them in; here is decided what a file is.

Its suffix says: .csv, .tsv, .jsonl, .npy, .parquet and .arrow are what they say, .json, .txt and other names are JSON
where they begin so and else a number a line, and any of them may be behind .gz or .zst. A folder is a Hugging Face
dataset, or holds files of one of these kinds. `Reading` says what stdin and odd names are, which column counts, and
what turns texts into tokens. All ways end in the same checks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from distca.spec import unknown_name
from distca.validation import CORPUS_WHY, MAX_CORPUS_DOCUMENTS, check_whole, short, was_refused
from distca.workload.byte_streams import PACKINGS, STDIN, ByteSource
from distca.workload.dataset_folder import dataset_files
from distca.workload.documents import IntArray, Workload
from distca.workload.length_columns import read_arrow, read_npy, read_parquet
from distca.workload.length_text import read_text_source
from distca.workload.length_values import Wanted
from distca.workload.token_counts import token_counter

FORMATS = ("lines", "csv", "tsv", "json", "jsonl", "npy", "parquet", "arrow")
SUFFIXES = {".csv": "csv", ".tsv": "tsv", ".jsonl": "jsonl", ".ndjson": "jsonl", ".npy": "npy", ".npz": "npy",
            ".parquet": "parquet", ".pq": "parquet", ".arrow": "arrow", ".feather": "arrow"}
BY_CONTENT = ""

Heard = Callable[[int], None]  # is told how many documents have been read


@dataclass(frozen=True, slots=True)
class Reading:
    """What a file's name does not say."""

    format: str | None = None      # one of FORMATS, with .gz or .zst behind it where the bytes are packed
    column: str | None = None      # of a table, or the key of JSON objects
    tokenizer: str | None = None   # a tokenizer.json, for texts


def read_source(
    path: str | Path, reading: Reading | None = None, heard: Heard = lambda _: None
) -> Workload | IntArray:
    """A workload, or lengths in the file's order; `-` is stdin. Refusals are one line that begins with the name."""
    name = str(path)
    reading = reading or Reading()
    try:
        wanted = _wanted(reading)
        if name != STDIN and Path(name).is_dir():
            return _joined(_shards(dataset_files(Path(name)), wanted), heard)
        parts = _parts(name, reading, wanted)
        return parts if isinstance(parts, Workload) else _joined(parts, heard)
    except ValueError as error:
        if not was_refused(error):
            raise
        raise ValueError(f"{'stdin' if name == STDIN else name}: {error}") from None


def what_it_is(name: str, format_: str | None = None) -> tuple[str, str]:
    """Format and packing of a file of this name, as its suffixes or the format say; BY_CONTENT is a format too."""
    suffixes = [suffix.lower() for suffix in Path(name).suffixes]
    packing = PACKINGS[suffixes.pop()] if suffixes and suffixes[-1] in PACKINGS else ""
    if format_ is None:
        return SUFFIXES.get(suffixes[-1] if suffixes else "", BY_CONTENT), packing
    stem, _, packed = format_.lower().partition(".")
    if stem not in FORMATS or (packed and f".{packed}" not in PACKINGS):
        raise unknown_name("format", format_, FORMATS)
    return stem, PACKINGS[f".{packed}"] if packed else packing


def _wanted(reading: Reading) -> Wanted:
    if reading.column is not None and not (reading.column and reading.column.isprintable()):
        raise ValueError(f"column is {short(reading.column)}; give the name of a column")
    return Wanted(reading.column, None if reading.tokenizer is None else token_counter(reading.tokenizer))


def _parts(name: str, reading: Reading, wanted: Wanted) -> Workload | Iterator[IntArray]:
    format_, packing = what_it_is(name, reading.format)
    source = ByteSource(name, packing)
    if format_ == "npy":
        return iter([read_npy(source)])
    if format_ == "parquet":
        return read_parquet(source, wanted)
    if format_ == "arrow":
        return read_arrow(source, wanted)
    return read_text_source(source, format_, wanted)


def _shards(files: list[str], wanted: Wanted) -> Iterator[IntArray]:
    for file in files:
        try:
            parts = _parts(file, Reading(), wanted)
            assert not isinstance(parts, Workload), "no suffix of a shard says JSON"
            yield from parts
        except ValueError as error:
            if not was_refused(error):
                raise
            raise ValueError(f"{Path(file).name}: {error}") from None


def _joined(parts: Iterator[IntArray], heard: Heard) -> IntArray:
    held: list[IntArray] = []
    total = 0
    for part in parts:
        total += len(part)
        check_whole("the number of documents", total, least=0, most=MAX_CORPUS_DOCUMENTS, why=CORPUS_WHY)
        held.append(part)
        heard(total)
    if not total:
        raise ValueError("lengths is empty; give at least one document length")
    return np.concatenate(held)
