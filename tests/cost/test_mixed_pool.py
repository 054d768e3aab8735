"""Pools of unlike GPUs: every server is counted by its own table, plans are level in these seconds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import distca
from distca.cli import main
from distca.cost.attention_time import AttentionTime, shipped_table
from distca.cost.latency_table import analytic_table
from distca.cost.mixed_pool import MixedPool, ServerKind, find_cost, read_pool, time_of
from distca.models import MODELS
from distca.planning.balance import balance
from distca.planning.choose import plan_step
from distca.planning.plan import Plan, max_over_mean
from distca.simulate.setting import setting
from distca.simulate.sweep import Question, compare
from distca.spec import cluster_named
from distca.train.batches import attention_time, step_plan
from distca.train.settings import load_settings
from distca.workload.documents import sample_lengths
from distca.workload.packing import pack
from distca.workload.sequences import Source
from distca.workload.topology import Topology
from tests.support.plans import random_lengths

LLAMA = MODELS["llama3-8b"]
H200, CUDNN = shipped_table("h200"), shipped_table("h200_cudnn")
SLOW = analytic_table(LLAMA, 2e14)


def own_seconds(plan: Plan, pool: MixedPool) -> np.ndarray:
    """[servers] of each server's tasks by its own table; those of a kind together, as tails are estimated."""
    seconds, end = np.zeros(plan.num_servers), 0
    for kind in pool.kinds:
        first, end = end, end + kind.ranks
        own = (plan.tasks.server >= first) & (plan.tasks.server < end)
        mine = plan.tasks.take(own & (plan.tasks.kv_stop > plan.tasks.kv_start))
        seconds[first:end] = AttentionTime.of(kind.table, LLAMA, plan.tp, 1 / kind.speed).servers(
            mine.q_len, mine.kv_len, mine.server - first, kind.ranks, plan.backward,
            aligned=mine.kv_stop == mine.q_stop, document=mine.document, kv_start=mine.kv_start)
    return seconds


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 2**32), st.lists(st.tuples(st.integers(1, 3), st.sampled_from([H200, CUDNN, SLOW]),
                                                 st.sampled_from([1.0, 0.78])), min_size=1, max_size=3),
       st.booleans(), st.sampled_from([0, 2]))
def test_plans_are_level_in_every_servers_own_seconds(
    seed: int, kinds: list[tuple[int, Any, float]], backward: bool, per_node: int
) -> None:
    pool = MixedPool(tuple(ServerKind(*kind) for kind in kinds))
    ranks = sum(kind.ranks for kind in pool.kinds)
    layout = pack(random_lengths(seed, ranks * 4096), ranks=ranks)
    topology = Topology.regular(ranks, per_node) if per_node else None
    plan = balance(layout, LLAMA, cost=pool.time(LLAMA), backward=backward, topology=topology)
    plan.validate()
    summary, seconds = plan.summary(), own_seconds(plan, pool)
    np.testing.assert_allclose(summary.work, seconds, rtol=1e-9)
    assert summary.seconds == pytest.approx(seconds.max())
    assert plan.limit is not None or max_over_mean(plan.work(), plan.speed) <= 1.05 + 1e-9


def test_servers_alike_are_planned_as_one_table() -> None:
    layout = pack(sample_lengths("prolong", 6 * 16_384, seed=1), ranks=6)
    alike = MixedPool((ServerKind(2, H200), ServerKind(4, H200))).time(LLAMA)
    mine, theirs = (balance(layout, LLAMA, cost=cost) for cost in (alike, time_of(H200, LLAMA)))
    assert (mine.tasks.server == theirs.tasks.server).all()
    np.testing.assert_allclose(mine.work(), theirs.work(), rtol=1e-2)  # tails are estimated over those of a kind
    assert alike != time_of(H200, LLAMA) and alike == MixedPool((ServerKind(2, H200), ServerKind(4, H200))).time(LLAMA)


def test_a_slower_kind_gets_less() -> None:
    """Four servers of half the rate: equal shares would take twice as long there; by tables at most 1.05 of 8 / 6."""
    pool = MixedPool((ServerKind(4, SLOW), ServerKind(4, SLOW, 0.5)))
    lengths = sample_lengths("prolong", 8 * 32_768, seed=2)
    seconds, even = [], []
    for cost in (pool.time(LLAMA), time_of(SLOW, LLAMA)):
        step = plan_step([lengths], LLAMA, num_data=8, layers=(1,), ping_pong=False, cost=cost)
        step.validate()
        seconds.append(own_seconds(step.plans[0], pool))
        even.append(step.summary().work_after)
    total = time_of(SLOW, LLAMA).servers(lengths, lengths, np.zeros(len(lengths), dtype=int), 1)[0]
    assert seconds[0].max() <= 1.10 * total / 6 and seconds[1].max() >= 0.95 * 2 * total / 8
    assert even[0] <= 1.05 + 1e-9


def test_dedicated_servers_and_learnt_speeds_come_on_top() -> None:
    pool = MixedPool((ServerKind(2, H200), ServerKind(1, H200, 0.5)))
    layout = pack([16_384], ranks=2)
    plan = balance(layout, LLAMA, cost=pool.time(LLAMA), speed=[1.0, 0.5, 1.0])
    assert plan.speed == pytest.approx([1.0, 0.5, 0.5])
    assert max_over_mean(own_seconds(plan, pool), np.array([1.0, 0.5, 1.0])) > 1
    step = plan_step([np.array([16_384])], LLAMA, num_data=2, layers=(1,), cost=pool.time(LLAMA), speed=[1.0, 0.5, 1.0])
    both = sum(own_seconds(one, pool) for one in step.plans)
    np.testing.assert_allclose(step.server_work(), both, rtol=1e-9)


def test_no_step_of_a_mixed_pool_beats_its_bound() -> None:
    pool = MixedPool((ServerKind(2, H200), ServerKind(2, H200, 0.6)))
    where = setting(LLAMA, cluster_named("dgx-h200"), gpus=32, context=65_536, sequences=4)
    found = compare(Question((where,), ("fixed_packing", "per_document_cp", "wlb_ideal", "distca", "bound"),
                             Source("prolong"), pool, 0.05, 1))
    assert found.bound is not None
    assert all(outcome.step_seconds >= found.bound.step_seconds for outcome in found.outcomes)
    alike = compare(Question((where,), ("distca",), Source("prolong"), H200, 0.05, 1)).outcome("distca")
    mixed = found.outcome("distca")
    assert alike.step_seconds < mixed.step_seconds
    assert mixed.work_max_over_mean <= 1.1                       # in each rank's own seconds, forward and backward


def test_a_run_plans_what_the_api_does(tmp_path: Path) -> None:
    path = tmp_path / "pool.toml"
    path.write_text('servers = [{ranks = 1, table = "h200"}, {ranks = 1, table = "h200", speed = 0.5}]')
    run = load_settings(None, {"model.name": "llama3-8b", "attention.cost": str(path)})
    lengths = [np.array([4096, 2048, 2048])]
    trained = step_plan(lengths, run, LLAMA, 2, attention_time(run, LLAMA))
    asked = distca.plan_step(lengths, 2, cost=find_cost(str(path)))
    assert [one.speed.tolist() for one in trained.plans] == [[1.0, 0.5]] * len(trained.plans)
    for one, other in zip(trained.plans, asked.plans, strict=True):
        assert (one.tasks.server == other.tasks.server).all() and (one.tasks.q_stop == other.tasks.q_stop).all()


def test_the_commands_take_a_pool(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    SLOW.save(tmp_path / "slow.json")
    (tmp_path / "pool.toml").write_text('servers = [{ranks = 2, table = "h200"}, {ranks = 2, table = "slow.json"}]')
    said = []
    for cost in (str(tmp_path / "pool.toml"), "h200"):
        with pytest.raises(SystemExit) as ended:
            main(["plan", "prolong", "--ranks", "4", "--tokens-per-rank", "16k", "--cost", cost, "--json"])
        assert not ended.value.code
        said.append(json.loads(capsys.readouterr().out))
    assert said[0]["valid"] and said[0]["attention_seconds"] > said[1]["attention_seconds"]
    with pytest.raises(SystemExit) as ended:
        main(["plan", "prolong", "--ranks", "8", "--cost", str(tmp_path / "pool.toml")])
    assert ended.value.code == 2 and "servers names 4 of them but the pool has 8; name" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        main(["simulate", "--gpus", "64", "--pp", "2", "--cost", str(tmp_path / "pool.toml"), "--batches", "1"])
    assert ended.value.code == 2 and "pp is 2 but cost names servers that differ" in capsys.readouterr().err


@pytest.mark.parametrize(("content", "said"), [
    ("", r"servers is None; give a list of 1 to 64 kinds"),
    ("servers = []", r"servers is \[\]; give a list"),
    ("servers = [3]", r"servers\[0\] is 3; give ranks and table"),
    ('servers = [{ranks = 8}]', r"servers\[0\] is .*; give ranks and table"),
    ('servers = [{ranks = 0, table = "h200"}]', r"servers\[0\]\.ranks is 0"),
    ('servers = [{ranks = 8, table = "h900"}]', r"h900"),
    ('servers = [{ranks = 8, table = "h200", speed = 0}]', r"servers\[0\]\.speed is 0"),
    ('servers = [{ranks = 8, table = "h200", rate = 1}]', r"field of servers\[0\] 'rate'"),
    ('server = []', r"field 'server'"),
])
def test_a_wrong_file_is_refused_by_its_field(content: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "pool.toml"
    path.write_text(content)
    with pytest.raises(ValueError, match=f"pool.toml: .*{said}"):
        read_pool(path)
