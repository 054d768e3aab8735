"""Costs of attention calls per rank: compute seconds of servers, messages, and keys passed around a ring.

Plans repeat over layers and ticks. Seconds and messages of a plan do not depend on links and are computed once for each
plan and direction (`PlanCosts`). Plans that run at the same time form one call, built once per set of plans (`Calls`).

A context-parallel group either receives all its keys and then attends, or attends chunk by chunk while the next chunk
travels, as in ring attention. Chunking lowers the kernel's efficiency, so each group uses whichever finishes first.
Documents whose slices are shorter than a tile are not chunked: their attention runs after the last chunk has arrived.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, TypeVar, cast

import numpy as np

from distca.columns import spread
from distca.cost.attention_time import AttentionTime
from distca.planning.plan import Plan, server_work
from distca.planning.step import StepPlan
from distca.planning.tasks import TILE
from distca.planning.traffic import Traffic, traffic_in_hops, two_hops_pay
from distca.simulate.clock import AllToAll, Clock, Ring, group_max
from distca.simulate.costs import Costs
from distca.spec import ModelShape
from distca.workload.layout import Layout

MOST_CHUNKS = 8        # per ring; in larger groups a chunk holds the keys of several ranks
_MOST_PIECES = 50_000  # per call; the longest documents are chunked first

PlanSet = tuple[tuple[int, int, bool], ...]  # (first rank, plan, is backward) of plans that run at the same time
Method = TypeVar("Method", bound=Callable[..., Any])


def kept(method: Method) -> Method:
    """Cache a method's results in its object's `results`, by the arguments."""
    def found(self: Any, *key: Hashable) -> Any:
        if (method, key) not in self.results:
            self.results[method, key] = method(self, *key)
        return self.results[method, key]

    return cast(Method, found)


@dataclass(frozen=True, slots=True, eq=False)
class Messages:
    """Messages between homes and servers of one plan."""

    home: np.ndarray            # [messages]
    server: np.ndarray          # [messages]
    dispatch_bytes: np.ndarray  # [messages] home to server
    combine_bytes: np.ndarray   # [messages] server to home

    @classmethod
    def of(cls, moved: Traffic, plan: Plan, backward: bool) -> Messages:
        home, server = (np.concatenate(pair) for pair in ((moved.q_home, moved.kv_home),
                                                          (moved.q_server, moved.kv_server)))
        dispatch, combine = (np.concatenate([moved.q_tokens * per_q, moved.kv_tokens * per_kv])
                             for per_q, per_kv in token_bytes(plan.model, plan.tp, backward))
        return cls(home, server, dispatch, combine)


class PlanCosts:
    """Seconds and messages of a step's plans, by their index; `hides=False` makes rings wait for all their keys."""

    def __init__(self, step: StepPlan, attention: AttentionTime, *, hides: bool = True) -> None:
        self.gather_ranks, self.attention, self.hides = step.gather_ranks, attention, hides
        self.plans = step.plans
        self.results: dict[Hashable, Any] = {}

    @kept
    def seconds(self, at: int, backward: bool) -> np.ndarray:
        """[servers] seconds of attention."""
        plan = self.plans[at]
        is_known = plan.cost == self.attention and plan.backward == backward and plan.window is None
        work = plan.work() if is_known else server_work(plan.tasks, plan.num_servers, self.attention, backward)
        return work / self.attention.speeds(plan.num_servers)

    @kept
    def chunks(self, at: int) -> ChunkTasks:
        return ChunkTasks.of(self.plans[at].layout, self.gather_ranks)

    @kept
    def chunk_seconds(self, at: int, backward: bool) -> np.ndarray:
        """[ranks, chunks] seconds of attention to a rank's own keys (chunk 0) and to each chunk of its ring."""
        return self.chunks(at).seconds(self.attention, backward)

    @kept
    def hops(self, at: int, backward: bool) -> tuple[Messages, ...]:
        """Messages per hop: one hop, or two (between nodes, then inside nodes) if ranks of a node share many keys."""
        plan = self.plans[at]
        nodes = None if plan.topology is None or not plan.topology.levels() else plan.topology.node
        hops: tuple[Traffic, ...] = (plan.traffic(),)
        if nodes is not None and two_hops_pay(plan.layout, plan.tasks, nodes, plan.model, plan.tp):
            hops = traffic_in_hops(plan.layout, plan.tasks, nodes)
        return tuple(Messages.of(moved, plan, backward) for moved in hops)

    def messages(self, at: int, backward: bool) -> Messages:
        """Messages of all hops."""
        hops = self.hops(at, backward)
        return Messages(*(np.concatenate([getattr(hop, name) for hop in hops]) for name in Messages.__slots__))

    @kept
    def exchanges(
        self, plan_set: PlanSet, num_ranks: int, ranks_per_node: int, ranks_per_pod: int = 0
    ) -> tuple[tuple[AllToAll, AllToAll], ...]:
        """Exchanges per hop, from homes to servers and back, for a set of plans."""
        hops: list[tuple[AllToAll, AllToAll]] = []
        for parts in zip_longest(*([(first, hop) for hop in self.hops(at, backward)]
                                   for first, at, backward in plan_set)):
            home, server, dispatch, combine = map(np.concatenate, zip(*(
                (hop.home + first, hop.server + first, hop.dispatch_bytes, hop.combine_bytes)
                for first, hop in filter(None, parts)), strict=True))
            hops.append((AllToAll.of(home, server, dispatch, num_ranks, ranks_per_node, ranks_per_pod),
                         AllToAll.of(server, home, combine, num_ranks, ranks_per_node, ranks_per_pod)))
        return tuple(hops)

    def buffer_bytes(self, at: int, backward: bool) -> np.ndarray:
        """[servers] bytes of the buffers for messages from and to other ranks."""
        found = self.messages(at, backward)
        return np.bincount(found.server, weights=found.dispatch_bytes + found.combine_bytes,
                           minlength=self.plans[at].num_servers)


PerToken = tuple[int, int]  # bytes of a moved query, of a moved key


def token_bytes(model: ModelShape, tp: int, backward: bool) -> tuple[PerToken, PerToken]:
    """Bytes per query and key to servers and back: Q, K, V, then O and LSE; backward Q, K, V, O, dO, LSE, then
    gradients."""
    q, kv, out, lse = (size(tp) for size in (model.q_token_bytes, model.kv_token_bytes, model.out_token_bytes,
                                             model.lse_token_bytes))
    return ((q + 2 * out + lse, kv), (q, kv)) if backward else ((q, kv), (out + lse, 0))


@dataclass(frozen=True, slots=True, eq=False)
class PoolCall:
    """One attention call with servers. Stages that do not share attention may be in different phases of it."""

    seconds: tuple[tuple[str, np.ndarray], ...]  # per phase: its name and [ranks] seconds
    dispatch: AllToAll
    combine: AllToAll
    inside: tuple[AllToAll, AllToAll] | None = None  # hop inside nodes: after `dispatch`, and before `combine`

    def start(self, clock: Clock, ready: np.ndarray) -> np.ndarray:
        """Send from homes to servers, relayed by gateways if there are two hops; return when servers have received."""
        there = clock.exchange("to servers", ready, self.dispatch)
        return there if self.inside is None else clock.exchange("inside nodes", there, self.inside[0])

    def serve(self, clock: Clock, there: np.ndarray) -> np.ndarray:
        """Compute on servers and send results back; return when homes have received."""
        for name, seconds in self.seconds:
            there = clock.compute(name, "attention", there, seconds)
        if self.inside is not None:
            there = clock.exchange("inside nodes", there, self.inside[1])
        return clock.exchange("to homes", there, self.combine)


class Calls:
    """Attention calls of all ranks over given links, one per set of plans."""

    def __init__(self, plan_costs: PlanCosts, costs: Costs, num_ranks: int) -> None:
        self.plan_costs, self.costs, self.num_ranks = plan_costs, costs, num_ranks
        self.results: dict[Hashable, Any] = {}

    @kept
    def of(self, plan_set: PlanSet) -> PoolCall | Ring:
        return self._pool_call(plan_set) if self.plan_costs.gather_ranks == 1 else self._ring_call(plan_set)

    def _pool_call(self, plan_set: PlanSet) -> PoolCall:
        seconds: dict[bool, np.ndarray] = {}
        for first, at, backward in plan_set:
            phase, own = seconds.setdefault(backward, np.zeros(self.num_ranks)), self.plan_costs.seconds(at, backward)
            phase[first:first + len(own)] = own
        named = tuple(("attention backward" if phase else "attention forward", part) for phase, part in seconds.items())
        links = self.costs.attention_links
        hops = [(dispatch.over(links), combine.over(links)) for dispatch, combine in self.plan_costs.exchanges(
            plan_set, self.num_ranks, self.costs.ranks_per_node, self.costs.ranks_per_pod)]
        return PoolCall(named, *hops[0], hops[1] if len(hops) > 1 else None)

    def _ring_call(self, plan_set: PlanSet) -> Ring:
        runs, backwards = np.zeros((2, self.num_ranks), dtype=bool)
        columns = np.zeros((4, self.num_ranks))
        for first, at, backward in plan_set:
            ranks = slice(first, first + self.plan_costs.plans[at].num_servers)
            runs[ranks], backwards[ranks] = True, backward
            columns[:, ranks] = self._rings_of(at, backward)
        return Ring(self.plan_costs.gather_ranks, runs, backwards, *columns)

    @kept
    def _rings_of(self, at: int, backward: bool) -> np.ndarray:
        """[4, data ranks] seconds, lead, tail and travel of `Ring`, with or without chunks per group, as is faster."""
        size, plan = self.plan_costs.gather_ranks, self.plan_costs.plans[at]
        tokens = plan.layout.tokens_per_rank().reshape(-1, size).sum(axis=1).tolist()  # [groups]
        per_token = plan.model.kv_token_bytes(plan.tp)
        known = {count: self.costs.ring_seconds(count * per_token, size) for count in set(tokens)}
        travel = np.repeat([known[count] for count in tokens], size)
        seconds = self.plan_costs.seconds(at, backward)
        waiting = np.stack([seconds, travel + seconds, travel, travel])
        if not (travel.any() and self.plan_costs.hides):
            return waiting
        chunks = self.plan_costs.chunk_seconds(at, backward)   # [ranks, chunks]
        left = np.cumsum(chunks[:, ::-1], axis=1)[:, ::-1]     # seconds from each chunk on
        lead = (travel[:, None] * _arrives(size, chunks.shape[1]) + left)[:, 1:].max(axis=1)
        slowest = group_max(np.maximum(lead, left[:, 0]), size)
        tail = np.maximum(group_max(lead, size) - group_max(left[:, 0], size), 0.0)
        hides = slowest < group_max(waiting[1], size)
        return np.where(hides, np.stack([left[:, 0], lead, tail, travel]), waiting)


@dataclass(frozen=True, slots=True, eq=False)
class ChunkTasks:
    """Attention on home ranks, chunk by chunk, a rank's own keys first: one entry per shard.

    Backward runs the chunks in reverse, so that gradients of other ranks' keys travel while the rest is computed.
    """

    q_len: np.ndarray
    kv_len: np.ndarray
    is_aligned: np.ndarray  # whether queries are at the end of their keys
    rank: np.ndarray
    chunk: np.ndarray
    num_ranks: int
    num_chunks: int

    @classmethod
    def of(cls, layout: Layout, size: int) -> ChunkTasks:
        num_chunks = min(size, MOST_CHUNKS)
        order = layout.by_document()
        document, start, stop, rank = (column[order] for column in (layout.document, layout.start, layout.stop,
                                                                    layout.rank))
        count = np.bincount(document, minlength=layout.num_documents)  # slices of each document
        nth = np.arange(len(order)) - (np.cumsum(count) - count)[document]
        whole = ~_cut_documents(layout, count)[document]
        sees = np.where(whole, 0, nth + 1)                       # slices that a slice's queries read, its own included
        task, number = spread(sees)
        key = (np.arange(len(order)) - nth)[task] + number
        chunk = _chunk_of_distance(size, num_chunks)[(rank[task] - rank[key]) % size]
        opens = np.ones(len(task), dtype=bool)                   # slices that follow each other are one shard
        opens[1:] = (task[1:] != task[:-1]) | (chunk[1:] != chunk[:-1])
        closes = np.append(np.flatnonzero(opens)[1:], len(task)) - 1 if len(task) else np.zeros(0, dtype=np.int64)
        task, chunk, kv_start, kv_stop = task[opens], chunk[opens], start[key[opens]], stop[key[closes]]
        last = np.where(count[document[whole]] > 1, num_chunks - 1, 0)  # a document on one rank waits for no keys
        return cls(
            np.concatenate([(stop - start)[task], (stop - start)[whole]]),
            np.concatenate([kv_stop - kv_start, stop[whole]]),
            np.concatenate([kv_stop == stop[task], np.ones(len(last), dtype=bool)]),
            np.concatenate([rank[task], rank[whole]]), np.concatenate([chunk, last]), layout.num_ranks, num_chunks)

    def seconds(self, attention: AttentionTime, backward: bool) -> np.ndarray:
        """[ranks, chunks] seconds of attention."""
        each, num_servers = attention.repeated(self.num_chunks), self.num_ranks * self.num_chunks
        found = each.servers(self.q_len, self.kv_len, self.rank * self.num_chunks + self.chunk, num_servers, backward,
                             aligned=self.is_aligned) / each.speeds(num_servers)
        return found.reshape(self.num_ranks, self.num_chunks)


def _cut_documents(layout: Layout, count: np.ndarray) -> np.ndarray:
    """[documents] whether to chunk: slices fill a tile, and longer documents leave room within _MOST_PIECES."""
    worth = (count > 1) & (layout.lengths >= count * TILE)
    longest = np.argsort(-layout.lengths, kind="stable")
    pieces = np.where(worth, count * (count + 1) // 2, 0)[longest]
    worth[longest[np.cumsum(pieces) > _MOST_PIECES]] = False
    return worth


def _chunk_of_distance(size: int, num_chunks: int) -> np.ndarray:
    """[distances] chunk with the keys of the rank at each distance in the ring."""
    distance = np.arange(size)
    return np.where(distance == 0, 0, 1 + (distance - 1) * (num_chunks - 1) // max(size - 1, 1))


def _arrives(size: int, num_chunks: int) -> np.ndarray:
    """[chunks] share of the ring's time after which each chunk has arrived."""
    ranks = np.bincount(_chunk_of_distance(size, num_chunks), minlength=num_chunks)
    return (np.cumsum(ranks) - 1) / (size - 1)
