"""Bytes as a token-by-token count finds them: keys once per server, queries once per server, nothing from home."""

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from distca.models import MODELS
from distca.planning.tasks import TaskTable, tasks_at_home
from distca.planning.traffic import key_ranges, traffic, traffic_of_nics, two_hops_pay
from distca.workload.layout import Layout, layout_from_rows, layout_from_slices
from tests.support.plans import LAYOUT_KINDS, random_layout, tokens_moved

LLAMA = MODELS["llama3-8b"]
seeds = st.integers(0, 2**32)
layouts = st.builds(random_layout, seeds, st.sampled_from(LAYOUT_KINDS), st.integers(1, 6), st.integers(1, 400))


def random_tasks(layout: Layout, seed: int, num_servers: int) -> TaskTable:
    """Any queries against any keys on any server, overlapping at will: traffic must not need a sensible plan."""
    rng = np.random.default_rng(seed)
    owner = rng.integers(0, layout.num_slices, size=int(rng.integers(1, 12)))
    start, stop = layout.start[owner], layout.stop[owner]
    q_start = rng.integers(start, stop)
    q_stop = rng.integers(q_start + 1, stop + 1)
    kv_start = rng.integers(0, q_stop)
    kv_stop = rng.integers(kv_start + 1, q_stop + 1)
    return TaskTable(layout.document[owner], q_start, q_stop, kv_start, kv_stop, layout.rank[owner],
                     rng.integers(0, num_servers, size=len(owner)))


@settings(max_examples=150, deadline=None)
@given(layouts, seeds, st.integers(0, 3), st.sampled_from([1, 8, 32]))
def test_bytes_equal_a_count_of_tokens(layout: Layout, seed: int, dedicated: int, tp: int) -> None:
    num_servers = layout.num_ranks + dedicated
    tasks = random_tasks(layout, seed, num_servers)
    moved = traffic(layout, tasks, num_servers)
    queries, keys = tokens_moved(layout, tasks, num_servers)     # [home, server]
    expected = (queries * LLAMA.q_token_bytes(tp) + queries.T * LLAMA.out_token_bytes(tp)
                + keys * LLAMA.kv_token_bytes(tp))
    assert np.array_equal(moved.matrix_bytes(LLAMA, tp), expected)
    assert np.array_equal(moved.sent_bytes(LLAMA, tp), expected.sum(axis=1))
    assert np.array_equal(moved.received_bytes(LLAMA, tp), expected.sum(axis=0))
    assert moved.q_tokens.sum() == queries.sum()
    assert moved.kv_tokens.sum() == keys.sum()


@settings(max_examples=100, deadline=None)
@given(layouts, seeds)
def test_key_ranges_are_distinct_and_each_from_its_own_home(layout: Layout, seed: int) -> None:
    tasks = random_tasks(layout, seed, layout.num_ranks)
    ranges = key_ranges(layout, tasks)
    needed = {(server, document, key)
              for server, document, start, stop in zip(tasks.server.tolist(), tasks.document.tolist(),
                                                       tasks.kv_start.tolist(), tasks.kv_stop.tolist(), strict=True)
              for key in range(start, stop)}
    listed = [(server, document, key)
              for server, document, start, stop in zip(ranges.server.tolist(), ranges.document.tolist(),
                                                       ranges.start.tolist(), ranges.stop.tolist(), strict=True)
              for key in range(start, stop)]
    assert len(listed) == len(set(listed))
    assert set(listed) == needed
    for document, start, stop, home in zip(ranges.document, ranges.start, ranges.stop, ranges.home, strict=True):
        inside = (layout.document == document) & (layout.start <= start) & (stop <= layout.stop)
        assert layout.rank[inside].tolist() == [home]


def test_whole_documents_at_home_move_nothing() -> None:
    layout = layout_from_rows([[5, 7], [], [9]])
    moved = traffic(layout, tasks_at_home(layout), 3)
    assert moved.sent_bytes(LLAMA).sum() == 0
    assert moved.matrix_bytes(LLAMA).shape == (3, 3)


def test_shared_keys_and_queries_travel_once() -> None:
    """One document of 1,024 tokens, [0, 512) on rank 0 and [512, 1024) on rank 1; server 2 owns nothing."""
    def column(*values: int) -> np.ndarray:
        return np.array(values)

    layout = layout_from_slices(column(1024), column(0, 0), column(0, 512), column(512, 1024), column(0, 1), 2)
    tasks = TaskTable(
        document=column(0, 0, 0, 0), home=column(1, 1, 1, 1),
        q_start=column(512, 640, 512, 768), q_stop=column(640, 768, 640, 1024),
        kv_start=column(0, 0, 256, 0), kv_stop=column(256, 768, 640, 1024), server=column(2, 2, 2, 0))
    moved = traffic(layout, tasks, 3)
    # server 2 reads queries [512, 768) and keys [0, 768): 512 of rank 0 and 256 of rank 1
    # server 0 reads queries [768, 1024) and keys [0, 1024), of which it lacks rank 1's 512
    q, kv = 32 * 128 * 2, 2 * 8 * 128 * 2
    assert moved.matrix_bytes(LLAMA).tolist() == [
        [0, 256 * q, 512 * kv],                                  # rank 0 returns outputs to 1, sends keys to 2
        [256 * q + 512 * kv, 0, 256 * q + 256 * kv],
        [0, 256 * q, 0],
    ]


def test_two_hops_pay_where_one_rank_of_a_node_needs_most_keys() -> None:
    """No two of its ranks need the same keys, but through gateways they arrive on all NICs."""
    layout = layout_from_rows([[1024]] * 8)                      # node 1 serves the documents of node 0 too
    tasks, node = tasks_at_home(layout), np.arange(8) // 4
    spread = replace(tasks, server=np.array([4, 5, 6, 7, 4, 5, 6, 7]))
    alone = replace(tasks, server=np.array([4, 4, 4, 4, 4, 5, 6, 7]))
    assert not two_hops_pay(layout, spread, node, LLAMA) and two_hops_pay(layout, alone, node, LLAMA)
    outer = traffic_of_nics(layout, alone, node)
    assert outer.received_bytes(LLAMA)[4:].tolist() == [1024 * (LLAMA.q_token_bytes() + LLAMA.kv_token_bytes())] * 4
    assert outer.kv_tokens.sum() == 4 * 1024
