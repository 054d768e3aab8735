"""Equal tokens on every rank, no token lost, and errors that say what to change."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distca.workload.packing import causal_work, pack, pack_ping_pong
from tests.support.plans import random_lengths

seeds = st.integers(0, 2**32)


@settings(max_examples=60, deadline=None)
@given(seeds, st.integers(1, 9), st.integers(1, 2000), st.sampled_from(["given", "balanced"]))
def test_ranks_hold_equal_tokens_of_unchanged_documents(seed: int, ranks: int, tokens_per_rank: int,
                                                        placement: str) -> None:
    lengths = random_lengths(seed, ranks * tokens_per_rank)
    layout = pack(lengths, ranks=ranks, tokens_per_rank=tokens_per_rank, placement=placement)
    layout.validate()
    assert layout.num_ranks == ranks
    assert layout.lengths.tolist() == lengths.tolist()
    assert layout.tokens_per_rank().tolist() == [tokens_per_rank] * ranks


@settings(max_examples=40, deadline=None)
@given(seeds, st.integers(1, 9), st.integers(1, 500))
def test_given_is_one_stream_in_order(seed: int, ranks: int, tokens_per_rank: int) -> None:
    lengths = random_lengths(seed, ranks * tokens_per_rank)
    layout = pack(lengths, ranks=ranks)
    rows = [layout.tokens(rank) for rank in range(ranks)]
    document = np.concatenate([row.document for row in rows])
    position = np.concatenate([row.position for row in rows])
    assert document.tolist() == np.repeat(np.arange(len(lengths)), lengths).tolist()
    assert position.tolist() == [place for length in lengths for place in range(length)]


@settings(max_examples=40, deadline=None)
@given(seeds, st.integers(1, 9), st.integers(1, 500), st.sampled_from(["given", "balanced"]))
def test_without_spanning_no_document_leaves_its_rank(seed: int, ranks: int, tokens_per_rank: int,
                                                      placement: str) -> None:
    lengths = random_lengths(seed, ranks * tokens_per_rank, longest=tokens_per_rank)
    layout = pack(lengths, ranks=ranks, spanning=False, placement=placement)
    layout.validate()
    assert layout.tokens_per_rank().tolist() == [tokens_per_rank] * ranks
    if placement == "given":
        assert (layout.ranks_per_document() == 1).all()
    stops = set(np.cumsum(lengths).tolist())
    rows = set(range(tokens_per_rank, layout.num_tokens + 1, tokens_per_rank))
    assert set(np.cumsum(layout.lengths).tolist()) == stops | rows  # cut at row ends and nowhere else


@settings(max_examples=80, deadline=None)
@given(seeds, st.integers(1, 8), st.integers(1, 600), st.sampled_from(["given", "balanced"]))
def test_ping_and_pong_are_equal_and_cut_at_most_two_documents(seed: int, ranks: int, half_row: int,
                                                              placement: str) -> None:
    lengths = random_lengths(seed, 2 * ranks * half_row)
    home = [np.full(length, -1) for length in lengths.tolist()]  # rank of each token as a query
    num_documents = 0
    for number, nano in enumerate(pack_ping_pong(lengths, ranks=ranks, placement=placement)):
        layout, only = nano.layout, nano.layout.key_only
        layout.validate()
        assert layout.tokens_per_rank().tolist() == [half_row] * ranks
        assert layout.key_tokens_per_rank().sum() == layout.lengths.sum()
        assert (np.diff(nano.document) > 0).all()                # the batch's order, no document twice in a half
        assert number == 1 or len(only) == 0                     # ping reads nothing of pong's
        for document, start, stop, rank in zip(nano.document[only.document], only.start, only.stop, only.rank,
                                               strict=True):
            assert (home[document][start:stop] == rank).all()    # where ping has them
        for document, start, stop, rank in zip(nano.document[layout.document], layout.start, layout.stop, layout.rank,
                                               strict=True):
            assert (home[document][start:stop] == -1).all()
            home[document][start:stop] = rank
        num_documents += layout.num_documents
    assert all((ranks_of >= 0).all() for ranks_of in home)
    lone = lengths.max() ** 2 > 0.75 * (lengths**2).sum()        # one document has most of the work: cut for both
    assert len(lengths) <= num_documents <= len(lengths) + 1 + lone


@settings(max_examples=30, deadline=None)
@given(seeds, st.integers(1, 8), st.integers(1, 300))
def test_the_halves_do_not_depend_on_the_number_of_ranks(seed: int, ranks: int, half_row: int) -> None:
    lengths = random_lengths(seed, 2 * ranks * half_row)
    for some, one in zip(pack_ping_pong(lengths, ranks=ranks), pack_ping_pong(lengths, ranks=1), strict=True):
        assert some.document.tolist() == one.document.tolist()
        assert some.layout.lengths.tolist() == one.layout.lengths.tolist()


def test_ping_and_pong_share_the_work() -> None:
    lengths = [4000, 4000, 2000, 2000] + [100] * 40
    ping, pong = pack_ping_pong(lengths, ranks=4)
    work = [float((nano.layout.lengths.astype(float) ** 2).sum()) for nano in (ping, pong)]
    assert max(work) <= 1.01 * min(work)


def test_a_document_with_most_of_the_work_is_in_both_halves() -> None:
    """Else one half computes nearly all attention, and nothing hides its exchange."""
    lengths = [40_000, 3000] + [500] * 114
    ping, pong = pack_ping_pong(lengths, ranks=4)
    pairs = [float(causal_work(half.layout.start, half.layout.stop).sum()) for half in (ping, pong)]
    assert max(pairs) <= 1.1 * min(pairs)
    assert (pong.layout.key_only.start[pong.layout.key_only.document == 0] == 0).any()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ranks": 0}, "ranks is 0; give at least 1"),
        ({"ranks": -2}, "ranks is -2; give at least 1"),
        ({"ranks": 3}, "400 tokens do not divide over 3 ranks; cut the last document by 1 tokens .* or change ranks"),
        ({"ranks": 4, "tokens_per_rank": 99},
         "documents hold 400 tokens but 4 ranks of 99 hold 396; change ranks or tokens_per_rank"),
        ({"ranks": 4, "tokens_per_rank": 0}, "4 ranks of 0 hold 0; change"),
        ({"ranks": 4, "placement": "best"}, "placement is 'best'; choose one of: given, balanced"),
        ({"ranks": 4, "spanning": False},
         "document 1 has 200 tokens but a rank holds 100; raise tokens_per_rank or let documents span"),
        ({"ranks": 4, "placement": "balanced", "tolerance": -0.1}, "tolerance is -0.1; give"),
        ({"ranks": 4, "placement": "balanced", "tolerance": float("nan")}, "tolerance is nan; give"),
        ({"ranks": 4, "placement": "balanced", "speed": np.ones(3)}, "speed has .*3.* 4 ranks; give"),
        ({"ranks": 4, "placement": "balanced", "speed": np.array([1, 1, 1, np.nan])}, "speed is .*nan.*; give"),
        ({"ranks": 4, "placement": "balanced", "speed": np.array([1, 1, 1, -1.0])}, "speed is .*-1.0.*; give"),
        ({"ranks": 4, "placement": "balanced", "speed": np.zeros(4)}, "speed is .*0.0.*; give"),
    ])
def test_bad_arguments_are_named_with_a_remedy(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pack([100, 200, 100], **arguments)


@pytest.mark.parametrize(("lengths", "message"), [
    ([], "lengths is empty; give at least one"),
    ([10, 0], r"lengths\[1\] is 0; a document length is"),
    ([10, -4], r"lengths\[1\] is -4; a document length is"),
    ([10, 2.5], r"lengths\[1\] is 2.5; a document length is"),
])
@pytest.mark.parametrize("packer", [pack, pack_ping_pong])
def test_bad_lengths_are_named(packer: Callable[..., Any], lengths: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        packer(lengths, ranks=2)


def test_ping_pong_refuses_odd_rows() -> None:
    with pytest.raises(ValueError, match="there are 101 tokens per rank; ping and pong need an even number"):
        pack_ping_pong([202], ranks=2)
