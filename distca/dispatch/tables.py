"""One rank's part of a plan, as index tables.

A rank is a home and a server at once. As a home it owns a row of tokens and knows which runs of it go to whom. As a
server it holds a buffer of queries and a buffer of keys, knows which runs of them come from whom, and which tasks to
compute in them. Every key of a document stands once in the server's buffer, however many tasks read it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from distca.columns import freeze


@dataclass(frozen=True, slots=True)
class Runs:
    """Runs of tokens that travel between a home's row and a server's buffer, in wire order: by peer, then document."""

    peer: np.ndarray    # [runs] the other rank
    start: np.ndarray   # [runs] first token in this side's row or buffer
    length: np.ndarray  # [runs]

    def __post_init__(self) -> None:
        freeze(self, self.__slots__)

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
        freeze(self, self.__slots__)


@dataclass(frozen=True, slots=True)
class Side:
    """Queries, or keys, of one rank: what leaves the row, what enters the buffer, what stays."""

    send: Runs          # runs of the row, to servers
    receive: Runs       # runs of the buffer, from homes
    local: LocalRuns
    buffer_tokens: int  # size of the server's buffer
    parts: np.ndarray   # [row tokens] servers that use each token; where more than one does, results are combined
    is_row: bool = field(init=False)  # the buffer is the row itself: nothing comes from elsewhere, none is left out
    leaves_some: bool = field(init=False)  # tokens of the row that no server uses, such as keys outside all windows

    def __post_init__(self) -> None:
        freeze(self, ("parts",))
        local = self.local.length
        object.__setattr__(self, "is_row", (
            len(self.receive.peer) == 0 and len(local) <= 1 and self.buffer_tokens == len(self.parts)
            and int(local.sum()) == self.buffer_tokens))
        object.__setattr__(self, "leaves_some", bool((self.parts == 0).any()))

    @property
    def is_untouched(self) -> bool:
        """Every token is served at home, once and in the row's order: the server's results are the row's."""
        return self.is_row and len(self.send.peer) == 0


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
        freeze(self, ("q_begin", "q_end", "k_begin", "k_end", "q_offset"))
