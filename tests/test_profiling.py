"""Profiles: a small one for real, its arithmetic with a clock that is told, and the command as a user meets it."""

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distca import profiling
from distca.cost.attention_time import shipped_names, shipped_table
from distca.cost.dealing import WorkList
from distca.cost.latency_table import LatencyTable
from distca.kernels import kernel_named
from distca.kernels.hopper.kernel import HopperKernel
from distca.kernels.interface import TaskRows
from distca.profiling import machine as timing
from distca.profiling import network as probe
from distca.runtime.transport import LoopbackWorld

NO_TENSORS: Any = None  # where nothing is computed


@given(st.integers(256, 2**20), st.sampled_from([1, 2]))
def test_lengths_run_from_a_tile_to_the_longest(longest: int, every: int) -> None:
    lengths = profiling.lengths_up_to(longest, every)
    assert lengths[0] == 128 and lengths[-1] == longest
    assert all(a < b <= a * 2**every for a, b in pairwise(lengths))
    assert all(length == longest or length & (length - 1) == 0 for length in lengths)


@pytest.mark.parametrize(("options", "fragments"), [
    ({"device": "tpu"}, ["device", "'tpu'", "cuda"]),
    ({"max_kv_len": 255}, ["max_kv_len", "255", "256"]),
    ({"tp": 3}, ["tp", "3"]),
    ({"model": "lama3-8b"}, ["model", "'llama3-8b'"]),
    ({"kernel": "fastest"}, ["kernel", "'fastest'", "sdpa"]),
    ({"kernel": "varlen"}, ["kernel", "'varlen'", "GPU"]),
])
def test_settings_refuse(options: dict[str, Any], fragments: list[str]) -> None:
    with pytest.raises(ValueError) as refusal:
        profiling.settings(**{"device": "cpu", **options})
    for fragment in fragments:
        assert fragment in str(refusal.value)


def test_a_grid_point_fills_the_device_within_what_a_server_holds() -> None:
    chosen = replace(profiling.settings("cpu", max_kv_len=524_288), limits=profiling.CUDA)
    for q_len, kv_len in chosen.grid:
        count = profiling.num_shards(chosen, q_len, kv_len)
        assert count >= 1
        assert count == 1 or (count * q_len <= 65_536 and count * kv_len <= 2**20)
        full = count * chosen.model.num_heads * (q_len // 128) >= profiling.CUDA.num_tiles
        assert full or (count + 1) * kv_len > 2**20
        assert profiling.num_shards(chosen, q_len, kv_len, own_keys=False) >= count
    assert profiling.num_shards(chosen, 128, 128) > 100 and profiling.num_shards(chosen, 131_072, 131_072) == 1


def test_seconds_are_those_of_one_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock that always says one second, a grid point is one over its number of shards."""
    monkeypatch.setattr(profiling, "in_turns", lambda runs, device, **limits: [[1.0, 1.0, 9.0] for _ in runs])
    chosen = profiling.settings("cpu", model="tiny", max_kv_len=512)
    seen: list[str] = []
    table = profiling.profile(chosen, seen.append)
    assert len(seen) == chosen.num_updates and table.backward_seconds is not None
    for q_len, kv_len in chosen.grid:
        at = chosen.q_len.index(q_len), chosen.kv_len.index(kv_len)
        assert table.forward_seconds[at] == 1 / profiling.num_shards(chosen, q_len, kv_len, own_keys=False)
        assert table.backward_seconds[at] == 1 / profiling.num_shards(chosen, q_len, kv_len)
    tokens, model = chosen.limits.linear_tokens, chosen.model
    weights = model.hidden * (2 * 256 + 2 * 64) + 3 * model.hidden * model.ffn    # Q and out, K and V; gate, up, down
    about: Any = table.metadata
    assert about["linear"]["forward_flops_per_second"] == 2 * tokens * weights
    assert about["linear"]["backward_flops_per_second"] == 4 * tokens * weights
    assert about["copy_bytes_per_second"] == 2 * chosen.limits.copy_bytes


def test_launch_and_tail_are_taken_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards of 2 ms of which the last wave is half empty: what is left is what each adds to a full batch."""
    chosen = replace(profiling.settings("cpu", max_kv_len=65_536), limits=profiling.CUDA, tp=8)
    work_list = WorkList(132, 128, 128, 4, 1, (1e-5, 1e-5), (1.0, 1.0))
    monkeypatch.setattr(profiling, "_seconds_of_shards", lambda *_: (1e-5 + 0.396, 1e-5 + 0.8))
    for count in (66 * 3, 66 * 3 - 16):                          # of 128 queries: 6 waves of items, and 64 items less
        monkeypatch.setattr(profiling, "num_shards", lambda *_, own_keys=True, count=count: count)
        forward, backward = profiling.attention_seconds(chosen, NO_TENSORS, 128, 65_536, work_list)
        assert forward == pytest.approx(2e-3, rel=1e-3)
        assert backward == pytest.approx(0.8 / count, rel=0.01)  # so many items that the last wave hardly shows


def test_work_list_facts_are_fitted_to_three_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A made-up device: 10 µs to launch, 2 µs for every tile that an item walks, 2.5 µs where all are busy."""
    chosen = replace(profiling.settings("cpu", max_kv_len=65_536), limits=profiling.CUDA, tp=8,
                     device=torch.device("cuda"), kernel=HopperKernel())
    properties = type("Properties", (), {"multi_processor_count": 132})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)

    def call(chosen: profiling.ProfileSettings, tensors: None, rows: TaskRows, backward: bool) -> float:
        tile, along = (128, 32) if backward else (32, 128)
        own, other = (rows.k_len, rows.q_len) if backward else (rows.q_len, rows.k_len)
        return 1e-5 + float(other[0]) / along * (2.5e-6 if own[0] == 132 * tile else 2e-6)

    monkeypatch.setattr(profiling, "_call", call)
    monkeypatch.setattr(profiling, "queued_samples", lambda run: [run])
    monkeypatch.setattr(profiling, "in_turns", lambda runs, device, **limits: [[run] for run in runs])
    found = profiling.work_list_facts(chosen, NO_TENSORS)
    assert found is not None
    assert found["launch_seconds"] == pytest.approx([1e-5, 1e-5])
    assert found["idle_speedup"] == pytest.approx([1.25, 1.25])
    assert (found["num_workers"], found["query_rows"], found["key_tokens"]) == (132, 128, 128)
    assert profiling.work_list_facts(replace(chosen, kernel=kernel_named("sdpa")), NO_TENSORS) is None


def test_a_batch_that_does_not_fit_is_halved(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = replace(profiling.settings("cpu", model="tiny", max_kv_len=256), limits=profiling.CUDA)
    tried = []

    def measure(chosen: profiling.ProfileSettings, tensors: None, q_len: int, kv_len: int,
                counts: tuple[int, int]) -> tuple[float, float]:
        tried.append(counts)
        if counts[0] > 100:
            raise torch.OutOfMemoryError("full")
        return 128.0, 256.0

    monkeypatch.setattr(profiling, "_seconds_of_shards", measure)
    assert profiling.attention_seconds(chosen, NO_TENSORS, 128, 128) == (2.0, 4.0)
    assert tried == [(512, 512), (256, 256), (128, 128), (64, 64)]
    monkeypatch.setattr(profiling, "_seconds_of_shards", lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("")))
    with pytest.raises(ValueError, match="128 queries and 256 keys does not fit"):
        profiling.attention_seconds(chosen, NO_TENSORS, 128, 256)


@pytest.mark.parametrize(("least", "most", "expected"), [(1, 30, (3, 33)), (5, 5, (8, 8)), (1, 1, (3, 4))])
def test_samples_keep_to_their_number(least: int, most: int, expected: tuple[int, int]) -> None:
    calls = []
    seconds = timing.samples(lambda: calls.append(1), torch.device("cpu"), budget_seconds=1e-3, least=least,
                                most=most)
    assert expected[0] <= len(calls) <= expected[1] and least <= len(seconds) <= most
    assert all(second >= 0 for second in seconds)


@given(st.floats(0, 1e-3), st.floats(1e6, 1e12))
def test_fit_recovers_latency_and_bandwidth(latency: float, bandwidth: float) -> None:
    sent = np.array([4096.0 * 8**power for power in range(6)])
    found = probe.fit(sent, latency + sent / bandwidth)
    assert found[1] == pytest.approx(bandwidth, rel=1e-6)
    assert found[0] == pytest.approx(latency, rel=1e-6, abs=1e-9 * sent[0] / bandwidth)


def test_fit_never_reports_a_negative_latency() -> None:
    latency, bandwidth = probe.fit(np.array([1e3, 1e6]), np.array([1e-6, 2e-3]))
    assert latency == 0 and bandwidth > 0


def test_exchange_is_measured_by_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "CPU_SIZES", (3000, 60_000))
    monkeypatch.setattr(probe, "REPEATS", 2)
    costs = LoopbackWorld(4).run(lambda transport: probe.measure_exchange(transport, torch.device("cpu"), "loopback"))
    assert all(cost == costs[0] for cost in costs)               # the slowest rank counts for all
    assert costs[0].num_ranks == 4 and costs[0].sent_bytes == (3000, 60_000) and min(costs[0].seconds) > 0
    with pytest.raises(ValueError, match="1 rank; give at least 2"):
        LoopbackWorld(1).run(lambda transport: probe.measure_exchange(transport, torch.device("cpu"), "loopback"))


def test_profile_writes_a_table_that_plan_takes(run: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    code, out, err = run("profile", "--device", "cpu", "--model", "tiny", "--max-kv-len", 1024, "--quick")
    assert (code, err) == (0, "")
    assert "sdpa in float32" in out and "latency_table.json" in out and "network not measured" in out
    table = LatencyTable.load(tmp_path / "latency_table.json")
    assert table.kv_len.tolist() == table.q_len.tolist() == [128, 512, 1024]
    assert (table.seconds(1024, 1024), table.seconds(1024, 1024, backward=True)) > (0, 0)
    about: Any = table.metadata
    assert (about["kernel"], about["dtype"], about["num_heads"], about["num_kv_heads"], about["head_dim"]) == (
        "sdpa", "float32", 8, 2, 32)
    assert about["versions"]["torch"] == torch.__version__ and len(about["date"]) == 10
    assert about["linear"]["forward_flops_per_second"] > 0 and about["copy_bytes_per_second"] > 0
    code, out, err = run("plan", "prolong", "--model", "tiny", "--ranks", 2, "--tokens-per-rank", 4096,
                         "--max-document", 1024, "--cost", "latency_table.json", "--json")
    assert (code, err) == (0, "") and json.loads(out)["valid"]


@pytest.mark.multiprocess
def test_local_ranks_measure_the_network() -> None:
    cost = probe.measure_local(2, torch.device("cpu"))
    assert cost.num_ranks == 2 and cost.backend == "gloo"
    assert cost.bandwidth > 1e6 and 0 <= cost.latency_seconds < 1
    assert cost.sent_bytes == probe.CPU_SIZES and len(cost.seconds) == len(probe.CPU_SIZES)


@pytest.mark.parametrize(("options", "fragments"), [
    (["--device", "gpu"], ["device", "'gpu'"]),
    (["--device", "cpu", "--ranks", "1"], ["ranks", "1", "at least 2"]),
    (["--device", "cpu", "--max-kv-len", "0"], ["max_kv_len", "0"]),
    (["--device", "cpu", "--output", "no/such/table.json"], ["output", "no/such", "does not exist"]),
    (["--quick", "--device", "cpu", "--tp", "5"], ["tp", "5"]),
])
def test_bad_options_get_one_line(run: Callable[..., tuple[int, str, str]], options: list[str],
                                  fragments: list[str]) -> None:
    code, out, err = run("profile", *options)
    assert (code, out) == (2, "") and err.startswith("distca: error: ") and err.count("\n") == 1
    for fragment in fragments:
        assert fragment in err


def test_runs_take_turns() -> None:
    order = []
    found = timing.in_turns([lambda: order.append("f"), lambda: order.append("b")], torch.device("cpu"),
                            budget_seconds=1.0, least=3, most=3)
    assert "".join(order) == "fb" * 6 and [len(one) for one in found] == [3, 3]


def test_one_disturbed_run_is_not_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([5.0, 0.2])                                     # beyond the budget, the first by accident
    monkeypatch.setattr(timing, "_on_host", lambda runs, count: [[next(clock)]])
    assert timing.samples(lambda: None, torch.device("cpu"), budget_seconds=0.1) == [0.2]


@pytest.mark.parametrize("name", shipped_names())
def test_shipped_tables_are_measured_and_long(run: Callable[..., tuple[int, str, str]], name: str) -> None:
    table = shipped_table(name)
    assert table.kv_len[-1] >= 131_072 and table.backward_seconds is not None
    assert {"device", "date", "versions", "kernel", "dtype", "linear"} <= table.metadata.keys()
    code, out, err = run("plan", "prolong", "--ranks", 4, "--max-document", 131_072, "--cost", name, "--json")
    assert (code, err) == (0, "") and json.loads(out)["valid"]


def test_a_table_that_is_not_shipped_is_named(run: Callable[..., tuple[int, str, str]]) -> None:
    with pytest.raises(ValueError, match="latency table 'abacus' is unknown"):
        shipped_table("abacus")
    code, _, err = run("plan", "prolong", "--cost", "abacus")
    assert code == 2 and "abacus" in err
