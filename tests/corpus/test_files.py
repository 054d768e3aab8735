"""Every compression gives the same lines, and a file that cannot be read is refused in one line that names it."""

import gzip
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import zstandard

from distca.corpus.files import chunks, format_of, line_blocks, numbered_lines
from tests.support.hostile_files import refused_changes

LINES = ["first", "", "dritte über 3", '{"text": "x\\ny"}']
TEXT = "\n".join(LINES).encode() + b"\n"


def zstd(content: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(content)


def lines_of(path: Path) -> list[str]:
    numbers, lines = zip(*numbered_lines(path), strict=True)
    assert numbers == tuple(range(1, len(lines) + 1))
    return list(lines)


PACKED: dict[str, Callable[[bytes], bytes]] = {"txt": lambda content: content, "gz": gzip.compress, "zst": zstd}


@pytest.mark.parametrize("suffix", PACKED)
def test_every_packing_gives_the_same_lines(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"lines.{suffix}"
    path.write_bytes(PACKED[suffix](TEXT))
    assert lines_of(path) == LINES
    assert b"".join(chunks(path)) == TEXT


def test_line_ends_marks_and_a_last_line_without_end(tmp_path: Path) -> None:
    path = tmp_path / "lines.txt"
    path.write_bytes(b"\xef\xbb\xbfone\r\ntwo\n\nfour")
    assert lines_of(path) == ["one", "two", "", "four"]


@pytest.mark.parametrize("pack", [gzip.compress, zstd], ids=["gz", "zst"])
def test_files_of_several_parts_are_read_to_the_end(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    path = tmp_path / "lines"
    path.write_bytes(pack(b"one\ntw") + pack(b"o\nthree\n") + pack(b"") + pack(b"four\n"))
    assert lines_of(path) == ["one", "two", "three", "four"]


def test_gzip_members_may_be_padded_with_zeros(tmp_path: Path) -> None:
    path = tmp_path / "lines.gz"
    path.write_bytes(gzip.compress(b"one\n") + b"\0" * 10_000 + gzip.compress(b"two\n") + b"\0" * 512)
    assert lines_of(path) == ["one", "two"]


@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_a_file_that_was_cut_short_is_refused(tmp_path: Path, suffix: str) -> None:
    packed = PACKED[suffix](np.random.default_rng(0).bytes(20_000).hex().encode())
    path = tmp_path / f"lines.{suffix}"
    for size in (len(packed) // 2, len(packed) - 1, 5):
        path.write_bytes(packed[:size])
        with pytest.raises(ValueError, match="cannot be read") as refused:
            lines_of(path)
        assert str(path) in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(("name", "content", "message"), [
    ("a.gz", b"plain", "does not begin as gzip"),
    ("a.zst", b"plain", "does not begin as Zstandard"),
    ("a.zst", zstd(b"one\n") + b"garbage behind it", "cannot be read"),
    ("a.txt", b"one\n\xff\xfe\n", "line 2 is not UTF-8"),
    ("a.txt", b"one\n" + b"x" * 2000, "line 2 is longer than 1000 bytes"),
])
def test_foreign_content_is_refused(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        list(line_blocks(path, max_line_bytes=1000)), lines_of(path)


def test_no_more_than_the_limit_is_unpacked(tmp_path: Path) -> None:
    path = tmp_path / "bomb.zst"
    path.write_bytes(zstd(b"0\n" * 2**24))
    with pytest.raises(ValueError, match="more than 1000 bytes, the most that is read"):
        list(line_blocks(path, max_bytes=1000))
    (tmp_path / "all").write_bytes(b"12\n34\n")
    assert [block.content for block in line_blocks(tmp_path / "all", max_bytes=6)] == [b"12\n34\n"]


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="none: no such file"):
        lines_of(tmp_path / "none")


def test_a_missing_package_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.zst").write_bytes(zstd(b"one\n"))
    for name in ("zstandard", "compression.zstd"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ValueError, match="run: pip install zstandard"):
        lines_of(tmp_path / "a.zst")


@pytest.mark.parametrize("kind", ["gz", "zst"])
def test_a_changed_byte_is_read_or_refused_in_one_line(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"a.{kind}"
    path.write_bytes(PACKED[kind](TEXT * 100))
    assert refused_changes(path, lambda: lines_of(path)) > 5


def test_the_suffix_says_the_format() -> None:
    assert [format_of(name) for name in ("a.CSV", "a.jsonl.zst", "a.tar.gz", "b.parquet", "json", "a.json")] == [
        "csv", "jsonl", "", "parquet", "", ""]
