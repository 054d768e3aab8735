"""WLB-LLM's adaptive context parallelism: per group, whichever of two shardings finishes its attention sooner.

Per-document sharding balances the work of a group but cuts short documents into slivers, which kernels run slowly.
Per-sequence sharding keeps them whole but leaves ranks with unequal work. The choice is made anew for each group and
micro-batch, by the seconds that a latency table predicts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from distca.baselines.fixed_packing import per_sequence_layout
from distca.baselines.per_document_cp import head_tail_layout
from distca.cost.latency_table import LatencyTable
from distca.planning.plan import task_work
from distca.planning.tasks import tasks_at_home
from distca.workload.layout import Layout

SHARDINGS = ("document", "sequence", "adaptive")


@dataclass(frozen=True, slots=True, eq=False)
class GroupAttention:
    """Attention seconds of table heads and tokens per rank, one row per group, one column per rank of it."""

    forward: np.ndarray   # [groups, cp]
    backward: np.ndarray  # [groups, cp]
    tokens: np.ndarray    # [groups, cp]


def group_attention(layout: Layout, cost: LatencyTable, *, cp: int, sharding: str) -> GroupAttention:
    """Attention of every row of `layout` spread over a group of cp ranks, with keys gathered."""
    if sharding not in SHARDINGS:
        raise ValueError(f"sharding is {sharding!r}; choose one of: {', '.join(SHARDINGS)}")
    if sharding != "adaptive" or cp == 1:
        cut = head_tail_layout if sharding == "document" and cp > 1 else per_sequence_layout
        return _timed(cut(layout, cp), cost, cp)
    by_document, by_sequence = (_timed(cut(layout, cp), cost, cp) for cut in (head_tail_layout, per_sequence_layout))
    longest = [(side.forward.max(axis=1) + side.backward.max(axis=1)) for side in (by_document, by_sequence)]
    choose = (longest[0] <= longest[1])[:, None]                 # [groups, 1]
    return GroupAttention(
        np.where(choose, by_document.forward, by_sequence.forward),
        np.where(choose, by_document.backward, by_sequence.backward),
        np.where(choose, by_document.tokens, by_sequence.tokens))


def _timed(layout: Layout, cost: LatencyTable, cp: int) -> GroupAttention:
    tasks = tasks_at_home(layout)
    backward = cost.seconds(tasks.q_len, tasks.kv_len, backward=True)
    forward, back = (np.bincount(tasks.server, weights=seconds, minlength=layout.num_ranks).reshape(-1, cp)
                     for seconds in (task_work(tasks, cost), backward))
    return GroupAttention(forward, back, layout.tokens_per_rank().reshape(-1, cp))
