"""The stream of documents: every token once an epoch, whatever the batches, and on from any position."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distca.corpus.cache import ArrayCorpus
from distca.corpus.corpora import JoinedCorpus, sources_of
from distca.models import model_named
from distca.train.data import Loader, Mix, Stream, TextPiece, open_corpora
from distca.train.settings import Settings
from tests.support.plans import random_lengths
from tests.support.refusals import refusal
from tests.support.training import logged, small_run, train

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


# ---- several sources

sources = st.lists(st.tuples(st.lists(st.integers(0, 40), min_size=1, max_size=9).filter(any), st.floats(0.01, 100)),
                   min_size=2, max_size=4)


def mixed(drawn: list[tuple[list[int], float]], seed: int = 0, max_document: int = 0) -> Mix:
    parts = [ArrayCorpus(np.zeros(sum(lengths), dtype=int), np.cumsum(lengths), 1) for lengths, _ in drawn]
    return Mix(JoinedCorpus(parts, [weight for _, weight in drawn]), seed=seed, max_document=max_document)


@settings(max_examples=60, deadline=None)
@given(sources, seeds, st.integers(1, 60), st.integers(0, 9))
def test_every_source_has_its_share_and_its_own_order(drawn: list[tuple[list[int], float]], seed: int, num_tokens: int,
                                                      max_document: int) -> None:
    """The source that is furthest behind is next, so none is ahead by more than its longest piece."""
    stream = mixed(drawn, seed, max_document)
    firsts = np.cumsum([0, *(len(lengths) for lengths, _ in drawn)])
    total_weight = sum(weight for _, weight in drawn)
    longest = [min(max_document or 40, max(lengths)) for lengths, _ in drawn]
    taken, found = [0] * len(drawn), list[list[TextPiece]]([] for _ in drawn)
    for _ in range(30):
        for piece in stream.take(num_tokens):
            source = int(np.searchsorted(firsts, piece.document, side="right")) - 1
            taken[source] += piece.stop - piece.start
            found[source].append(piece._replace(document=piece.document - int(firsts[source])))
            for one, (_, weight) in enumerate(drawn):
                assert taken[one] <= sum(taken) * weight / total_weight + longest[one] + 1e-6
    assert sum(taken) == 30 * num_tokens
    for pieces, (lengths, _) in zip(found, drawn, strict=True):
        alone = Stream(np.array(lengths), seed=seed, max_document=max_document)
        places = [(piece.document, place) for piece in pieces for place in range(piece.start, piece.stop)]
        assert places == [(piece.document, place) for piece in alone.take(len(places))
                          for place in range(piece.start, piece.stop)] if places else True


@settings(max_examples=60, deadline=None)
@given(sources, seeds, st.integers(1, 50), st.integers(0, 12), st.integers(1, 50))
def test_a_mix_continues_at_the_same_token_whatever_the_batch(drawn: list[tuple[list[int], float]], seed: int,
                                                              before: int, num_batches: int, after: int) -> None:
    def places(pieces: list[TextPiece]) -> list[tuple[int, int]]:
        return [(piece.document, place) for piece in pieces for place in range(piece.start, piece.stop)]

    whole = places(mixed(drawn, seed).take(before * num_batches + 3 * after))
    first, second = mixed(drawn, seed), mixed(drawn, seed)
    for _ in range(num_batches):
        first.take(before)
    second.take(7)
    second.load(json.loads(json.dumps(first.state())))           # as a checkpoint keeps it
    assert second.state() == first.state()
    assert [place for _ in range(3) for place in places(second.take(after))] == whole[before * num_batches:]


def test_the_order_of_a_mix_by_hand() -> None:
    stream = mixed([([2] * 3, 3.0), ([2] * 3, 1.0)])
    sources_taken = [int(piece.document >= 3) for piece in stream.take(16)]
    assert sources_taken == [0, 1, 0, 0, 0, 1, 0, 0]             # behind by 0/3 < 0/1, then 2/3, 4/3 < 2, a tie, …


def test_a_position_in_another_mix_is_refused() -> None:
    state = mixed([([5], 1.0), ([6], 2.0)]).state()
    for other in ([([5], 1.0), ([6], 3.0)], [([5], 1.0), ([6], 2.0), ([7], 1.0)]):
        assert "the checkpoint's data is data.mix with the weights [1.0, 2.0], this run's data.mix" in refusal(
            mixed(other).load, state)
    assert "the checkpoint's source 2 of data.mix has 1 documents of 6 tokens, this one 1 of 7" in refusal(
        mixed([([5], 1.0), ([7], 2.0)]).load, state)
    assert "data is one source without data.mix, this run's data.mix with the weights [1.0, 2.0]" in refusal(
        mixed([([5], 1.0), ([6], 2.0)]).load, Stream(np.array([5]), seed=0).state())
    assert "with the weights [1.0, 2.0], this run's one source without data.mix" in refusal(
        Stream(np.array([5]), seed=0).load, state)


@pytest.mark.parametrize(("mix", "source", "expected"), [
    ("a.jsonl:0.7, b.parquet:0.3", "stdlib", [("jsonl", "a.jsonl", 0.7), ("table", "b.parquet", 0.3)]),
    ("a.jsonl.gz:7,C:/books:1e-3", "text", [("jsonl", "a.jsonl.gz", 7.0), ("text", "C:/books", 0.001)]),
    ("d.bin:1,x/:2", "table", [("megatron", "d.bin", 1.0), ("table", "x/", 2.0)]),
])
def test_a_mix_is_read_as_it_is_written(mix: str, source: str, expected: list[tuple[str, str, float]]) -> None:
    assert sources_of(mix, source, "") == expected


@pytest.mark.parametrize(("mix", "message"), [
    ("a.jsonl", "data.mix has 'a.jsonl'; write path:weight"), ("a.jsonl:x", "data.mix has 'a.jsonl:x'"),
    ("a.jsonl:0", "weights above 0"), ("a.jsonl:-1", "weights above 0"), ("a.jsonl:nan", "weights above 0"),
    ("a.jsonl:inf", "weights above 0"), (":1", "data.mix has ':1'"), ("a.jsonl:1,", "data.mix has ''"),
    ("a.jsonl:1,books:1", "'books', whose name does not say what it holds"),
    ("a.jsonl:1,a.jsonl:2", "'a.jsonl' twice; give it once"),
])
def test_a_mix_that_says_nothing_is_refused(mix: str, message: str) -> None:
    assert message in refusal(sources_of, mix, "stdlib", "")


def test_every_number_of_ranks_takes_the_same_documents_of_a_mix(tmp_path: Path) -> None:
    for name, length in (("a", 37), ("b", 501)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": name * length}) + "\n" for _ in range(9)))
    chosen = Settings().with_values({"data.mix": f"{tmp_path / 'a.jsonl'}:0.75,{tmp_path / 'b.jsonl'}:0.25",
                                     "data.cache": str(tmp_path / "cache"), "eval.fraction": 0.2})
    found = []
    for world in (1, 2, 4):
        corpus, held = open_corpora(chosen.with_values({"batch.tokens_per_rank": 512 // world}))
        loader = Loader(corpus, chosen.with_values({"batch.tokens_per_rank": 512 // world}), rank=world - 1,
                        world=world, model=model_named("tiny"))
        position, documents = loader.start, []
        for _ in range(6):
            taken, position = loader.take(position)
            documents += [(bytes(corpus.tokens(piece.document)[piece.start:piece.stop].astype(np.uint8)), piece)
                          for piece in taken[0]]
        found.append(documents)
        assert held is not None and len(held.lengths()) + len(corpus.lengths()) == 18
        share = sum(text.count(b"a") for text, _ in documents) / (6 * 512)
        assert abs(share - 0.75) < 502 / (6 * 512)
        of_a = corpus.lengths() == 38
        seen = np.bincount([int(of_a[piece.document]) for _, piece in documents],
                           [piece.stop - piece.start for _, piece in documents])
        assert loader.epochs(position) == (seen[1] / (38 * of_a.sum()), seen[0] / (502 * (~of_a).sum()))
    assert found[0] == found[1] == found[2]


@pytest.mark.multiprocess
def test_a_mix_trains_alike_on_any_ranks_resumes_and_counts_epochs(tmp_path: Path) -> None:
    """The same bits when resumed, and the same losses on two ranks, to rounding."""
    for name, length in (("a", 300), ("b", 900)):
        (tmp_path / f"{name}.jsonl").write_text("".join(
            json.dumps({"text": f"{name}{number} " * (length // 3)}) + "\n" for number in range(3)))

    def some(name: str, ranks: int, steps: int, **more: Any) -> Settings:
        return small_run(tmp_path / name, ranks, tokens=512, run__steps=steps, data__cache=str(tmp_path / "cache"),
                         data__mix=f"{tmp_path / 'a.jsonl'}:2,{tmp_path / 'b.jsonl'}:1", **more)

    saved = {"checkpoint__folder": str(tmp_path / "saved")}
    train(some("whole", 1, 4), some("first", 1, 2, **saved), some("second", 1, 4, **saved))
    train(some("two", 2, 4))
    whole, two = logged(tmp_path / "whole", "loss"), logged(tmp_path / "two", "loss")
    assert logged(tmp_path / "first", "loss") + logged(tmp_path / "second", "loss") == whole
    assert two == pytest.approx(whole, abs=1e-10)
    epochs = logged(tmp_path / "whole", "epochs")
    tokens = [sum(len(f"{name}{number} ") * (length // 3) + 1 for number in range(3))
              for name, length in (("a", 300), ("b", 900))]
    for step, taken in enumerate(epochs, 1):
        assert sum(np.multiply(taken, tokens)) == pytest.approx(512 * step)
    assert epochs[-1][0] > 1 > epochs[-1][1] and logged(tmp_path / "second", "epochs") == epochs[2:]
    summary = json.loads((tmp_path / "second" / "summary.json").read_text())
    assert summary["epochs"] == epochs[-1]
