"""Every format gives the same documents and the same loss, and what cannot be read is one line that says what can."""

import gzip
import json
import logging
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tokenizers
import zstandard

from distca.corpus import corpora
from distca.corpus.corpora import Corpus, corpus_from, in_memory
from distca.corpus.tokenizers import Tokens
from distca.train.settings import Settings
from distca.train.settings.preflight import check_machine

TEXTS = ["one", "zwei ü", "three\nlines\n", "x" * 5_000]
IDS = [[5, 6, 7, 8], [9], [1, 2, 3], [70_000, 4]]
MASKS = [[0, 0, 1, 1], [1], [1, 1, 0], [0, 1]]
KINDS = ["jsonl", "jsonl.gz", "jsonl.zst", "folder of jsonl", "parquet", "folder of parquet", "dataset"]


def some_settings(source: str, path: object = "", **data: int | str) -> Settings:
    return Settings().with_values({"data.source": source, "data.path": str(path),
                                   **{f"data.{name}": value for name, value in data.items()}})


def open_source(source: str, path: object = "", **data: int | str) -> Corpus:
    return corpus_from(some_settings(source, path, **data))


def refusal(source: str, path: object = "", **data: int | str) -> str:
    with pytest.raises(ValueError) as caught:
        open_source(source, path, **data)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def documents_of(corpus: Corpus) -> list[list[int]]:
    found = [corpus.tokens(number).tolist() for number in range(corpus.num_documents)]
    assert corpus.lengths().tolist() == [len(tokens) for tokens in found]
    return found


def write(kind: str, path: Path, columns: dict[str, list[Any]]) -> tuple[str, Path]:
    """The same records in another format: the source's name and its path."""
    lines = "".join(json.dumps(dict(zip(columns, values, strict=True))) + "\n"
                    for values in zip(*columns.values(), strict=True)).encode()
    table = pa.table(columns)
    if kind == "jsonl":
        path.write_bytes(lines)
    elif kind == "jsonl.gz":
        path.write_bytes(gzip.compress(lines))
    elif kind == "jsonl.zst":
        path.write_bytes(zstandard.ZstdCompressor().compress(lines))
    elif kind == "folder of jsonl":
        path.mkdir()
        first, rest = lines.split(b"\n", 1)
        (path / "a.jsonl.gz").write_bytes(gzip.compress(first))
        (path / "b.jsonl").write_bytes(rest)
        (path / "notes.md").write_text("not read")
    elif kind == "parquet":
        pq.write_table(table, path, row_group_size=3)
    elif kind == "folder of parquet":
        path.mkdir()
        pq.write_table(table.slice(0, 1), path / "part-0.parquet")
        pq.write_table(table.slice(1), path / "part-1.parquet")
    else:
        path.mkdir()
        with pa.ipc.new_stream(str(path / "data-00000-of-00001.arrow"), table.schema) as writer:
            writer.write_table(table)
        (path / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}))
    return ("jsonl" if "jsonl" in kind else "table"), path


@pytest.mark.parametrize("kind", KINDS)
def test_every_format_gives_the_same_texts(kind: str, tmp_path: Path) -> None:
    source, path = write(kind, tmp_path / "corpus", {"text": TEXTS, "id": [1, 2, 3, 4]})
    corpus = open_source(source, path)
    assert documents_of(corpus) == [[*text.encode(), 256] for text in TEXTS]
    assert corpus.vocab == 257 and corpus.in_loss(0) is None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mask_field", ["loss_mask", "labels"])
def test_every_format_gives_the_same_tokens_and_masks(kind: str, mask_field: str, tmp_path: Path) -> None:
    mask = MASKS if mask_field == "loss_mask" else [
        [token if wanted else -100 for token, wanted in zip(ids, wants, strict=True)]
        for ids, wants in zip(IDS, MASKS, strict=True)]
    source, path = write(kind, tmp_path / "corpus", {"input_ids": IDS, mask_field: mask, "other": [0, 0, 0, 0]})
    corpus = open_source(source, path, content="tokens", vocab=70_001)
    assert documents_of(corpus) == [IDS[0], IDS[2], IDS[3]]     # a single token leaves nothing to predict
    masks = [corpus.in_loss(number) for number in range(3)]
    assert [mask.tolist() for mask in masks if mask is not None] == [
        [bool(value) for value in MASKS[number]] for number in (0, 2, 3)]
    assert corpus.vocab == 70_001


def test_tokens_need_no_mask_and_some_may_have_one(tmp_path: Path) -> None:
    source, path = write("parquet", tmp_path / "corpus", {"ids": IDS})
    corpus = open_source(source, path, content="tokens", field="ids")
    assert documents_of(corpus) == IDS and corpus.in_loss(1) is None and corpus.vocab is None
    lines = ({"input_ids": [1, 2]}, {"input_ids": [3, 4], "loss_mask": [0, 1]}, {"input_ids": [5, 6]})
    (tmp_path / "mixed.jsonl").write_text("\n".join(map(json.dumps, lines)))
    mixed = open_source("jsonl", tmp_path / "mixed.jsonl", content="tokens")
    masks = [mixed.in_loss(number) for number in range(3)]
    assert [mask.tolist() for mask in masks if mask is not None] == [[True, True], [False, True], [True, True]]


@pytest.mark.parametrize(("record", "message"), [
    ({"input_ids": [1, 2], "loss_mask": [1]}, "has 2 tokens under 'input_ids' but 1 under 'loss_mask'"),
    ({"input_ids": [1, 2], "loss_mask": [0, 2]}, "has 2 under 'loss_mask' at token 1; give 0 or 1"),
    ({"input_ids": [1, 2], "labels": [2, -100]}, "has 2 under 'labels' at token 0; give the token itself or -100"),
    ({"input_ids": [1, "2"]}, "not a list of whole numbers"),
    ({"input_ids": [1, 2.5]}, "not a list of whole numbers"),
    ({"input_ids": [[1], [2, 3]]}, "not a list of whole numbers"),
    ({"tokens": [1]}, "has None under 'input_ids', not a list of whole numbers; its keys are ['tokens']"),
    ({"input_ids": [1, 900]}, "holds token 900, where tokens are 0 to 499"),
    ({"input_ids": [-1, 2]}, "holds token -1, where"),
])
def test_bad_tokens_are_named(record: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps(record))
    assert message in refusal("jsonl", tmp_path / "a.jsonl", content="tokens", vocab=500)


def test_columns_and_splits_that_are_not_there_list_those_that_are(tmp_path: Path) -> None:
    source, path = write("parquet", tmp_path / "corpus.parquet", {"body": TEXTS, "id": [1, 2, 3, 4]})
    assert "no column 'text'; it has 'body', 'id': set data.field to one of them" in refusal(source, path)
    assert documents_of(open_source(source, path, field="body"))[0] == [*b"one", 256]
    for split in ("train", "test"):
        write("parquet", tmp_path / f"{split}-0.parquet", {"text": [split]})
    (tmp_path / "corpus.parquet").unlink()
    assert "several splits, 'test', 'train'; set data.split to one of them" in refusal(source, tmp_path)
    assert documents_of(open_source(source, tmp_path, split="test")) == [[*b"test", 256]]
    assert "not text; its keys are" in refusal(source, write("parquet", tmp_path / "n", {"text": [1]})[1])


# ---- folders of texts

def test_only_texts_of_a_folder_are_read_and_the_others_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    contents = {"a.md": b"first", "b.txt.gz": gzip.compress(b"second"), "c.png": b"\x89PNG\r\n\x1a\n\0", "d.bin": b"\0",
                "e.txt": "é".encode("latin-1"), "f/g.so": b"\x7fELF\xff", "z": "ü".encode()}
    (tmp_path / "f").mkdir()
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    with caplog.at_level(logging.INFO, logger="distca"):
        corpus = open_source("text", tmp_path)
    assert documents_of(corpus) == [[*text.encode(), 256] for text in ("first", "second", "ü")]
    assert [record.getMessage() for record in caplog.records] == [
        f"data.path {str(tmp_path)!r}: 4 of 7 files are not UTF-8 text and left out: c.png, d.bin, e.txt and 1 more"]


def test_a_folder_without_a_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1\0\0\xff")
    message = refusal("text", tmp_path)
    assert "a folder without a UTF-8 text in it, but with a.parquet; name another, or set data.source" in message


# ---- vocabularies

def write_megatron(prefix: Path, documents: list[list[int]]) -> Path:
    lengths = [len(document) for document in documents]
    prefix.with_suffix(".bin").write_bytes(b"".join(np.array(document, "<i4").tobytes() for document in documents))
    prefix.with_suffix(".idx").write_bytes(
        b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 4, len(lengths), len(lengths) + 1)
        + np.array(lengths, "<i4").tobytes() + np.array([0, *4 * np.cumsum(lengths)[:-1]], "<i8").tobytes()
        + np.arange(len(lengths) + 1).astype("<i8").tobytes())
    return prefix


def write_tokenizer(path: Path, num_words: int) -> Path:
    words = {f"w{number}": number for number in range(num_words)}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0")).save(str(path))
    return path


def test_a_vocabulary_is_what_the_run_says_it_is(tmp_path: Path) -> None:
    prefix = write_megatron(tmp_path / "d", [[1, 2, 3], [4, 5]])
    tokenizer = write_tokenizer(tmp_path / "tokenizer.json", 300)
    assert open_source("megatron", prefix).vocab is None
    assert open_source("megatron", prefix, vocab=50_304).vocab == 50_304
    assert open_source("megatron", prefix, tokenizer=str(tokenizer)).vocab == 300
    assert open_source("megatron", prefix, tokenizer=str(tmp_path), vocab=320).vocab == 320  # its folder will do
    assert "data.vocab is 299 but" in refusal("megatron", prefix, tokenizer=str(tokenizer), vocab=299)
    assert "data.vocab is 100 but 'bytes' makes 257" in refusal("stdlib", vocab=100)
    assert documents_of(open_source("megatron", prefix, vocab=10)) == [[1, 2, 3], [4, 5]]


def test_bytes_for_a_model_with_a_tokenizer_are_refused(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tokenizer.json", 300)
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n')
    chosen = some_settings("jsonl", tmp_path / "a.jsonl").with_values({"model.load": str(tmp_path)})
    with pytest.raises(ValueError, match=r"has a tokenizer of its own, but data\.tokenizer is empty"):
        check_machine(chosen)


# ---- memory and progress

def test_reading_that_takes_long_says_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = 0.0

    def documents() -> Iterator[Tokens]:
        nonlocal clock
        for number in range(40):
            clock += 0.5
            yield Tokens(np.arange(number + 1), None)

    monkeypatch.setattr(corpora, "perf_counter", lambda: clock)
    with caplog.at_level(logging.INFO, logger="distca"):
        corpus = in_memory(documents(), 100, "the corpus")
    assert documents_of(corpus) == [list(range(number + 1)) for number in range(40)]
    said = [record.getMessage() for record in caplog.records]
    assert said[0] == "reading the corpus: 2 documents, 3 tokens after 1 s"
    assert [line.rpartition("after ")[2] for line in said] == ["1 s", "2 s", "4 s", "8 s", "16 s"]


@pytest.mark.parametrize(("vocab", "dtype"), [(2**16, np.uint16), (2**16 + 1, np.int32), (None, np.int32)])
def test_a_token_takes_two_bytes_or_four(vocab: int | None, dtype: type) -> None:
    corpus = in_memory((Tokens(np.arange(1000), None) for _ in range(10)), vocab, "numbers")
    assert corpus.data.dtype == dtype and len(corpus.data) == 10_000 and corpus.loss is None
