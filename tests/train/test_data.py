"""The stream of documents: every token once an epoch, whatever the batches, and on from any position."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from distca.train.data import Stream, TextPiece
from tests.support.plans import random_lengths
from tests.support.refusals import refusal

seeds = st.integers(0, 2**32)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=12).filter(any), seeds, st.integers(1, 60), st.integers(0, 9))
def test_an_epoch_is_every_token_once_and_pieces_stay_whole(lengths: list[int], seed: int, num_tokens: int,
                                                            max_document: int) -> None:
    stream = Stream(np.array(lengths), seed=seed, max_document=max_document)
    total = sum(lengths)
    taken: list[tuple[int, int]] = []
    while len(taken) < 2 * total:
        pieces = stream.take(num_tokens)
        assert sum(piece.stop - piece.start for piece in pieces) == num_tokens
        assert all(piece.start < piece.stop for piece in pieces)
        assert not max_document or all(piece.stop - piece.start <= max_document for piece in pieces)
        taken += [(piece.document, place) for piece in pieces for place in range(piece.start, piece.stop)]
    for epoch in (taken[:total], taken[total:2 * total]):
        assert sorted(epoch) == [(document, place) for document, length in enumerate(lengths)
                                 for place in range(length)]
        longest = max_document or max(lengths)
        begins = [(document, place) for document, place in epoch if place % longest == 0]
        assert epoch == [(document, place) for document, begin in begins
                         for place in range(begin, min(begin + longest, lengths[document]))]


def test_a_document_that_does_not_fit_opens_the_next_batch() -> None:
    stream = Stream(np.array([10]), seed=0)
    assert stream.take(4) == [TextPiece(0, 0, 4)]
    assert stream.take(4) == [TextPiece(0, 4, 8)]
    assert stream.take(4) == [TextPiece(0, 8, 10), TextPiece(0, 0, 2)]   # the corpus begins anew within a batch


def test_the_order_follows_seed_and_epoch() -> None:
    lengths = np.ones(50, dtype=int)
    orders = [[piece.document for piece in stream.take(50)] for stream in
              (Stream(lengths, seed=1), Stream(lengths, seed=1), Stream(lengths, seed=2))]
    assert orders[0] == orders[1] != orders[2]
    stream = Stream(lengths, seed=1)
    assert stream.take(50) != stream.take(50)


@settings(max_examples=60, deadline=None)
@given(seeds, st.integers(1, 50), st.integers(0, 12), st.integers(1, 50))
def test_a_stream_continues_at_the_same_token_whatever_the_batch(seed: int, before: int, num_batches: int,
                                                                 after: int) -> None:
    lengths = random_lengths(seed, 60)

    def places(pieces: list[TextPiece]) -> list[tuple[int, int]]:
        return [(piece.document, place) for piece in pieces for place in range(piece.start, piece.stop)]

    whole = places(Stream(lengths, seed=seed).take(before * num_batches + 3 * after))
    first = Stream(lengths, seed=seed)
    for _ in range(num_batches):
        first.take(before)
    second = Stream(lengths, seed=seed)
    second.take(7)
    second.load(first.state())
    assert second.state() == first.state()
    assert second.state()["tokens"] == before * num_batches
    rest = [place for _ in range(3) for place in places(second.take(after))]
    assert rest == whole[before * num_batches:]


def test_a_position_in_other_data_is_refused() -> None:
    state = Stream(np.array([5, 6]), seed=3).state()
    assert "data.seed is 4 but the checkpoint's is 3" in refusal(Stream(np.array([5, 6]), seed=4).load, state)
    for lengths in ([5, 7], [6, 5], [5, 6, 1]):
        assert "the checkpoint's corpus has 2 documents of 11 tokens" in refusal(
            Stream(np.array(lengths), seed=3).load, state)
    stream = Stream(np.array([5, 6]), seed=3)
    for wrong in ({"epoch": -1}, {"offset": "3"}, {"index": None}, {"tokens": True}):
        assert f"has {next(iter(wrong))} " in refusal(stream.load, state | wrong)
    for outside in ({"index": 2}, {"offset": 6}):
        assert "outside the corpus" in refusal(stream.load, state | outside)
    assert stream.state() == state


def test_nothing_to_stream_is_refused() -> None:
    assert "no token" in refusal(Stream, np.array([], dtype=int), seed=0)
    assert "2 documents and no token" in refusal(Stream, np.array([0, 0]), seed=0)
    assert "data.seed is -1" in refusal(Stream, np.array([1]), seed=-1)
