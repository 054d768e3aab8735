"""Items dealt to workers, against dealing one by one: when the last is done, and that cutting them is worth it."""

import heapq

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distca.cost.dealing import MOST_PARTS, WORTH, cut, makespan


def dealt_one_by_one(items: list[float], workers: int) -> float:
    free = [0.0] * workers
    for one in items:
        heapq.heapreplace(free, free[0] + one)
    return max(free)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(0.01, 10.0), min_size=1, max_size=400), st.integers(1, 30))
def test_makespan_is_near_that_of_items_dealt_one_by_one(seconds: list[float], workers: int) -> None:
    items = np.array(seconds)
    (found,) = makespan(items[None], workers)
    even = items.sum() / workers
    assert found >= items[:workers].max() - 1e-12
    assert max(even, found) <= (even + items.max()) * (1 + 1e-9)
    assert max(even, found) == pytest.approx(dealt_one_by_one(seconds, workers), rel=0.35)
    if len(items) <= workers:
        assert found == items.max()


LENGTHS = st.lists(st.integers(1, 50), min_size=1, max_size=200) | st.lists(st.integers(200, 4_000), min_size=1,
                                                                            max_size=150)


@settings(max_examples=150, deadline=None)
@given(st.lists(LENGTHS, min_size=1, max_size=3), st.sampled_from([4, 30, 132]), st.none() | st.integers(0, 300))
def test_cutting_is_worth_it_and_stays_in_its_room(rows: list[list[int]], workers: int, most: int | None) -> None:
    items = np.zeros((len(rows), max(map(len, rows))))
    for row, lengths in zip(items, rows, strict=True):
        row[:len(lengths)] = lengths
    parts, ends = cut(items, workers, 8.0, most)
    for lengths, count, end in zip(rows, parts, ends, strict=True):
        number = count[:len(lengths)]
        assert (number >= 1).all() and (count[len(lengths):] == 1).all()
        assert number[number > 1].sum() <= (MOST_PARTS * workers if most is None else most)
        assert (np.array(lengths)[number > 1] / number[number > 1] >= 4.0).all()  # half of what merging costs
        even = sum(lengths) / workers
        assert end >= max(even, max(np.array(lengths) / number)) * (1 - 1e-9)
        long_first = sorted((length / n for length, n in zip(lengths, number, strict=True) for _ in range(n)),
                            reverse=True)
        whole = dealt_one_by_one(sorted(lengths, reverse=True), workers)
        if (number > 1).any():
            assert dealt_one_by_one(long_first, workers) < whole
        assert end <= whole * 1.35 + 1e-9


@pytest.mark.parametrize(("num_items", "length"), [
    (1, 4_096), (3, 512), (20, 512), (50, 512), (64, 4_096), (100, 4_096), (140, 4_096), (192, 512), (300, 300),
])
def test_equal_items_end_near_their_even_share(num_items: int, length: int) -> None:
    """On 132 workers, and later by what merging costs, 8, and a part or two of 3.2 each."""
    parts, (end,) = cut(np.full((1, num_items), length), 132, 8.0)
    assert (parts > 1).all() and len(np.unique(parts)) == 1
    assert end - 8.0 - 3.2 * np.ceil(parts.sum() / 132) <= 1.1 * num_items * length / 132


@pytest.mark.parametrize(("num_items", "length"), [(1, 12), (125, 1_000), (132, 1_000), (262, 1_000), (5_000, 100)])
def test_what_would_gain_little_is_left_whole(num_items: int, length: int) -> None:
    parts, (end,) = cut(np.full((1, num_items), length), 132, 8.0)
    assert (parts == 1).all()
    assert end <= WORTH * max(num_items * length / 132, length)


def test_short_items_fill_the_gaps_of_long_ones() -> None:
    """Ten items as long as the even share beside much that is short: nothing is late."""
    parts, (end,) = cut(np.full((1, 10), 1_000), 132, 8.0, rest=122_000.0)
    assert (parts == 1).all() and end == pytest.approx(1_000)
    parts, _ = cut(np.full((1, 10), 1_000), 132, 8.0, rest=12_200.0)
    assert (parts > 1).all()
