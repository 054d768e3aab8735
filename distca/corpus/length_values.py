"""What a record or a column says about lengths: whole numbers, lists of tokens, or texts that a tokenizer counts.

Which column is meant is decided here for every format alike: the one that was asked for, else `text` where there is a
tokenizer, else `length`, else `input_ids`, else the only one there is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from distca.corpus.tokenizers import TokenCounter
from distca.validation import UserError, is_count, parse_count, plain, short
from distca.workload.documents import MAX_LENGTH, IntArray, bad_length

LENGTH, TOKENS, TEXT = "length", "input_ids", "text"
NO_TOKENIZER = "is text; give --tokenizer with its tokenizer.json, or a column of lengths"
MAX_NAMES_SHOWN = 20
TEXTS_PER_CALL = 512    # the tokenizer spreads the texts of one call over threads
MAX_CALL_CHARS = 2**24  # and holds all of their tokens, tens of bytes each

_PLAIN_LINES = b"0123456789\n"
_COMMENT = re.compile(rb"#[^\n]*")
_MAX_DIGITS = 18

Where = Callable[[int], str]  # index of a value -> where it stands, for people


@dataclass(frozen=True, slots=True)
class Wanted:
    """The column that was asked for, and what counts the tokens of texts."""

    column: str | None = None
    counter: TokenCounter | None = None

    def choose(self, names: Sequence[str]) -> str:
        """The column to read of those there are; refusals list them."""
        if self.column is not None:
            if self.column not in names:
                raise UserError(f"column is {short(self.column)}; the columns are: {named(names)}")
            return self.column
        usual = [TEXT] if self.counter is not None else [LENGTH, TOKENS]
        for name in (*usual, *(names if len(names) == 1 else ())):
            if name in names:
                return name
        asked = f"no column is called {TEXT!r}" if self.counter is not None else f"no column is called {LENGTH!r}"
        hint = f", or --tokenizer to count {TEXT!r}" if TEXT in names and self.counter is None else ""
        raise UserError(f"{asked}; give --column with one of: {named(names)}{hint}")


def named(names: Sequence[str]) -> str:
    """Names of columns as an error lists them."""
    shown = ", ".join(short(name) if not name.isprintable() else name for name in names[:MAX_NAMES_SHOWN])
    return plain(shown) + (f" and {len(names) - MAX_NAMES_SHOWN} more" if len(names) > MAX_NAMES_SHOWN else "")


def lengths_of_values(values: list[Any], wanted: Wanted, where: Where) -> IntArray:
    """Lengths of what records held: whole numbers, lists of tokens, or texts. Empty texts and lists are left out."""
    if values and all(type(value) is int for value in values):
        return _in_range(values, where)
    found: list[int] = []
    texts: list[str] = []
    at: list[int] = []                      # where each text's count belongs in `found`
    for index, value in enumerate(values):
        if isinstance(value, str):
            if wanted.counter is None:
                raise UserError(f"{where(index)} {NO_TOKENIZER}")
            if not _is_unicode(value):
                raise UserError(f"{where(index)} has half a surrogate pair; repair or drop it")
            if value:
                texts.append(value)
                at.append(len(found))
                found.append(0)
        elif isinstance(value, list):
            if value:
                found.append(len(value))
        elif type(value) is int and 1 <= value <= MAX_LENGTH:
            found.append(value)
        else:
            raise bad_length(where(index), value)
    for index, count in zip(at, counted(texts, wanted.counter), strict=True):
        found[index] = count
    return np.array([length for length in found if length], dtype=np.int64)


def counted(texts: Sequence[str], counter: TokenCounter | None) -> list[int]:
    """Tokens of each text."""
    counts: list[int] = []
    first, size = 0, 0
    for stop, text in enumerate(texts, 1):
        size += len(text)
        if stop == len(texts) or stop - first == TEXTS_PER_CALL or size > MAX_CALL_CHARS:
            assert counter is not None
            counts += counter(texts[first:stop])
            first, size = stop, 0
    return counts


def lengths_of_lines(content: bytes, where: Where) -> IntArray:
    """One number a line; blank lines and what follows # are left out. Whole blocks of plain numbers go quickly."""
    if content.translate(None, _PLAIN_LINES):
        content = b"\n".join(line.strip() for line in _COMMENT.sub(b"", content).split(b"\n"))
    if not content.translate(None, _PLAIN_LINES) and _longest_line(content) <= _MAX_DIGITS:
        values = np.fromstring(content, dtype=np.int64, sep="\n") if content.strip() else np.zeros(0, dtype=np.int64)
        if not ((values < 1) | (values > MAX_LENGTH)).any():
            return values
    try:
        lines = content.decode("utf-8").split("\n")
    except UnicodeDecodeError:
        raise UserError("not a text file; give UTF-8 text, or say with --format what it is") from None
    return np.array([length_of_text(line, where(index)) for index, line in enumerate(lines) if line], dtype=np.int64)


def length_of_text(text: str, where: str) -> int:
    """A length as somebody wrote it."""
    if not is_count(text):
        raise bad_length(where, text)
    try:
        length = parse_count(where, text)
    except ValueError:
        raise bad_length(where, text) from None
    if not 1 <= length <= MAX_LENGTH:
        raise bad_length(where, length)
    return length


def _in_range(values: list[int], where: Where) -> IntArray:
    try:
        lengths = np.array(values, dtype=np.int64)
        bad = (lengths < 1) | (lengths > MAX_LENGTH)
        index = int(bad.argmax()) if bad.any() else None
    except OverflowError:
        index = next(i for i, value in enumerate(values) if not 1 <= value <= MAX_LENGTH)
    if index is not None:
        raise bad_length(where(index), values[index])
    return lengths


def _is_unicode(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _longest_line(content: bytes) -> int:
    ends = np.flatnonzero(np.frombuffer(content, dtype=np.uint8) == ord("\n"))
    return int(np.diff(ends, prepend=-1, append=len(content)).max()) - 1
