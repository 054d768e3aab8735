"""What ranks tell each other ahead of a forward: their slices, the kind of their tensors, or why they cannot go on.

One row of numbers per rank, in one small collective. A rank that finds something wrong with its own batch takes part
all the same and says what: every rank then raises that line, instead of waiting for one that is gone.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist

from distca.columns import from_text, to_text
from distca.integrations.document_lengths import RowSlices
from distca.runtime.call import Shapes
from distca.runtime.transport import TransportError
from distca.runtime.transport.c10d import first_line
from distca.validation import UserError

FIRST_CAPACITY = 255                                             # slices of a rank that fit the first collective
Rows = tuple[RowSlices, ...]                                     # [ranks]
_NOT_NUMBERED = -2 ** 63                                         # no loader's number of a document
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_HEADER = 5                                                      # slices, or bytes of a refusal below 0; the kind


class RowTable:
    """Rows of one group. It grows where a rank has more slices than ever before, on all ranks at once."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group, self._capacity = group, FIRST_CAPACITY
        self._ranks = dist.get_world_size(group)

    def exchange(self, mine: RowSlices | ValueError, device: torch.device, shapes: Shapes | None) -> Rows:
        """Every rank's slices in rank order: one collective, and one more where the table grows."""
        while True:
            table = self._gather(mine, device, shapes)
            _check(table, mine)
            most = max(row[0] for row in table)
            if most <= self._capacity:
                return tuple(_slices(row) for row in table)
            self._capacity = 2 ** most.bit_length() - 1

    def _gather(
        self, mine: RowSlices | ValueError, device: torch.device, shapes: Shapes | None
    ) -> list[list[int]]:
        """A row per rank: the header, then as many starts, lengths and documents of its slices as fit, or text."""
        row = np.zeros(_HEADER + 3 * self._capacity, dtype=np.int64)
        if isinstance(mine, ValueError):
            text = from_text(str(mine) or repr(mine), 3 * self._capacity)
            row[0], row[_HEADER:_HEADER + len(text)] = -8 * len(text), text
        else:
            count = min(len(mine.start), self._capacity)
            row[0] = len(mine.start)
            fit = row[_HEADER:_HEADER + 3 * count].reshape(-1, 3)
            fit[:, 0], fit[:, 1] = mine.start[:count], mine.length[:count]
            fit[:, 2] = _NOT_NUMBERED if mine.document is None else mine.document[:count]
        if shapes is not None:
            row[1:_HEADER] = (*shapes[:3], _DTYPES.index(shapes.dtype) if shapes.dtype in _DTYPES else len(_DTYPES))
        everyone = torch.empty(self._ranks, len(row), dtype=torch.int64, device=device)
        try:
            dist.all_gather(list(everyone), torch.from_numpy(row).to(device), group=self.group)
        except RuntimeError as error:
            raise TransportError(
                f"rank {dist.get_rank(self.group)} of {self._ranks}: the ranks did not exchange their lengths, because "
                "one died, hung past the group's timeout or began another number of batches; restart from the last "
                f"checkpoint ({first_line(error)})") from error
        return everyone.tolist()


def _check(table: Sequence[Sequence[int]], mine: RowSlices | ValueError) -> None:
    """Raise what a rank refused, or that ranks have tensors of different kinds; the same line on every rank."""
    for rank, row in enumerate(table):
        if row[0] < 0:
            text = to_text(row[_HEADER:_HEADER - row[0] // 8])
            raise UserError(f"rank {rank}: {text}") from (mine if isinstance(mine, ValueError) else None)
    kinds = {tuple(row[1:_HEADER]): rank for rank, row in reversed(list(enumerate(table))) if row[1]}
    if len(kinds) > 1:
        (one, first), (other, second) = sorted(kinds.items(), key=lambda kind: kind[1])[:2]
        raise UserError(f"rank {first} has {_words(one)} and rank {second} {_words(other)}; run the same model in the "
                        "same dtype on every rank")


def _words(kind: Sequence[int]) -> str:
    heads, kv_heads, dim, dtype = kind
    name = str(_DTYPES[dtype]) if dtype < len(_DTYPES) else "another dtype"
    return f"{heads} query heads and {kv_heads} key heads of {dim} in {name}"


def _slices(row: Sequence[int]) -> RowSlices:
    sent = row[_HEADER:_HEADER + 3 * row[0]]
    start, length, document = (tuple(sent[at::3]) for at in range(3))
    return RowSlices(start, length, None if all(number == _NOT_NUMBERED for number in document) else document)
