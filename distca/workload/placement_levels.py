"""Place documents level by level: over nodes as if each were one rank, then inside every node over its ranks.

A document that fits a node stays in it, so that none of its keys ever cross; one that does not is cut into as few
parts as its work demands. Inside a node, parts are placed as documents are: contiguous slices of equal work.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from distca.workload.documents import MAX_LENGTH
from distca.workload.layout import Layout, layout_from_slices
from distca.workload.placement import Cuts, place_slices, squares

_SPREAD_TOKENS = 512  # the fewest of a slice that is cut for its keys to leave by several NICs
_SLACK = 0.4  # part of what a rank may have above its share that nodes leave to the placement inside them


class _Parts(NamedTuple):
    """Tokens [start, stop) of documents and their work."""

    document: np.ndarray
    start: np.ndarray
    stop: np.ndarray
    work: np.ndarray

    def cut(self, part: np.ndarray, start: np.ndarray, stop: np.ndarray) -> _Parts:
        """Tokens [start, stop) of each named part; work is divided as causal pairs are."""
        before, after = (squares(column[part]) for column in (self.start, self.stop))
        return _Parts(self.document[part], start, stop,
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
    """The layout of `place`, by `levels` [ranks] each, outermost first; `share` is a rank's part of all the work."""
    parts = _Parts(np.arange(len(last)), first, last, np.asarray(work, dtype=np.float64))
    pool = _Pool(capacity, share, tokens_per_rank, cuts.wave_tokens, cuts.longest(float(share.mean())), last)
    placed = list(_inside(parts, np.arange(len(capacity)), pool, levels))
    document, start, stop = (np.concatenate([getattr(slices, name) for slices, _ in placed])
                             for name in ("document", "start", "stop"))
    return layout_from_slices(last, document, start, stop, np.concatenate([rank for _, rank in placed]), len(capacity))


def _inside(
    parts: _Parts, members: np.ndarray, pool: _Pool, levels: Sequence[np.ndarray]
) -> Iterator[tuple[_Parts, np.ndarray]]:
    """Slices of the parts and their ranks, over the members, whose tokens they fill."""
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
    part, start, stop, where = (np.array(column, dtype=np.int64) for column in placed)
    slices = parts.cut(part, start, stop)
    if not levels:
        yield slices, members[where]
        return
    order, order_of_members = (np.argsort(column, kind="stable") for column in (where, unit))
    begin, begin_of_members = (np.searchsorted(column, np.arange(len(count) + 1)) for column in (
        where[order], unit[order_of_members]))
    slices = _Parts(*(column[order] for column in slices))
    for number in range(len(count)):
        here = _Parts(*(column[begin[number]:begin[number + 1]] for column in slices))
        yield from _inside(here, members[order_of_members[begin_of_members[number]:begin_of_members[number + 1]]],
                           pool, levels[1:])
