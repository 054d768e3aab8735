"""Documents over ranks by nothing but positions: exact in float64 on real ranks, and refused by all ranks at once."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

import distca
from distca.integrations.document_lengths import RowSlices, from_arguments, from_positions
from distca.integrations.row_exchange import join_slices, spans
from distca.kernels import dense_attention
from distca.runtime.transport import Transport
from tests.support.processes import run_processes

HEADS = (4, 2, 2)  # of q, k and v, 16 wide

TWO = {
    "one over all": ([1024], [512, 512]),
    "ends at a rank's end": ([100, 60], [100, 60]),
    "one before it": ([99, 61], [100, 60]),
    "one after it": ([101, 59], [100, 60]),
    "short ones beside": ([3, 1, 200, 1, 5], [80, 130]),
    "a token of it here": ([130], [129, 1]),
}
FOUR = {
    "one over all": ([1024], [256, 256, 256, 256]),
    "in the middle": ([20, 300, 20], [85, 85, 85, 85]),
    "a rank without tokens": ([150, 50], [100, 0, 70, 30]),
    "three of four": ([5, 1, 220, 7, 40], [73, 80, 80, 40]),
    "ends everywhere": ([50, 49, 51, 50], [50, 50, 50, 50]),
    "nothing at the ends": ([90, 10], [0, 60, 40, 0]),
}


def positions(lengths: list[int]) -> torch.Tensor:
    return torch.cat([torch.arange(length) for length in lengths])


def tensors(lengths: list[int], changed: int | None = None) -> list[torch.Tensor]:
    """q, k, v and the gradient of out for all tokens, as every rank draws them; `changed` names a changed document."""
    generator = torch.Generator().manual_seed(7)
    found = [torch.randn(sum(lengths), heads, 16, dtype=torch.float64, generator=generator) for heads in (*HEADS, 4)]
    if changed is not None:
        for x in found[:3]:
            x[sum(lengths[:changed])] += 1.0
    return found


def mine(rank: int, tokens: list[int]) -> slice:
    return slice(sum(tokens[:rank]), sum(tokens[:rank + 1]))


def check_exact(rank: int, lengths: list[int], tokens: list[int], window: int | None, rows: int) -> None:
    """Out and gradients of this rank's tokens, twice over two layers, against dense attention over everything."""
    here = mine(rank, tokens)
    *whole, dout = tensors(lengths)
    leaves = [x.clone().requires_grad_() for x in whole]
    expected = [dense_attention(leaves[0], leaves[1], leaves[2], lengths, None, window)]
    expected += torch.autograd.grad(expected[0], leaves, dout)
    attention = distca.PackedAttention(tolerance=0.02)
    own = [x[here].clone().requires_grad_() for x in whole]
    position = positions(lengths)[here]
    shape = (rows, -1) if rows > 1 else (-1,)
    position = position.view(shape)
    for _ in range(2):                                           # layers of a forward share positions, hence the plan
        q, k, v = (x.view(*shape, *x.shape[1:]) for x in own)
        out = attention(q, k, v, position, window=window).view(own[0].shape)
    assert attention.latest is not None and attention.latest.layout.lengths.tolist() == lengths
    if window is None and len(set(tokens)) == 1 and lengths == [sum(tokens)]:
        work = attention.latest.work()
        assert work.max() <= 1.2 * work.mean() and attention.latest.summary().work_max_over_mean_at_home > 1.4
    for actual, dense in zip([out, *torch.autograd.grad(out, own, dout[here])], expected, strict=True):
        torch.testing.assert_close(actual, dense[here], rtol=1e-10, atol=1e-10)


def check_unchanged(rank: int, lengths: list[int], tokens: list[int]) -> None:
    """A changed first token of a document changes every later token of it and no bit of another.

    Attention multiplies a document's queries with its own keys alone, in shapes that its lengths decide.
    """
    here = mine(rank, tokens)
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[here]
    attention = distca.PackedAttention()
    position = positions(lengths)[here]
    q, k, v, _ = (x[here] for x in tensors(lengths))
    before = attention(q, k, v, position)
    for changed in range(len(lengths)):
        q, k, v, _ = (x[here] for x in tensors(lengths, changed))
        moved = (attention(q, k, v, position) != before).flatten(1).any(1)
        assert torch.equal(moved, document == changed)


def every_case(transport: Transport, cases: dict[str, tuple[list[int], list[int]]]) -> bool:
    for name, (lengths, tokens) in cases.items():
        try:
            check_exact(transport.rank, lengths, tokens, None, 1)
            check_unchanged(transport.rank, lengths, tokens)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error
    lengths, tokens = next(iter(cases.values()))
    for window in (1, 40, 10_000):
        check_exact(transport.rank, lengths, tokens, window, 1)
    check_exact(transport.rank, lengths, tokens, None, 2)        # two rows a rank, each continuing the one before
    check_shuffled(transport.rank, transport.size)
    return True


def check_shuffled(rank: int, ranks: int) -> None:
    """Numbered documents whose parts lie on ranks in reverse order."""
    lengths = [40 * ranks, 7 * ranks]
    q, k, v, _ = tensors(lengths)
    place = ranks - 1 - rank                                     # the last part on the first rank
    index = torch.cat([torch.arange(40 * place, 40 * place + 40), torch.arange(7 * place, 7 * place + 7) + 40 * ranks])
    document = torch.repeat_interleave(torch.tensor([12, 5]), torch.tensor([40, 7]))
    attention = distca.PackedAttention()
    actual = attention(q[index], k[index], v[index], positions(lengths)[index], document_ids=document)
    torch.testing.assert_close(actual, dense_attention(q, k, v, lengths)[index], rtol=1e-10, atol=1e-10)


@pytest.mark.multiprocess
@pytest.mark.parametrize(("ranks", "cases"), [(2, TWO), (4, FOUR)])
def test_documents_over_ranks_are_exact(ranks: int, cases: dict[str, tuple[list[int], list[int]]]) -> None:
    outcomes = run_processes(ranks, every_case, cases, timeout_seconds=60, deadline_seconds=120)
    assert [(outcome.error, outcome.value) for outcome in outcomes] == [(None, True)] * ranks


WRONG = {
    "rank 0 begins at position 3 and no rank before it has tokens": [[3, 4], [0, 1]],
    "rank 1 begins at position 3 but rank 0, before it, ended at position 1; begin at position 2": [[0, 1], [3, 4]],
    "rank 1 has position 9 behind position 1; position_ids rise by one": [[0, 1], [0, 1, 9]],
    "rank 1 has position 1 behind position 1": [[0, 1], [0, 1, 1]],
    "rank 0 has a token at position -1": [[-1, 0], [0]],
}


def refused(transport: Transport) -> list[str]:
    """What each wrong batch is told, and that a right one runs right after."""
    attention, told = distca.PackedAttention(), []
    for rows in WRONG.values():
        position = torch.tensor(rows[transport.rank])
        q, k, v = (torch.randn(len(position), heads, 16) for heads in HEADS)
        try:
            attention(q, k, v, position)
        except ValueError as error:
            told.append(str(error))
    ids = [torch.zeros(1, dtype=torch.int64), None][transport.rank]
    for document_ids in (ids, torch.zeros(1, dtype=torch.int64)):
        q, k, v = (torch.randn(1, heads, 16) for heads in HEADS)
        try:
            attention(q, k, v, torch.tensor([0]), document_ids=document_ids)
        except ValueError as error:
            told.append(str(error))
    q, k, v = (torch.randn(1, heads, 16) for heads in HEADS)
    attention(q, k, v, torch.tensor([transport.rank]))
    dist.barrier()
    return told


@pytest.mark.multiprocess
def test_what_continues_nothing_is_refused_by_every_rank_in_the_same_line() -> None:
    first, second = run_processes(2, refused, timeout_seconds=60, deadline_seconds=90)
    assert first.error is None and first.value == second.value
    expected = [*WRONG, "rank 0 gives document_ids and rank 1 none", "rank 1 begins document 0 at position 0 again"]
    assert len(first.value) == len(expected)
    for line, part in zip(first.value, expected, strict=True):
        assert part in line and "\n" not in line


def test_at_home_nothing_may_continue() -> None:
    with pytest.raises(ValueError, match=r"position_ids begin with 5.*does not communicate"):
        distca.PackedAttention().at_home(RowSlices((5,), (3,)))
    q, k, v = (torch.randn(3, heads, 16) for heads in HEADS)
    with pytest.raises(ValueError, match="a position for each token"):
        distca.PackedAttention()(q, k, v, torch.arange(4))
    with pytest.raises(ValueError, match="position_ids has shape"):
        from_positions(torch.arange(3).float())
    with pytest.raises(ValueError, match=r"model is not given"):
        distca.PackedAttention().begin([3])


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.lists(st.integers(0, 8), max_size=5), st.booleans())
def test_any_cuts_give_back_the_documents(lengths: list[int], cuts: list[int], numbered: bool) -> None:
    """A stream of documents cut anywhere into ranks, some of them empty; numbered, ranks may come in any order."""
    position = positions(lengths)
    document = torch.repeat_interleave(torch.arange(len(lengths)) + 3, torch.tensor(lengths))
    edges = np.clip(np.cumsum(cuts), 0, len(position))
    rows = [from_positions(position[a:b], document[a:b] if numbered else None)
            for a, b in zip([0, *edges], [*edges, len(position)], strict=True)]
    layout = join_slices(rows[::-1] if numbered else rows)
    layout.validate()
    assert sorted(layout.lengths.tolist()) == sorted(lengths) and layout.num_tokens == sum(lengths)
    if not numbered:
        assert layout.lengths.tolist() == lengths
        assert spans(layout) == any(len(set(np.searchsorted(edges, np.arange(end - length, end), side="right"))) > 1
                                    for length, end in zip(lengths, np.cumsum(lengths), strict=True))


def test_padding_that_positions_count_begins_a_document_and_a_later_position_does_not() -> None:
    position = torch.arange(6).expand(2, 6)
    left = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    assert from_arguments({"position_ids": position}, left, (2, 6))[0] == RowSlices((0, 0), (4, 6))
    assert from_arguments({"position_ids": position + 4}, left, (2, 6))[0] == RowSlices((6, 4), (4, 6))
    edges = torch.tensor([0, 2, 6])
    continued = torch.tensor([[7, 8, 0, 1, 2, 3]])
    for positions, start in ((position[:1], 0), (continued, 7)):
        slices, _ = from_arguments({"position_ids": positions, "cu_seq_lens_q": edges}, None, (1, 6))
        assert slices == RowSlices((start, 0), (2, 4))
