"""Split a document's prefix between ranks that need it instead of gathering all of it on each of them.

If consecutive slices of a long document are computed at home, each rank gathers the whole prefix: m slices after q0
keys move m·q0 keys. Instead, the m ranks can share the band of their queries: each computes all of the band's queries
against one m-th of the keys. The prefix is then sent once per band, and queries and outputs travel between neighbours.
With the best m, (2m−1)/m² of the bytes are sent. Shares of keys are such that the ranks end alike. The homes merge
partial results by their log-sum-exp.

Inside a node, the band is all that the node computes of its own slices of a document, wherever they begin: its keys
cross to the node once and then have to reach one rank each, not all of them.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from distca.columns import Positions, added
from distca.cost.work import causal_pairs
from distca.planning.shard_cut import Piece, Prices
from distca.planning.tasks import TILE, TaskTable, joined
from distca.planning.traffic import key_ranges, query_ranges
from distca.workload.layout import Layout

_WIDEST = 12  # most slices in a band between nodes; q0 / 2√F is optimal, about 5 for a 512K document over 64 ranks


def share_prefixes(
    layout: Layout, tasks: TaskTable, load: np.ndarray, cap: np.ndarray, prices: Prices, group: np.ndarray | None = None
) -> TaskTable:
    """Replace the tasks of slices by bands where that saves bytes and keeps every server within its cap.

    A band stays inside one `group` [servers]: its queries never leave the group, which receives the same keys. Without
    groups, bands consist of whole slices at home.
    """
    owner = _owner(layout, tasks, group)                         # [tasks] slice that is computed in its group, or -1
    by_slice = np.argsort(owner, kind="stable")
    first = np.searchsorted(owner[by_slice], np.arange(layout.num_slices + 1)).tolist()
    spare = (cap - load).tolist()
    dropped: list[np.ndarray] = []
    parts: list[tuple[int, int, int, int]] = []                  # slice of the queries, server, kv_start, kv_stop
    slices = np.unique(owner[owner >= 0])
    if len(slices) < 2:
        return tasks
    for band in _bands(layout, slices, prices, group):
        now = np.concatenate([by_slice[first[i]:first[i + 1]] for i in band])
        shares = _key_shares(layout, band, tasks.take(now), prices, spare, is_even=group is not None)
        if shares is None:
            continue
        dropped.append(now)
        stops = layout.stop[band].tolist()
        for server, kv_start, kv_stop in shares:
            parts += [(i, server, kv_start, min(kv_stop, stop)) for i, stop in zip(band, stops, strict=True)
                      if kv_start < stop]
    if not parts:
        return tasks
    kept = np.ones(len(tasks), dtype=bool)
    kept[np.concatenate(dropped)] = False
    part, server, kv_start, kv_stop = np.array(parts, dtype=np.int64).T
    banded = joined(tasks.take(kept), TaskTable(
        layout.document[part], layout.start[part], layout.stop[part], kv_start, kv_stop, layout.rank[part], server))
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


def _owner(layout: Layout, tasks: TaskTable, group: np.ndarray | None) -> np.ndarray:
    """[tasks] Return the slice of each task whose slice is computed in its group, or by its home; -1 for the others."""
    found = np.full(len(tasks), -1)
    inside = tasks.home == tasks.server if group is None else group[tasks.home] == group[tasks.server]
    late, some = np.flatnonzero(layout.start > 0), np.flatnonzero((tasks.q_start > 0) & inside)
    if len(late) == 0 or len(some) == 0:
        return found
    positions = Positions.of(layout.document[late], layout.start[late], layout.lengths)
    owner = late[positions.holding(tasks.document[some], tasks.q_start[some])]
    pairs = causal_pairs(tasks.q_start[some], tasks.q_stop[some], tasks.kv_start[some], tasks.kv_stop[some])
    here = (layout.document[owner] == tasks.document[some]) & (tasks.q_stop[some] <= layout.stop[owner])
    covered = np.bincount(owner[here], weights=pairs[here], minlength=layout.num_slices)
    complete = covered == causal_pairs(layout.start, layout.stop, np.zeros_like(layout.start), layout.stop)
    found[some] = np.where(here & complete[owner], owner, -1)
    return found


def _bands(layout: Layout, slices: np.ndarray, prices: Prices, group: np.ndarray | None) -> Iterator[list[int]]:
    """Yield bands of slices of one document, in document order: consecutive slices, or all slices in a group."""
    of_group = np.zeros(layout.num_slices, dtype=np.int64) if group is None else group[layout.rank]
    slices = slices[np.lexsort((layout.start[slices], of_group[slices], layout.document[slices]))]
    document, unit = layout.document[slices], of_group[slices]
    opens = (document[1:] != document[:-1]) | (unit[1:] != unit[:-1])
    for together in np.split(slices, np.flatnonzero(opens) + 1):
        breaks = np.flatnonzero(layout.start[together[1:]] != layout.stop[together[:-1]]) + 1
        bands, num_bytes = [], 0.0
        for run in np.split(together, breaks):
            found, cost = _best_bands(layout, run.tolist(), prices)
            bands += [run[first:last + 1].tolist() for first, last in found]
            num_bytes += cost
        if group is not None and _whole_bytes(layout, together, prices) < num_bytes:
            yield together.tolist()
        else:
            yield from bands


def _whole_bytes(layout: Layout, band: np.ndarray, prices: Prices) -> float:
    """Return the bytes of a band of all slices of a document in a group."""
    ranks, queries = len(np.unique(layout.rank[band])), int((layout.stop[band] - layout.start[band]).sum())
    return float(layout.start[band[-1]]) * prices.kv_bytes + (ranks - 1) * queries * prices.q_bytes


def _best_bands(layout: Layout, run: list[int], prices: Prices) -> tuple[list[tuple[int, int]], float]:
    """Find the cheapest partition of a run into bands, by dynamic programming over where the last band begins.

    Return the first and last slice of each band of several, and the bytes of all.
    """
    start, stop = layout.start[run].tolist(), layout.stop[run].tolist()
    rank = layout.rank[run].tolist()
    best = [0.0] + [float("inf")] * len(run)                     # [n] bytes of the first n slices
    begin = [0] * (len(run) + 1)
    for n in range(1, len(run) + 1):
        for first in range(n - 1, max(n - _WIDEST, 0) - 1, -1):
            if rank[first] in rank[first + 1:n]:
                break                                            # a rank serves one part of a band
            queries = (n - first - 1) * (stop[n - 1] - start[first])  # that travel: to all ranks of the band but one
            num_bytes = best[first] + (start[n - 1] * prices.kv_bytes + queries * prices.q_bytes)
            if num_bytes < best[n]:
                best[n], begin[n] = num_bytes, first
    bands, n = [], len(run)
    while n > 0:
        if n - begin[n] > 1:
            bands.append((begin[n], n - 1))
        n = begin[n]
    return bands, best[-1]


def _key_shares(
    layout: Layout, band: list[int], now: TaskTable, prices: Prices, spare: list[float], *, is_even: bool
) -> list[tuple[int, int, int]] | None:
    """Return (server, kv_start, kv_stop) for all queries of a band's slices, whose tasks are `now`.

    Each server of these tasks gets a share of the keys that keeps its work, or with `is_even` one that leaves all the
    same spare work; the last has the diagonal. Return None if a server's work would exceed its cap.
    """
    begin, end = layout.start[band].tolist(), layout.stop[band].tolist()
    own: dict[int, tuple[float, float]] = {}                     # server -> pairs and work, in the order of last slices
    for server, first, last, kv_start, kv_stop in zip(*(column.tolist() for column in (
            now.server, now.q_start, now.q_stop, now.kv_start, now.kv_stop)), strict=True):
        pairs, work = own.pop(server, (0.0, 0.0))
        piece = Piece(0, first, last, kv_start, first, None if kv_stop == last else kv_stop)
        if kv_stop > kv_start:
            pairs, work = pairs + _pairs(piece), work + piece.work(prices.measure)
        own[server] = pairs, work
    wanted = [pairs for pairs, _ in own.values()]
    if len(own) == 1 or added(wanted) == 0:
        return None
    if is_even:
        rate = added(wanted) / added(work for _, work in own.values())
        even = added(spare[server] for server in own) / len(own)
        wanted = [max(pairs + rate * (spare[server] - even), 0.0) for server, (pairs, _) in own.items()]
    edges = _edges(wanted, begin, end)
    shares, change = [], []
    for (server, (_, before)), kv_start, kv_stop in zip(own.items(), edges[:-1], edges[1:], strict=True):
        after = added(Piece(0, first, last, kv_start, first, kv_stop if kv_stop <= first else None).work(prices.measure)
                      for first, last in zip(begin, end, strict=True) if kv_start < min(last, kv_stop))
        if kv_stop > kv_start:
            shares.append((server, kv_start, kv_stop))
        elif not is_even:
            return None
        change.append((server, after - before))
    if any(extra > max(spare[server], 0.0) for server, extra in change):
        return None
    for server, extra in change:
        spare[server] -= max(extra, 0.0)                         # room that a band frees is not used again
    return shares


def _pairs(piece: Piece) -> float:
    q_len, kv_len = piece.stop - piece.start, piece.key_end - piece.key_start
    return q_len * (kv_len - 0.5 * (q_len - 1) * (piece.key_stop is None))


def _edges(pairs: list[float], begin: list[int], end: list[int]) -> list[int]:
    """Return the keys at which shares with these pairs end, in whole tiles and never inside a slice."""
    edges, wanted, done = [0], 0.0, 0.0                          # done: pairs of all keys before `position`
    position, at, queries = 0, 0, float(sum(end) - sum(begin))   # queries that see the keys from `position` on
    for more in pairs[:-1]:
        wanted += more
        while at < len(begin) and done + queries * (begin[at] - position) < wanted:
            length = end[at] - begin[at]
            done += queries * (begin[at] - position) + length * (queries - 0.5 * (length - 1))
            position, queries, at = end[at], queries - length, at + 1
        if at == len(begin) or wanted <= done:                   # inside the slice that ends at `position`
            edges.append(position)
        else:
            edges.append(max(min(round((position + (wanted - done) / queries) / TILE) * TILE, begin[at]), edges[-1]))
    return [*edges, end[-1]]
