"""Baselines are ordinary plans: valid, counted by the same rules, and what their names say.

Baselines keep what they promise: equal tokens, or equal work as far as memory allows.
"""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distca.baselines import (
    adaptive_layout,
    at_home,
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
from distca.models import MODELS
from distca.planning.balance import balance
from distca.planning.plan import max_over_mean, server_work
from distca.planning.tasks import tasks_at_home
from distca.workload.layout import Layout, layout_from_rows
from distca.workload.packing import pack
from tests.support.plans import LAYOUT_KINDS, LayoutKind, random_layout, tokens_moved

MODEL = MODELS["llama3-8b"]
SEEDS = st.integers(0, 10_000)


@given(SEEDS, st.sampled_from(LAYOUT_KINDS), st.integers(1, 5), st.integers(1, 60))
def test_at_home_moves_no_query(seed: int, kind: LayoutKind, ranks: int, tokens: int) -> None:
    layout = random_layout(seed, kind, ranks, tokens)
    plan = at_home(layout, MODEL)
    plan.validate()
    assert plan.layout is layout
    assert plan.summary().num_moved == 0
    queries, _ = tokens_moved(layout, plan.tasks, ranks)
    assert queries.sum() == 0


def test_at_home_says_why_it_is_not_level() -> None:
    lopsided = at_home(layout_from_rows([[4096], [1024] * 4]), MODEL)
    assert lopsided.limit is not None and lopsided.summary().work_max_over_mean > 1.5
    assert at_home(layout_from_rows([[512], [512]]), MODEL).limit is None


@given(st.lists(st.lists(st.integers(1, 70), min_size=1, max_size=8), min_size=1, max_size=3), st.integers(1, 9))
def test_rows_of_a_group_differ_by_at_most_one_token(rows: list[list[int]], cp: int) -> None:
    plan = at_home(head_tail_layout(layout_from_rows(rows), cp), MODEL)
    plan.validate()
    tokens = plan.layout.tokens_per_rank().reshape(len(rows), cp)
    assert (tokens.max(axis=1) - tokens.min(axis=1) <= 1).all()
    assert tokens.sum(axis=1).tolist() == [sum(row) for row in rows]


@given(st.integers(1, 400), st.integers(1, 9))
def test_a_document_lies_in_head_and_tail_pairs(length: int, cp: int) -> None:
    """Ranks ascend over the heads and descend over the tails, and a pair's chunks differ by at most one token."""
    layout = head_tail_layout(layout_from_rows([[length]]), cp)
    order = layout.by_document()
    ranks = layout.rank[order]
    turn = int(ranks.argmax())
    assert (np.diff(ranks[:turn + 1]) > 0).all() and (np.diff(ranks[turn:]) < 0).all()
    chunk = (layout.stop - layout.start)
    for rank in range(cp - 1):
        pair = chunk[layout.rank == rank]
        if length >= 2 * cp:
            assert len(pair) == 2
        if len(pair) == 2:
            assert abs(int(pair[0] - pair[1])) <= 1
    assert (np.bincount(layout.rank, minlength=cp)[cp - 1:] <= 1).all()  # neighbours are one slice


def test_chunks_are_equal_where_lengths_divide() -> None:
    layout = head_tail_layout(layout_from_rows([[80, 16]]), cp=4)
    slices = list(zip(layout.rank.tolist(), layout.document.tolist(), layout.start.tolist(), layout.stop.tolist(),
                      strict=True))
    assert slices[:4] == [(0, 0, 0, 10), (0, 0, 70, 80), (0, 1, 0, 2), (0, 1, 14, 16)]
    assert slices[-2:] == [(3, 0, 30, 50), (3, 1, 6, 10)]


def test_one_token_documents_go_round_the_group() -> None:
    assert head_tail_layout(layout_from_rows([[1] * 12]), cp=4).tokens_per_rank().tolist() == [3, 3, 3, 3]


@pytest.mark.parametrize("cp", [2, 4, 8])
def test_work_is_level_and_keys_are_gathered(cp: int) -> None:
    lengths = [4096 * cp, 2048, 513, 77]
    plan = at_home(head_tail_layout(layout_from_rows([lengths]), cp), MODEL)
    assert max_over_mean(plan.work(), plan.speed) < 1.01
    queries, keys = tokens_moved(plan.layout, plan.tasks, cp)
    assert queries.sum() == 0
    tail = int(plan.layout.stop[plan.layout.rank == 0].max())
    assert tail == max(lengths)                                  # the first rank's tail sees a whole document
    elsewhere = sum(lengths) - int(plan.layout.tokens_per_rank()[0])
    assert elsewhere - 3 * len(lengths) <= keys[:, 0].sum() <= elsewhere
    assert keys.sum() * MODEL.kv_token_bytes() < plan.summary().bytes_all_gather


def test_short_documents_cost_it_bytes_that_a_plan_does_not_need() -> None:
    lengths = [256] * 64
    spread = at_home(head_tail_layout(layout_from_rows([lengths]), 8), MODEL).summary()
    planned = balance(pack(lengths, ranks=8), MODEL).summary()
    assert spread.bytes_total > 0 and planned.bytes_total == 0


def test_groups_stay_apart_unless_a_document_spans_them() -> None:
    apart = at_home(head_tail_layout(layout_from_rows([[300, 20], [320]]), 2), MODEL)
    _, keys = tokens_moved(apart.layout, apart.tasks, 4)
    assert keys[:2, 2:].sum() == 0 and keys[2:, :2].sum() == 0 and keys.sum() > 0
    spanning = at_home(head_tail_layout(pack([500, 140], ranks=2), 2), MODEL)
    spanning.validate()
    _, keys = tokens_moved(spanning.layout, spanning.tasks, 4)
    assert keys[:2, 2:].sum() > 0


def test_cp_of_one_is_attention_at_home() -> None:
    layout = pack([100, 60, 40], ranks=2)
    assert at_home(head_tail_layout(layout, 1), MODEL).layout.stop.tolist() == layout.stop.tolist()


@pytest.mark.parametrize("cp", [0, -2, 1.5, True, None])
def test_a_wrong_group_size_is_named(cp: Any) -> None:
    with pytest.raises(ValueError, match=f"cp is {cp!r}; give"):
        at_home(head_tail_layout(layout_from_rows([[10]]), cp), MODEL)


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
