"""Balanced placement: equal tokens always, equal work where documents allow, and fewer bytes than planning alone."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distca.cost.attention_time import AttentionTime
from distca.cost.latency_table import analytic_table
from distca.models import MODELS
from distca.planning.balance import balance
from distca.planning.choose import work_of_documents
from distca.planning.plan import max_over_mean, server_work
from distca.planning.tasks import tasks_at_home
from distca.workload.documents import sample_lengths
from distca.workload.layout import Layout
from distca.workload.packing import pack
from tests.support.plans import random_lengths, random_speeds

LLAMA = MODELS["llama3-8b"]
TOKENS = 65_536


def home_work(layout: Layout, num_servers: int) -> np.ndarray:
    tasks = tasks_at_home(layout)
    return server_work(tasks, num_servers, None)


def bytes_of(layout: Layout, tolerance: float = 0.05) -> int:
    plan = balance(layout, LLAMA, tolerance=tolerance)
    plan.validate()
    summary = plan.summary()
    assert summary.work_max_over_mean <= 1 + tolerance + 1e-9
    return summary.bytes_total


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 8), st.integers(1, 3000), st.floats(0, 1), st.integers(0, 3))
def test_every_token_is_placed_and_rows_are_equal_on_any_pool(seed: int, ranks: int, tokens_per_rank: int,
                                                              tolerance: float, dedicated: int) -> None:
    lengths = random_lengths(seed, ranks * tokens_per_rank)
    layout = pack(lengths, ranks=ranks, placement="balanced", tolerance=tolerance,
                  speed=random_speeds(seed, ranks, dedicated))
    layout.validate()
    assert layout.tokens_per_rank().tolist() == [tokens_per_rank] * ranks
    assert layout.lengths.tolist() == lengths.tolist()


@pytest.mark.parametrize("seed", [1, 3, 4])
@pytest.mark.parametrize("ranks", [8, 32])
def test_sampled_documents_balance_at_home(ranks: int, seed: int) -> None:
    lengths = sample_lengths("prolong", ranks * TOKENS, seed=seed)
    given_layout = pack(lengths, ranks=ranks)
    layout = pack(lengths, ranks=ranks, placement="balanced", tolerance=0.05)
    layout.validate()
    assert layout.tokens_per_rank().tolist() == [TOKENS] * ranks
    assert max_over_mean(home_work(given_layout, ranks), np.ones(ranks)) > 2  # there is something to balance
    assert max_over_mean(home_work(layout, ranks), np.ones(ranks)) <= 1.055   # grid of 128 tokens, fixed rows
    assert bytes_of(layout) < 0.85 * bytes_of(given_layout)


@pytest.mark.parametrize("seed", range(4))
def test_heavy_samples_come_near_and_the_scheduler_finishes(seed: int) -> None:
    lengths = sample_lengths("prolong", 8 * TOKENS, seed=seed)
    layout = pack(lengths, ranks=8, placement="balanced")
    assert max_over_mean(home_work(layout, 8), np.ones(8)) <= 1.15
    assert bytes_of(layout) < bytes_of(pack(lengths, ranks=8))


def test_equal_documents_stay_whole() -> None:
    layout = pack([TOKENS] * 8, ranks=8, placement="balanced")
    assert (layout.ranks_per_document() == 1).all()
    assert bytes_of(layout) == 0


@pytest.mark.parametrize("lengths", [
    [2 * TOKENS] * 4,
    [4 * TOKENS] * 2,
    [4 * TOKENS, 2 * TOKENS, 2 * TOKENS],
    [7 * TOKENS] + [1024] * 64,
    [4 * TOKENS] + [1024] * 256,
])
def test_long_documents_alone_never_cost_more_than_left_in_order(lengths: list[int]) -> None:
    in_order, placed = pack(lengths, ranks=8), pack(lengths, ranks=8, placement="balanced")
    assert placed.tokens_per_rank().tolist() == [TOKENS] * 8
    assert (max_over_mean(home_work(placed, 8), np.ones(8))
            < 0.8 * max_over_mean(home_work(in_order, 8), np.ones(8)))
    assert bytes_of(placed) <= bytes_of(in_order)


def test_one_long_document_and_short_ones_need_no_query_to_move() -> None:
    lengths = [2 * TOKENS] + [512] * (6 * TOKENS // 512)
    layout = pack(lengths, ranks=8, placement="balanced")
    assert max_over_mean(home_work(layout, 8), np.ones(8)) <= 1.05
    slices = np.bincount(layout.document)[0]
    assert slices <= 9                                           # about one per rank's share of work
    starts = np.sort(layout.start[layout.document == 0])
    assert (starts % 128 == 0).all()


def test_faster_ranks_get_more_work() -> None:
    speed = np.array([2.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.5, 0.5])
    lengths = [2 * TOKENS] + [512] * (6 * TOKENS // 512)
    layout = pack(lengths, ranks=8, placement="balanced", speed=speed)
    assert max_over_mean(home_work(layout, 8), speed) <= 1.06
    assert layout.tokens_per_rank().tolist() == [TOKENS] * 8


def test_seconds_are_balanced_when_documents_come_with_their_seconds() -> None:
    cost = AttentionTime.of(analytic_table(LLAMA, 550e12), LLAMA)
    lengths = np.array([16_384] + [4] * 4096)                    # a short document takes a whole tile's time
    reached = []
    for work in (work_of_documents(cost), work_of_documents(None)):
        tasks = tasks_at_home(pack(lengths, ranks=4, placement="balanced", document_work=work))
        reached.append(max_over_mean(server_work(tasks, 4, cost), np.ones(4)))
    assert reached[0] <= 1.06 < reached[1]
