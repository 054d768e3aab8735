"""Every source gives the documents that were written, and a bad one is refused by name in one line."""

import json
import struct
import sys
import tempfile
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distca.corpus.corpora import Corpus, corpus_from
from distca.corpus.megatron_files import MegatronCorpus
from distca.corpus.sources import standard_library_files
from distca.train.settings import Settings
from distca.workload.documents import standard_library_lengths
from tests.support.refusals import refusal

TYPE_CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "uint16": 8}


def open_source(source: str, path: Path | str = "", **data: str) -> Corpus:
    return corpus_from(Settings().with_values(
        {"data.source": source, "data.path": str(path), **{f"data.{name}": value for name, value in data.items()}}))


def documents_of(corpus: Corpus) -> list[list[int]]:
    assert corpus.lengths().tolist() == [len(corpus.tokens(i)) for i in range(corpus.num_documents)]
    return [corpus.tokens(i).tolist() for i in range(corpus.num_documents)]


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
    for document in (0, 17, corpus.num_documents - 1):
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
    (b"[" * 100_000, "is not JSON (RecursionError)"),
    (b'{"text": "\xff"}', "is not UTF-8 text"),
    (b'["text"]', "holds ['text'], not an object"),
    (b'{"body": "x"}', "has None under 'text', not text; its keys are ['body']: set data.field"),
    (b'{"text": 3}', "has 3 under 'text', not text"),
    (b'{"text": "\\ud800"}', "has half a surrogate pair under 'text'"),
])
def test_a_bad_line_is_named_by_number(tmp_path: Path, line: bytes, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "good"}\n\n' + line + b'\n{"text": "good"}\n')
    assert f"{path}: line 3 {message}" in refusal(open_source, "jsonl", path)


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
