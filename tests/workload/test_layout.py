"""Every token has one home, knows its document and position, and finds the token after it wherever that lies."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distca.workload.layout import Layout, layout_from_rows, layout_from_slices
from tests.support.plans import LAYOUT_KINDS, random_layout

layouts = st.builds(random_layout, st.integers(0, 2**32), st.sampled_from(LAYOUT_KINDS), st.integers(1, 6),
                    st.integers(1, 300))


def columns(*values: list[int]) -> list[np.ndarray]:
    return [np.array(column) for column in values]


def homes_of(layout: Layout) -> dict[tuple[int, int], tuple[int, int]]:
    """(document, position) -> (rank, index in the rank's row), token by token."""
    homes = {}
    filled = [0] * layout.num_ranks
    for document, start, stop, rank in zip(layout.document, layout.start, layout.stop, layout.rank, strict=True):
        for position in range(start, stop):
            assert (document, position) not in homes
            homes[int(document), position] = int(rank), filled[rank]
            filled[rank] += 1
    return homes


@settings(max_examples=60, deadline=None)
@given(layouts)
def test_tokens_know_their_document_position_and_successor(layout: Layout) -> None:
    layout.validate()
    homes = homes_of(layout)
    assert len(homes) == layout.num_tokens
    at_home = {home: token for token, home in homes.items()}
    seen = 0
    for rank in range(layout.num_ranks):
        tokens = layout.tokens(rank)
        assert len(tokens.document) == len(tokens.position) == len(tokens.next_rank) == len(tokens.next_index)
        for index in range(len(tokens.document)):
            document, position = int(tokens.document[index]), int(tokens.position[index])
            assert at_home[rank, index] == (document, position)
            follows = int(tokens.next_rank[index]), int(tokens.next_index[index])
            assert follows == homes.get((document, position + 1), (-1, -1))
            seen += 1
    assert seen == layout.num_tokens


@settings(max_examples=60, deadline=None)
@given(layouts)
def test_counts_agree_with_counting(layout: Layout) -> None:
    homes = homes_of(layout)
    rows = [sum(home[0] == rank for home in homes.values()) for rank in range(layout.num_ranks)]
    assert layout.tokens_per_rank().tolist() == rows
    ranks = [{home[0] for (owner, _), home in homes.items() if owner == document}
             for document in range(layout.num_documents)]
    assert layout.ranks_per_document().tolist() == [len(found) for found in ranks]
    first = [homes[int(document), int(start)][1]
             for document, start in zip(layout.document, layout.start, strict=True)]
    assert layout.row_offset().tolist() == first


def test_row_order_follows_the_order_given() -> None:
    lengths, document, start, stop, rank = columns([6, 3], [1, 0, 0, 0], [0, 4, 0, 2], [3, 6, 2, 4], [1, 0, 1, 0])
    layout = layout_from_slices(lengths, document, start, stop, rank, 3)
    layout.validate()
    assert layout.tokens(0).position.tolist() == [4, 5, 2, 3]
    assert layout.tokens(0).next_index.tolist() == [1, -1, 3, 0]
    assert layout.tokens(1).document.tolist() == [1, 1, 1, 0, 0]
    assert layout.tokens(1).next_rank.tolist() == [1, 1, -1, 1, 0]
    assert layout.tokens(1).next_index.tolist() == [1, 2, -1, 4, 2]
    assert len(layout.tokens(2).document) == 0


@pytest.mark.parametrize(
    ("document", "start", "stop", "rank", "complaint"),
    [
        ([0, 0, 1], [0, 6, 0], [5, 10, 4], [0, 1, 1], "document 0"),      # gap
        ([0, 0, 1], [0, 4, 0], [5, 10, 4], [0, 1, 1], "document 0"),      # overlap
        ([0, 0, 1], [1, 5, 0], [5, 10, 4], [0, 1, 1], "document 0"),      # late start
        ([0, 0, 1], [0, 5, 0], [5, 9, 4], [0, 1, 1], "document 0"),       # early stop
        ([0, 0, 1], [0, 5, 0], [5, 11, 4], [0, 1, 1], "document 0"),      # past the end
        ([0, 0, 1], [0, 0, 0], [10, 10, 4], [0, 1, 1], "document 0"),     # twice
        ([0, 0, 1, 1], [0, 5, 0, 0], [5, 10, 0, 4], [0, 1, 1, 1], "document 1"),  # an empty slice
        ([0, 0], [0, 5], [5, 10], [0, 1], "document 1"),                  # homeless
        ([0, 0, 1], [0, 5, 0], [5, 10, 4], [0, 1, 2], "rank 2"),          # no such rank
        ([0, 0, 1], [0, 5, 0], [5, 10, 4], [-1, 1, 1], "rank -1"),
        ([0, 0, 1], [0, 5, 0], [5, 10, 4], [1, 0, 0], "by rank"),         # not grouped
        ([0, 0, 1, 2], [0, 5, 0, 0], [5, 10, 4, 4], [0, 1, 1, 1], "document 2"),  # no such document
        ([-1, 0, 0], [0, 0, 5], [4, 5, 10], [0, 0, 1], "document -1"),
    ])
def test_validate_rejects_every_other_cover(document: list[int], start: list[int], stop: list[int], rank: list[int],
                                            complaint: str) -> None:
    lengths, *slices = columns([10, 4], document, start, stop, rank)
    layout = Layout(lengths, slices[0], slices[1], slices[2], slices[3], 2)
    with pytest.raises(ValueError, match=complaint):
        layout.validate()


@settings(max_examples=60, deadline=None)
@given(layouts, st.data())
def test_validate_rejects_any_shifted_bound(layout: Layout, data: st.DataObject) -> None:
    index = data.draw(st.integers(0, layout.num_slices - 1))
    shift = data.draw(st.sampled_from([-1, 1]))
    start, stop = layout.start.copy(), layout.stop.copy()
    (start if data.draw(st.booleans()) else stop)[index] += shift
    with pytest.raises(ValueError, match="document"):
        Layout(layout.lengths, layout.document, start, stop, layout.rank, layout.num_ranks).validate()


def test_columns_are_frozen() -> None:
    layout = layout_from_rows([[4]])
    with pytest.raises(ValueError, match="read-only"):
        layout.stop[0] = 3


@given(st.lists(st.lists(st.integers(1, 50), max_size=5), min_size=1, max_size=6))
def test_rows_keep_their_documents(rows: list[list[int]]) -> None:
    if not any(rows):
        with pytest.raises(ValueError, match=f"rows holds {len(rows)} ranks and no document; give"):
            layout_from_rows(rows)
        return
    layout = layout_from_rows(rows)
    layout.validate()
    assert layout.num_ranks == len(rows)
    assert layout.lengths.tolist() == [length for row in rows for length in row]
    assert layout.tokens_per_rank().tolist() == [sum(row) for row in rows]
    for rank, row in enumerate(rows):
        assert layout.tokens(rank).position.tolist() == [position for length in row for position in range(length)]


@pytest.mark.parametrize("bad", [0, -3, 1.5, True])
def test_rows_refuse_bad_lengths(bad: Any) -> None:
    with pytest.raises(ValueError, match=rf"rows\[1\] is {bad}; a document length is a whole number"):
        layout_from_rows([[4], [bad]])
