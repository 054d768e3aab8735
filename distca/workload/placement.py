"""Choose which slice of which document lives on which rank, so that queries can be computed at home.

A long document is cut into contiguous slices with about one rank's share of work each: early slices are long, late ones
short, and short documents fill up the ranks. Then no query moves and keys are sent only once per slice. Slices are cut
off at the end of a document, so that its beginning remains, whose queries need no keys of other ranks.

With several nodes, documents are placed on nodes as if each node were one rank, then on the ranks inside each node. A
document that fits a node stays in it, so that none of its keys cross nodes. A longer one is cut into as few parts as
its work requires. If it needs more than a few nodes, all of them need its first keys, which would leave through the
NICs of one node: each node then gets a slice from both ends, so that all nodes send about the same. A node needs the
keys before its late slice anyway, so its early slice costs no bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush, heapreplace
from itertools import chain
from math import inf, sqrt
from typing import NamedTuple

import numpy as np

from distca.columns import spread
from distca.workload.documents import MAX_LENGTH
from distca.workload.layout import Layout, layout_from_slices

_GRID = 128            # slices begin at multiples of this position, so that they consist of whole kernel tiles
_DENSITY_ITERATIONS = 6
_FULL = 1.05           # work over capacity above which a placement is tried again with another guess of the density
_PARTS_OF_MEAN = (1.0, 0.5, 0.25)
_FEW_UNITS = 3.0       # a document with this many units' work is cut from both ends, down to a middle of this work
_SPREAD_TOKENS = 512   # minimum length of slices that are cut to send their keys through several NICs
_SLACK = 0.4           # fraction of capacity - share that placement on nodes reserves for placement inside nodes

Slice = tuple[int, int, int, int]  # document, start, stop, rank


class Cuts(NamedTuple):
    """Lengths of slices that a server's device computes efficiently; by default any length."""

    wave_tokens: int = 1           # queries that the device computes at once; longer slices are multiples of it
    queries_per_work: float = inf  # maximum length of a slice, per unit of a rank's work

    def longest(self, work_per_rank: float) -> int:
        """Return the maximum length of a slice, a multiple of the grid."""
        tokens = self.queries_per_work * work_per_rank
        return MAX_LENGTH if tokens >= MAX_LENGTH else max(int(tokens) // _GRID, 1) * _GRID


def place(
    first: np.ndarray, last: np.ndarray, work: np.ndarray, capacity: np.ndarray, tokens_per_rank: int, cuts: Cuts,
    both_ends: bool = False,
) -> Layout:
    """Place documents on len(capacity) ranks: exactly tokens_per_rank tokens each, work within capacity if possible.

    Tokens [first, last) of each document are placed; `work` is the attention work of these queries. `capacity` is the
    maximum work of each rank. The tokens must fill the ranks exactly. `both_ends` cuts long documents from both ends.
    """
    slices = place_slices(first, last, work, capacity, np.full(len(capacity), tokens_per_rank), cuts.wave_tokens,
                          np.full(len(last), cuts.longest(float(work.sum()) / len(capacity))), both_ends)
    document, start, stop, rank = _columns(slices)
    return layout_from_slices(last, document, start, stop, rank, len(capacity))


def place_slices(
    first: np.ndarray, last: np.ndarray, work: np.ndarray, capacity: np.ndarray, tokens: np.ndarray, wave_tokens: int,
    longest: np.ndarray, both_ends: bool,
) -> list[Slice]:
    """Return slices as in `place`, on units with `tokens` tokens each: ranks, or nodes as a whole.

    `longest` [documents] is the maximum length of a slice. The algorithm needs a guess of the density (work per token)
    of the light tokens that fill up units. The first guess assumes whole documents; if it overfills a unit because
    documents are long, other guesses follow. The placement that overfills units least is returned.
    """
    assert int((last - first).sum()) == int(tokens.sum())
    documents = _Documents.of(first, last, work, longest)
    both_ends = both_ends and 2 * int((last - first).max()) <= int(tokens.sum())  # else no light tokens fill up units
    best, least = None, inf
    for light_density in documents.light_densities(capacity, float(tokens.mean())):
        slices, spare = _place_with_density(documents, light_density, capacity, tokens, wave_tokens, both_ends)
        serves = capacity > 0
        fullest = float((1.0 - np.array(spare)[serves] / capacity[serves]).max(initial=0.0))
        if fullest < least:
            best, least = slices, fullest
        if least <= _FULL:
            break
    assert best is not None
    return best


def _columns(slices: list[Slice]) -> np.ndarray:
    """Return document, start, stop and rank as columns, [4, slices]."""
    return np.fromiter(chain.from_iterable(slices), np.int64, 4 * len(slices)).reshape(-1, 4).T


class _Documents(NamedTuple):
    """Tokens [first, last) of documents, with their work."""

    first: np.ndarray
    last: np.ndarray
    work: np.ndarray
    rate: np.ndarray     # work per causal pair
    longest: np.ndarray  # maximum length of a slice

    @classmethod
    def of(cls, first: np.ndarray, last: np.ndarray, work: np.ndarray, longest: np.ndarray) -> _Documents:
        pairs = 0.5 * (squares(last) - squares(first))
        return cls(first, last, work, work / pairs, longest)

    def light_densities(self, capacity: np.ndarray, tokens_per_rank: float) -> Iterator[float]:
        """Yield guesses of the work per token of the light tokens that fill up ranks."""
        lengths = self.last - self.first
        yield _light_density(lengths, self.work, capacity, tokens_per_rank)
        mean = float(self.work.sum() / lengths.sum())
        for part in _PARTS_OF_MEAN:                              # assume tokens with less work than part * mean
            stop = np.clip(part * mean / self.rate, self.first, self.last)
            tokens = float((stop - self.first).sum())
            yield float((0.5 * self.rate * (squares(stop) - squares(self.first))).sum()) / max(tokens, 1.0)


def squares(position: np.ndarray) -> np.ndarray:
    """Return squares as products: unlike those of pow, their roundings are the same on every processor."""
    exact = position.astype(np.float64)
    return exact * exact


def _place_with_density(
    documents: _Documents, light_density: float, capacity: np.ndarray, tokens: np.ndarray, wave_tokens: int,
    both_ends: bool,
) -> tuple[list[Slice], list[float]]:
    """Return slices and the spare capacity of each rank, given the density of the light tokens that fill up ranks."""
    slices: list[Slice] = []
    rates, begins, longest = documents.rate.tolist(), documents.first.tolist(), documents.longest.tolist()
    dense, light = _split(documents.last - documents.first, documents.last, documents.work, light_density)
    free: list[int] = tokens.tolist()
    spare = capacity.tolist()                                    # work that each rank can still take
    budget = [(light_density * free[r] - float(c), r) for r, c in enumerate(capacity)]  # negated: a min-heap
    heapify(budget)

    leftover: list[tuple[int, int, int]] = []                    # (-tokens, document, stop) without a home yet
    while dense:
        _, document, stop = heappop(dense)
        begin, rate = begins[document], rates[document]
        center = light_density / rate                            # tokens after this position are denser than light ones
        excess = rate * 0.5 * (stop * stop - begin * begin) - light_density * (stop - begin)
        if excess <= 0 or not budget:
            leftover.append((begin - stop, document, stop))
            continue
        room, rank = -budget[0][0], budget[0][1]
        if free[rank] < min(stop - begin, _GRID) or room <= 0:
            heappop(budget)                                      # no room for dense tokens; light ones fill it up
            heappush(dense, (-excess, document, stop))
            continue
        start, most = begin, min(free[rank], longest[document])
        if both_ends and excess > _FEW_UNITS * room:
            head, tail = _carve_both(begin, stop, room / excess, wave_tokens)
            taken = head - begin + stop - tail
            if begin < head < tail < stop and taken <= most:
                slices += [(document, begin, head, rank), (document, tail, stop, rank)]
                used = rate * 0.5 * (head * head - begin * begin + stop * stop - tail * tail)
                free[rank] -= taken
                spare[rank] -= used
                heapreplace(budget, (used - light_density * taken - room, rank))
                begins[document] = head
                heappush(dense, (used - light_density * taken - excess, document, tail))
                continue
        if excess > room or stop - begin > most:
            start = max(_carve(stop, center, room / rate, most, wave_tokens), begin)
            if start >= stop:
                heappop(budget)
                heappush(dense, (-excess, document, stop))
                continue
        slices.append((document, start, stop, rank))
        free[rank] -= stop - start
        used = rate * 0.5 * (stop * stop - start * start)
        spare[rank] -= used
        heapreplace(budget, (used - light_density * (stop - start) - room, rank))
        if start > begin:
            rest = rate * 0.5 * (start * start - begin * begin) - light_density * (start - begin)
            heappush(dense, (-rest, document, start))

    ends = documents.last.tolist()
    leftover += [(begins[document] - ends[document], document, ends[document]) for document in light]
    _fill(begins, rates, longest, leftover, free, spare, slices)
    return slices, spare


def _carve(stop: int, center: float, room: float, free: int, wave_tokens: int) -> int:
    """Return the start of a slice up to `stop` that uses up the room: on the grid, with at most `free` tokens."""
    squared = (stop - center) * (stop - center) - 2.0 * room     # not **: roundings of pow depend on the C library
    start = center + sqrt(squared) if squared > 0 and stop > center else 0.0
    start = max(start, stop - free)
    if stop - start > wave_tokens:
        start = stop - (stop - start) // wave_tokens * wave_tokens
    return -(-int(np.ceil(start)) // _GRID) * _GRID


def _carve_both(begin: int, stop: int, part: float, wave_tokens: int) -> tuple[int, int]:
    """Cut [begin, stop) at both ends, on the grid; return the first slice's end and the last slice's start.

    The two slices have about equal length, and then `part` of the tokens is `part` of the work.
    """
    tokens = int(0.5 * part * (stop - begin))
    if tokens > wave_tokens:
        tokens = tokens // wave_tokens * wave_tokens
    return (begin + tokens) // _GRID * _GRID, -(-(stop - tokens) // _GRID) * _GRID


def _light_density(lengths: np.ndarray, work: np.ndarray, capacity: np.ndarray, tokens_per_rank: float) -> float:
    """Return the work per token of the short documents that fill up the ranks of long ones, by fixed-point iteration.

    The denser short documents are, the more ranks the long ones need, and the more short ones fill these ranks up.
    """
    share = float(capacity.mean())
    heavy = (work > share) | (lengths > tokens_per_rank)
    if heavy.all():
        return 0.0
    light = np.sort(lengths[~heavy])
    filled, filled_work = np.cumsum(light), np.cumsum(np.sort(work[~heavy]))
    heavy_work, heavy_tokens = float(work[heavy].sum()), float(lengths[heavy].sum())
    density = 0.0
    for _ in range(_DENSITY_ITERATIONS):
        budget = max(share - density * tokens_per_rank, 0.1 * share)
        ranks = min((heavy_work - density * heavy_tokens) / budget, len(capacity))
        tokens = max(ranks * tokens_per_rank - heavy_tokens, 0.05 * float(lengths.sum()))
        count = min(int(np.searchsorted(filled, tokens)), len(light) - 1)
        density = float(filled_work[count]) / float(filled[count])
    return density


def _split(
    lengths: np.ndarray, last: np.ndarray, work: np.ndarray, light_density: float
) -> tuple[list[tuple[float, int, int]], list[int]]:
    """Return a heap (-excess work, document, end) of the documents denser than light_density, and the others."""
    excess = work - light_density * lengths
    some = np.flatnonzero(excess > 0)
    dense = list(zip((-excess[some]).tolist(), some.tolist(), last[some].tolist(), strict=True))
    heapify(dense)
    return dense, np.flatnonzero(excess <= 0).tolist()


def _fill(
    begins: list[int], rates: list[float], longest: list[int], queue: list[tuple[int, int, int]], free: list[int],
    spare: list[float], slices: list[Slice],
) -> None:
    """Fill all ranks: documents longest first, each to the rank with the most spare capacity per free token.

    Entries (-tokens, document, stop) of the queue are tokens of a document before `stop` that have no home yet. If a
    document needs several slices, each is placed on another rank as long as there are ranks without one.
    """
    ranks = [(-spare[rank] / tokens, rank) for rank, tokens in enumerate(free) if tokens > 0]
    heapify(ranks)
    narrow: list[tuple[int, int]] = []                           # (-free, rank): too few for the current document
    aside: list[int] = []                                        # ranks with a slice of the current document
    for _, document, stop in sorted(queue):
        rate, start = rates[document], begins[document]
        size = stop - start
        most = size if size <= longest[document] else longest[document]
        while narrow and -narrow[0][0] >= most:
            rank = heappop(narrow)[1]
            heappush(ranks, (-spare[rank] / free[rank], rank))
        while ranks and free[ranks[0][1]] < most:
            rank = heappop(ranks)[1]
            heappush(narrow, (-free[rank], rank))
        if most == size and ranks:                               # nearly all documents are one slice
            rank = ranks[0][1]
            slices.append((document, start, stop, rank))
            free[rank] -= size
            spare[rank] -= rate * 0.5 * (stop * stop - start * start)
            if free[rank]:
                heapreplace(ranks, (-spare[rank] / free[rank], rank))
            else:
                heappop(ranks)
            continue
        while start < stop:
            while ranks and free[ranks[0][1]] < min(most, stop - start):
                rank = heappop(ranks)[1]
                heappush(narrow, (-free[rank], rank))
            if not ranks and aside:
                _restore(aside, ranks, spare, free)
                continue
            rank = heappop(ranks)[1] if ranks else heappop(narrow)[1]
            end = min(start + min(most, free[rank]), stop)
            slices.append((document, start, end, rank))
            free[rank] -= end - start
            spare[rank] -= rate * 0.5 * (end * end - start * start)
            start = end
            if free[rank]:
                aside.append(rank)
        _restore(aside, ranks, spare, free)


def _restore(aside: list[int], ranks: list[tuple[float, int]], spare: list[float], free: list[int]) -> None:
    """Move the ranks of `aside` back to the heap."""
    while aside:
        rank = aside.pop()
        heappush(ranks, (-spare[rank] / free[rank], rank))


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
        unit, count, most = np.arange(len(members)), np.ones(len(members), dtype=np.int64), pool.capacity[members]
    else:
        _, unit, count = np.unique(levels[0][members], return_inverse=True, return_counts=True)
        most = np.bincount(unit, weights=(1.0 - _SLACK) * pool.capacity[members] + _SLACK * pool.share[members])
    longest = np.full(len(parts.start), MAX_LENGTH)
    if not levels:                                               # keys that other nodes need leave through all NICs
        is_part = (parts.start > 0) | (parts.stop < pool.length[parts.document])
        even = np.maximum(-(-(parts.stop - parts.start) // len(members)), _SPREAD_TOKENS)
        longest = np.minimum(np.where(is_part, even, MAX_LENGTH), pool.longest)
    tokens = count * pool.tokens_per_rank
    if not levels:
        heads, where, is_head = _deal_heads(parts, longest, tokens)
        yield heads, members[where]
        parts, longest = parts.take(~is_head), longest[~is_head]
        tokens = tokens - np.bincount(where, heads.stop - heads.start, len(members)).astype(np.int64)
        most = np.maximum(most - np.bincount(where, heads.work, len(members)), 0.0)
    placed = place_slices(parts.start, parts.stop, parts.work, most, tokens, pool.wave_tokens, longest, bool(levels))
    part, start, stop, where = _columns(placed)
    slices = parts.cut(part, start, stop)
    if not levels:
        yield slices, members[where]
        return
    here = np.split(np.argsort(where, kind="stable"), np.cumsum(np.bincount(where, minlength=len(count)))[:-1])
    inside = np.split(np.argsort(unit, kind="stable"), np.cumsum(count)[:-1])
    for some, ranks in zip(here, inside, strict=True):
        yield from _place_members(slices.take(some), members[ranks], pool, levels[1:])


def _deal_heads(
    parts: _WorkParts, longest: np.ndarray, tokens: np.ndarray
) -> tuple[_WorkParts, np.ndarray, np.ndarray]:
    """Deal the early parts of documents that also have a later part here to a node's ranks in turn.

    Every other node of the document needs these keys, so they leave through all NICs. Return their slices, the rank of
    each, and which parts were dealt: none if a rank has too few `tokens`.
    """
    order = np.lexsort((parts.start, parts.document))
    is_head = np.zeros(len(order), dtype=bool)
    is_head[order[:-1]] = parts.document[order[1:]] == parts.document[order[:-1]]
    heads = np.flatnonzero(is_head)
    size, length = -(-longest[heads] // _GRID) * _GRID, parts.stop[heads] - parts.start[heads]
    head, nth = spread(-(-length // size))
    start = parts.start[heads[head]] + nth * size[head]
    stop = np.minimum(start + size[head], parts.stop[heads[head]])
    where = np.arange(len(head)) % len(tokens)
    if (np.bincount(where, stop - start, len(tokens)) > tokens).any():
        head, start, stop, where, is_head = head[:0], start[:0], stop[:0], where[:0], np.zeros_like(is_head)
    return parts.cut(heads[head], start, stop), where, is_head
