"""The kernel and runtime benchmarks run, count pairs as the mask does, and write what they print."""

import dataclasses
import json
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import attention
import attention_batches as batches
import house
import kernel_ranking
import kernel_rows
import numpy as np
import pytest
import runtime
import torch
from rich.console import Console

import distca
from distca.kernels import Speed, TaskRows
from distca.kernels.dense import times_shown
from distca.models import model_named
from tests.support.attention import task_rows

ROOT = Path(distca.__file__).parents[1]


def pairs_one_by_one(rows: TaskRows) -> int:
    return sum(max(0, min(offset + i + 1, k_end - k_begin))
               for q_begin, q_end, k_begin, k_end, offset in zip(
                   rows.q_begin, rows.q_end, rows.k_begin, rows.k_end, rows.q_offset, strict=True)
               for i in range(q_end - q_begin))


def test_batches_count_the_pairs_of_their_rows() -> None:
    tables = list(batches.batches(64))
    assert len({batch.name for batch in tables}) == len(tables) == 11
    for batch in (*tables, *batches.shard_lengths(64)):
        assert batch.pairs == pairs_one_by_one(batch.rows) > 0
        assert batch.rows.q_end.max() == batch.num_q and batch.rows.k_end.max() == batch.num_k
        if batch.uniform is not None:
            count, q_len, kv_len = batch.uniform
            assert (count * q_len, count * kv_len) == (batch.num_q, batch.num_k)
    shared, own = batches.shards(4, 8, 64, True), batches.shards(4, 8, 64, False)
    assert shared.pairs == own.pairs and (shared.num_k, own.num_k) == (64, 256)


def test_the_plans_servers_are_the_median_and_the_most_fragmented() -> None:
    plan = batches.sampled_plan(1024)
    num_rows = sorted(len(plan.tasks.take(plan.tasks.server == server)) for server in range(plan.num_servers))
    median, most = batches.servers(plan)
    assert len(most.rows) == num_rows[-1] > len(median.rows) == num_rows[len(num_rows) // 2]


def test_kernels_are_measured_against_each_other() -> None:
    results, failures = attention.measure(batches.documents(1, 96), ["sdpa", "auto", "dense"], model_named("tiny"),
                                          torch.device("cpu"), 1e-3)
    assert [row.kernel for row in results] == ["sdpa", "auto", "dense"] and not failures
    for row in results:
        assert row.pairs == 96 * 97 // 2 and row.difference is not None and row.difference < 1e-5
        assert row.forward_tflops == pytest.approx(4 * row.pairs * 8 * 32 / row.forward_seconds / 1e12)
        assert row.backward_tflops == pytest.approx(10 * row.pairs * 8 * 32 / row.backward_seconds / 1e12)


def test_a_kernel_that_fails_is_reported_and_the_others_measured() -> None:
    results, failures = attention.measure(batches.shards(2, 8, 32, True), ["varlen", "sdpa", "dense"],
                                          model_named("tiny"), torch.device("cpu"), 1e-3)
    assert [row.kernel for row in results] == ["sdpa"]           # dense takes no rows that share keys
    assert [failure.kernel for failure in failures] == ["varlen"] and "FlashAttention needs" in failures[0].reason
    assert results[0].forward_over_varlen is None and results[0].forward_host_seconds is None


def test_a_kernel_that_runs_out_of_memory_later_is_reported_too(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[None] = []

    def samples(*_: object, **__: object) -> list[float]:
        calls.append(None)
        if len(calls) == 6:                                      # the first kernel's backward in the second round
            raise torch.OutOfMemoryError("no room\nfor more")
        return [1.0]

    monkeypatch.setattr(attention, "samples", samples)
    results, failures = attention.measure(batches.documents(1, 96), ["sdpa", "auto"], model_named("tiny"),
                                          torch.device("cpu"), 1e-3)
    assert [row.kernel for row in results] == ["auto"]
    assert [(row.kernel, row.reason) for row in failures] == [("sdpa", "OutOfMemoryError: no room")]


def test_goals_count_only_where_they_are_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "BASELINE", "sdpa")
    cpu, tiny, batch = torch.device("cpu"), model_named("tiny"), batches.documents(2, 64)
    easy, hard = (dataclasses.replace(batch, goal=(goal, goal)) for goal in (1e-9, 1e9))
    for goal, least, reached in ((easy, 0.0, True), (hard, 0.0, False), (easy, 1e9, False)):
        monkeypatch.setattr(attention, "LEAST_OVER_BASELINE", least)
        (row,), _ = attention.measure(goal, ["sdpa"], tiny, cpu, 1e-3, aims=True)
        assert (row.forward_reached, row.backward_reached, row.forward_over_varlen) == (reached, reached, 1.0)
    (row,), _ = attention.measure(easy, ["sdpa"], tiny, cpu, 1e-3)
    assert row.forward_goal is None and row.forward_reached is None


@pytest.mark.parametrize("window", [None, 1, 5, 40])
def test_the_ranking_counts_the_pairs_that_the_window_leaves(window: int | None) -> None:
    rows = task_rows([0, 9, 20], [9, 20, 22], [0, 3, 0], [30, 14, 2], [21, 0, 40])
    tokens = torch.zeros(22, 1, 1), torch.zeros(30, 1, 1)
    assert kernel_ranking.visible_pairs(rows, window) == times_shown(*tokens, rows, window).sum()


def test_a_ranking_of_some_kernels_keeps_the_figures_of_others() -> None:
    old = [{"kernel": name, "head_dim": dim, "windowed": False, "forward_tflops": 1.0, "backward_tflops": 1.0}
           for name, dim in (("hopper", 64), ("fa4", 256), ("hopper", 256))]
    found = [Speed("hopper", 192, False, 2.0, 2.0), Speed("hopper", 256, False, 3.0, 3.0)]
    entry = kernel_ranking.with_others({"date": "then", "speeds": old}, {"date": "now"}, found)
    assert [(row["kernel"], row["head_dim"], row["forward_tflops"]) for row in entry["speeds"]] == [
        ("hopper", 64, 1.0), ("hopper", 192, 2.0), ("fa4", 256, 1.0), ("hopper", 256, 3.0)]
    assert entry["date"] == "now"
    assert kernel_ranking.with_others({"date": "then", "speeds": old}, {"date": "now"}, found[:1])["date"] == "then"


def test_the_ranking_says_that_it_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="no GPU"):
        kernel_ranking.main(Namespace(), Console())


def test_rows_of_kernels_are_compared_with_the_first() -> None:
    """Keys of 16 and values of 8: a pair is 2 * (16 + 8) operations forward and 2 * (3 * 16 + 2 * 8) backward."""
    bench, cpu = kernel_rows, torch.device("cpu")
    case = bench.Case(batches.documents(2, 40), heads=4, kv_heads=2, dim=16, value_dim=8)
    pairs = 2 * 40 * 41 // 2
    assert case.flops() == (pairs * 4 * 48, pairs * 4 * 128)
    found = {name: [bench.measured(name, case, cpu, 1e-3)] for name in ("sdpa", "dense", "hopper")}
    wrong = {"seconds": [2.0, 4.0], "sketches": [(-np.array(x)).tolist() for x in found["sdpa"][0]["sketches"]]}
    row = bench.compare(case, {**found, "wrong": [wrong, {**wrong, "seconds": [1.0, 8.0]}]})["contestants"]
    assert row["dense"]["difference"] < 1e-4 and row["wrong"]["difference"] == pytest.approx(2.0)
    assert "device is cpu" in row["hopper"]["problem"]
    slow = bench.compare(case, {"wrong": [{**wrong, "seconds": [1e-9, 3e-9]}, {**wrong, "seconds": [2e-9, 1e-9]}]})
    rates = slow["contestants"]["wrong"]  # the better round each way
    assert rates["forward_tflops"] == round(pairs * 4 * 48 / 1e3, 1)
    assert rates["backward_tflops"] == round(pairs * 4 * 128 / 1e3, 1)


def test_tables_are_timed_and_nothing_is_stored_twice() -> None:
    for placement in ("given", "balanced"):
        plan = runtime.sampled_plan(placement, 8, 8192)
        row = runtime.tables(plan, placement, 8)
        assert row.ranks == 8 and 0 < row.build_seconds <= row.build_seconds_worst < 1
        assert row.stored_over_needed == 1.0


@pytest.mark.slow
@pytest.mark.multiprocess
def test_two_ranks_share_a_document(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks/runtime.py"), "--cpu", "--document", "256", "--short", "64",
         "--repeats", "1", "--output", str(tmp_path)],
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    assert "two CPU ranks" in done.stdout
    (two,) = json.loads((tmp_path / "runtime_cpu.json").read_text())["rows"]
    assert two["speedup"] == pytest.approx(two["at_home_seconds"] / two["planned_seconds"])
    assert 1 < two["ideal_speedup"] <= 2 and two["bytes_total"] > 0


def test_the_size_report_counts_every_file_and_line() -> None:
    rooms, found = house.measure()
    files = [path for path in (ROOT / "distca").rglob("*") if path.suffix in (".py", ".cu", ".cuh")]
    assert sum(room.num_files for room in rooms) == sum(path.suffix == ".py" for path in files)
    assert sum(room.num_lines + room.num_cuda_lines for room in rooms) == sum(
        path.read_bytes().count(b"\n") for path in files)
    assert {"runtime", "runtime/transport"} <= {room.name for room in rooms}
    (plan,) = [one for one in found if one.where.endswith(" plan_command")]
    assert plan.num_parameters > 8                               # its options
