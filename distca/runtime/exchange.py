"""One exchange between homes and servers: tensors go onto the wire, in one hop or two, and come off it.

The wire has one split per peer. A split holds several fields one after another (queries, keys, values; or outputs and
log-sum-exps), each field's runs in table order, so nothing on it needs a header. Where everything lies is worked out
once per plan. Here torch packs, on any device; `exchange_triton` does the same in one launch.

Two hops are one between nodes and one inside them. On the way to servers the hop between nodes, the slow one, comes
first, on the way back it comes last. Neither stops the rank: the second hop starts as soon as the first has arrived,
beside whatever is computed meanwhile, and only the second is waited for.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from distca.dispatch.tables import RankTables, Runs, Side
from distca.kernels.interface import accumulation_dtype, merge
from distca.runtime.transport import Handle, Relay, Transport
from distca.validation import UserError

ALIGNMENT = 16  # bytes; every field of a split begins on it, whatever its element size
STAMP_BYTES = 16

Tensors = tuple[torch.Tensor, ...]
Fields = Sequence[tuple[str, int]]  # ("q" or "k": whose tokens they belong to, bytes of a token)
Copy = tuple[int, int, int]  # (first token, first token or byte of the other side, tokens)
Part = tuple[int, int, int, int]  # (first token in the row, source, first token in the source, tokens)


@dataclass(frozen=True, slots=True)
class WireLayout:
    """Where every run of every field lies on one side of the wire."""

    splits: list[int]            # bytes per peer
    num_bytes: int
    copies: list[list[Copy]]     # per field: (first token, first byte on the wire, tokens)
    stamps: dict[int, int]       # peer -> first byte of its split, kept free for a stamp; may be none

    @classmethod
    def of(
        cls, runs: Sequence[Runs], token_bytes: Sequence[int], num_ranks: int, *, stamped: bool = False
    ) -> WireLayout:
        """Lay out one field per entry of `runs`; `stamped` leaves room for a stamp ahead of every non-empty split."""
        tokens = [one.tokens_per_peer(num_ranks) for one in runs]
        per_peer = np.array([count * size for count, size in zip(tokens, token_bytes, strict=True)])  # [field, peer]
        per_peer += -per_peer % ALIGNMENT
        splits = per_peer.sum(axis=0)
        room = np.where(splits > 0, STAMP_BYTES, 0) if stamped else np.zeros_like(splits)
        splits = splits + room
        begin = np.cumsum(splits) - splits                       # [peer]
        field_begin = begin + room + np.cumsum(per_peer, axis=0) - per_peer
        copies = []
        for one, count, size, here in zip(runs, tokens, token_bytes, field_begin, strict=True):
            before = np.cumsum(one.length) - one.length - (np.cumsum(count) - count)[one.peer]  # within the peer
            copies.append(_tuples(one.start, here[one.peer] + before * size, one.length))
        stamps = {int(peer): int(begin[peer]) for peer in np.flatnonzero(room)}
        return cls(splits.tolist(), int(splits.sum()), copies, stamps)

    def empty(self, device: torch.device) -> torch.Tensor:
        return torch.empty(self.num_bytes, dtype=torch.uint8, device=device)

    def views(self, wire: torch.Tensor, field: int, like: torch.Tensor) -> list[torch.Tensor]:
        """A field's runs on the wire, in table order, with the dtype and trailing dimensions of `like`."""
        if not self.copies[field]:
            return []
        elements, trailing = wire.view(like.dtype), like.shape[1:]
        strides = [trailing.numel()]
        for size in trailing:
            strides.append(strides[-1] // max(size, 1))
        item, offset = like.element_size(), elements.storage_offset()
        return [elements.as_strided((tokens, *trailing), strides, offset + at // item)
                for _, at, tokens in self.copies[field]]


@dataclass(frozen=True, slots=True)
class Packing(ABC):
    """How tensors of one rank get onto the wire and off it, in one hop."""

    sides: Sequence[Side]         # per field: queries or keys
    token_bytes: Sequence[int]    # per field
    leaving: WireLayout
    arriving: WireLayout
    passes_through: bool          # nothing arrives and `unpack` returns the tensors themselves
    stamp: torch.Tensor | None    # uint8 [STAMP_BYTES], the plan's digest: on every split, or on none

    def ready(self, tensors: Tensors) -> Tensors:
        """The tensors in the form that `pack` and `unpack` read."""
        return tensors

    def pack(self, tensors: Tensors) -> torch.Tensor:
        """The wire: uint8, one split per peer."""
        wire = self.leaving.empty(tensors[0].device)
        to = [wire.narrow(0, at, STAMP_BYTES) for at in self.leaving.stamps.values()]
        source = [self.stamp for _ in to if self.stamp is not None]
        for field, tensor in enumerate(tensors):
            to += self.leaving.views(wire, field, tensor)
            source += [tensor.narrow(0, start, tokens) for start, _, tokens in self.leaving.copies[field]]
        _copy_all(to, source)
        return wire

    @abstractmethod
    def unpack(self, wire: torch.Tensor | None, tensors: Tensors) -> Tensors:
        """What arrived on the wire, if anything, together with what stays of this rank's own tensors."""

    def mismatched(self, wire: torch.Tensor) -> list[int]:
        """Peers whose splits carry another stamp; waits for the wire."""
        carried = [wire[at:at + STAMP_BYTES] for at in self.arriving.stamps.values()]
        if self.stamp is None or not carried:
            return []
        wrong = ([not torch.equal(one, self.stamp) for one in carried] if wire.device.type == "cpu" else
                 (torch.stack(carried) != self.stamp).any(dim=1).tolist())
        return [peer for peer, is_wrong in zip(self.arriving.stamps, wrong, strict=True) if is_wrong]


@dataclass(frozen=True, slots=True)
class Dispatch(Packing):
    """The row's tensors go from homes to servers."""

    local: Sequence[list[Copy]]   # per field: (in the row, in the buffer, tokens) of what stays home

    @classmethod
    def of(cls, tables: RankTables, fields: Fields, stamp: torch.Tensor | None = None) -> Dispatch:
        sides, sizes = _sides(tables, fields)
        leaving, arriving = (WireLayout.of(runs, sizes, tables.num_ranks, stamped=stamp is not None) for runs in (
            [side.send for side in sides], [side.receive for side in sides]))
        local = [[] if side.is_row else _tuples(side.local.row, side.local.buffer, side.local.length) for side in sides]
        return cls(sides, sizes, leaving, arriving, all(side.is_row for side in sides), stamp, local)

    def unpack(self, wire: torch.Tensor | None, row: Tensors) -> Tensors:
        """The server's buffers: what arrived and what stays home, in task order."""
        if self.passes_through:
            return row
        buffers = self.buffers(row)
        to, source = [], []
        for field, (tensor, buffer, local) in enumerate(zip(row, buffers, self.local, strict=True)):
            to += [buffer.narrow(0, at, tokens) for _, at, tokens in local]
            source += [tensor.narrow(0, start, tokens) for start, _, tokens in local]
            if wire is not None:
                to += [buffer.narrow(0, start, tokens) for start, _, tokens in self.arriving.copies[field]]
                source += self.arriving.views(wire, field, buffer)
        _copy_all(to, source)
        return buffers

    def buffers(self, row: Tensors) -> Tensors:
        """Reuse the row's tensor where it is the server's buffer; otherwise allocate."""
        return tuple(tensor if side.is_row else tensor.new_empty((side.buffer_tokens, *tensor.shape[1:]))
                     for tensor, side in zip(row, self.sides, strict=True))


@dataclass(frozen=True, slots=True)
class Combine(Packing):
    """The servers' results go back to homes, where the parts of each token are merged or summed in float32 or wider."""

    parts: Sequence[RowParts]     # per field
    merged_heads: int | None      # of out and log-sum-exp, if these are the fields, which merge; else all are summed

    @classmethod
    def of(cls, tables: RankTables, fields: Fields, merged_heads: int | None = None) -> Combine:
        sides, sizes = _sides(tables, fields)
        leaving, arriving = (WireLayout.of(runs, sizes, tables.num_ranks) for runs in (
            [side.receive for side in sides], [side.send for side in sides]))
        parts = {name: RowParts.of(side) for (name, _), side in zip(fields, sides, strict=True)}
        return cls(sides, sizes, leaving, arriving, all(side.is_untouched for side in sides), None,
                   [parts[name] for name, _ in fields], merged_heads)

    def unpack(self, wire: torch.Tensor | None, buffers: Tensors) -> Tensors:
        """The row's results: own ones and those that arrived, merged or summed in the order of the tables."""
        if self.passes_through:
            return buffers
        rows = self.rows(buffers)
        sources = [[buffer, *([] if wire is None else self.arriving.views(wire, field, buffer))]
                   for field, buffer in enumerate(buffers)]
        for fields in [(0, 1)] if self.merged_heads else [(field,) for field in range(len(rows))]:
            if not self.sides[fields[0]].is_untouched:
                self.parts[fields[0]].fill(
                    tuple(rows[field] for field in fields), tuple(sources[field] for field in fields),
                    _merge if self.merged_heads else _add)
        return rows

    def rows(self, buffers: Tensors) -> Tensors:
        """Reuse the server's buffer if nothing moved; otherwise allocate, zero-filled if some tokens get no result."""
        return tuple(buffer if side.is_untouched else
                     (buffer.new_zeros if side.leaves_some else buffer.new_empty)((len(side.parts), *buffer.shape[1:]))
                     for buffer, side in zip(buffers, self.sides, strict=True))


@dataclass(frozen=True, slots=True)
class RowParts:
    """Where a row's results come from: each token's first part is copied, parts of other servers are folded into it.

    Sources are numbered: 0 is this rank's own server buffer, 1 + i the i-th run that comes back.
    """

    copies: list[Part]
    folds: list[Part]

    @classmethod
    def of(cls, side: Side) -> RowParts:
        """For results that come back along what `side` sent and kept."""
        parts = [(row, 0, buffer, tokens) for row, buffer, tokens in _tuples(
            side.local.row, side.local.buffer, side.local.length)]
        parts += [(row, 1 + run, 0, tokens) for run, (row, tokens) in enumerate(_tuples(
            side.send.start, side.send.length))]
        copies: list[Part] = []
        folds: list[Part] = []
        is_filled = np.zeros(len(side.parts), dtype=bool)
        for row, source, first, tokens in parts:
            before = is_filled[row:row + tokens]
            cuts = (np.flatnonzero(before[1:] != before[:-1]) + 1).tolist()
            for a, b in pairwise([0, *cuts, tokens]):
                (folds if before[a] else copies).append((row + a, source, first + a, b - a))
            before[:] = True
        return cls(copies, folds)

    def fill(
        self, rows: Tensors, sources: tuple[list[torch.Tensor], ...], fold: Callable[[Tensors, Tensors], None]
    ) -> None:
        """Fill each of `rows` from its sources; `fold` takes a part into the running result of all fields at once."""
        running = rows if not self.folds else tuple(
            row if row.dtype is (wide := accumulation_dtype(row.dtype)) else row.to(wide) for row in rows)
        _copy_all([row.narrow(0, start, tokens) for row in running for start, _, _, tokens in self.copies],
                  [parts[source].narrow(0, first, tokens) for parts in sources
                   for _, source, first, tokens in self.copies])
        for start, source, first, tokens in self.folds:
            fold(tuple(row.narrow(0, start, tokens) for row in running),
                 tuple(parts[source].narrow(0, first, tokens) for parts in sources))
        for row, total in zip(rows, running, strict=True):
            if row is not total:
                row.copy_(total)


@dataclass(frozen=True, slots=True)
class Hop:
    """One hop of an exchange: how tensors are packed, who carries them, and whether any rank sends in it."""

    packing: Packing
    transport: Transport
    moves: bool
    ranks: Sequence[int]          # of the transport's ranks in the pool

    def start(self, tensors: Tensors, check: bool) -> UnderWay:
        own = self.packing.ready(tensors)
        handle = self.transport.exchange(
            self.packing.pack(own), self.packing.leaving.splits, self.packing.arriving.splits) if self.moves else None
        return UnderWay(self, own, handle, check)


@dataclass(slots=True)
class UnderWay:
    """A hop that was started: what is on the wire, and this rank's own tensors, part of which stays."""

    hop: Hop
    own: Tensors
    handle: Handle | None
    check: bool
    wire: torch.Tensor | None = None

    def wait(self) -> None:
        if self.handle is not None:
            self.wire = self.handle.wait()

    def unpack(self, streams: bool) -> Tensors:
        """Unpack what arrived; raises if a split carries another plan's stamp.

        With `streams`, another stream than the current one may have made the tensors.
        """
        for tensor in (*self.own, self.wire) if streams else ():
            if tensor is not None and tensor.is_cuda:
                tensor.record_stream(torch.cuda.current_stream(tensor.device))
        if self.wire is not None and self.check and (others := self.hop.packing.mismatched(self.wire)):
            raise different_plans(self.hop.ranks[self.hop.transport.rank], [self.hop.ranks[other] for other in others])
        return self.hop.packing.unpack(self.wire, self.own)


@dataclass(frozen=True, slots=True)
class Exchange:
    """What homes and servers send each other in one phase of a call, in one hop, or in two with a relay between."""

    hops: tuple[Hop, ...]         # in the order that tensors take
    outer: Packing                # of the hop between all ranks
    relay: Relay | None = None

    @property
    def moves(self) -> bool:
        """Whether any rank sends anything: the same on all ranks of a node."""
        return any(hop.moves for hop in self.hops)

    @property
    def num_bytes(self) -> int:
        """Sent and received by this rank; of two hops, between nodes."""
        return self.outer.leaving.num_bytes + self.outer.arriving.num_bytes

    def start(self, tensors: Tensors, check: bool = False) -> Callable[[], UnderWay]:
        """Send these; the result waits for the last hop to start. With `check`, what arrives must carry the stamp."""
        first = self.hops[0].start(tensors, check)
        if self.relay is None:
            return lambda: first

        def second() -> UnderWay:
            first.wait()
            return self.hops[1].start(first.unpack(streams=True), check)

        return self.relay.follow(second, tensors[0].device) if self.moves else second


def different_plans(rank: int, others: list[int]) -> UserError:
    return UserError(f"rank {rank} has another plan than ranks {others}; plan from the same lengths, tolerance, "
                     "cost and versions on every rank, and make the same calls in the same order")


def _sides(tables: RankTables, fields: Fields) -> tuple[list[Side], list[int]]:
    sides = {"q": tables.queries, "k": tables.keys}
    return [sides[name] for name, _ in fields], [size for _, size in fields]


def _tuples(*columns: np.ndarray) -> list[Any]:
    return list(zip(*(column.tolist() for column in columns), strict=True))


def _copy_all(to: list[torch.Tensor], source: list[torch.Tensor]) -> None:
    if to:
        torch._foreach_copy_(to, source)


def _add(running: Tensors, part: Tensors) -> None:
    for total, piece in zip(running, part, strict=True):
        total += piece


def _merge(running: Tensors, part: Tensors) -> None:
    """Fold a partial (out, lse) into the running one."""
    out, lse = merge(running[0], running[1], *part)
    running[0].copy_(out)
    running[1].copy_(lse)
