"""Pack documents into rows of equal tokens per rank.

The placement `given` fills one rank after the other in the order of the documents, as a loader would; `balanced`
chooses the rank of every slice. A document that does not fit is cut. With spanning, its parts still attend to each
other; without spanning, the part after the cut becomes a separate document, as in packed loaders.

A micro-batch may be split into two nano-batches, ping and pong, each with half of every rank's tokens. If both have a
part of one document, ping has its beginning, and pong's layout lists these tokens as key-only: pong attends to them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from typing import NamedTuple

import numpy as np

from distca.columns import freeze
from distca.validation import UserError, check_choice, short
from distca.workload.documents import check_lengths
from distca.workload.layout import KeySlices, Layout, cut_stream
from distca.workload.placement import Cuts, place, place_by_levels
from distca.workload.slicing import GRID, squares
from distca.workload.topology import Topology

NO_CUTS = Cuts()
_LONE = 0.75  # part of all pairs above which a document is cut for both ping and pong
_AIM = 0.9  # fraction of the tolerance that placement uses; the rest is for rounding to whole tiles in balancing


@dataclass(frozen=True, slots=True)
class NanoBatch:
    """The layout of some documents of a micro-batch, or parts of them."""

    layout: Layout        # its documents are numbered from 0, in the micro-batch's order
    document: np.ndarray  # [documents of the layout] index of each in the micro-batch

    def __post_init__(self) -> None:
        freeze(self, ("document",))


DocumentWork = Callable[[np.ndarray, np.ndarray], np.ndarray]  # tokens [start, stop) of documents -> their work


def causal_work(start: np.ndarray, stop: np.ndarray) -> np.ndarray:
    """Return the number of causal (query, key) pairs whose query is in [start, stop)."""
    begin, end = start.astype(np.float64), stop.astype(np.float64)
    return 0.5 * (end * (end + 1.0) - begin * (begin + 1.0))


def pack(
    lengths: Sequence[int] | np.ndarray,
    *,
    ranks: int,
    tokens_per_rank: int | None = None,
    spanning: bool = True,
    placement: str = "given",
    tolerance: float = 0.05,
    speed: Sequence[float] | np.ndarray | None = None,
    document_work: DocumentWork = causal_work,
    cuts: Cuts = NO_CUTS,
    topology: Topology | None = None,
) -> Layout:
    """Place documents on ranks, with equal tokens per rank.

    The documents must fill the ranks exactly; `tokens_per_rank` defaults to their tokens divided by `ranks`. Only
    balanced placement uses the other arguments: the `speed` of the pool (as in planning), the work of documents (causal
    pairs by default), the `cuts` that suit a server's device, and the `topology`, to keep documents inside nodes.
    """
    lengths = check_lengths(lengths)
    tokens_per_rank = _row_tokens(lengths, ranks, tokens_per_rank)
    if not spanning:
        lengths = cut_at_ranks(lengths, tokens_per_rank)
    return _place_parts(_Parts(np.arange(len(lengths)), np.zeros_like(lengths), lengths), ranks, placement,
                        Aim(tolerance, speed, document_work, cuts, topology))


class _Parts(NamedTuple):
    """Tokens [start, stop) of documents, in the order of the documents."""

    document: np.ndarray
    start: np.ndarray
    stop: np.ndarray


class Aim(NamedTuple):
    """Options of balanced placement; see `pack`."""

    tolerance: float = 0.05
    speed: Sequence[float] | np.ndarray | None = None
    document_work: DocumentWork = causal_work
    cuts: Cuts = NO_CUTS
    topology: Topology | None = None


DEFAULT_AIM = Aim()


def _place_parts(parts: _Parts, ranks: int, placement: str, aim: Aim) -> Layout:
    """Place parts on ranks, with equal tokens per rank; part i becomes document i of the layout."""
    check_tolerance(aim.tolerance)
    check_choice("placement", placement, PLACEMENTS)
    return PLACEMENTS[placement].function(parts, ranks, int((parts.stop - parts.start).sum()) // ranks, aim)


def _balanced(parts: _Parts, ranks: int, tokens_per_rank: int, aim: Aim) -> Layout:
    """Place documents so that most queries can be computed at home with the work of each rank within the tolerance."""
    work = np.asarray(aim.document_work(parts.start, parts.stop), dtype=np.float64)
    capacity = share_of_work(work, ranks, aim.tolerance, aim.speed)
    levels = () if aim.topology is None else aim.topology.first(ranks).levels()
    if levels:
        return place_by_levels(parts.start, parts.stop, work, capacity, share_of_work(work, ranks, 0.0, aim.speed),
                               tokens_per_rank, levels, aim.cuts)
    return place(parts.start, parts.stop, work, capacity, tokens_per_rank, aim.cuts,
                 between_nodes=aim.topology is not None and aim.topology.first(ranks).num_nodes == ranks > 1)


def pack_whole(
    lengths: Sequence[int] | np.ndarray, *, ranks: int, placement: str = "given", aim: Aim = DEFAULT_AIM
) -> tuple[NanoBatch]:
    """Pack a micro-batch in one piece."""
    layout = pack(lengths, ranks=ranks, placement=placement, **aim._asdict())
    return (NanoBatch(layout, np.arange(layout.num_documents)),)


def pack_ping_pong(
    lengths: Sequence[int] | np.ndarray, *, ranks: int, placement: str = "given", aim: Aim = DEFAULT_AIM
) -> tuple[NanoBatch, NanoBatch]:
    """Pack two nano-batches, each with half of every rank's tokens, in the order in which they run.

    The documents of each depend on the lengths alone, not on the number of ranks. At most two documents are in both.
    """
    lengths = check_lengths(lengths)
    tokens_per_rank = _row_tokens(lengths, ranks, None)
    if tokens_per_rank % 2:
        raise UserError(f"there are {tokens_per_rank} tokens per rank; ping and pong need an even number")
    ping, pong = _halves(lengths)
    first, second = (_place_parts(half, ranks, placement, aim) for half in (ping, pong))
    cut = np.flatnonzero(pong.start > 0)
    if len(cut):
        there = np.full(len(lengths), -1)                        # [documents] number in pong's layout
        there[pong.document[cut]] = cut
        number = there[ping.document[first.document]]            # [slices of ping]
        shared = number >= 0
        second = replace(second, key_only=KeySlices(number[shared], first.start[shared], first.stop[shared],
                                                    first.rank[shared]))
    return NanoBatch(first, ping.document), NanoBatch(second, pong.document)


def _halves(lengths: np.ndarray) -> tuple[_Parts, _Parts]:
    """Assign documents, longest first, to the half with fewer pairs; ping gets the beginning of documents that are cut.

    One document may be cut to fill both halves. The longest is also cut, into parts of equal work, if all others have
    too few pairs to make up for it: the exchange of one half needs the computation of the other to hide behind.
    """
    half = int(lengths.sum()) // 2
    parts: tuple[list[tuple[int, int, int]], list[tuple[int, int, int]]] = ([], [])  # (document, start, stop)
    work, free = [0.0, 0.0], [half, half]

    def assign(document: int, side: int, taken: int) -> None:
        for target, start, stop in ((side, 0, taken), (1 - side, taken, int(lengths[document]))):
            if start < stop:
                parts[target].append((document, start, stop))
                free[target] -= stop - start
                work[target] += 0.5 * (stop - start) * (start + stop)

    queue = np.argsort(-lengths, kind="stable").tolist()
    early = None                                                 # the half that gets the beginning of cut documents
    longest = int(lengths[queue[0]])
    if _LONE * squares(lengths[queue]).sum() < longest * longest:
        early = 0
        taken = int(longest * sqrt(0.5))
        assign(queue.pop(0), early, min(max(taken // GRID * GRID, taken % GRID, longest - half), half))
    for document in queue:
        tokens = int(lengths[document])
        side = 0 if (work[0], -free[0]) <= (work[1], -free[1]) else 1
        if tokens > free[side]:
            side = 1 - side
        if tokens > free[side]:
            side = early = side if early is None else early
        assign(document, side, min(tokens, free[side]))
    ping, pong = (_Parts(*np.array(sorted(parts[side]), dtype=np.int64).T) for side in (early or 0, 1 - (early or 0)))
    return ping, pong


def cut_at_ranks(lengths: np.ndarray, tokens_per_rank: int) -> np.ndarray:
    """Cut documents at the end of every row; the part after a cut becomes a separate document."""
    longest = int(lengths.argmax())
    if lengths[longest] > tokens_per_rank:
        raise UserError(f"document {longest} has {lengths[longest]} tokens but a rank holds {tokens_per_rank}; raise "
                        "tokens_per_rank or let documents span ranks")
    total = int(lengths.sum())
    edges = np.unique(np.concatenate([np.cumsum(lengths), np.arange(tokens_per_rank, total + 1, tokens_per_rank)]))
    return np.diff(edges, prepend=0)


def share_of_work(
    work: np.ndarray, ranks: int, tolerance: float, speed: Sequence[float] | np.ndarray | None
) -> np.ndarray:
    """Return the work that placement may give each rank: its share by speed, plus most of the tolerance."""
    pool = check_pool(speed, ranks)
    return (1.0 + _AIM * tolerance) * work.sum() * pool[:ranks] / pool.sum()


def check_tolerance(tolerance: float) -> None:
    if not (isinstance(tolerance, int | float | np.number) and 0.0 <= tolerance <= 1.0):
        raise UserError(f"tolerance is {tolerance!r}; give a number from 0 to 1, such as 0.05")


def check_pool(speed: Sequence[float] | np.ndarray | None, ranks: int) -> np.ndarray:
    """Return one relative speed per server: the ranks that own tokens first, dedicated servers after them."""
    if speed is None:
        return np.ones(ranks)
    pool = np.asarray(speed, dtype=np.float64)
    if pool.ndim != 1 or len(pool) < ranks:
        raise UserError(f"speed has shape {pool.shape} but there are {ranks} ranks; give one speed per rank, 0 for a "
                        "rank that serves nothing, and one per dedicated server after them")
    if not ((pool >= 0).all() and 0 < pool.sum() < np.inf):
        raise UserError(f"speed is {short(pool.tolist())}; give finite numbers of 0 or more, at least one above 0")
    return pool


def _row_tokens(lengths: np.ndarray, ranks: int, tokens_per_rank: int | None) -> int:
    total = int(lengths.sum())
    if ranks < 1:
        raise UserError(f"ranks is {ranks}; give at least 1")
    if tokens_per_rank is None:
        if total % ranks:
            raise UserError(f"{total} tokens do not divide over {ranks} ranks; cut the last document by "
                            f"{total % ranks} tokens (documents.fill does) or change ranks")
        return total // ranks
    if total != ranks * tokens_per_rank:
        raise UserError(f"the documents hold {total} tokens but {ranks} ranks of {tokens_per_rank} hold "
                        f"{ranks * tokens_per_rank}; change ranks or tokens_per_rank, or cut with documents.fill")
    return tokens_per_rank


def _in_order(parts: _Parts, ranks: int, tokens_per_rank: int, aim: Aim) -> Layout:
    """Concatenate the documents and cut them wherever a row is full."""
    stops = np.cumsum(parts.stop - parts.start)
    document, rank, begins, ends = cut_stream(stops, tokens_per_rank * np.arange(1, ranks + 1))
    shift = (parts.stop - stops)[document]                       # offset in the stream -> position in the document
    return Layout(parts.stop, document, begins + shift, ends + shift, rank, ranks)


class Placement(NamedTuple):
    """A placement function and its help text."""

    function: Callable[[_Parts, int, int, Aim], Layout]  # parts, ranks, tokens per rank, aim
    help: str


# Add a new placement here only. planning.choose compares each of the others with `given`.
PLACEMENTS = {
    "given": Placement(_in_order, "documents stay where the loader puts them"),
    "balanced": Placement(_balanced, "placement chooses"),
}
