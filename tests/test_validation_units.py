"""Numbers as people type them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distca.train.settings import load_settings
from distca.validation import is_count, parse_count, unit_text


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
