"""Baselines are ordinary plans: valid, counted by the same rules, and what their names say."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distca.baselines import at_home, head_tail_layout
from distca.models import MODELS
from distca.planning.balance import balance
from distca.planning.plan import max_over_mean
from distca.workload.layout import layout_from_rows
from distca.workload.packing import pack
from tests.support.plans import LAYOUT_KINDS, LayoutKind, random_layout, tokens_moved

MODEL = MODELS["llama3-8b"]
SEEDS = st.integers(0, 10_000)


@given(SEEDS, st.sampled_from(LAYOUT_KINDS), st.integers(1, 5), st.integers(1, 60))
def test_at_home_moves_no_query(seed: int, kind: LayoutKind, ranks: int, tokens: int) -> None:
    layout = random_layout(seed, kind, ranks, tokens)
    plan = at_home(layout, MODEL)
    plan.validate()
    assert plan.layout is layout
    assert plan.summary().num_moved == 0
    queries, _ = tokens_moved(layout, plan.tasks, ranks)
    assert queries.sum() == 0


def test_at_home_says_why_it_is_not_level() -> None:
    lopsided = at_home(layout_from_rows([[4096], [1024] * 4]), MODEL)
    assert lopsided.limit is not None and lopsided.summary().work_max_over_mean > 1.5
    assert at_home(layout_from_rows([[512], [512]]), MODEL).limit is None


@given(st.lists(st.lists(st.integers(1, 70), min_size=1, max_size=8), min_size=1, max_size=3), st.integers(1, 9))
def test_rows_of_a_group_differ_by_at_most_one_token(rows: list[list[int]], cp: int) -> None:
    plan = at_home(head_tail_layout(layout_from_rows(rows), cp), MODEL)
    plan.validate()
    tokens = plan.layout.tokens_per_rank().reshape(len(rows), cp)
    assert (tokens.max(axis=1) - tokens.min(axis=1) <= 1).all()
    assert tokens.sum(axis=1).tolist() == [sum(row) for row in rows]


@given(st.integers(1, 400), st.integers(1, 9))
def test_a_document_lies_in_head_and_tail_pairs(length: int, cp: int) -> None:
    """Ranks ascend over the heads and descend over the tails, and a pair's chunks differ by at most one token."""
    layout = head_tail_layout(layout_from_rows([[length]]), cp)
    order = layout.by_document()
    ranks = layout.rank[order]
    turn = int(ranks.argmax())
    assert (np.diff(ranks[:turn + 1]) > 0).all() and (np.diff(ranks[turn:]) < 0).all()
    chunk = (layout.stop - layout.start)
    for rank in range(cp - 1):
        pair = chunk[layout.rank == rank]
        if length >= 2 * cp:
            assert len(pair) == 2
        if len(pair) == 2:
            assert abs(int(pair[0] - pair[1])) <= 1
    assert (np.bincount(layout.rank, minlength=cp)[cp - 1:] <= 1).all()  # neighbours are one slice


def test_chunks_are_equal_where_lengths_divide() -> None:
    layout = head_tail_layout(layout_from_rows([[80, 16]]), cp=4)
    slices = list(zip(layout.rank.tolist(), layout.document.tolist(), layout.start.tolist(), layout.stop.tolist(),
                      strict=True))
    assert slices[:4] == [(0, 0, 0, 10), (0, 0, 70, 80), (0, 1, 0, 2), (0, 1, 14, 16)]
    assert slices[-2:] == [(3, 0, 30, 50), (3, 1, 6, 10)]


def test_one_token_documents_go_round_the_group() -> None:
    assert head_tail_layout(layout_from_rows([[1] * 12]), cp=4).tokens_per_rank().tolist() == [3, 3, 3, 3]


@pytest.mark.parametrize("cp", [2, 4, 8])
def test_work_is_level_and_keys_are_gathered(cp: int) -> None:
    lengths = [4096 * cp, 2048, 513, 77]
    plan = at_home(head_tail_layout(layout_from_rows([lengths]), cp), MODEL)
    assert max_over_mean(plan.work(), plan.speed) < 1.01
    queries, keys = tokens_moved(plan.layout, plan.tasks, cp)
    assert queries.sum() == 0
    tail = int(plan.layout.stop[plan.layout.rank == 0].max())
    assert tail == max(lengths)                                  # the first rank's tail sees a whole document
    elsewhere = sum(lengths) - int(plan.layout.tokens_per_rank()[0])
    assert elsewhere - 3 * len(lengths) <= keys[:, 0].sum() <= elsewhere
    assert keys.sum() * MODEL.kv_token_bytes() < plan.summary().bytes_all_gather


def test_short_documents_cost_it_bytes_that_a_plan_does_not_need() -> None:
    lengths = [256] * 64
    spread = at_home(head_tail_layout(layout_from_rows([lengths]), 8), MODEL).summary()
    planned = balance(pack(lengths, ranks=8), MODEL).summary()
    assert spread.bytes_total > 0 and planned.bytes_total == 0


def test_groups_stay_apart_unless_a_document_spans_them() -> None:
    apart = at_home(head_tail_layout(layout_from_rows([[300, 20], [320]]), 2), MODEL)
    _, keys = tokens_moved(apart.layout, apart.tasks, 4)
    assert keys[:2, 2:].sum() == 0 and keys[2:, :2].sum() == 0 and keys.sum() > 0
    spanning = at_home(head_tail_layout(pack([500, 140], ranks=2), 2), MODEL)
    spanning.validate()
    _, keys = tokens_moved(spanning.layout, spanning.tasks, 4)
    assert keys[:2, 2:].sum() > 0


def test_cp_of_one_is_attention_at_home() -> None:
    layout = pack([100, 60, 40], ranks=2)
    assert at_home(head_tail_layout(layout, 1), MODEL).layout.stop.tolist() == layout.stop.tolist()


@pytest.mark.parametrize("cp", [0, -2, 1.5, True, None])
def test_a_wrong_group_size_is_named(cp: Any) -> None:
    with pytest.raises(ValueError, match=f"cp is {cp!r}; give"):
        at_home(head_tail_layout(layout_from_rows([[10]]), cp), MODEL)
