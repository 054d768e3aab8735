"""Every format reads back to the lengths that were written, and whatever is wrong with a file is one line."""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import re
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from distca.corpus import files
from distca.corpus import lengths as lengths_module
from distca.corpus.lengths import Reading, read_source, standard_library_lengths
from distca.validation import MAX_CORPUS_DOCUMENTS
from distca.workload.documents import MAX_LENGTH, Workload

pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed; pip install pyarrow")
from pyarrow import feather, parquet  # noqa: E402

zstandard = pytest.importorskip("zstandard", reason="zstandard is not installed; pip install zstandard")

LENGTHS = [3, 5, 131_072, 16, MAX_LENGTH, 1]
Write = Callable[[Path, list[int]], None]


def _csv(delimiter: str) -> Write:
    def write(path: Path, lengths: list[int]) -> None:
        with path.open("w", newline="", encoding="utf-8") as file:
            rows = csv.writer(file, delimiter=delimiter)
            rows.writerows([["id", "title", "length"], *([at, f"a \"b\",\n{at}", n] for at, n in enumerate(lengths))])
    return write


def _arrow(path: Path, lengths: list[int]) -> None:
    """As Hugging Face datasets are kept: the streaming format, in several batches."""
    table = pyarrow.table({"text": ["x"] * len(lengths), "length": pyarrow.array(lengths, pyarrow.int32())})
    with pyarrow.OSFile(str(path), "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=4)


def _text(render: Callable[[list[int]], str]) -> Write:
    def write(path: Path, lengths: list[int]) -> None:
        path.write_text(render(lengths), encoding="utf-8")
    return write


WRITERS: dict[str, Write] = {
    "a.txt": _text(lambda lengths: "\n".join(map(str, lengths))),
    "comments.txt": _text(lambda lengths: "# corpus\n\n" + "\n".join(f"  {n}  # tokens" for n in lengths) + "\n\n"),
    "windows.txt": _text(lambda lengths: "\ufeff" + "\r\n".join(map(str, lengths)) + "\r\n"),
    "noname": _text(lambda lengths: "\n".join(map(str, lengths)) + "\n"),
    "a.json": _text(json.dumps),
    "objects.json": _text(lambda lengths: json.dumps([{"id": 1, "length": n} for n in lengths])),
    "a.jsonl": _text(lambda lengths: "\n\n".join(json.dumps({"length": n, "text": "a\nb"}) for n in lengths)),
    "numbers.jsonl": _text(lambda lengths: "\n".join(map(str, lengths))),
    "a.ndjson": _text(lambda lengths: "\n".join(json.dumps({"length": n}) for n in lengths) + "\n"),
    "a.csv": _csv(","),
    "a.tsv": _csv("\t"),
    "one.csv": _text(lambda lengths: "\n".join(map(str, lengths))),
    "named.csv": _text(lambda lengths: "tokens\n" + "\n".join(map(str, lengths))),
    "a.npy": lambda path, lengths: np.save(path, np.array(lengths)),
    "small.npy": lambda path, lengths: np.save(path, np.array(lengths, dtype=np.uint32)),
    "a.parquet": lambda path, lengths: parquet.write_table(
        pyarrow.table({"id": ["x"] * len(lengths), "length": lengths}), path, row_group_size=4),
    "a.arrow": _arrow,
    "floats.txt": _text(lambda lengths: "\n".join(f"{n}.0" for n in lengths)),
    "floats.csv": _text(lambda lengths: "id,length\n" + "\n".join(f"0,{n}.000" for n in lengths)),
    "floats.json": _text(lambda lengths: json.dumps([float(n) for n in lengths])),
    "floats.jsonl": _text(lambda lengths: "\n".join(json.dumps({"length": float(n)}) for n in lengths)),
    "floats.npy": lambda path, lengths: np.save(path, np.array(lengths, dtype=np.float64)),
    "floats.parquet": lambda path, lengths: parquet.write_table(
        pyarrow.table({"length": [float(n) for n in lengths]}), path),
    "a.feather": lambda path, lengths: feather.write_feather(
        pyarrow.table({"length": lengths}), str(path), compression="uncompressed"),
}
PACK: dict[str, Callable[[bytes], bytes]] = {".gz": gzip.compress, ".zst": lambda data: zstandard.compress(data)}


@pytest.mark.parametrize("name", WRITERS)
@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(lengths=st.lists(st.integers(1, MAX_LENGTH), min_size=1, max_size=40))
def test_lengths_read_back(tmp_path: Path, name: str, lengths: list[int]) -> None:
    WRITERS[name](tmp_path / name, lengths)
    found = read_source(tmp_path / name)
    assert isinstance(found, np.ndarray) and found.dtype == np.int64 and found.tolist() == lengths


@pytest.mark.parametrize("suffix", PACK)
@pytest.mark.parametrize("name", [name for name in WRITERS if not name.endswith((".parquet", ".arrow", ".feather"))])
def test_packed_text_and_arrays_read_back(tmp_path: Path, name: str, suffix: str) -> None:
    WRITERS[name](tmp_path / name, LENGTHS)
    packed = PACK[suffix]((tmp_path / name).read_bytes())
    (tmp_path / f"{name}{suffix}").write_bytes(packed)
    assert _read(tmp_path / f"{name}{suffix}") == LENGTHS
    (tmp_path / f"two.{name}{suffix}").write_bytes(packed * 2)  # members that follow each other are one file
    if name in ("noname", "a.ndjson", "comments.txt"):
        assert _read(tmp_path / f"two.{name}{suffix}") == LENGTHS * 2


def _read(path: Path, **options: str) -> list[int]:
    found = read_source(path, Reading(**options))
    assert isinstance(found, np.ndarray)
    return [int(length) for length in found]


@pytest.mark.parametrize("format_", ["lines", "csv", "json", "jsonl", "npy", None])
@pytest.mark.parametrize("packed", [False, True])
def test_stdin_is_read_as_what_it_is_said_to_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format_: str | None, packed: bool
) -> None:
    WRITERS[f"a.{format_ or 'txt'}" if format_ != "lines" else "a.txt"](tmp_path / "x", LENGTHS)
    path = tmp_path / ("x.npy" if format_ == "npy" else "x")
    content = gzip.compress(path.read_bytes()) if packed else path.read_bytes()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
    found = read_source("-", Reading(format=format_))
    assert isinstance(found, np.ndarray) and found.tolist() == LENGTHS


def test_odd_names_need_a_format(tmp_path: Path) -> None:
    WRITERS["a.jsonl"](tmp_path / "data", LENGTHS)
    with pytest.raises(ValueError, match=r"data: several JSON values; name the file \.jsonl, or give --format jsonl"):
        read_source(tmp_path / "data")
    assert _read(tmp_path / "data", format="jsonl") == LENGTHS


def test_a_column_is_read_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("length,num_tokens\n1,10\n2,20\n")
    (tmp_path / "a.jsonl").write_text('{"length": 1, "num_tokens": 10}\n{"num_tokens": 20}\n')
    (tmp_path / "no_head.csv").write_text("1,10\n2,20\n")
    parquet.write_table(pyarrow.table({"length": [1, 2], "num_tokens": [10, 20]}), tmp_path / "a.parquet")
    for name in ("a.csv", "a.jsonl", "a.parquet"):
        assert _read(tmp_path / name, column="num_tokens") == [10, 20]
    assert _read(tmp_path / "no_head.csv", column="2") == [10, 20]


def test_lists_of_tokens_are_as_long_as_they_are(tmp_path: Path) -> None:
    tokens = [[1, 2, 3], [4], [], [5, 6]]
    parquet.write_table(pyarrow.table({"id": [1, 2, 3, 4], "input_ids": tokens}), tmp_path / "a.parquet")
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"input_ids": one}) for one in tokens))
    for name in ("a.parquet", "a.jsonl"):
        assert _read(tmp_path / name) == [3, 1, 2]  # the empty document is none


def test_a_dataset_folder_and_folders_of_shards(tmp_path: Path) -> None:
    saved = tmp_path / "saved" / "train"
    saved.mkdir(parents=True)
    for number, lengths in enumerate(([7, 8], [9])):
        _arrow(saved / f"data-0000{number}-of-00002.arrow", lengths)
    _arrow(saved / "data-00000-of-00001.arrow", [99])   # an earlier save left it
    files = [{"filename": f"data-0000{number}-of-00002.arrow"} for number in range(2)]
    (saved / "state.json").write_text(json.dumps({"_data_files": files}))
    (tmp_path / "saved" / "dataset_dict.json").write_text('{"splits": ["train"]}')
    assert _read(tmp_path / "saved") == _read(saved) == [7, 8, 9]
    for kind, write in ((".parquet", WRITERS["a.parquet"]), (".jsonl", WRITERS["a.jsonl"])):
        folder = tmp_path / kind[1:] / "data"
        folder.mkdir(parents=True)
        write(folder / f"b{kind}", [3])
        write(folder / f"a{kind}", [1, 2])
        assert _read(tmp_path / kind[1:]) == [1, 2, 3]
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"empty: a directory without data"):
        read_source(tmp_path / "empty")


def test_workloads_may_be_packed_too(tmp_path: Path) -> None:
    workload = {"name": "two", "ranks": 1, "tokens_per_rank": 8, "sequences": [[3, 5]]}
    (tmp_path / "w.json.gz").write_bytes(gzip.compress(json.dumps(workload).encode()))
    assert isinstance(read_source(tmp_path / "w.json.gz"), Workload)


def _npy(array: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def _parquet(**columns: Any) -> bytes:
    file = io.BytesIO()
    parquet.write_table(pyarrow.table(columns), file)
    return file.getvalue()


BAD_FILES: list[tuple[str, bytes, dict[str, str], str]] = [
    ("a.csv", b"id,tokens\n1,2\n", {"column": "length"}, "column is 'length'; the columns are: id, tokens"),
    ("a.csv", b"id,tokens\n1,2\n", {}, "no column is called 'length'; give --column with one of: id, tokens"),
    ("a.csv", b"length\n5\n0\n", {}, "line 3 is 0; a document length is a whole number"),
    ("a.csv", b"id,length\n1,5\n2,-4\n", {}, "line 3 is -4"),
    ("a.csv", b"id,length\n1,5\n\n2,2.5\n", {}, "line 4 is '2.5'"),
    ("a.csv", b"id,length\n1,5\n2\n", {}, "line 3 has 1 of the 2 columns"),
    ("a.csv", b"id,length\n1,\n", {}, "line 2 is ''"),
    ("a.csv", b'id,length\n1,"5\n', {}, "is broken"),
    ("a.csv", b"", {}, "lengths is empty"),
    ("a.csv", b"length\n", {}, "lengths is empty"),
    ("a.csv", b"\xff\xfe1\n", {}, "not a text file"),
    ("a.tsv", b"a\tb\n1\t2\n", {"column": "c"}, "the columns are: a, b"),
    ("a.txt", b"5\n6\n", {"column": "length"}, "one number a line has no columns"),
    ("a.jsonl", b'{"length": 3}\n{"length": 2.5}\n', {}, "line 2 is 2.5"),
    ("a.jsonl", b'{"length": 3}\n\n{"length": 0}\n', {}, "line 3 is 0"),
    ("a.jsonl", b'{"length": 3}\n{"length": true}\n', {}, "line 2 is True"),
    ("a.jsonl", b'{"length": 3}\n{"length"\n', {}, "line 2 is not JSON"),
    ("a.jsonl", b'{"length": 3}\n[1, 2]\n', {}, "line 2 is [1, 2]"),
    ("a.jsonl", b'{"tokens": 3, "id": 1}\n', {}, "line 1: no column is called 'length'; give --column with one of: "),
    ("a.jsonl", b'{"id": 1, "text": "a b"}\n', {}, "or --tokenizer to count 'text'"),
    ("a.jsonl", b'{"text": "a b"}\n', {}, "line 1 is text; give --tokenizer"),
    ("a.jsonl", b'{"text": "a b"}\n', {"column": "text"}, "line 1 is text; give --tokenizer"),
    ("a.jsonl", b'{"a": 1}\n', {"column": "b"}, "line 1: column is 'b'; the columns are: a"),
    ("a.jsonl", b"[" * 100_000, {}, "line 1 is not JSON"),
    ("a.json", b'[{"length": 3}, {"length": -1}]', {}, "lengths[1] is -1"),
    ("a.json", b'[3, {"length": 1.5}]', {}, "lengths[1] is 1.5"),
    ("a.json", b"3", {"format": "json"}, "holds 3; give a JSON list"),
    ("a.npy", _npy(np.array([1.0, 2.5])), {}, "lengths[1] is 2.5"),
    ("a.npy", _npy(np.array([1.0, np.inf])), {}, "lengths[1] is inf"),
    ("a.npy", _npy(np.array([1j])), {}, "an array of complex128 with shape (1,); give whole numbers"),
    ("a.csv", b"length\n4.0\n0.0\n", {}, "line 3 is 0"),
    ("a.npy", _npy(np.ones((2, 2), dtype=int)), {}, "shape (2, 2)"),
    ("a.npy", _npy(np.array([4, 0])), {}, "lengths[1] is 0"),
    ("a.npy", _npy(np.array([2**63], dtype=np.uint64)), {}, "lengths[0] is 9223372036854775808"),
    ("a.npy", _npy(np.array([], dtype=int)), {}, "lengths is empty"),
    ("a.npy", b"", {}, "no .npy array"),
    ("a.npy", b"garbage", {}, "no .npy array"),
    ("a.npy", _npy(np.array([1, 2]))[:-4], {}, "no .npy array"),
    ("a.npy", b"PK\x03\x04garbage", {}, "no .npy array"),
    ("a.npy", _npy(np.array([None, 1])), {}, "no .npy array"),
    ("a.parquet", _parquet(a=[1], b=[2]), {"column": "c"}, "column is 'c'; the columns are: a, b"),
    ("a.parquet", _parquet(length=[2.0, 1.5]), {}, "length[1] is 1.5"),
    ("a.parquet", _parquet(length=[1.0, float("nan")]), {}, "length[1] is nan"),
    ("a.parquet", _parquet(length=[1.0, None]), {}, "row 1 has nothing under 'length'"),
    ("a.parquet", _parquet(length=[True]), {}, "column 'length' holds bool"),
    ("a.parquet", _parquet(length=[5, None]), {}, "row 1 has nothing under 'length'"),
    ("a.parquet", _parquet(length=[5, -2]), {}, "length[1] is -2"),
    ("a.parquet", _parquet(text=["a"]), {}, "column 'text' is text; give --tokenizer"),
    ("a.parquet", b"garbage", {}, "cannot be read"),
    ("a.parquet", _parquet(length=[5])[:-6], {}, "cannot be read"),
    ("a.arrow", b"garbage", {}, "cannot be read"),
    ("a.arrow", b"", {}, "a.arrow"),
    ("a.txt.gz", b"garbage", {}, "does not begin as gzip does"),
    ("a.txt.gz", gzip.compress(b"5\n" * 1000, mtime=0)[:-9], {}, "cannot be read"),
    ("a.txt.gz", gzip.compress(b"5\n" * 1000, mtime=0)[:20] + b"\xff" * 20, {}, "cannot be read"),
    ("a.txt.zst", b"garbage", {}, "does not begin as Zstandard does"),
    ("a.txt.zst", zstandard.compress(b"5\n" * 1000)[:-3], {}, "cannot be read"),
    ("a.txt", b"5\n6\n", {"format": "tables"}, "format 'tables' is unknown; "),
    ("a.txt", b"5\n6\n", {"column": "\x1b[2J"}, "column is '\\x1b[2J'; give the name of a column"),
    ("a.jsonl", b'{"text": "a"}\n', {"tokenizer": "none.json"}, "tokenizer is 'none.json', which is no file"),
]


@pytest.mark.parametrize(("name", "content", "options", "said"), BAD_FILES, ids=lambda value: str(value)[:30])
def test_bad_files_are_one_line_that_begins_with_the_name(
    tmp_path: Path, name: str, content: bytes, options: dict[str, str], said: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(said)) as caught:
        read_source(path, Reading(**options))
    words = str(caught.value)
    assert words.startswith(str(path)) and "\n" not in words
    assert words.isprintable() and len(words) < 400 + 2 * len(str(path))


def test_a_pipe_cannot_be_a_table() -> None:
    with pytest.raises(ValueError, match="stdin: format is 'parquet', which cannot be read from a pipe"):
        read_source("-", Reading(format="parquet"))


def test_what_unpacks_to_far_more_than_it_is_is_refused_early(tmp_path: Path) -> None:
    """A gigabyte of blank lines in a megabyte."""
    path = tmp_path / "bomb.txt.gz"
    with gzip.open(path, "wb", compresslevel=6) as file:
        for _ in range(256):
            file.write(b"\n" * 2**20)
    with pytest.raises(ValueError, match="unpacks to more than 200 times its size"):
        read_source(path)


def test_documents_and_lines_and_folders_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert MAX_CORPUS_DOCUMENTS >= 2**22
    (tmp_path / "a.txt").write_text("5\n" * 100)
    monkeypatch.setattr(lengths_module, "MAX_CORPUS_DOCUMENTS", 99)
    with pytest.raises(ValueError, match="the number of documents is 100; give at most 99"):
        read_source(tmp_path / "a.txt")
    monkeypatch.setattr(lengths_module, "MAX_LINE_BYTES", 64)
    (tmp_path / "b.txt").write_text("5\n" + "6" * 100)
    with pytest.raises(ValueError, match="line 2 is longer than 64 bytes"):
        read_source(tmp_path / "b.txt")
    monkeypatch.setattr(lengths_module, "MAX_ENTRIES", 1)
    with pytest.raises(ValueError, match="a directory of more than 1 entries"):
        read_source(tmp_path)


def test_progress_counts_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CHUNK_BYTES", "_PIECE_BYTES"):
        monkeypatch.setattr(files, name, 64)
    WRITERS["a.txt"](tmp_path / "a.txt", list(range(1, 101)))
    seen: list[int] = []
    found = read_source(tmp_path / "a.txt", progress=seen.append)
    assert isinstance(found, np.ndarray) and found.tolist() == list(range(1, 101))
    assert len(seen) > 3 and seen == sorted(seen) and seen[-1] == 100


def test_line_numbers_hold_across_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CHUNK_BYTES", "_PIECE_BYTES"):
        monkeypatch.setattr(files, name, 64)
    for name, line in (("a.txt", "{}"), ("a.jsonl", '{{"length": {}}}'), ("a.csv", "{}")):
        (tmp_path / name).write_text("\n".join(line.format(7 if at != 77 else 0) for at in range(1, 101)))
        with pytest.raises(ValueError, match="line 77 is 0"):
            read_source(tmp_path / name)


def test_standard_library_lengths_are_the_sizes_of_its_files() -> None:
    lengths = standard_library_lengths()
    assert np.array_equal(lengths, standard_library_lengths())
    assert len(lengths) > 300
    size = os.path.getsize(os.path.join(sysconfig.get_path("stdlib"), "argparse.py"))
    assert size in lengths
    assert lengths[0] == os.path.getsize(os.path.join(sysconfig.get_path("stdlib"), "__future__.py"))


WORKLOAD = {"name": "two", "ranks": 3, "tokens_per_rank": 8, "sequences": [[3, 5], [9, 7]]}


def write(tmp_path: Path, content: bytes | str) -> Path:
    path = tmp_path / "source.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.mark.parametrize("content", [
    "[3, 5, 16]", "3\n5\n16\n", "# lengths\n\n3\n  5  # short\n16", "\ufeff3\r\n5\r\n16",
])
def test_plain_lengths_are_read(tmp_path: Path, content: str) -> None:
    lengths = read_source(write(tmp_path, content))
    assert isinstance(lengths, np.ndarray) and lengths.tolist() == [3, 5, 16]


def test_workloads_are_read(tmp_path: Path) -> None:
    workload = read_source(write(tmp_path, json.dumps(WORKLOAD)))
    assert isinstance(workload, Workload)
    assert (workload.name, workload.ranks, workload.tokens_per_rank) == ("two", 3, 8)
    assert [lengths.tolist() for lengths in workload.sequences] == [[3, 5], [9, 7]]
    with pytest.raises(ValueError, match="read-only"):
        workload.sequences[0][0] = 1


@pytest.mark.parametrize("content, message", [
    ("[]", "lengths is empty"),
    ("", "lengths is empty"),
    ("# nothing\n", "lengths is empty"),
    ("[4, 0]", r"lengths\[1\] is 0;"),
    ("[4, 3.5]", r"lengths\[1\] is 3.5;"),
    ("[true]", r"lengths\[0\] is True;"),
    ('["a"]', r"lengths\[0\] is 'a';"),
    ("[NaN]", r"lengths\[0\] is nan;"),
    ("4\n\n-2", "line 3 is -2;"),
    ("4\n3.5", "line 2 is '3.5';"),
    ("4\n3,5", "line 2 is '3,5';"),
    ("1 000", "line 1 is '1 000';"),
    ("9" * 30, "line 1 is"),
    ("null", "line 1 is 'null';"),
    ("[1, 2", "broken JSON at line 1 column"),
    ('{"a": ', "broken JSON"),
    ("[" * 100_000, "JSON"),
    ("[" + "9" * 5000 + "]", "JSON|is 9999"),
    (b"\xff\xfe\x00", "not a text file"),
    ('{"q_len": [1], "name": "t"}', r"keys are \['q_len', 'name'\], without ranks, tokens_per_rank, sequences; give"),
    (json.dumps({**WORKLOAD, "name": 7}), "name is 7"),
    (json.dumps({**WORKLOAD, "ranks": 0}), "ranks is 0"),
    (json.dumps({**WORKLOAD, "ranks": 4}), "sequences fill 3 ranks of 8 tokens but ranks is 4; set ranks to 3"),
    (json.dumps({**WORKLOAD, "tokens_per_rank": 8.0}), "tokens_per_rank is 8.0"),
    (json.dumps({**WORKLOAD, "sequences": []}), r"sequences is \[\]"),
    (json.dumps({**WORKLOAD, "sequences": {"a": 1}}), "sequences is {"),
    (json.dumps({**WORKLOAD, "sequences": [8, 16]}), r"sequences\[0\] is 8;"),
    (json.dumps({**WORKLOAD, "sequences": [[8], []]}), r"sequences\[1\] is empty"),
    (json.dumps({**WORKLOAD, "sequences": [[8], [9, 0]]}), r"sequences\[1\]\[1\] is 0;"),
    (json.dumps({**WORKLOAD, "sequences": [[8], [9]]}), r"sequences\[1\] holds 9 tokens, not a whole multiple"),
])
def test_bad_files_get_one_line_with_their_name(tmp_path: Path, content: bytes | str, message: str) -> None:
    path = write(tmp_path, content)
    with pytest.raises(ValueError, match=message) as caught:
        read_source(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400 + len(str(path))


def test_missing_files_and_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"absent\.json: no such file"):
        read_source(tmp_path / "absent.json")
    with pytest.raises(ValueError, match="a directory without data"):
        read_source(tmp_path)
