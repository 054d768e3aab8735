"""Texts are as long as training would make them."""

from __future__ import annotations

import json
import random
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distca.corpus.corpora import open_corpus
from distca.corpus.lengths import Reading, read_source
from distca.corpus.tokenizers import open_tokenizer

tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed; pip install tokenizers")
TEXTS = ["one two three", "", "four", "one one one one one", "unknown words here and there"]


def token_counts(path: str, texts: list[str]) -> list[int]:
    return [len(ids) for ids in open_tokenizer(path, "--tokenizer", special_tokens=True).documents(texts)]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """A word is a token, and so is the end of a document."""
    vocab = {"<unk>": 0, "one": 1, "two": 2, "three": 3, "four": 4, "</s>": 5}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def test_lengths_are_words_and_an_end(tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": text, "length": 999}) for text in TEXTS))
    expected = [len(text.split()) + 1 for text in TEXTS if text]
    for name in (tokenizer, tokenizer.parent):
        found = read_source(tmp_path / "a.jsonl", Reading(tokenizer=str(name)))
        assert isinstance(found, np.ndarray) and found.tolist() == expected


def test_lengths_are_what_training_packs(tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))
    corpus = open_corpus("jsonl", str(tmp_path / "a.jsonl"), tokenizer=str(tokenizer))
    found = read_source(tmp_path / "a.jsonl", Reading(tokenizer=str(tokenizer)))
    assert isinstance(found, np.ndarray) and found.tolist() == corpus.lengths().tolist()


@pytest.mark.parametrize("column", ["body", None])
def test_texts_of_tables(tokenizer: Path, tmp_path: Path, column: str | None) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed; pip install pyarrow")
    from pyarrow import parquet

    name = column or "text"
    parquet.write_table(pyarrow.table({"id": list(range(len(TEXTS))), name: TEXTS}), tmp_path / "a.parquet")
    (tmp_path / "a.csv").write_text(f"id,{name}\n" + "".join(f'{at},"{text}"\n' for at, text in enumerate(TEXTS)))
    for file in ("a.parquet", "a.csv"):
        found = read_source(tmp_path / file, Reading(column=column, tokenizer=str(tokenizer)))
        assert isinstance(found, np.ndarray) and found.tolist() == [len(text.split()) + 1 for text in TEXTS if text]


# ---- what a tokenizer.json carries besides its tokens

SPECIAL = ["<unk>", "<s>", "</s>", "<|im_end|>", "<pad>"]
SENTENCES = ["one two three four", "très sûr 🙂 ünder one", "</s> is no end <b>here</b>", "\ufeffafter a mark", "two  ",
             "\n", "<|im_end|>", "\ufeff", "UPPER one " * 60, "x" * 5000]


def random_tokenizer(rng: random.Random) -> Any:
    """Any model with any normalizer, pre-tokenizer, post-processor and state that a file can hold."""
    kind = rng.choice(["BPE", "WordPiece", "Unigram", "WordLevel"])
    models, trainers, ours = tokenizers.models, tokenizers.trainers, {"special_tokens": SPECIAL, "show_progress": False}
    if kind == "BPE":
        model = models.BPE(unk_token="<unk>", byte_fallback=rng.random() < 0.5, fuse_unk=rng.random() < 0.5,
                           dropout=rng.choice([None, 0.0, 0.1, 1.0]))
        trainer = trainers.BpeTrainer(vocab_size=90, **ours)
    elif kind == "WordPiece":
        model, trainer = models.WordPiece(unk_token="<unk>"), trainers.WordPieceTrainer(vocab_size=90, **ours)
    elif kind == "Unigram":
        model, trainer = models.Unigram(), trainers.UnigramTrainer(vocab_size=70, unk_token="<unk>", **ours)
    else:
        model, trainer = models.WordLevel(unk_token="<unk>"), trainers.WordLevelTrainer(**ours)
    made = tokenizers.Tokenizer(model)
    before, after, normalizers = tokenizers.pre_tokenizers, tokenizers.processors, tokenizers.normalizers
    made.normalizer = rng.choice([None, normalizers.Lowercase(), normalizers.NFKC(), normalizers.Prepend("_")])
    made.pre_tokenizer = rng.choice([before.Whitespace(), before.Metaspace(), before.ByteLevel(), before.Digits()])
    made.train_from_iterator(SENTENCES[:3] * 3, trainer)
    made.add_tokens([tokenizers.AddedToken("here", special=False, lstrip=rng.random() < 0.5)])
    if rng.random() < 0.5:
        made.enable_truncation(rng.randint(5, 20), stride=rng.randrange(2), direction=rng.choice(["left", "right"]))
    if rng.random() < 0.5:
        made.enable_padding(direction=rng.choice(["left", "right"]), length=rng.choice([None, 7, 65]), pad_id=4,
                            pad_token="<pad>", pad_to_multiple_of=rng.choice([None, 8]))
    made.post_processor = rng.choice([
        None, after.ByteLevel(trim_offsets=True), after.BertProcessing(("</s>", 2), ("<s>", 1)),
        *(after.TemplateProcessing(single=single, special_tokens=[("<s>", 1), ("</s>", 2), ("<|im_end|>", 3)])
          for single in ("<s> $A", "$A </s>", "<s> $A </s>", "$A <|im_end|>"))])
    return made


def stripped_documents(saved: str) -> list[list[int]]:
    """The tokens that the file's model, normalizer, pre-tokenizer and post-processor alone make, with one end."""
    content = json.loads(saved) | {"truncation": None, "padding": None}
    content["model"] |= {"dropout": None} if content["model"]["type"] == "BPE" else {}
    made = tokenizers.Tokenizer.from_str(json.dumps(content))
    closes = "im_end" in json.dumps(content["post_processor"] and content["post_processor"].get("single"))
    found = []
    for text in SENTENCES:
        ids = made.encode(text.removeprefix("\ufeff")).ids
        found.append(ids if ids[-1:] == [2] or (closes and len(ids) > 1) else [*ids, 2])
    return found


@pytest.mark.parametrize("seeds", [range(25), pytest.param(range(25, 400), marks=pytest.mark.slow)], ids=str)
def test_training_and_counting_see_the_tokens_of_a_tokenizer_without_its_state(seeds: range, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in SENTENCES))
    num_changed = 0
    for seed in seeds:
        made = random_tokenizer(random.Random(seed))
        made.save(str(tmp_path / "tokenizer.json"))
        expected = stripped_documents(made.to_str())
        num_changed += expected != [one.ids for one in made.encode_batch(SENTENCES)]
        corpus = open_corpus("jsonl", str(tmp_path / "a.jsonl"), tokenizer=str(tmp_path))
        assert [corpus.tokens(number).tolist() for number in range(len(corpus.lengths()))] == expected, seed
        found = read_source(tmp_path / "a.jsonl", Reading(tokenizer=str(tmp_path)))
        assert isinstance(found, np.ndarray) and found.tolist() == [len(ids) for ids in expected], seed
    assert num_changed > len(seeds) / 2


def test_what_transformers_saves_after_a_call_is_not_obeyed(tokenizer: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed; pip install transformers")
    fast = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tokenizer), pad_token="<unk>")
    fast(["one two"], truncation=True, max_length=4, padding="max_length")
    fast.save_pretrained(tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "tokenizer.json").read_text())["truncation"] is not None
    assert token_counts(str(tmp_path / "saved"), ["one " * 5000, "one", "one " * 300]) == [5001, 2, 301]


def test_a_configuration_that_asks_for_another_first_token_is_refused(tokenizer: Path) -> None:
    made = tokenizers.Tokenizer.from_file(str(tokenizer))
    made.post_processor = tokenizers.processors.TemplateProcessing(single="two $A", special_tokens=[("two", 2)])
    made.save(str(tokenizer))
    beside = tokenizer.parent / "tokenizer_config.json"
    for bos, wanted, says in (("two", False, "begins a text with 'two'"), ("two", True, ""), ("one", False, ""),
                              ("one", True, "does not begin a text with 'one'"), (None, True, ""),
                              ({"content": "two"}, True, "")):
        beside.write_text(json.dumps({"add_bos_token": wanted, "bos_token": bos}))
        if says:
            with pytest.raises(ValueError, match=f"which {says}, but the tokenizer_config.*; save both by transf"):
                token_counts(str(tokenizer), [])
        else:
            assert token_counts(str(tokenizer), ["one"]) == [3]


@pytest.mark.parametrize(("changes", "message"), [
    ({"model.vocab": {}}, "whose vocabulary is empty; name another"),
    ({"model.unk_token": "absent"}, r"which cannot encode a text \(WordLevel error: Missing \[UNK\] token"),
    ({"post_processor.special_tokens.</s>.ids": [999]}, "whose post_processor adds token 999, where tokens are 0 to 5"),
    ({"post_processor.special_tokens": {}}, r"which is no tokenizer\.json \(.*\); name one"),                # a panic
    ({"truncation": {"max_length": -1}}, r"which is no tokenizer\.json \(.*\); name one"),
])
def test_damaged_tokenizers_are_one_line(tokenizer: Path, changes: dict[str, Any], message: str) -> None:
    made = tokenizers.Tokenizer.from_file(str(tokenizer))
    made.post_processor = tokenizers.processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 5)])
    content = json.loads(made.to_str())
    for name, value in changes.items():
        *folders, last = name.split(".")
        reduce(lambda part, key: part[key], folders, content)[last] = value
    tokenizer.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=message) as caught:
        token_counts(str(tokenizer), TEXTS)
    assert str(caught.value).startswith("--tokenizer is ") and "\n" not in str(caught.value)


def test_what_is_no_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(ValueError, match=r"which is no tokenizer\.json \(.*\); name one"):
        token_counts(str(tmp_path / "x.json"), [])
    with pytest.raises(ValueError, match="which is no file and no folder with a tokenizer"):
        token_counts(str(tmp_path), [])
