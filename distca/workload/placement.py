"""Choose which slice of which document lives on which rank, so that queries can be computed at home.

A long document is cut into contiguous slices with about one rank's share of work each: early slices are long, late ones
short, and short documents fill up the ranks. Then no query moves and keys are sent only once per slice. Slices are cut
off at the end of a document, so that its beginning remains, whose queries need no keys of other ranks.

With several nodes, documents are placed on nodes as if each node were one rank, then on the ranks inside each node. A
document that fits a node stays in it, so that none of its keys cross nodes. A longer one is cut into as few parts as
its work requires, and its keys leave each node through all NICs (`slicing` cuts and places on one level).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from math import inf
from typing import NamedTuple

import numpy as np

from distca.columns import spread
from distca.workload.documents import MAX_LENGTH
from distca.workload.layout import Layout, layout_from_slices
from distca.workload.slicing import GRID, Slice, place_slices, squares

_SPREAD_TOKENS = 512   # minimum length of slices that are cut to send their keys through several NICs
_SLACK = 0.4           # fraction of capacity - share that placement on nodes reserves for placement inside nodes


class Cuts(NamedTuple):
    """Lengths of slices that a server's device computes efficiently; by default any length."""

    wave_tokens: int = 1           # queries that the device computes at once; longer slices are multiples of it
    queries_per_work: float = inf  # maximum length of a slice, per unit of a rank's work

    def longest(self, work_per_rank: float) -> int:
        """Return the maximum length of a slice, a multiple of the grid."""
        tokens = self.queries_per_work * work_per_rank
        return MAX_LENGTH if tokens >= MAX_LENGTH else max(int(tokens) // GRID, 1) * GRID


def place(
    first: np.ndarray, last: np.ndarray, work: np.ndarray, capacity: np.ndarray, tokens_per_rank: int, cuts: Cuts,
    between_nodes: bool = False,
) -> Layout:
    """Place documents on len(capacity) ranks: exactly tokens_per_rank tokens each, work within capacity if possible.

    Tokens [first, last) of each document are placed; `work` is the attention work of these queries. `capacity` is the
    maximum work of each rank. The tokens must fill the ranks exactly. Set `between_nodes` if
    each rank is on a node of its own.
    """
    slices = place_slices(first, last, work, capacity, np.full(len(capacity), tokens_per_rank), cuts.wave_tokens,
                          np.full(len(last), cuts.longest(float(work.sum()) / len(capacity))), between_nodes)
    document, start, stop, rank = _columns(slices)
    return layout_from_slices(last, document, start, stop, rank, len(capacity))


def _columns(slices: list[Slice]) -> np.ndarray:
    """Return document, start, stop and rank as columns, [4, slices]."""
    return np.fromiter(chain.from_iterable(slices), np.int64, 4 * len(slices)).reshape(-1, 4).T


class _WorkParts(NamedTuple):
    """Tokens [start, stop) of documents, with their work."""

    document: np.ndarray
    start: np.ndarray
    stop: np.ndarray
    work: np.ndarray

    def take(self, some: np.ndarray) -> _WorkParts:
        return _WorkParts(*(column[some] for column in self))

    def cut(self, part: np.ndarray, start: np.ndarray, stop: np.ndarray) -> _WorkParts:
        """Return tokens [start, stop) of the given parts, with work in proportion to causal pairs."""
        before, after = (squares(column[part]) for column in (self.start, self.stop))
        work = self.work[part] * (squares(stop) - squares(start)) / (after - before)
        return _WorkParts(self.document[part], start, stop, work)


class _Pool(NamedTuple):
    capacity: np.ndarray  # [ranks] maximum work of each
    share: np.ndarray     # [ranks] fair share of the total work
    tokens_per_rank: int
    wave_tokens: int
    longest: int          # maximum length of a slice
    length: np.ndarray    # [documents]


def place_by_levels(
    first: np.ndarray, last: np.ndarray, work: np.ndarray, capacity: np.ndarray, share: np.ndarray,
    tokens_per_rank: int, levels: Sequence[np.ndarray], cuts: Cuts,
) -> Layout:
    """Place documents on nodes, then inside them: `levels` has a group index per rank for each, outermost first.

    `share` is each rank's fair share of the total work; see `place` for the other arguments.
    """
    parts = _WorkParts(np.arange(len(last)), first, last, np.asarray(work, dtype=np.float64))
    pool = _Pool(capacity, share, tokens_per_rank, cuts.wave_tokens, cuts.longest(float(share.mean())), last)
    placed = list(_place_members(parts, np.arange(len(capacity)), pool, levels))
    document, start, stop = (np.concatenate([getattr(slices, name) for slices, _ in placed])
                             for name in ("document", "start", "stop"))
    return layout_from_slices(last, document, start, stop, np.concatenate([rank for _, rank in placed]), len(capacity))


def _place_members(
    parts: _WorkParts, members: np.ndarray, pool: _Pool, levels: Sequence[np.ndarray]
) -> Iterator[tuple[_WorkParts, np.ndarray]]:
    """Place parts on the ranks `members`, which they fill, level by level; yield slices and their ranks."""
    if not levels:
        yield from _place_in_node(parts, members, pool)
        return
    _, unit, count = np.unique(levels[0][members], return_inverse=True, return_counts=True)
    most = np.bincount(unit, weights=(1.0 - _SLACK) * pool.capacity[members] + _SLACK * pool.share[members])
    slices, where = _placed(parts, most, count * pool.tokens_per_rank, pool, np.full(len(parts.start), MAX_LENGTH),
                            between_nodes=True)
    here = np.split(np.argsort(where, kind="stable"), np.cumsum(np.bincount(where, minlength=len(count)))[:-1])
    inside = np.split(np.argsort(unit, kind="stable"), np.cumsum(count)[:-1])
    for some, ranks in zip(here, inside, strict=True):
        yield from _place_members(slices.take(some), members[ranks], pool, levels[1:])


def _placed(
    parts: _WorkParts, most: np.ndarray, tokens: np.ndarray, pool: _Pool, longest: np.ndarray, *, between_nodes: bool
) -> tuple[_WorkParts, np.ndarray]:
    """Place parts on units; return slices and their units."""
    part, start, stop, where = _columns(place_slices(parts.start, parts.stop, parts.work, most, tokens,
                                                     pool.wave_tokens, longest, between_nodes))
    return parts.cut(part, start, stop), where


def _place_in_node(parts: _WorkParts, members: np.ndarray, pool: _Pool) -> Iterator[tuple[_WorkParts, np.ndarray]]:
    """Place parts on the ranks of one node, so that keys that other nodes need leave through all NICs."""
    tokens, most = np.full(len(members), pool.tokens_per_rank), pool.capacity[members]
    heads, where, is_head = _deal_heads(parts, pool.longest, tokens, int(members[0]) // len(members))
    yield heads, members[where]
    parts = parts.take(~is_head)
    tokens -= np.bincount(where, heads.stop - heads.start, len(members)).astype(np.int64)
    most = np.maximum(most - np.bincount(where, heads.work, len(members)), 0.0)
    is_part = (parts.start > 0) | (parts.stop < pool.length[parts.document])
    even = np.maximum(-(-(parts.stop - parts.start) // len(members)), _SPREAD_TOKENS)
    longest = np.minimum(np.where(is_part, even, MAX_LENGTH), pool.longest)
    slices, where = _placed(parts, most, tokens, pool, longest, between_nodes=False)
    yield slices, members[where]


def _deal_heads(
    parts: _WorkParts, longest: int, tokens: np.ndarray, turn: int
) -> tuple[_WorkParts, np.ndarray, np.ndarray]:
    """Deal the early parts of documents that also have a later part here to a node's ranks, in slices of whole tiles.

    Every other node of the document needs these keys, so they leave through many NICs. Node `turn` begins at another
    rank than its neighbours: a document's early parts are short, and its keys arrive through the NICs with the same
    local ranks. Return the slices, the rank of each, and which parts were dealt: none if a rank has too few `tokens`.
    """
    order = np.lexsort((parts.start, parts.document))
    is_head = np.zeros(len(order), dtype=bool)
    is_head[order[:-1]] = parts.document[order[1:]] == parts.document[order[:-1]]
    heads = np.flatnonzero(is_head)
    length = parts.stop[heads] - parts.start[heads]
    size = np.minimum(-(-length // (len(tokens) * GRID)) * GRID, longest)
    head, nth = spread(-(-length // size))
    start = parts.start[heads[head]] + nth * size[head]
    stop = np.minimum(start + size[head], parts.stop[heads[head]])
    where = (turn + np.arange(len(head))) % len(tokens)
    if (np.bincount(where, stop - start, len(tokens)) > tokens).any():
        head, start, stop, where, is_head = head[:0], start[:0], stop[:0], where[:0], np.zeros_like(is_head)
    return parts.cut(heads[head], start, stop), where, is_head
