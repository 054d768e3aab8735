"""The checks that every entrance shares say the field, the value and the remedy, and let through what is right."""

import errno
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distca.train.settings import load_settings
from distca.validation import (
    UserError,
    check_name,
    check_number,
    check_whole,
    is_count,
    open_own,
    parse_count,
    plain,
    read_json,
    read_text,
    read_toml,
    short,
    unit_text,
    write_own,
)


def test_whole_numbers() -> None:
    assert check_whole("ranks", np.int32(3)) == 3 and type(check_whole("ranks", np.int32(3))) is int
    assert check_whole("seed", 0, least=0) == 0 and check_whole("ranks", 8, most=8) == 8
    for value in (True, 0, -1, 2.0, "3", None, [3], np.float64(3)):
        with pytest.raises(ValueError, match=r"ranks is .*; give a whole number of at least 1"):
            check_whole("ranks", value)
    with pytest.raises(ValueError, match="ranks is 9; give at most 8, the most there are"):
        check_whole("ranks", 9, most=8, why="the most there are")
    with pytest.raises(ValueError, match="ranks is a whole number of more than 30 digits"):
        check_whole("ranks", 10**5000, most=8)


def test_numbers() -> None:
    assert check_number("x", 3) == 3.0 and check_number("x", 0.0, least=0) == 0.0
    for value in (True, "3", None, float("nan"), float("inf"), -float("inf"), 10**400, 1e308):
        with pytest.raises(ValueError, match=r"x is .*; give a finite number"):
            check_number("x", value)
    with pytest.raises(ValueError, match="above 0 and of at most 5"):
        check_number("x", 0.0, above=0, most=5)


@given(st.text(max_size=20))
def test_what_is_shown_can_be_printed(text: str) -> None:
    assert plain(text).isprintable() and short(text).isprintable()
    if text and text.isprintable():
        assert plain(text) == text == check_name("name", text)
    else:
        with pytest.raises(ValueError, match="can be printed"):
            check_name("name", text)


def test_files_name_themselves(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('\ufeff{"a": [1, 2.5, null]}\r\n', encoding="utf-8")
    assert read_json(tmp_path / "a.json") == {"a": [1, 2.5, None]}
    (tmp_path / "a.toml").write_text("[run]\nlr = 1.5\n[a.b]\nc = 'x.y'\n")
    assert read_toml(tmp_path / "a.toml") == {"run": {"lr": 1.5}, "a": {"b": {"c": "x.y"}}}
    with pytest.raises(ValueError, match=r"a\.toml: more than 10 bytes"):
        read_text(tmp_path / "a.toml", 10)
    for name, content, words in (("b.json", "[" * 10**5, "too deep"), ("c.json", "{", "line 1 column 2"),
                                 ("d.json", "9" * 5000, "too long")):
        (tmp_path / name).write_text(content)
        with pytest.raises(ValueError, match=rf"{name}: .*{words}"):
            read_json(tmp_path / name)


def test_files_of_ours_are_not_written_through_links(tmp_path: Path) -> None:
    (tmp_path / "theirs").write_text("precious")
    (tmp_path / "log").symlink_to("theirs")
    for write in (lambda: write_own(tmp_path / "log", "x"), lambda: open_own(tmp_path / "log", "a")):
        with pytest.raises(ValueError, match="log is a symbolic link"):
            write()
    assert (tmp_path / "theirs").read_text() == "precious"
    write_own(tmp_path / "new", "äö")
    with open_own(tmp_path / "new", "a") as file:
        file.write("!")
    assert (tmp_path / "new").read_text(encoding="utf-8") == "äö!"
    with pytest.raises(OSError) as missing:
        write_own(tmp_path / "no" / "new", "x")
    assert missing.value.errno == errno.ENOENT


def test_refusals_are_errors_of_their_own() -> None:
    with pytest.raises(UserError):
        check_whole("ranks", 0)
    for accident in (lambda: int("x"), lambda: np.zeros(3).reshape(2)):
        with pytest.raises(ValueError) as caught:
            accident()
        assert not isinstance(caught.value, UserError)


# ---- numbers as people type them

@pytest.mark.parametrize(("text", "value"), [
    ("0", 0), ("7", 7), ("-3", -3), ("64_000", 64_000), ("64k", 65_536), ("128K", 131_072), ("1.5M", 1_572_864),
    ("0.5k", 512), ("1m", 1_048_576), ("2G", 2_147_483_648), ("+5", 5), ("1_0.25k", 10_496),
])
def test_what_people_type(text: str, value: int) -> None:
    assert is_count(text) and parse_count("ranks", text) == value


@pytest.mark.parametrize("text", ["", "k", "1e9", "nan", "inf", "1.5", "1,5", "1__0", "_1", "1_", "0x10", "12 k", "1kk",
                                  "١", "9" * 400, "1.5.5k", "1ki"])
def test_what_is_no_number_is_refused_by_name(text: str) -> None:
    with pytest.raises(ValueError, match="tokens is ") as caught:
        parse_count("tokens", text)
    assert "whole number" in str(caught.value) and len(str(caught.value)) < 200


def test_nothing_is_rounded_in_silence() -> None:
    with pytest.raises(ValueError, match=r"tokens is '1\.3k', which is 1331\.2 with k = 1024.*; give 1331"):
        parse_count("tokens", "1.3k")


@given(st.integers(0, 2**40))
def test_every_number_reads_back(value: int) -> None:
    assert parse_count("x", str(value)) == parse_count("x", f"{value:_}") == value
    assert parse_count("x", unit_text(value).replace(",", "_")) == value


@pytest.mark.parametrize(("name", "text", "value"), [
    ("batch.tokens_per_rank", "64k", 65_536), ("run.ranks", "1k", 1024), ("data.max_document", "1_000", 1000),
    ("parallel.tensor", "8", 8),
])
def test_settings_of_tokens_and_ranks_take_units(tmp_path: Path, name: str, text: str, value: int
                                                 ) -> None:
    section, key = name.split(".")
    assert getattr(getattr(load_settings(None, {name: text}), section), key) == value
    path = f"{tmp_path}/run.toml"
    with open(path, "w", encoding="utf-8") as file:
        file.write(f'[{section}]\n{key} = "{text}"\n')
    assert getattr(getattr(load_settings(path, {}), section), key) == value


def test_steps_take_none_as_a_thousand_of_them_is_meant() -> None:
    with pytest.raises(ValueError, match=r"run\.steps is '1k'; give a whole number"):
        load_settings(None, {"run.steps": "1k"})
    with pytest.raises(ValueError, match=r"batch\.tokens_per_rank is 'many'; give a whole number"):
        load_settings(None, {"batch.tokens_per_rank": "many"})
