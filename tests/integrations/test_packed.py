"""Lengths travel once per batch, every rank plans the same, and attention over packed rows is exact on real ranks."""

import platform
from dataclasses import replace
from typing import Any

import pytest
import torch

from distca.cost.latency_table import analytic_table
from distca.integrations.document_lengths import whole_documents
from distca.integrations.packed import PackedAttention
from distca.integrations.row_exchange import RowTable
from distca.kernels import dense_attention
from distca.models import model_named
from distca.runtime.transport.c10d import C10dTransport
from tests.support.attention import dense_on_one, qkv_of, random_qkv
from tests.support.processes import run_processes

TINY = model_named("tiny")
TOKENS, HOSTS = 300, ["a", "a", "b", "b"]


def rank_batches(transport: C10dTransport, rows: list[list[int]], window: int | None) -> tuple[list[float], int, bool]:
    """Three batches with the same lengths; gives work per server, collectives of lengths and whether any task moved."""
    counted = []
    plain = RowTable._gather

    def gather(table: RowTable, *args: Any) -> list[list[int]]:
        counted.append(1)
        return plain(table, *args)

    pytest.MonkeyPatch().setattr(RowTable, "_gather", gather)
    attention = PackedAttention(model=TINY, tolerance=0.02)
    lengths = rows[transport.rank]
    begun = [attention.begin(lengths) for _ in range(3)]
    assert begun[0].plan is begun[1].plan is begun[2].plan is attention.latest
    generator = torch.Generator().manual_seed(transport.rank)
    *leaves, dout = (torch.randn(sum(lengths), heads, 16, dtype=torch.float64, generator=generator)
                     for heads in (4, 2, 2, 4))
    leaves = [x.requires_grad_() for x in leaves]
    out = attention.attend(*qkv_of(leaves), begun[0], window=window)
    actual = [out, *torch.autograd.grad(out, leaves, dout)]
    expected = [torch.empty_like(x) for x in actual]
    if lengths:
        expected[0] = dense_attention(*qkv_of(leaves), lengths, None, window)
        expected[1:] = torch.autograd.grad(expected[0], leaves, dout)
    for mine, dense in zip(actual, expected, strict=True):
        torch.testing.assert_close(mine, dense, rtol=1e-10, atol=1e-10)
    for _ in range(transport.rank):                              # unequal numbers of batches at home
        attention.attend(*qkv_of(leaves), attention.at_home(lengths))
    plan = begun[0].plan
    assert plan is not None
    tasks = plan.tasks
    return plan.work().tolist(), len(counted), bool((tasks.home != tasks.server).any())


@pytest.mark.multiprocess
@pytest.mark.parametrize(("rows", "window", "collectives"), [
    ([[900, 1, 1, 30], [5, 120], [7]], None, 3),
    ([[700], [], [1] * 300], None, 4),                           # an empty rank, and more documents than expected once
    ([[700, 3], [], [80, 80]], 50, 3),
])
def test_real_ranks_plan_alike_and_attend_exactly(rows: list[list[int]], window: int | None, collectives: int) -> None:
    outcomes = run_processes(3, rank_batches, rows, window)
    assert [outcome.error for outcome in outcomes] == [None] * 3
    assert outcomes[0].value == outcomes[1].value == outcomes[2].value
    assert outcomes[0].value[1:] == (collectives, True)


def wrong_lengths(transport: C10dTransport) -> None:
    PackedAttention(model=TINY).begin([5, -1] if transport.rank == 1 else [6])


@pytest.mark.multiprocess
def test_wrong_lengths_of_one_rank_end_all_of_them_at_once() -> None:
    outcomes = run_processes(2, wrong_lengths, timeout_seconds=60, deadline_seconds=90)
    assert all("UserError" in error and "-1" in error for error in [outcome.error or "" for outcome in outcomes])
    assert max(outcome.seconds for outcome in outcomes) < 60     # nobody waited for the group's timeout


def test_one_process_needs_no_group() -> None:
    attention = PackedAttention(model=TINY)
    batch = attention.begin([5, 9])
    assert batch.plan is not None and batch.plan.num_servers == 1 and batch.plan.layout.lengths.tolist() == [5, 9]
    q, k, v = (torch.randn(14, heads, 16, dtype=torch.float64) for heads in (4, 2, 2))
    torch.testing.assert_close(attention.attend(q, k, v, batch), dense_attention(q, k, v, [5, 9], None, None))


def test_values_may_be_narrower_and_tokens_in_rows() -> None:
    q, k, v = (torch.randn(14, heads, dim, dtype=torch.float64) for heads, dim in ((4, 16), (2, 16), (2, 12)))
    positions, expected = torch.tensor([*range(5), *range(9)]), dense_attention(q, k, v, [5, 9], None, None)
    torch.testing.assert_close(PackedAttention()(q, k, v, positions), expected)
    rows = [x.unflatten(0, (2, 7)) for x in (q, k, v)]
    out = PackedAttention()(rows[0], rows[1], rows[2], positions.view(2, 7))
    torch.testing.assert_close(out, expected.unflatten(0, (2, 7)))


def test_windows_shorter_than_a_document_stay_home() -> None:
    batch = PackedAttention(model=TINY).begin([5, 9])
    assert [batch.leaves_home(window) for window in (None, 9, 8)] == [True, True, False]
    assert not PackedAttention(model=TINY).at_home([5]).leaves_home(None)


def test_no_document_anywhere_is_a_batch_without_a_plan() -> None:
    attention = PackedAttention(model=TINY)
    batch = attention.begin([])
    empty = [torch.empty(0, heads, 16, requires_grad=True) for heads in (4, 2, 2)]
    sinks = torch.zeros(4, requires_grad=True)
    out = attention.attend(*qkv_of(empty), batch, sinks=sinks)
    out.sum().backward()
    assert batch.plan is None and out.shape == (0, 4, 16) and all(x.grad is not None for x in empty)
    assert sinks.grad is not None and not sinks.grad.any()


def test_a_tolerance_out_of_range_is_named() -> None:
    with pytest.raises(ValueError, match=r"tolerance is 3; give a number from 0 to 1"):
        PackedAttention(model=TINY, tolerance=3)


def test_with_a_table_gradients_have_a_plan_of_their_own() -> None:
    model = replace(model_named("llama3-8b"), num_layers=1)
    for state, apart in (("resend", True), ("keep", False)):
        attention = PackedAttention(model=model, cost=analytic_table(model, 550e12), state=state)
        batch = attention.begin([300, 212])
        assert (batch.backward is not None and batch.backward.backward) == apart
        assert attention.begin([300, 212]).backward is batch.backward


def packed_call(transport: C10dTransport, hosts: list[str], chosen: str) -> tuple[str, bool, float]:
    """One document over all ranks: the transport that carried it, whether the plan has nodes, and the error."""
    platform.node = lambda: hosts[transport.rank]
    attend = PackedAttention(transport=chosen)
    tensors = random_qkv(1, 4 * TOKENS)
    mine = slice(transport.rank * TOKENS, (transport.rank + 1) * TOKENS)
    leaves = [x[mine].clone().requires_grad_() for x in tensors[:3]]
    positions = torch.arange(4 * TOKENS)[mine]
    out = attend(leaves[0], leaves[1], leaves[2], positions)
    out.backward(tensors[3][mine])
    found = out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)
    expected = dense_on_one(*tensors, lengths=torch.tensor([4 * TOKENS]).numpy())
    error = max(float((got - want[mine]).abs().max()) for got, want in zip(found, expected, strict=True))
    assert attend.latest is not None and attend._pool is not None
    topology = attend.latest.topology
    return type(attend._pool.transport).__name__, topology is not None and bool(topology.levels()), error


@pytest.mark.multiprocess
@pytest.mark.parametrize(("hosts", "chosen", "expected"), [
    (HOSTS, "c10d", ("HierarchicalTransport", True)), (HOSTS, "flat", ("C10dTransport", False)),
    (["a"] * 4, "c10d", ("C10dTransport", False))])
def test_nodes_are_found_and_flat_is_forced(hosts: list[str], chosen: str, expected: tuple[str, bool]) -> None:
    for outcome in run_processes(4, packed_call, hosts, chosen):
        assert outcome.error is None
        name, has_levels, error = outcome.value
        assert (name, has_levels) == expected
        assert error < 1e-10


def test_plans_follow_the_speeds_that_were_set_last(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = (whole_documents([8192]), whole_documents([8192]))
    attention = PackedAttention(model=model_named("llama3-8b"), tolerance=0.02)
    monkeypatch.setattr(attention, "_exchange", lambda *_: rows)

    def share() -> float:
        plan = attention.begin(rows[0]).plan
        assert plan is not None
        plan.validate()
        work = plan.work()
        return float(work[1] / work.sum())

    assert share() == 0.5
    attention.speed = [1.0, 0.5]
    assert share() == pytest.approx(1 / 3, rel=0.021)
    attention.speed = None
    assert share() == 0.5
    attention.speed = [1.0]
    with pytest.raises(ValueError, match=r"speed has .* 2 ranks"):
        share()
