"""Choose which slice of which document lives where, so that queries can be computed at home.

A long document is cut into contiguous slices, each about one rank's share of work: early slices long, late ones short,
with short documents filling up the tokens. Then every query stays home and only keys travel, once per slice. Slices
are carved from the document's end, so that the remainder is its beginning, whose queries need no keys of other ranks.

With several nodes, documents are placed over nodes as if each were one rank, then inside every node over its ranks. A
document that fits a node stays in it, so that none of its keys cross nodes; a longer one is cut into as few parts as
its work demands.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush, heapreplace
from math import inf, sqrt
from typing import NamedTuple

import numpy as np

from distca.workload.documents import MAX_LENGTH
from distca.workload.layout import Layout, layout_from_slices

_GRID = 128  # slices begin on this grid of their document, so that shards of whole tiles fill them
_DENSITY_STEPS = 6
_FULL = 1.05                # times its capacity: a rank with more was filled with tokens denser than guessed
_PARTS_OF_MEAN = (1.0, 0.5, 0.25)
_SPREAD_TOKENS = 512  # the fewest tokens of a slice that is cut so that its keys leave by several NICs
_SLACK = 0.4  # part of what a rank may have above its share that nodes leave to the placement inside them

Slice = tuple[int, int, int, int]  # document, start, stop, rank


class Cuts(NamedTuple):
    """Slices that suit a server's device, which computes work item by item; by default any do."""

    wave_tokens: int = 1              # queries computed at once: longer slices are whole multiples of it
    queries_per_work: float = inf     # the most queries of one document on a rank, per unit of the rank's work

    def longest(self, work_per_rank: float) -> int:
        """Return the most tokens of a slice."""
        tokens = self.queries_per_work * work_per_rank
        return MAX_LENGTH if tokens >= MAX_LENGTH else max(int(tokens) // _GRID, 1) * _GRID


def place(
    first: np.ndarray, last: np.ndarray, work: np.ndarray, capacity: np.ndarray, tokens_per_rank: int,
    cuts: Cuts,
) -> Layout:
    """Lay documents over len(capacity) ranks: exactly tokens_per_rank tokens each, work within capacity where it can.

    Of each document tokens [first, last) are laid, `work` is their attention work with all that is before them, and
    `capacity` the most that each rank should get. The tokens must fill the ranks exactly.
    """
    slices = place_slices(first, last, work, capacity, np.full(len(capacity), tokens_per_rank), cuts.wave_tokens,
                          np.full(len(last), cuts.longest(float(work.sum()) / len(capacity))))
    document, start, stop, rank = _columns(slices)
    return layout_from_slices(last, document, start, stop, rank, len(capacity))


def place_slices(
    first: np.ndarray, last: np.ndarray, work: np.ndarray, capacity: np.ndarray, tokens: np.ndarray, wave_tokens: int,
    longest: np.ndarray,
) -> list[Slice]:
    """Return the slices of `place` over units of `tokens` each: ranks, or nodes whose ranks share what they get.

    `longest` [documents] is the most tokens of each that a slice has. The density of the tokens that fill units up is
    guessed: from whole documents first, then from tokens if that overfills a unit because documents are long. The
    guess that overfills units least is taken.
    """
    assert int((last - first).sum()) == int(tokens.sum())
    documents = _Documents.of(first, last, work, longest)
    best, least = None, inf
    for light_density in documents.light_densities(capacity, float(tokens.mean())):
        slices, spare = _placed(documents, light_density, capacity, tokens, wave_tokens)
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
    return np.array(slices, dtype=np.int64).reshape(-1, 4).T


class _Documents(NamedTuple):
    """Tokens [first, last) of documents, with their work and its rate per pair."""

    first: np.ndarray
    last: np.ndarray
    work: np.ndarray
    rate: np.ndarray     # work per pair
    longest: np.ndarray  # tokens of a slice

    @classmethod
    def of(cls, first: np.ndarray, last: np.ndarray, work: np.ndarray, longest: np.ndarray) -> _Documents:
        pairs = 0.5 * (squares(last) - squares(first))
        return cls(first, last, work, work / pairs, longest)

    def light_densities(self, capacity: np.ndarray, tokens_per_rank: float) -> Iterator[float]:
        """Yield guesses of the work per token of the documents that fill ranks up."""
        lengths = self.last - self.first
        yield _light_density(lengths, self.work, capacity, tokens_per_rank)
        mean = float(self.work.sum() / lengths.sum())
        for part in _PARTS_OF_MEAN:                              # tokens with less work than this part of the mean
            stop = np.clip(part * mean / self.rate, self.first, self.last)
            tokens = float((stop - self.first).sum())
            yield float((0.5 * self.rate * (squares(stop) - squares(self.first))).sum()) / max(tokens, 1.0)


def squares(position: np.ndarray) -> np.ndarray:
    """Return squares as products, whose rounding is the same on every processor."""
    exact = position.astype(np.float64)
    return exact * exact


def _placed(
    documents: _Documents, light_density: float, capacity: np.ndarray, tokens: np.ndarray, wave_tokens: int
) -> tuple[list[Slice], list[float]]:
    """Return slices, and the work that each rank could still take, if light tokens of that density fill ranks up."""
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
        center = light_density / rate                            # tokens past this position are denser than light ones
        excess = rate * 0.5 * (stop * stop - begin * begin) - light_density * (stop - begin)
        if excess <= 0 or not budget:
            leftover.append((begin - stop, document, stop))
            continue
        room, rank = -budget[0][0], budget[0][1]
        if free[rank] < min(stop - begin, _GRID) or room <= 0:
            heappop(budget)                                      # full: its other tokens are for light documents
            heappush(dense, (-excess, document, stop))
            continue
        start, most = begin, min(free[rank], longest[document])
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
    """Return where a slice that ends at `stop` begins to use up the room: on the grid, with at most `free` tokens."""
    squared = (stop - center) * (stop - center) - 2.0 * room     # ** calls the C library's pow, whose rounding differs
    start = center + sqrt(squared) if squared > 0 and stop > center else 0.0
    start = max(start, stop - free)
    if stop - start > wave_tokens:
        start = stop - (stop - start) // wave_tokens * wave_tokens
    return -(-int(np.ceil(start)) // _GRID) * _GRID


def _light_density(lengths: np.ndarray, work: np.ndarray, capacity: np.ndarray, tokens_per_rank: float) -> float:
    """Return the work per token of the short documents that will fill up the ranks of long ones, by fixed point.

    The denser those are, the more ranks the long documents need and the more short documents it takes.
    """
    share = float(capacity.mean())
    heavy = (work > share) | (lengths > tokens_per_rank)
    if heavy.all():
        return 0.0
    light = np.sort(lengths[~heavy])
    filled, filled_work = np.cumsum(light), np.cumsum(np.sort(work[~heavy]))
    heavy_work, heavy_tokens = float(work[heavy].sum()), float(lengths[heavy].sum())
    density = 0.0
    for _ in range(_DENSITY_STEPS):
        budget = max(share - density * tokens_per_rank, 0.1 * share)
        ranks = min((heavy_work - density * heavy_tokens) / budget, len(capacity))
        tokens = max(ranks * tokens_per_rank - heavy_tokens, 0.05 * float(lengths.sum()))
        count = min(int(np.searchsorted(filled, tokens)), len(light) - 1)
        density = float(filled_work[count]) / float(filled[count])
    return density


def _split(
    lengths: np.ndarray, last: np.ndarray, work: np.ndarray, light_density: float
) -> tuple[list[tuple[float, int, int]], list[int]]:
    """Return the documents denser than light ones, as a heap of (-excess work, document, end), and the others."""
    excess = work - light_density * lengths
    some = np.flatnonzero(excess > 0)
    dense = list(zip((-excess[some]).tolist(), some.tolist(), last[some].tolist(), strict=True))
    heapify(dense)
    return dense, np.flatnonzero(excess <= 0).tolist()


def _fill(
    begins: list[int], rates: list[float], longest: list[int], queue: list[tuple[int, int, int]], free: list[int],
    spare: list[float], slices: list[Slice],
) -> None:
    """Fill every rank to its last token: longest first, to the rank with the most spare work per token.

    The queue holds (-tokens, document, stop): tokens of a document before `stop` without a home. A document of several
    slices goes to one rank after the other.
    """
    ranks = [(-spare[rank] / tokens, rank) for rank, tokens in enumerate(free) if tokens > 0]
    heapify(ranks)
    narrow: list[tuple[int, int]] = []                           # (-free, rank): too narrow for the current document
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
                _back(aside, ranks, spare, free)
                continue
            rank = heappop(ranks)[1] if ranks else heappop(narrow)[1]
            end = min(start + min(most, free[rank]), stop)
            slices.append((document, start, end, rank))
            free[rank] -= end - start
            spare[rank] -= rate * 0.5 * (end * end - start * start)
            start = end
            if free[rank]:
                aside.append(rank)
        _back(aside, ranks, spare, free)


def _back(aside: list[int], ranks: list[tuple[float, int]], spare: list[float], free: list[int]) -> None:
    while aside:
        rank = aside.pop()
        heappush(ranks, (-spare[rank] / free[rank], rank))


class _WorkParts(NamedTuple):
    """Tokens [start, stop) of documents and their work."""

    document: np.ndarray
    start: np.ndarray
    stop: np.ndarray
    work: np.ndarray

    def cut(self, part: np.ndarray, start: np.ndarray, stop: np.ndarray) -> _WorkParts:
        """Return tokens [start, stop) of the given parts; work is divided by causal pairs."""
        before, after = (squares(column[part]) for column in (self.start, self.stop))
        return _WorkParts(self.document[part], start, stop,
                      self.work[part] * (squares(stop) - squares(start)) / (after - before))


@dataclass(frozen=True, slots=True, eq=False)
class _Pool:
    capacity: np.ndarray  # [ranks] the most work that each should get
    share: np.ndarray     # [ranks] its part of all the work
    tokens_per_rank: int
    wave_tokens: int
    longest: int          # tokens of a slice
    length: np.ndarray    # [documents]


def place_by_levels(
    first: np.ndarray, last: np.ndarray, work: np.ndarray, capacity: np.ndarray, share: np.ndarray,
    tokens_per_rank: int, levels: Sequence[np.ndarray], cuts: Cuts,
) -> Layout:
    """Return the layout of `place` by `levels` [ranks] each, outermost first; `share` is a rank's part of all work."""
    parts = _WorkParts(np.arange(len(last)), first, last, np.asarray(work, dtype=np.float64))
    pool = _Pool(capacity, share, tokens_per_rank, cuts.wave_tokens, cuts.longest(float(share.mean())), last)
    placed = list(_inside(parts, np.arange(len(capacity)), pool, levels))
    document, start, stop = (np.concatenate([getattr(slices, name) for slices, _ in placed])
                             for name in ("document", "start", "stop"))
    return layout_from_slices(last, document, start, stop, np.concatenate([rank for _, rank in placed]), len(capacity))


def _inside(
    parts: _WorkParts, members: np.ndarray, pool: _Pool, levels: Sequence[np.ndarray]
) -> Iterator[tuple[_WorkParts, np.ndarray]]:
    """Yield slices of the parts and their ranks, which are all `members`: the parts fill them."""
    if not levels:
        unit, count, most = np.arange(len(members)), np.ones(len(members), dtype=np.int64), pool.capacity[members]
    else:
        _, unit, count = np.unique(levels[0][members], return_inverse=True, return_counts=True)
        most = np.bincount(unit, weights=(1.0 - _SLACK) * pool.capacity[members] + _SLACK * pool.share[members])
    longest = np.full(len(parts.start), MAX_LENGTH)
    if not levels:                                               # what other nodes read leaves by all NICs of its node
        is_part = (parts.start > 0) | (parts.stop < pool.length[parts.document])
        even = np.maximum(-(-(parts.stop - parts.start) // len(members)), _SPREAD_TOKENS)
        longest = np.minimum(np.where(is_part, even, MAX_LENGTH), pool.longest)
    placed = place_slices(parts.start, parts.stop, parts.work, most, count * pool.tokens_per_rank, pool.wave_tokens,
                          longest)
    part, start, stop, where = _columns(placed)
    slices = parts.cut(part, start, stop)
    if not levels:
        yield slices, members[where]
        return
    here = np.split(np.argsort(where, kind="stable"), np.cumsum(np.bincount(where, minlength=len(count)))[:-1])
    inside = np.split(np.argsort(unit, kind="stable"), np.cumsum(count)[:-1])
    for some, ranks in zip(here, inside, strict=True):
        yield from _inside(_WorkParts(*(column[some] for column in slices)), members[ranks], pool, levels[1:])
