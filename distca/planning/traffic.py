"""What a set of tasks makes travel.

A server needs each key of a document once, however many of its tasks read it, and not at all over the wire when the
key is at home there. Queries travel to their server and outputs travel back. The same rows later become dispatch
tables, so the bytes that planning counts are the bytes that the runtime sends.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from distca.planning.tasks import TaskTable
from distca.spec import ModelShape
from distca.workload.layout import Layout


@dataclass(frozen=True, slots=True)
class KeyRanges:
    """One row per run of keys [start, stop) of a document that `server` needs, from the one rank that owns them."""

    document: np.ndarray  # [ranges]
    start: np.ndarray     # [ranges]
    stop: np.ndarray      # [ranges]
    home: np.ndarray      # [ranges] rank that owns these keys
    server: np.ndarray    # [ranges] rank that reads them


@dataclass(frozen=True, slots=True)
class Traffic:
    """Tokens that cross ranks in one forward pass of one layer, as (source, destination) pairs with counts."""

    q_home: np.ndarray     # [moved tasks] queries go home -> server, outputs come back
    q_server: np.ndarray   # [moved tasks]
    q_tokens: np.ndarray   # [moved tasks]
    kv_home: np.ndarray    # [moved ranges] keys and values go home -> server
    kv_server: np.ndarray  # [moved ranges]
    kv_tokens: np.ndarray  # [moved ranges]
    num_ranks: int

    def sent_bytes(self, model: ModelShape, tp: int = 1) -> np.ndarray:
        """Forward bytes each rank sends: Q and KV as a home, O as a server."""
        return (self._sum(self.q_home, self.q_tokens) * model.q_token_bytes(tp)
                + self._sum(self.kv_home, self.kv_tokens) * model.kv_token_bytes(tp)
                + self._sum(self.q_server, self.q_tokens) * model.out_token_bytes(tp))

    def received_bytes(self, model: ModelShape, tp: int = 1) -> np.ndarray:
        """Forward bytes each rank receives: Q and KV as a server, O as a home."""
        return (self._sum(self.q_server, self.q_tokens) * model.q_token_bytes(tp)
                + self._sum(self.kv_server, self.kv_tokens) * model.kv_token_bytes(tp)
                + self._sum(self.q_home, self.q_tokens) * model.out_token_bytes(tp))

    def matrix_bytes(self, model: ModelShape, tp: int = 1) -> np.ndarray:
        """Forward bytes as a [source, destination] matrix: who sends how much to whom."""
        matrix = np.zeros((self.num_ranks, self.num_ranks))
        np.add.at(matrix, (self.q_home, self.q_server), self.q_tokens * model.q_token_bytes(tp))
        np.add.at(matrix, (self.q_server, self.q_home), self.q_tokens * model.out_token_bytes(tp))
        np.add.at(matrix, (self.kv_home, self.kv_server), self.kv_tokens * model.kv_token_bytes(tp))
        return matrix

    def _sum(self, rank: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        return np.bincount(rank, weights=tokens, minlength=self.num_ranks)


def key_ranges(layout: Layout, tasks: TaskTable) -> KeyRanges:
    """The distinct keys every server reads, cut by the rank that owns them; keys at home on the server included."""
    span = int(layout.lengths.max()) + 1
    group = tasks.server * layout.num_documents + tasks.document
    order = np.lexsort((tasks.kv_start, group))
    order = order[tasks.kv_stop[order] > tasks.kv_start[order]]
    begin = group[order] * span + tasks.kv_start[order]          # groups never touch: span exceeds every position
    reach = np.maximum.accumulate(group[order] * span + tasks.kv_stop[order])
    opens = np.ones(len(order), dtype=bool)                      # first task of each union of overlapping ranges
    opens[1:] = begin[1:] > reach[:-1]
    closes = np.append(np.flatnonzero(opens)[1:] - 1, len(order) - 1) if len(order) else np.empty(0, dtype=np.int64)
    group = group[order[opens]]
    lo, hi = begin[opens] - group * span, reach[closes] - group * span
    server, document = group // layout.num_documents, group % layout.num_documents

    by_document = layout.by_document()
    owned_start = layout.document[by_document] * span + layout.start[by_document]
    owned_stop = layout.document[by_document] * span + layout.stop[by_document]
    first = np.searchsorted(owned_stop, document * span + lo, side="right")
    past = np.searchsorted(owned_start, document * span + hi, side="left")
    count = past - first                                         # [unions] slices that each union touches
    union = np.repeat(np.arange(len(count)), count)
    nth = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
    owner = by_document[first[union] + nth]
    return KeyRanges(
        document=document[union],
        start=np.maximum(lo[union], layout.start[owner]),
        stop=np.minimum(hi[union], layout.stop[owner]),
        home=layout.rank[owner],
        server=server[union],
    )


def traffic(layout: Layout, tasks: TaskTable, num_ranks: int) -> Traffic:
    """Count what crosses ranks. Queries that several tasks of one server share travel once."""
    keys = key_ranges(layout, tasks)
    away = keys.home != keys.server
    moved = _distinct_queries(tasks)
    return Traffic(
        q_home=moved.home,
        q_server=moved.server,
        q_tokens=moved.stop - moved.start,
        kv_home=keys.home[away],
        kv_server=keys.server[away],
        kv_tokens=(keys.stop - keys.start)[away],
        num_ranks=num_ranks,
    )


def _distinct_queries(tasks: TaskTable) -> KeyRanges:
    """Runs of queries that leave home, each counted once per server even when tasks cut its keys."""
    away = np.flatnonzero(tasks.home != tasks.server)
    order = away[np.lexsort((tasks.q_start[away], tasks.document[away], tasks.server[away]))]
    server, document, home = tasks.server[order], tasks.document[order], tasks.home[order]
    start, stop = tasks.q_start[order], tasks.q_stop[order]
    same = np.zeros(len(order), dtype=bool)
    same[1:] = (server[1:] == server[:-1]) & (document[1:] == document[:-1])
    span = int(stop.max(initial=0)) + 1
    group = np.cumsum(~same)
    reach = np.maximum.accumulate(group * span + stop) - group * span
    begin = start.copy()
    begin[1:] = np.where(same[1:], np.maximum(start[1:], reach[:-1]), start[1:])
    begin = np.minimum(begin, stop)
    return KeyRanges(document=document, start=begin, stop=stop, home=home, server=server)
