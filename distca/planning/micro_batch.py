"""A micro-batch: its documents, the nano-batches they are cut into, and which keys pong reads of ping's.

The documents of a micro-batch are numbered as the loader gave them; a nano-batch numbers its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from distca.validation import UserError, short
from distca.workload.documents import check_lengths
from distca.workload.layout import Layout
from distca.workload.packing import NanoBatch


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """The documents of one micro-batch and where their tokens live."""

    lengths: np.ndarray                    # [documents]
    nano_batches: tuple[NanoBatch, ...]    # one, or ping and pong, in the order in which they run

    @property
    def layouts(self) -> tuple[Layout, ...]:
        return tuple(nano.layout for nano in self.nano_batches)

    def key_runs(self, nano: int, rank: int) -> tuple[tuple[int, int], ...]:
        """Tokens [start, stop) of the rank's row in the nano-batch before whose keys are keys only in this one.

        In the order of this one's key row.
        """
        only = self.layouts[nano].key_only
        mine = np.flatnonzero(only.rank == rank)
        if len(mine) == 0:
            return ()
        before, here = self.nano_batches[nano - 1], self.nano_batches[nano]
        offset = before.layout.row_offset()
        found = []
        for at in mine.tolist():
            slice_before, = np.flatnonzero((before.layout.rank == rank) & (before.layout.start == only.start[at]) & (
                before.document[before.layout.document] == here.document[only.document[at]])).tolist()
            begin = int(offset[slice_before])
            found.append((begin, begin + int(only.stop[at] - only.start[at])))
        return tuple(found)

    def validate(self) -> None:
        """Prove that every token is a query once, and that keys of another nano-batch are where that one has them."""
        check_lengths(self.lengths)
        held: dict[tuple[int, int, int], int] = {}               # (document, start, stop) -> rank, as queries
        for number, nano in enumerate(self.nano_batches):
            layout = nano.layout
            layout.validate()
            outside = nano.document[(nano.document < 0) | (nano.document >= len(self.lengths))]
            if len(outside) or nano.document.shape != layout.lengths.shape:
                raise UserError(f"nano-batch {number} numbers its {layout.num_documents} documents "
                                f"{short(nano.document.tolist())}; give each its number, from 0 to "
                                f"{len(self.lengths) - 1}")
            if layout.num_ranks != self.layouts[0].num_ranks:
                raise UserError(f"nano-batch {number} has {layout.num_ranks} ranks but the first has "
                                f"{self.layouts[0].num_ranks}; lay all over the same ranks")
            only = layout.key_only
            for document, start, stop, rank in zip(nano.document[only.document].tolist(), only.start.tolist(),
                                                   only.stop.tolist(), only.rank.tolist(), strict=True):
                if held.get((document, start, stop)) != rank:
                    raise UserError(f"nano-batch {number} reads keys [{start}, {stop}) of document {document} on rank "
                                    f"{rank}, where no nano-batch before it has them; name the slices that one has")
            held.update(zip(zip(nano.document[layout.document].tolist(), layout.start.tolist(), layout.stop.tolist(),
                                strict=True), layout.rank.tolist(), strict=True))
        if not held:
            raise UserError("a micro-batch has no nano-batches; give one, or ping and pong")
        document, start, stop = np.array(sorted(held), dtype=np.int64).reshape(-1, 3).T
        whole = np.ones(len(held), dtype=bool)
        whole[1:] = document[1:] != document[:-1]                # a document's first slice
        expected = np.where(whole, 0, np.roll(stop, 1))
        bad = (start != expected) | (np.roll(whole, -1) & (stop != self.lengths[document]))
        count = sum(layout.num_slices for layout in self.layouts)
        if bad.any() or len(held) != count or len(np.unique(document)) != len(self.lengths):
            at = int(document[np.flatnonzero(bad)[0]]) if bad.any() else 0
            raise UserError(f"the nano-batches do not hold every token once: see document {at}; give each token to "
                            "one of them")
