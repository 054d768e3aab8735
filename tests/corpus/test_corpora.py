"""Every source gives the documents that were written, and a bad one is refused by name in one line."""

import gzip
import json
import logging
import struct
import sys
import tempfile
from collections.abc import Iterable
from itertools import chain, count
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tokenizers
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from distca.corpus import cache
from distca.corpus.cache import in_memory
from distca.corpus.corpora import Corpus, MegatronCorpus, open_corpus
from distca.corpus.files import standard_library_files
from distca.corpus.lengths import standard_library_lengths
from distca.corpus.records import RawDocuments
from distca.corpus.tokenizers import MAX_CALL_CHARS, Tokens
from distca.train.settings import Settings
from distca.train.settings.preflight import check_machine
from tests.support.refusals import refusal

TYPE_CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "uint16": 8}


def open_source(source: str, path: Path | str = "", **data: Any) -> Corpus:
    return open_corpus(source, str(path), **data)


def documents_of(corpus: Corpus) -> list[list[int]]:
    assert corpus.lengths().tolist() == [len(corpus.tokens(i)) for i in range(len(corpus.lengths()))]
    return [corpus.tokens(i).tolist() for i in range(len(corpus.lengths()))]


def as_bytes(*texts: str) -> list[list[int]]:
    return [[*text.encode(), 256] for text in texts]


def write_mmididx(prefix: Path | str, documents: list[list[list[int]]], dtype: str = "uint16", modes: bool = False,
                  version: int = 1, code: int | None = None, bounds: list[int] | None = None, gap: int = 0) -> None:
    """The public format: header, lengths, pointers, document index; `documents` are lists of sequences.

    `gap` leaves that many foreign bytes before every sequence, as no writer does but every pointer allows.
    """
    sequences = [np.array(sequence, dtype=dtype) for document in documents for sequence in document]
    if bounds is None:
        bounds = np.cumsum([0, *(len(document) for document in documents)]).tolist()
    content, pointers = b"", []
    for sequence in sequences:
        content += b"\xee" * gap
        pointers.append(len(content))
        content += sequence.tobytes()
    Path(f"{prefix}.bin").write_bytes(content)
    Path(f"{prefix}.idx").write_bytes(
        b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", version, code or TYPE_CODES[dtype], len(sequences), len(bounds))
        + np.array([len(sequence) for sequence in sequences], dtype="<i4").tobytes()
        + np.array(pointers, dtype="<i8").tobytes() + np.array(bounds, dtype="<i8").tobytes()
        + bytes(len(sequences) if modes else 0))


def test_the_standard_library_is_its_bytes() -> None:
    corpus = open_source("stdlib")
    assert corpus.vocab == 257
    assert corpus.lengths().tolist() == (standard_library_lengths() + 1).tolist()
    files = [path for path in standard_library_files() if path.stat().st_size]
    for document in (0, 17, len(corpus.lengths()) - 1):
        assert corpus.tokens(document).tolist() == [*files[document].read_bytes(), 256]


def test_a_text_file_is_one_document(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("naïve\n", encoding="utf-8")
    corpus = open_source("text", tmp_path / "a.txt")
    assert documents_of(corpus) == as_bytes("naïve\n")
    assert corpus.vocab == 257


def test_a_folder_is_its_files_in_order_of_path(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    for name, text in {"c.txt": "3", "b/x.txt": "2", "a.md": "1", "empty": "", ".hidden": "no"}.items():
        (tmp_path / name).write_text(text)
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("no")
    assert documents_of(open_source("text", tmp_path)) == as_bytes("1", "2", "3")


def test_bytes_need_not_be_text(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"\xff\x00\xfe")
    assert documents_of(open_source("text", tmp_path / "a")) == [[255, 0, 254, 256]]


def test_jsonl_lines_are_documents(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"body": "öne", "n": 1}\n\n{"body": "two"}\r\n{"body": ""}\n{"body": "last"}')
    (tmp_path / "b.jsonl").write_text('{"body": "other file"}\n')
    (tmp_path / "c.json").write_text("not read")
    assert documents_of(open_source("jsonl", tmp_path, field="body")) == as_bytes("öne", "two", "last", "other file")
    assert documents_of(open_source("jsonl", tmp_path / "b.jsonl", field="body")) == as_bytes("other file")


@pytest.mark.parametrize(("line", "message"), [
    (b'{"text": "cut', "is not JSON (Unterminated string"),
    (b"[" * 100_000, "is not JSON (a number too long, or lists too deep)"),
    (b'{"text": "\xff"}', "is not UTF-8 text"),
    (b'["text"]', "holds ['text'], not an object"),
    (b'{"body": "x"}', "has no 'text'; its keys are ['body']: set data.field to one of them, or repair or drop it"),
    (b'{"text": null}', "has None under 'text', not text; its keys are ['text']: repair or drop it"),
    (b'{"text": 3}', "has 3 under 'text', not text"),
    (b'{"text": "\\ud800"}', "has half a surrogate pair under 'text'"),
])
def test_a_bad_line_is_named_by_number(tmp_path: Path, line: bytes, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "good"}\n\n' + line + b'\n{"text": "good"}\n')
    assert f"{path}: line 3 {message}" in refusal(open_source, "jsonl", path)


def test_a_zero_byte_is_found_by_its_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "a"}\n' * 700_000 + b'{"text": "\0"}\n')  # in the second chunk that is read
    assert f"{path}: not a text file, for line 700001 has a zero byte" in refusal(open_source, "jsonl", path)


def test_missing_and_empty_sources_are_named(tmp_path: Path) -> None:
    (tmp_path / "nothing").write_text("")
    (tmp_path / "blank.jsonl").write_text("\n\n")
    assert "no/such', which is no file or folder" in refusal(open_source, "text", "no/such")
    assert "data.path is empty" in refusal(open_source, "jsonl")
    assert "holds no document with a token" in refusal(open_source, "text", tmp_path / "nothing")
    assert "holds no document with a token" in refusal(open_source, "jsonl", tmp_path)
    (tmp_path / "folder").mkdir()
    assert "a folder without a .jsonl file" in refusal(open_source, "jsonl", tmp_path / "folder")
    assert "did you mean 'jsonl'" in refusal(open_source, "json", tmp_path)


def test_a_missing_package_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("text")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    message = refusal(open_source, "text", tmp_path, tokenizer="tokenizer.json")
    assert "data.tokenizer is 'tokenizer.json'" in message
    assert "pip install tokenizers" in message


def word_tokenizer(path: Path, words: list[str], template: str | None = None) -> str:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="?"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    if template:
        special = [(word, words.index(word)) for word in template.split() if word != "$A"]
        tokenizer.post_processor = tokenizers.processors.TemplateProcessing(single=template, special_tokens=special)
    tokenizer.save(str(path))
    return str(path)


@pytest.mark.parametrize(("words", "template", "expected"), [
    (["?", "one", "two"], None, [[1, 2], [2, 0]]),
    (["?", "one", "two", "</s>"], None, [[1, 2, 3], [2, 0, 3]]),
    (["?", "one", "two", "<s>", "</s>"], "<s> $A </s>", [[3, 1, 2, 4], [3, 2, 0, 4]]),
])
def test_a_tokenizer_ends_documents_once(tmp_path: Path, words: list[str], template: str | None,
                                         expected: list[list[int]]) -> None:
    tokenizer = word_tokenizer(tmp_path / "tokenizer.json", words, template)
    (tmp_path / "a.jsonl").write_text('{"text": "one two"}\n{"text": "two three"}\n')
    corpus = open_source("jsonl", tmp_path / "a.jsonl", tokenizer=tokenizer)
    assert documents_of(corpus) == expected
    assert corpus.vocab == len(words)


def test_a_bad_tokenizer_or_text_is_named(tmp_path: Path) -> None:
    tokenizer = word_tokenizer(tmp_path / "tokenizer.json", ["?", "one"])
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "latin.txt").write_bytes("café".encode("latin-1"))
    assert "latin.txt: not UTF-8 text" in refusal(open_source, "text", folder / "latin.txt", tokenizer=tokenizer)
    broken = tmp_path / "broken.json"
    broken.write_text(json.dumps({"model": 3}))
    assert "broken.json', which is no tokenizer.json" in refusal(open_source, "text", folder, tokenizer=str(broken))
    assert "absent.json', which is no file" in refusal(open_source, "text", folder, tokenizer="absent.json")


sequences = st.lists(st.integers(0, 127), max_size=6)
datasets = st.lists(st.lists(sequences, max_size=3), min_size=1, max_size=5).filter(
    lambda documents: any(sequence for document in documents for sequence in document))


@settings(max_examples=60, deadline=None)
@given(datasets, st.sampled_from(sorted(TYPE_CODES)), st.integers(0, 3))
def test_megatron_round_trip(documents: list[list[list[int]]], dtype: str, gap: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        prefix = f"{folder}/data_text_document"
        write_mmididx(prefix, documents, dtype, gap=gap)
        corpus = open_source("megatron", prefix)
        assert isinstance(corpus, MegatronCorpus)
        assert corpus.vocab is None
        assert documents_of(corpus) == [list(chain.from_iterable(document)) for document in documents]


def test_megatron_tokens_are_mapped_and_large_ones_survive(tmp_path: Path) -> None:
    write_mmididx(tmp_path / "d", [[[65535, 0]], [[7]]])
    assert documents_of(open_source("megatron", tmp_path / "d.bin")) == [[65535, 0], [7]]
    write_mmididx(tmp_path / "d", [[[128255]]], "int32")
    corpus = open_source("megatron", tmp_path / "d.idx")
    assert documents_of(corpus) == [[128255]]
    assert isinstance(corpus, MegatronCorpus) and corpus.data.base is not None
    assert isinstance(corpus.data.base, np.memmap) or isinstance(corpus.data.base.base, np.memmap)


def test_a_torn_megatron_file_is_named_wherever_it_is_torn(tmp_path: Path) -> None:
    write_mmididx(tmp_path / "d", [[[1, 2, 3], [4]], [[5, 6]]])
    for suffix in ("idx", "bin"):
        path = tmp_path / f"d.{suffix}"
        whole = path.read_bytes()
        for size in range(len(whole)):
            path.write_bytes(whole[:size])
            assert f"d.{suffix}" in refusal(open_source, "megatron", tmp_path / "d")
        path.write_bytes(whole + (b"\x00" if suffix == "idx" else b""))
        if suffix == "idx":
            assert "torn" in refusal(open_source, "megatron", tmp_path / "d")
        path.write_bytes(whole)
    assert documents_of(open_source("megatron", tmp_path / "d")) == [[1, 2, 3, 4], [5, 6]]


@pytest.mark.parametrize(("options", "message"), [
    ({"version": 2}, "is of version 2; only version 1"),
    ({"modes": True}, "is multimodal"),
    ({"code": 6}, "the type code 6; tokens are one of 1 (uint8)"),
    ({"bounds": [0, 1]}, "does not divide its 2 sequences into documents"),
    ({"bounds": [0, 2, 1, 2]}, "does not divide its 2 sequences into documents"),
    ({"bounds": []}, "does not divide its 2 sequences into documents"),
])
def test_a_foreign_megatron_index_is_named(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    write_mmididx(tmp_path / "d", [[[1, 2]], [[3]]], **options)
    found = refusal(open_source, "megatron", tmp_path / "d")
    assert "d.idx" in found and message in found


def test_other_files_are_not_megatron(tmp_path: Path) -> None:
    (tmp_path / "d.bin").write_bytes(b"12")
    assert "d.idx is no file; a Megatron dataset needs" in refusal(open_source, "megatron", tmp_path / "d")
    (tmp_path / "d.idx").write_bytes(b"PK\x03\x04 something else")
    assert "d.idx does not begin with MMIDIDX" in refusal(open_source, "megatron", tmp_path / "d")
    write_mmididx(tmp_path / "d", [[[]], []])
    assert "holds no document with a token" in refusal(open_source, "megatron", tmp_path / "d")


# ---- records of every format

TEXTS = ["one", "zwei ü", "three\nlines\n", "x" * 5_000]
IDS = [[5, 6, 7, 8], [9], [1, 2, 3], [70_000, 4]]
MASKS = [[0, 0, 1, 1], [1], [1, 1, 0], [0, 1]]
KINDS = ["jsonl", "jsonl.gz", "jsonl.zst", "folder of jsonl", "parquet", "folder of parquet", "dataset"]


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
    ({"tokens": [1]}, "has no 'input_ids'; its keys are ['tokens']: set data.field"),
    ({"input_ids": [1, 900]}, "holds token 900, where tokens are 0 to 499"),
    ({"input_ids": [-1, 2]}, "holds token -1, where"),
])
def test_bad_tokens_are_named(record: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps(record))
    assert message in refusal(open_source, "jsonl", tmp_path / "a.jsonl", content="tokens", vocab=500)


def test_columns_and_splits_that_are_not_there_list_those_that_are(tmp_path: Path) -> None:
    source, path = write("parquet", tmp_path / "corpus.parquet", {"body": TEXTS, "id": [1, 2, 3, 4]})
    assert "no column 'text'; it has 'body', 'id': set data.field to one of them" in refusal(open_source, source, path)
    assert documents_of(open_source(source, path, field="body"))[0] == [*b"one", 256]
    for split in ("train", "test"):
        write("parquet", tmp_path / f"{split}-0.parquet", {"text": [split]})
    (tmp_path / "corpus.parquet").unlink()
    assert "several splits, 'test', 'train'; set data.split to one of them" in refusal(open_source, source, tmp_path)
    assert documents_of(open_source(source, tmp_path, split="test")) == [[*b"test", 256]]
    assert "not text; its keys are" in refusal(open_source, source, write("parquet", tmp_path / "n", {"text": [1]})[1])


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
    message = refusal(open_source, "text", tmp_path)
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
    assert "data.vocab is 299 but" in refusal(open_source, "megatron", prefix, tokenizer=str(tokenizer), vocab=299)
    assert "data.vocab is 100 but 'bytes' makes 257" in refusal(open_source, "stdlib", vocab=100)
    assert documents_of(open_source("megatron", prefix, vocab=10)) == [[1, 2, 3], [4, 5]]


def test_bytes_for_a_model_with_a_tokenizer_are_refused(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tokenizer.json", 300)
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n')
    chosen = Settings().with_values({"data.source": "jsonl", "data.path": str(tmp_path / "a.jsonl"),
                                     "model.load": str(tmp_path)})
    with pytest.raises(ValueError, match=r"has a tokenizer of its own, but data\.tokenizer is empty"):
        check_machine(chosen)


# ---- memory and progress

def raw_of(documents: Iterable[np.ndarray], name: str = "the corpus") -> RawDocuments[np.ndarray]:
    """Documents of tokens, each a group of its own."""
    return RawDocuments(name, documents, lambda ids: MAX_CALL_CHARS, lambda group: [Tokens(ids, None) for ids in group])


def test_reading_that_takes_long_says_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    seconds = count(0.0, 0.5)                                    # at the start, and after each document
    monkeypatch.setattr(cache, "perf_counter", lambda: next(seconds))
    with caplog.at_level(logging.INFO, logger="distca"):
        corpus = in_memory(raw_of(np.arange(number + 1) for number in range(40)), 100)
    assert documents_of(corpus) == [list(range(number + 1)) for number in range(40)]
    said = [record.getMessage() for record in caplog.records]
    assert said[0] == "reading the corpus: 2 documents, 3 tokens after 1 s"
    assert [line.rpartition("after ")[2] for line in said] == ["1 s", "2 s", "4 s", "8 s", "16 s"]


@pytest.mark.parametrize(("vocab", "dtype"), [(2**16, np.uint16), (2**16 + 1, np.int32), (None, np.int32)])
def test_a_token_takes_two_bytes_or_four(vocab: int | None, dtype: type) -> None:
    corpus = in_memory(raw_of([np.arange(1000)] * 10), vocab)
    assert corpus.data.dtype == dtype and len(corpus.data) == 10_000 and corpus.loss is None
