"""Every table gives the same columns, and one that cannot be read is refused in one line that names the file."""

import json
import sys
from itertools import product
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from distca.corpus.tables import RECORDS_PER_BATCH, read_columns, split_of, table_files
from tests.support.hostile_files import refused_changes

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
    rows = list(read_columns(table_files(path), ["length", "text"], option="data.field"))
    assert max(len(one.columns[0]) for one in rows) <= RECORDS_PER_BATCH
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
    write_kind("parquet", tmp_path)
    write_kind("feather", tmp_path)
    with pytest.raises(ValueError, match=r"both \.parquet and \.arrow"):
        table_files(tmp_path)


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such file or folder"):
        table_files(tmp_path / "none")


def test_a_missing_package_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_kind("parquet", tmp_path)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ValueError, match="run: pip install pyarrow"):
        list(read_columns([path], ["text"], option="x"))


@pytest.mark.parametrize("kind", ["parquet", "stream", "feather"])
def test_a_changed_byte_is_read_or_refused_in_one_line(tmp_path: Path, kind: str) -> None:
    table = pa.table({"text": [f"ü {n}" for n in range(300)], "ids": [list(range(n % 9)) for n in range(300)],
                      "messages": [[{"role": "user", "content": "x"}]] * 300})
    path = tmp_path / f"a.{'parquet' if kind == 'parquet' else 'arrow'}"
    if kind == "parquet":
        write_parquet(path, table)
    else:
        write_arrow(path, table, stream=kind == "stream")

    def read() -> None:
        for some in read_columns([path], ["text", "ids", "messages"], option="data.field"):
            for column, record in product(range(3), range(len(some.columns[0]))):
                some.value(column, record)

    assert refused_changes(path, read) > 5
