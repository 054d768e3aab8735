"""Random lengths, layouts and plans, and slow oracles of what a plan covers and moves.

Everything is drawn by seed. Layouts come in the kinds that loaders produce and one that none would: documents cut
anywhere and scattered over ranks. Oracles count tokens and pairs one by one, or block by block, and share no code with
planning. Imports without torch.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Literal, get_args

import numpy as np

from distca.planning.plan import Plan
from distca.planning.tasks import TaskTable, tasks_at_home
from distca.spec import ModelShape
from distca.workload.layout import Layout, layout_from_slices
from distca.workload.packing import pack

LayoutKind = Literal["in_order", "no_spanning", "balanced", "scattered"]
LAYOUT_KINDS: tuple[LayoutKind, ...] = get_args(LayoutKind)


def random_lengths(seed: int, num_tokens: int, longest: int | None = None) -> np.ndarray:
    """Document lengths of exactly `num_tokens` tokens: skewed over orders of magnitude, one-token documents among them.

    Some draws are one document or a few equal ones, the cases that averages hide. No document exceeds `longest`.
    """
    rng = np.random.default_rng(seed)
    longest = num_tokens if longest is None else min(longest, num_tokens)
    if rng.random() < 0.15:
        longest = max(longest // int(rng.integers(1, 4)), 1)
        whole, rest = divmod(num_tokens, longest)
        return np.array([longest] * whole + [rest] * (rest > 0), dtype=np.int64)
    lengths: list[int] = []
    left = num_tokens
    while left:
        length = min(int(longest ** rng.random()), left)         # log-uniform from 1 to longest
        lengths.append(length)
        left -= length
    return np.array(lengths, dtype=np.int64)


def random_layout(seed: int, kind: LayoutKind, ranks: int, tokens_per_rank: int) -> Layout:
    """A layout of `ranks * tokens_per_rank` tokens; `scattered` gives ranks unequal tokens, and some none."""
    total = ranks * tokens_per_rank
    if kind == "scattered":
        return scattered_layout(seed, random_lengths(seed, total), ranks)
    if kind == "no_spanning":
        return pack(random_lengths(seed, total, longest=tokens_per_rank), ranks=ranks, spanning=False)
    return pack(random_lengths(seed, total), ranks=ranks, placement="balanced" if kind == "balanced" else "given")


def scattered_layout(seed: int, lengths: np.ndarray, ranks: int) -> Layout:
    """Documents cut at arbitrary tokens, their slices on arbitrary ranks in arbitrary order."""
    rng = np.random.default_rng(seed)
    allowed = rng.permutation(ranks)[: int(rng.integers(1, ranks + 1))]
    rows: list[tuple[int, int, int, int]] = []
    for document, length in enumerate(lengths.tolist()):
        cuts = np.unique(rng.integers(1, length, size=int(rng.integers(0, 6)))) if length > 1 else np.empty(0)
        edges = [0, *cuts.astype(int).tolist(), length]
        rows += [(document, start, stop, int(rng.choice(allowed))) for start, stop in pairwise(edges)]
    shuffled = np.array(rows, dtype=np.int64)[rng.permutation(len(rows))]
    document, start, stop, rank = shuffled.T
    return layout_from_slices(lengths, document, start, stop, rank, ranks)


def random_speeds(seed: int, ranks: int, dedicated: int = 0) -> np.ndarray:
    """Speeds of a pool of `ranks + dedicated` servers: equal, unequal, or zero for some ranks."""
    rng = np.random.default_rng(seed)
    num_servers = ranks + dedicated
    if rng.random() < 0.25:
        return np.ones(num_servers)
    speed = rng.uniform(0.25, 2.0, num_servers)
    if rng.random() < 0.5:
        speed[rng.random(num_servers) < 0.3] = 0.0
        speed[rng.integers(num_servers)] = 1.0
    return speed


def misplaced_plan(layout: Layout, servers: int, model: ModelShape, shift: int = 1) -> Plan:
    """Whole slices, each on a wrong server: `shift` ranks behind its home."""
    home = tasks_at_home(layout)
    tasks = replace(home, server=(home.home + shift) % servers)
    return Plan(layout, tasks, np.ones(servers), 0.0, model)


def scattered_plan(seed: int, layout: Layout, servers: int, model: ModelShape) -> Plan:
    """Exact and senseless: queries and keys cut anywhere, every part on a server of its own, none at home by design."""
    rng = np.random.default_rng([seed, 1])                        # not the draws that made the layout
    allowed = rng.permutation(servers)[: int(rng.integers(1, servers + 1))]
    rows: list[tuple[int, int, int, int, int, int, int]] = []
    for document, start, stop, home in zip(layout.document.tolist(), layout.start.tolist(), layout.stop.tolist(),
                                           layout.rank.tolist(), strict=True):
        for q_start, q_stop in pairwise(_cut(rng, start, stop)):
            edges = [0, q_stop] if q_start == 0 or rng.random() < 0.3 else [*_cut(rng, 0, q_start), q_stop]
            if len(edges) > 2 and rng.random() < 0.5:
                del edges[-2]                                    # the diagonal takes the keys before it along
            rows += [(document, q_start, q_stop, kv_start, kv_stop, home, int(rng.choice(allowed)))
                     for kv_start, kv_stop in pairwise(edges)]
    tasks = TaskTable(*np.array(rows, dtype=np.int64)[rng.permutation(len(rows))].T)
    return Plan(layout, tasks, np.ones(servers), 0.0, model)


def _cut(rng: np.random.Generator, start: int, stop: int) -> list[int]:
    inner = rng.integers(start + 1, stop, size=int(rng.integers(0, 4))) if stop - start > 1 else np.empty(0, dtype=int)
    return [start, *np.unique(inner).tolist(), stop]


def dense_coverage(lengths: np.ndarray, tasks: TaskTable) -> list[np.ndarray]:
    """Per document, how often each (query, key) pair is computed: [length, length] counts, for short documents."""
    counts = [np.zeros((length, length), dtype=np.int64) for length in lengths.tolist()]
    for document, q_start, q_stop, kv_start, kv_stop in _task_rows(tasks):
        counts[document][q_start:q_stop, kv_start:kv_stop] += 1
    return [np.tril(count) for count in counts]


def covers_exactly_once(lengths: np.ndarray, tasks: TaskTable) -> bool:
    """Whether every causal pair of every document is computed once and no task reads keys that none of its queries see.

    Each document's (query, key) square is cut into blocks wherever any task begins or ends, the same cuts on both
    sides; a block below the diagonal is then inside a task or outside it, and so is the triangle of one on it.
    """
    rows: dict[int, list[tuple[int, int, int, int]]] = {document: [] for document in range(len(lengths))}
    for document, q_start, q_stop, kv_start, kv_stop in _task_rows(tasks):
        if document not in rows or not (0 <= q_start < q_stop <= lengths[document]):
            return False
        if not 0 <= kv_start < kv_stop <= q_stop:
            return False
        rows[document].append((q_start, q_stop, kv_start, kv_stop))
    for document, bounds in rows.items():
        edges = sorted({0, int(lengths[document]), *(edge for row in bounds for edge in row)})
        at = {edge: index for index, edge in enumerate(edges)}
        count = np.zeros((len(edges) - 1, len(edges) - 1), dtype=np.int64)  # [runs of queries, runs of keys]
        for q_start, q_stop, kv_start, kv_stop in bounds:
            count[at[q_start]:at[q_stop], at[kv_start]:at[kv_stop]] += 1
        if (count[np.tril_indices(len(count))] != 1).any():
            return False
    return True


def tokens_moved(layout: Layout, tasks: TaskTable, num_servers: int) -> tuple[np.ndarray, np.ndarray]:
    """Query and key tokens that cross ranks, as [home, server] counts: each token once per server that reads it."""
    homes = [np.empty(length, dtype=np.int64) for length in layout.lengths.tolist()]
    slices = layout.keys()
    for document, start, stop, rank in zip(slices.document.tolist(), slices.start.tolist(), slices.stop.tolist(),
                                           slices.rank.tolist(), strict=True):
        homes[document][start:stop] = rank
    queries: dict[tuple[int, int], np.ndarray] = {}              # (document, server) -> is this position read there
    keys: dict[tuple[int, int], np.ndarray] = {}
    for server, (document, q_start, q_stop, kv_start, kv_stop) in zip(tasks.server.tolist(), _task_rows(tasks),
                                                                      strict=True):
        unread = np.zeros(int(layout.lengths[document]), dtype=bool)
        queries.setdefault((document, server), unread.copy())[q_start:q_stop] = True
        keys.setdefault((document, server), unread)[kv_start:kv_stop] = True
    moved = []
    for needed in (queries, keys):
        count = np.zeros((num_servers, num_servers), dtype=np.int64)
        for (document, server), read in needed.items():
            count[:, server] += np.bincount(homes[document][read], minlength=num_servers)
        np.fill_diagonal(count, 0)
        moved.append(count)
    return moved[0], moved[1]


def _task_rows(tasks: TaskTable) -> list[tuple[int, int, int, int, int]]:
    columns = (tasks.document, tasks.q_start, tasks.q_stop, tasks.kv_start, tasks.kv_stop)
    return list(zip(*(column.tolist() for column in columns), strict=True))
