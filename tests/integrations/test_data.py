"""Rows of documents over ranks: every token once, equal rows, labels across cuts, and what is wrong by name."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distca.data import Collator, rows
from distca.integrations.document_lengths import from_positions
from distca.integrations.row_exchange import join_slices
from distca.runtime.transport import Transport
from distca.workload.documents import IGNORED
from tests.support.processes import run_processes


def numbered(lengths: list[int]) -> list[list[int]]:
    """Tokens that say which they are: document and position."""
    return [[1000 * document + position for position in range(length)] for document, length in enumerate(lengths)]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 400), min_size=1, max_size=6), st.integers(1, 5), st.sampled_from(["given", "balanced"]))
def test_rows_hold_every_token_once_with_the_label_that_follows(lengths: list[int], ranks: int, placement: str) -> None:
    made = [rows(numbered(lengths), rank, ranks, placement=placement) for rank in range(ranks)]
    tokens = [len(row.input_ids) for row in made]
    assert max(tokens) - min(tokens) <= (1 if placement == "given" or sum(lengths) < ranks else ranks - 1)
    seen = torch.cat([row.input_ids for row in made])
    assert sorted(seen.tolist()) == sorted(token for document in numbered(lengths) for token in document)
    assert torch.equal(torch.cat([row.position_ids for row in made]), seen % 1000)
    expected = [IGNORED if token % 1000 == lengths[token // 1000] - 1 else token + 1 for token in seen.tolist()]
    assert torch.cat([row.shift_labels for row in made]).tolist() == expected
    assert {row.num_items for row in made} == {sum(lengths) - len(lengths)}
    layout = join_slices([from_positions(row.position_ids, row.document_ids) for row in made])  # as attention reads it
    layout.validate()
    assert sorted(layout.lengths.tolist()) == sorted(lengths)


def test_a_balanced_long_document_needs_fewer_moves_than_a_given_one() -> None:
    lengths = [4096, *[64] * 64]
    for placement, most in (("given", 4.0), ("balanced", 1.1)):
        made = [rows(numbered(lengths), rank, 4, placement=placement) for rank in range(4)]
        work = np.array([int((row.position_ids + 1).sum()) for row in made])    # causal pairs
        assert (work.max() / work.mean() < 1.1) == (most == 1.1)


def test_labels_that_do_not_count_and_packed_features() -> None:
    feature = {"input_ids": [1, 2, 3, 4, 5], "seq_lengths": [2, 3], "completion_mask": [0, 1, 0, 0, 1]}
    batch = Collator()([feature, {"input_ids": [6, 7], "labels": [6, IGNORED]}])
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4, 5, 6, 7]]
    assert batch["position_ids"].tolist() == [[0, 1, 0, 1, 2, 0, 1]]
    assert batch["shift_labels"].tolist() == [[2, IGNORED, IGNORED, 5, IGNORED, IGNORED, IGNORED]]
    assert "document_ids" not in batch


def test_a_rank_without_tokens_has_one_of_padding() -> None:
    batch = rows([[5]], 0, 2).batch()
    assert batch["attention_mask"].tolist() == [[0]] and batch["shift_labels"].tolist() == [[IGNORED]]
    assert rows([[5]], 1, 2).batch()["input_ids"].tolist() == [[5]]


@pytest.mark.parametrize(("call", "message"), [
    (lambda: rows([[1]], 2, 2), "rank is 2 of 2 ranks"),
    (lambda: rows([[1]], 0, 1, placement="best"), "placement is 'best'; choose one of: given, balanced"),
    (lambda: rows([[1, 2]], 0, 1, labels=[[1]]), "labels have other lengths"),
    (lambda: rows([np.array([1.5])], 0, 1), r"documents\[0\] has shape \(1,\) and float64"),
    (lambda: rows([[]], 0, 1), r"documents\[0\]"),
    (lambda: Collator()([{"input_ids": [1, 2], "seq_lengths": [1]}]), "seq_lengths of 1"),
])
def test_what_is_wrong_is_named(call: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()  # type: ignore[operator]


def collated(transport: Transport, placement: str) -> list[list[int]]:
    drawn = [[{"input_ids": list(range(10, 17))}], []][transport.rank]
    batch = Collator(placement=placement)(drawn)
    return [batch[name][0].tolist() for name in ("input_ids", "position_ids", "shift_labels")]


@pytest.mark.multiprocess
def test_ranks_share_the_documents_that_one_of_them_drew() -> None:
    first, second = run_processes(2, collated, "given", timeout_seconds=60, deadline_seconds=90)
    assert (first.error, second.error) == (None, None)
    assert first.value == [[10, 11, 12], [0, 1, 2], [11, 12, 13]]
    assert second.value == [[13, 14, 15, 16], [3, 4, 5, 6], [14, 15, 16, IGNORED]]
