"""The Hopper kernel's tables, walked as the kernel walks them: every visible pair is computed as often as it is named.

Forward and backward, for rows that overlap in keys, in queries or in both; the order of the work items is checked
against its rule.
"""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distca.kernels.hopper import split
from distca.kernels.hopper.tables import (
    HEADER_INTS,
    TILE_KEYS,
    BackwardTables,
    ForwardTables,
    backward_tables,
    forward_tables,
)
from distca.kernels.interface import TaskRows, joined, visible
from tests.support import hopper_walk

NUM_Q, NUM_K = 260, 420
GROUPS = [1, 3, 4, 7, 8, 64]
Grid = tuple[int, int]  # KV heads, multiprocessors


def named(rows: TaskRows, window: int | None) -> np.ndarray:
    """How often the rows name each (query, key) pair, by the rule itself."""
    count = np.zeros((NUM_Q, NUM_K), dtype=int)
    for row in range(len(rows)):
        q0, q1, k0, k1 = (int(c[row]) for c in (rows.q_begin, rows.q_end, rows.k_begin, rows.k_end))
        distance = rows.q_offset[row] + np.arange(q1 - q0)[:, None] - np.arange(k1 - k0)
        count[q0:q1, k0:k1] += (distance >= 0) & (distance < (window or NUM_Q + NUM_K + 10**6))
    return count


def add_tile(count: np.ndarray, q: tuple[int, int], k: tuple[int, int], shift: int, window: int | None) -> None:
    """Count what one matrix tile computes of queries and keys [first, end), and refuse one that has nothing to do."""
    (q0, q1), (k0, k1) = q, k
    distance = np.arange(q0, q1)[:, None] + shift - np.arange(k0, k1)
    seen = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    assert seen.any(), "a visit without a visible pair"
    count[q0:q1, k0:k1] += seen


def both(
    rows: TaskRows, window: int | None, group: int, grid: Grid = (2, 4)
) -> tuple[ForwardTables, BackwardTables]:
    rows = joined(visible(rows, window), window)
    return forward_tables(rows, window, group, *grid), backward_tables(rows, window, group, *grid)


@contextmanager
def whole_tiles() -> Iterator[None]:
    """As if merging cost much; parts are in test_split.py."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(split, "MERGE_STEPS", 1e9)
        yield


def assert_walks_are_exact(rows: TaskRows, window: int | None, group: int, num_sms: int = 4) -> None:
    expected = named(rows, window)
    forward, backward = both(rows, window, group, (2, num_sms))
    count = np.zeros((2, NUM_Q, NUM_K), dtype=int)
    for head, q0, q_count, _, k_tile, k_lo, k_hi, shift in hopper_walk.walk_forward(
        forward.pack(), group, 2, window
    ):
        assert k_tile <= k_lo < k_hi <= k_tile + TILE_KEYS
        add_tile(count[head], (q0, q0 + q_count), (k_lo, k_hi), shift, window)
    np.testing.assert_array_equal(count, [expected, expected])

    count[:] = 0
    for head, k0, k_count, _, _, q0, q_count, k_begin, k_end, shift, _ in hopper_walk.walk_backward(
        backward.pack(), group, 2, window
    ):
        keys = max(k0, k_begin), min(k0 + k_count, k_end)
        add_tile(count[head], (q0, q0 + q_count), keys, shift, window)
    np.testing.assert_array_equal(count, [expected, expected])


def length_classes(lengths: list[int], total: int, grid: Grid) -> list[int]:
    """Sixteenths of what one multiprocessor computes when every KV head has that much work in all."""
    kv_heads, num_sms = grid
    return [length // (Fraction(kv_heads * total, num_sms) / 16) for length in lengths]


def assert_orders(rows: TaskRows, window: int | None, group: int, grid: Grid) -> None:
    """Every query, block and key has one place, and the long work comes first: by class, neighbours side by side."""
    expected = named(rows, window)
    with whole_tiles():
        forward, backward = both(rows, window, group, grid)
    queries, keys = np.asarray(expected.any(axis=1)), np.asarray(expected.any(axis=0))
    for entries, seen in (
        (forward.tiles, queries),
        (backward.blocks, queries),
        (backward.items, keys),                                  # gradients of keys are written once
    ):
        written = np.zeros(len(seen), dtype=np.int64)
        for first, count, *_ in entries.tolist():
            written[first : first + count] += 1
        np.testing.assert_array_equal(written, seen)
    tiles = forward.tiles.tolist()
    places = [(-length, segment_begin, -q_first) for length, (q_first, _, _, segment_begin) in zip(
        length_classes([tile[2] for tile in tiles], int(forward.tiles[:, 2].sum()), grid), tiles, strict=True)]
    assert places == sorted(places)                              # in a class by piece, a piece's last queries first
    regions = defaultdict(list)
    for k_first, k_count, num_blocks, row_begin in sorted(backward.items.tolist()):
        regions[row_begin].append((k_first, k_count, num_blocks))
    classes = length_classes(backward.items[:, 2].tolist(), int(backward.items[:, 2].sum()), grid)
    keyed = [(-length, k_first) for length, k_first in zip(classes, backward.items[:, 0].tolist(), strict=True)]
    assert keyed == sorted(keyed)                                # in a class by key, so by region
    for (row_begin, items), row_end in zip(
        sorted(regions.items()), [*sorted(regions), len(backward.tasks)][1:], strict=True
    ):
        region = backward.tasks[row_begin:row_end].tolist()
        assert items[0][0] == min(row[2] for row in region)
        assert items[-1][0] + items[-1][1] == max(row[3] for row in region)
        assert all(k_first + TILE_KEYS == following for (k_first, *_), (following, *_) in pairwise(items))
        assert all(a[3] >= b[3] for a, b in pairwise(region))
    for (_, end), (begin, _) in pairwise(sorted((items[0][0], items[-1][0] + items[-1][1])
                                                for items in regions.values())):
        assert end <= begin


def span(draw: st.DrawFn, size: int) -> tuple[int, int]:
    border = st.sampled_from([0, 1, 63, 64, 128, 129, 200, size]) | st.integers(0, size)
    begin, end = sorted((draw(border), draw(border)))
    return begin, end


def row(draw: st.DrawFn, queries: tuple[int, int]) -> tuple[int, int, int, int, int]:
    k_begin, k_end = span(draw, NUM_K)
    aligned = (k_end - k_begin) - (queries[1] - queries[0])
    offset = draw(st.just(aligned) | st.just(k_end - k_begin) | st.integers(-NUM_Q, NUM_K + 20))
    return *queries, k_begin, k_end, offset


def table(rows: list[tuple[int, int, int, int, int]]) -> TaskRows:
    return TaskRows(*np.array(rows, dtype=np.int64).reshape(-1, 5).T)


@st.composite
def any_rows(draw: st.DrawFn) -> TaskRows:
    """Rows that overlap as they like; some have the queries of another one, as the parts of a split task have."""
    queries = [span(draw, NUM_Q) for _ in range(draw(st.integers(1, 4)))]
    return table([row(draw, draw(st.sampled_from(queries))) for _ in range(draw(st.integers(1, 6)))])


@st.composite
def disjoint_rows(draw: st.DrawFn) -> TaskRows:
    cuts = sorted(draw(st.sets(st.integers(0, NUM_Q), min_size=2, max_size=7)))
    return table([row(draw, queries) for queries in draw(st.permutations(list(pairwise(cuts))))])


WINDOWS = st.none() | st.sampled_from([1, 2, 64, 128, 129, 1000]) | st.integers(1, 400)
GRIDS = st.tuples(st.sampled_from([1, 2, 8]), st.sampled_from([1, 4, 132]))


@given(rows=any_rows() | disjoint_rows(), window=WINDOWS, group=st.sampled_from(GROUPS), num_sms=st.integers(1, 4))
@settings(max_examples=120)
def test_every_pair_is_computed_as_often_as_it_is_named(
    rows: TaskRows, window: int | None, group: int, num_sms: int
) -> None:
    assert_walks_are_exact(rows, window, group, num_sms)


@given(rows=any_rows() | disjoint_rows(), window=WINDOWS, group=st.sampled_from(GROUPS), grid=GRIDS)
@settings(max_examples=150)
def test_queries_and_keys_have_one_place_and_long_work_comes_first(
    rows: TaskRows, window: int | None, group: int, grid: Grid
) -> None:
    assert_orders(rows, window, group, grid)


def test_only_a_class_of_lengths_comes_before_neighbours() -> None:
    """Documents of 10, 1 and 20 tiles: a sixteenth of all work is 16.6 steps forward and 33.25 blocks backward."""
    forward, backward = both(TaskRows.documents([1280, 128, 2560]), None, 1, (1, 1))
    steps = [*range(20, 16, -1), *range(10, 0, -1), 1, *range(16, 0, -1)]
    assert forward.tiles[:, 2].tolist() == steps
    assert backward.items[:, 2].tolist() == [2 * length for length in steps]
    with whole_tiles():
        forward, backward = both(TaskRows.documents([1280, 128, 2560]), None, 1, (1, 132))
    assert forward.tiles[:, 2].tolist() == sorted(steps, reverse=True)
    assert backward.items[:, 2].tolist() == sorted((2 * length for length in steps), reverse=True)


def test_a_long_tile_comes_before_a_short_one_of_its_region() -> None:
    """The second tile of keys has more blocks than the first."""
    rows = table([(0, 64, 0, 256, 300), (64, 192, 128, 256, 200), (192, 256, 256, 384, 200), (0, 256, 384, 420, 500)])
    _, backward = both(rows, None, 1, (1, 132))
    assert backward.items.tolist() == [[384, 36, 4, 3], [128, 128, 3, 0], [0, 128, 1, 0], [256, 128, 1, 2]]


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("group", GROUPS)
def test_a_prefix_that_many_shards_share(group: int, window: int | None) -> None:
    """One document in seven shards, last shards first; several tiles of keys, all in one region."""
    cuts = [160, 163, 200, 240, 300, 350, 352, 420]
    rows = table([(a - 160, b - 160, 0, b, a) for a, b in pairwise(cuts)][::-1])
    _, backward = both(rows, window, group)
    assert len(set(backward.items[:, 3])) == 1
    assert len(backward.items) == (4 if window is None else 3)
    assert_walks_are_exact(rows, window, group)
    for grid in ((1, 1), (8, 1), (1, 132)):
        assert_orders(rows, window, group, grid)


def test_a_short_last_block_does_not_reach_past_its_own_queries() -> None:
    """The first 70 queries of a causal row, cut off by a row that has the others too, see no key from 70 on."""
    rows = table([(0, 100, 40, 140, 0), (70, 100, 0, 60, 90), (100, 101, 118, 120, 1)])
    assert_walks_are_exact(rows, None, 1)
    assert_walks_are_exact(rows, 50, 1)


def test_keys_that_touch_are_regions_of_their_own() -> None:
    rows = table([(0, 30, 0, 30, 0), (30, 60, 30, 60, 0), (60, 90, 59, 90, 1)])
    _, backward = both(rows, None, 8)
    assert sorted(backward.items[:, :2].tolist()) == [[0, 30], [30, 60]]


def test_queries_are_cut_only_where_they_overlap() -> None:
    apart = table([(0, 100, 0, 100, 0), (100, 200, 0, 300, 250)])
    forward, backward = both(apart, None, 64)
    assert (len(forward.segments), len(backward.tasks), len(forward.tiles)) == (2, 2, 100)
    assert {tuple(tile) for tile in forward.tiles[:, :2]} == {(q, 2) for q in range(0, 200, 2)}
    forward, backward = both(table([(0, 100, 0, 100, 0), (41, 60, 200, 300, 250)]), None, 8)
    assert sorted(forward.tiles[:, :2].tolist()) == [
        [0, 16], [16, 16], [32, 9], [41, 16], [57, 3], [60, 16], [76, 16], [92, 8]
    ]
    bases = defaultdict(set)
    for q_begin, q_end, *_, block_base, _, _ in backward.tasks.tolist():
        bases[q_begin, q_end].add(block_base)
    assert bases == {(0, 41): {0}, (41, 60): {6}, (60, 100): {9}}


@pytest.mark.parametrize(("num_sms", "heads_outer"), [(1, True), (2, True), (3, False)])
def test_heads_take_turns_only_where_one_heads_work_is_short(num_sms: int, heads_outer: bool) -> None:
    """Four tiles of two steps each: 8 against 2 · num_sms · 2."""
    rows = table([(64 * i, 64 * i + 64, 0, 256, 300) for i in range(4)])
    forward = forward_tables(rows, None, 2, 3, num_sms)
    assert forward.tiles[:, 2].tolist() == [2] * 4
    assert forward.heads_outer is heads_outer
    heads = [head for head, *_ in hopper_walk.walk_forward(forward.pack(), 2, 3, None)]
    assert heads == ([0] * 8 + [1] * 8 + [2] * 8 if heads_outer else [0, 0, 1, 1, 2, 2] * 4)


@pytest.mark.parametrize(("num_sms", "heads_outer"), [(1, True), (2, True), (3, False), (12, False)])
def test_heads_come_one_after_another_backward_where_none_ends_late(num_sms: int, heads_outer: bool) -> None:
    """Four key tiles of two blocks and three heads: the last begins after 11 tiles and ends at 22 / num_sms + 2.

    The even share is 24 / num_sms, never less than one tile: 24, 12, 8 and 2 against 24, 13, 9.3 and 3.8. On two
    multiprocessors that is 8 % more, so there a head has ten times as many tiles and the last ends at 121 of 120.
    """
    count = 40 if num_sms == 2 else 4
    rows = table([(i, i + 1, 10 * i, 10 * i + 10, 300) for i in range(count)] * 2)
    backward = backward_tables(rows, None, 64, 3, num_sms)
    assert backward.items[:, 2].tolist() == [2] * count
    assert backward.heads_outer is heads_outer
    heads = [head for head, *_ in hopper_walk.walk_backward(backward.pack(), 64, 3, None)]
    n = 2 * count
    assert heads == ([0] * n + [1] * n + [2] * n if heads_outer else [0, 0, 1, 1, 2, 2] * count)


@given(rows=any_rows() | disjoint_rows(), window=WINDOWS, group=st.sampled_from(GROUPS))
@settings(max_examples=40)
def test_wider_tiles_of_keys_are_exact_too(rows: TaskRows, window: int | None, group: int) -> None:
    expected = named(rows, window)
    inside = joined(visible(rows, window), window)
    backward, count = backward_tables(inside, window, group, 2, 4, 192), np.zeros((2, NUM_Q, NUM_K), dtype=int)
    for head, k_first, k_count, _, _, q_first, q_count, k_begin, k_end, shift, _ in hopper_walk.walk_backward(
        backward.pack(), group, 2, window, 192
    ):
        keys = max(k_first, k_begin), min(k_first + k_count, k_end)
        add_tile(count[head], (q_first, q_first + q_count), keys, shift, window)
    np.testing.assert_array_equal(count, [expected, expected])


def test_no_rows_are_no_work() -> None:
    forward, backward = both(table([(0, 0, 0, 9, 3), (4, 9, 7, 7, 0)]), None, 4)
    for packed, offsets in (forward.pack(), backward.pack()):
        assert packed.tolist() == [0, packed[1], *[0] * (HEADER_INTS - 2)]
        assert offsets == (HEADER_INTS,) * len(offsets)


@given(rows=any_rows(), window=WINDOWS, group=st.sampled_from(GROUPS))
@settings(max_examples=40)
def test_sections_begin_at_multiples_of_16_bytes(rows: TaskRows, window: int | None, group: int) -> None:
    for tables in both(rows, window, group):
        packed, offsets = tables.pack()
        assert packed.dtype == np.int32 and offsets[0] == HEADER_INTS
        assert not any(at % 4 for at in offsets)


@pytest.mark.parametrize("group", [0, 65])
def test_groups_that_do_not_fit_a_block_are_refused(group: int) -> None:
    with pytest.raises(ValueError, match=f"group={group} .*give 1 to 64"):
        forward_tables(table([(0, 1, 0, 1, 0)]), None, group, 1, 132)


def test_positions_past_an_int32_are_refused() -> None:
    with pytest.raises(ValueError, match=f"{2**40}.*q_offset"):
        backward_tables(table([(0, 1, 0, 1, 2**40)]), None, 8, 1, 132)
