"""Index tables for one rank's part of a plan: what the rank sends, receives and computes.

A rank is both a home and a server. As a home it owns a row of tokens and sends runs of it to servers. As a server it
receives runs into a query buffer and a key buffer and computes tasks on them; a key is stored once, even if several
tasks read it. Building a rank's tables needs only the documents that the rank owns tokens of or serves. Home and server
cut and order the runs by the same rule, so messages need no headers.

With two hops, tokens that several ranks of a node need cross to that node once. The home sends them to its gateway: the
rank with the same local rank on that node, so all NICs share the traffic. The gateway forwards them inside the node.
Results return the same way, merged or summed at the gateway before they cross. Each hop is an ordinary dispatch: the
first fills a relay buffer, and the relay is the row of the second.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from distca.columns import Positions, freeze
from distca.planning.plan import Plan
from distca.planning.tasks import TaskTable
from distca.planning.traffic import Gateways, TokenRanges, key_ranges, query_ranges
from distca.validation import UserError
from distca.workload.layout import Layout


@dataclass(frozen=True, slots=True)
class Runs:
    """Runs of tokens sent between a home's row and a server's buffer, in wire order: by peer, then document."""

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
    """Runs of tokens that their home serves: copied from the row into the server's buffer, never sent."""

    row: np.ndarray     # [runs]
    buffer: np.ndarray  # [runs]
    length: np.ndarray  # [runs]

    def __post_init__(self) -> None:
        freeze(self, self.__slots__)


@dataclass(frozen=True, slots=True)
class Side:
    """The queries or the keys of one rank: runs that it sends, receives and keeps."""

    send: Runs          # runs of the row, to servers
    receive: Runs       # runs of the buffer, from homes
    local: LocalRuns
    buffer_tokens: int  # size of the server's buffer
    parts: np.ndarray   # [row tokens] number of servers that use each token; results of several are combined
    is_row: bool = field(init=False)  # the buffer equals the row: nothing is received, no token is left out
    leaves_some: bool = field(init=False)  # no server uses some of the row's tokens, such as keys outside all windows

    def __post_init__(self) -> None:
        freeze(self, ("parts",))
        local = self.local.length
        object.__setattr__(self, "is_row", (
            len(self.receive.peer) == 0 and len(local) <= 1 and self.buffer_tokens == len(self.parts)
            and int(local.sum()) == self.buffer_tokens))
        object.__setattr__(self, "leaves_some", bool((self.parts == 0).any()))

    @property
    def is_untouched(self) -> bool:
        """Whether the home serves every token, once and in the row's order, so the server's results are the row's."""
        return self.is_row and len(self.send.peer) == 0


@dataclass(frozen=True, slots=True)
class RankTables:
    """The tables that one rank needs to take part in an attention call."""

    rank: int
    num_ranks: int
    row_tokens: int
    key_row_tokens: int  # the row's tokens, followed by tokens of another nano-batch that are only keys here
    queries: Side
    keys: Side
    q_begin: np.ndarray  # [tasks] in the query buffer
    q_end: np.ndarray    # [tasks]
    k_begin: np.ndarray  # [tasks] in the key buffer
    k_end: np.ndarray    # [tasks]
    q_offset: np.ndarray  # [tasks] position of the first query minus position of the first key

    def __post_init__(self) -> None:
        freeze(self, ("q_begin", "q_end", "k_begin", "k_end", "q_offset"))


def build(plan: Plan, rank: int) -> RankTables:
    """Build the tables of one rank; ranks from layout.num_ranks on are dedicated servers with an empty row."""
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
    """Return the tokens of a rank's row and of its key row; dedicated servers have none."""
    if rank >= layout.num_ranks:
        return 0, 0
    return int(layout.tokens_per_rank()[rank]), int(layout.key_tokens_per_rank()[rank])


def task_columns(tasks: TaskTable, rank: int, query_offset: Offsets, key_offset: Offsets) -> tuple[np.ndarray, ...]:
    """Return q_begin, q_end, k_begin, k_end and q_offset of the tasks that a rank serves, in its buffers."""
    mine = tasks.take((tasks.server == rank) & (tasks.kv_stop > tasks.kv_start))
    q_begin, k_begin = query_offset(mine.document, mine.q_start), key_offset(mine.document, mine.kv_start)
    return q_begin, q_begin + mine.q_len, k_begin, k_begin + mine.kv_len, mine.q_start - mine.kv_start


def travels(plan: Plan, group: np.ndarray | None = None) -> bool:
    """Return whether any rank may send anything; the answer is the same on every rank.

    Queries are sent if their server is not their home, keys if their document is on several ranks. `group` [servers],
    for example each server's node, restricts the question to traffic between groups.
    """
    group = np.arange(plan.num_servers) if group is None else group
    if bool((group[plan.tasks.server] != group[plan.tasks.home]).any()):
        return True
    slices = plan.layout.keys()
    first = np.empty(plan.layout.num_documents, dtype=np.int64)
    first[slices.document] = group[slices.rank]                  # one of the groups that hold each document
    return bool((first[slices.document] != group[slices.rank]).any())


def touching(plan: Plan, is_here: np.ndarray) -> TaskTable:
    """Return the tasks of all documents that the ranks selected by `is_here` [servers] own tokens of or serve."""
    touched = np.zeros(plan.layout.num_documents, dtype=bool)
    owned = plan.layout.keys()
    touched[owned.document[is_here[owned.rank]]] = True
    touched[plan.tasks.document[is_here[plan.tasks.server]]] = True
    return plan.tasks.take(touched[plan.tasks.document])


class Offsets(NamedTuple):
    """Map from positions in documents to offsets in rows or a buffer that hold contiguous intervals of documents."""

    intervals: Positions
    shift: np.ndarray  # [intervals] offset of an interval minus its start

    @classmethod
    def of(cls, layout: Layout, document: np.ndarray, start: np.ndarray, offset: np.ndarray) -> Offsets:
        return cls(Positions.of(document, start, layout.lengths), offset - start)

    @classmethod
    def in_rows(cls, layout: Layout) -> Offsets:
        """Return offsets in the home's row; its own tokens have the same offset in row and key row."""
        slices = layout.keys()
        return cls.of(layout, slices.document, slices.start, layout.key_row_offset())

    def __call__(self, document: np.ndarray, position: np.ndarray) -> np.ndarray:
        return self.shift[self.intervals.holding(document, position)] + position


def side_of(layout: Layout, ranges: TokenRanges, row: np.ndarray, rank: int, row_tokens: int) -> tuple[Side, Offsets]:
    """Return a rank's side of the ranges and the offsets in its server buffer.

    `row` [ranges] is the offset of each range's first token in its home's row.
    """
    length = ranges.stop - ranges.start

    away = np.flatnonzero((ranges.home == rank) & (ranges.server != rank))
    away = away[np.lexsort((ranges.start[away], ranges.document[away], ranges.server[away]))]
    send = Runs(ranges.server[away], row[away], length[away])

    held = np.flatnonzero(ranges.server == rank)
    at_home = ranges.home[held] == rank
    first_row = np.full(layout.num_documents, row_tokens)        # own documents keep the row's order, others follow
    np.minimum.at(first_row, ranges.document[held[at_home]], row[held[at_home]])
    held = held[np.lexsort((ranges.start[held], ranges.document[held], first_row[ranges.document[held]]))]
    buffer = np.cumsum(length[held]) - length[held]              # [held] each range of a document once, in order

    near = ranges.home[held] == rank
    far = np.flatnonzero(~near)
    far = far[np.lexsort((ranges.start[held[far]], ranges.document[held[far]], ranges.home[held[far]]))]
    receive = Runs(ranges.home[held[far]], buffer[far], length[held[far]])
    local = _joined(row[held[near]], buffer[near], length[held[near]])
    side = Side(send, receive, local, int(length[held].sum()), _parts(send, local, row_tokens))
    return side, Offsets.of(layout, ranges.document[held], ranges.start[held], buffer)


def _joined(row: np.ndarray, buffer: np.ndarray, length: np.ndarray) -> LocalRuns:
    """Join adjacent runs into one copy."""
    if len(row) == 0:
        return LocalRuns(row, buffer, length)
    opens = np.ones(len(row), dtype=bool)
    opens[1:] = (row[1:] != row[:-1] + length[:-1]) | (buffer[1:] != buffer[:-1] + length[:-1])
    first = np.flatnonzero(opens)
    return LocalRuns(row[first], buffer[first], np.add.reduceat(length, first))


def _parts(send: Runs, local: LocalRuns, row_tokens: int) -> np.ndarray:
    """Return the number of servers that use each token of the row."""
    change = np.zeros(row_tokens + 1, dtype=np.int64)
    for start, length in ((send.start, send.length), (local.row, local.length)):
        np.add.at(change, start, 1)
        np.add.at(change, start + length, -1)
    return np.cumsum(change)[:-1]


_NO_TASKS = (np.empty(0, dtype=np.int64),) * 5


@dataclass(frozen=True, slots=True)
class HopTables:
    """The two hops of one rank; the inner hop numbers peers by their local rank in the node."""

    outer: RankTables
    inner: RankTables
    crosses: bool  # whether any rank sends to another node: the same on every rank
    passes: bool   # whether any rank of this node sends to another rank of it: the same on all of them


def build_hops(plan: Plan, rank: int, node: np.ndarray) -> HopTables:
    """Build one rank's tables for a pool whose servers are on the nodes `node` [servers]."""
    if len(node) != plan.num_servers:
        raise UserError(f"the transport knows the nodes of {len(node)} ranks but the plan has {plan.num_servers} "
                        "servers; plan for the ranks of the group")
    layout, is_here = plan.layout, node == node[rank]
    tasks = touching(plan, is_here)
    per_node = replace(tasks, server=node[tasks.server])
    in_rows, gateways, row_tokens = Offsets.in_rows(layout), Gateways(node), tokens_of_rows(layout, rank)
    sides: list[tuple[Side, Side, Offsets]] = []
    passes = False
    for ranges_of, tokens in zip((query_ranges, key_ranges), row_tokens, strict=True):
        crossing = gateways.landing(ranges_of(layout, per_node))
        outer, relay = side_of(layout, crossing, in_rows(crossing.document, crossing.start), rank, tokens)
        ranges = ranges_of(layout, tasks)
        needed = is_here[ranges.server]                          # by servers on this node
        inside = gateways.relayed(TokenRanges(*(getattr(ranges, name)[needed] for name in TokenRanges.__slots__)))
        at = np.zeros(len(inside.start), dtype=np.int64)         # offset in the relay; used only for this rank's ranges
        mine = inside.home == rank
        at[mine] = relay(inside.document[mine], inside.start[mine])
        inner, offset = side_of(layout, inside, at, rank, outer.buffer_tokens)
        sides.append((outer, _numbered(inner, gateways.local), offset))
        passes |= bool((inside.home != inside.server).any())
    (q_outer, q_inner, query_offset), (k_outer, k_inner, key_offset) = sides
    return HopTables(
        RankTables(rank, plan.num_servers, *row_tokens, q_outer, k_outer, *_NO_TASKS),
        RankTables(int(gateways.local[rank]), int(is_here.sum()), q_outer.buffer_tokens, k_outer.buffer_tokens, q_inner,
                   k_inner, *task_columns(tasks, rank, query_offset, key_offset)),
        travels(plan, node), passes)


def _numbered(side: Side, local: np.ndarray) -> Side:
    """Renumber the side's peers by local rank; their order stays."""
    send, receive = (Runs(local[runs.peer], runs.start, runs.length) for runs in (side.send, side.receive))
    return Side(send, receive, side.local, side.buffer_tokens, side.parts)
