"""Lengths from samplers, files and the standard library: right in distribution, exact in number, strict on input."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distca.workload.documents import (
    LOGNORMAL_MEDIAN,
    LOGNORMAL_SIGMA,
    LONG_DOCUMENT,
    QUANTILE_LEVELS,
    QUANTILES,
    SAMPLERS,
    check_lengths,
    draw_lengths,
    fill,
    sample_lengths,
)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(SAMPLERS), st.integers(1, 3_000_000), st.integers(0, 2**32), st.booleans(),
       st.none() | st.integers(100, 200_000))
def test_samples_hold_exactly_the_tokens_asked_for(name: str, num_tokens: int, seed: int, upsample: bool,
                                                   max_document: None) -> None:
    lengths = sample_lengths(name, num_tokens, seed=seed, upsample=upsample, max_document=max_document)
    assert lengths.dtype == np.int64
    assert lengths.sum() == num_tokens
    assert lengths.min() >= 1
    if max_document is not None:
        assert lengths.max() <= max_document
    again = sample_lengths(name, num_tokens, seed=seed, upsample=upsample, max_document=max_document)
    assert np.array_equal(lengths, again)


@pytest.mark.parametrize("name", SAMPLERS)
def test_more_tokens_only_add_documents_and_seeds_differ(name: str) -> None:
    few, many = (sample_lengths(name, n, seed=3) for n in (1_000_000, 80_000_000))
    assert np.array_equal(few[:-1], many[: len(few) - 1])
    assert not np.array_equal(few[:50], sample_lengths(name, 1_000_000, seed=4)[:50])


@pytest.mark.parametrize("name", list(QUANTILES))
def test_draws_follow_the_quantile_table(name: str) -> None:
    draws = draw_lengths(np.random.default_rng(0), 400_000, name)
    low, high = QUANTILES[name][0], QUANTILES[name][-1]
    assert low <= draws.min() and draws.max() <= high
    share = np.searchsorted(np.sort(draws), QUANTILES[name], side="right") / len(draws)
    inner = slice(1, -1)  # a standard deviation of a share is at most 0.5 / sqrt(400,000) = 0.0008
    np.testing.assert_allclose(share[inner], QUANTILE_LEVELS[inner], atol=0.004)


def test_interpolation_between_quantiles_is_log_linear() -> None:
    draws = draw_lengths(np.random.default_rng(1), 400_000, "prolong")
    middle = np.sqrt(1913 * 3467)  # halfway in logarithms between the 50 % and 75 % quantiles
    assert np.mean(draws <= middle) == pytest.approx(0.625, abs=0.004)


@pytest.mark.parametrize("name, published", [
    ("prolong", {8192: 0.25, 32768: 0.05, 65536: 0.03, 131072: 0.02}),
    ("pretrain", {8192: 0.22, 32768: 0.17, 65536: 0.13, 131072: 0.0}),
])
def test_token_share_of_long_documents_is_near_the_published_one(name: str, published: dict[int, float]) -> None:
    draws = draw_lengths(np.random.default_rng(2), 1_000_000, name)
    for length, share in published.items():
        assert draws[draws > length].sum() / draws.sum() == pytest.approx(share, abs=0.03)


@pytest.mark.parametrize("name", list(QUANTILES))
def test_upsampling_repeats_long_documents_and_halves_the_rest(name: str) -> None:
    plain, upsampled = (sample_lengths(name, 400_000_000, seed=5, upsample=flag) for flag in (False, True))
    long_per_short = [np.sum(x > LONG_DOCUMENT) / np.sum(x <= LONG_DOCUMENT) for x in (plain, upsampled)]
    assert long_per_short[1] / long_per_short[0] == pytest.approx(4 / 0.5, rel=0.25)


def test_repeated_documents_come_four_times_and_apart() -> None:
    lengths = sample_lengths("prolong", 30_000_000, seed=6)  # within the first chunk of draws
    values, counts = np.unique(lengths[lengths > LONG_DOCUMENT], return_counts=True)
    assert counts.max() <= 4 and np.mean(counts) > 2
    places = [np.flatnonzero(lengths == value) for value in values]
    assert np.median([np.diff(place).mean() for place in places if len(place) > 1]) > 100


def test_lognormal_has_its_median_and_spread() -> None:
    draws = draw_lengths(np.random.default_rng(7), 400_000, "lognormal")
    assert np.median(draws) == pytest.approx(LOGNORMAL_MEDIAN, rel=0.02)
    assert np.std(np.log(draws)) == pytest.approx(LOGNORMAL_SIGMA, rel=0.02)


@pytest.mark.parametrize("arguments, message", [
    ({"name": "prolog"}, "sampler 'prolog' is unknown; did you mean 'prolong'"),
    ({"num_tokens": 0}, "num_tokens is 0"),
    ({"num_tokens": 2.0}, "num_tokens is 2.0"),
    ({"max_document": 0}, "max_document is 0"),
    ({"seed": -1}, "seed is -1"),
])
def test_sampler_arguments_are_checked(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sample_lengths(**{"name": "prolong", "num_tokens": 1000, "seed": 0, **arguments})


@given(st.lists(st.integers(1, 50), min_size=1), st.data())
def test_fill_takes_leading_documents_and_cuts_the_last(lengths: list[int], data: st.DataObject) -> None:
    num_tokens = data.draw(st.integers(1, sum(lengths)))
    filled = fill(lengths, num_tokens)
    tokens = np.repeat(np.arange(len(lengths)), lengths)[:num_tokens]  # which document each token belongs to
    assert filled.tolist() == np.unique(tokens, return_counts=True)[1].tolist()


def test_fill_says_what_is_missing_and_leaves_its_input_alone() -> None:
    lengths = np.array([5, 6])
    with pytest.raises(ValueError, match="hold 11 tokens but 12 are needed; add documents"):
        fill(lengths, 12)
    fill(lengths, 7)
    assert lengths.tolist() == [5, 6]


@pytest.mark.parametrize("lengths", [[1, 2], (1, 2), np.array([1, 2], dtype=np.uint8), range(1, 3),
                                     [np.int32(1), np.int64(2)]])
def test_whole_numbers_of_any_kind_are_lengths(lengths: Any) -> None:
    checked = check_lengths(lengths)
    assert checked.dtype == np.int64 and checked.tolist() == [1, 2]


@pytest.mark.parametrize("lengths, message", [
    ([], "docs is empty"),
    (np.array([]), "docs is empty"),
    ([4, 0], r"docs\[1\] is 0;"),
    ([-3], r"docs\[0\] is -3;"),
    ([3.5], r"docs\[0\] is 3.5;"),
    ([3.0], r"docs\[0\] is 3.0;"),
    (np.array([3.0]), r"docs\[0\] is 3.0;"),
    ([True], r"docs\[0\] is True;"),
    (np.array([True]), r"docs\[0\] is True;"),
    (["7"], r"docs\[0\] is '7';"),
    ([1, None], r"docs\[1\] is None;"),
    ([[1, 2]], r"docs\[0\] is \[1, 2\];"),
    ([1, 2**31], r"docs\[1\] is 2147483648;"),
    ([1, 2**70], r"docs\[1\] is 1180591620717411303424;"),
    (np.ones((2, 2), dtype=int), r"docs has shape \(2, 2\)"),
    ("12", "docs is '12'"),
    (12, "docs is 12"),
])
def test_bad_lengths_are_named(lengths: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        check_lengths(lengths, "docs")
    assert "\n" not in str(caught.value)
