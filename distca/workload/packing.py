"""Pack documents into rows of equal tokens per rank.

`given` keeps documents where a loader would put them: in order, one rank after the other. `balanced` lets placement
choose. Either way a document that does not fit is cut and knows it: with spanning its parts still attend to each
other, without spanning the part behind the cut becomes a document of its own, as packed loaders do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from distca.workload.documents import Workload, check_lengths
from distca.workload.layout import Layout
from distca.workload.placement import place

PLACEMENTS = ("given", "balanced")
_AIM = 0.9  # part of the tolerance that placement uses; the scheduler rounds to whole tiles within the rest


@dataclass(frozen=True, slots=True)
class NanoBatch:
    """A layout over some of a batch's documents, or parts of them, and which those are."""

    layout: Layout        # its documents are numbered from 0, in the batch's order
    document: np.ndarray  # [documents of the layout] number in the batch
    start: np.ndarray     # [documents of the layout] first token in the batch's document; above 0 behind a cut

    def __post_init__(self) -> None:
        for name in ("document", "start"):
            column = np.ascontiguousarray(getattr(self, name), dtype=np.int64)
            column.setflags(write=False)
            object.__setattr__(self, name, column)


def pack(
    lengths: Sequence[int] | np.ndarray,
    *,
    ranks: int,
    tokens_per_rank: int | None = None,
    spanning: bool = True,
    placement: str = "given",
    tolerance: float = 0.05,
    speed: Sequence[float] | np.ndarray | None = None,
    document_work: np.ndarray | None = None,
) -> Layout:
    """Lay documents over ranks with equal tokens on each.

    The documents must fill the ranks exactly; `tokens_per_rank` defaults to their tokens divided by `ranks`. Balanced
    placement may be told the pool's `speed` (as in planning) and each document's work (causal pairs by default).
    """
    lengths = check_lengths(lengths)
    tokens_per_rank = _row_tokens(lengths, ranks, tokens_per_rank)
    check_tolerance(tolerance)
    if placement not in PLACEMENTS:
        raise ValueError(f"placement is {placement!r}; choose one of: {', '.join(PLACEMENTS)}")
    if not spanning:
        lengths = cut_at_ranks(lengths, tokens_per_rank)
        document_work = None
    if placement == "given":
        return _in_order(lengths, ranks, tokens_per_rank)
    work = causal_work(lengths) if document_work is None else np.asarray(document_work, dtype=np.float64)
    if work.shape != lengths.shape:
        raise ValueError(f"document_work has shape {work.shape} but there are {len(lengths)} documents; give one "
                         "number per document")
    return place(lengths, work, share_of_work(work, ranks, tolerance, speed), tokens_per_rank)


def pack_workload(
    workload: Workload,
    *,
    placement: str = "given",
    tolerance: float = 0.05,
    speed: Sequence[float] | np.ndarray | None = None,
    document_work: np.ndarray | None = None,
) -> Layout:
    """Lay a workload's sequences over ranks: `given` each over its own, in order; `balanced` all over all."""
    return pack(np.concatenate(workload.sequences), ranks=workload.ranks, tokens_per_rank=workload.tokens_per_rank,
                placement=placement, tolerance=tolerance, speed=speed, document_work=document_work)


def pack_ping_pong(
    lengths: Sequence[int] | np.ndarray,
    *,
    ranks: int,
    tokens_per_rank: int | None = None,
    placement: str = "given",
    tolerance: float = 0.05,
) -> tuple[NanoBatch, NanoBatch]:
    """Two nano-batches with half of every rank's tokens each.

    A document belongs to one nano-batch. Documents are dealt longest first to the half with the less work, and where
    the halves' tokens demand it the last document dealt is cut in two documents. Which half a document is in depends
    on the documents alone, not on how many ranks share them.
    """
    lengths = check_lengths(lengths)
    tokens_per_rank = _row_tokens(lengths, ranks, tokens_per_rank)
    if tokens_per_rank % 2:
        raise ValueError(f"tokens_per_rank is {tokens_per_rank}; ping and pong need an even number of tokens per rank")
    half = ranks * tokens_per_rank // 2
    rows: tuple[list[tuple[int, int, int]], list[tuple[int, int, int]]] = ([], [])  # (document, start, tokens)
    work, free = [0.0, 0.0], [half, half]
    for document in np.argsort(-lengths, kind="stable").tolist():
        tokens = int(lengths[document])
        side = 0 if (work[0], -free[0]) <= (work[1], -free[1]) else 1
        if tokens > free[side]:
            side = 1 - side
        taken = min(tokens, free[side])
        for target, start, part in ((side, 0, taken), (1 - side, taken, tokens - taken)):
            if part:
                rows[target].append((document, start, part))
                free[target] -= part
                work[target] += 0.5 * part * part
    ping, pong = (_nano_batch(row, ranks, placement, tolerance) for row in rows)
    return ping, pong


def _nano_batch(parts: list[tuple[int, int, int]], ranks: int, placement: str, tolerance: float) -> NanoBatch:
    document, start, tokens = np.array(sorted(parts), dtype=np.int64).T
    return NanoBatch(pack(tokens, ranks=ranks, placement=placement, tolerance=tolerance), document, start)


def cut_at_ranks(lengths: np.ndarray, tokens_per_rank: int) -> np.ndarray:
    """Cut documents at the end of every row; the part behind a cut is a document of its own."""
    longest = int(lengths.argmax())
    if lengths[longest] > tokens_per_rank:
        raise ValueError(f"document {longest} has {lengths[longest]} tokens but a rank holds {tokens_per_rank}; raise "
                         "tokens_per_rank or let documents span ranks")
    total = int(lengths.sum())
    edges = np.unique(np.concatenate([np.cumsum(lengths), np.arange(tokens_per_rank, total + 1, tokens_per_rank)]))
    return np.diff(edges, prepend=0)


def share_of_work(
    work: np.ndarray, ranks: int, tolerance: float, speed: Sequence[float] | np.ndarray | None
) -> np.ndarray:
    """The most work placement gives each rank: its share of the pool and most of the tolerance."""
    pool = check_pool(speed, ranks)
    return (1.0 + _AIM * tolerance) * work.sum() * pool[:ranks] / pool.sum()


def check_tolerance(tolerance: float) -> None:
    if not (isinstance(tolerance, int | float | np.number) and 0.0 <= tolerance <= 1.0):
        raise ValueError(f"tolerance is {tolerance!r}; give a number from 0 to 1, such as 0.05")


def check_pool(speed: Sequence[float] | np.ndarray | None, ranks: int) -> np.ndarray:
    """One relative speed per server: the ranks that own tokens first, dedicated servers after them."""
    if speed is None:
        return np.ones(ranks)
    pool = np.asarray(speed, dtype=np.float64)
    if pool.ndim != 1 or len(pool) < ranks:
        raise ValueError(f"speed has shape {pool.shape} but there are {ranks} ranks; give one speed per rank, 0 for a "
                         "rank that serves nothing, and one per dedicated server after them")
    if not (np.isfinite(pool).all() and (pool >= 0).all() and pool.sum() > 0):
        raise ValueError(f"speed is {pool.tolist()}; give finite numbers of 0 or more, at least one above 0")
    return pool


def causal_work(lengths: np.ndarray) -> np.ndarray:
    """Causal pairs of whole documents."""
    exact = lengths.astype(np.float64)
    return 0.5 * exact * (exact + 1.0)


def _row_tokens(lengths: np.ndarray, ranks: int, tokens_per_rank: int | None) -> int:
    total = int(lengths.sum())
    if ranks < 1:
        raise ValueError(f"ranks is {ranks}; give at least 1")
    if tokens_per_rank is None:
        if total % ranks:
            raise ValueError(f"{total} tokens do not divide over {ranks} ranks; cut the last document by "
                             f"{total % ranks} tokens (documents.fill does) or change ranks")
        return total // ranks
    if total != ranks * tokens_per_rank:
        raise ValueError(f"the documents hold {total} tokens but {ranks} ranks of {tokens_per_rank} hold "
                         f"{ranks * tokens_per_rank}; change ranks or tokens_per_rank, or cut with documents.fill")
    return tokens_per_rank


def _in_order(lengths: np.ndarray, ranks: int, tokens_per_rank: int) -> Layout:
    """One stream of documents, cut wherever a rank's row is full."""
    stops = np.cumsum(lengths)
    edges = np.unique(np.concatenate([stops, tokens_per_rank * np.arange(1, ranks + 1)]))
    begins = edges - np.diff(edges, prepend=0)
    document = np.searchsorted(stops, begins, side="right")
    document_begin = (stops - lengths)[document]
    return Layout(lengths, document, begins - document_begin, edges - document_begin, begins // tokens_per_rank, ranks)

