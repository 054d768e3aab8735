"""One rank's part of a plan in two hops: between nodes, then inside one.

What several ranks of a node need crosses to it once. A home sends it to one rank of that node, its gateway: the rank
with the same local rank there, so that all NICs carry a share. Gateways then pass it on inside. Results take the way
back: they are merged or summed at the gateway and cross once.

Each hop is an ordinary dispatch. The first brings a rank's own tokens that its node needs, and those it is the gateway
of, into one buffer, the relay. In the second the relay is the row, and the servers' buffers are those of one hop.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from distca.dispatch.build import Offsets, side_of, task_columns, tokens_of_rows, touching, travels
from distca.dispatch.tables import RankTables, Runs, Side
from distca.planning.plan import Plan
from distca.planning.traffic import Gateways, TokenRanges, key_ranges, query_ranges
from distca.validation import UserError

_NO_TASKS = (np.empty(0, dtype=np.int64),) * 5


@dataclass(frozen=True, slots=True)
class HopTables:
    """The two hops of one rank; peers of the inner one are numbered inside the node."""

    outer: RankTables
    inner: RankTables
    crosses: bool  # some rank sends to another node: the same on every rank
    passes: bool   # some rank of this node sends to another of it: the same on all of them


def build_hops(plan: Plan, rank: int, node: np.ndarray) -> HopTables:
    """The tables of one rank of a pool whose servers are on `node` [servers]."""
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
        inside = gateways.relayed(_where(ranges_of(layout, tasks), is_here))
        at = np.zeros(len(inside.start), dtype=np.int64)         # offset in the relay; only this rank's own counts
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


def _where(ranges: TokenRanges, is_here: np.ndarray) -> TokenRanges:
    """The ranges that servers here need."""
    kept = is_here[ranges.server]
    return TokenRanges(*(getattr(ranges, name)[kept] for name in TokenRanges.__slots__))


def _numbered(side: Side, local: np.ndarray) -> Side:
    """The side with peers by their local rank, which keeps their order."""
    send, receive = (Runs(local[runs.peer], runs.start, runs.length) for runs in (side.send, side.receive))
    return Side(send, receive, side.local, side.buffer_tokens, side.parts)
