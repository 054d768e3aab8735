"""Texts are as long as training would make them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from distca.train.corpora import corpus_from
from distca.train.settings import load_settings
from distca.workload.length_files import Reading, read_source
from distca.workload.token_counts import token_counter

tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed; pip install tokenizers")
TEXTS = ["one two three", "", "four", "one one one one one", "unknown words here and there"]


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
    corpus = corpus_from(load_settings(None, {"data.source": "jsonl", "data.path": str(tmp_path / "a.jsonl"),
                                              "data.tokenizer": str(tokenizer)}))
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


def test_what_is_no_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(ValueError, match=r"which is no tokenizer\.json \(.*\); name one"):
        token_counter(str(tmp_path / "x.json"))
    with pytest.raises(ValueError, match="which is no file and no folder with a tokenizer"):
        token_counter(str(tmp_path))
