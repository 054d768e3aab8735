"""Layouts: which slice of which document lives on which rank, in order.

Linear layers need equal tokens on every rank; attention needs the slices. A layout also gives each token's document,
its position there (for RoPE) and the home of the next token (for labels), so that a document may be cut anywhere
without changes to the model.

If two nano-batches share a document, queries of the second attend to keys of the first. The second layout then lists
these tokens as `key_only`. In a rank's key row, their keys and values follow those of the rank's own tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from distca.columns import freeze
from distca.validation import UserError, check_whole
from distca.workload.documents import check_lengths


@dataclass(frozen=True, slots=True)
class TokenColumns:
    """The tokens of one rank as columns, in the order of its row."""

    document: np.ndarray    # [tokens]
    position: np.ndarray    # [tokens] position inside the document
    next_rank: np.ndarray   # [tokens] home of the next token of the document, -1 at the document's end
    next_index: np.ndarray  # [tokens] offset of that token in its home's row, -1 at the document's end


@dataclass(frozen=True, slots=True)
class KeySlices:
    """Slices as columns, ordered by rank: the keys of tokens [start, stop) of `document` are on `rank`."""

    document: np.ndarray  # [slices]
    start: np.ndarray     # [slices]
    stop: np.ndarray      # [slices]
    rank: np.ndarray      # [slices] nondecreasing

    def __post_init__(self) -> None:
        freeze(self, self.__slots__, same_length=True)

    def __len__(self) -> int:
        return len(self.document)

    def tokens_per_rank(self, num_ranks: int) -> np.ndarray:
        return np.bincount(self.rank, weights=self.stop - self.start, minlength=num_ranks).astype(np.int64)

    def row_offset(self, num_ranks: int) -> np.ndarray:
        """Return the number of tokens before each slice on its rank."""
        length, tokens = self.stop - self.start, self.tokens_per_rank(num_ranks)
        return np.cumsum(length) - length - (np.cumsum(tokens) - tokens)[self.rank]

    def by_document(self) -> np.ndarray:
        """Return slice indices ordered by (document, start)."""
        return np.lexsort((self.start, self.document))


NO_KEYS = KeySlices(*(np.empty(0),) * 4)


@dataclass(frozen=True, slots=True)
class Layout:
    """Slices as columns, by rank and in row order: tokens [start, stop) of `document` are on `rank`."""

    lengths: np.ndarray   # [documents] tokens up to the last one in this layout
    document: np.ndarray  # [slices]
    start: np.ndarray     # [slices]
    stop: np.ndarray      # [slices]
    rank: np.ndarray      # [slices] nondecreasing
    num_ranks: int
    key_only: KeySlices = NO_KEYS  # tokens of the other nano-batch to which queries of this one attend

    def __post_init__(self) -> None:
        freeze(self, ("lengths",))
        freeze(self, ("document", "start", "stop", "rank"), same_length=True)

    @property
    def num_slices(self) -> int:
        return len(self.document)

    @property
    def num_documents(self) -> int:
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        """Tokens without the key-only ones."""
        return int((self.stop - self.start).sum())

    def _own(self) -> KeySlices:
        """Return the slices without the key-only ones."""
        return KeySlices(self.document, self.start, self.stop, self.rank)

    def tokens_per_rank(self) -> np.ndarray:
        return self._own().tokens_per_rank(self.num_ranks)

    def row_offset(self) -> np.ndarray:
        """Return the offset of each slice's first token in its rank's row."""
        return self._own().row_offset(self.num_ranks)

    def keys(self) -> KeySlices:
        """Return all slices to whose keys this layout's queries may attend: its own, then the key-only ones."""
        own = self._own()
        return own if len(self.key_only) == 0 else KeySlices(*(
            np.concatenate([getattr(own, name), getattr(self.key_only, name)]) for name in own.__slots__))

    def key_tokens_per_rank(self) -> np.ndarray:
        """Return the length of each rank's key row."""
        return self.tokens_per_rank() + self.key_only.tokens_per_rank(self.num_ranks)

    def key_row_offset(self) -> np.ndarray:
        """Return the offset of each slice of `keys` in its rank's key row: own tokens first, then key-only ones."""
        after_own = self.tokens_per_rank()[self.key_only.rank] + self.key_only.row_offset(self.num_ranks)
        return np.concatenate([self.row_offset(), after_own])

    def by_document(self) -> np.ndarray:
        """Return slice indices ordered by (document, start)."""
        return self._own().by_document()

    def ranks_per_document(self) -> np.ndarray:
        """Return the number of ranks that have a slice of each document."""
        pairs = np.unique(self.document * self.num_ranks + self.rank)
        return np.bincount(pairs // self.num_ranks, minlength=self.num_documents)

    def tokens(self, rank: int) -> TokenColumns:
        order = self.by_document()
        offset = self.row_offset()
        next_rank = np.full(self.num_slices, -1)                 # home of the token right after each slice
        next_index = np.full(self.num_slices, -1)
        same = self.document[order[1:]] == self.document[order[:-1]]
        next_rank[order[:-1][same]] = self.rank[order[1:][same]]
        next_index[order[:-1][same]] = offset[order[1:][same]]

        mine = np.flatnonzero(self.rank == rank)
        length = (self.stop - self.start)[mine]
        last = np.cumsum(length) - 1                             # [slices of rank] index of each slice's last token
        index = np.arange(length.sum())
        token_next_rank = np.full(len(index), rank)
        token_next_index = index + 1
        token_next_rank[last] = next_rank[mine]
        token_next_index[last] = next_index[mine]
        position = index - np.repeat(last + 1 - length - self.start[mine], length)
        return TokenColumns(np.repeat(self.document[mine], length), position, token_next_rank, token_next_index)

    def validate(self) -> None:
        """Check that every token of every document has exactly one home, key-only tokens included."""
        check_lengths(self.lengths)
        check_whole("num_ranks", self.num_ranks)
        if np.any(np.diff(self.rank) < 0) or np.any(np.diff(self.key_only.rank) < 0):
            raise UserError("layout slices must be grouped by rank in ascending order; sort them by rank")
        keys = self.keys()
        named = (("rank", keys.rank, self.num_ranks), ("document", keys.document, self.num_documents))
        for name, column, count in named:
            outside = column[(column < 0) | (column >= count)]
            if len(outside):
                raise UserError(f"layout names {name} {outside[0]} but has {count} of them; use 0 to {count - 1}")
        order = keys.by_document()
        document, start, stop = keys.document[order], keys.start[order], keys.stop[order]
        first = np.ones(len(order), dtype=bool)
        first[1:] = document[1:] != document[:-1]
        last = np.roll(first, -1)
        expected = np.where(first, 0, np.roll(stop, 1))
        bad = (start != expected) | (stop <= start) | (last & (stop != self.lengths[document]))
        if bad.any():
            i = int(np.flatnonzero(bad)[0])
            raise UserError(
                f"document {document[i]} of {self.lengths[document[i]]} tokens is not covered once: slice "
                f"[{start[i]}, {stop[i]}) should begin at {expected[i]}; give each of its tokens exactly one home")
        if len(np.unique(document)) != self.num_documents:
            missing = np.setdiff1d(np.arange(self.num_documents), document)[0]
            raise UserError(f"document {missing} has no home; add its slices to the layout")


def cut_stream(ends: np.ndarray, cuts: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Cut a stream of pieces, which end at `ends`, additionally at `cuts`; both ascend and reach the stream's end.

    Return the piece of every part, the index of the first cut behind its begin, its begin and its end.
    """
    edges = np.unique(np.concatenate([ends, cuts]))
    edges = edges[edges > 0]
    begins = edges - np.diff(edges, prepend=0)
    return np.searchsorted(ends, begins, side="right"), np.searchsorted(cuts, begins, side="right"), begins, edges


def layout_from_slices(
    lengths: np.ndarray, document: np.ndarray, start: np.ndarray, stop: np.ndarray, rank: np.ndarray, num_ranks: int
) -> Layout:
    """Build a layout from slices of ranks in any order; slices of one rank keep their order."""
    order = np.argsort(rank, kind="stable")
    return Layout(lengths, document[order], start[order], stop[order], rank[order], num_ranks)


def layout_from_rows(rows: Sequence[Sequence[int]]) -> Layout:
    """Build a layout from the document lengths of each rank; ranks may have different numbers of tokens."""
    counts = np.array([len(row) for row in rows], dtype=np.int64)
    if counts.sum() == 0:
        raise UserError(f"rows holds {len(rows)} ranks and no document; give at least one document length")
    lengths = check_lengths([length for row in rows for length in row], field="rows")
    rank = np.repeat(np.arange(len(rows)), counts)
    return Layout(lengths, np.arange(len(lengths)), np.zeros_like(lengths), lengths, rank, len(rows))
