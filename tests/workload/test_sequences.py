"""Batches dealt from a corpus, and its figures, against the plainest computation of each."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distca.workload.sequences import LONG_FROM, CorpusFigures, Source, deal_batches

LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=40)


def _dealt_token_by_token(lengths: list[int], batch_tokens: int, num_batches: int) -> list[list[int]]:
    """A token at a time: a document ends where its tokens or its batch do."""
    batches: list[list[int]] = [[]]
    left = batch_tokens
    for length in lengths:
        run = 0
        for _ in range(length):
            run += 1
            left -= 1
            if not left:
                batches[-1].append(run)
                batches.append([])
                run, left = 0, batch_tokens
        if run:
            batches[-1].append(run)
    return batches[:-1][:num_batches]


@given(LENGTHS, st.integers(1, 100), st.integers(1, 5))
def test_batches_are_cut_where_tokens_say(lengths: list[int], batch_tokens: int, num_batches: int) -> None:
    found = [batch.tolist() for batch in deal_batches(np.array(lengths), batch_tokens, num_batches, None)]
    assert found == _dealt_token_by_token(lengths, batch_tokens, num_batches)


@given(LENGTHS, st.integers(0, 9))
def test_shuffled_batches_have_the_same_documents(lengths: list[int], seed: int) -> None:
    total = sum(lengths)
    whole, = deal_batches(np.array(lengths), total, 3, seed)
    assert sorted(whole.tolist()) == sorted(lengths)
    again, = deal_batches(np.array(lengths), total, 1, seed)
    assert np.array_equal(whole, again)
    assert deal_batches(np.array(lengths), total + 1, 3, seed) == []


def test_the_seed_is_what_shuffles() -> None:
    lengths = np.arange(1, 200)
    orders = {tuple(deal_batches(lengths, 1000, 1, seed)[0].tolist()) for seed in range(4)}
    assert len(orders) == 4


@given(st.lists(st.integers(1, 2**22), min_size=1, max_size=30))
def test_figures_of_a_corpus(lengths: list[int]) -> None:
    figures = CorpusFigures.of(np.array(lengths))
    assert (figures.documents, figures.tokens, figures.longest) == (len(lengths), sum(lengths), max(lengths))
    for level, length in figures.quantiles:      # the smallest length that so many documents do not exceed
        no_longer = [sum(other <= one for other in lengths) / len(lengths) for one in sorted(lengths)]
        assert length == next(one for one, share in zip(sorted(lengths), no_longer, strict=True)
                              if share >= level - 1e-12)
    pairs = sum(length * (length + 1) // 2 for length in lengths)
    assert [one.least for one in figures.long_documents] == list(LONG_FROM)
    for one in figures.long_documents:
        long_ones = [length for length in lengths if length >= one.least]
        assert one.documents == len(long_ones)
        assert one.token_share == pytest.approx(sum(long_ones) / sum(lengths))
        assert one.attention_share == pytest.approx(sum(n * (n + 1) // 2 for n in long_ones) / pairs)


def test_long_documents_hold_attention_out_of_proportion() -> None:
    """One document of 64K among 64 of 1K: half of the tokens, nearly all of the attention."""
    figures = CorpusFigures.of(np.array([65_536] + [1024] * 64))
    at_8k = figures.long_documents[0]
    assert at_8k.token_share == 0.5
    assert at_8k.attention_share == pytest.approx(65_536 * 65_537 / (65_536 * 65_537 + 64 * 1024 * 1025))


def test_an_unknown_sampler_is_refused() -> None:
    with pytest.raises(ValueError, match="sampler 'prolnog' is unknown; did you mean 'prolong'"):
        Source("prolnog")
