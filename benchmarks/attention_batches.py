"""The batches that attention kernels are measured on: documents, shards with long prefixes, servers of a plan.

Shards of one document come twice: with its keys stored once for all of them, as a server stores them, and with keys of
their own. The plan is of a pool whose documents each fit a rank: sampled, or read from a workload file. Its median
server and its most fragmented one, counted in task rows, are what real servers compute.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from distca.cost.work import causal_pairs
from distca.dispatch import build
from distca.kernels import TaskRows
from distca.models import model_named
from distca.planning.balance import balance
from distca.planning.plan import Plan
from distca.workload.documents import Workload, sample_lengths
from distca.workload.packing import pack

POOL_RANKS, POOL_TOKENS, POOL_TOLERANCE = 64, 65_536, 0.05
PREFIX = 16_384
SHARD_LENGTHS = (16, 32, 64, 128, 256, 512, 1_024, 2_048, 4_096)
MOST_Q, MOST_KEYS = 2**15, 2**21  # tokens over all shards of one length; keys and values take 4 KB a token

PLAN_GOAL = (560.0, 430.0)


@dataclass(frozen=True, slots=True)
class Batch:
    """Task rows and the buffers they stand in."""

    name: str
    rows: TaskRows
    num_q: int
    num_k: int
    uniform: tuple[int, int, int] | None = None  # count, q_len, kv_len of rows that are alike and share nothing
    goal: tuple[float, float] | None = None      # forward and backward TFLOP/s that llama3-8b should reach on an H200

    @property
    def pairs(self) -> int:
        rows = self.rows
        return int(causal_pairs(rows.q_offset, rows.q_offset + rows.q_len, 0, rows.k_len).sum())


def batches(shrink: int, workload: Workload | None = None) -> Iterator[Batch]:
    """All lengths divided by `shrink`, which lengths read from a workload file do not bear."""
    if workload is not None and shrink != 1:
        raise ValueError(f"shrink is {shrink}, but a workload file's documents keep their lengths; give --shrink 1")
    for count, length, goal in ((1, 32_768, (600.0, 480.0)), (4, 8_192, None), (32, 1_024, (350.0, 250.0))):
        yield replace(documents(count, length // shrink), goal=goal)
    for count, q_len, goal in ((8, 4_096, (600.0, 480.0)), (64, 512, (580.0, 430.0)), (64, 128, (520.0, 350.0))):
        for shared in (True, False):
            yield replace(shards(count, q_len // shrink, PREFIX // shrink, shared), goal=goal)
    plan = workload_plan(workload) if workload is not None else sampled_plan(POOL_TOKENS // shrink)
    for batch in servers(plan):
        yield replace(batch, goal=PLAN_GOAL)


def documents(count: int, length: int) -> Batch:
    total = count * length
    return Batch(f"{count} of {length}", TaskRows.documents([length] * count), total, total, (count, length, length))


def shards(count: int, q_len: int, kv_len: int, shared: bool) -> Batch:
    """Shards of q_len queries at the end of kv_len keys: all of the same keys, or each of its own."""
    shard = np.arange(count)
    k_begin = shard * 0 if shared else shard * kv_len
    rows = TaskRows.aligned(shard * q_len, (shard + 1) * q_len, k_begin, k_begin + kv_len)
    name = f"{count} x q={q_len} kv={kv_len}, {'shared' if shared else 'own'} keys"
    return Batch(name, rows, count * q_len, int(rows.k_end.max()), None if shared else (count, q_len, kv_len))


def shard_lengths(shrink: int) -> Iterator[Batch]:
    """Shards of every length with keys of their own, as many as make MOST_Q queries or hold MOST_KEYS keys.

    The dense yardstick, whose heads each copy the keys, stays out of so many keys.
    """
    kv_len = PREFIX // shrink
    for q_len in SHARD_LENGTHS:
        if q_len <= kv_len:
            count = max(1, min(MOST_Q // shrink // q_len, MOST_KEYS // shrink // kv_len))
            yield replace(shards(count, q_len, kv_len, shared=False), uniform=None)


def sampled_plan(tokens: int) -> Plan:
    """A pool whose documents are no longer than a rank and are cut where a rank ends."""
    lengths = sample_lengths("prolong", POOL_RANKS * tokens, seed=0, max_document=tokens)
    layout = pack(lengths, ranks=POOL_RANKS, spanning=False)
    return balance(layout, model_named("llama3-8b"), tolerance=POOL_TOLERANCE)


def workload_plan(workload: Workload) -> Plan:
    layout = pack(np.concatenate(workload.sequences), ranks=workload.ranks)
    return balance(layout, model_named("llama3-8b"), tolerance=POOL_TOLERANCE)


def servers(plan: Plan) -> Iterator[Batch]:
    """The median server by task rows, then by work, and the one with the most rows."""
    num_rows = np.bincount(plan.tasks.server, minlength=plan.num_servers)
    order = np.lexsort((plan.work(), num_rows))
    for which, server in (("median", order[len(order) // 2]), ("most fragmented", order[-1])):
        tables = build(plan, int(server))
        rows = TaskRows(tables.q_begin, tables.q_end, tables.k_begin, tables.k_end, tables.q_offset)
        yield Batch(f"plan, {which} server: {len(rows)} tasks", rows, tables.queries.buffer_tokens,
                    tables.keys.buffer_tokens)
