"""WLB-LLM without deferred execution: its rows, and for each group whichever of two shardings attends sooner.

Per-document sharding balances the work of a group but cuts short documents into slivers, which kernels run slowly.
Per-sequence sharding keeps them whole but leaves ranks with unequal work. The choice is made anew for each group and
micro-batch, by the seconds that attention is known to take. Rows are fixed, or dealt by work with variable lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from distca.baselines.fixed_packing import per_sequence_layout
from distca.baselines.groups import step_of_groups
from distca.baselines.per_document_cp import head_tail_layout
from distca.cost.attention_time import AttentionTime
from distca.planning.plan import server_work
from distca.planning.step import StepPlan
from distca.planning.tasks import tasks_at_home
from distca.spec import ModelShape
from distca.workload.layout import Layout, layout_from_slices


def wlb_ideal_step(
    rows: Sequence[Layout], cost: AttentionTime, model: ModelShape, *, layers: Sequence[int], tp: int = 1, cp: int = 1
) -> StepPlan:
    """A step with `rows[m]` over the replicas in micro-batch m, as `fixed_rows` or `variable_rows` make them."""
    return step_of_groups(rows, partial(adaptive_layout, cost=cost), model, cp=cp, layers=layers, tp=tp)


def adaptive_layout(layout: Layout, cp: int, *, cost: AttentionTime) -> Layout:
    """Every row over cp ranks, cut by document or by sequence, whichever group of tasks ends sooner."""
    cut = [cutter(layout, cp) for cutter in (head_tail_layout, per_sequence_layout)]
    by_document, by_sequence = (_longest(one, cp, cost) for one in cut)
    better = by_document <= by_sequence                          # [groups]
    taken = [chosen[one.rank // cp] for one, chosen in zip(cut, (better, ~better), strict=True)]
    document, start, stop, rank = (
        np.concatenate([getattr(one, name)[mask] for one, mask in zip(cut, taken, strict=True)])
        for name in ("document", "start", "stop", "rank"))
    return layout_from_slices(layout.lengths, document, start, stop, rank, layout.num_ranks * cp)


def _longest(layout: Layout, cp: int, cost: AttentionTime) -> np.ndarray:
    """[groups] seconds of the slowest rank, forward and backward."""
    tasks, speeds = tasks_at_home(layout), cost.speeds(layout.num_ranks)
    return sum(((server_work(tasks, layout.num_ranks, cost, backward) / speeds).reshape(-1, cp).max(axis=1)
                for backward in (False, True)), np.zeros(layout.num_ranks // cp))
