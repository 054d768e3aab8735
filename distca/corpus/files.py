"""Read the bytes and lines of users' files: plain, gzip or Zstandard, by name or from stdin.

The first bytes of a file say how it is compressed, so a pipe works as well as a name. Files are read a chunk at a time.
A few kilobytes of gzip can claim to be terabytes: a file that is read up to `max_bytes` may also unpack to no more than
MAX_RATIO times its size, once past FREE_BYTES. Whatever is missing, torn or foreign becomes a UserError of one line
that begins with the file's name. Before Python 3.14, reading .zst needs the package zstandard.
"""

from __future__ import annotations

import gzip
import importlib
import io
import json
import os
import sys
import sysconfig
import zlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from distca.validation import UserError, plain

STDIN = "-"
SUFFIXES = {".csv": "csv", ".tsv": "tsv", ".jsonl": "jsonl", ".ndjson": "jsonl", ".npy": "npy",
            ".parquet": "parquet", ".pq": "parquet", ".arrow": "arrow", ".feather": "arrow"}  # -> format
COMPRESSED = (".gz", ".gzip", ".zst", ".zstd")
MAX_LINE_BYTES = 2**28
FREE_BYTES = 2**26
MAX_RATIO = 200
CHUNK_BYTES = 2**23

_GZIP, _ZSTD, _BYTE_ORDER_MARK = b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"\xef\xbb\xbf"
_ZSTD_BYTES = 2**12  # compressed bytes read at a time, which may unpack to 32,768 times as many
_NOT_THE_LIBRARY = ("site-packages", "dist-packages", "test", "tests", "idle_test")


@dataclass(frozen=True, slots=True)
class LineBlock:
    """Consecutive whole lines."""

    first: int      # number of the first line, from 1
    content: bytes  # the last line of a file may lack its line end


def label(path: str | Path) -> str:
    """Return the name of a file for errors."""
    return "stdin" if path == STDIN else str(path)


def format_of(name: str) -> str:
    """Return the format that the suffix of a file's name implies; "" if only the content can tell."""
    suffixes = [suffix.lower() for suffix in Path(name).suffixes if suffix.lower() not in COMPRESSED]
    return SUFFIXES.get(suffixes[-1], "") if suffixes else ""


def files_below(root: Path, *, skip: Collection[str] = (), max_entries: int | None = None) -> list[Path]:
    """List the files of a folder and its subfolders in order of path, without hidden ones and folders named in `skip`.

    A folder of more than `max_entries` entries is refused before all of it is walked.
    """
    found, entries = [], 0
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in skip]
        found += [Path(folder, name) for name in names if not name.startswith(".") and Path(folder, name).is_file()]
        entries += len(folders) + len(names)
        if max_entries is not None and entries > max_entries:
            raise UserError(f"a directory of more than {max_entries} entries; name the folder that holds the data")
    return sorted(found, key=lambda file: file.relative_to(root).as_posix())


def standard_library_files() -> list[Path]:
    """List the .py files of this Python's standard library in order of path, without tests and installed packages."""
    root = Path(sysconfig.get_path("stdlib"))
    return [file for file in files_below(root, skip=_NOT_THE_LIBRARY) if file.suffix == ".py"]


def chunks(path: str | Path, max_bytes: int | None = None) -> Iterator[bytes]:
    """Yield the decompressed bytes of a file, CHUNK_BYTES at a time."""
    name, total = label(path), 0
    with named_errors(name), _raw(path) as raw:
        stream = _decompressed(raw, name)
        if max_bytes is not None and os.path.isfile(path) and os.path.getsize(path) > max_bytes:
            raise _too_long(name, max_bytes)
        while chunk := stream.read(CHUNK_BYTES):
            total += len(chunk)
            if max_bytes is not None and total > max_bytes:
                raise _too_long(name, max_bytes)
            if max_bytes is not None and total > max(FREE_BYTES, MAX_RATIO * raw.num_bytes):
                raise UserError(f"{name}: unpacks to more than {MAX_RATIO} times its size; unpack it yourself if that "
                                "is what it should be, and give the plain file")
            yield chunk


def line_blocks(
    path: str | Path, *, max_bytes: int | None = None, max_line_bytes: int = MAX_LINE_BYTES,
    remedy: str = "give UTF-8 text",
) -> Iterator[LineBlock]:
    """Yield the lines of a text file in blocks of megabytes, with plain line ends and without a byte-order mark.

    `remedy` is for a file that is not text.
    """
    name, number, rest = label(path), 1, b""
    for part in chunks(path, max_bytes):
        if b"\0" in part:
            raise UserError(f"{name}: not a text file; {remedy}")
        content = rest + (part if rest or number > 1 else part.removeprefix(_BYTE_ORDER_MARK))
        stop = content.rfind(b"\n") + 1
        whole, rest = content[:stop], content[stop:]
        if whole:
            yield LineBlock(number, whole.replace(b"\r\n", b"\n"))
            number += whole.count(b"\n")
        if len(rest) > max_line_bytes:
            raise UserError(f"{name}: line {number} is longer than {max_line_bytes} bytes; cut it, or check what the "
                            "file is")
    if rest:
        yield LineBlock(number, rest.removesuffix(b"\r"))


def numbered_lines(path: str | Path) -> Iterator[tuple[int, str]]:
    """Yield the number and the text of every line."""
    for block in line_blocks(path):
        for number, line in enumerate(block.content.removesuffix(b"\n").split(b"\n"), block.first):
            try:
                yield number, line.decode("utf-8")
            except UnicodeDecodeError:
                raise UserError(f"{label(path)}: line {number} is not UTF-8 text; convert or drop it") from None


def parse_json_line(line: str, where: str) -> Any:
    """Return the value of one line of JSON lines."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else "a number too long, or lists too deep"
        raise UserError(f"{where} is not JSON ({reason}); repair or drop it") from None


@contextmanager
def named_errors(name: str) -> Iterator[None]:
    """Turn whatever reading a file raises into a UserError of one line; a UserError passes."""
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


class _CountedStream(io.RawIOBase):
    """A stream that counts the bytes read from a file."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.num_bytes = file, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        content = self._file.read(len(buffer)) or b""
        self.num_bytes += len(content)
        buffer[:len(content)] = content
        return len(content)


@contextmanager
def _raw(path: str | Path) -> Iterator[_CountedStream]:
    if path == STDIN and sys.stdin is None:
        raise UserError("stdin: is closed; give a file")
    with nullcontext(sys.stdin.buffer) if path == STDIN else open(path, "rb", buffering=0) as file:
        yield _CountedStream(cast(BinaryIO, file))


def _decompressed(raw: _CountedStream, name: str) -> BinaryIO:
    file = io.BufferedReader(raw)
    head = file.peek(4)
    if name.endswith(".gz") and head[:2] != _GZIP:
        raise UserError(f"{name} does not begin as gzip does; compress it again, or drop .gz from its name")
    if name.endswith((".zst", ".zstd")) and head[:4] != _ZSTD:
        raise UserError(f"{name} does not begin as Zstandard does; compress it again, or drop the end of its name")
    if head[:2] == _GZIP:
        return cast(BinaryIO, gzip.GzipFile(fileobj=file))
    return _zstd(file, name) if head[:4] == _ZSTD else file


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
    """A stream of the frames of a file. The reader of the package zstandard accepts files that were cut short."""

    def __init__(self, file: BinaryIO, decompressor: Any) -> None:
        self._file, self._decompressor = file, decompressor
        self._frame, self._ready = decompressor.decompressobj(), memoryview(b"")  # a view: its rest is no copy
        self._frame_bytes = 0  # compressed bytes of this frame

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            rest = b""
            if self._frame.eof:
                rest = self._frame.unused_data
                self._frame, self._frame_bytes = self._decompressor.decompressobj(), 0
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


def _too_long(name: str, max_bytes: int) -> UserError:
    return UserError(f"{name}: more than {max_bytes} bytes, the most that is read of such a file; give less of it")
