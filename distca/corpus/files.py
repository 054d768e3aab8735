"""Bytes of a file or of stdin, unpacked, a chunk at a time, and lines of them in blocks of megabytes.

A few kilobytes of gzip can claim to be terabytes. So what is unpacked is counted: past a generous start it may not be
more than MAX_RATIO times what was read for it.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any, BinaryIO, cast

from distca.corpus.tables import opened
from distca.validation import UserError

STDIN = "-"
MAX_STREAM_BYTES = 2**36     # of all lines of a file, unpacked
MAX_LINE_BYTES = 2**26
FREE_BYTES = 2**26           # unpacked before its ratio to what was read counts
MAX_RATIO = 200
CHUNK_BYTES = 2**20
BLOCK_BYTES = 2**23


@dataclass(frozen=True, slots=True)
class LineBlock:
    """Whole lines that follow each other."""

    first: int      # number of the first line, from 1
    content: bytes  # the last line may lack its end


class _Counted(io.RawIOBase):
    """A file, opened when it is first read, that counts what was read of it."""

    def __init__(self, path: str) -> None:
        self._path, self.num_bytes = path, 0
        self._file: IO[bytes] | io.FileIO | None = None
        if path == STDIN:
            if sys.stdin is None:
                raise UserError("is closed; give a file")
            self._file = sys.stdin.buffer

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if self._file is None:
            self._file = open(self._path, "rb", buffering=0)  # noqa: SIM115 - see close
        content = self._file.read(len(buffer)) or b""
        self.num_bytes += len(content)
        buffer[:len(content)] = content
        return len(content)

    def close(self) -> None:
        if self._file is not None and self._path != STDIN:
            self._file.close()
        super().close()


def label(path: str) -> str:
    """A source as errors call it."""
    return "stdin" if path == STDIN else path


def chunks(path: str, max_bytes: int = MAX_STREAM_BYTES) -> Iterator[bytes]:
    """The bytes, unpacked; whatever keeps them from being read becomes a one-line ValueError."""
    if path != STDIN and os.path.isfile(path) and os.path.getsize(path) > max_bytes:
        raise _too_long(max_bytes)
    file, total = _Counted(path), 0
    try:
        with opened(cast(BinaryIO, file), name=label(path)) as stream:
            while chunk := stream.read(CHUNK_BYTES):
                total += len(chunk)
                if total > max_bytes:
                    raise _too_long(max_bytes)
                if total > max(FREE_BYTES, MAX_RATIO * file.num_bytes):
                    raise UserError(f"unpacks to more than {MAX_RATIO} times its size; unpack it yourself if that is "
                                    "what it should be, and give the plain file")
                yield chunk
    finally:
        file.close()


def line_blocks(parts: Iterator[bytes]) -> Iterator[LineBlock]:
    """Lines of text, several megabytes at a time, without a byte-order mark and with plain line ends."""
    number, rest, is_first = 1, b"", True
    for part in _gathered(parts):
        if b"\0" in part:
            raise UserError("not a text file; give UTF-8 text, or say with --format what it is")
        content = rest + (part.removeprefix(b"\xef\xbb\xbf") if is_first else part)
        is_first = False
        stop = content.rfind(b"\n") + 1
        whole, rest = content[:stop], content[stop:]
        if whole:
            yield LineBlock(number, whole.replace(b"\r\n", b"\n"))
            number += whole.count(b"\n")
        if len(rest) > MAX_LINE_BYTES:
            raise UserError(f"line {number} is longer than {MAX_LINE_BYTES} bytes; cut it, or check what the file is")
    if rest:
        yield LineBlock(number, rest.removesuffix(b"\r"))


def _gathered(parts: Iterator[bytes]) -> Iterator[bytes]:
    held, total = [], 0
    for part in parts:
        held.append(part)
        total += len(part)
        if total >= BLOCK_BYTES:
            yield b"".join(held)
            held, total = [], 0
    yield b"".join(held)


def _too_long(max_bytes: int) -> ValueError:
    return UserError(f"more than {max_bytes} bytes, the most that is read of such a file; give less of it")
