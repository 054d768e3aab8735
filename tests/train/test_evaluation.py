"""Losses on masked and held-out documents are those of a plain loop in one process, and looking changes nothing."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from distca.corpus.cache import ArrayCorpus
from distca.corpus.corpora import held_out
from distca.kernels import dense_attention
from distca.train.batches import Evaluation, check_fills_a_batch
from distca.train.data import open_corpora
from distca.train.model.build import build_optimizer, learning_rate
from distca.train.model.decoder import Decoder
from distca.train.model.shape import decoder_shape
from distca.train.settings import Settings
from tests.support.batches import batches_of
from tests.support.decoders import hidden_of
from tests.support.training import logged, train

VOCAB = 300
PIECE = 64           # tokens of a piece, and of a micro-batch over all data ranks
MICRO_BATCHES = 4
STEPS = 3
Document = dict[str, list[int]]


def documents(count: int, seed: int) -> list[Document]:
    """Two pieces each, the first without a token in the loss: so is every other micro-batch."""
    random = np.random.default_rng(seed)
    return [{"input_ids": random.integers(0, VOCAB, 2 * PIECE).tolist(),
             "loss_mask": [0] * PIECE + random.integers(0, 2, PIECE).tolist()} for _ in range(count)]


TRAINED, HELD = documents(2, seed=0), documents(4, seed=1)       # one batch, and two of them


def some_settings(folder: Path, name: str, ranks: int = 1, **values: int | float | str | bool) -> Settings:
    (folder / "trained.jsonl").write_text("\n".join(map(json.dumps, TRAINED)))
    (folder / "held.jsonl").write_text("\n".join(map(json.dumps, HELD)))
    tensor, pipeline = int(values.get("parallel__tensor", 1)), int(values.get("parallel__pipeline", 1))
    return Settings().with_values({
        "run.ranks": ranks, "run.steps": STEPS, "run.dtype": "float64", "run.timeout_seconds": 120,
        "data.source": "jsonl", "data.content": "tokens", "data.vocab": VOCAB,
        "data.path": str(folder / "trained.jsonl"), "data.cache": str(folder / "cache"), "data.max_document": PIECE,
        "eval.path": str(folder / "held.jsonl"), "eval.every": 1, "batch.micro_batches": MICRO_BATCHES,
        "batch.tokens_per_rank": PIECE * tensor * pipeline // ranks, "optimizer.warmup_steps": 0,
        "optimizer.min_lr_ratio": 1.0, "log.folder": str(folder / name),
        **{key.replace("__", "."): value for key, value in values.items()}})


def masked_loss(decoder: Decoder, documents: list[Document]) -> torch.Tensor:
    """Mean of -log p over all tokens in the loss, by the formula; the halves of a document are documents."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    for document, half in product(documents, range(2)):
        place = slice(half * PIECE, (half + 1) * PIECE)
        tokens = torch.tensor(document["input_ids"][place])
        wanted = torch.tensor(document["loss_mask"][place])[1:].bool()
        hidden = hidden_of(decoder, tokens, torch.arange(PIECE), lambda q, k, v: dense_attention(q, k, v, [PIECE]))
        logits = hidden[:-1] @ decoder.head_weight.T
        total = total + F.cross_entropy(logits[wanted], tokens[1:][wanted], reduction="sum")
        count += int(wanted.sum())
    return total / count


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], list[float]]:
    """Training and held-out losses of a plain loop."""
    settings = some_settings(tmp_path_factory.mktemp("plain"), "log")
    decoder = Decoder(decoder_shape(settings.model, VOCAB), generator=torch.Generator().manual_seed(0)).double()
    optimizer = build_optimizer(decoder, settings)
    losses, held = [], []
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = optimizer.param_groups[1]["lr"] = learning_rate(step, settings)
        optimizer.zero_grad()
        loss = masked_loss(decoder, TRAINED)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(decoder.parameters(), settings.optimizer.clip_norm)
        optimizer.step()
        losses.append(loss.item())
        with torch.no_grad():
            held.append(masked_loss(decoder, HELD).item())
    return losses, held


def curves(settings: Settings) -> tuple[list[float], list[float | None]]:
    assert logged(settings.log.folder, "step") == list(range(1, STEPS + 1))
    return logged(settings.log.folder, "loss"), logged(settings.log.folder, "eval_loss")


def check_against(plain: tuple[list[float], list[float]], settings: Settings) -> None:
    for found, expected in zip(curves(settings), plain, strict=True):
        assert found == pytest.approx(expected, abs=1e-9)


def test_the_plain_loop_learns_and_the_held_out_loss_is_another(plain: tuple[list[float], list[float]]) -> None:
    assert plain[0][-1] < plain[0][0] - 0.1
    assert min(abs(one - other) for one, other in zip(*plain, strict=True)) > 1e-3


@pytest.mark.multiprocess
def test_one_rank_gives_the_losses_of_the_plain_loop(plain: tuple[list[float], list[float]], tmp_path: Path) -> None:
    runs = [some_settings(tmp_path, mode, attention__mode=mode) for mode in ("disaggregated", "home")]
    train(*runs)
    for settings in runs:
        check_against(plain, settings)
    summary = json.loads((tmp_path / "home" / "summary.json").read_text())
    assert summary["eval_loss"] == curves(runs[1])[1][-1]


@pytest.mark.multiprocess
def test_data_ranks_give_them_too_and_evaluating_changes_no_bit(
    plain: tuple[list[float], list[float]], tmp_path: Path
) -> None:
    looking, blind = some_settings(tmp_path, "looking", 2), some_settings(tmp_path, "blind", 2, eval__every=0)
    sometimes = some_settings(tmp_path, "sometimes", 2, eval__every=2)
    saving = {"checkpoint__folder": str(tmp_path / "saved")}
    cut = some_settings(tmp_path, "resumed", 2, run__steps=2, **saving)
    resumed = some_settings(tmp_path, "resumed", 2, **saving)
    train(looking, blind, sometimes, cut, resumed)
    check_against(plain, looking)
    # bit for bit: evaluating adds operations between steps, and those of a step and their shapes stay the same
    assert curves(blind) == (curves(looking)[0], [None] * STEPS)
    assert curves(sometimes) == (curves(looking)[0], [None, *curves(looking)[1][1:]])  # step 2, and the last
    assert curves(resumed) == curves(looking)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_stages_and_tensor_ranks_give_them_too(plain: tuple[list[float], list[float]], tmp_path: Path) -> None:
    runs = [some_settings(tmp_path, "stages", 2, parallel__pipeline=2),
            some_settings(tmp_path, "blind", 2, parallel__pipeline=2, eval__every=0),
            some_settings(tmp_path, "in turns", 2, parallel__pipeline=2, attention__mode="home"),
            some_settings(tmp_path, "tensor", 2, parallel__tensor=2)]
    train(*runs)
    for settings in (runs[0], runs[2], runs[3]):
        check_against(plain, settings)
    assert curves(runs[1])[0] == curves(runs[0])[0]


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("values", [
    {"parallel__pipeline": 2},
    {"parallel__pipeline": 2, "parallel__tensor": 2},
    {"parallel__tensor": 2, "parallel__fsdp": False},
    {"parallel__pipeline": 2, "batch__ping_pong": False, "model__recompute": "full"},
    {"attention__state": "keep"},
    {"attention__mode": "per_document_cp", "parallel__pipeline": 2},
])
def test_four_ranks_give_them_too(
    plain: tuple[list[float], list[float]], values: dict[str, Any], tmp_path: Path
) -> None:
    looking = some_settings(tmp_path, "looking", 4, **values)
    blind = some_settings(tmp_path, "blind", 4, **values, eval__every=0)
    train(looking, blind)
    check_against(plain, looking)
    assert curves(blind)[0] == curves(looking)[0]


# ---- the split

def test_the_split_is_the_seeds_and_as_large_as_it_should_be() -> None:
    held = held_out(100_000, 0.1, seed=3)
    assert abs(held.mean() - 0.1) < 5 * (0.1 * 0.9 / 100_000) ** 0.5    # five deviations of independent draws
    assert (held_out(500, 0.1, seed=3) == held[:500]).all()             # more documents move none
    assert (held <= held_out(100_000, 0.2, seed=3)).all()
    both = (held & held_out(100_000, 0.1, seed=4)).mean()
    assert abs(both - 0.01) < 5 * (0.01 * 0.99 / 100_000) ** 0.5        # another seed is another split
    first = held_out(6, 1 - 1e-9, seed=0), held_out(6, 1e-9, seed=0)
    assert first[0].all() and not first[1].any()


def write_texts(folder: Path, count: int) -> Settings:
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": f"document {n:04}"}) + "\n" for n in range(count)))
    return Settings().with_values({"data.source": "jsonl", "data.path": str(folder / "texts.jsonl"),
                                   "data.cache": str(folder / "cache"), "eval.fraction": 0.25, "eval.every": 1})


def test_every_document_is_trained_on_or_held_out(tmp_path: Path) -> None:
    settings = write_texts(tmp_path, 200)
    trained, held = open_corpora(settings)
    assert held is not None
    texts = [bytes(corpus.tokens(number)[:-1].tolist()).decode()
             for corpus in (trained, held) for number in range(len(corpus.lengths()))]
    assert sorted(texts) == [f"document {n:04}" for n in range(200)]
    assert len(held.lengths()) == held_out(200, 0.25, 0).sum()
    alone, nothing = open_corpora(settings.with_values({"eval.fraction": 0.0}))
    assert nothing is None and len(alone.lengths()) == 200


def refusal(settings: Settings) -> str:
    with pytest.raises(ValueError) as caught:
        trained, held = open_corpora(settings)
        check_fills_a_batch(trained, settings, num_data=2)
        assert held is not None
        Evaluation(batches_of(held, settings, world=2, model=decoder_shape(settings.model, 257).model))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_too_few_documents_are_one_line(tmp_path: Path) -> None:
    settings = write_texts(tmp_path, 40)                         # 14 tokens each
    assert "by which none of 40 documents is held out" in refusal(settings.with_values({"eval.fraction": 1e-9}))
    assert "none of 40 documents is left to train on" in refusal(settings.with_values({"eval.fraction": 1 - 1e-9}))
    assert "tokens but a step takes 8192 (2 data ranks of batch.tokens_per_rank 4096" in refusal(settings)
    few = settings.with_values({"batch.tokens_per_rank": 90})
    assert "the held-out documents have" in refusal(few) and "a batch takes 180; raise eval.fraction" in refusal(few)


def test_an_evaluation_takes_no_document_twice(tmp_path: Path) -> None:
    settings = write_texts(tmp_path, 400).with_values({"batch.tokens_per_rank": 50, "eval.batches": 1000})
    held = open_corpora(settings)[1]
    assert held is not None
    evaluation = Evaluation(batches_of(held, settings, model=decoder_shape(settings.model, 257).model))
    assert evaluation._num_batches == held.lengths().sum() // 50
    assert [step for step in range(1, 201) if evaluation.is_due(step)] == list(range(1, 201))


# ---- what is in the loss

def test_a_step_without_a_token_in_the_loss_is_refused_unless_it_only_looks() -> None:
    loss = np.zeros(64, dtype=bool)
    loss[63] = True
    corpus = ArrayCorpus(np.arange(64), np.array([64]), 64, loss)
    settings = Settings().with_values({"batch.tokens_per_rank": 32, "batch.ping_pong": False})
    model = decoder_shape(settings.model, 64).model
    loader = batches_of(corpus, settings, rank=0, world=1, model=model)
    with pytest.raises(ValueError, match="holds tokens that are not in the loss only and nothing to predict"):
        loader.next()
    looking = batches_of(corpus, settings, rank=0, world=1, model=model, trains=False)
    batches = [looking.next(), looking.next()]
    assert [(batch.num_labels, int((batch.rows[0].labels >= 0).sum())) for batch in batches] == [(0, 0), (1, 1)]
    for one in (loader, looking):
        one.close()


@pytest.mark.parametrize(("world", "ping_pong"), [(1, False), (2, True), (4, True)])
def test_labels_are_the_next_tokens_in_the_loss_wherever_they_live(world: int, ping_pong: bool) -> None:
    random = np.random.default_rng(0)
    lengths, loss = random.integers(1, 90, 40), random.random(10_000) < 0.4
    corpus = ArrayCorpus(np.arange(lengths.sum()), np.cumsum(lengths), 10_000, loss[:lengths.sum()])
    settings = Settings().with_values({"batch.tokens_per_rank": 480 // world, "batch.ping_pong": ping_pong})
    model = decoder_shape(settings.model, 10_000).model
    loaders = [batches_of(corpus, settings, rank=rank, world=world, model=model) for rank in range(world)]
    for _ in range(3):
        batches = [loader.next() for loader in loaders]
        tokens, labels = (np.concatenate([getattr(row, name).numpy() for batch in batches for row in batch.rows])
                          for name in ("tokens", "labels"))
        assert loss[labels[labels >= 0]].all() and (labels[labels >= 0] == tokens[labels >= 0] + 1).all()
        assert {batch.num_labels for batch in batches} == {(labels >= 0).sum()}
        ends = set(np.cumsum(lengths) - 1)
        unlabelled = tokens[labels < 0]
        cut = [token for token in unlabelled if token not in ends and loss[token + 1]]
        assert len(cut) <= 1                                     # the document that the batch's end cuts
    for loader in loaders:
        loader.close()
