"""Every format gives the same lines or columns, and what cannot be read is one line that names the file."""

import gzip
import io
import json
import subprocess
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from distca.corpus import tables as formats
from distca.corpus.tables import is_table, read_columns, split_of, table_files, text_lines, unpacked
from distca.validation import UserError

LINES = ["first", "", "dritte über 3", '{"text": "x\\ny"}']
TEXT = "\n".join(LINES).encode() + b"\n"


def zstd(content: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(content)


PACKED: dict[str, Callable[[bytes], bytes]] = {"txt": lambda content: content, "gz": gzip.compress, "zst": zstd}


@pytest.mark.parametrize("suffix", PACKED)
def test_every_packing_gives_the_same_lines(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"lines.{suffix}"
    path.write_bytes(PACKED[suffix](TEXT))
    assert list(text_lines(path)) == LINES
    assert unpacked(path) == TEXT
    with path.open("rb") as stream:
        assert list(text_lines(stream, name="stdin")) == LINES
        assert not stream.closed
    assert list(text_lines(io.BytesIO(path.read_bytes()), name="stdin")) == LINES


def test_line_ends_marks_and_a_last_line_without_end(tmp_path: Path) -> None:
    path = tmp_path / "lines.txt"
    path.write_bytes(b"\xef\xbb\xbfone\r\ntwo\n\nfour")
    assert list(text_lines(path)) == ["one", "two", "", "four"]


@pytest.mark.parametrize("pack", [gzip.compress, zstd], ids=["gz", "zst"])
def test_files_of_several_parts_are_read_to_the_end(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    path = tmp_path / "lines"
    path.write_bytes(pack(b"one\ntw") + pack(b"o\nthree\n") + pack(b"") + pack(b"four\n"))
    assert list(text_lines(path)) == ["one", "two", "three", "four"]


@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_a_file_that_was_cut_short_is_refused(tmp_path: Path, suffix: str) -> None:
    packed = PACKED[suffix](np.random.default_rng(0).bytes(20_000).hex().encode())
    path = tmp_path / f"lines.{suffix}"
    for size in (len(packed) // 2, len(packed) - 1, 5):
        path.write_bytes(packed[:size])
        with pytest.raises(ValueError, match="cannot be read") as refused:
            list(text_lines(path))
        assert str(path) in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(("name", "content", "message"), [
    ("a.gz", b"plain", "does not begin as gzip"),
    ("a.zst", b"plain", "does not begin as Zstandard"),
    ("a.zst", zstd(b"one\n") + b"garbage behind it", "cannot be read"),
    ("a.txt", b"one\n\xff\xfe\n", "line 2 is not UTF-8"),
    ("a.txt", b"one\n" + b"x" * 2000 + b"\n", "line 2 has more than 1000 bytes"),
])
def test_foreign_content_is_refused(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        list(text_lines(path, max_line_bytes=1000))


def test_no_more_than_the_limit_is_unpacked(tmp_path: Path) -> None:
    path = tmp_path / "bomb.zst"
    path.write_bytes(zstd(b"0\n" * 2**24))
    with pytest.raises(ValueError, match="more than 1000 bytes of text"):
        list(text_lines(path, max_bytes=1000))
    assert len(list(text_lines(io.BytesIO(b"12\n34\n"), name="all", max_bytes=6))) == 2


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such file"):
        list(text_lines(tmp_path / "none"))
    with pytest.raises(ValueError, match="no such file or folder"):
        table_files(tmp_path / "none")


TABLE = pa.table({"text": [f"document {n}" for n in range(2_500)], "length": list(range(2_500))})


def write_parquet(path: Path, table: pa.Table) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, row_group_size=700)


def write_arrow(path: Path, table: pa.Table, stream: bool = True) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with (pa.ipc.new_stream if stream else pa.ipc.new_file)(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=1_700)


def save_dataset(folder: Path, table: pa.Table) -> None:
    """What `Dataset.save_to_disk` writes: shards in the order of state.json, which need not be that of names."""
    write_arrow(folder / "data-00001-of-00002.arrow", table.slice(0, 1_000))
    write_arrow(folder / "data-00000-of-00002.arrow", table.slice(1_000))
    files = [{"filename": f"data-0000{n}-of-00002.arrow"} for n in (1, 0)]
    (folder / "state.json").write_text(json.dumps({"_data_files": files, "_split": "train"}))
    (folder / "dataset_info.json").write_text("{}")


def write_kind(kind: str, path: Path) -> Path:
    if kind == "parquet":
        write_parquet(path / "a.parquet", TABLE)
        return path / "a.parquet"
    if kind == "feather":
        write_arrow(path / "a.arrow", TABLE, stream=False)
        return path / "a.arrow"
    if kind == "parquet folder":
        write_parquet(path / "data" / "part-0.parquet", TABLE.slice(0, 900))
        write_parquet(path / "data" / "part-1.parquet", TABLE.slice(900))
        (path / ".hidden.parquet").write_text("")
        (path / "README.md").write_text("")
    elif kind == "dataset":
        save_dataset(path, TABLE)
    return path


@pytest.mark.parametrize("kind", ["parquet", "feather", "parquet folder", "dataset"])
def test_every_table_gives_the_same_columns(tmp_path: Path, kind: str) -> None:
    path = write_kind(kind, tmp_path / "corpus")
    assert is_table(path)
    rows = list(read_columns(table_files(path), ["length", "text"], option="data.field"))
    assert max(len(one.columns[0]) for one in rows) <= formats.RECORDS_PER_BATCH
    assert [value for one in rows for value in one.columns[0].to_pylist()] == list(range(2_500))
    assert [value for one in rows for value in one.columns[1].to_pylist()] == TABLE["text"].to_pylist()
    if kind == "parquet":
        assert rows[1].where(3) == f"{path}: row {rows[0].first + len(rows[0].columns[0]) + 3}"


def test_splits_must_be_chosen(tmp_path: Path) -> None:
    for split in ("train", "test"):
        save_dataset(tmp_path / "saved" / split, TABLE)
        write_parquet(tmp_path / "hub" / "data" / f"{split}-00000-of-00001.parquet", TABLE)
    (tmp_path / "saved" / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    for path in (tmp_path / "saved", tmp_path / "hub"):
        with pytest.raises(ValueError, match=r"several splits, '\w+', '\w+'; set data.split to one"):
            table_files(path, split_option="data.split")
        with pytest.raises(ValueError, match=r"data\.split is 'dev' but .* has '"):
            table_files(path, split="dev", split_option="data.split")
        assert all("test" in str(file) for file in table_files(path, split="test", split_option="data.split"))
    with pytest.raises(ValueError, match="one split only"):
        table_files(tmp_path / "saved" / "test", split="train", split_option="data.split")
    assert split_of(Path("data/val-0.parquet")) == "validation" and split_of(Path("trains/a.parquet")) == ""


def test_a_missing_column_lists_those_there_are(tmp_path: Path) -> None:
    path = write_kind("parquet", tmp_path)
    with pytest.raises(ValueError, match="no column 'txt'; it has 'text', 'length': set --column to one of them"):
        list(read_columns([path], ["txt"], option="--column"))


@pytest.mark.parametrize("kind", ["parquet", "feather"])
def test_torn_tables_are_one_line(tmp_path: Path, kind: str) -> None:
    path = write_kind(kind, tmp_path)
    content = path.read_bytes()
    for torn in (content[:len(content) // 2], content[:6], b"", b"ARROW1" + content[6:200]):
        path.write_bytes(torn)
        with pytest.raises(ValueError, match="cannot be read") as refused:
            list(read_columns([path], ["text"], option="data.field"))
        assert "\n" not in str(refused.value) and str(path) in str(refused.value)


@pytest.mark.parametrize("state", [[], {"_data_files": []}, {"_data_files": [{"filename": "../../x.arrow"}]},
                                   {"_data_files": [{"filename": "gone.arrow"}]}])
def test_a_dataset_whose_files_are_not_its_own_is_refused(tmp_path: Path, state: object) -> None:
    (tmp_path / "state.json").write_text(json.dumps(state))
    with pytest.raises(ValueError, match=r"state\.json"):
        table_files(tmp_path)


def test_folders_without_tables_and_with_two_kinds(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"without a \.parquet or \.arrow file"):
        table_files(tmp_path)
    assert not is_table(tmp_path)
    write_kind("parquet", tmp_path)
    write_kind("feather", tmp_path)
    with pytest.raises(ValueError, match=r"both \.parquet and \.arrow"):
        table_files(tmp_path)


def test_missing_packages_say_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "a.zst").write_bytes(zstd(b"one\n"))
    write_kind("parquet", tmp_path)
    code = ("import sys; sys.modules.update({'pyarrow': None, 'zstandard': None, 'compression.zstd': None})\n"
            "from pathlib import Path\nfrom distca.corpus.tables import read_columns, text_lines\n"
            "for read in (text_lines('a.zst'), read_columns([Path('a.parquet')], ['text'], option='x')):\n"
            "    try: list(read)\n    except ValueError as error: print(error)\n")
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert [line.rpartition("run: ")[2] for line in done.stdout.splitlines()] == ["pip install zstandard",
                                                                                "pip install pyarrow"], done.stderr


@pytest.mark.parametrize("kind", ["parquet", "stream", "feather", "gz", "zst"])
def test_a_changed_byte_is_read_or_refused_in_one_line(tmp_path: Path, kind: str) -> None:
    table = pa.table({"text": [f"ü {n}" for n in range(300)], "ids": [list(range(n % 9)) for n in range(300)],
                      "messages": [[{"role": "user", "content": "x"}]] * 300})
    path = tmp_path / f"a.{'arrow' if kind in ('stream', 'feather') else kind}"
    if kind in PACKED:
        path.write_bytes(PACKED[kind](TEXT * 100))
    elif kind == "parquet":
        write_parquet(path, table)
    else:
        write_arrow(path, table, stream=kind == "stream")
    whole, random = path.read_bytes(), np.random.default_rng(0)
    num_refused = 0
    for _ in range(60):
        changed = bytearray(whole)
        for place in random.integers(max(0, len(whole) - 2_000), len(whole), 3):
            changed[place] ^= int(random.integers(1, 256))
        path.write_bytes(changed)
        try:
            if kind in PACKED:
                list(text_lines(path))
            else:
                for some in read_columns([path], ["text", "ids", "messages"], option="data.field"):
                    for column, record in product(range(3), range(len(some.columns[0]))):
                        some.value(column, record)
        except ValueError as error:
            assert type(error) is UserError and str(path) in str(error) and "\n" not in str(error)
            num_refused += 1
    assert num_refused > 5
