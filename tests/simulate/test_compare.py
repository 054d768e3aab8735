"""Strategies against each other: what must hold whatever the costs are."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from distca.cost.cluster_file import find_cluster, read_cluster
from distca.cost.latency_table import analytic_table
from distca.cost.work import activation_bytes
from distca.planning.pipeline_ticks import one_forward_one_backward, same_phase_ticks
from distca.simulate.compare import Question, compare, replay
from distca.simulate.costs import Costs
from distca.simulate.memory import peak_live
from distca.simulate.setting import setting
from distca.simulate.step import Groups, grouped_step
from distca.simulate.strategies import STRATEGIES, Batch, run, single_stream
from distca.simulate.strategies import choices as choices_of
from distca.spec import cluster_named, model_named
from distca.trace import LANES
from distca.workload.contexts import Source, batch_sequences

MODEL = model_named("llama3-8b")
CLUSTER = cluster_named("dgx-h200")
TABLE = analytic_table(MODEL, 550e12)


def _question(pp=1, gpus=32, context=65536, batches=2, data="pretrain", strategies=STRATEGIES, **options):
    return Question((setting(MODEL, CLUSTER, gpus=gpus, context=context, pp=pp, **options),), strategies, Source(data),
                    TABLE, 0.05, batches)


@pytest.fixture(scope="module", params=[1, 2])
def compared(request):
    return compare(_question(pp=request.param))


def test_nothing_beats_the_bound_and_every_step_has_the_same_tokens(compared):
    bound = compared.outcome("bound").column("seconds")
    for outcome in compared.outcomes:
        assert (outcome.column("seconds") >= bound * (1 - 1e-9)).all(), outcome.name
        assert outcome.tokens_per_second * outcome.step_seconds == pytest.approx(compared.setting.num_tokens)


def test_the_ideal_is_no_slower_than_what_it_chooses_from(compared):
    ideal = compared.outcome("wlb_ideal")
    for name in ("variable_length", "per_document_cp", "fixed_packing"):
        assert ideal.step_seconds <= compared.outcome(name).step_seconds * 1.0001


def test_ours_is_balanced_equal_in_memory_and_thrifty_with_buffers(compared):
    for name in ("disaggregated", "distca"):
        row = compared.outcome(name).as_json(compared.outcomes)
        assert row["memory_gb"]["buffers"] <= 0.1 * row["memory_gb"]["activations"]
        assert row["memory_gb"]["gathered_kv"] == 0
    assert compared.outcome("disaggregated").as_json([])["work_max_over_mean"] < 1.1
    fixed = compared.outcome("fixed_packing").as_json([])
    assert fixed["work_max_over_mean"] > compared.outcome("disaggregated").as_json([])["work_max_over_mean"]


def test_speedups_are_ratios_of_the_steps(compared):
    rows = compared.as_json()["strategies"]
    assert set(rows) == set(STRATEGIES)
    for name, row in rows.items():
        assert name not in row["speedup_over"]
        for other, ratio in row["speedup_over"].items():
            assert ratio == pytest.approx(rows[other]["step_seconds"] / row["step_seconds"])
            low, high = row["speedup_range_over"][other]
            assert low <= ratio <= high or low == pytest.approx(high)
        assert 0 <= row["idle_share"] < 1 and -1e-9 <= row["exposed_communication_share"] < 1


def test_two_processes_give_the_same_figures():
    question = _question(batches=2, strategies=("fixed_packing", "distca"))
    assert compare(question, workers=2).as_json() == compare(question).as_json()


def test_ping_pong_is_no_slower_than_a_single_stream():
    question = _question(context=131072)
    where = question.settings[0]
    costs, batch = question.costs(where), question.batch(where, 0)
    choice = choices_of("distca", where)[0]                      # the tolerance that is asked for
    done = run("distca", choice, where, costs, batch, 0.05)
    assert done is not None and done[0].seconds < single_stream(where, costs, batch, 0.05).seconds


def test_traces_end_with_the_step_and_use_known_lanes():
    question = _question(pp=2, gpus=32, batches=1, strategies=("distca", "wlb_ideal"))
    compared = compare(question)
    for name in ("distca", "wlb_ideal"):
        outcome = compared.outcome(name)
        found = replay(question, outcome).traces
        assert len(found) == outcome.setting.num_pool
        assert {span.lane for trace in found for span in trace.spans} <= set(LANES)
        assert max(span.stop_seconds for trace in found for span in trace.spans) == pytest.approx(outcome.step_seconds)
        for trace in found:
            stream = sorted((span.start_seconds, span.stop_seconds) for span in trace.spans
                            if span.lane in ("linear", "attention", "optimizer"))
            assert all(later[0] >= earlier[1] - 1e-9 for earlier, later in pairwise(stream))


def _groups(where, cp, attention):
    shape = (where.num_micro_batches, where.num_data)
    tokens = np.full(shape, where.tokens_per_rank)
    return Groups(cp, np.full(shape, attention), np.full(shape, 2.5 * attention), tokens)


def test_a_pipeline_of_equal_micro_batches_takes_as_long_as_1f1b_says():
    where = setting(MODEL, CLUSTER, gpus=32, context=65536, pp=4, micro_batches=8)
    costs = Costs.of(MODEL, CLUSTER, 8, TABLE).without_network()
    step = grouped_step(where, costs, _groups(where, 1, 0.01))
    tokens = np.array([float(where.tokens_per_rank)])
    linear = sum(float(part[0]) for way in (False, True) for part in costs.segment_seconds(tokens, way))
    slot = where.layers_per_stage * (linear + 0.035)
    head = sum(float(costs.head_seconds(tokens, way)[0]) for way in (False, True))
    assert step.seconds == pytest.approx((8 + 3) * slot + 8 * head, rel=0.01)


def test_gathering_keys_takes_the_time_of_the_ring():
    where = setting(MODEL, CLUSTER, gpus=64, context=65536)
    costs = Costs.of(MODEL, CLUSTER, 8, TABLE)
    with_keys, without = (grouped_step(where, costs, _groups(where, cp, 0.05)).seconds for cp in (8, 1))
    gathered = 8 * where.tokens_per_rank * MODEL.kv_token_bytes(8)
    assert with_keys - without == pytest.approx(2 * MODEL.num_layers * 7 / 8 * gathered / 50e9, rel=0.05)


def test_live_micro_batches_are_those_of_the_schedule():
    tokens = np.full((8, 1), 100)
    assert peak_live(one_forward_one_backward(4, 8), tokens).ravel().tolist() == [400, 300, 200, 100]
    assert peak_live(same_phase_ticks(4, 8), tokens).ravel().tolist() == [700, 500, 300, 100]


def test_memory_of_the_step_is_counted():
    question = _question(batches=1, strategies=("distca",))
    outcome = compare(question).outcome("distca")
    where = outcome.setting
    assert outcome.figures[0].activations_gb == pytest.approx(
        MODEL.num_layers * activation_bytes(where.tokens_per_rank, MODEL, 8) / 1e9)
    assert outcome.figures[0].memory_max_over_mean < 1.05


def test_contexts_are_whole_and_follow_their_rules():
    for name in ("prolong", "pretrain", "lognormal"):
        sequences = batch_sequences(Source(name), 262144, 6, (1, 2))
        assert [int(lengths.sum()) for lengths in sequences] == [262144] * 6
    many = np.concatenate(batch_sequences(Source("prolong"), 262144, 400, (3,)))
    whole = (many == 262144).mean() / (many > 65536).mean()
    assert 0.2 < whole < 0.4  # three in ten become as long as the context
    own = np.concatenate(batch_sequences(Source("mine", np.array([100, 7])), 1000, 5, (0,)))
    assert own.sum() == 5000 and own.max() == 100


def test_clusters_come_from_files(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('base = "dgx-h100"\ninter_node_bandwidth = 25e9\n')
    assert read_cluster(path).inter_node_bandwidth == 25e9 and read_cluster(path).memory_bytes == 80e9
    assert find_cluster("dgx-h200") is CLUSTER
    for text, said in (("gpus = 4", "field 'gpus' is unknown"), ("gpus_per_node = 4", "not given"),
                       ('base = "dgx-h200"\nmemory_bytes = "80"', "memory_bytes is '80'; give a number"),
                       ("base = [", "broken TOML"), ('base = "dgx-h200"\nmemory_bytes = -1', "memory_bytes is -1")):
        path.write_text(text)
        with pytest.raises(ValueError, match=said):
            read_cluster(path)


def test_a_faster_network_helps_those_who_wait_for_it():
    where = setting(MODEL, CLUSTER, gpus=64, context=131072)
    batch = Batch(tuple(batch_sequences(Source("pretrain"), where.context, where.num_sequences, (0, 0))))
    costs = Costs.of(MODEL, CLUSTER, 8, TABLE)
    for choice in choices_of("per_document_cp", where):
        done = run("per_document_cp", choice, where, costs, batch, 0.05, exposed=True)
        if done is not None and choice.cp > 1:
            assert done[1] < done[0].seconds
