"""Build one rank's dispatch tables from a plan, without building anyone else's.

Only documents that touch the rank matter: those it owns tokens of (their keys may be wanted anywhere) and those it
serves. Home and server cut and order the same runs by the same rule, so the wire needs no headers.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from distca.columns import Positions
from distca.dispatch.tables import LocalRuns, RankTables, Runs, Side
from distca.planning.plan import Plan
from distca.planning.tasks import TaskTable
from distca.planning.traffic import TokenRanges, key_ranges, query_ranges
from distca.validation import UserError
from distca.workload.layout import Layout


def build(plan: Plan, rank: int) -> RankTables:
    """The tables of one rank; ranks from layout.num_ranks on are dedicated servers with an empty row."""
    if not 0 <= rank < plan.num_servers:
        raise UserError(f"rank is {rank} but the plan has {plan.num_servers} servers; use 0 to {plan.num_servers - 1}")
    layout, tasks = plan.layout, touching(plan, np.arange(plan.num_servers) == rank)
    row_tokens, in_rows = tokens_of_rows(layout, rank), Offsets.in_rows(layout)
    (queries, query_offset), (keys, key_offset) = (
        side_of(layout, ranges, in_rows(ranges.document, ranges.start), rank, tokens)
        for ranges, tokens in zip((query_ranges(layout, tasks), key_ranges(layout, tasks)), row_tokens, strict=True))
    return RankTables(rank, plan.num_servers, *row_tokens, queries, keys,
                      *task_columns(tasks, rank, query_offset, key_offset))


def tokens_of_rows(layout: Layout, rank: int) -> tuple[int, int]:
    """Tokens of a rank's row and of its key row; dedicated servers have none."""
    if rank >= layout.num_ranks:
        return 0, 0
    return int(layout.tokens_per_rank()[rank]), int(layout.key_tokens_per_rank()[rank])


def task_columns(tasks: TaskTable, rank: int, query_offset: Offsets, key_offset: Offsets) -> tuple[np.ndarray, ...]:
    """q_begin, q_end, k_begin, k_end and q_offset of the tasks that a rank serves, in its buffers."""
    mine = tasks.take((tasks.server == rank) & (tasks.kv_stop > tasks.kv_start))
    q_begin, k_begin = query_offset(mine.document, mine.q_start), key_offset(mine.document, mine.kv_start)
    return q_begin, q_begin + mine.q_len, k_begin, k_begin + mine.kv_len, mine.q_start - mine.kv_start


def travels(plan: Plan, group: np.ndarray | None = None) -> bool:
    """Whether any rank may send anything, without counting what: the same on every rank.

    Queries travel where a server is not their home, keys where a document lies on several ranks. `group` [servers],
    their nodes for example, asks whether anything travels between groups.
    """
    group = np.arange(plan.num_servers) if group is None else group
    if bool((group[plan.tasks.server] != group[plan.tasks.home]).any()):
        return True
    slices = plan.layout.keys()
    first = np.empty(plan.layout.num_documents, dtype=np.int64)
    first[slices.document] = group[slices.rank]                  # one of the groups that hold each document
    return bool((first[slices.document] != group[slices.rank]).any())


def touching(plan: Plan, is_here: np.ndarray) -> TaskTable:
    """Tasks of the documents that the ranks that `is_here` [servers] selects own tokens of or serve."""
    touched = np.zeros(plan.layout.num_documents, dtype=bool)
    owned = plan.layout.keys()
    touched[owned.document[is_here[owned.rank]]] = True
    touched[plan.tasks.document[is_here[plan.tasks.server]]] = True
    return plan.tasks.take(touched[plan.tasks.document])


class Offsets(NamedTuple):
    """Offsets of documents' positions in rows or in a buffer, where intervals of documents are contiguous."""

    intervals: Positions
    shift: np.ndarray  # [intervals] offset of an interval, less its start

    @classmethod
    def of(cls, layout: Layout, document: np.ndarray, start: np.ndarray, offset: np.ndarray) -> Offsets:
        return cls(Positions.of(document, start, layout.lengths), offset - start)

    @classmethod
    def in_rows(cls, layout: Layout) -> Offsets:
        """In their home's row; own tokens have the same offset in row and key row."""
        slices = layout.keys()
        return cls.of(layout, slices.document, slices.start, layout.key_row_offset())

    def __call__(self, document: np.ndarray, position: np.ndarray) -> np.ndarray:
        return self.shift[self.intervals.holding(document, position)] + position


def side_of(layout: Layout, ranges: TokenRanges, row: np.ndarray, rank: int, row_tokens: int) -> tuple[Side, Offsets]:
    """A rank's part of the ranges, whose first tokens stand at `row` [ranges] in their home's row; and the offsets of
    positions in the server's buffer.
    """
    length = ranges.stop - ranges.start

    away = np.flatnonzero((ranges.home == rank) & (ranges.server != rank))
    away = away[np.lexsort((ranges.start[away], ranges.document[away], ranges.server[away]))]
    send = Runs(ranges.server[away], row[away], length[away])

    held = np.flatnonzero(ranges.server == rank)
    at_home = ranges.home[held] == rank
    first_row = np.full(layout.num_documents, row_tokens)        # documents at home keep the row's order, others follow
    np.minimum.at(first_row, ranges.document[held[at_home]], row[held[at_home]])
    held = held[np.lexsort((ranges.start[held], ranges.document[held], first_row[ranges.document[held]]))]
    buffer = np.cumsum(length[held]) - length[held]              # [held] a document's ranges stand in order, once

    near = ranges.home[held] == rank
    far = np.flatnonzero(~near)
    far = far[np.lexsort((ranges.start[held[far]], ranges.document[held[far]], ranges.home[held[far]]))]
    receive = Runs(ranges.home[held[far]], buffer[far], length[held[far]])
    local = _joined(row[held[near]], buffer[near], length[held[near]])
    side = Side(send, receive, local, int(length[held].sum()), _parts(send, local, row_tokens))
    return side, Offsets.of(layout, ranges.document[held], ranges.start[held], buffer)


def _joined(row: np.ndarray, buffer: np.ndarray, length: np.ndarray) -> LocalRuns:
    """Neighbouring runs become one copy."""
    if len(row) == 0:
        return LocalRuns(row, buffer, length)
    opens = np.ones(len(row), dtype=bool)
    opens[1:] = (row[1:] != row[:-1] + length[:-1]) | (buffer[1:] != buffer[:-1] + length[:-1])
    first = np.flatnonzero(opens)
    return LocalRuns(row[first], buffer[first], np.add.reduceat(length, first))


def _parts(send: Runs, local: LocalRuns, row_tokens: int) -> np.ndarray:
    """How many servers use each token of the row."""
    change = np.zeros(row_tokens + 1, dtype=np.int64)
    for start, length in ((send.start, send.length), (local.row, local.length)):
        np.add.at(change, start, 1)
        np.add.at(change, start + length, -1)
    return np.cumsum(change)[:-1]
