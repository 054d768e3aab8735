"""Split a document's prefix between neighbouring ranks instead of gathering all of it on each of them.

If consecutive slices of a long document are computed at home, each rank gathers the whole prefix: m slices after q0
keys move m·q0 keys. Instead, the m ranks can share the band of their queries: each computes all of the band's queries
against one m-th of the keys. The prefix is then sent once per band, and queries and outputs travel between neighbours.
Every rank keeps its amount of work, so the balance does not change, and with the best m it sends (2m−1)/m² of the
bytes. The homes merge partial results by their log-sum-exp.
"""

from __future__ import annotations

import numpy as np

from distca.columns import Positions, added
from distca.planning.shard_cut import Piece, Prices
from distca.planning.tasks import TILE, TaskTable, joined
from distca.planning.traffic import key_ranges, query_ranges
from distca.workload.layout import Layout

_WIDEST = 12  # most slices in a band; q0 / 2√F is optimal, about 5 for a 512K document over 64 ranks


def share_prefixes(
    layout: Layout, tasks: TaskTable, load: np.ndarray, cap: np.ndarray, prices: Prices, group: np.ndarray | None = None
) -> TaskTable:
    """Replace whole slices at home by bands where that saves bytes and keeps every server within its cap.

    A band stays inside one `group` [servers]: its queries never leave the group, which receives the same keys.
    """
    whole = _whole_slices(layout, tasks)                         # [slices] task that is the whole slice at home, or -1
    spare = (cap - load).tolist()
    dropped: list[int] = []
    parts: list[tuple[int, int, int, int]] = []                  # slice of the queries, server, kv_start, kv_stop
    for run in _runs(layout, whole, group):
        for first, last in _best_bands(layout, run, prices):
            band = run[first:last + 1]
            shares = _key_shares(layout, band, prices, spare)
            if shares is None:
                continue
            dropped += [int(whole[i]) for i in band]
            for server_slice, kv_start, kv_stop in shares:
                parts += [(i, int(layout.rank[server_slice]), kv_start, min(kv_stop, int(layout.stop[i])))
                          for i in band]
    if not parts:
        return tasks
    kept = np.ones(len(tasks), dtype=bool)
    kept[dropped] = False
    owner, server, kv_start, kv_stop = np.array(parts, dtype=np.int64).T
    banded = joined(tasks.take(kept), TaskTable(
        layout.document[owner], layout.start[owner], layout.stop[owner], kv_start, kv_stop, layout.rank[owner], server))
    return _cheaper_per_document(layout, tasks, banded, prices)


def _cheaper_per_document(layout: Layout, before: TaskTable, after: TaskTable, prices: Prices) -> TaskTable:
    """Keep the tasks from before bands in documents whose bands cost more: a rank may need the keys for other tasks."""
    banded = np.zeros(layout.num_documents, dtype=bool)
    banded[after.document[after.kv_start > 0]] = True
    costs = [_document_bytes(layout, table.take(banded[table.document]), prices) for table in (after, before)]
    worse = costs[0] > costs[1]
    if not worse.any():
        return after
    return joined(after.take(~worse[after.document]), before.take(worse[before.document]))


def _document_bytes(layout: Layout, tasks: TaskTable, prices: Prices) -> np.ndarray:
    keys, queries = key_ranges(layout, tasks), query_ranges(layout, tasks)
    total = np.zeros(layout.num_documents)
    for ranges, token_bytes in ((keys, prices.kv_bytes), (queries, prices.q_bytes)):
        tokens = np.where(ranges.home != ranges.server, ranges.stop - ranges.start, 0)
        total += token_bytes * np.bincount(ranges.document, weights=tokens, minlength=layout.num_documents)
    return total


def _whole_slices(layout: Layout, tasks: TaskTable) -> np.ndarray:
    """[slices] Return the task that computes all of the slice at home; -1 if none does, or at position 0."""
    candidate = np.flatnonzero((tasks.q_start > 0) & (tasks.home == tasks.server) & (tasks.kv_start == 0)
                               & (tasks.kv_stop == tasks.q_stop))
    late = np.flatnonzero(layout.start > 0)
    whole = np.full(layout.num_slices, -1)
    if len(late) == 0 or len(candidate) == 0:
        return whole
    positions = Positions.of(layout.document[late], layout.start[late], layout.lengths)
    owner = late[positions.holding(tasks.document[candidate], tasks.q_start[candidate])]
    match = ((layout.document[owner] == tasks.document[candidate]) & (layout.start[owner] == tasks.q_start[candidate])
             & (layout.stop[owner] == tasks.q_stop[candidate]))
    whole[owner[match]] = candidate[match]
    return whole


def _runs(layout: Layout, whole: np.ndarray, group: np.ndarray | None) -> list[list[int]]:
    """List runs of consecutive whole slices of one document in one group, as slice indices in document order."""
    slices = np.flatnonzero(whole >= 0)
    slices = slices[np.lexsort((layout.start[slices], layout.document[slices]))]
    if len(slices) < 2:
        return []
    joins = ((layout.document[slices[1:]] == layout.document[slices[:-1]])
             & (layout.start[slices[1:]] == layout.stop[slices[:-1]]))
    if group is not None:
        joins &= group[layout.rank[slices[1:]]] == group[layout.rank[slices[:-1]]]
    return [part.tolist() for part in np.split(slices, np.flatnonzero(~joins) + 1) if len(part) > 1]


def _best_bands(layout: Layout, run: list[int], prices: Prices) -> list[tuple[int, int]]:
    """Find the cheapest partition of a run into bands, by dynamic programming over where the last band begins."""
    start, stop = layout.start[run].tolist(), layout.stop[run].tolist()
    rank = layout.rank[run].tolist()
    best = [0.0] + [float("inf")] * len(run)                     # [n] bytes of the first n slices
    begin = [0] * (len(run) + 1)
    for n in range(1, len(run) + 1):
        for first in range(n - 1, max(n - _WIDEST, 0) - 1, -1):
            if rank[first] in rank[first + 1:n]:
                break                                            # a rank serves one part of a band
            num_bytes = best[first] + _band_bytes(start[first], stop[n - 1], start[n - 1], n - first, prices)
            if num_bytes < best[n]:
                best[n], begin[n] = num_bytes, first
    bands, n = [], len(run)
    while n > 0:
        if n - begin[n] > 1:
            bands.append((begin[n], n - 1))
        n = begin[n]
    return bands


def _band_bytes(q_start: int, q_stop: int, last_start: int, num_slices: int, prices: Prices) -> float:
    if num_slices == 1:
        return q_start * prices.kv_bytes
    width = q_stop - q_start
    return last_start * prices.kv_bytes + (num_slices - 1) * width * prices.q_bytes


def _key_shares(layout: Layout, band: list[int], prices: Prices, spare: list[float]
                ) -> list[tuple[int, int, int]] | None:
    """Return (slice of the serving rank, kv_start, kv_stop) that keep each rank's work; the last has the diagonal."""
    begin, end = layout.start[band].tolist(), layout.stop[band].tolist()
    width = end[-1] - begin[0]
    edges, pairs = [0], 0.0
    for first, last in zip(begin[:-1], end[:-1], strict=True):
        pairs += 0.5 * (last - first) * (last + first + 1)
        edges.append(min(round(pairs / width / TILE) * TILE, begin[0]))
    edges.append(end[-1])
    shares, change = [], []
    for i, kv_start, kv_stop in zip(band, edges[:-1], edges[1:], strict=True):
        if kv_stop <= kv_start:
            return None
        own = prices.measure(int(layout.stop[i] - layout.start[i]), int(layout.stop[i]))
        now = added(Piece(0, first, last, kv_start, first, kv_stop if kv_stop <= first else None).work(prices.measure)
                    for first, last in zip(begin, end, strict=True))
        change.append((int(layout.rank[i]), now - own))
        shares.append((i, kv_start, kv_stop))
    if any(extra > max(spare[rank], 0.0) for rank, extra in change):
        return None
    for rank, extra in change:
        spare[rank] -= max(extra, 0.0)                           # room that a band frees is not used again
    return shares
