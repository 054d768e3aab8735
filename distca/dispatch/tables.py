"""One rank's part of a plan, as index tables.

A rank is a home and a server at once. As a home it owns a row of tokens and knows which runs of it go to whom. As a
server it holds a buffer of queries and a buffer of keys, knows which runs of them come from whom, and which task rows
to compute in them. Every key of a document stands once in the server's buffer, however many tasks read it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np


@dataclass(frozen=True, slots=True)
class Runs:
    """Runs of tokens that travel between a home's row and a server's buffer, in wire order: by peer, then document."""

    peer: np.ndarray    # [runs] the other rank
    start: np.ndarray   # [runs] first token in this side's row or buffer
    length: np.ndarray  # [runs]

    def __post_init__(self) -> None:
        _freeze(self)

    def tokens_per_peer(self, num_ranks: int) -> np.ndarray:
        return np.bincount(self.peer, weights=self.length, minlength=num_ranks).astype(np.int64)

    @property
    def num_tokens(self) -> int:
        return int(self.length.sum())


@dataclass(frozen=True, slots=True)
class LocalRuns:
    """Runs of tokens that are served at home: copied from the row into the server's buffer, never sent."""

    row: np.ndarray     # [runs]
    buffer: np.ndarray  # [runs]
    length: np.ndarray  # [runs]

    def __post_init__(self) -> None:
        _freeze(self)


@dataclass(frozen=True, slots=True)
class Side:
    """Queries, or keys, of one rank: what leaves the row, what enters the buffer, what stays."""

    send: Runs          # runs of the row, to servers
    receive: Runs       # runs of the buffer, from homes
    local: LocalRuns
    buffer_tokens: int  # size of the server's buffer
    parts: np.ndarray   # [row tokens] servers that use each token; where more than one does, results are combined

    def __post_init__(self) -> None:
        _freeze(self)

    @property
    def is_row(self) -> bool:
        """The server's buffer is the row itself: nothing comes from elsewhere and nothing is left out or reordered."""
        return (len(self.receive.peer) == 0 and len(self.local.row) <= 1 and self.buffer_tokens == len(self.parts)
                and int(self.local.length.sum()) == self.buffer_tokens)


@dataclass(frozen=True, slots=True)
class RankTables:
    """Everything one rank needs to take part in one attention call."""

    rank: int
    num_ranks: int
    row_tokens: int      # tokens at home here
    key_row_tokens: int  # these, and behind them tokens of another nano-batch that are keys here
    queries: Side
    keys: Side
    q_begin: np.ndarray  # [tasks] in the query buffer
    q_end: np.ndarray    # [tasks]
    k_begin: np.ndarray  # [tasks] in the key buffer
    k_end: np.ndarray    # [tasks]
    q_offset: np.ndarray  # [tasks] position of the first query minus position of the first key

    def __post_init__(self) -> None:
        _freeze(self)

    def reversed(self) -> RankTables:
        """The way back: what was received is sent, to where it came from."""
        return replace(self, queries=_swapped(self.queries), keys=_swapped(self.keys))


def _swapped(side: Side) -> Side:
    return replace(side, send=side.receive, receive=side.send)


def _freeze(table: object) -> None:
    for field in fields(table):  # type: ignore[arg-type]
        value = getattr(table, field.name)
        if isinstance(value, np.ndarray):
            column = np.ascontiguousarray(value, dtype=np.int64)
            column.setflags(write=False)
            object.__setattr__(table, field.name, column)
