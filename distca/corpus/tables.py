"""Lines and columns out of files that other tools wrote: text, gzip and Zstandard; parquet and Arrow.

What a compressed file is, its first bytes say, so a pipe will do as well as a name. Everything is read in pieces:
memory holds one line, or one batch of records. pyarrow reads tables and Hugging Face dataset folders; before Python
3.14 the package zstandard reads .zst. Whatever is missing, torn or foreign becomes a ValueError of one line.
"""

from __future__ import annotations

import gzip
import importlib
import io
import os
import re
import sys
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO, NamedTuple, cast

from distca.validation import UserError, plain, read_json, short

MAX_LINE_BYTES = 2**28
RECORDS_PER_BATCH = 1_024
TABLE_SUFFIXES = (".parquet", ".arrow")
SPLITS = {"train": "train", "training": "train", "validation": "validation", "valid": "validation",
          "val": "validation", "dev": "validation", "test": "test", "testing": "test", "eval": "test",
          "evaluation": "test"}  # words in the path of a file that say which part of a dataset it is

_GZIP, _ZSTD, _PARQUET, _ARROW = b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"PAR1", b"ARROW1"
_NUMBERS = {"int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "bool"}
_ZSTD_BYTES = 2**12  # read at a time: 32,768 times as many may come out


class Records(NamedTuple):
    """Some records of a table file."""

    file: Path
    first: int                 # the first one's number in the file, from 0
    columns: tuple[Any, ...]   # pyarrow arrays, those that were asked for in that order

    def where(self, record: int) -> str:
        """One of these records, for people."""
        return f"{self.file}: row {self.first + record}"

    def value(self, column: int, record: int) -> Any:
        """One value as Python has it; lists of numbers stay arrays."""
        with _refused(self.where(record)):
            scalar = self.columns[column][record]
            values = getattr(scalar, "values", None)
            if values is not None and values.null_count == 0 and str(values.type) in _NUMBERS:
                return values.to_numpy(zero_copy_only=False)
            return scalar.as_py()


def text_lines(
    source: str | Path | BinaryIO, *, name: str = "", max_bytes: int | None = None, max_line_bytes: int = MAX_LINE_BYTES
) -> Iterator[str]:
    """The lines of UTF-8 text, decompressed, without their ends; a byte-order mark is dropped.

    `source` is a path or an open stream of bytes that errors call `name`. More than `max_bytes` decompressed bytes in
    all, or `max_line_bytes` in a line, are refused.
    """
    name = name or str(source)
    left = sys.maxsize if max_bytes is None else max_bytes
    with _refused(name), _opened(source, name) as stream:
        number = 0
        while line := stream.readline(min(left, max_line_bytes) + 1):
            number += 1
            left -= len(line)
            if left < 0:
                raise UserError(f"{name}: more than {max_bytes} bytes of text, the most that is read of it; give "
                                "less of it")
            if len(line) > max_line_bytes:
                raise UserError(f"{name}: line {number} has more than {max_line_bytes} bytes; write shorter lines")
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError:
                raise UserError(f"{name}: line {number} is not UTF-8 text; convert or drop it") from None
            yield text.removesuffix("\n").removesuffix("\r")


@contextmanager
def opened(source: str | Path | BinaryIO, *, name: str = "") -> Iterator[BinaryIO]:
    """A stream of decompressed bytes; whatever keeps it from being read is a ValueError that begins with `name`."""
    name = name or str(source)
    with _refused(name), _opened(source, name) as stream:
        yield stream


def unpacked(path: Path) -> bytes:
    """All of a file, decompressed."""
    with _refused(str(path)), _opened(path, str(path)) as stream:
        return stream.read()


def is_table(path: str | Path) -> bool:
    """Whether `table_files` would find tables here: a parquet or Arrow file, or a folder of some."""
    path = Path(path)
    if path.is_dir():
        return any((path / name).is_file() for name in ("dataset_dict.json", "state.json")) or any(
            file.suffix in TABLE_SUFFIXES for file in files_below(path))
    return path.suffix in TABLE_SUFFIXES or (path.is_file() and _first_bytes(path, 6).startswith((_PARQUET, _ARROW)))


def table_files(path: str | Path, *, split: str = "", split_option: str = "") -> list[Path]:
    """The parquet or Arrow files that are one table: a file, the files of a folder, a Hugging Face dataset's folder.

    A dataset of several splits needs the name of one, from the option `split_option` where the caller has one.
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
    by_split: dict[str, list[Path]] = {}
    for file in found:
        by_split.setdefault(split_of(file.relative_to(path)), []).append(file)
    return by_split[_chosen(path, list(by_split), split, split_option)]


def split_of(path: Path) -> str:
    """The split that a file's path names, the part nearest its end first; '' where it names none."""
    for part in reversed(path.parts):
        for word in re.split(r"[^a-z]+", part.lower()):
            if word in SPLITS:
                return SPLITS[word]
    return ""


def files_below(root: Path) -> list[Path]:
    """Every file of a folder and those inside it, in order of path; hidden ones are left out."""
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(folder, name) for name in names if not name.startswith(".") and Path(folder, name).is_file()]
    return sorted(found, key=lambda file: file.relative_to(root).as_posix())


def column_names(file: Path) -> list[str]:
    """The columns of a parquet or Arrow file."""
    with _refused(str(file)), _table(file) as table:
        schema = table.schema if _is_arrow(file) else table.schema_arrow
        return list(schema.names)


def read_columns(
    files: Sequence[Path], names: Sequence[str], *, option: str, batch_records: int = RECORDS_PER_BATCH
) -> Iterator[Records]:
    """The named columns of all files, some records at a time; `option` is where the caller names columns."""
    for file in files:
        known = column_names(file)
        for name in names:
            if known.count(name) != 1:
                what = "several columns" if name in known else "no column"
                raise UserError(f"{file}: {what} {name!r}; it has {_listed(known)}: set {option} to one of them")
        first = 0
        with _refused(str(file)), _table(file) as table:
            for batch in _batches(file, table, list(names), batch_records):
                batch.validate(full=True)  # offsets that point outside would be followed
                yield Records(file, first, tuple(batch.column(name) for name in names))
                first += batch.num_rows


def pyarrow() -> ModuleType:
    """pyarrow with its parquet and IPC readers, or the line that says how to get it."""
    try:
        for name in ("pyarrow.parquet", "pyarrow.ipc"):
            importlib.import_module(name)
    except ImportError:
        raise UserError("parquet and Arrow files need the package pyarrow, which is not installed; run: pip install "
                        "pyarrow") from None
    return importlib.import_module("pyarrow")


@contextmanager
def _opened(source: str | Path | BinaryIO, name: str) -> Iterator[BinaryIO]:
    """A buffered stream of decompressed bytes; what the caller opened stays open."""
    with open(source, "rb") if isinstance(source, str | Path) else nullcontext(source) as raw:
        file = raw if isinstance(raw, io.BufferedReader) else io.BufferedReader(cast(io.RawIOBase, raw))
        head = file.peek(4)
        if name.endswith(".gz") and head[:2] != _GZIP:
            raise UserError(f"{name} does not begin as gzip does; compress it again, or drop .gz from its name")
        if name.endswith((".zst", ".zstd")) and head[:4] != _ZSTD:
            raise UserError(f"{name} does not begin as Zstandard does; compress it again, or drop the end of its name")
        if head[:2] == _GZIP:
            yield cast(BinaryIO, gzip.GzipFile(fileobj=file))
        elif head[:4] == _ZSTD:
            yield _zstd(file, name)
        else:
            yield file


def _zstd(file: BinaryIO, name: str) -> BinaryIO:
    try:
        return cast(BinaryIO, importlib.import_module("compression.zstd").ZstdFile(file))
    except ImportError:
        pass
    try:
        zstandard = importlib.import_module("zstandard")
    except ImportError:
        raise UserError(f"{name} is Zstandard, which needs Python 3.14 or the package zstandard; run: pip install "
                        "zstandard") from None
    return cast(BinaryIO, io.BufferedReader(_ZstdStream(file, zstandard.ZstdDecompressor())))


class _ZstdStream(io.RawIOBase):
    """Frame after frame. The package's own reader takes a file that was cut short for one that ends."""

    def __init__(self, file: BinaryIO, decompressor: Any) -> None:
        self._file, self._decompressor = file, decompressor
        self._frame, self._ready = decompressor.decompressobj(), memoryview(b"")  # a view: its rest is no copy
        self._frame_bytes = 0  # compressed, of this frame

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            if self._frame.eof:
                rest = self._frame.unused_data
                self._frame, self._frame_bytes = self._decompressor.decompressobj(), 0
            else:
                rest = b""
            chunk = rest or self._file.read(_ZSTD_BYTES)
            if not chunk:
                if self._frame_bytes:
                    raise EOFError("it ends within a frame")
                return 0
            self._frame_bytes += len(chunk)
            self._ready = memoryview(self._frame.decompress(chunk))
        count = min(len(buffer), len(self._ready))
        buffer[:count], self._ready = self._ready[:count], self._ready[count:]
        return count


@contextmanager
def _refused(name: str) -> Iterator[None]:
    """Whatever the readers raise about a file, as one line; what we refuse ourselves passes."""
    try:
        yield
    except FileNotFoundError:
        raise UserError(f"{name}: no such file; check the path") from None
    except UserError:
        raise
    except Exception as error:
        theirs = isinstance(error, OSError | EOFError | zlib.error | ValueError)
        if not theirs and not type(error).__module__.startswith(("pyarrow", "zstd", "zstandard", "compression")):
            raise
        reason = getattr(error, "strerror", None) or plain(str(error).partition("\n")[0])[:200]
        raise UserError(f"{name}: cannot be read ({reason}); copy it again or give another file") from None


@contextmanager
def _table(file: Path) -> Iterator[Any]:
    """A reader of record batches (Arrow, both of its kinds of files) or of a parquet file."""
    arrow = pyarrow()
    if not _is_arrow(file):
        with arrow.parquet.ParquetFile(file) as table:
            yield table
        return
    with arrow.memory_map(str(file)) as source:
        reader = arrow.ipc.open_file if _first_bytes(file, 6) == _ARROW else arrow.ipc.open_stream
        yield reader(source)


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
    return file.suffix == ".arrow" or _first_bytes(file, 6) == _ARROW


def _first_bytes(file: Path, count: int) -> bytes:
    with _refused(str(file)), file.open("rb") as opened:
        return opened.read(count)


def _saved_files(folder: Path) -> list[Path]:
    """The data files of a dataset that `save_to_disk` wrote, in its order."""
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
    """Names inside a folder, of which a file under `key` must have at least one: nothing leads out of the folder."""
    if not isinstance(names, list) or not names or not all(
            isinstance(name, str) and name and name.isprintable() and Path(name).name == name for name in names):
        raise UserError(f"{file} has {short(names)} under {key!r}, not names of files; save the dataset again")
    return names


def _chosen(path: Path, names: list[str], split: str, option: str) -> str:
    """The only split, or the one that was asked for."""
    if split in names or (len(names) == 1 and not split):
        return split or names[0]
    known = _listed([name for name in names if name])
    if split:
        raise UserError(f"{option} is {split!r} but {path} has {known or 'no splits'}; choose one of those")
    remedy = f"set {option} to one of them" if option else "name the files of one"
    raise UserError(f"{path} holds several splits, {known}; {remedy}")


def _listed(names: Sequence[str]) -> str:
    """Names for an error, not all of very many."""
    shown = ", ".join(short(name) for name in names[:20])
    return shown + (f" and {len(names) - 20} more" if len(names) > 20 else "")
