"""What one rank works out once per plan, so that every layer only copies, exchanges and computes."""

from __future__ import annotations

import hashlib
import importlib.util
import logging
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch

from distca.dispatch.build import build
from distca.dispatch.tables import RankTables
from distca.kernels import Kernel, TaskRows
from distca.kernels.interface import accumulation_dtype
from distca.planning.plan import Plan
from distca.runtime.wire import Stamp, ToHomes, ToServers, Trip


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
class Prepared:
    """A plan made ready for one rank, one set of shapes and one kernel."""

    tables: RankTables
    rows: Any                        # the kernel's own form of the task rows
    travels: bool                    # False: no rank of this plan sends anything
    inputs: ToServers                # q, k, v, stamped
    outputs: ToHomes                 # out, lse
    backward_inputs: ToServers       # q, k, v, out, dout, lse
    backward_inputs_kept: ToServers  # out, dout, lse, where servers keep q, k and v
    gradients: ToHomes               # dq, dk, dv


def prepare(plan: Plan, rank: int, kernel: Kernel, shapes: Shapes, window: int | None) -> Prepared:
    tables = build(plan, rank)
    rows = TaskRows(tables.q_begin, tables.q_end, tables.k_begin, tables.k_end, tables.q_offset)
    q, kv, lse = ("q", shapes.q_bytes), ("k", shapes.kv_bytes), ("q", shapes.lse_bytes)
    moved = plan.traffic()
    here = shapes.device
    return Prepared(
        tables=tables,
        rows=kernel.prepare(rows, here, window),
        travels=bool(moved.q_tokens.sum() or moved.kv_tokens.sum()),
        inputs=copied_on(here, ToServers.of(tables, [q, kv, kv], Stamp.of(digest(plan), here))),
        outputs=copied_on(here, ToHomes.of(tables, [q, lse], merged_heads=shapes.num_heads)),
        backward_inputs=copied_on(here, ToServers.of(tables, [q, kv, kv, q, q, lse])),
        backward_inputs_kept=copied_on(here, ToServers.of(tables, [q, q, lse])),
        gradients=copied_on(here, ToHomes.of(tables, [q, kv, kv])),
    )


def copied_on(device: torch.device, trip: Trip) -> Trip:
    """The trip with one launch a step on a GPU where triton is installed; elsewhere as it is, with torch's copies."""
    if device.type != "cuda" or not _has_triton():
        return trip
    from distca.runtime.gpu_copies import on_gpu

    return on_gpu(trip, device)


@cache
def _has_triton() -> bool:
    found = importlib.util.find_spec("triton") is not None
    if not found:
        logging.getLogger("distca").warning("triton is not installed, so torch copies around attention, in many "
                                            "launches; pip install triton")
    return found


def digest(plan: Plan) -> int:
    """A number that differs between plans that differ, for ranks to compare."""
    state = hashlib.blake2b(digest_size=8)
    layout = plan.layout
    columns = [getattr(table, name) for table, names in (
        (layout, ("lengths", "document", "start", "stop", "rank")), (layout.key_only, layout.key_only.__slots__),
        (plan.tasks, plan.tasks.__slots__)) for name in names]
    for column in (*columns, np.array([layout.num_ranks, plan.num_servers, *map(len, columns)])):
        state.update(column.tobytes())
    return int.from_bytes(state.digest(), "little", signed=True)
