"""Count the tokens that a set of tasks sends between ranks.

A server receives each key once, even if several of its tasks read it, and receives none that it owns. Queries travel
to their server and outputs travel back. The dispatch tables are built from the same ranges, so the bytes that planning
counts are the bytes that the runtime sends.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from distca.columns import Positions, spread
from distca.planning.tasks import TaskTable
from distca.spec import ModelShape
from distca.workload.layout import Layout

_WORTH_A_HOP = 0.95  # two hops must send at most this part of one hop's bytes between nodes, in all or through a NIC


@dataclass(frozen=True, slots=True)
class TokenRanges:
    """One entry per run of tokens [start, stop) of a document that `server` needs, all from one slice of their home."""

    document: np.ndarray  # [ranges]
    start: np.ndarray     # [ranges]
    stop: np.ndarray      # [ranges]
    home: np.ndarray      # [ranges] rank that owns these tokens
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
        """[ranks] Forward bytes sent: Q and KV as a home, O as a server."""
        return self._bytes(self.q_home, self.kv_home, self.q_server, model, tp)

    def received_bytes(self, model: ModelShape, tp: int = 1) -> np.ndarray:
        """[ranks] Forward bytes received: Q and KV as a server, O as a home."""
        return self._bytes(self.q_server, self.kv_server, self.q_home, model, tp)

    def matrix_bytes(self, model: ModelShape, tp: int = 1) -> np.ndarray:
        """[source, destination] Forward bytes."""
        matrix = np.zeros((self.num_ranks, self.num_ranks))
        np.add.at(matrix, (self.q_home, self.q_server), self.q_tokens * model.q_token_bytes(tp))
        np.add.at(matrix, (self.q_server, self.q_home), self.q_tokens * model.out_token_bytes(tp))
        np.add.at(matrix, (self.kv_home, self.kv_server), self.kv_tokens * model.kv_token_bytes(tp))
        return matrix

    def between(self, group: np.ndarray) -> Traffic:
        """Return the part that crosses groups, given the group of each rank."""
        q, kv = (group[home] != group[server] for home, server in ((self.q_home, self.q_server),
                                                                   (self.kv_home, self.kv_server)))
        return Traffic(self.q_home[q], self.q_server[q], self.q_tokens[q], self.kv_home[kv], self.kv_server[kv],
                       self.kv_tokens[kv], self.num_ranks)

    def _bytes(self, q: np.ndarray, kv: np.ndarray, out: np.ndarray, model: ModelShape, tp: int) -> np.ndarray:
        """[ranks] Sum the bytes of messages; `q`, `kv` and `out` are the rank of each message."""
        of_q, of_kv, of_out = (np.bincount(rank, weights=tokens, minlength=self.num_ranks) * size(tp)
                               for rank, tokens, size in ((q, self.q_tokens, model.q_token_bytes),
                                                          (kv, self.kv_tokens, model.kv_token_bytes),
                                                          (out, self.q_tokens, model.out_token_bytes)))
        return of_q + of_kv + of_out


def key_ranges(layout: Layout, tasks: TaskTable) -> TokenRanges:
    """List the distinct keys that each server reads, cut by owning rank; keys that the server owns are included."""
    span = int(layout.lengths.max()) + 1
    group = tasks.server * layout.num_documents + tasks.document
    order = np.lexsort((tasks.kv_start, group))
    order = order[tasks.kv_stop[order] > tasks.kv_start[order]]
    begin = group[order] * span + tasks.kv_start[order]          # span exceeds every position, so groups cannot overlap
    reach = np.maximum.accumulate(group[order] * span + tasks.kv_stop[order])
    opens = np.ones(len(order), dtype=bool)                      # first task of each union of overlapping ranges
    opens[1:] = begin[1:] > reach[:-1]
    closes = np.append(np.flatnonzero(opens)[1:] - 1, len(order) - 1) if len(order) else np.empty(0, dtype=np.int64)
    group = group[order[opens]]
    lo, hi = begin[opens] - group * span, reach[closes] - group * span
    server, document = group // layout.num_documents, group % layout.num_documents

    slices = layout.keys()
    positions = Positions.of(slices.document, slices.start, layout.lengths)
    first = positions.first(document, lo, side="right") - 1      # [unions] slice with the union's first key
    union, nth = spread(positions.first(document, hi) - first)
    owner = positions.order[first[union] + nth]
    return TokenRanges(document[union], np.maximum(lo[union], slices.start[owner]),
                       np.minimum(hi[union], slices.stop[owner]), home=slices.rank[owner], server=server[union])


def query_ranges(layout: Layout, tasks: TaskTable) -> TokenRanges:
    """List the distinct queries that each server computes, cut by owning slice: a server receives each query once."""
    queries = tasks.take(tasks.kv_stop > tasks.kv_start)
    return key_ranges(layout, replace(queries, kv_start=queries.q_start, kv_stop=queries.q_stop))


def traffic(layout: Layout, tasks: TaskTable, num_ranks: int) -> Traffic:
    """Count the tokens that cross ranks."""
    tasks = _of_travellers(layout, tasks)
    return _away(key_ranges(layout, tasks), query_ranges(layout, tasks), num_ranks)


def traffic_between_nodes(layout: Layout, tasks: TaskTable, node: np.ndarray) -> Traffic:
    """Count the tokens that cross nodes, given the node of each server; ranks in the result are nodes.

    A key or query that several ranks of a node need is sent to the node once, and partial outputs are merged inside
    the node before they are sent back.
    """
    tasks = _of_travellers(layout, tasks)
    per_node = replace(tasks, server=node[tasks.server])
    keys, queries = (replace(ranges, home=node[ranges.home]) for ranges in (
        key_ranges(layout, per_node), query_ranges(layout, per_node)))
    return _away(keys, queries, int(node.max()) + 1)


def two_hops_pay(layout: Layout, tasks: TaskTable, node: np.ndarray, model: ModelShape, tp: int = 1) -> bool:
    """Return whether a second hop inside nodes pays: fewer bytes between nodes, or fewer through the busiest NIC.

    A node's ranks may share keys, or one of them may need most. Also True if nothing crosses nodes: then the whole
    exchange is inside nodes.
    """
    two, one = ((moved.sent_bytes(model, tp), moved.received_bytes(model, tp)) for moved in (
        traffic_of_nics(layout, tasks, node), traffic(layout, tasks, len(node)).between(node)))
    return bool(two[0].sum() <= _WORTH_A_HOP * one[0].sum() or np.max(two) <= _WORTH_A_HOP * np.max(one))


class Gateways:
    """The gateway of a home on each other node: the rank there with the same local rank (modulo the node's size)."""

    def __init__(self, node: np.ndarray) -> None:
        self.node = node
        order = np.argsort(node, kind="stable")
        size = np.bincount(node)
        first = np.cumsum(size) - size
        self.local = np.empty(len(node), dtype=np.int64)         # [servers] local rank
        self.local[order] = np.arange(len(node)) - first[node[order]]
        self._order, self._first, self._size = order, first, size

    def of(self, home: np.ndarray, node: np.ndarray) -> np.ndarray:
        """Return the rank that receives a home's tokens for a node; on its own node that is the home itself."""
        gateway = self._order[self._first[node] + self.local[home] % np.maximum(self._size[node], 1)]
        return np.where(self.node[home] == node, home, gateway)

    def landing(self, ranges: TokenRanges) -> TokenRanges:
        """Replace the server of ranges, a node, by the gateway that receives them: the first hop."""
        return replace(ranges, server=self.of(ranges.home, ranges.server))

    def relayed(self, ranges: TokenRanges) -> TokenRanges:
        """Replace the home of ranges by the gateway on their server's node: the second hop."""
        return replace(ranges, home=self.of(ranges.home, self.node[ranges.server]))


def traffic_in_hops(layout: Layout, tasks: TaskTable, node: np.ndarray) -> tuple[Traffic, Traffic]:
    """Count the tokens of both hops: from homes to gateways on other nodes, then inside nodes to servers."""
    tasks, gateways = _of_travellers(layout, tasks), Gateways(node)
    inner = _away(gateways.relayed(key_ranges(layout, tasks)), gateways.relayed(query_ranges(layout, tasks)), len(node))
    return _landing(layout, tasks, gateways), inner


def traffic_of_nics(layout: Layout, tasks: TaskTable, node: np.ndarray) -> Traffic:
    """Count the tokens of the first hop: what each rank's NIC sends and receives if there are two hops."""
    return _landing(layout, _of_travellers(layout, tasks), Gateways(node))


def _landing(layout: Layout, tasks: TaskTable, gateways: Gateways) -> Traffic:
    per_node = replace(tasks, server=gateways.node[tasks.server])
    return _away(gateways.landing(key_ranges(layout, per_node)), gateways.landing(query_ranges(layout, per_node)),
                 len(gateways.node))


def _of_travellers(layout: Layout, tasks: TaskTable) -> TaskTable:
    """Return the tasks of documents that are on several ranks or not computed at home; no other tokens are sent."""
    travels = np.zeros(layout.num_documents, dtype=bool)
    travels[tasks.document[tasks.home != tasks.server]] = True
    travels[layout.document[(layout.start > 0) | (layout.stop < layout.lengths[layout.document])]] = True
    return tasks.take(travels[tasks.document])


def _away(keys: TokenRanges, queries: TokenRanges, num_ranks: int) -> Traffic:
    """Return the traffic of the ranges that cross ranks."""
    return Traffic(queries.home, queries.server, queries.stop - queries.start, keys.home, keys.server,
                   keys.stop - keys.start, num_ranks).between(np.arange(num_ranks))
