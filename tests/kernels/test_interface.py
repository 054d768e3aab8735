"""Tasks keep their meaning when trimmed and cut, bad ones are refused by name, and partial attention is merged."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distca.kernels.interface import (
    Scores,
    TaskRows,
    causal_and_full,
    check_inputs,
    concatenate,
    joined,
    merge,
    rectangles_and_squares,
    visible,
)
from tests.support.attention import task_rows

NUM_TOKENS = 12


def pairs(rows: TaskRows, window: int | None = None) -> np.ndarray:
    """How often each (query, key) pair is named, by the rule itself."""
    count = np.zeros((NUM_TOKENS, NUM_TOKENS), dtype=int)
    for q_begin, q_end, k_begin, k_end, q_offset in zip(
        rows.q_begin, rows.q_end, rows.k_begin, rows.k_end, rows.q_offset, strict=True
    ):
        for q in range(q_begin, q_end):
            for k in range(k_begin, k_end):
                q_position, k_position = q_offset + q - q_begin, k - k_begin
                if k_position <= q_position and (window is None or k_position > q_position - window):
                    count[q, k] += 1
    return count


@st.composite
def any_rows(draw: st.DrawFn) -> TaskRows:
    def span() -> tuple[int, int]:
        begin = draw(st.integers(0, NUM_TOKENS))
        return begin, draw(st.integers(begin, NUM_TOKENS))

    spans = [(*span(), *span(), draw(st.integers(-14, 14))) for _ in range(draw(st.integers(0, 4)))]
    return TaskRows(*np.array(spans, dtype=np.int64).reshape(-1, 5).T)


@given(rows=any_rows(), window=st.none() | st.integers(1, 14))
@settings(max_examples=200, deadline=None)
def test_visible_keeps_every_pair_and_no_blank_query(rows: TaskRows, window: int | None) -> None:
    trimmed = visible(rows, window)
    np.testing.assert_array_equal(pairs(trimmed, window), pairs(rows, window))
    for i in range(len(trimmed)):
        one = pairs(trimmed.take(np.array([i])), window)
        assert one[trimmed.q_begin[i] : trimmed.q_end[i]].any(axis=1).all()
        assert one[:, trimmed.k_begin[i] : trimmed.k_end[i]].any(axis=0).all()


@given(rows=any_rows())
@settings(max_examples=200, deadline=None)
def test_decomposition_names_the_same_pairs(rows: TaskRows) -> None:
    causal, full = causal_and_full(visible(rows))
    np.testing.assert_array_equal(causal.q_offset, causal.k_len - causal.q_len)
    assert (full.q_offset >= full.k_len - 1).all()
    np.testing.assert_array_equal(pairs(concatenate(causal, full)), pairs(rows))
    rectangles, squares = rectangles_and_squares(causal)
    assert (rectangles.q_offset >= rectangles.k_len - 1).all()
    np.testing.assert_array_equal(squares.q_len, squares.k_len)
    np.testing.assert_array_equal(squares.q_offset, np.zeros(len(squares)))
    np.testing.assert_array_equal(pairs(concatenate(rectangles, squares, full)), pairs(rows))


@given(rows=any_rows(), window=st.none() | st.integers(1, 14))
@settings(max_examples=300, deadline=None)
def test_joined_rows_name_the_same_pairs(rows: TaskRows, window: int | None) -> None:
    inside = visible(rows, window)
    np.testing.assert_array_equal(pairs(joined(inside, window), window), pairs(rows, window))


def test_shards_of_one_slice_and_bands_are_joined() -> None:
    shards = TaskRows.aligned([0, 4, 7], [4, 7, 9], [2, 2, 2], [6, 9, 11])
    whole = joined(shards)
    assert (len(whole), whole.q_end[0], whole.k_end[0]) == (1, 9, 11)
    np.testing.assert_array_equal(pairs(whole), pairs(shards))
    band = task_rows([0, 3], [3, 5], [1, 1], [4, 4], [6, 9])
    assert len(joined(band)) == 1
    apart = task_rows([0, 4], [3, 5], [1, 1], [4, 4], [6, 10])
    assert len(joined(apart)) == 2


def test_documents_attend_inside_themselves() -> None:
    expected = np.zeros((NUM_TOKENS, NUM_TOKENS), dtype=int)
    expected[:3, :3] = np.tril(np.ones((3, 3), dtype=int))
    expected[3:12, 3:12] = np.tril(np.ones((9, 9), dtype=int))
    np.testing.assert_array_equal(pairs(TaskRows.documents([3, 0, 9])), expected)


def test_columns_are_frozen_copies() -> None:
    begin = np.zeros(1, dtype=np.int64)
    rows = TaskRows(begin, *(np.array([x]) for x in (1, 0, 1, 0)))
    begin[0] = 5
    assert rows.q_begin[0] == 0
    with pytest.raises(ValueError, match="read-only"):
        rows.q_begin[0] = 1


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (([0], [1], [0], [1], [0, 0]), "q_offset.: 2"),
        (([3], [1], [0], [1], [0]), "row 0 has q_begin=3, q_end=1"),
        (([0], [1], [-1], [1], [0]), "row 0 has k_begin=-1"),
        (([[0]], [1], [0], [1], [0]), "q_begin has shape"),
    ],
)
def test_bad_rows_are_named(columns: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TaskRows(*columns)


@pytest.mark.parametrize("window", [0, -3])
def test_bad_window_is_named(window: int) -> None:
    with pytest.raises(ValueError, match=f"window={window}"):
        Scores(window=window)


def test_bad_tensors_are_named() -> None:
    rows = TaskRows.documents([4])
    q, k = torch.zeros(4, 4, 8), torch.zeros(4, 2, 8)
    check_inputs(q, k, k, rows)
    for bad, message in [
        ((q[0], k, k), "q has shape"),
        ((q, k, k[:3]), "v \\(3, 2, 8\\)"),
        ((q[:, :3], k, k), "3 heads and k, v have 2"),
        ((q[..., :4], k, k), r"q has shape \(4, 4, 4\), k \(4, 2, 8\)"),
        ((q, k.double(), k), "torch.float64"),
        ((q, k.to("meta"), k), "meta"),
        ((q[:3], k, k), "q_end=4 but q holds 3"),
        ((q, k[:3], k[:3]), "k_end=4 but k holds 3"),
    ]:
        with pytest.raises(ValueError, match=message):
            check_inputs(*bad, rows)


def test_merge_with_nothing_is_exact() -> None:
    """Bit for bit: exp(-inf) is 0 and exp(0) is 1, so that x is added to 0 and multiplied by 1."""
    out, lse = torch.randn(5, 2, 8), torch.randn(5, 2)
    nothing = torch.zeros_like(out), torch.full_like(lse, -torch.inf)
    for merged in (merge(out, lse, *nothing), merge(*nothing, out, lse)):
        assert torch.equal(merged[0], out)
        assert torch.equal(merged[1], lse)
    assert torch.equal(merge(*nothing, *nothing)[0], nothing[0])
    assert torch.equal(merge(*nothing, *nothing)[1], nothing[1])


def test_merge_keeps_very_different_scores_finite() -> None:
    out, lse = torch.ones(1, 1, 4), torch.tensor([[1e4]])
    merged, total = merge(out, lse, -out, -lse)
    assert torch.equal(merged, out)                              # exp(-2e4) is 0
    assert torch.equal(total, lse)
