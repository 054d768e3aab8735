"""Strategies against each other: what must hold whatever the costs are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distca.cost.latency_table import analytic_table
from distca.cost.network import find_cluster, read_cluster
from distca.models import model_named
from distca.planning.choose import AUTO
from distca.planning.orders import local_order
from distca.simulate.bounds import follow
from distca.simulate.costs import Costs
from distca.simulate.execute import execute
from distca.simulate.outcomes import Comparison, Figures
from distca.simulate.setting import setting
from distca.simulate.strategies import NAMES, STRATEGIES, GroupChoice, StepDocuments
from distca.simulate.sweep import Question, batch_figures, compare, replay
from distca.spec import cluster_named
from distca.workload.sequences import Source, batch_sequences
from distca.workload.topology import Topology

MODEL = model_named("llama3-8b")
CLUSTER = cluster_named("dgx-h200")
TABLE = analytic_table(MODEL, 550e12)


def _question(pp: int = 1, gpus: int = 32, context: int = 65536, batches: int = 2, data: str = "pretrain",
              strategies: tuple[str, ...] = NAMES, **options: Any) -> Question:
    return Question((setting(MODEL, CLUSTER, gpus=gpus, context=context, pp=pp, **options),), strategies, Source(data),
                    TABLE, 0.05, batches)


@pytest.fixture(scope="module", params=[1, 2, 3])
def compared(request: pytest.FixtureRequest) -> Comparison:
    return compare(_question(pp=request.param, gpus=24 if request.param == 3 else 32))  # 3: stages of 10, 11, 11 layers


def test_nothing_beats_the_bound_and_every_step_has_the_same_tokens(compared: Comparison) -> None:
    assert compared.bound is not None
    bound = compared.bound.column("seconds")
    for outcome in compared.outcomes:
        assert (outcome.column("seconds") >= bound * (1 - 1e-9)).all(), outcome.name
        assert outcome.tokens_per_second * outcome.step_seconds == pytest.approx(compared.setting.num_tokens)


def test_the_ideal_is_no_slower_than_what_it_chooses_from(compared: Comparison) -> None:
    ideal = compared.outcome("wlb_ideal")
    for name in ("variable_length", "per_document_cp", "fixed_packing"):
        assert ideal.step_seconds <= compared.outcome(name).step_seconds * 1.0001


def test_ours_is_balanced_equal_in_memory_and_thrifty_with_buffers(compared: Comparison) -> None:
    for name in ("disaggregated", "distca"):
        row = compared.outcome(name).as_json(compared.outcomes)
        assert row["memory_gb"]["buffers"] <= 0.1 * row["memory_gb"]["activations"]
        assert row["memory_gb"]["gathered_kv"] == 0
    assert compared.outcome("disaggregated").as_json([])["work_max_over_mean"] < 1.1
    fixed = compared.outcome("fixed_packing").as_json([])
    assert fixed["work_max_over_mean"] > compared.outcome("disaggregated").as_json([])["work_max_over_mean"]


def test_speedups_are_ratios_of_the_steps(compared: Comparison) -> None:
    rows = compared.as_json()["strategies"]
    assert tuple(rows) == NAMES
    for name, row in rows.items():
        assert name not in row["speedup_over"]
        for other, ratio in row["speedup_over"].items():
            assert ratio == pytest.approx(rows[other]["step_seconds"] / row["step_seconds"])
            low, high = row["speedup_range_over"][other]
            assert low <= ratio <= high or low == pytest.approx(high)
        assert 0 <= row["idle_share"] < 1 and -1e-9 <= row["exposed_communication_share"] < 1


def test_two_processes_give_the_same_figures() -> None:
    """Bit for bit: a batch is one process's work, and means are taken over batches in order."""
    question = _question(batches=2, strategies=("fixed_packing", "distca"))
    assert compare(question, workers=2).as_json() == compare(question).as_json()


def test_a_replayed_batch_is_the_one_that_was_compared() -> None:
    question = _question(pp=2, gpus=32, batches=1, strategies=("distca", "wlb_ideal", "bound"))
    compared = compare(question)
    for name in ("distca", "wlb_ideal"):
        outcome = compared.outcome(name)
        done = replay(question, outcome)
        assert done.seconds == outcome.step_seconds and len(done.traces) == outcome.setting.num_pool
        assert max(span.stop_seconds for trace in done.traces for span in trace.spans) == pytest.approx(done.seconds)
    assert compared.bound is not None
    with pytest.raises(ValueError, match="'bound' has no timeline; choose a strategy"):
        replay(question, compared.bound)


def test_stages_may_be_as_many_as_layers_and_no_more() -> None:
    where = setting(MODEL, CLUSTER, gpus=40, context=65536, pp=5)
    assert where.layers == (6, 6, 7, 7, 6) and sum(where.layers) == MODEL.num_layers
    with pytest.raises(ValueError, match="pp is 33 but model 'llama3-8b' has 32 layers; give --pp 32 or less"):
        setting(MODEL, CLUSTER, gpus=33 * 8, context=65536, pp=33)


def test_contexts_are_whole_and_follow_their_rules() -> None:
    for name in ("prolong", "pretrain", "lognormal"):
        sequences = batch_sequences(Source(name), 262144, 6, (1, 2))
        assert [int(lengths.sum()) for lengths in sequences] == [262144] * 6
    many = np.concatenate(batch_sequences(Source("prolong"), 262144, 400, (3,)))
    whole = (many == 262144).mean() / (many > 65536).mean()
    assert 0.2 < whole < 0.4  # three in ten become as long as the context
    own = np.concatenate(batch_sequences(Source("mine", np.array([100, 7])), 1000, 5, (0,)))
    assert own.sum() == 5000 and own.max() == 100


def test_clusters_come_from_files(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('base = "dgx-h100"\ninter_node_bandwidth = 25e9\n')
    assert read_cluster(path).inter_node_bandwidth == 25e9 and read_cluster(path).memory_bytes == 80e9
    assert find_cluster("dgx-h200") is CLUSTER
    for text, said in (("gpus = 4", "field 'gpus' is unknown"), ("gpus_per_node = 4", "not given"),
                       ('base = "dgx-h200"\nmemory_bytes = "80"', "memory_bytes is '80'; give a finite number"),
                       ("base = [", "broken TOML"), ('base = "dgx-h200"\nmemory_bytes = -1', "memory_bytes is -1")):
        path.write_text(text)
        with pytest.raises(ValueError, match=said):
            read_cluster(path)


def test_a_cluster_file_may_name_pods(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('base = "dgx-h200"\nnodes_per_pod = 4\n', encoding="utf-8")
    assert read_cluster(path).nodes_per_pod == 4
    assert Topology.of_cluster(read_cluster(path), 128, tp=1).pod.max() == 3


def test_a_faster_network_helps_those_who_wait_for_it() -> None:
    where = setting(MODEL, CLUSTER, gpus=64, context=131072)
    batch = StepDocuments(tuple(batch_sequences(Source("pretrain"), where.context, where.num_sequences, (0, 0))))
    costs = Costs.of(MODEL, CLUSTER, 8, TABLE)
    for choice in STRATEGIES["per_document_cp"].choices(where, 0.05):
        plan = choice.step_plan(where, costs, batch)
        assert isinstance(choice, GroupChoice)
        if plan is not None and choice.cp > 1:
            assert execute(plan, costs.without_network()).seconds < execute(plan, costs).seconds


def test_every_strategy_makes_steps_of_the_same_documents() -> None:
    where = setting(MODEL, CLUSTER, gpus=48, context=61_440, pp=3, micro_batches=4)
    batch = StepDocuments(tuple(batch_sequences(Source("prolong"), where.context, where.num_sequences, (0, 0))))
    costs = Costs.of(MODEL, CLUSTER, 8, TABLE)
    for strategy in STRATEGIES.values():
        listed = strategy.choices(where, AUTO)
        variants = strategy.variants(where, listed[0], AUTO, costs, batch)
        assert (len(variants) > 2) == (strategy.name != "disaggregated")
        for choice in (*listed, *variants):
            plan = choice.step_plan(where, costs, batch)
            assert plan is not None
            plan.validate()
            lengths = np.concatenate([micro_batch.lengths for micro_batch in plan.micro_batches])
            assert sorted(lengths.tolist()) == sorted(batch.lengths().tolist()), (strategy.name, choice)
            assert sum(plan.layers) == MODEL.num_layers and plan.num_data == where.num_data
            assert f"pp 3, 4 micro-batches, {choice.order.replace('_', ' ')}" in choice.describe(where)


def test_baselines_keep_the_best_of_their_orders() -> None:
    """By hand: one layer takes as long in every stage, and the head of the last as long as some; moved layers even it
    out. Unit by unit, orders take the ticks that their papers say."""
    where = setting(MODEL, CLUSTER, gpus=64, context=65_536, pp=4)
    question = Question((where,), ("per_document_cp",), Source("prolong"), TABLE, 0.05, 1)
    found = batch_figures(question, 0)
    tried = {key[2]: figures.seconds for key, figures in found.items()
             if isinstance(figures, Figures) and isinstance(key[2], GroupChoice)}
    plain = min(seconds for choice, seconds in tried.items() if (choice.order, choice.moved) == ("1f1b", 0))
    best = compare(question).outcome("per_document_cp")
    assert isinstance(best.choice, GroupChoice) and best.choice.order != "1f1b" and best.choice.moved > 0
    assert best.step_seconds == min(tried.values()) < 0.95 * plain
    choice = GroupChoice(2, "fixed", "document", moved=2)
    moved = choice.step_plan(where, question.costs(where), question.batch(where, 0))
    assert moved is not None and moved.layers == (9, 9, 8, 6)
    for name, ticks in (("1f1b", 2 * (8 + 3)), ("zb_h1", 3 * 8 + 3), ("zbv", 6 * 8 + 3),
                        ("interleaved_1f1b_2", 2 * 2 * 8 + 2 * 3)):
        table = local_order(name, 4, 8)
        units = (table.active | (table.weight >= 0)).astype(float)
        assert follow(table, units) == ticks == table.num_ticks, name
    slow = np.where(table.active & table.backward, 2.0, units)   # backward twice as long: vM forward, 2vM backward
    assert follow(table, slow) == 3 * 2 * 8 + 3 * 3


def test_leaving_choices_out_changes_no_best(monkeypatch: pytest.MonkeyPatch) -> None:
    """A floor is below the step, and a strategy's best is the same as if all its choices had run."""
    question = _question(gpus=64, context=131072, data="prolong", strategies=("per_document_cp", "wlb_ideal"))
    where = question.settings[0]
    costs, batch = question.costs(where), question.batch(where, 0)
    for name in question.strategies:
        for choice in STRATEGIES[name].choices(where, 0.05):
            plan = choice.step_plan(where, costs, batch)
            assert plan is not None and choice.floor(where, costs, batch) <= execute(plan, costs).seconds
    pruned = compare(question)
    assert any(isinstance(figures, float) for figures in batch_figures(question, 0).values())
    monkeypatch.setattr(GroupChoice, "floor", lambda *_: 0.0)
    assert compare(question).as_json() == pruned.as_json()
