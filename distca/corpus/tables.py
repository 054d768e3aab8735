"""Read columns of users' tables: parquet, Arrow and Hugging Face dataset folders by pyarrow, .npy arrays, and CSV.

Only one batch of records is in memory at a time, so a corpus need not fit. Missing, broken and unsupported files raise
a UserError of one line.
"""

from __future__ import annotations

import csv
import importlib
import io
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.format import open_memmap, read_array

from distca.corpus.files import STDIN, chunks, files_below, input_files, named_errors, numbered_lines, parse_json_line
from distca.validation import UserError, is_count, plain, read_json, short, to_install

RECORDS_PER_BATCH = 1_024
DOCUMENTS_PER_BATCH = 64  # documents may be megabytes
CELLS_PER_BATCH = 4_096
MAX_ARRAY_BYTES = 2**28  # of an array that is not memory-mapped: from stdin, or compressed
MAX_CELL_BYTES = 2**26
MAX_NAMES_SHOWN = 20
TABLE_SUFFIXES = (".parquet", ".arrow")
SPLITS = {"train": "train", "training": "train", "validation": "validation", "valid": "validation",
          "val": "validation", "dev": "validation", "test": "test", "testing": "test", "eval": "test",
          "evaluation": "test"}  # word in the path of a file -> split of the dataset

_ARROW = b"ARROW1"
_NUMBERS = {"int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "bool"}


class Record(NamedTuple):
    """One document of JSON lines or of a table, before it is tokenized."""

    where: str                 # its file and line, for errors
    fields: Mapping[str, Any]

    def value(self, field: str, kind: type, word: str) -> Any:
        """Return the value of a field; refuse one that is not of type `kind`, which errors call `word`."""
        value = self.fields.get(field)
        if not isinstance(value, kind):
            raise self.refused(field, word)
        return value

    def refused(self, field: str, word: str) -> UserError:
        """Return the error for a field that is missing, or whose value is not what `word` says."""
        keys = f"its keys are {short(list(self.fields))}: "
        if field not in self.fields:
            return UserError(f"{self.where} has no {field!r}; {keys}set data.field to one of them, or repair or drop "
                             "it")
        return UserError(f"{self.where} has {short(self.fields[field])} under {field!r}, not {word}; {keys}repair or "
                         "drop it, or set data.field to another")


class Records(NamedTuple):
    """Consecutive records of a table file."""

    file: Path
    first: int                 # number of the first record in the file, from 0 as in data frames
    columns: tuple[Any, ...]   # pyarrow arrays, one per requested column

    def where(self, record: int) -> str:
        """Name one of these records for errors."""
        return f"{self.file}: row {self.first + record}"

    def value(self, column: int, record: int) -> Any:
        """Return one value as a Python object, or as a numpy array if it is a list of numbers."""
        with named_errors(self.where(record)):
            scalar = self.columns[column][record]
            values = getattr(scalar, "values", None)
            if values is not None and values.null_count == 0 and str(values.type) in _NUMBERS:
                return values.to_numpy(zero_copy_only=False)
            return scalar.as_py()


def is_dataset(folder: Path) -> bool:
    """Return whether `save_to_disk` of Hugging Face datasets wrote this folder."""
    return any((folder / name).is_file() for name in ("dataset_dict.json", "state.json"))


def table_files(path: str | Path, *, split: str = "", split_option: str = "") -> list[Path]:
    """List the parquet or Arrow files of a table: one file, those below a folder, or those of a Hugging Face dataset.

    If there are several splits, `split` must name one; errors call it `split_option`.
    """
    path = Path(path)
    if split and (path.is_file() or (path / "state.json").is_file()):
        raise UserError(f"{split_option} is {split!r} but {path} is one split only; leave {split_option} empty")
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise UserError(f"{path}: no such file or folder; check the path")
    if (path / "dataset_dict.json").is_file():
        listed = read_json(path / "dataset_dict.json")
        names = listed.get("splits") if isinstance(listed, dict) else None
        names = _plain_names(names, path / "dataset_dict.json", "splits")
        return table_files(path / _chosen(path, names, split, split_option))
    if (path / "state.json").is_file():
        return _saved_files(path)
    found = [file for file in files_below(path) if file.suffix in TABLE_SUFFIXES]
    if not found:
        raise UserError(f"{path}: a folder without a {' or '.join(TABLE_SUFFIXES)} file in it; name another")
    if len({file.suffix for file in found}) > 1:
        raise UserError(f"{path}: a folder with both {' and '.join(TABLE_SUFFIXES)} files in it; name one kind's own "
                        "folder")
    return of_split(path, found, split, split_option)


def of_split(folder: Path, files: Sequence[Path], split: str, split_option: str) -> list[Path]:
    """Return the files of the split, or all if the folder has one split only."""
    by_split: dict[str, list[Path]] = {}
    for file in files:
        by_split.setdefault(split_of(file.relative_to(folder)), []).append(file)
    return by_split[_chosen(folder, list(by_split), split, split_option)]


def split_of(path: Path) -> str:
    """Return the split that the last such word in a file's path names; '' if none does."""
    for part in reversed(path.parts):
        for word in re.split(r"[^a-z]+", part.lower()):
            if word in SPLITS:
                return SPLITS[word]
    return ""


def column_types(file: Path) -> tuple[list[str], list[Any]]:
    """Return the names and the pyarrow types of the columns of a parquet or Arrow file."""
    with named_errors(str(file)), _table(file) as table:
        schema = table.schema if _is_arrow(file) else table.schema_arrow
        return list(schema.names), list(schema.types)


def read_columns(
    files: Sequence[Path], names: Sequence[str], *, option: str, batch_records: int = RECORDS_PER_BATCH
) -> Iterator[Records]:
    """Yield the named columns of all files in batches of records; errors refer to the setting `option`."""
    for file in files:
        known, _ = column_types(file)
        for name in names:
            if known.count(name) != 1:
                what = "several columns" if name in known else "no column"
                raise UserError(f"{file}: {what} {name!r}; it has {_listed(known)}: set {option} to one of them")
        first = 0
        with named_errors(str(file)), _table(file) as table:
            for batch in _batches(file, table, list(names), batch_records):
                batch.validate(full=True)  # otherwise pyarrow follows offsets that point outside the buffers
                yield Records(file, first, tuple(batch.column(name) for name in names))
                first += batch.num_rows


def json_records(path: str) -> Iterator[Record]:
    """Yield the JSON objects of a file, or of the .jsonl files below a folder; skip blank lines."""
    for file in input_files(path, "jsonl"):
        for number, line in numbered_lines(file):
            if line.strip():
                where = f"{file}: line {number}"
                fields = parse_json_line(line, where)
                if not isinstance(fields, dict):
                    raise UserError(f"{where} holds {short(fields)}, not an object; write {{\"text\": \"…\"}}")
                yield Record(where, fields)


def table_records(path: str, split: str, column: str, beside: Sequence[str]) -> Iterator[Record]:
    """Yield the records of a table with one column, and the first of the columns `beside` that all files have."""
    files = table_files(path, split=split, split_option="data.split")
    names = [column, *[name for name in beside if all(name in column_types(file)[0] for file in files)][:1]]
    for some in read_columns(files, names, option="data.field", batch_records=DOCUMENTS_PER_BATCH):
        for record in range(len(some.columns[0])):
            yield Record(some.where(record), {name: some.value(at, record) for at, name in enumerate(names)})


def open_array(path: str) -> np.ndarray:
    """Open a .npy array, memory-mapped if it is a plain file; pickled arrays are refused."""
    is_plain = path != STDIN and path.lower().endswith(".npy") and os.path.isfile(path)
    content = None if is_plain else io.BytesIO(b"".join(chunks(path, MAX_ARRAY_BYTES)))
    try:
        return open_memmap(path, mode="r") if content is None else read_array(content, allow_pickle=False)
    except (ValueError, OSError, EOFError, SyntaxError, TypeError, MemoryError, OverflowError) as error:
        reason = plain(" ".join(str(error).split()))[:200]
        raise UserError(f"no .npy array ({reason}); save one with numpy.save") from None


def read_cells(
    lines: Iterable[str], delimiter: str, choose: Callable[[Sequence[str]], str]
) -> Iterator[list[tuple[int, str]]]:
    """Yield batches of (line number, cell) of one column of CSV.

    `choose` picks the column from the names in the first line; if that line has numbers, names are 1, 2, ….
    """
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    batch = _next_cells(reader, 1)
    while batch and not batch[0][1]:
        batch = _next_cells(reader, 1)
    if not batch:
        return
    head = [cell.strip() for cell in batch[0][1]]
    has_names = not all(map(is_count, head))
    names = head if has_names else [str(number) for number in range(1, len(head) + 1)]
    column = names.index(choose(names))
    batch = batch if not has_names else _next_cells(reader, CELLS_PER_BATCH)
    while batch:
        for line, cells in batch:
            if cells and len(cells) <= column:
                raise UserError(f"line {line} has {len(cells)} of the {len(names)} columns ({column_list(names)}); "
                                "repair or drop it")
        yield [(line, cells[column]) for line, cells in batch if cells]
        batch = _next_cells(reader, CELLS_PER_BATCH)


def column_list(names: Sequence[str]) -> str:
    """Join the names of columns for errors, without quotes."""
    shown = ", ".join(short(name) if not name.isprintable() else name for name in names[:MAX_NAMES_SHOWN])
    return plain(shown) + _and_more(names)


def pyarrow() -> ModuleType:
    """Import pyarrow with its parquet and IPC readers."""
    try:
        for name in ("pyarrow.parquet", "pyarrow.ipc"):
            importlib.import_module(name)
    except ImportError:
        raise UserError("parquet and Arrow files need the package pyarrow, which is not installed; "
                        f"{to_install('pyarrow')}") from None
    return importlib.import_module("pyarrow")


@contextmanager
def _table(file: Path) -> Iterator[Any]:
    """Open a reader of an Arrow file (file or stream format) or of a parquet file."""
    arrow = pyarrow()
    if not _is_arrow(file):
        with arrow.parquet.ParquetFile(file) as table:
            yield table
        return
    with arrow.memory_map(str(file)) as source:
        yield (arrow.ipc.open_file if _begins_as_arrow(file) else arrow.ipc.open_stream)(source)


def _batches(file: Path, table: Any, names: list[str], size: int) -> Iterator[Any]:
    if not _is_arrow(file):
        yield from table.iter_batches(batch_size=size, columns=names)
        return
    whole = ((table.get_batch(number) for number in range(table.num_record_batches))
             if hasattr(table, "get_batch") else table)
    for batch in whole:
        chosen = batch.select(names)
        for first in range(0, chosen.num_rows, size):
            yield chosen.slice(first, size)


def _is_arrow(file: Path) -> bool:
    return file.suffix == ".arrow" or _begins_as_arrow(file)


def _begins_as_arrow(file: Path) -> bool:
    with named_errors(str(file)), file.open("rb") as opened:
        return opened.read(len(_ARROW)) == _ARROW


def _next_cells(reader: Any, count: int) -> list[tuple[int, list[str]]]:
    """Return the next lines of CSV with their numbers, under a field limit (which csv keeps per process)."""
    limit = csv.field_size_limit(MAX_CELL_BYTES)
    try:
        return [(reader.line_num, cells) for cells in islice(reader, count)]
    except csv.Error as error:
        raise UserError(f"line {reader.line_num} is broken ({error}); repair it") from None
    finally:
        csv.field_size_limit(limit)


def _saved_files(folder: Path) -> list[Path]:
    """List the data files of a dataset of `save_to_disk`, in the order of its state.json."""
    state = read_json(folder / "state.json")
    listed = state.get("_data_files") if isinstance(state, dict) else None
    names = [one.get("filename") if isinstance(one, dict) else None
             for one in (listed if isinstance(listed, list) else [])]
    files = [folder / name for name in _plain_names(names, folder / "state.json", "_data_files")]
    for file in files:
        if not file.is_file():
            raise UserError(f"{folder / 'state.json'} names {file.name}, which is not there; copy the folder again")
    return files


def _plain_names(names: Any, file: Path, key: str) -> list[str]:
    """Check names that a JSON file lists under `key`: none may lead out of its folder."""
    if not isinstance(names, list) or not names or not all(
            isinstance(name, str) and name and name.isprintable() and Path(name).name == name for name in names):
        raise UserError(f"{file} has {short(names)} under {key!r}, not names of files; save the dataset again")
    return names


def _chosen(path: Path, names: list[str], split: str, option: str) -> str:
    """Return the requested split, or the only one."""
    if split in names or (len(names) == 1 and not split):
        return split or names[0]
    known = _listed([name for name in names if name])
    if split:
        raise UserError(f"{option} is {split!r} but {path} has {known or 'no splits'}; choose one of those")
    first = "train" if "train" in names else next(name for name in names if name)
    typed = f"give {option} {first}" if option.startswith("--") else f"set {option} to one of them, such as {first}"
    remedy = typed if option else "name the files of one"
    raise UserError(f"{path} holds several splits, {known}; {remedy}")


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(short, names[:MAX_NAMES_SHOWN])) + _and_more(names)


def _and_more(names: Sequence[str]) -> str:
    return f" and {len(names) - MAX_NAMES_SHOWN} more" if len(names) > MAX_NAMES_SHOWN else ""
