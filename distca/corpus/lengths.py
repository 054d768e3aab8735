"""Read document lengths out of whatever people keep them in; here is decided what a file is.

Its suffix says: .csv, .tsv, .jsonl, .npy, .parquet and .arrow are what they say, .json, .txt and other names are JSON
where they begin so and else a number a line; text and arrays may be packed by gzip or zstd. A folder is a Hugging Face
dataset, or holds shards of one kind. `Reading` says what stdin and odd names are, which column counts, and what turns
texts into tokens. All ways end in the same checks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from distca.corpus.files import STDIN, label
from distca.corpus.length_columns import read_npy, read_tables
from distca.corpus.length_text import read_text_source
from distca.corpus.length_values import Wanted
from distca.corpus.tables import files_below, is_table, table_files
from distca.corpus.tokenizers import token_counter
from distca.spec import unknown_name
from distca.validation import CORPUS_WHY, MAX_CORPUS_DOCUMENTS, UserError, check_whole, short
from distca.workload.documents import IntArray, Workload

FORMATS = ("lines", "csv", "tsv", "json", "jsonl", "npy", "parquet", "arrow")
SUFFIXES = {".csv": "csv", ".tsv": "tsv", ".jsonl": "jsonl", ".ndjson": "jsonl", ".npy": "npy",
            ".parquet": "parquet", ".pq": "parquet", ".arrow": "arrow", ".feather": "arrow"}
TABLES = ("parquet", "arrow")
PACKED = (".gz", ".gzip", ".zst", ".zstd")
BY_CONTENT = ""
MAX_ENTRIES = 20_000  # of a folder and those inside it

Heard = Callable[[int], None]  # is told how many documents have been read


@dataclass(frozen=True, slots=True)
class Reading:
    """What a file's name does not say."""

    format: str | None = None      # one of FORMATS, packed or not
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
            return _joined(_folder(Path(name), wanted), heard)
        parts = _parts(name, reading, wanted)
        return parts if isinstance(parts, Workload) else _joined(parts, heard)
    except UserError as error:
        raise UserError(_named(label(name), error)) from None


def what_it_is(name: str, format_: str | None = None) -> str:
    """The format of a file of this name, as its suffix or the option says; BY_CONTENT where neither does."""
    if format_ is not None:
        if format_ not in FORMATS:
            raise unknown_name("format", format_, FORMATS)
        return format_
    suffixes = [suffix.lower() for suffix in Path(name).suffixes if suffix.lower() not in PACKED]
    return SUFFIXES.get(suffixes[-1], BY_CONTENT) if suffixes else BY_CONTENT


def _wanted(reading: Reading) -> Wanted:
    if reading.column is not None and not (reading.column and reading.column.isprintable()):
        raise UserError(f"column is {short(reading.column)}; give the name of a column")
    return Wanted(reading.column, None if reading.tokenizer is None else token_counter(reading.tokenizer))


def _parts(name: str, reading: Reading, wanted: Wanted) -> Workload | Iterator[IntArray]:
    format_ = what_it_is(name, reading.format)
    if format_ == "npy":
        return iter([read_npy(name)])
    if format_ in TABLES:
        if name == STDIN:
            raise UserError(f"format is {format_!r}, which cannot be read from a pipe; give a file")
        return read_tables([Path(name)], wanted)
    return read_text_source(name, format_, wanted)


def _folder(folder: Path, wanted: Wanted) -> Iterator[IntArray]:
    """A dataset that was saved to disk, shards of tables, or shards of JSON lines."""
    _check_small(folder)
    if is_table(folder):
        return read_tables(table_files(folder), wanted)
    shards = [file for file in files_below(folder) if what_it_is(file.name) == "jsonl"]
    if not shards:
        raise UserError("a directory without data; give a file, or a folder with .parquet, .arrow or .jsonl files or "
                        "a dataset that was saved to disk")
    return (part for file in shards for part in _shard(file, wanted))


def _shard(file: Path, wanted: Wanted) -> Iterator[IntArray]:
    try:
        parts = read_text_source(str(file), "jsonl", wanted)
        assert not isinstance(parts, Workload), "JSON lines are no workload"
        yield from parts
    except UserError as error:
        raise UserError(_named(str(file), error)) from None


def _check_small(folder: Path) -> None:
    """Refuse a folder that is somebody's whole disk before all of it is walked through."""
    entries = 0
    for _, folders, files in os.walk(folder):
        entries += len(folders) + len(files)
        if entries > MAX_ENTRIES:
            raise UserError(f"a directory of more than {MAX_ENTRIES} entries; name the folder that holds the data")


def _named(name: str, error: ValueError) -> str:
    """The refusal with the name in front, which some say themselves."""
    said = str(error)
    return said if said.startswith(name) else f"{name}: {said}"


def _joined(parts: Iterator[IntArray], heard: Heard) -> IntArray:
    held: list[IntArray] = []
    total = 0
    for part in parts:
        total += len(part)
        check_whole("the number of documents", total, least=0, most=MAX_CORPUS_DOCUMENTS, why=CORPUS_WHY)
        held.append(part)
        heard(total)
    if not total:
        raise UserError("lengths is empty; give at least one document length")
    return np.concatenate(held)
