"""Cut documents into slices and place them on the units of one level: ranks, or nodes as a whole.

Units have a given number of tokens and a capacity for work. Dense documents, which have more work per token than the
light tokens that fill up units, come first, those with the most work first: whole if they fit, else cut so that a slice
uses up a unit's room. Light documents then fill all units exactly.

Between nodes, every slice brings all keys before it to its node, so a cut never fills up the last per cent of a node.
A document with several nodes' work is cut from both ends, as all its nodes need its first keys: each gets an early and
a late slice, so that all nodes send about the same. A node needs the keys before its late slice anyway, so its early
slice costs no bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush, heapreplace
from math import inf, sqrt
from typing import NamedTuple

import numpy as np

GRID = 128             # slices begin at multiples of this position, so that they consist of whole kernel tiles
_DENSITY_ITERATIONS = 6
_FULL = 1.05           # work over capacity above which a placement is tried again with another guess of the density
_PARTS_OF_MEAN = (1.0, 0.5, 0.25)
_FEW_UNITS = 2.0       # a document with this many times a node's room is cut from both ends
_WORTH_A_SLICE = 0.02  # part of a node's capacity that must be free for a slice of a document that is cut

Slice = tuple[int, int, int, int]  # document, start, stop, unit


def place_slices(
    first: np.ndarray, last: np.ndarray, work: np.ndarray, capacity: np.ndarray, tokens: np.ndarray, wave_tokens: int,
    longest: np.ndarray, between_nodes: bool,
) -> list[Slice]:
    """Return slices as in `place`, on units with `tokens` tokens each: ranks, or nodes as a whole.

    `longest` [documents] is the maximum length of a slice. The algorithm needs a guess of the density (work per token)
    of the light tokens that fill up units. The first guess assumes whole documents; if it overfills a unit because
    documents are long, other guesses follow. The placement that overfills units least is returned.
    """
    assert int((last - first).sum()) == int(tokens.sum())
    documents = _Documents.of(first, last, work, longest)
    if 2 * int((last - first).max()) > int(tokens.sum()):
        between_nodes = False                                    # too few light tokens to fill up nodes
    best, least = None, inf
    for light_density in documents.light_densities(capacity, float(tokens.mean())):
        slices, spare = _place_with_density(documents, light_density, capacity, tokens, wave_tokens, between_nodes)
        serves = capacity > 0
        fullest = float((1.0 - np.array(spare)[serves] / capacity[serves]).max(initial=0.0))
        if fullest < least:
            best, least = slices, fullest
        if least <= _FULL:
            break
    assert best is not None
    return best


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
    between_nodes: bool,
) -> tuple[list[Slice], list[float]]:
    """Return slices and the spare capacity of each rank, given the density of the light tokens that fill up ranks."""
    slices: list[Slice] = []
    rates, begins, longest = documents.rate.tolist(), documents.first.tolist(), documents.longest.tolist()
    dense, light = _split(documents.last - documents.first, documents.last, documents.work, light_density)
    free, limits = tokens.tolist(), capacity.tolist()
    spare: list[float] = limits.copy()                                        # work that each rank can still take
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
        least = _WORTH_A_SLICE * limits[rank] if between_nodes and excess > room else 0.0
        if free[rank] < min(stop - begin, GRID) or room <= least:
            heappop(budget)                                      # no room for dense tokens; light ones fill it up
            heappush(dense, (-excess, document, stop))
            continue
        start, most = begin, min(free[rank], longest[document])
        if between_nodes and excess > _FEW_UNITS * room:
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
    return -(-int(np.ceil(start)) // GRID) * GRID


def _carve_both(begin: int, stop: int, part: float, wave_tokens: int) -> tuple[int, int]:
    """Cut [begin, stop) at both ends, on the grid; return the first slice's end and the last slice's start.

    The two slices have about equal length, and then `part` of the tokens is `part` of the work.
    """
    tokens = int(0.5 * part * (stop - begin))
    if tokens > wave_tokens:
        tokens = tokens // wave_tokens * wave_tokens
    return (begin + tokens) // GRID * GRID, -(-(stop - tokens) // GRID) * GRID


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
