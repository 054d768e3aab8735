"""Every token once, every label right, the same plan everywhere, and a run that continues where it stopped."""

import subprocess
import sys
import textwrap
import threading
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distca.corpus.cache import ArrayCorpus
from distca.corpus.corpora import Corpus
from distca.models import model_named
from distca.runtime.prepared import digest
from distca.train.batches import Batch, Batches
from distca.train.data import Loader, Stream, TextPiece, open_corpora
from distca.train.settings import MODES, Settings
from tests.support.batches import batches_of
from tests.support.plans import random_lengths
from tests.support.refusals import refusal

MODEL = replace(model_named("tiny"), vocab=1_000_000)
seeds = st.integers(0, 2**32)


class NumberedCorpus(ArrayCorpus):
    """Token number n of the corpus is n, so that a token tells its document and its place there."""

    def __init__(self, lengths: list[int]) -> None:
        super().__init__(np.arange(sum(lengths)), np.cumsum(lengths), int(sum(lengths)))


Triple = tuple[int, int, int]  # position, token, label


def some_settings(**values: Any) -> Settings:
    named = {"batch.ping_pong": False, "batch.tokens_per_rank": 32} | {
        name.replace("__", "."): value for name, value in values.items()}
    return Settings().with_values(named)


def loaders(corpus: Corpus, chosen: Settings, world: int) -> list[Batches]:
    return [batches_of(corpus, chosen, rank=rank, world=world, model=MODEL) for rank in range(world)]


def triples(batches: list[Batch]) -> Counter[Triple]:
    """(position, token, label) of all tokens of one step, over all ranks and rows."""
    return Counter(triple for batch in batches for row in batch.rows
                   for triple in zip(row.positions.tolist(), row.tokens.tolist(), row.labels.tolist(), strict=True))


def expected_triples(corpus: NumberedCorpus, pieces: list[TextPiece]) -> Counter[Triple]:
    found: Counter[Triple] = Counter()
    for piece in pieces:
        tokens = corpus.tokens(piece.document)[piece.start:piece.stop].tolist()
        found.update(zip(range(len(tokens)), tokens, [*tokens[1:], -100], strict=True))
    return found


# ---- rows

@settings(max_examples=40, deadline=None)
@given(seeds, st.integers(1, 4), st.sampled_from(MODES), st.sampled_from(["balanced", "given"]),
       st.sampled_from([16, 64, 300]), st.sampled_from([0, 2, 50]))
def test_tokens_labels_and_positions_by_brute_force(seed: int, world: int, mode: str, placement: str,
                                                    tokens_per_rank: int,
                                                    max_document: int) -> None:
    corpus = NumberedCorpus([*random_lengths(seed, 500).tolist(), 2])
    chosen = some_settings(batch__tokens_per_rank=tokens_per_rank, attention__mode=mode,
                           attention__placement=placement, data__max_document=max_document, data__seed=seed)
    stream = Stream(corpus.lengths(), seed=seed, max_document=max_document)
    ranks = loaders(corpus, chosen, world)
    for _ in range(3):
        batches = [loader.next() for loader in ranks]
        found = triples(batches)
        assert found == expected_triples(corpus, stream.take(world * tokens_per_rank))
        for batch in batches:
            assert batch.num_labels == sum(count for (_, _, label), count in found.items() if label != -100)


@settings(max_examples=40, deadline=None)
@given(seeds, st.integers(1, 4), st.sampled_from(MODES), st.booleans(), st.sampled_from([16, 150, 600]))
def test_rows_follow_their_plan_which_is_valid_and_the_same_on_all_ranks(seed: int, world: int, mode: str,
                                                                         ping_pong: bool, tokens_per_rank: int) -> None:
    corpus = NumberedCorpus([*random_lengths(seed, 4 * tokens_per_rank * world).tolist(), 2])
    chosen = some_settings(batch__tokens_per_rank=tokens_per_rank, batch__ping_pong=ping_pong, attention__mode=mode)
    ranks = loaders(corpus, chosen, world)
    for _ in range(2):
        batches = [loader.next() for loader in ranks]
        assert len({batch.summary for batch in batches}) == 1
        batches[0].plan.validate()
        for number, rows in enumerate(zip(*(batch.rows for batch in batches), strict=True)):
            plans = [batch.plan.plans_of(0)[0][number][0] for batch in batches]
            plan = plans[0]
            plan.validate()
            assert plan.layout.num_ranks == plan.num_servers == world
            assert len({digest(other) for other in plans}) == 1
            first_token: dict[int, Any] = {}                     # of each document of the layout
            for rank, row in enumerate(rows):
                assert row.tokens.dtype == row.labels.dtype == row.positions.dtype == torch.int64
                assert len(row.tokens) == tokens_per_rank // (2 if ping_pong and mode == "disaggregated" else 1)
                columns = plan.layout.tokens(rank)
                assert row.positions.tolist() == columns.position.tolist()
                for index, (document, other, at) in enumerate(zip(
                        columns.document.tolist(), columns.next_rank.tolist(), columns.next_index.tolist(),
                        strict=True)):
                    label = int(row.labels[index])
                    if other >= 0:
                        assert label == int(rows[other].tokens[at])
                    elif label != -100:                          # the document goes on in pong
                        assert number == 0 and label == int(row.tokens[index]) + 1
                    begin = int(row.tokens[index] - row.positions[index])
                    assert first_token.setdefault(document, begin) == begin


@settings(max_examples=30, deadline=None)
@given(seeds, st.integers(1, 4), st.sampled_from([16, 100, 400]))
def test_ping_and_pong_hold_the_batch_as_it_is(seed: int, world: int, tokens_per_rank: int) -> None:
    """Every token once, with its position and its label, also where a document lies in both halves."""
    corpus = NumberedCorpus([*random_lengths(seed, 5 * tokens_per_rank * world).tolist(), 2])
    chosen = some_settings(batch__tokens_per_rank=tokens_per_rank, batch__ping_pong=True)
    pieces = Stream(corpus.lengths(), seed=0).take(world * tokens_per_rank)
    batches = [loader.next() for loader in loaders(corpus, chosen, world)]
    assert [len(row.tokens) for batch in batches for row in batch.rows] == [tokens_per_rank // 2] * 2 * world
    assert triples(batches) == expected_triples(corpus, pieces)
    in_pong = {int(first) for batch in batches for first in batch.rows[1].tokens - batch.rows[1].positions}
    for batch in batches:                                        # keys that pong reads are of a document it holds
        (ping, pong), = batch.micro_batches
        for start, stop in pong.reads:
            assert {int(first) for first in ping.tokens[start:stop] - ping.positions[start:stop]} <= in_pong
    assert not any(row.reads for batch in batches for row in batch.rows[::2])


def test_a_step_without_labels_is_refused() -> None:
    corpus = NumberedCorpus([1, 1, 1, 1, 1, 2])
    loader = batches_of(corpus, some_settings(batch__tokens_per_rank=1), rank=0, world=1, model=MODEL)
    with pytest.raises(ValueError, match=r"a step of 1 tokens holds documents of one token only and nothing to "
                                         r"predict; raise batch\.tokens_per_rank"):
        loader.next()


@pytest.mark.parametrize("ping_pong", [False, True])
def test_modes_and_ranks_train_on_the_same(ping_pong: bool) -> None:
    corpus = NumberedCorpus([700, 3, 90, 1, 260, 40, 512, 33])
    steps = {}
    for mode in MODES:
        for placement in ("balanced", "given"):
            for world in (1, 2, 4):
                chosen = some_settings(batch__tokens_per_rank=800 // world, batch__ping_pong=ping_pong,
                                       attention__mode=mode, attention__placement=placement)
                ranks = loaders(corpus, chosen, world)
                steps[mode, placement, world] = [triples([loader.next() for loader in ranks]) for _ in range(3)]
    first = steps[MODES[0], "balanced", 1]
    assert all(step == first for step in steps.values())
    assert first[0] != first[1]


def test_what_balancing_gains_is_measured() -> None:
    corpus = NumberedCorpus([2000, *[40] * 400])
    after = {}
    for mode, placement in (("disaggregated", "given"), ("disaggregated", "balanced"), ("home", "given")):
        chosen = some_settings(batch__tokens_per_rank=2048, attention__mode=mode, attention__placement=placement)
        loader = batches_of(corpus, chosen, rank=0, world=4, model=MODEL)
        batch = next(batch for batch in (loader.next() for _ in range(4))
                     if batch.plan.micro_batches[0].lengths.max() > 1500)
        step, plan = batch.summary, batch.plan.plans_of(0)[0][0][0]
        assert step.work_before > 2.0
        assert step.bytes_per_layer == plan.summary().bytes_total
        after[mode, placement] = step.work_after
        if mode == "home":
            assert step.work_after == step.work_before
            assert (plan.tasks.home == plan.tasks.server).all()
    assert after["disaggregated", "given"] <= 1.05
    assert after["disaggregated", "balanced"] <= 1.05
    assert after["home", "given"] > 2.0


def test_the_default_run_is_balanced_on_real_documents() -> None:
    chosen = Settings()
    ranks = loaders(open_corpora(chosen)[0], chosen, 2)
    for _ in range(3):
        batches = [loader.next() for loader in ranks]
        assert sum(len(row.tokens) for batch in batches for row in batch.rows) == 2 * chosen.batch.tokens_per_rank
        plans = [row[0] for row in batches[0].plan.plans_of(0)[0]]
        assert batches[0].summary.work_after <= 1.05 or any(plan.limit is not None for plan in plans)


def test_a_corpus_smaller_than_a_batch_begins_anew() -> None:
    corpus = NumberedCorpus([5, 9])
    batches = [loader.next() for loader in loaders(corpus, some_settings(), 2)]
    found = Counter(token for _, token, _ in triples(batches).elements())
    assert set(found) == set(range(14))
    assert set(found.values()) <= {4, 5}                         # 64 tokens of 14


# ---- resuming

@settings(max_examples=25, deadline=None)
@given(seeds, st.integers(0, 6), st.booleans(), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]))
def test_any_batch_resumes_on_any_number_of_ranks(seed: int, stop: int, ping_pong: bool, before: int,
                                                  after: int) -> None:
    corpus = NumberedCorpus([*random_lengths(seed, 300).tolist(), 2])

    def steps(world: int, state: dict[str, int | str] | None,
              num_steps: int) -> tuple[list[Counter[Triple]], dict[str, int | str]]:
        ranks = loaders(corpus, some_settings(batch__tokens_per_rank=64 // world, batch__ping_pong=ping_pong), world)
        for loader in ranks:
            if state is not None:
                loader.load(state)
        made = [triples([loader.next() for loader in ranks]) for _ in range(num_steps)]
        assert len({tuple(loader.position.items()) for loader in ranks}) == 1
        return made, ranks[-1].position

    whole, _ = steps(before, None, stop + 3)
    head, state = steps(before, None, stop)
    assert head == whole[:stop]
    assert state["tokens"] == 64 * stop
    tail, _ = steps(after, state, 3)
    assert tail == whole[stop:]


def test_another_batch_size_skips_nothing_and_repeats_nothing() -> None:
    corpus = NumberedCorpus([200, 30, 170])
    first = batches_of(corpus, some_settings(batch__tokens_per_rank=50), rank=0, world=1, model=MODEL)
    tokens = [token for _ in range(3) for token in first.next().rows[0].tokens.tolist()]
    second = batches_of(corpus, some_settings(batch__tokens_per_rank=25), rank=0, world=1, model=MODEL)
    second.load(first.position)
    tokens += [token for _ in range(10) for token in second.next().rows[0].tokens.tolist()]
    assert sorted(tokens) == list(range(400))


class GatedCorpus(NumberedCorpus):
    """Reads wait at a gate, so that a test knows where the background thread is; `fault` is raised behind it."""

    gate: threading.Event
    reached: threading.Event
    fault: list[Exception]

    def __init__(self, lengths: list[int]) -> None:
        super().__init__(lengths)
        for name in ("gate", "reached"):
            object.__setattr__(self, name, threading.Event())
        object.__setattr__(self, "fault", [])
        self.gate.set()

    def tokens(self, document: int) -> np.ndarray:
        self.reached.set()
        assert self.gate.wait(10)
        if self.fault:
            raise self.fault[0]
        return super().tokens(document)


def gated_loader() -> tuple[GatedCorpus, Batches]:
    """Return a corpus and its loader, which has given its first batch."""
    corpus = GatedCorpus([100, 60, 90])
    loader = batches_of(corpus, some_settings(), rank=0, world=1, model=MODEL)
    loader.next()
    return corpus, loader


def test_state_is_the_next_batch_while_the_one_behind_it_is_made() -> None:
    corpus, loader = gated_loader()
    loader.close()
    saved = loader.position
    second = loader.next().rows[0].tokens.tolist()
    third_state = loader.position
    loader.close()
    corpus.gate.clear()
    corpus.reached.clear()
    loader.load(saved)
    threading.Timer(0.2, corpus.gate.set).start()
    assert loader.position == saved
    assert loader.next().rows[0].tokens.tolist() == second
    corpus.gate.clear()
    assert corpus.reached.wait(10)                               # the third batch is being made
    assert loader.position == third_state
    threading.Timer(0.2, corpus.gate.set).start()
    loader.load(saved)                                           # waits for it and forgets it
    assert loader.next().rows[0].tokens.tolist() == second
    assert loader.position == third_state


def test_a_batch_is_made_while_the_one_before_it_is_used() -> None:
    corpus, loader = gated_loader()
    assert loader._ahead is not None
    loader._ahead.result(10)
    corpus.gate.clear()                                          # no read is needed any more
    assert loader.next().wait_seconds < 5.0
    corpus.gate.set()
    loader.close()


def test_what_goes_wrong_ahead_is_raised_by_next_and_can_be_tried_again() -> None:
    corpus, loader = gated_loader()
    loader.close()
    state = loader.position
    corpus.fault.append(OSError("the disk is gone"))
    for _ in range(2):
        with pytest.raises(OSError, match="the disk is gone"):
            loader.next()
        assert loader.position == state
    corpus.fault.clear()
    other = batches_of(corpus, some_settings(), rank=0, world=1, model=MODEL)
    other.load(state)
    assert loader.next().rows[0].tokens.tolist() == other.next().rows[0].tokens.tolist()


def test_a_batch_in_the_making_does_not_keep_the_process_alive() -> None:
    script = """
        import threading
        import time
        import numpy as np
        from distca.models import model_named
        from distca.train.settings import Settings
        from distca.corpus.cache import ArrayCorpus
        from distca.train.batches import Batches
        from distca.train.data import Loader

        first, second = threading.Event(), threading.Event()

        class Slow(ArrayCorpus):
            def tokens(self, document):
                if first.is_set():
                    second.set()
                    time.sleep(1000)
                first.set()
                return super().tokens(document)

        chosen = Settings().with_values({"batch.tokens_per_rank": 8, "batch.ping_pong": False})
        corpus = Slow(np.zeros(1000, dtype=np.int64), np.array([1000]), 257)
        batches = Batches(Loader(corpus, chosen, rank=0, world=1, model=model_named("tiny")))
        batches.next()
        print(second.wait(10))
        """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=250)
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")


# ---- refusals

def test_what_cannot_be_trained_on_is_refused() -> None:
    corpus = NumberedCorpus([5, 9])
    small = replace(MODEL, vocab=13)
    assert "14 different tokens but model 'tiny' knows 13" in refusal(
        Loader, corpus, some_settings(), rank=0, world=1, model=small)
    assert "rank is 2 of 2 data ranks" in refusal(Loader, corpus, some_settings(), rank=2, world=2, model=MODEL)
    single = [(NumberedCorpus([1, 1]), some_settings()), (corpus, some_settings(data__max_document=1))]
    for unlearnable, chosen in single:
        assert "nothing to predict" in refusal(Loader, unlearnable, chosen, rank=0, world=1, model=MODEL)
    empty = ArrayCorpus(np.arange(0), np.array([], dtype=np.int64), 2)
    assert "0 documents and no token" in refusal(Loader, empty, some_settings(), rank=0, world=1, model=MODEL)
    assert "did you mean 'home'" in refusal(
        Loader, corpus, some_settings(attention__mode="hom"), rank=0, world=1, model=MODEL)


@pytest.mark.parametrize("token", [-1, 14])
def test_a_token_outside_the_vocabulary_is_named_when_it_comes(token: int) -> None:
    corpus = ArrayCorpus(np.array([1, 2, token, 3]), np.array([4]), 14)
    object.__setattr__(corpus, "vocab", None)
    loader = batches_of(corpus, some_settings(), rank=0, world=1, model=replace(MODEL, vocab=14))
    assert f"document 0 of the corpus holds token {token}" in refusal(loader.next)
