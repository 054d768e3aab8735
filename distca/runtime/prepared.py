"""What one rank works out once per plan, so that every layer only copies, exchanges and computes."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from distca.dispatch.build import build
from distca.dispatch.tables import RankTables
from distca.kernels import Kernel, TaskRows
from distca.kernels.interface import accumulation_dtype
from distca.planning.plan import Plan
from distca.runtime.wire import Combination, Field, Segments, Stamp, combination, segments


class Shapes(NamedTuple):
    """The tensors a plan is run with."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def q_bytes(self) -> int:
        return self.num_heads * self.head_dim * self.dtype.itemsize

    @property
    def kv_bytes(self) -> int:
        """One of key and value."""
        return self.num_kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def lse_dtype(self) -> torch.dtype:
        return accumulation_dtype(self.dtype)

    @property
    def lse_bytes(self) -> int:
        return self.num_heads * self.lse_dtype.itemsize


@dataclass(frozen=True, slots=True)
class Trip:
    """One exchange: where fields stand on the wire when it leaves and when it arrives."""

    leaving: Segments
    arriving: Segments


@dataclass(frozen=True, slots=True)
class Prepared:
    """A plan made ready for one rank, one set of shapes and one kernel."""

    tables: RankTables
    rows: Any                   # the kernel's own form of the task rows
    travels: bool               # False: no rank of this plan sends anything
    inputs: Trip                # q, k, v: homes -> servers
    outputs: Trip               # out, lse: servers -> homes
    backward_inputs: Trip       # q, k, v, out, dout, lse: homes -> servers
    backward_inputs_kept: Trip  # out, dout, lse, where servers keep q, k and v
    gradients: Trip             # dq, dk, dv: servers -> homes
    queries: Combination
    keys: Combination
    sent_stamp: Stamp           # on the segments of `inputs`
    expected_stamp: Stamp


def prepare(plan: Plan, rank: int, kernel: Kernel, shapes: Shapes, window: int | None) -> Prepared:
    tables = build(plan, rank)
    rows = TaskRows(tables.q_begin, tables.q_end, tables.k_begin, tables.k_end, tables.q_offset)
    q, kv, lse = shapes.q_bytes, shapes.kv_bytes, shapes.lse_bytes
    moved = plan.traffic()
    inputs = _trip(tables, [("q", q), ("k", kv), ("k", kv)], stamped=True)
    number = digest(plan)
    return Prepared(
        tables=tables,
        rows=kernel.prepare(rows, shapes.device, window),
        travels=bool(moved.q_tokens.sum() or moved.kv_tokens.sum()),
        inputs=inputs,
        outputs=_trip(tables.reversed(), [("q", q), ("q", lse)]),
        backward_inputs=_trip(tables, [("q", q), ("k", kv), ("k", kv), ("q", q), ("q", q), ("q", lse)]),
        backward_inputs_kept=_trip(tables, [("q", q), ("q", q), ("q", lse)]),
        gradients=_trip(tables.reversed(), [("q", q), ("k", kv), ("k", kv)]),
        queries=combination(tables.queries),
        keys=combination(tables.keys),
        sent_stamp=Stamp.of(number, inputs.leaving, shapes.device),
        expected_stamp=Stamp.of(number, inputs.arriving, shapes.device),
    )


def _trip(tables: RankTables, fields: list[tuple[str, int]], *, stamped: bool = False) -> Trip:
    sides = {"q": tables.queries, "k": tables.keys}
    return Trip(
        leaving=segments([Field(sides[name].send, size) for name, size in fields], tables.num_ranks, stamped=stamped),
        arriving=segments([Field(sides[name].receive, size) for name, size in fields], tables.num_ranks,
                          stamped=stamped),
    )


def digest(plan: Plan) -> int:
    """A number that differs between plans that differ, for ranks to compare."""
    state = hashlib.blake2b(digest_size=8)
    for table in (plan.layout, plan.tasks):
        for name in table.__slots__:
            state.update(np.asarray(getattr(table, name)).tobytes())
    state.update(np.int64(plan.num_servers).tobytes())
    return int.from_bytes(state.digest(), "little", signed=True)
