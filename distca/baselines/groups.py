"""Replicas of context-parallel groups: what the baselines have in common.

A micro-batch is first rows, one to a replica, and then each row is cut over the cp ranks of its group, which gather
each other's keys. Data ranks g * cp to (g + 1) * cp - 1 are group g. Stages run 1F1B.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from distca.baselines.at_home import at_home
from distca.planning.micro_batch import MicroBatch
from distca.planning.step import StepPlan, step_among_data_ranks
from distca.spec import ModelShape
from distca.validation import check_whole
from distca.workload.layout import Layout
from distca.workload.packing import NanoBatch, pack

Cut = Callable[[Layout, int], Layout]  # rows of replicas, ranks of a group -> rows of ranks


def fixed_rows(micro_batches: Sequence[np.ndarray], replicas: int) -> list[Layout]:
    """Documents in the loader's order, as many tokens in every row, each document in one of them."""
    return [pack(lengths, ranks=replicas, spanning=False) for lengths in micro_batches]


def step_of_groups(
    rows: Sequence[Layout], cut: Cut, model: ModelShape, *, cp: int, layers: Sequence[int], tp: int = 1
) -> StepPlan:
    """`rows[m]` has micro-batch m's documents, one rank to a replica; `cut` spreads each over its group."""
    check_whole("cp", cp, remedy="give the number of ranks of a context-parallel group, 1 or more")
    packed = []
    for row in rows:
        layout = cut(row, cp) if cp > 1 else row
        packed.append(MicroBatch(layout.lengths, (NanoBatch(layout, np.arange(layout.num_documents)),)))
    return step_among_data_ranks(packed, lambda layout: at_home(layout, model, tp=tp), model, layers=layers, tp=tp,
                                 gather_ranks=cp)
