"""Columns of whole numbers: records that nobody can write to, counts spread over rows, positions found in documents.

Text too, where ranks exchange nothing but numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce
from operator import add
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from distca.validation import UserError, short

IntArray = npt.NDArray[np.int64]


def freeze(record: object, names: Sequence[str], dtype: npt.DTypeLike = np.int64, *, rows: bool = False) -> None:
    """Make the named fields of a frozen record read-only columns; call it from __post_init__.

    Refused are values that the dtype would change, and with `rows` columns that have not one entry each per row.
    """
    for name in names:
        column = _exact(f"{name} of {type(record).__name__}", getattr(record, name), np.dtype(dtype))
        column.setflags(write=False)
        object.__setattr__(record, name, column)
    shapes = [getattr(record, name).shape for name in names]
    if rows and not all(shape == shapes[0] and len(shape) == 1 for shape in shapes):
        raise UserError(f"the columns {', '.join(names)} of {type(record).__name__} have shapes "
                        f"{', '.join(map(str, shapes))}; give each one entry per row")


def _exact(what: str, given: Any, dtype: np.dtype[Any]) -> np.ndarray:
    if isinstance(given, np.ndarray) and given.dtype == dtype:
        return np.ascontiguousarray(given)
    try:
        with np.errstate(invalid="ignore"):
            column = np.ascontiguousarray(given, dtype=dtype)
        if np.array_equal(column, given, equal_nan=dtype.kind == "f"):
            return column
    except (TypeError, ValueError, OverflowError):
        pass
    kind = {"i": "whole numbers", "b": "true or false"}.get(dtype.kind, "numbers")
    raise UserError(f"{what} is {short(given)}; give {kind}")


def spread(counts: np.ndarray) -> tuple[IntArray, IntArray]:
    """For owners with that many parts each: every part's owner, and its number within the owner."""
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)


def added(values: Iterable[float]) -> float:
    """Their sum, rounded after every addition: Python's `sum` does so up to 3.11 alone, and plans compare bits."""
    return reduce(add, values, 0)


def from_text(text: str, most: int) -> IntArray:
    """Text as numbers, of which there are at most so many, for ranks that exchange nothing else."""
    raw = text.encode()[:8 * most]
    return np.frombuffer(raw + bytes(-len(raw) % 8), dtype=np.int64)


def to_text(column: Sequence[int] | np.ndarray) -> str:
    """The text of numbers that `from_text` made; what was cut off in the middle of a letter is gone."""
    return np.asarray(column, dtype=np.int64).tobytes().rstrip(b"\0").decode(errors="ignore")


class Positions(NamedTuple):
    """Intervals of documents in the order of (document, start), to look positions up in."""

    span: int         # more than any position
    key: np.ndarray   # [intervals] document and start as one number, ascending
    order: np.ndarray  # [intervals] as they were given

    @classmethod
    def of(cls, document: np.ndarray, start: np.ndarray, lengths: np.ndarray) -> Positions:
        span = int(lengths.max()) + 1
        key = document * span + start
        order = np.argsort(key, kind="stable")
        return cls(span, key[order], order)

    def first(self, document: np.ndarray, position: np.ndarray, side: Literal["left", "right"] = "left") -> np.ndarray:
        """Index into `order` of the first interval that begins at or after a position; after it with side="right"."""
        return np.searchsorted(self.key, document * self.span + position, side=side)

    def holding(self, document: np.ndarray, position: np.ndarray) -> np.ndarray:
        """The last interval, as given, that begins at or before a position; the first of all where none does."""
        return self.order[np.maximum(self.first(document, position, side="right") - 1, 0)]
