"""Exchange every rank's slices ahead of a forward, and join the slices of all ranks into documents.

Each rank sends its slices and the shapes of its tensors in one small all-gather. A rank with an invalid batch sends its
error message instead, and every rank raises it, so that no rank waits for one that stopped.

Slices are ordered by rank, and on a rank by their tokens. A slice at position 0 begins a document; any other slice
continues the document of the previous slice, which may be on an earlier rank. If a loader uses another order, it
numbers the documents, and positions order a document's parts. All ranks check the same table, so all raise the same
error before any of them computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch
import torch.distributed as dist

from distca.columns import from_text, to_text
from distca.integrations.document_lengths import RowSlices
from distca.runtime.prepared import Shapes
from distca.runtime.transport import TransportError
from distca.runtime.transport.c10d import first_line
from distca.validation import UserError
from distca.workload.documents import check_lengths
from distca.workload.layout import Layout

FIRST_CAPACITY = 255                                             # slices per rank in the first all-gather
Rows = tuple[RowSlices, ...]                                     # [ranks]
_NOT_NUMBERED = -2 ** 63                                         # no loader uses this number
_NUMBERED = "document_ids that number the documents of all ranks"
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_HEADER = 5                                                      # slices (or -bytes of an error), heads … dtype


class RowTable:
    """All-gather of slices over a group. All ranks raise the capacity together if any rank has more slices."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group, self._capacity = group, FIRST_CAPACITY
        self._ranks = dist.get_world_size(group)

    def exchange(self, mine: RowSlices | ValueError, device: torch.device, shapes: Shapes | None) -> Rows:
        """Return every rank's slices in rank order, after one all-gather, or two if the capacity grows."""
        while True:
            table = self._gather(mine, device, shapes)
            _check(table, mine)
            most = max(entry[0] for entry in table)
            if most <= self._capacity:
                return tuple(_slices(entry) for entry in table)
            self._capacity = 2 ** most.bit_length() - 1

    def _gather(self, mine: RowSlices | ValueError, device: torch.device, shapes: Shapes | None) -> list[list[int]]:
        """Return an entry per rank: header, then start, length and document of each slice that fits, or an error."""
        entry = np.zeros(_HEADER + 3 * self._capacity, dtype=np.int64)
        if isinstance(mine, ValueError):
            text = from_text(str(mine) or repr(mine), 3 * self._capacity)
            entry[0], entry[_HEADER:_HEADER + len(text)] = -8 * len(text), text
        else:
            count = min(len(mine.start), self._capacity)
            entry[0] = len(mine.start)
            fit = entry[_HEADER:_HEADER + 3 * count].reshape(-1, 3)
            fit[:, 0], fit[:, 1] = mine.start[:count], mine.length[:count]
            fit[:, 2] = _NOT_NUMBERED if mine.document is None else mine.document[:count]
        if shapes is not None:
            dtype = _DTYPES.index(shapes.dtype) if shapes.dtype in _DTYPES else len(_DTYPES)
            entry[1:_HEADER] = *shapes[:3], dtype
        entries = torch.empty(self._ranks, len(entry), dtype=torch.int64, device=device)
        try:
            dist.all_gather(list(entries), torch.from_numpy(entry).to(device), group=self.group)
        except RuntimeError as error:
            raise TransportError(
                f"rank {dist.get_rank(self.group)} of {self._ranks}: the ranks did not exchange their lengths, because "
                "one died, hung past the group's timeout or began another number of batches; restart from the last "
                f"checkpoint ({first_line(error)})") from error
        return entries.tolist()


def _check(table: Sequence[Sequence[int]], mine: RowSlices | ValueError) -> None:
    """Raise a rank's error, or an error if ranks have tensors of different shapes; the same on every rank."""
    for rank, entry in enumerate(table):
        if entry[0] < 0:
            text = to_text(entry[_HEADER:_HEADER - entry[0] // 8])
            raise UserError(f"rank {rank}: {text}") from (mine if isinstance(mine, ValueError) else None)
    kinds = {tuple(entry[1:_HEADER]): rank for rank, entry in reversed([*enumerate(table)]) if entry[1]}
    if len(kinds) > 1:
        (one, first), (other, second) = sorted(kinds.items(), key=lambda kind: kind[1])[:2]
        raise UserError(f"rank {first} has {_words(one)} and rank {second} {_words(other)}; run the same model in the "
                        "same dtype on every rank")


def _words(kind: Sequence[int]) -> str:
    heads, kv_heads, dim, dtype = kind
    name = str(_DTYPES[dtype]) if dtype < len(_DTYPES) else "another dtype"
    return f"{heads} query heads and {kv_heads} key heads of {dim} in {name}"


def _slices(entry: Sequence[int]) -> RowSlices:
    triples = entry[_HEADER:_HEADER + 3 * entry[0]]
    start, length, document = (tuple(triples[at::3]) for at in range(3))
    return RowSlices(start, length, None if all(number == _NOT_NUMBERED for number in document) else document)


def join_slices(rows: Sequence[RowSlices]) -> Layout:
    """Return the layout of every rank's slices, in rank order; refuse slices that do not form whole documents."""
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
    """Return whether any document is on several ranks."""
    return bool((layout.ranks_per_document() > 1).any())


def _in_order(rank: np.ndarray, start: np.ndarray, length: np.ndarray) -> np.ndarray:
    """Return [slices] documents: a slice continues the previous slice's document unless it begins at position 0."""
    continues = start > 0
    expected = np.concatenate([[0], (start + length)[:-1]])
    wrong = np.flatnonzero(continues & (start != expected))
    if len(wrong):
        raise UserError(_not_continued(rank, start, length, int(wrong[0])))
    return np.cumsum(~continues) - 1


def _not_continued(rank: np.ndarray, start: np.ndarray, length: np.ndarray, i: int) -> str:
    """Return the error message for slice i, which begins past position 0 but not where the previous slice ended."""
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
    """Return [slices] documents of numbered slices, in the order of the documents' first slices."""
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
