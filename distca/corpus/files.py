"""Read the bytes and lines of users' files: plain, gzip or Zstandard, by name or from stdin.

The first bytes of a file determine its compression, so that pipes work too. Files are read in chunks. A few kilobytes
of gzip may expand to terabytes: with `max_bytes`, a file may also expand to at most MAX_RATIO times its size once it
exceeds FREE_BYTES. Missing, broken and unsupported files raise a UserError of one line that begins with the file's
name. Before Python 3.14, reading .zst needs the package zstandard.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import sys
import sysconfig
import zlib
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from distca.validation import UserError, plain, to_install

STDIN = "-"
SUFFIXES = {".csv": "csv", ".tsv": "tsv", ".jsonl": "jsonl", ".ndjson": "jsonl", ".npy": "npy",
            ".parquet": "parquet", ".pq": "parquet", ".arrow": "arrow", ".feather": "arrow"}  # -> format
COMPRESSED = (".gz", ".gzip", ".zst", ".zstd")
MAX_LINE_BYTES = 2**28
FREE_BYTES = 2**26
MAX_RATIO = 200
CHUNK_BYTES = 2**23
LOG = logging.getLogger("distca")

_GZIP, _ZSTD, _BYTE_ORDER_MARK = b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"\xef\xbb\xbf"
_PIECE_BYTES = 2**12  # compressed bytes read at a time: zstd may expand them 32,768 times
_NAMES_SHOWN = 3
_NOT_THE_LIBRARY = ("site-packages", "dist-packages", "test", "tests", "idle_test")


@dataclass(frozen=True, slots=True)
class LineBlock:
    """Consecutive complete lines."""

    first: int      # number of the first line, from 1
    content: bytes  # the last line of a file may lack its line end


def label(path: str | Path) -> str:
    """Return the name of a file, for errors."""
    return "stdin" if path == STDIN else str(path)


def format_of(name: str) -> str:
    """Return the format that the suffix of a file's name implies; "" if it implies none."""
    suffixes = [suffix.lower() for suffix in Path(name).suffixes if suffix.lower() not in COMPRESSED]
    return SUFFIXES.get(suffixes[-1], "") if suffixes else ""


def files_below(root: Path, *, skip: Collection[str] = (), max_entries: int | None = None) -> list[Path]:
    """List the files below a folder, sorted by path, without hidden files and folders and folders named in `skip`.

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
    """List the .py files of this Python's standard library, sorted by path, without tests and installed packages."""
    root = Path(sysconfig.get_path("stdlib"))
    return [file for file in files_below(root, skip=_NOT_THE_LIBRARY) if file.suffix == ".py"]


def chunks(path: str | Path, max_bytes: int | None = None) -> Iterator[bytes]:
    """Yield the decompressed bytes of a file, CHUNK_BYTES or more at a time."""
    name, total, size, parts = label(path), 0, 0, []
    with named_errors(name), _opened(path) as file:
        if max_bytes is not None and os.path.isfile(path) and os.path.getsize(path) > max_bytes:
            raise _too_long(name, max_bytes)
        for num_read, part in _decompressed(file, name):
            total, size = total + len(part), size + len(part)
            if max_bytes is not None and total > max_bytes:
                raise _too_long(name, max_bytes)
            if max_bytes is not None and total > max(FREE_BYTES, MAX_RATIO * num_read):
                raise UserError(f"{name}: unpacks to more than {MAX_RATIO} times its size; unpack it yourself if that "
                                "is what it should be, and give the plain file")
            parts.append(part)
            if size >= CHUNK_BYTES:
                yield b"".join(parts)
                size, parts = 0, []
    yield b"".join(parts)


def line_blocks(
    path: str | Path, *, max_bytes: int | None = None, max_line_bytes: int = MAX_LINE_BYTES,
    remedy: str = "give UTF-8 text",
) -> Iterator[LineBlock]:
    """Yield the lines of a text file in blocks of megabytes, with \\n as line ends and without a byte-order mark.

    The error for a file that is not text ends with `remedy`.
    """
    name, number, rest = label(path), 1, b""
    for part in chunks(path, max_bytes):
        if (zero := part.find(b"\0")) >= 0:
            line = number + part.count(b"\n", 0, zero)
            raise UserError(f"{name}: not a text file, for line {line} has a zero byte; {remedy}")
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


def input_files(path: str, format_: str = "") -> list[Path]:
    """List data.path itself if it is a file, or the files below the folder, of one format if one is given."""
    root = Path(path)
    if root.is_file():
        return [root]
    if not root.is_dir():
        raise UserError(f"data.path is {path!r}, which is no file or folder; check the path")
    found = [file for file in files_below(root) if not format_ or format_of(file.name) == format_]
    if not found:
        kind = f".{format_} file" if format_ else "file"
        raise UserError(f"data.path is {path!r}, a folder without a {kind} in it; name another")
    return found


def whole_file(file: Path) -> tuple[str, bytes]:
    """Return the name and the decompressed bytes of a file."""
    return str(file), b"".join(chunks(file))


def text_files(path: str) -> Iterator[tuple[str, bytes]]:
    """Yield data.path itself if it is a file, or the files below the folder that are UTF-8 text without a zero byte.

    The other files of the folder are skipped and named in the log.
    """
    found, skipped = input_files(path), []
    for name, content in map(whole_file, found):
        if Path(path).is_dir() and not _is_text(content):
            skipped.append(plain(Path(name).relative_to(path).as_posix()))
        else:
            yield name, content
    more = f" and {len(skipped) - _NAMES_SHOWN} more" if len(skipped) > _NAMES_SHOWN else ""
    names = ", ".join(skipped[:_NAMES_SHOWN]) + more
    if len(skipped) == len(found):
        raise UserError(f"data.path is {path!r}, a folder without a UTF-8 text in it, but with {names}; name another, "
                        "or set data.source to what these are")
    if skipped:
        LOG.info("data.path %r: %d of %d files are not UTF-8 text and left out: %s", path, len(skipped), len(found),
                 names)


def parse_json_line(line: str, where: str) -> Any:
    """Return the value of one JSON line; errors begin with `where`."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else "a number too long, or lists too deep"
        raise UserError(f"{where} is not JSON ({reason}); repair or drop it") from None


@contextmanager
def named_errors(name: str) -> Iterator[None]:
    """Turn errors of reading a file into a UserError of one line; let a UserError pass unchanged."""
    try:
        yield
    except FileNotFoundError:
        raise UserError(f"{name}: no such file; check the path") from None
    except UserError:
        raise
    except Exception as error:
        of_reading = isinstance(error, OSError | EOFError | zlib.error | ValueError)
        if not of_reading and not type(error).__module__.startswith(("pyarrow", "zstd", "zstandard", "compression")):
            raise
        reason = getattr(error, "strerror", None) or plain(str(error).partition("\n")[0])[:200]
        raise UserError(f"{name}: cannot be read ({reason}); copy it again or give another file") from None


@contextmanager
def _opened(path: str | Path) -> Iterator[BinaryIO]:
    if path == STDIN and sys.stdin is None:
        raise UserError("stdin: is closed; give a file")
    with nullcontext(sys.stdin.buffer) if path == STDIN else open(path, "rb") as file:
        yield file


def _decompressed(file: BinaryIO, name: str) -> Iterator[tuple[int, bytes]]:
    """Yield (compressed bytes read so far, newly decompressed bytes) over all gzip members or zstd frames."""
    content = file.read(_PIECE_BYTES)
    num_read, new_frame = len(content), _frames(content, name)
    frame = None
    while content:
        if new_frame is None:
            yield num_read, content
            content = b""
        else:
            content = content.lstrip(b"\0") if frame is not None and frame.eof else content  # padding after a member
            if content:
                frame = new_frame() if frame is None or frame.eof else frame
                yield num_read, frame.decompress(content)
                content = frame.unused_data if frame.eof else b""
        if not content:
            content = file.read(CHUNK_BYTES if new_frame is None else _PIECE_BYTES)
            num_read += len(content)
    if frame is not None and not frame.eof:
        raise EOFError("it ends within a frame")


def _frames(head: bytes, name: str) -> Callable[[], Any] | None:
    """Return a factory of decompressors, each for one gzip member or zstd frame; None if the file is plain."""
    if name.endswith(".gz") and head[:2] != _GZIP:
        raise UserError(f"{name} does not begin as gzip does; compress it again, or drop .gz from its name")
    if name.endswith((".zst", ".zstd")) and head[:4] != _ZSTD:
        raise UserError(f"{name} does not begin as Zstandard does; compress it again, or drop the end of its name")
    if head[:2] == _GZIP:
        return lambda: zlib.decompressobj(wbits=31)
    if head[:4] != _ZSTD:
        return None
    with suppress(ImportError):
        return cast(Callable[[], Any], importlib.import_module("compression.zstd").ZstdDecompressor)
    with suppress(ImportError):
        return cast(Callable[[], Any], importlib.import_module("zstandard").ZstdDecompressor().decompressobj)
    raise UserError(f"{name} is Zstandard, which needs Python 3.14 or the package zstandard; "
                    f"{to_install('zstandard')}")


def _is_text(content: bytes) -> bool:
    try:
        content.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return b"\0" not in content


def _too_long(name: str, max_bytes: int) -> UserError:
    return UserError(f"{name}: more than {max_bytes} bytes, the most that is read of such a file; give less of it")
