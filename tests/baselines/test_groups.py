"""Baselines keep what they promise: equal tokens, or equal work as far as memory allows."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distca.baselines.fixed_packing import fixed_packing, fixed_rows, per_sequence_layout
from distca.baselines.variable_length import variable_length, variable_length_layout
from distca.baselines.wlb import group_attention
from distca.cost.latency_table import analytic_table
from distca.cost.work import causal_pairs
from distca.spec import model_named
from distca.workload.layout import layout_from_rows

MODEL = model_named("llama3-8b")
TABLE = analytic_table(MODEL, 550e12)
lengths_of = st.lists(st.integers(1, 900), min_size=1, max_size=12)


@settings(max_examples=50, deadline=None)
@given(st.lists(lengths_of, min_size=1, max_size=3), st.integers(1, 5))
def test_per_sequence_shards_are_equal_tokens_of_the_same_documents(rows, cp):
    layout = per_sequence_layout(layout_from_rows(rows), cp)
    layout.validate()
    tokens = layout.tokens_per_rank().reshape(len(rows), cp)
    assert (tokens.max(axis=1) - tokens.min(axis=1) <= 2).all()
    assert tokens.sum(axis=1).tolist() == [sum(row) for row in rows]


def test_fixed_packing_is_equal_tokens_and_exact():
    sequences = [np.array([1024, 3072]), np.array([4096]), np.array([2048, 2048]), np.array([1, 4095])]
    plan = fixed_packing(sequences, MODEL, dp=2, cp=2)
    plan.validate()
    assert plan.layout.tokens_per_rank().tolist() == [4096] * 4
    assert (plan.tasks.home == plan.tasks.server).all()
    with pytest.raises(ValueError, match="num_rows is 3 but there are 4"):
        fixed_rows(sequences, 3)


def test_one_long_document_is_level_over_a_group():
    for sharding in ("document", "sequence", "adaptive"):
        found = group_attention(layout_from_rows([[65536]]), TABLE, cp=4, sharding=sharding)
        assert found.forward.max() <= 1.01 * found.forward.mean()


def test_adaptive_is_never_slower_than_either_sharding():
    rng = np.random.default_rng(0)
    layout = layout_from_rows([rng.integers(16, 3000, 20).tolist(), [20000, 300, 300], [40000]])
    longest = {sharding: (found.forward.max(axis=1) + found.backward.max(axis=1))
               for sharding in ("document", "sequence", "adaptive")
               for found in [group_attention(layout, TABLE, cp=8, sharding=sharding)]}
    assert (longest["adaptive"] <= np.minimum(longest["document"], longest["sequence"])).all()
    assert (longest["document"] != longest["sequence"]).any()


def _work(lengths):
    return lengths.astype(float) ** 2 + 2000.0 * lengths


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 3000), min_size=2, max_size=8), st.integers(2, 3))
def test_variable_length_is_near_the_best_that_any_dealing_reaches(lengths, chunks):
    lengths = np.array(lengths)
    work = _work(lengths)
    chunk = variable_length(lengths, work, num_chunks=chunks, max_tokens=int(lengths.sum()))
    best = min(np.bincount(deal, weights=work, minlength=chunks).max()
               for deal in product(range(chunks), repeat=len(lengths)))
    assert np.bincount(chunk, weights=work, minlength=chunks).max() <= 4 / 3 * best


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 3000), min_size=4, max_size=60), st.integers(1, 6), st.floats(1.05, 3.0))
def test_variable_length_keeps_the_memory_cap(lengths, chunks, slack):
    lengths = np.array(lengths)
    cap = int(slack * lengths.sum() / chunks)
    chunk = variable_length(lengths, _work(lengths), num_chunks=chunks, max_tokens=cap)
    if chunk is None:
        return
    assert np.bincount(chunk, weights=lengths, minlength=chunks).max() <= cap
    layout = variable_length_layout(lengths, chunk, chunks)
    layout.validate()


def test_many_documents_are_balanced_within_a_percent_and_tokens_pay():
    rng = np.random.default_rng(1)
    lengths = np.concatenate([np.full(4, 60000), rng.integers(500, 4000, 400)])
    work = causal_pairs(0 * lengths, lengths) + 4000.0 * lengths
    chunk = variable_length(lengths, work, num_chunks=8, max_tokens=int(lengths.sum()))
    loads = np.bincount(chunk, weights=work, minlength=8)
    tokens = np.bincount(chunk, weights=lengths, minlength=8)
    assert loads.max() <= max(1.01 * loads.mean(), work.max() * 1.001)
    assert tokens.max() > 1.5 * tokens.min()
    tight = variable_length(lengths, work, num_chunks=8, max_tokens=int(1.05 * lengths.sum() / 8))
    assert np.bincount(tight, weights=work, minlength=8).max() > loads.max()
    assert variable_length(lengths, work, num_chunks=8, max_tokens=50000) is None
