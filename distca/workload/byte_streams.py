"""Bytes of a file or of stdin, plain or out of gzip or zstd, a chunk at a time and never more than is sensible.

A few kilobytes of gzip can claim to be terabytes. So what is unpacked is counted: past a generous start it may not be
more than MAX_RATIO times what was read for it. Lines come in blocks, so that millions of them are parsed at once.
"""

from __future__ import annotations

import gzip
import os
import stat
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any, cast

STDIN = "-"
PACKINGS = {".gz": "gz", ".gzip": "gz", ".zst": "zst", ".zstd": "zst"}
MAX_STREAM_BYTES = 2**36     # of all lines of a file, unpacked
MAX_LINE_BYTES = 2**26
FREE_BYTES = 2**26           # unpacked before its ratio to what was read counts
MAX_RATIO = 200
CHUNK_BYTES = 2**20
PACKED_CHUNK_BYTES = 2**12   # zstd unpacks a chunk to at most 32,768 times its size
BLOCK_BYTES = 2**23


@dataclass(frozen=True, slots=True)
class ByteSource:
    """Where bytes come from: a path or STDIN, and what they are packed with: "", "gz" or "zst"."""

    path: str
    packing: str = ""

    def check_size(self, max_bytes: int) -> None:
        """Refuse a plain file that is too large before any of it is read."""
        if self.path != STDIN and not self.packing:
            about = _status(self.path)
            if stat.S_ISREG(about.st_mode) and about.st_size > max_bytes:
                raise _too_long(max_bytes)

    def chunks(self, max_bytes: int = MAX_STREAM_BYTES) -> Iterator[bytes]:
        """The bytes, unpacked; whatever keeps them from being read becomes a one-line ValueError."""
        self.check_size(max_bytes)
        with _opened(self.path) as file:
            read = _Counted(file)
            total = 0
            for chunk in _unpacked(read, self.packing):
                total += len(chunk)
                if total > max_bytes:
                    raise _too_long(max_bytes)
                if self.packing and total > FREE_BYTES and total > MAX_RATIO * read.num_bytes:
                    raise ValueError(f"unpacks to more than {MAX_RATIO} times its size; unpack it yourself if that is "
                                     "what it should be, and give the plain file")
                yield chunk

    def read(self, max_bytes: int) -> bytes:
        """All of it."""
        return b"".join(self.chunks(max_bytes))


class _Counted:
    """A file that counts what was read of it."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.num_bytes = file, 0

    def read(self, size: int = CHUNK_BYTES) -> bytes:
        content = self.file.read(size)
        self.num_bytes += len(content)
        return content


@dataclass(frozen=True, slots=True)
class LineBlock:
    """Whole lines that follow each other."""

    first: int      # number of the first line, from 1
    content: bytes  # the last line may lack its end


def line_blocks(chunks: Iterator[bytes]) -> Iterator[LineBlock]:
    """Lines of text, several megabytes at a time, without a byte-order mark and with plain line ends."""
    number, rest, is_first = 1, b"", True
    for chunk in _gathered(chunks):
        if b"\0" in chunk:
            raise ValueError("not a text file; give UTF-8 text, or say with --format what it is")
        content = rest + (chunk.removeprefix(b"\xef\xbb\xbf") if is_first else chunk)
        is_first = False
        stop = content.rfind(b"\n") + 1
        whole, rest = content[:stop], content[stop:]
        if whole:
            yield LineBlock(number, whole.replace(b"\r\n", b"\n"))
            number += whole.count(b"\n")
        if len(rest) > MAX_LINE_BYTES:
            raise ValueError(f"line {number} is longer than {MAX_LINE_BYTES} bytes; cut it, or check what the file is")
    if rest:
        yield LineBlock(number, rest.removesuffix(b"\r"))


def _gathered(chunks: Iterator[bytes]) -> Iterator[bytes]:
    held: list[bytes] = []
    for chunk in chunks:
        held.append(chunk)
        if sum(map(len, held)) >= BLOCK_BYTES:
            yield b"".join(held)
            held = []
    yield b"".join(held)


def _unpacked(file: _Counted, packing: str) -> Iterator[bytes]:
    try:
        yield from {"": _plain, "gz": _gunzipped, "zst": _unzstd}[packing](file)
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise ValueError(f"broken {packing} data ({error}); pack it again") from None
    except OSError as error:
        raise _not_readable(error) from None


def _plain(file: _Counted) -> Iterator[bytes]:
    while chunk := file.read():
        yield chunk


def _gunzipped(file: _Counted) -> Iterator[bytes]:
    reader = gzip.GzipFile(fileobj=cast(IO[bytes], file))
    while chunk := reader.read(CHUNK_BYTES):
        yield chunk


def _unzstd(file: _Counted) -> Iterator[bytes]:
    """Frame by frame, a little at a time: a kilobyte of input may become megabytes."""
    make, error_type = _zstd()
    frame, content = None, b""
    try:
        while content := content or file.read(PACKED_CHUNK_BYTES):
            frame = make() if frame is None else frame
            if chunk := frame.decompress(content):
                yield chunk
            content, frame = (frame.unused_data, None) if frame.eof else (b"", frame)
    except error_type as error:
        raise EOFError(error) from None
    if frame is not None:
        raise EOFError("it ends inside a frame")


def _zstd() -> tuple[Callable[[], Any], type[Exception]]:
    """What makes a decompressor of one frame, and what that raises."""
    if sys.version_info >= (3, 14):
        from compression import zstd

        return zstd.ZstdDecompressor, zstd.ZstdError
    try:
        import zstandard
    except ModuleNotFoundError:
        raise ValueError("zstd data needs zstandard, which is not installed; run: pip install 'distca[data]'"
                         ) from None
    return lambda: zstandard.ZstdDecompressor().decompressobj(), zstandard.ZstdError


@contextmanager
def _opened(path: str) -> Iterator[IO[bytes]]:
    if path == STDIN:
        if sys.stdin is None or not hasattr(sys.stdin, "buffer"):
            raise ValueError("stdin is closed; give a file")
        yield sys.stdin.buffer
        return
    _status(path)
    try:
        file = open(path, "rb")  # noqa: SIM115 - closed below
    except (OSError, ValueError) as error:
        raise _not_readable(error) from None
    with file:
        yield file


def _status(path: str) -> os.stat_result:
    try:
        return os.stat(path)
    except FileNotFoundError:
        raise ValueError("no such file; check the path") from None
    except (OSError, ValueError) as error:
        raise _not_readable(error) from None


def _not_readable(error: Exception) -> ValueError:
    return ValueError(f"cannot be read ({getattr(error, 'strerror', None) or error}); give a readable file")


def _too_long(max_bytes: int) -> ValueError:
    return ValueError(f"more than {max_bytes} bytes, the most that is read of such a file; give less of it")
