"""validate() accepts what a brute-force cover accepts and rejects every mutation; summary() counts as by hand."""

from dataclasses import replace
from itertools import pairwise
from random import Random

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from distca.cost.attention_time import AttentionTime
from distca.cost.latency_table import analytic_table
from distca.models import MODELS
from distca.planning.balance import balance
from distca.planning.plan import Plan, max_over_mean
from distca.planning.tasks import TILE, TaskTable, tasks_at_home
from distca.workload.layout import layout_from_rows
from tests.support.plans import LAYOUT_KINDS, covers_exactly_once, dense_coverage, random_layout, tokens_moved

LLAMA = MODELS["llama3-8b"]
COLUMNS = TaskTable.__slots__
seeds = st.integers(0, 2**32)
plans = st.builds(lambda layout, tolerance: balance(layout, LLAMA, tolerance=tolerance),
                  st.builds(random_layout, seeds, st.sampled_from(LAYOUT_KINDS), st.integers(2, 6),
                            st.integers(1, 4000)),
                  st.floats(0, 0.3))


def rows_of(tasks: TaskTable) -> list[dict[str, int]]:
    return [dict(zip(COLUMNS, row, strict=True))
            for row in zip(*(getattr(tasks, name).tolist() for name in COLUMNS), strict=True)]


def with_rows(plan: Plan, rows: list[dict[str, int]]) -> Plan:
    return replace(plan, tasks=TaskTable(*(np.array([row[name] for row in rows], dtype=np.int64)
                                           for name in COLUMNS)))


def rejected(plan: Plan) -> None:
    with pytest.raises(ValueError, match=r"task|document|queries"):
        plan.validate()


@settings(max_examples=50, deadline=None)
@given(plans, st.randoms())
def test_accepts_tasks_in_any_order(plan: Plan, random: Random) -> None:
    plan.validate()
    rows = rows_of(plan.tasks)
    random.shuffle(rows)
    with_rows(plan, rows).validate()


@settings(max_examples=120, deadline=None)
@given(plans, st.data())
def test_rejects_a_task_dropped_doubled_or_shifted(plan: Plan, data: st.DataObject) -> None:
    rows = rows_of(plan.tasks)
    at = data.draw(st.integers(0, len(rows) - 1))
    how = data.draw(st.sampled_from(["drop", "double", "q_start", "q_stop", "kv_start", "kv_stop", "q both", "kv both",
                                     "all"]))
    if how == "drop":
        del rows[at]
    elif how == "double":
        rows.append(dict(rows[at]))
    else:
        shift = data.draw(st.sampled_from([-1, 1]))
        names = {"q both": ("q_start", "q_stop"), "kv both": ("kv_start", "kv_stop"),
                 "all": ("q_start", "q_stop", "kv_start", "kv_stop")}.get(how, (how,))
        for name in names:
            rows[at][name] += shift
    changed = with_rows(plan, rows)
    assume(not covers_exactly_once(plan.layout.lengths, changed.tasks))  # a query added before its first key sees none
    rejected(changed)


@settings(max_examples=80, deadline=None)
@given(plans, st.data())
def test_rejects_a_false_home_server_or_document(plan: Plan, data: st.DataObject) -> None:
    rows = rows_of(plan.tasks)
    at = data.draw(st.integers(0, len(rows) - 1))
    name = data.draw(st.sampled_from(["home", "server", "document"]))
    count = {"home": plan.layout.num_ranks, "server": plan.num_servers, "document": plan.layout.num_documents}[name]
    wrong = [-1, count] if name == "server" else [value for value in range(-1, count + 1) if value != rows[at][name]]
    rows[at][name] = data.draw(st.sampled_from(wrong))
    rejected(with_rows(plan, rows))


@settings(max_examples=40, deadline=None)
@given(plans, st.data())
def test_rejects_work_on_a_server_of_speed_zero(plan: Plan, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(plan.tasks) - 1))
    pool = np.append(plan.speed, 0.0)
    replace(plan, speed=pool).validate()                         # an idle server does no harm
    rows = rows_of(plan.tasks)
    rows[at]["server"] = len(pool) - 1
    with pytest.raises(ValueError, match=f"task {at} is on server {len(pool) - 1}, whose speed is 0; give"):
        replace(with_rows(plan, rows), speed=pool).validate()


def split_queries(row: dict[str, int], at: int) -> list[dict[str, int]]:
    """Two tasks that compute what one did, cut at query `at`."""
    diagonal = row["kv_stop"] == row["q_stop"]
    return [{**row, "q_stop": at, "kv_stop": at if diagonal else row["kv_stop"]}, {**row, "q_start": at}]


@settings(max_examples=80, deadline=None)
@given(plans, st.data())
def test_cuts_queries_on_the_tile_only(plan: Plan, data: st.DataObject) -> None:
    layout, rows = plan.layout, rows_of(plan.tasks)
    long = [i for i, row in enumerate(rows) if row["q_stop"] - row["q_start"] > TILE and row["kv_start"] == 0]
    assume(long)
    at = data.draw(st.sampled_from(long))
    row = rows.pop(at)
    cut = data.draw(st.integers(row["q_start"] + 1, row["q_stop"] - 1))
    on_tile = (cut - row["q_start"]) % TILE == 0
    assume(on_tile or cut not in layout.stop[layout.document == row["document"]])
    changed = with_rows(plan, rows + split_queries(row, cut))
    assert covers_exactly_once(layout.lengths, changed.tasks)
    if on_tile:
        changed.validate()
    else:
        with pytest.raises(ValueError, match=f"has {cut - row['q_start']} queries, which is not a multiple of 128"):
            changed.validate()
    rows += split_queries(row, row["q_start"] + TILE)
    with_rows(plan, rows).validate()


@settings(max_examples=80, deadline=None)
@given(plans, st.data())
def test_keys_may_be_cut_but_not_overlap_or_leave_a_gap(plan: Plan, data: st.DataObject) -> None:
    rows = rows_of(plan.tasks)
    deep = [i for i, row in enumerate(rows) if min(row["kv_stop"], row["q_start"]) - row["kv_start"] > 2]
    assume(deep)
    row = rows.pop(data.draw(st.sampled_from(deep)))
    cut = data.draw(st.integers(row["kv_start"] + 2, min(row["kv_stop"], row["q_start"]) - 1))
    with_rows(plan, [*rows, {**row, "kv_stop": cut}, {**row, "kv_start": cut}]).validate()
    rejected(with_rows(plan, [*rows, {**row, "kv_stop": cut}, {**row, "kv_start": cut - 1}]))
    rejected(with_rows(plan, [*rows, {**row, "kv_stop": cut - 1}, {**row, "kv_start": cut}]))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=2), st.data())
def test_agrees_with_the_dense_matrix_on_arbitrary_tasks(lengths: list[int], data: st.DataObject) -> None:
    """Cut whole tiles at random, perhaps move one bound by a tile, and let the dense matrix say what is right."""
    rows = []
    for document, tiles in enumerate(lengths):
        edges = [0, *sorted(data.draw(st.sets(st.integers(1, tiles)))), tiles]
        for q_start, q_stop in pairwise(edges):
            cuts = sorted(data.draw(st.sets(st.integers(1, q_start)))) if q_start else []
            rows += [{"q_start": q_start, "q_stop": q_stop, "kv_start": low, "kv_stop": high, "document": document}
                     for low, high in zip([0, *cuts], [*cuts, q_stop], strict=True) if q_stop > q_start]
    if data.draw(st.booleans()):
        row = rows[data.draw(st.integers(0, len(rows) - 1))]
        name = data.draw(st.sampled_from(["q_start", "q_stop", "kv_start", "kv_stop"]))
        row[name] = min(max(row[name] + data.draw(st.sampled_from([-1, 1])), 0), lengths[row["document"]])
    bounds = ("q_start", "q_stop", "kv_start", "kv_stop")
    rows = [row | {name: row[name] * TILE for name in bounds} | {"home": 0, "server": 0} for row in rows]
    layout = layout_from_rows([[tiles * TILE for tiles in lengths]])
    plan = with_rows(Plan(layout, tasks_at_home(layout), np.ones(1), 0.0, LLAMA), rows)
    sane = all(row["q_start"] < row["q_stop"] and row["kv_start"] < row["kv_stop"] <= row["q_stop"] for row in rows)
    exact = sane and all(np.array_equal(count, np.tril(np.ones_like(count)))
                         for count in dense_coverage(layout.lengths, plan.tasks))
    if sane:
        assert covers_exactly_once(layout.lengths, plan.tasks) == exact
    if exact:
        plan.validate()
    elif sane:
        rejected(plan)


def column(*values: float) -> np.ndarray:
    return np.array(values)


@pytest.fixture
def by_hand() -> Plan:
    """One document of 512 and one of 128; server 1 takes the longer one's last 256 queries."""
    layout = layout_from_rows([[512], [128]])
    tasks = TaskTable(
        document=column(0, 0, 1), q_start=column(0, 256, 0), q_stop=column(256, 512, 128), kv_start=column(0, 0, 0),
        kv_stop=column(256, 512, 128), home=column(0, 0, 1), server=column(0, 1, 1))
    return Plan(layout, tasks, column(1.0, 1.0), 0.05, LLAMA)


def test_summary_by_hand(by_hand: Plan) -> None:
    by_hand.validate()
    summary = by_hand.summary()
    first, second, third = 256 * 257 // 2, 512 * 513 // 2 - 256 * 257 // 2, 128 * 129 // 2
    total = first + second + third
    assert summary.work.tolist() == [first, second + third]
    assert summary.work_max_over_mean == pytest.approx((second + third) / (total / 2), rel=1e-12)
    assert summary.work_max_over_mean_at_home == pytest.approx((first + second) / (total / 2), rel=1e-12)
    q, kv = 256 * 8192, 512 * 4096
    assert summary.bytes_sent.tolist() == [q + kv, q]
    assert summary.bytes_received.tolist() == [q, q + kv]
    assert summary.bytes_total == 2 * q + kv
    assert summary.lse_bytes_total == 256 * 32 * 4
    # backward with resend: Q, O, dO, log-sum-exp and KV in; dQ and dKV out
    assert summary.backward_bytes_total == 256 * (8192 + 8192 + 8192 + 128) + kv + 256 * 8192 + kv
    assert (summary.num_tasks, summary.num_moved, summary.smallest_shard) == (3, 1, 128)
    assert summary.bytes_all_gather == 0
    assert summary.seconds is None


def test_summary_in_seconds(by_hand: Plan) -> None:
    cost = AttentionTime.of(analytic_table(LLAMA, 1e12), LLAMA)
    plan = replace(by_hand, cost=cost, speed=column(1.0, 2.0))
    summary = plan.summary()
    flops = 4 * 32 * 128 * column(256 * 257 // 2, 512 * 513 // 2 - 256 * 257 // 2 + 128 * 129 // 2)
    np.testing.assert_allclose(summary.work, flops / 1e12, rtol=1e-6)
    assert summary.seconds == pytest.approx(max(flops[0], flops[1] / 2) / 1e12, rel=1e-6)
    assert summary.work_max_over_mean == pytest.approx(max(flops[0], flops[1] / 2) / (flops.sum() / 3), rel=1e-6)


@settings(max_examples=40, deadline=None)
@given(plans)
def test_summary_equals_counting(plan: Plan) -> None:
    summary, layout = plan.summary(), plan.layout
    rows = rows_of(plan.tasks)
    work = np.zeros(plan.num_servers)
    for row in rows:
        query = np.arange(row["q_start"], row["q_stop"])
        work[row["server"]] += np.maximum(np.minimum(query + 1, row["kv_stop"]) - row["kv_start"], 0).sum()
    assert summary.work.tolist() == work.tolist()
    queries, keys = tokens_moved(layout, plan.tasks, plan.num_servers)
    assert summary.bytes_total == queries.sum() * 2 * 8192 + keys.sum() * 4096
    assert summary.num_moved == sum(row["home"] != row["server"] for row in rows)
    gathered = sum(int(layout.lengths[document]) - int((layout.stop - layout.start)[mine].sum())
                   for document in range(layout.num_documents) for rank in range(layout.num_ranks)
                   if (mine := (layout.document == document) & (layout.rank == rank)).any())
    assert summary.bytes_all_gather == gathered * 4096


@pytest.mark.parametrize(("work", "speed", "expected"), [
    ([3, 1], [1, 1], 1.5),
    ([3, 1], [3, 1], 1.0),
    ([4, 0], [1, 0], 1.0),
    ([4, 1], [1, 0], np.inf),
    ([0, 0], [1, 1], 1.0),
    ([2, 2, 2], [1, 1, 2], 4 / 3),
])
def test_max_over_mean(work: list[int], speed: list[int], expected: float) -> None:
    assert max_over_mean(np.array(work, float), np.array(speed, float)) == pytest.approx(expected)
