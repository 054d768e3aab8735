"""One layer's attention at fixed addresses: plans change with every step, a captured CUDA graph stays.

CoreAttention lays buffers and tables out for each plan and meets the other ranks on the host at every exchange. Here
all that a call touches is made once, with room for other plans: the server's buffers, tables of blocks, the kernel's
tables, and memory that all ranks of a node write to. `refill` puts another plan's tables there. A call is launches
alone, in both directions:

    put      this row's tensors straight into its servers' memory, each run where it belongs
    barrier  of all ranks, on the device
    take     what arrived and what stays home into the server's buffers
    serve    the kernel
    put      the results into their homes' memory
    barrier
    combine  the parts of each token, merged or summed

Inputs and results have a region of that memory each. A rank puts into a region again only behind the other region's
barrier, which a peer reaches after it has read the first: two regions are enough for any number of calls in a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Any, Protocol

import numpy as np
import torch

from distca.dispatch.build import build
from distca.kernels.hopper.buffers import Most
from distca.kernels.hopper.kernel import HopperKernel
from distca.kernels.interface import BackwardInputs, TaskRows
from distca.kernels.softcap_sinks import check_sinks, gradient_of_sinks, with_sinks
from distca.planning.plan import Plan
from distca.runtime.call import Shapes, different_plans
from distca.runtime.copy_tables import (
    COPY_BYTES,
    PART_BYTES,
    Copies,
    Merges,
    Sums,
    merges,
    packing,
    sums,
    unpacking,
)
from distca.runtime.exchange_torch import ALIGNMENT, Combine, Dispatch, Tensors, WireLayout
from distca.runtime.registry import digest
from distca.validation import UserError

CPU = torch.device("cpu")
ROOM = 1.25                                                      # over what the first plan's busiest rank needs
REFUSED = 0                                                      # told instead of a digest

Fields = Sequence[tuple[str, int]]                               # ("q" or "k", bytes of a token)


class Memory(Protocol):
    """Bytes of every rank, as transport.symmetric.PeerMemory has them."""

    peers: list[torch.Tensor]

    def barrier(self) -> None: ...


class Node(Protocol):
    """Ranks that write to each other's memory, as SymmetricTransport's do."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def gather(self, value: int, device: torch.device) -> list[int]: ...

    def memory(self, num_bytes: int) -> Memory: ...


@dataclass(frozen=True, slots=True)
class Tables:
    """One rank's part of a plan in one direction, on the host."""

    rows: TaskRows
    row_tokens: tuple[int, int]         # at home here: queries, keys
    buffer_tokens: tuple[int, int]      # in the server's buffers
    region_bytes: int                   # the most that any rank receives in one exchange; the same on every rank
    dispatch: Copies                    # row -> servers' memory
    take: Copies                        # memory, row -> buffers
    results: Copies                     # results -> homes' memory
    combine: Sums | Merges              # memory, results -> row

    @classmethod
    def of(cls, plan: Plan, rank: int, inputs: Fields, results: Fields, merged_heads: int | None) -> Tables:
        tables = build(plan, rank)
        going, coming = Dispatch.of(tables, inputs), Combine.of(tables, results, merged_heads)
        kept = [list(zip(*(column.tolist() for column in (side.local.row, side.local.buffer, side.local.length)),
                         strict=True)) for side in going.sides]  # also where the buffer could be the row itself
        there, back = wire_bytes(plan, inputs), wire_bytes(plan, results).T
        return cls(
            TaskRows(tables.q_begin, tables.q_end, tables.k_begin, tables.k_end, tables.q_offset),
            (tables.row_tokens, tables.key_row_tokens),
            (tables.queries.buffer_tokens, tables.keys.buffer_tokens),
            int(max(there.sum(axis=0).max(), back.sum(axis=0).max())),
            _to_peers(packing(going, CPU, COPY_BYTES), going.leaving, there, rank),
            unpacking(replace(going, local=kept), CPU, COPY_BYTES),
            _to_peers(packing(coming, CPU, COPY_BYTES), coming.leaving, back, rank),
            (sums if merged_heads is None else merges)(coming, CPU, PART_BYTES, apart=True),
        )


def wire_bytes(plan: Plan, fields: Fields) -> np.ndarray:
    """[home, server] bytes of these fields of what crosses ranks, as they lie on the wire."""
    moved = plan.traffic()
    tokens = {name: np.zeros((plan.num_servers, plan.num_servers), dtype=np.int64) for name in ("q", "k")}
    np.add.at(tokens["q"], (moved.q_home, moved.q_server), moved.q_tokens)
    np.add.at(tokens["k"], (moved.kv_home, moved.kv_server), moved.kv_tokens)
    return sum(-(-tokens[name] * size // ALIGNMENT) * ALIGNMENT for name, size in fields) + np.zeros_like(tokens["q"])


def _to_peers(copies: Copies, leaving: WireLayout, sent: np.ndarray, rank: int) -> Copies:
    """Straight into each peer's memory, numbered by rank, where this rank's split begins; `sent` [source, target]."""
    assert leaving.splits == sent[rank].tolist(), (leaving.splits, sent[rank])
    end = np.cumsum(leaving.splits)
    moved = (np.cumsum(sent, axis=0)[rank] - sent[rank]) - (end - leaving.splits)  # [peers] bytes
    table = copies.table.clone()
    peer = torch.searchsorted(torch.from_numpy(end), table[:, 3] * copies.unit, right=True)
    table[:, 1] = peer
    table[:, 3] += torch.from_numpy(moved // copies.unit)[peer]
    return replace(copies, table=table)


class _Way:
    """One direction's tables on the device, with room for other plans'."""

    def __init__(self, everyones: Sequence[Tables], rank: int, kernel: HopperKernel, device: torch.device,
                 window: int | None, most: Most, room: float) -> None:
        mine = everyones[rank]
        self.kernel = kernel
        self.rows = kernel.prepare(mine.rows, device, window, most)
        self.dispatch, self.take, self.results, self.combine = (
            _roomy([getattr(one, name) for one in everyones], device, room)
            for name in ("dispatch", "take", "results", "combine"))
        self.fill(mine)

    def fill(self, tables: Tables) -> None:
        """Put these there; a ValueError where they do not fit."""
        pairs = [(getattr(self, name), getattr(tables, name)) for name in ("dispatch", "take", "results", "combine")]
        columns = [(getattr(there, name), getattr(here, name)) for there, here in pairs
                   for name in ("table", "parts") if hasattr(here, name)]
        for there, here in columns:
            if len(here) > len(there):
                raise UserError(_too_much(f"{len(here)} blocks of copies", len(there)))
        self.kernel.refill(self.rows, tables.rows)
        for there, here in columns:
            there[:len(here)].copy_(here.pin_memory() if there.is_cuda else here, non_blocking=True)
            there[len(here):].zero_()                            # blocks of nothing


def _roomy(everyones: Sequence[Any], device: torch.device, room: float) -> Any:
    """Blocks like these, on the device, as many as the rank with the most has and some more."""
    def of(name: str) -> torch.Tensor:
        tables = [getattr(one, name) for one in everyones]
        return torch.zeros(_with_room(max(map(len, tables)), room), tables[0].shape[1], dtype=tables[0].dtype,
                           device=device)

    return replace(everyones[0], **{name: of(name) for name in ("table", "parts") if hasattr(everyones[0], name)})


def _with_room(count: int, room: float) -> int:
    return 128 * ceil(max(1, count) * room / 128)


def _too_much(needed: str, room: int) -> str:
    return f"the plan needs {needed} and there is room for {room}; begin with the largest step's plan, or raise room"


class SteadyAttention:
    """Attention of ranks of one node, whose calls a CUDA graph captures; every rank makes it, and refills it, at once.

    Plans put the same tokens on this rank as the first one, and need at most `room` times what it needs. Gradients go
    by the same plan, or by `backward`. Call it once in each direction before capturing. Runs on the Hopper kernel.
    """

    def __init__(
        self,
        node: Node,
        plan: Plan,
        shapes: Shapes,
        *,
        backward: Plan | None = None,
        room: float = ROOM,
        scale: float | None = None,
        spare_multiprocessors: int = 0,
    ) -> None:
        self.kernel = HopperKernel(spare_multiprocessors=spare_multiprocessors)
        reason = self.kernel.supports(shapes.device, shapes.dtype, shapes.head_dim, plan.window,
                                      shapes.value_dim or None)
        if reason is not None:
            raise UserError(f"SteadyAttention needs kernel 'hopper', which cannot run here: {reason}; use "
                            "CoreAttention")
        from distca.runtime import exchange_triton  # which needs a GPU's packages

        self._launches = exchange_triton
        self.node, self.shapes, self.scale, self.window = node, shapes, scale, plan.window
        everyones = [self._tables(rank, plan, backward) for rank in range(node.size)]
        self.row_tokens = everyones[node.rank][0].row_tokens
        num_q, num_k, num_rows, self._region_bytes = [_with_room(max(counts), room) for counts in zip(*(
            (*one.buffer_tokens, len(one.rows), one.region_bytes) for pair in everyones for one in pair), strict=True)]
        self._forward, self._backward = (
            _Way(tables, node.rank, self.kernel, shapes.device, plan.window, (num_q, num_k, num_rows), room)
            for tables in zip(*everyones, strict=True))
        q, k, v, out, lse = (one.new_empty((count, *one.shape[1:])) for one, count in zip(
            shapes.empty_row(), (num_q, num_k, num_k, num_q, num_q), strict=True))
        self._buffers = BackwardInputs(torch.empty_like(out), q, k, v, out, lse)
        self._memory = node.memory(2 * self._region_bytes)
        self._regions = [tuple(peer[at:at + self._region_bytes] for peer in self._memory.peers)
                         for at in (0, self._region_bytes)]
        self._agree(plan, backward, None)

    def refill(self, plan: Plan, backward: Plan | None = None) -> None:
        """Follow these plans from now on, also in graphs that were captured.

        Where one rank cannot, every rank raises, and calls nothing before it was refilled with plans that fit.
        """
        reason = None
        try:
            tables = self._tables(self.node.rank, plan, backward)
            for one in tables:
                self._check_room(one)
            for way, one in zip((self._forward, self._backward), tables, strict=True):
                way.fill(one)
        except ValueError as error:
            reason = error
        self._agree(plan, backward, reason)

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """q, k, v, this rank's row of the layout, [tokens, heads, dim] each -> out alike, with the dim of values.

        `sinks` [heads] are CoreAttention's.
        """
        check_sinks(sinks, q)
        return _Steady.apply(self, q, k, v, sinks)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Tensors:
        """out and log-sum-exp of the row, without autograd."""
        if (len(q), len(k)) != self.row_tokens or len(v) != len(k):
            raise UserError(f"q has {len(q)} tokens, k {len(k)} and v {len(v)}, but the plans put "
                            f"{self.row_tokens[0]} queries and {self.row_tokens[1]} keys on rank {self.node.rank}; "
                            "pass its own row")
        out = q.new_empty((*q.shape[:2], v.shape[2]))
        lse = q.new_empty(q.shape[:2], dtype=self.shapes.lse_dtype)
        there = self._dispatched(self._forward, (q, k, v), self._buffers[1:4])
        results = self.kernel.forward(there[0], there[1], there[2], self._forward.rows, self.scale)
        return self._combined(self._forward, results, (out, lse))

    def backward(self, dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
                 lse: torch.Tensor) -> Tensors:
        """dq, dk, dv of the row."""
        gradients = tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        there = self._dispatched(self._backward, (dout, q, k, v, out, lse), self._buffers)
        results = self.kernel.backward(BackwardInputs(*there), self._backward.rows, self.scale)
        return self._combined(self._backward, results, gradients)

    def _dispatched(self, way: _Way, row: Tensors, buffers: Tensors) -> Tensors:
        row = tuple(map(self._launches.dense, row))
        memory = self._put(way.dispatch, row, 0)
        self._launches.copy(way.take, (memory, *row), buffers)
        return buffers

    def _combined(self, way: _Way, results: Tensors, row: Tensors) -> Tensors:
        memory = self._put(way.results, results, 1)
        self._launches.combine(way.combine, memory, results, row)
        return row

    def _put(self, copies: Copies, tensors: Tensors, region: int) -> torch.Tensor:
        """Into the peers' memory; what they put into ours."""
        memory = self._regions[region]
        if self.node.size > 1:
            self._launches.copy(copies, tensors, memory)
            self._memory.barrier()
        return memory[self.node.rank]

    def _tables(self, rank: int, plan: Plan, backward: Plan | None) -> tuple[Tables, Tables]:
        backward = plan if backward is None else backward
        q, k, v, out, lse = self.shapes.fields
        for one in (plan, backward):
            if (one.num_servers, one.window) != (self.node.size, self.window):
                raise UserError(f"the plan has {one.num_servers} servers and a window of {one.window}; give plans of "
                                f"{self.node.size} servers and a window of {self.window}")
        return (Tables.of(plan, rank, [q, k, v], [out, lse], self.shapes.num_heads),
                Tables.of(backward, rank, [out, q, k, v, out, lse], [q, k, v], None))

    def _check_room(self, tables: Tables) -> None:
        if tables.row_tokens != self.row_tokens:
            raise UserError(f"the plan puts {tables.row_tokens} queries and keys on rank {self.node.rank}, where "
                            f"there were {self.row_tokens}; make a SteadyAttention for each number of tokens")
        needs = (("queries of tasks", tables.buffer_tokens[0], len(self._buffers.q)),
                 ("keys of tasks", tables.buffer_tokens[1], len(self._buffers.k)),
                 ("bytes received", tables.region_bytes, self._region_bytes))
        for what, count, most in needs:
            if count > most:
                raise UserError(_too_much(f"{count} {what}", most))

    def _agree(self, plan: Plan, backward: Plan | None, reason: ValueError | None) -> None:
        """All ranks follow the same plans and have room for them, or none does."""
        for one in (plan,) if backward is None else (plan, backward):
            mine = REFUSED if reason is not None else digest(one)
            said = self.node.gather(mine, self.shapes.device)
            if reason is not None:
                raise reason
            refused = [rank for rank, other in enumerate(said) if other == REFUSED]
            if refused:
                raise UserError(f"ranks {refused} cannot follow this plan where the first one was; they say why")
            others = [rank for rank, other in enumerate(said) if other != mine]
            if others:
                raise different_plans(self.node.rank, others)


class _Steady(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, steady: SteadyAttention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        out, lse = steady.forward(q, k, v)
        if sinks is not None:
            out, lse = with_sinks(out, lse, sinks)
        ctx.steady = steady
        ctx.save_for_backward(q, k, v, out, lse, sinks)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse, sinks = ctx.saved_tensors
        dsinks = None if sinks is None else gradient_of_sinks(dout, out, lse, sinks)
        return None, *ctx.steady.backward(dout, q, k, v, out, lse), dsinks
