"""Helpers for columns of numbers: freeze records, expand counts, look up positions in documents, encode text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce
from operator import add
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from distca.validation import UserError, short

IntArray = npt.NDArray[np.int64]


def freeze(record: object, names: Sequence[str], dtype: npt.DTypeLike = np.int64, *, same_length: bool = False) -> None:
    """Make the named fields of a frozen record read-only columns; call it from __post_init__.

    Refuse values that the dtype cannot represent and, with `same_length`, columns of different lengths.
    """
    for name in names:
        column = _exact(f"{name} of {type(record).__name__}", getattr(record, name), np.dtype(dtype))
        column.setflags(write=False)
        object.__setattr__(record, name, column)
    shapes = [getattr(record, name).shape for name in names]
    if same_length and not all(shape == shapes[0] and len(shape) == 1 for shape in shapes):
        raise UserError(f"the columns {', '.join(names)} of {type(record).__name__} have shapes "
                        f"{', '.join(map(str, shapes))}; give each the same number of entries")


def _exact(what: str, given: Any, dtype: np.dtype[Any]) -> np.ndarray:
    """Return values as a contiguous array of the dtype; refuse a conversion that changes a value."""
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
    """Return the owner of every part and the part's index within its owner, given the number of parts per owner."""
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)


def added(values: Iterable[float]) -> float:
    """Return the sum, rounded after every addition: plans need these exact bits, and `sum` differs since 3.12."""
    return reduce(add, values, 0)


def from_text(text: str, most: int) -> IntArray:
    """Encode text as at most `most` numbers, for exchanges that carry only numbers."""
    raw = text.encode()[:8 * most]
    return np.frombuffer(raw + bytes(-len(raw) % 8), dtype=np.int64)


def to_text(column: Sequence[int] | np.ndarray) -> str:
    """Decode the text that `from_text` encoded; drop an incomplete last character."""
    return np.asarray(column, dtype=np.int64).tobytes().rstrip(b"\0").decode(errors="ignore")


class Positions(NamedTuple):
    """Intervals of documents, sorted by (document, start), in which positions are looked up."""

    span: int          # greater than every position
    key: np.ndarray    # [intervals] document * span + start, ascending
    order: np.ndarray  # [intervals] index of each in the arguments of `of`

    @classmethod
    def of(cls, document: np.ndarray, start: np.ndarray, lengths: np.ndarray) -> Positions:
        span = int(lengths.max()) + 1
        key = document * span + start
        order = np.argsort(key, kind="stable")
        return cls(span, key[order], order)

    def first(self, document: np.ndarray, position: np.ndarray, side: Literal["left", "right"] = "left") -> np.ndarray:
        """Return the index in `order` of the first interval that begins at a position or later (right: later)."""
        return np.searchsorted(self.key, document * self.span + position, side=side)

    def holding(self, document: np.ndarray, position: np.ndarray) -> np.ndarray:
        """Return the index, in the arguments of `of`, of the last interval that begins at or before a position.

        If no interval does, return the index of the first one.
        """
        return self.order[np.maximum(self.first(document, position, side="right") - 1, 0)]
