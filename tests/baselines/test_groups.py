"""Baselines keep what they promise: equal tokens, or equal work as far as memory allows."""

from __future__ import annotations

from functools import partial
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distca.baselines import (
    adaptive_layout,
    fixed_rows,
    head_tail_layout,
    per_sequence_layout,
    step_of_groups,
    variable_length,
    variable_rows,
)
from distca.cost.attention_time import AttentionTime
from distca.cost.latency_table import analytic_table
from distca.cost.work import causal_pairs
from distca.models import model_named
from distca.planning.plan import server_work
from distca.planning.tasks import tasks_at_home
from distca.workload.layout import Layout, layout_from_rows

MODEL = model_named("llama3-8b")
COST = AttentionTime.of(analytic_table(MODEL, 550e12), MODEL, 8)
lengths_of = st.lists(st.integers(1, 900), min_size=1, max_size=12)


@settings(max_examples=50, deadline=None)
@given(st.lists(lengths_of, min_size=1, max_size=3), st.integers(1, 5))
def test_per_sequence_shards_are_equal_tokens_of_the_same_documents(rows: list[list[int]], cp: int) -> None:
    layout = per_sequence_layout(layout_from_rows(rows), cp)
    layout.validate()
    tokens = layout.tokens_per_rank().reshape(len(rows), cp)
    assert (tokens.max(axis=1) - tokens.min(axis=1) <= 2).all()
    assert tokens.sum(axis=1).tolist() == [sum(row) for row in rows]


def _longest(layout: Layout, cp: int) -> np.ndarray:
    """[groups] seconds of the slowest rank, forward and backward."""
    return sum(server_work(tasks_at_home(layout), layout.num_ranks, COST, backward).reshape(-1, cp).max(axis=1)
               for backward in (False, True))


def test_fixed_packing_is_equal_tokens_and_exact() -> None:
    micro_batches = [np.array([1024, 3072, 4096]), np.array([2048, 2048, 1, 4095])]
    for cut in (per_sequence_layout, head_tail_layout):
        for cp in (1, 2, 4):
            rows = fixed_rows(micro_batches if cp > 1 else [np.concatenate(micro_batches)], 4 // cp)
            step = step_of_groups(rows, cut, MODEL, layers=(3, 2), cp=cp)
            step.validate()
            assert (step.gather_ranks, step.is_shared, step.num_data) == (cp, False, 4)
            for plan in step.plans:
                assert len(set(plan.layout.tokens_per_rank().tolist())) == 1
                assert (plan.tasks.home == plan.tasks.server).all()
    with pytest.raises(ValueError, match="document 0 has 5000 tokens but a rank holds 4096"):
        fixed_rows([np.array([5000, 3192])], 2)
    with pytest.raises(ValueError, match="cp is 0; give the number of ranks"):
        step_of_groups(fixed_rows(micro_batches, 1), head_tail_layout, MODEL, cp=0, layers=(1,))


def test_one_long_document_is_level_over_a_group() -> None:
    row = layout_from_rows([[65536]])
    for layout in (head_tail_layout(row, 4), per_sequence_layout(row, 4), adaptive_layout(row, 4, cost=COST)):
        seconds = server_work(tasks_at_home(layout), 4, COST)
        assert seconds.max() <= 1.01 * seconds.mean()


def test_adaptive_is_never_slower_than_either_sharding() -> None:
    rng = np.random.default_rng(0)
    rows = layout_from_rows([rng.integers(16, 3000, 20).tolist(), [20000, 300, 300], [40000]])
    adaptive = adaptive_layout(rows, 8, cost=COST)
    adaptive.validate()
    by_document, by_sequence = (_longest(cut(rows, 8), 8) for cut in (head_tail_layout, per_sequence_layout))
    # bit for bit: a rank has the same tasks either way, priced one by one and added up in the same order
    np.testing.assert_array_equal(_longest(adaptive, 8), np.minimum(by_document, by_sequence))
    assert (by_document != by_sequence).any()
    step_of_groups([rows], partial(adaptive_layout, cost=COST), MODEL, layers=(2,), cp=8).validate()


def test_chunks_are_rows_of_micro_batches_and_empty_ones_are_none() -> None:
    lengths = np.array([4000, 3000, 100, 200, 300])
    chunk = np.array([0, 1, 1, 5, 4])                            # two replicas: nothing is left for micro-batch 1
    rows = variable_rows(lengths, chunk, 2)
    assert [row.tokens_per_rank().tolist() for row in rows] == [[4000, 3100], [300, 200]]
    step = step_of_groups(rows, head_tail_layout, MODEL, layers=(1, 1), cp=2)
    step.validate()
    assert len(step.micro_batches) == 2 and step.num_tokens == lengths.sum()


def _work(lengths: np.ndarray) -> np.ndarray:
    return lengths.astype(float) ** 2 + 2000.0 * lengths


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 3000), min_size=2, max_size=8), st.integers(2, 3))
def test_variable_length_is_near_the_best_that_any_dealing_reaches(drawn: list[int], chunks: int) -> None:
    lengths = np.array(drawn)
    work = _work(lengths)
    chunk = variable_length(lengths, work, num_chunks=chunks, max_tokens=int(lengths.sum()))
    assert chunk is not None
    best = min(np.bincount(deal, weights=work, minlength=chunks).max()
               for deal in product(range(chunks), repeat=len(lengths)))
    assert np.bincount(chunk, weights=work, minlength=chunks).max() <= 4 / 3 * best


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 3000), min_size=4, max_size=60), st.integers(1, 6), st.floats(1.05, 3.0))
def test_variable_length_keeps_the_memory_cap(drawn: list[int], chunks: int, slack: float) -> None:
    lengths = np.array(drawn)
    cap = int(slack * lengths.sum() / chunks)
    chunk = variable_length(lengths, _work(lengths), num_chunks=chunks, max_tokens=cap)
    if chunk is None:
        return
    assert np.bincount(chunk, weights=lengths, minlength=chunks).max() <= cap
    for row in variable_rows(lengths, chunk, chunks):
        row.validate()


def test_many_documents_are_balanced_within_a_percent_and_tokens_pay() -> None:
    rng = np.random.default_rng(1)
    lengths = np.concatenate([np.full(4, 60000), rng.integers(500, 4000, 400)])
    work = causal_pairs(0 * lengths, lengths) + 4000.0 * lengths
    chunk = variable_length(lengths, work, num_chunks=8, max_tokens=int(lengths.sum()))
    assert chunk is not None
    loads = np.bincount(chunk, weights=work, minlength=8)
    tokens = np.bincount(chunk, weights=lengths, minlength=8)
    assert loads.max() <= max(1.01 * loads.mean(), work.max() * 1.001)
    assert tokens.max() > 1.5 * tokens.min()
    tight = variable_length(lengths, work, num_chunks=8, max_tokens=int(1.05 * lengths.sum() / 8))
    assert tight is not None and np.bincount(tight, weights=work, minlength=8).max() > loads.max()
    assert variable_length(lengths, work, num_chunks=8, max_tokens=50000) is None
