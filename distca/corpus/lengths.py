"""Read document lengths for plans from users' files: numbers, lists of tokens, or texts to tokenize.

The suffix of a file determines its format: .csv, .tsv, .jsonl, .npy, .parquet, .arrow. Files with .json, .txt and other
names are JSON if they begin with [ or {, and otherwise one number per line. Text and arrays may be compressed by gzip
or zstd. A folder is a Hugging Face dataset or has shards of one format. `Reading` overrides the format and gives the
column and the tokenizer. Lines are parsed in blocks of megabytes: a million take about a second.
"""

from __future__ import annotations

import json
import re
import sysconfig
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from distca.columns import IntArray
from distca.corpus import files, tables
from distca.corpus.files import STDIN, LineBlock, format_of
from distca.corpus.tokenizers import TextTokenizer, in_groups, open_tokenizer
from distca.spec import unknown_name
from distca.validation import (
    CORPUS_WHY,
    MAX_CORPUS_DOCUMENTS,
    MAX_TEXT_BYTES,
    UserError,
    check_whole,
    parse_count,
    parse_json,
    short,
)
from distca.workload.documents import MAX_LENGTH, Workload, bad_length, check_lengths, workload_from_json

FORMATS = ("lines", "csv", "tsv", "json", "jsonl", "npy", "parquet", "arrow")
DELIMITERS = {"csv": ",", "tsv": "\t"}
LENGTH, TOKENS, TEXT = "length", "input_ids", "text"
MAX_STREAM_BYTES = 2**36   # of a text file, decompressed
MAX_LINE_BYTES = 2**26
MAX_ENTRIES = 20_000       # of a folder and its subfolders
NUMBERS_PER_BATCH = 2**18
NO_TOKENIZER = "is text; give --tokenizer with its tokenizer.json, or a column of lengths"
TEXT_REMEDY = "give UTF-8 text, or say with --format what it is"

_NO_FRACTION = re.compile(r"\.0*$", re.ASCII)  # of whole numbers that a tool wrote as floats
_DIGITS = re.compile(r"[0-9]{1,18}", re.ASCII)
_HALF_A_PAIR = re.compile("[\ud800-\udfff]")

Progress = Callable[[int], None]  # called with the number of documents read so far
Where = Callable[[int], str]      # index of a value -> its position in the file, for errors


@dataclass(frozen=True, slots=True)
class Reading:
    """Options of reading a file; see the module."""

    format: str | None = None      # one of FORMATS, compressed or not
    column: str | None = None      # column of a table, or key of JSON objects
    tokenizer: str | None = None   # path of a tokenizer.json, for texts
    split: str | None = None       # of a folder that holds several


@dataclass(frozen=True, slots=True)
class Wanted:
    """The column that the user named, and the open tokenizer."""

    column: str | None = None
    tokenizer: TextTokenizer | None = None

    def choose(self, names: Collection[str]) -> str:
        """Return the column to read: the one that the user named, else `text` with a tokenizer and `length` or
        `input_ids` without one, else the only column."""
        if self.column is not None:
            if self.column not in names:
                raise UserError(f"column is {short(self.column)}; the columns are: {tables.column_list(list(names))}")
            return self.column
        usual = [TEXT] if self.tokenizer is not None else [LENGTH, TOKENS]
        for name in (*usual, *(names if len(names) == 1 else ())):
            if name in names:
                return name
        hint = f", or --tokenizer to count {TEXT!r}" if TEXT in names and self.tokenizer is None else ""
        known = tables.column_list(list(names))
        raise UserError(f"no column is called {usual[0]!r}; give --column with one of: {known}{hint}")


def read_source(
    path: str | Path, reading: Reading | None = None, progress: Progress = lambda _: None
) -> Workload | IntArray:
    """Read a workload, or lengths in the order of the file; `-` is stdin. Errors begin with the name of the file."""
    name, reading = str(path), reading or Reading()
    with _named(files.label(path)):
        if reading.column is not None and not (reading.column and reading.column.isprintable()):
            raise UserError(f"column is {short(reading.column)}; give the name of a column")
        wanted = Wanted(reading.column, None if reading.tokenizer is None else
                        open_tokenizer(reading.tokenizer, "--tokenizer", special_tokens=True))
        is_folder = name != STDIN and Path(name).is_dir()
        if reading.split is not None and not is_folder:
            raise UserError(f"split is {short(reading.split)} but only folders have splits; leave --split out")
        parts = (_read_folder(Path(name), wanted, reading.split or "") if is_folder
                 else _read_file(name, reading.format, wanted))
        return parts if isinstance(parts, Workload) else _joined(parts, progress)


def standard_library_lengths() -> IntArray:
    """Return the size in bytes of each .py file of the standard library: a corpus that every machine has."""
    lengths = [file.stat().st_size for file in files.standard_library_files()]
    if not any(lengths):
        raise UserError(f"the standard library at {sysconfig.get_path('stdlib')} holds no .py files; use a sampler or "
                        "a file of lengths")
    return check_lengths([length for length in lengths if length])


def length_of_text(text: str, where: str) -> int:
    """Return a length as people type it, such as 4096 or 128k, or as tools write it, such as 4096.0."""
    try:
        length = parse_count(where, _NO_FRACTION.sub("", text.strip()))
    except UserError:
        raise bad_length(where, text) from None
    if not 1 <= length <= MAX_LENGTH:
        raise bad_length(where, length)
    return length


def _read_file(name: str, format_: str | None, wanted: Wanted) -> Workload | Iterator[IntArray]:
    if format_ is not None and format_ not in FORMATS:
        raise unknown_name("format", format_, FORMATS)
    format_ = format_of(name) if format_ is None else format_
    if format_ == "npy":
        array = tables.open_array(name)
        if array.ndim != 1 or array.dtype.kind not in "iuf":
            raise UserError(f"an array of {array.dtype} with shape {array.shape}; give whole numbers in one dimension")
        return iter([_checked(array, lambda index: f"lengths[{index}]")])
    if format_ not in ("parquet", "arrow"):
        return _read_text(name, format_, wanted)
    if name == STDIN:
        raise UserError(f"format is {format_!r}, which cannot be read from a pipe; give a file")
    return _table_lengths([Path(name)], wanted)


def _read_folder(folder: Path, wanted: Wanted, split: str) -> Iterator[IntArray]:
    """Read a dataset of `save_to_disk`, shards of tables, or shards of JSON lines; if it has several splits, one."""
    found = files.files_below(folder, max_entries=MAX_ENTRIES)
    if tables.is_dataset(folder) or any(file.suffix in tables.TABLE_SUFFIXES for file in found):
        yield from _table_lengths(tables.table_files(folder, split=split, split_option="--split"), wanted)
        return
    shards = [file for file in found if format_of(file.name) == "jsonl"]
    if not shards:
        raise UserError("a directory without data; give a file, or a folder with .parquet, .arrow or .jsonl files or "
                        "a dataset that was saved to disk")
    for file in tables.of_split(folder, shards, split, "--split"):
        with _named(str(file)):
            parts = _read_text(str(file), "jsonl", wanted)
            assert not isinstance(parts, Workload), "JSON lines are no workload"
            yield from parts


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Prefix errors with the name of the file, unless they already begin with it."""
    try:
        yield
    except UserError as error:
        if str(error).startswith(name):
            raise
        raise UserError(f"{name}: {error}") from None


def _joined(parts: Iterator[IntArray], progress: Progress) -> IntArray:
    found: list[IntArray] = []
    total = 0
    for part in parts:
        total += len(part)
        check_whole("the number of documents", total, least=0, most=MAX_CORPUS_DOCUMENTS, why=CORPUS_WHY)
        found.append(part)
        progress(total)
    if not total:
        raise UserError("lengths is empty; give at least one document length")
    return np.concatenate(found)


def _read_text(name: str, format_: str, wanted: Wanted) -> Workload | Iterator[IntArray]:
    """Read lengths block by block, or a workload. Without a format the file is JSON or one number per line."""
    blocks = files.line_blocks(name, max_bytes=MAX_STREAM_BYTES, max_line_bytes=MAX_LINE_BYTES, remedy=TEXT_REMEDY)
    first = next((block for block in blocks if block.content.strip()), LineBlock(1, b""))
    blocks = chain([first], blocks)
    if format_ == "json" or (not format_ and first.content.lstrip()[:1] in (b"[", b"{")):
        return _read_json(blocks, wanted)
    if format_ in DELIMITERS:
        lines = (f"{line}\n" for block in blocks for line in _decoded(block).removesuffix("\n").split("\n"))
        return (_cell_lengths(cells, wanted) for cells in tables.read_cells(lines, DELIMITERS[format_], wanted.choose))
    if format_ == "jsonl":
        return (_json_line_lengths(block, wanted) for block in blocks)
    if wanted != Wanted():
        raise UserError("one number a line has no columns and no texts; leave --column and --tokenizer out, or say "
                        "with --format what it is")
    return map(_line_lengths, blocks)


def _decoded(block: LineBlock) -> str:
    try:
        return block.content.decode("utf-8")
    except UnicodeDecodeError:
        raise UserError(f"not a text file; {TEXT_REMEDY}") from None


def _read_json(blocks: Iterator[LineBlock], wanted: Wanted) -> Workload | Iterator[IntArray]:
    text, total = "", 0
    for block in blocks:
        total += len(block.content)
        if total > MAX_TEXT_BYTES:
            raise UserError(f"more than {MAX_TEXT_BYTES} bytes, the most that is read of one JSON value; give JSON "
                            "lines, CSV or .npy")
        text += _decoded(block)
    try:
        content = parse_json(text)
    except UserError:
        if _parsed(text.lstrip().split("\n", 1)[0]) is not None:
            raise UserError("several JSON values; name the file .jsonl, or give --format jsonl") from None
        raise
    if isinstance(content, dict):
        return workload_from_json(content)
    if not isinstance(content, list):
        raise UserError(f"holds {short(content)}; give a JSON list of lengths or of objects, or a workload")
    if any(isinstance(value, dict) for value in content):
        return iter([_record_lengths(content, wanted, lambda index: f"lengths[{index}]")])
    return iter([check_lengths([_whole(value) for value in content])])


def _parsed(text: str) -> Any:
    """Return the value of a JSON text; None if it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _json_line_lengths(block: LineBlock, wanted: Wanted) -> IntArray:
    """Parse a block as one JSON list, which is fast; if that fails, parse line by line to find the broken line."""
    text = _decoded(block).rstrip("\n")
    numbers: Sequence[int] = range(block.first, block.first + text.count("\n") + 1)
    records = _parsed("[{}]".format(text.replace("\n", ","))) or []
    if len(records) != len(numbers):  # blank lines, or broken ones
        lines = [(number, line) for number, line in zip(numbers, text.split("\n"), strict=True) if line.strip()]
        numbers = [number for number, _ in lines]
        records = [files.parse_json_line(line, f"line {number}") for number, line in lines]
    return _record_lengths(records, wanted, lambda index: f"line {numbers[index]}")


def _record_lengths(records: list[Any], wanted: Wanted, where: Where) -> IntArray:
    """Return the lengths of JSON values: numbers, or objects with a length, tokens or a text under a key."""
    values = []
    for index, record in enumerate(records):
        if isinstance(record, list | str):
            raise bad_length(where(index), record)
        try:
            values.append(record[wanted.choose(record)] if isinstance(record, dict) else record)
        except UserError as error:
            raise UserError(f"{where(index)}: {error}") from None
    return _value_lengths(values, wanted, where)


def _cell_lengths(cells: list[tuple[int, str]], wanted: Wanted) -> IntArray:
    texts = [text for _, text in cells]
    read = _number_lengths if wanted.tokenizer is None else partial(_value_lengths, wanted=wanted)
    return read(texts, where=lambda index: f"line {cells[index][0]}")


def _line_lengths(block: LineBlock) -> IntArray:
    """Read one number per line; skip blank lines and comments after #."""
    if not block.content.translate(None, b"0123456789\n") and block.content.strip():
        values = np.fromstring(block.content, dtype=np.int64, sep="\n")  # too large numbers saturate
        if ((values >= 1) & (values <= MAX_LENGTH)).all():
            return values
    lines = [line.partition("#")[0].strip() for line in _decoded(block).split("\n")]
    numbers = [number for number, line in enumerate(lines, block.first) if line]
    return _number_lengths([line for line in lines if line], lambda index: f"line {numbers[index]}")


def _number_lengths(texts: Sequence[str], where: Where) -> IntArray:
    values = [int(text) if _DIGITS.fullmatch(text) else length_of_text(text, where(index))
              for index, text in enumerate(texts)]
    return check_lengths(values, most=MAX_CORPUS_DOCUMENTS, where=where) if values else np.empty(0, dtype=np.int64)


def _value_lengths(values: Sequence[Any], wanted: Wanted, where: Where) -> IntArray:
    """Return the lengths that whole numbers, lists of tokens, and texts stand for; skip empty lists and texts."""
    found: list[int] = []
    texts: list[str] = []
    of_texts: list[int] = []  # index in `found` of each of `texts`
    for index, value in enumerate(map(_whole, values)):
        if isinstance(value, str):
            if wanted.tokenizer is None:
                raise UserError(f"{where(index)} {NO_TOKENIZER}")
            if _HALF_A_PAIR.search(value):
                raise UserError(f"{where(index)} has half a surrogate pair; repair or drop it")
            if value:
                texts.append(value)
                of_texts.append(len(found))
            found.append(0)
        elif isinstance(value, list):
            found.append(len(value))
        elif type(value) is int and 1 <= value <= MAX_LENGTH:
            found.append(value)
        else:
            raise bad_length(where(index), value)
    lengths = np.array(found, dtype=np.int64)
    lengths[of_texts] = _counted(texts, wanted)
    return lengths[lengths > 0]


def _counted(texts: Sequence[str], wanted: Wanted) -> list[int]:
    """Return the number of tokens of each text."""
    groups = in_groups(texts, len)
    return [len(ids) for group in groups if wanted.tokenizer for ids in wanted.tokenizer.documents(group)]


def _whole(value: Any) -> Any:
    """Return a whole number that was written as a float, as an integer; other values pass unchanged."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _checked(array: np.ndarray, where: Where) -> IntArray:
    """Check an array of lengths; floats must be whole numbers."""
    if array.dtype.kind == "f":
        bad = ~((np.abs(array) <= MAX_LENGTH) & (array == np.rint(array)))
        if bad.any():
            raise bad_length(where(int(bad.argmax())), float(array[bad.argmax()]))
        array = array.astype(np.int64)
    return check_lengths(array, most=MAX_CORPUS_DOCUMENTS, where=where)


def _table_lengths(shards: Sequence[Path], wanted: Wanted) -> Iterator[IntArray]:
    """Yield the lengths of one column of parquet or Arrow files, batch by batch."""
    names, types = tables.column_types(shards[0])
    column = wanted.choose(names)
    kinds, kind = tables.pyarrow().types, types[names.index(column)]
    is_number = kinds.is_integer(kind) or kinds.is_floating(kind)
    for some in tables.read_columns(shards, [column], option="--column",
                                    batch_records=NUMBERS_PER_BATCH if is_number else tables.RECORDS_PER_BATCH):
        yield _column_lengths(some, column, wanted)


def _column_lengths(some: tables.Records, column: str, wanted: Wanted) -> IntArray:
    values, kinds = some.columns[0], tables.pyarrow().types
    if values.null_count:
        record = int(np.flatnonzero(np.asarray(values.is_null()))[0])
        raise UserError(f"{some.where(record)} has nothing under {short(column)}; drop it, or give another --column")
    if kinds.is_integer(values.type) or kinds.is_floating(values.type):
        return _checked(values.to_numpy(zero_copy_only=False), lambda at: f"{column}[{some.first + at}]")
    if kinds.is_list(values.type) or kinds.is_large_list(values.type) or kinds.is_fixed_size_list(values.type):
        lengths = np.asarray(values.value_lengths()).astype(np.int64)
        return lengths[lengths > 0]
    if kinds.is_string(values.type) or kinds.is_large_string(values.type):
        if wanted.tokenizer is None:
            raise UserError(f"column {short(column)} {NO_TOKENIZER}")
        counts = np.array(_counted([text for text in values.to_pylist() if text], wanted), dtype=np.int64)
        return counts[counts > 0]
    raise UserError(f"column {short(column)} holds {str(values.type)[:60]}; give a column of whole numbers, lists of "
                    "tokens, or text")
