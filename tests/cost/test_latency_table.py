"""Latency tables: exact on their grid, close between, never falling, strict on files."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distca.cost import latency_table
from distca.cost.latency_table import LatencyTable, analytic_table, peak_rate
from distca.cost.work import attention_backward_flops, attention_flops, pairs_of_shard
from distca.models import model_named

MODEL = model_named("llama3-8b")


def kernel_seconds(q_len: np.ndarray, kv_len: np.ndarray) -> np.ndarray:
    """A made-up kernel: launch overhead, whole tiles of 128 queries, and a rate that saturates with the work."""
    tiles = np.ceil(q_len / 128) * 128
    work = np.maximum(tiles * kv_len - q_len * q_len / 2, 1)
    return 8e-6 + work / 3e10 * (1 + 4000 / (kv_len + 500))


def made_up_table(backward: bool = True) -> LatencyTable:
    q_len = 128 * 2 ** np.arange(8)  # to 16K
    kv_len = 128 * 2 ** np.arange(10)  # to 64K
    q, kv = np.meshgrid(q_len, kv_len, indexing="ij")
    seconds = np.where(q <= kv, kernel_seconds(q, kv), np.nan)
    return LatencyTable("made up", q_len, kv_len, seconds, 2.5 * seconds if backward else None,
                        peak_rate(q_len, kv_len, seconds), {"device": "none"})


@st.composite
def tables(draw: st.DrawFn) -> LatencyTable:
    """Any grid and any times, also noisy ones that fall where they should rise."""
    lengths = st.lists(st.integers(1, 5000), min_size=2, max_size=6, unique=True).map(sorted)
    q_len, kv_len = np.array(draw(lengths)), np.array(draw(lengths))
    kv_len = np.maximum(kv_len, 0) + max(0, q_len[0] - kv_len[0], q_len[-1] - kv_len[-1])
    size = len(q_len) * len(kv_len)
    noise = np.array(draw(st.lists(st.floats(0.3, 3.0), min_size=size, max_size=size))).reshape(len(q_len), -1)
    overhead = draw(st.sampled_from([0.0, 1e-6, 1e-3]))
    q, kv = q_len[:, None].astype(float), kv_len.astype(float)
    seconds = overhead + q * (kv - (q - 1) / 2) / 1e10 * noise
    seconds = np.where(q <= kv, seconds, np.nan)
    return LatencyTable("any", q_len, kv_len, seconds, None, 2e10, {})


shard_lengths = st.tuples(st.integers(1, 12_000), st.integers(1, 12_000)).map(sorted)


@settings(max_examples=200, deadline=None)
@given(tables(), shard_lengths, st.integers(0, 3000), st.integers(0, 3000))
def test_seconds_never_fall(table: LatencyTable, shard: list[int], more_q: int, more_kv: int) -> None:
    q_len, kv_len = shard
    here = table.seconds(q_len, kv_len)
    assert here > 0
    slack = 1 - 1e-12
    assert table.seconds(q_len, kv_len + more_kv) >= here * slack
    assert table.seconds(min(q_len + more_q, kv_len), kv_len) >= here * slack


@settings(max_examples=100, deadline=None)
@given(tables(), st.lists(shard_lengths, min_size=1, max_size=10))
def test_arrays_and_scalars_agree(table: LatencyTable, shards: list[list[int]]) -> None:
    q_len, kv_len = np.array(shards).T
    together = table.seconds(q_len, kv_len)
    np.testing.assert_allclose(together, [table.seconds(q, kv) for q, kv in shards], rtol=1e-12)
    assert table.seconds(q_len[0], kv_len[0]) == table.seconds(int(q_len[0]), int(kv_len[0]))


def test_grid_points_are_kept() -> None:
    table = made_up_table()
    for i, q in enumerate(table.q_len.tolist()):
        for j, kv in enumerate(table.kv_len.tolist()):
            if q <= kv:
                measured = table.forward_seconds[i, j]
                assert table.seconds(q, kv) == pytest.approx(measured, rel=1e-12)
                assert table.seconds(q, kv, backward=True) == pytest.approx(2.5 * measured, rel=1e-12)


@settings(max_examples=100, deadline=None)
@given(tables())
def test_noisy_grid_points_rise_to_the_largest_below_them_and_no_further(table: LatencyTable) -> None:
    for q in table.q_len.tolist():
        for kv in table.kv_len[table.kv_len >= q].tolist():
            below = table.forward_seconds[table.q_len <= q][:, table.kv_len <= kv]
            assert table.seconds(q, kv) == pytest.approx(np.nanmax(below), rel=1e-12)


def test_between_grid_points_the_kernel_is_met() -> None:
    table = made_up_table()
    rng = np.random.default_rng(0)
    kv = np.rint(np.exp(rng.uniform(np.log(256), np.log(65_536), 2000))) // 128 * 128
    q = np.minimum(np.rint(np.exp(rng.uniform(np.log(128), np.log(16_384), 2000))) // 128 * 128, kv)
    error = table.seconds(q, kv) / kernel_seconds(q, kv) - 1
    assert np.abs(error).max() < 0.08
    assert np.abs(error).mean() < 0.015


@given(shard_lengths.filter(lambda shard: shard[0] >= 128), st.booleans())
def test_an_analytic_table_is_pairs_at_the_peak(shard: list[int], backward: bool) -> None:
    q_len, kv_len = shard
    flops = attention_backward_flops if backward else attention_flops
    expected = flops(pairs_of_shard(q_len, kv_len), MODEL, 8) / 550e12
    actual = ANALYTIC.seconds(q_len, kv_len, backward=backward)
    assert actual == pytest.approx(expected, rel=1e-3)


ANALYTIC = analytic_table(MODEL, 550e12, tp=8, max_kv_len=20_000)


def test_an_analytic_table_says_so_and_charges_whole_tiles() -> None:
    assert "not measured" in str(ANALYTIC.metadata["device"])
    assert ANALYTIC.kv_len[-1] == 20_000
    assert ANALYTIC.seconds(1, 4096) == ANALYTIC.seconds(128, 4096)
    assert ANALYTIC.seconds(5, 9) == ANALYTIC.seconds(128, 128)
    assert ANALYTIC.seconds(256, 4096) > 1.9 * ANALYTIC.seconds(128, 4096)
    with pytest.raises(ValueError, match="max_kv_len is 128"):
        analytic_table(MODEL, 1e12, max_kv_len=128)
    with pytest.raises(ValueError, match="flops_per_second is 0"):
        analytic_table(MODEL, 0)


def test_beyond_the_grid_further_pairs_run_at_the_peak() -> None:
    table = made_up_table()
    for (q, kv), (edge_q, edge_kv) in {(16_384, 100_000): (16_384, 65_536), (40_000, 50_000): (16_384, 50_000),
                                       (90_000, 100_000): (16_384, 65_536), (1, 70_000): (128, 65_536)}.items():
        extra = pairs_of_shard(max(q, 128), kv) - pairs_of_shard(edge_q, edge_kv)
        expected = table.seconds(edge_q, edge_kv) + extra / table.peak_pairs_per_second
        assert table.seconds(q, kv) == pytest.approx(expected, rel=1e-9)


def test_no_queries_take_no_time_and_impossible_shards_are_refused() -> None:
    table = made_up_table()
    assert table.seconds(0, 100) == 0
    assert table.seconds(np.array([0, 128]), 256)[0] == 0
    with pytest.raises(ValueError, match="q_len is 5 and kv_len 4"):
        table.seconds(5, 4)
    with pytest.raises(ValueError, match="0 <= q_len <= kv_len"):
        table.seconds(np.array([5]), np.array([4]))
    with pytest.raises(ValueError, match="'made up' has no backward_seconds"):
        made_up_table(backward=False).seconds(1, 2, backward=True)


def test_the_needed_range_is_required() -> None:
    table = made_up_table()
    table.require(65_536)
    with pytest.raises(ValueError, match="reaches kv_len 65536 but the longest document has 340149 tokens; "
                                         "profile with --max-kv-len"):
        table.require(340_149)


def test_scalar_queries_make_no_array(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planners ask for one shard at a time, and an array of one number takes ten times as long."""
    table = made_up_table()
    expected = table.seconds(1000, 20_000)
    monkeypatch.setattr(latency_table, "np", None)
    assert table.seconds(1000, 20_000) == expected


@settings(max_examples=30, deadline=None)
@given(table=tables())
def test_files_round_trip_exactly(tmp_path_factory: pytest.TempPathFactory, table: LatencyTable) -> None:
    path = tmp_path_factory.mktemp("table") / "table.json"
    table.save(path)
    again = LatencyTable.load(path)
    assert (again.name, again.peak_pairs_per_second, again.metadata) == ("any", 2e10, {})
    for name in ("q_len", "kv_len", "forward_seconds"):
        np.testing.assert_array_equal(getattr(again, name), getattr(table, name))
    assert again.backward_seconds is None


def test_backward_and_metadata_round_trip(tmp_path: Path) -> None:
    table = analytic_table(MODEL, 550e12)
    table.save(tmp_path / "table.json")
    again = LatencyTable.load(tmp_path / "table.json")
    np.testing.assert_array_equal(again.backward_seconds, table.backward_seconds)
    assert again.metadata == table.metadata
    assert again.seconds(999, 5555, backward=True) == table.seconds(999, 5555, backward=True)


GOOD = {"format": "distca-latency-table", "version": 1, "name": "g", "q_len": [128, 256], "kv_len": [128, 256],
        "forward_seconds": [[1.0, 2.0], [None, 3.0]], "backward_seconds": None, "peak_pairs_per_second": 1e5,
        "metadata": {}}


@pytest.mark.parametrize("change, message", [
    ({"format": "other"}, "not a latency table"),
    ({"version": 2}, "version is 2 but 1"),
    ({"q_len": [128]}, r"q_len is \[128\]; give at least two"),
    ({"q_len": [256, 128]}, "each above the one before"),
    ({"q_len": [128, 2.5]}, r"q_len\[1\] is 2.5"),
    ({"q_len": None}, "q_len is None"),
    ({"kv_len": [64, 256]}, "q_len's smallest is 128 but kv_len's smallest is 64"),
    ({"q_len": [128, 512]}, "q_len's largest is 512"),
    ({"forward_seconds": [[1.0, 2.0]]}, r"forward_seconds has shape \(1, 2\); give 2 rows of 2"),
    ({"forward_seconds": [[1.0, 2.0], [3.0]]}, "forward_seconds is not a table of numbers"),
    ({"forward_seconds": None}, r"forward_seconds has shape \(\)"),
    ({"forward_seconds": [[1.0, None], [None, 3.0]]}, "forward_seconds at q_len 128, kv_len 256 is nan"),
    ({"forward_seconds": [[1.0, 0.0], [None, 3.0]]}, "kv_len 256 is 0.0"),
    ({"backward_seconds": [[1.0, -2.0], [None, 3.0]]}, "backward_seconds at q_len 128, kv_len 256 is -2.0"),
    ({"peak_pairs_per_second": 0}, "peak_pairs_per_second is 0"),
    ({"peak_pairs_per_second": "fast"}, "peak_pairs_per_second is 'fast'"),
    ({"metadata": []}, r"metadata is \[\]"),
])
def test_misshapen_tables_are_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = tmp_path / "table.json"
    path.write_text(json.dumps({**GOOD, **change}))
    with pytest.raises(ValueError, match=message) as caught:
        LatencyTable.load(path)
    assert str(caught.value).startswith(f"{path}: ") and "\n" not in str(caught.value)


@pytest.mark.parametrize("content, message", [
    ("[1, 2]", "not a latency table"),
    ("{", "broken JSON"),
    ("", "broken JSON"),
    (json.dumps({key: value for key, value in GOOD.items() if key != "kv_len"}), "without kv_len"),
])
def test_foreign_files_are_named(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "table.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        LatencyTable.load(path)
    with pytest.raises(ValueError, match="no such file"):
        LatencyTable.load(tmp_path / "absent.json")


def test_the_good_table_is_good(tmp_path: Path) -> None:
    (tmp_path / "table.json").write_text(json.dumps(GOOD))
    assert LatencyTable.load(tmp_path / "table.json").seconds(256, 256) == 3.0
