"""Which slices of which ranks are one document, from nothing but the positions of their tokens.

Slices stand in the order of ranks, and on a rank in the order of its rows. One that begins at position 0 begins a
document; one that begins later continues the document that the slice before it ended with, on the same rank or on
the nearest one before it that has tokens. Loaders that put slices elsewhere number the documents instead, and then
positions alone order their parts. Every rank judges the same table, so what is wrong is said by all of them, in the
same words, before anybody computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np

from distca.integrations.document_lengths import RowSlices
from distca.validation import UserError
from distca.workload.documents import check_lengths
from distca.workload.layout import Layout

_NUMBERED = "document_ids that number the documents of all ranks"


def join_slices(rows: Sequence[RowSlices]) -> Layout:
    """The layout of every rank's slices, in rank order; raises in one line where they do not make whole documents."""
    start, length = (np.array(list(chain.from_iterable(column)), dtype=np.int64) for column in
                     ((row.start for row in rows), (row.length for row in rows)))
    if len(start) == 0:
        raise UserError(f"none of {len(rows)} ranks has a token; give at least one document")
    check_lengths(length, field="rows")
    rank = np.repeat(np.arange(len(rows)), [len(row.start) for row in rows])
    if (start < 0).any():
        i = int(np.flatnonzero(start < 0)[0])
        raise UserError(f"rank {rank[i]} has a token at position {start[i]}; give position_ids from 0")
    given = {row.document is not None for row in rows if row.start}
    if given == {True, False}:
        named, bare = (next(at for at, row in enumerate(rows) if row.start and (row.document is None) == missing)
                       for missing in (False, True))
        raise UserError(f"rank {named} gives document_ids and rank {bare} none; give them on every rank or on none")
    document = _numbered(rows, rank, start, length) if given == {True} else _in_order(rank, start, length)
    lengths = np.zeros(int(document.max()) + 1, dtype=np.int64)
    np.maximum.at(lengths, document, start + length)
    return Layout(lengths, document, start, start + length, rank, len(rows))


def spans(layout: Layout) -> bool:
    """Whether a document lies on several ranks, none of which can go on alone."""
    return bool((layout.ranks_per_document() > 1).any())


def _in_order(rank: np.ndarray, start: np.ndarray, length: np.ndarray) -> np.ndarray:
    """[slices] Their documents, where each slice past position 0 continues the one before it."""
    continues = start > 0
    expected = np.concatenate([[0], (start + length)[:-1]])
    wrong = np.flatnonzero(continues & (start != expected))
    if len(wrong):
        raise UserError(_not_continued(rank, start, length, int(wrong[0])))
    return np.cumsum(~continues) - 1


def _not_continued(rank: np.ndarray, start: np.ndarray, length: np.ndarray, i: int) -> str:
    """What is wrong with slice i, which begins past position 0 and not where the slice before it ended."""
    at, here = int(start[i]), int(rank[i])
    if i == 0:
        return (f"rank {here} begins at position {at} and no rank before it has tokens, so it continues nothing; begin "
                f"position_ids with 0, or give the {at} tokens before to ranks before it")
    last = int(start[i - 1] + length[i - 1] - 1)
    if rank[i - 1] == here:
        return (f"rank {here} has position {at} behind position {last}; position_ids rise by one inside a document and "
                f"begin the next with 0; where rows hold parts of several documents, give {_NUMBERED}")
    return (f"rank {here} begins at position {at} but rank {rank[i - 1]}, before it, ended at position {last}; begin "
            f"at position {last + 1} to continue its document or at 0 for a new one, or give {_NUMBERED}")


def _numbered(rows: Sequence[RowSlices], rank: np.ndarray, start: np.ndarray, length: np.ndarray) -> np.ndarray:
    """[slices] Their documents by number, in the order of their first slices."""
    number = np.array(list(chain.from_iterable(row.document or () for row in rows)), dtype=np.int64)
    order = np.lexsort((start, number))
    first = np.ones(len(order), dtype=bool)
    first[1:] = number[order][1:] != number[order][:-1]
    expected = np.where(first, 0, np.roll((start + length)[order], 1))
    wrong = np.flatnonzero(start[order] != expected)
    if len(wrong):
        i, due = int(order[wrong[0]]), int(expected[wrong[0]])
        what = "again" if start[i] < due else f"and no rank has its position {due}"
        raise UserError(f"rank {rank[i]} begins document {number[i]} at position {start[i]} {what}; give each "
                        "position of a document to one rank, and each document of all ranks a number of its own")
    _, seen, document = np.unique(number, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(seen, kind="stable"))[document]
