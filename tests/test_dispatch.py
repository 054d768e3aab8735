"""One rank's tables against tokens carried one by one: who sends what, where it lands, what is computed in it."""

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distca.dispatch import RankTables, build, travels
from distca.models import MODELS
from distca.planning.balance import balance
from distca.planning.plan import Plan
from distca.planning.tasks import TaskTable, tasks_at_home
from distca.workload.layout import Layout, layout_from_rows
from distca.workload.packing import pack
from tests.support.plans import LAYOUT_KINDS, misplaced_plan, random_layout, random_speeds, scattered_plan, tokens_moved

MODEL = MODELS["llama3-8b"]


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Sensible and senseless plans over all kinds of layouts and pools."""
    seed = draw(st.integers(0, 10_000))
    ranks, dedicated = draw(st.integers(1, 5)), draw(st.integers(0, 2))
    layout = random_layout(seed, draw(st.sampled_from(LAYOUT_KINDS)), ranks, draw(st.integers(1, 50)))
    kind = draw(st.sampled_from(["balanced", "misplaced", "scattered"]))
    if kind == "balanced":
        return balance(layout, MODEL, tolerance=draw(st.sampled_from([0.0, 0.05, 0.5])),
                       speed=random_speeds(seed, ranks, dedicated))
    if kind == "misplaced":
        return misplaced_plan(layout, ranks + dedicated, MODEL)
    return scattered_plan(seed, layout, ranks + dedicated, MODEL)


@st.composite
def long_plans(draw: st.DrawFn) -> Plan:
    """Documents long enough for `balance` to move tiles, rectangles and shared prefixes."""
    seed = draw(st.integers(0, 10_000))
    ranks = draw(st.integers(2, 5))
    layout = random_layout(seed, draw(st.sampled_from(LAYOUT_KINDS)), ranks, draw(st.integers(300, 1200)))
    tolerance = draw(st.sampled_from([0.0, 0.05, 0.2]))
    return balance(layout, MODEL, tolerance=tolerance, speed=random_speeds(seed, ranks, 1))


def row_tokens(layout: Layout, rank: int) -> list[tuple[int, int]]:
    if rank >= layout.num_ranks:
        return []
    columns = layout.tokens(rank)
    return list(zip(columns.document.tolist(), columns.position.tolist(), strict=True))


def carry(plan: Plan, tables: list[RankTables], side: str) -> list[list[tuple[int, int]]]:
    """Every server's buffer after all homes have sent their runs: each place filled once."""
    rows = [row_tokens(plan.layout, rank) for rank in range(plan.num_servers)]
    buffers = []
    for server, table in enumerate(tables):
        mine = getattr(table, side)
        buffer: list[Any] = [None] * mine.buffer_tokens
        filled = np.zeros(mine.buffer_tokens, dtype=np.int64)
        for home, other in enumerate(tables):
            sent = getattr(other, side).send
            wire = [token for peer, start, length in zip(sent.peer, sent.start, sent.length, strict=True)
                    if peer == server for token in rows[home][start:start + length]]
            assert home != server or not wire, "what stays home is not sent"
            took = mine.receive
            places = [place for peer, start, length in zip(took.peer, took.start, took.length, strict=True)
                      if peer == home for place in range(start, start + length)]
            assert len(places) == len(wire)
            for place, token in zip(places, wire, strict=True):
                buffer[place] = token
                filled[place] += 1
        local = mine.local
        for row, at, length in zip(local.row, local.buffer, local.length, strict=True):
            buffer[at:at + length] = rows[server][row:row + length]
            filled[at:at + length] += 1
        assert (filled == 1).all()
        buffers.append(buffer)
    return buffers


def tokens_read(plan: Plan, server: int, start: str, stop: str) -> set[tuple[int, int]]:
    tasks = plan.tasks
    return {(document, position)
            for document, first, last, where in zip(tasks.document.tolist(), getattr(tasks, start).tolist(),
                                                    getattr(tasks, stop).tolist(), tasks.server.tolist(), strict=True)
            if where == server for position in range(first, last)}


def check_against_brute_force(plan: Plan) -> None:
    tables = [build(plan, rank) for rank in range(plan.num_servers)]
    queries, keys = carry(plan, tables, "queries"), carry(plan, tables, "keys")
    for server, table in enumerate(tables):
        for buffer, side, columns in ((queries, table.queries, ("q_start", "q_stop")),
                                      (keys, table.keys, ("kv_start", "kv_stop"))):
            wanted = tokens_read(plan, server, *columns)
            assert set(buffer[server]) == wanted
            assert side.buffer_tokens == len(wanted), "each token stands once, and nothing else does"
            assert side.is_row == (buffer[server] == row_tokens(plan.layout, server))
        rows = {(tuple(queries[server][a:b]), tuple(keys[server][c:d]), offset) for a, b, c, d, offset in zip(
            table.q_begin.tolist(), table.q_end.tolist(), table.k_begin.tolist(), table.k_end.tolist(),
            table.q_offset.tolist(), strict=True)}
        served = plan.tasks.take((plan.tasks.server == server) & (plan.tasks.kv_len > 0))
        assert len(table.q_begin) == len(served)
        assert rows == {
            (tuple((document, i) for i in range(q0, q1)), tuple((document, j) for j in range(k0, k1)), q0 - k0)
            for document, q0, q1, k0, k1 in zip(
                served.document.tolist(), served.q_start.tolist(), served.q_stop.tolist(), served.kv_start.tolist(),
                served.kv_stop.tolist(), strict=True)}
    for name, buffers in (("queries", queries), ("keys", keys)):
        users = Counter(token for buffer in buffers for token in buffer)
        for home, table in enumerate(tables):
            assert getattr(table, name).parts.tolist() == [users[token] for token in row_tokens(plan.layout, home)]


@settings(deadline=None)
@given(plans())
def test_tables_carry_each_token_once_to_every_server_that_reads_it(plan: Plan) -> None:
    check_against_brute_force(plan)


@settings(deadline=None, max_examples=40)
@given(long_plans())
def test_balanced_plans_of_long_documents_too(plan: Plan) -> None:
    check_against_brute_force(plan)


@settings(deadline=None)
@given(plans())
def test_what_tables_move_is_what_the_plan_counted(plan: Plan) -> None:
    moved = plan.traffic()
    tables = [build(plan, rank) for rank in range(plan.num_servers)]
    oracle = tokens_moved(plan.layout, plan.tasks, plan.num_servers)
    for side, expected, total in (("queries", oracle[0], moved.q_tokens), ("keys", oracle[1], moved.kv_tokens)):
        sent = np.array([getattr(table, side).send.tokens_per_peer(plan.num_servers) for table in tables])
        received = np.array([getattr(table, side).receive.tokens_per_peer(plan.num_servers) for table in tables])
        np.testing.assert_array_equal(sent, expected)
        np.testing.assert_array_equal(received, expected.T)
        assert sent.sum() == total.sum()
        assert [getattr(table, side).receive.num_tokens for table in tables] == expected.sum(axis=0).tolist()


def test_a_shared_prefix_is_stored_once() -> None:
    """Eight shards of one document on one server: its keys stand there once, not once per shard."""
    layout = layout_from_rows([[1024], [1024]])
    whole = tasks_at_home(layout)
    shards = np.arange(8) * 128
    tasks = TaskTable(
        document=np.append(np.zeros(8), 1), q_start=np.append(shards, 0), q_stop=np.append(shards + 128, 1024),
        kv_start=np.zeros(9), kv_stop=np.append(shards + 128, 1024), home=np.append(np.zeros(8), 1),
        server=np.ones(9))
    plan = replace(balance(layout, MODEL), tasks=tasks)
    plan.validate()
    table = build(plan, 1)
    assert table.keys.buffer_tokens == 2048 == whole.kv_len.sum()
    assert table.keys.receive.num_tokens == 1024
    assert table.q_end.max() == 2048


def test_a_rank_that_keeps_its_row_copies_nothing() -> None:
    table = build(balance(layout_from_rows([[300, 20], [300, 20]]), MODEL), 0)
    assert table.queries.is_row and table.keys.is_row
    assert len(table.queries.send.peer) == 0 == len(table.keys.send.peer)


def test_a_rank_without_tokens_or_tasks_has_empty_tables() -> None:
    table = build(misplaced_plan(layout_from_rows([[5], [7]]), 4, MODEL), 3)
    assert table.row_tokens == 0 == table.queries.buffer_tokens == table.keys.buffer_tokens
    assert len(table.q_begin) == 0


@pytest.mark.parametrize("server", [0, 1, 2])
def test_tasks_without_keys_are_nobodys_work(server: int) -> None:
    """Such rows prove valid, since they cover nothing; they must not reach a kernel."""
    plan = misplaced_plan(layout_from_rows([[10], [6]]), 3, MODEL)
    nothing = (0, 0, 10, 0, 0, 0, server)                        # queries [0, 10) of document 0 against no key
    columns = [np.append(getattr(plan.tasks, name), value)
               for name, value in zip(TaskTable.__slots__, nothing, strict=True)]
    with_empty = replace(plan, tasks=TaskTable(*columns))
    with_empty.validate()
    for rank in range(3):
        table, expected = build(with_empty, rank), build(plan, rank)
        assert table.queries.buffer_tokens == expected.queries.buffer_tokens
        assert table.q_begin.tolist() == expected.q_begin.tolist()
        assert table.k_end.tolist() == expected.k_end.tolist()


def test_tables_are_frozen() -> None:
    table = build(balance(pack([64, 64], ranks=2), MODEL), 0)
    with pytest.raises(ValueError, match="read-only"):
        table.q_begin[0] = 1
    with pytest.raises(ValueError, match="read-only"):
        table.keys.parts[0] = 1


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_outside_the_pool_is_named(rank: int) -> None:
    with pytest.raises(ValueError, match=f"rank is {rank} but the plan has 2 servers; use 0 to 1"):
        build(balance(pack([64, 64], ranks=2), MODEL), rank)


@settings(deadline=None)
@given(plans())
def test_whether_anything_travels_is_known_without_counting(plan: Plan) -> None:
    """A document on several ranks always moves something: its later queries read keys of another rank."""
    queries, keys = tokens_moved(plan.layout, plan.tasks, plan.num_servers)
    assert travels(plan) == bool(queries.sum() + keys.sum())


def test_a_plan_at_home_does_not_travel_and_keys_alone_do() -> None:
    layout = layout_from_rows([[300], [200, 100]])
    home = Plan(layout, tasks_at_home(layout), np.ones(2), 0.0, MODEL)
    assert not travels(home)
    spread = pack([400, 200], ranks=2)
    assert travels(Plan(spread, tasks_at_home(spread), np.ones(2), 0.0, MODEL))
