"""The simulator benchmark replays exactly what was planned, and predicts it with the shipped tables alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attention_prediction as prediction
import attention_replay as replay
import host_costs as host
import numpy as np
import pytest
import simulator as benchmark
import torch
import training_steps as steps
from host_costs import Machine
from hypothesis import given
from hypothesis import strategies as st

from distca.cost.attention_time import AttentionTime, shipped_table
from distca.cost.latency_table import LatencyTable
from distca.cost.work import causal_pairs
from distca.models import MODELS, model_named
from distca.planning.step import StepPlan
from distca.planning.tasks import TaskTable

MODEL = model_named("llama3-8b")


@pytest.fixture(autouse=True)
def named_models_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """The benchmark names a model of its own in its processes."""
    monkeypatch.setitem(MODELS, "tiny", MODELS["tiny"])


# -------------------------------------------------------------------------------------------------------------- replay


@pytest.mark.parametrize("lengths", [[4_096] * 4, [16_384], [9_000, 300, 4_000, 3_084]])
def test_replays_every_pair_of_the_step_once(lengths: list[int]) -> None:
    """The last two cut a document, so pong reads keys of ping."""
    halves = replay.pool_tasks(np.array(lengths), 4, MODEL, 8)
    total = 0
    for tasks in halves:
        pairs = causal_pairs(tasks.q_start, tasks.q_stop, tasks.kv_start, tasks.kv_stop)
        for server in range(4):
            mine = tasks.take((tasks.server == server) & (tasks.kv_stop > tasks.kv_start))
            assert replay.server_batch(mine).pairs == pairs[tasks.server == server].sum()
        total += int(pairs.sum())
    assert len(halves) == 2 and total == sum(length * (length + 1) // 2 for length in lengths)


ranges = st.tuples(st.integers(0, 2), st.integers(0, 50), st.integers(1, 30), st.integers(0, 40), st.integers(1, 40))


@given(st.lists(ranges, min_size=1, max_size=12))
def test_a_server_holds_every_token_of_its_tasks_once(rows: list[tuple[int, ...]]) -> None:
    """Each place of the buffers is one token, the same for all rows that use it, and no token has two places."""
    document, q_start, q_len, kv_start, kv_len = np.array(rows).T
    none = np.zeros_like(document)
    tasks = TaskTable(document, q_start, q_start + q_len, kv_start, kv_start + kv_len, none, none)
    batch = replay.server_batch(tasks)
    for side, num_tokens, start in (("q", batch.num_q, q_start), ("k", batch.num_k, kv_start)):
        token = np.full(num_tokens, -1)
        begin, end = getattr(batch.rows, f"{side}_begin"), getattr(batch.rows, f"{side}_end")
        for row in range(len(rows)):
            mine = 1_000 * document[row] + start[row] + np.arange(end[row] - begin[row])
            before = token[begin[row]:end[row]]
            assert ((before == -1) | (before == mine)).all()
            token[begin[row]:end[row]] = mine
        assert (token >= 0).all() and len(set(token.tolist())) == num_tokens
    np.testing.assert_array_equal(batch.rows.q_offset, q_start - kv_start)


def test_measures_what_fits_the_budget_and_keeps_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scale = replay.Scale(((64, 2_048, 0),), 1_024, 3)
    turns = []

    def in_turns(runs: list[Callable[..., Any]], device: torch.device, **limits: float) -> list[list[float]]:
        turns.append(len(runs))
        return [[(run(), 1.0)[1]] * 3 for run in runs]

    monkeypatch.setattr(replay, "in_turns", in_turns)
    options: Any = {"device": torch.device("cpu"), "kernel_name": "sdpa", "model_name": "llama3-8b", "tp": 8,
                    "scale": scale}
    found = replay.measure(tmp_path / "found.json", budget_seconds=600.0, **options)
    assert found["complete"] and json.loads((tmp_path / "found.json").read_text()) == json.loads(json.dumps(found))
    planned = {(about["half"], server) for about, tasks, _ in replay.planned_calls(scale, MODEL, 8)
               for server in tasks.server[tasks.kv_stop > tasks.kv_start].tolist()}
    assert {half for half, _ in planned} == {0, 1} and {server for _, server in planned} == set(range(8))
    assert sorted((one["half"], one["rank"]) for one in found["measured"]) == sorted(planned)  # each once
    assert sum(turns) == 2 * len(planned) and set(turns[:-1]) == {6}  # forward and backward of three batches in turns
    late = replay.measure(tmp_path / "late.json", budget_seconds=0.0, **options)
    assert not late["complete"] and not late["measured"]


# ---------------------------------------------------------------------------------------------------------- prediction


def test_predictions_are_what_the_shipped_table_charges() -> None:
    """Batches that took 1.25 times what is charged, forward, and half of it backward."""
    time = AttentionTime.of(shipped_table(prediction.TABLE), MODEL, 8)
    scale = replay.Scale(((64, 131_072, 5),), None, 16)
    measured = []
    for about, batch in replay.pool_batches(scale, MODEL, 8):
        q_len, kv_len, aligned, document, kv_start = np.array(about["tasks"]).T
        (forward,), (backward,) = (
            time.servers(q_len, kv_len, 0 * q_len, 1, way, aligned=aligned, document=document, kv_start=kv_start)
            for way in (False, True))
        measured.append(about | {"pairs": batch.pairs, "forward": [1.25 * forward], "backward": [0.5 * backward]})
    content = {"options": {"model": "llama3-8b", "tp": 8}, "measured": measured}
    replays = prediction.predict(json.loads(json.dumps(content)))
    forward, backward, *_, all_forward, all_backward, everything = prediction.summary(replays, MODEL, 8)
    assert (forward["direction"], backward["direction"], everything["direction"]) == ("forward", "backward", None)
    assert forward["num_batches"] == all_forward["num_batches"] == len(measured) == 16
    assert all_forward["charged"]["median_error"] == pytest.approx(0.2, abs=0.02)  # items of many servers are merged
    assert all_backward["charged"]["median_bias"] == pytest.approx(1.0, abs=0.05)
    assert everything["num_batches"] == 32 and everything["charged"]["worst_error"] >= 1.0 - 0.05
    assert all_forward["sum"]["median_bias"] < all_forward["charged"]["median_bias"]


# --------------------------------------------------------------------------------------------------------------- steps


def test_ranks_share_cores_and_are_alone_when_others_are_done() -> None:
    none = np.zeros(4)
    np.testing.assert_allclose(host.shared(none, np.array([10.0, 1, 1, 1]), (1.0, 2.0)), [11, 2, 2, 2])
    np.testing.assert_allclose(host.shared(none[:2], np.array([3.0, 1]), (1.0, 1.0)), [4, 2])   # one core's worth
    np.testing.assert_allclose(host.shared(np.array([0.0, 5.0]), np.array([2.0, 2.0]), (1.0,)), [2, 7])


@given(st.lists(st.tuples(st.floats(0, 5), st.floats(0, 5)), min_size=1, max_size=6), st.integers(1, 4))
def test_sharing_loses_no_work(ranks: list[tuple[float, float]], cores: int) -> None:
    start, seconds = np.array(ranks).T
    stop = host.shared(start, seconds, tuple(range(1, cores + 1)))
    assert (stop >= start + seconds - 1e-9).all()
    assert stop.max() <= start.max() + seconds.sum() + 1e-9
    if len(ranks) <= cores:
        np.testing.assert_allclose(stop, start + seconds, atol=1e-9)


def made_up_machine(folder: Path, per_pair: float = 0.0, per_token: float = 0.0, per_byte: float = 0.0) -> Machine:
    """Two cores; seconds of attention are proportional to pairs, of everything else to tokens and bytes."""
    grid = np.array([1, 128, 256, 512, 1_024, 4_096])
    q = grid[:, None].astype(np.float64)
    pairs = np.where(q <= grid, q * (grid - (q - 1) / 2), np.nan)
    table = LatencyTable("made up", grid, grid, max(per_pair, 1e-12) * pairs, 2 * max(per_pair, 1e-12) * pairs,
                         1 / max(per_pair, 1e-12), {"num_heads": 2, "num_kv_heads": 1, "head_dim": 32})
    table.save(folder / "table.json")
    ways = (per_token, 2 * per_token)
    return host.Machine(str(folder / "table.json"), ways, ways, ways, (1.0, 2.0), per_byte, 0.0)


def variant_plan(folder: Path, variant: str, ranks: int = 2) -> tuple[list[np.ndarray], StepPlan]:
    chosen = steps.base_settings(str(folder), ranks).with_values(steps.VARIANTS[variant])
    documents = steps.step_documents(ranks, 1_024, 128, 4)
    return documents, steps.plan_of(documents, chosen, ranks)


@pytest.mark.parametrize("variant", list(steps.VARIANTS))
def test_a_simulated_step_is_the_trainers_own(variant: str, tmp_path: Path) -> None:
    """Two cores and two ranks: attention's seconds per pair, nothing else costs anything."""
    per_pair = 1e-6
    documents, plan = variant_plan(tmp_path, variant)
    machine = made_up_machine(tmp_path, per_pair)
    found = host.on_cores(host.simulated(plan, machine, host.Launches(step=0.25)), machine) - 0.25
    total = 3 * per_pair * sum(length * (length + 1) / 2 for lengths in documents for length in lengths.tolist())
    alone = total * host.MODEL.num_layers
    if variant == "home":
        heavy = 3 * per_pair * host.MODEL.num_layers * (2 * 2 * 512 * 513 / 2 + 2 * 8 * 128 * 129 / 2)
        assert found == pytest.approx(heavy, rel=0.01)           # the first rank, in every micro-batch
    elif variant == "pipeline, home":
        assert alone / 2 < found < alone
    else:
        assert alone / 2 * 0.99 < found < alone / 2 * 1.08      # balanced within the tolerance


@pytest.mark.parametrize("variant", ["home", "disaggregated", "disaggregated, ping-pong"])
def test_launches_are_counted_by_the_plans_own_calls(variant: str, tmp_path: Path) -> None:
    _, plan = variant_plan(tmp_path, variant)
    machine = made_up_machine(tmp_path)
    found = host.simulated(plan, machine, host.Launches((1.0, 2.0), (10.0, 20.0), 0.5))
    rows, layers = plan.num_nano_batches, host.MODEL.num_layers
    exchanges = layers * sum(unit * host.travelling_calls(plan, way) for unit, way in ((10.0, False), (20.0, True)))
    launched = 4 * rows * (2 * layers + 1) * 3.0
    assert found.seconds == pytest.approx(launched + exchanges + 0.5, rel=1e-6)
    assert (exchanges > 0) == (variant != "home")


def test_launches_are_what_probes_take_beyond_their_tokens(tmp_path: Path) -> None:
    """Probes that are themselves simulated give back the launches they were made with."""
    machine = made_up_machine(tmp_path, 1e-9, 1e-6, 1e-9)
    first, second = (variant_plan(tmp_path, name)[1] for name in steps.PROBES)
    wanted = host.Launches((0.01, 0.03), (0.02, 0.05), 0.4)
    home, pool = (host.Probe(*host._phases(host.simulated(plan, machine, wanted)), 0.4) for plan in (first, second))
    found = host.launches_of(home, pool, (first, second), machine)
    assert found.step == 0.4
    assert found.segment == pytest.approx(wanted.segment) and found.exchange == pytest.approx(wanted.exchange)


def test_ratios_are_compared_alike_both_ways() -> None:
    def result(variant: str, seconds: float, expected: float) -> Any:
        return steps.Result(2, variant, seconds, expected, 0.0, [seconds], 0.0)

    (pair,) = steps.ratios([result("home", 2.0, 1.0), result("disaggregated", 1.0, 0.6)])
    assert (pair.over, pair.measured, pair.simulated) == ("home", 0.5, 0.6)
    (turned,) = steps.ratios([result("disaggregated", 1.0, 0.6), result("home", 2.0, 1.0)])
    assert pair.error == pytest.approx(0.2) == turned.error


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="--device cpu"):
        benchmark.device_named("cuda")
