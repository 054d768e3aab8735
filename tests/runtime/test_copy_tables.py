"""Block tables cover every byte once and name every part of every token."""

import importlib.util
import logging
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distca.dispatch import RankTables, build
from distca.planning.balance import balance
from distca.planning.plan import Plan
from distca.runtime import prepared
from distca.runtime.copy_tables import chunks, intervals, merges, packing, sums, unpacking
from distca.runtime.exchange import Combine, Dispatch
from distca.spec import ModelShape
from distca.workload.layout import layout_from_rows
from tests.support import block_walk
from tests.support.plans import LAYOUT_KINDS, misplaced_plan, random_layout, scattered_plan

CPU = torch.device("cpu")
MODEL = ModelShape("tiny", 1, 32, 4, 2, 8, 64, 64)


@st.composite
def tables(draw: st.DrawFn) -> RankTables:
    """One rank's tables of a senseless plan."""
    plan = draw(plans())
    return build(plan, draw(st.integers(0, plan.num_servers - 1)))


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    seed, ranks = draw(st.integers(0, 100_000)), draw(st.integers(1, 4))
    layout = random_layout(seed, draw(st.sampled_from(LAYOUT_KINDS)), ranks, draw(st.integers(1, 30)))
    return scattered_plan(seed, layout, ranks + draw(st.integers(0, 2)), MODEL)


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 60)), max_size=8), st.integers(1, 16))
def test_chunks_cover_every_run_once_and_end_on_blocks(runs: list[tuple[int, int]], block: int) -> None:
    at, length = np.array(runs, dtype=np.int64).reshape(-1, 2).T
    run, begin, count = (column.numpy() for column in chunks(length, block, at, CPU))
    covered = [[i for r, b, c in zip(run, begin, count, strict=True) if r == which for i in range(b, b + c)]
               for which in range(len(at))]
    assert covered == [list(range(n)) for n in length]
    assert ((count > 0) & (count <= block)).all()
    assert all((at[r] + b) % block == 0 for r, b in zip(run, begin, strict=True) if b)


@settings(deadline=None)
@given(tables())
def test_intervals_name_every_part_of_every_token(tables: RankTables) -> None:
    for side in (tables.queries, tables.keys):
        of = intervals(side)
        runs = [*zip(side.local.row, side.local.length, strict=True),
                *zip(side.send.start, side.send.length, strict=True)]
        expected = [[(r, token - start) for r, (start, n) in enumerate(runs) if start <= token < start + n]
                    for token in range(tables.row_tokens)]
        named = [[(of.run[p], of.offset[p] + token) for p in range(of.first[s], of.first[s + 1])]
                 for s in range(len(of.begin)) for token in range(of.length[s])]
        assert named == expected and [len(parts) for parts in named] == side.parts.tolist()


@settings(deadline=None)
@given(tables(), st.sampled_from([(16, 32), (6, 4), (7, 5)]), st.sampled_from([16, 64, 4096]))
def test_copies_write_every_byte_once(tables: RankTables, sizes: tuple[int, int], block: int) -> None:
    exchange = Dispatch.of(tables, [("q", sizes[0]), ("k", sizes[1])], prepared.stamp_of(3, CPU))
    for copies, room in ((packing(exchange, CPU, block), {0: exchange.leaving.num_bytes}),
                         (unpacking(exchange, CPU, block), {0: tables.queries.buffer_tokens * sizes[0],
                                                        1: tables.keys.buffer_tokens * sizes[1]})):
        written = {target: np.zeros(size, dtype=int) for target, size in room.items()}
        for _, target, _, here, count in copies.table.tolist():
            assert 0 < count * copies.unit <= block
            assert (here + count) * copies.unit <= room[target]
            written[target][here * copies.unit:(here + count) * copies.unit] += 1
        assert all((times <= 1).all() for times in written.values())
        padding = [sum(-(tokens * size) % 16 for tokens in side.send.tokens_per_peer(tables.num_ranks).tolist())
                   for side, size in zip(exchange.sides, sizes, strict=True)]
        missing = sum(int((times == 0).sum()) for times in written.values())
        unneeded = sum(padding) if len(room) == 1 else sum(
            room[field] for field, side in enumerate(exchange.sides) if side.is_row)
        assert missing == unneeded


@settings(deadline=None)
@given(tables())
def test_what_stays_as_it_is_has_no_blocks(tables: RankTables) -> None:
    """So that exchanges may pass it through without looking at their tables."""
    fields = [("q", 16), ("k", 16)]
    going, coming = Dispatch.of(tables, fields), Combine.of(tables, fields)
    if going.passes_through:
        assert len(unpacking(going, CPU, 64).table) == 0
    if coming.passes_through:
        assert len(sums(coming, CPU, 64).table) == 0
    for one in (going, coming):
        assert (len(packing(one, CPU, 64).table) > 0) == (one.leaving.num_bytes > 0)


@settings(deadline=None)
@given(plans(), st.sampled_from([16, 64, 4096]), st.integers(0, 100))
def test_blocks_do_what_torch_does(plan: Plan, block: int, seed: int) -> None:
    """Played one after another: dispatch, gradients to the bit, and outputs to rounding."""
    generator = torch.Generator().manual_seed(seed)
    heads, kv_heads, dim = 4, 2, 3
    every = [build(plan, rank) for rank in range(plan.num_servers)]
    q, k, lse = (("q", 8 * heads * dim), ("k", 8 * kv_heads * dim), ("q", 8 * heads))
    shape = {q: (heads, dim), k: (kv_heads, dim), lse: (heads,)}

    def tensors(fields: list[tuple[str, int]], tokens: dict[str, int]) -> list[torch.Tensor]:
        return [torch.randn(tokens[one[0]], *shape[one], generator=generator, dtype=torch.float64) for one in fields]

    def wires(exchanges: list[Any], brought: list[list[torch.Tensor]]) -> list[torch.Tensor]:
        sent = []
        for exchange, own in zip(exchanges, brought, strict=True):
            wire = exchange.leaving.empty(CPU).zero_()
            block_walk.copy(packing(exchange, CPU, block), tuple(own), (wire,))
            sent.append(wire.split(exchange.leaving.splits))
        return [torch.cat([one[rank] for one in sent]) for rank in range(len(sent))]

    going = [Dispatch.of(one, [q, k, lse]) for one in every]
    rows = [tensors([q, k, lse], {"q": one.row_tokens, "k": one.key_row_tokens}) for one in every]
    for exchange, row, wire in zip(going, rows, wires(going, rows), strict=True):
        buffers = exchange.buffers(tuple(row))
        block_walk.copy(unpacking(exchange, CPU, block), (wire, *row), buffers)
        assert all(map(torch.equal, buffers, exchange.unpack(wire, tuple(row))))
    for fields, merged, close in (([q, k], None, 0.0), ([q, lse], heads, 1e-12)):
        coming = [Combine.of(one, fields, merged) for one in every]
        results = [tensors(fields, {"q": one.queries.buffer_tokens, "k": one.keys.buffer_tokens}) for one in every]
        for back, own, wire in zip(coming, results, wires(coming, results), strict=True):
            filled = back.rows(tuple(own))
            block_walk.combine((merges if merged else sums)(back, CPU, block), wire, tuple(own), filled)
            torch.testing.assert_close(filled, back.unpack(wire, tuple(own)), rtol=close, atol=close)


def test_a_row_that_is_served_at_home_stays_as_it_is() -> None:
    layout = layout_from_rows([[4], [4]])
    for at_home, plan in ((True, balance(layout, MODEL)), (False, misplaced_plan(layout, 2, MODEL))):
        rank = build(plan, 0)
        assert Dispatch.of(rank, [("q", 16), ("k", 16)]).passes_through == at_home
        assert Combine.of(rank, [("q", 16), ("k", 16)]).passes_through == at_home


def test_without_triton_torch_copies_and_says_so_once(monkeypatch: pytest.MonkeyPatch,
                                                      caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    prepared._has_triton.cache_clear()
    exchange = Dispatch.of(build(misplaced_plan(layout_from_rows([[4], [4]]), 2, MODEL), 0), [("q", 16), ("k", 16)])
    with caplog.at_level(logging.WARNING, logger="distca"):
        assert prepared.packed_on(CPU, exchange) is exchange and not caplog.records
        for _ in range(2):
            assert prepared.packed_on(torch.device("cuda"), exchange) is exchange
    assert [record.message.split(";")[-1] for record in caplog.records] == [" pip install triton"]
    prepared._has_triton.cache_clear()
