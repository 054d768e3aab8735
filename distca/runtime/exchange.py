"""Exchange tensors between homes and servers: pack them onto the wire, send them in one hop or two, and unpack them.

The wire, a uint8 tensor, has one split per peer. A split holds several fields in sequence (queries, keys, values; or
outputs and log-sum-exps), each field's runs in table order, so it needs no headers. Offsets are computed once per plan.
This module packs with torch on any device; `exchange_triton` does the same in one launch.

With two hops, one is between nodes and one inside them. The slower hop, between nodes, comes first on the way to
servers and last on the way back. Neither blocks the rank: the second hop starts when the first has arrived, while the
rank computes, and the rank waits only for the second.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from distca.dispatch import RankTables, Runs, Side
from distca.kernels.interface import accumulation_dtype, merge
from distca.runtime.transport import Exchanges, Handle, Relay, Transport
from distca.validation import UserError

ALIGNMENT = 16  # bytes; every field of a split begins at a multiple of it
STAMP_BYTES = 16

Tensors = tuple[torch.Tensor, ...]
Fields = Sequence[tuple[str, int]]  # ("q" or "k": whether per query or per key token, bytes of a token)
Copy = tuple[int, int, int]  # (first token, first token or byte of the other side, tokens)
Part = tuple[int, int, int, int]  # (first token in the row, source, first token in the source, tokens)


@dataclass(frozen=True, slots=True)
class WireLayout:
    """Byte offsets of every run of every field, for sending or for receiving."""

    splits: list[int]            # bytes per peer
    num_bytes: int
    copies: list[list[Copy]]     # per field: (first token, first byte on the wire, tokens)
    stamps: dict[int, int]       # peer -> first byte of its split, reserved for a stamp; may be empty

    @classmethod
    def of(
        cls, runs: Sequence[Runs], token_bytes: Sequence[int], num_ranks: int, *, stamped: bool = False
    ) -> WireLayout:
        """Lay out one field per entry of `runs`; `stamped` reserves a stamp at the start of each non-empty split."""
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
        """Return views of a field's runs on the wire, in table order, with `like`'s dtype and trailing dimensions."""
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
    """How one rank packs its tensors onto the wire and unpacks the received ones, in one hop."""

    sides: Sequence[Side]         # per field: queries or keys
    token_bytes: Sequence[int]    # per field
    leaving: WireLayout
    arriving: WireLayout
    passes_through: bool          # nothing is received and `unpack` returns its input tensors
    stamp: torch.Tensor | None    # uint8 [STAMP_BYTES], the plan's digest, sent in every split; or None

    def ready(self, tensors: Tensors) -> Tensors:
        """Convert the tensors to the form that `pack` and `unpack` read."""
        return tensors

    def pack(self, tensors: Tensors) -> torch.Tensor:
        """Copy the tensors onto a new wire: uint8, one split per peer."""
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
        """Combine the received wire, if any, with the part of this rank's own tensors that was not sent."""

    def mismatched(self, wire: torch.Tensor) -> list[int]:
        """Return the peers whose splits carry another stamp; synchronizes with the device."""
        carried = [wire[at:at + STAMP_BYTES] for at in self.arriving.stamps.values()]
        if self.stamp is None or not carried:
            return []
        wrong = ([not torch.equal(one, self.stamp) for one in carried] if wire.device.type == "cpu" else
                 (torch.stack(carried) != self.stamp).any(dim=1).tolist())
        return [peer for peer, is_wrong in zip(self.arriving.stamps, wrong, strict=True) if is_wrong]


@dataclass(frozen=True, slots=True)
class Dispatch(Packing):
    """Homes send the row's tensors to servers."""

    local: Sequence[list[Copy]]   # per field: (offset in the row, offset in the buffer, tokens) of local runs

    @classmethod
    def of(cls, tables: RankTables, fields: Fields, stamp: torch.Tensor | None = None) -> Dispatch:
        sides, sizes = _sides(tables, fields)
        leaving, arriving = (WireLayout.of(runs, sizes, tables.num_ranks, stamped=stamp is not None) for runs in (
            [side.send for side in sides], [side.receive for side in sides]))
        local = [[] if side.is_row else _tuples(side.local.row, side.local.buffer, side.local.length) for side in sides]
        return cls(sides, sizes, leaving, arriving, all(side.is_row for side in sides), stamp, local)

    def unpack(self, wire: torch.Tensor | None, row: Tensors) -> Tensors:
        """Return the server's buffers, filled from the wire and from local runs."""
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
        """Reuse the row's tensor if the server's buffer equals the row; otherwise allocate."""
        return tuple(tensor if side.is_row else tensor.new_empty((side.buffer_tokens, *tensor.shape[1:]))
                     for tensor, side in zip(row, self.sides, strict=True))


@dataclass(frozen=True, slots=True)
class Combine(Packing):
    """Servers send results back to homes, which merge or sum the parts of each token in float32 or wider."""

    parts: Sequence[RowParts]     # per field
    merged_heads: int | None      # heads, if the fields are out and log-sum-exp, which merge; None: sum

    @classmethod
    def of(cls, tables: RankTables, fields: Fields, merged_heads: int | None = None) -> Combine:
        sides, sizes = _sides(tables, fields)
        leaving, arriving = (WireLayout.of(runs, sizes, tables.num_ranks) for runs in (
            [side.receive for side in sides], [side.send for side in sides]))
        parts = {name: RowParts.of(side) for (name, _), side in zip(fields, sides, strict=True)}
        return cls(sides, sizes, leaving, arriving, all(side.is_untouched for side in sides), None,
                   [parts[name] for name, _ in fields], merged_heads)

    def unpack(self, wire: torch.Tensor | None, buffers: Tensors) -> Tensors:
        """Return the row's results: local and received parts, merged or summed in table order."""
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
    """Sources of a row's results: each token's first part is copied, parts from other servers are folded into it.

    Source 0 is this rank's server buffer, source 1 + i the i-th received run.
    """

    copies: list[Part]
    folds: list[Part]

    @classmethod
    def of(cls, side: Side) -> RowParts:
        """Build the parts for results of the runs that `side` sent or served locally."""
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
        """Fill each of `rows` from its sources; `fold` adds a part to the running result of all fields at once."""
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
    """One hop of an exchange: its packing, its transport, and whether any rank sends in it."""

    packing: Packing
    transport: Transport
    moves: bool
    ranks: Sequence[int]          # the pool rank of each of the transport's ranks

    def start(self, tensors: Tensors, check: bool, carrier: Exchanges | None = None) -> UnderWay:
        own = self.packing.ready(tensors)
        handle = (carrier or self.transport).exchange(
            self.packing.pack(own), self.packing.leaving.splits, self.packing.arriving.splits) if self.moves else None
        return UnderWay(self, own, handle, check)


@dataclass(slots=True)
class UnderWay:
    """A started hop: its handle, and this rank's own tensors, of which local runs are read at the end."""

    hop: Hop
    own: Tensors
    handle: Handle | None
    check: bool
    wire: torch.Tensor | None = None

    def wait(self) -> None:
        if self.handle is not None:
            self.wire = self.handle.wait()

    def unpack(self, streams: bool) -> Tensors:
        """Unpack the received tensors; raise if a split carries another plan's stamp.

        Set `streams` if the tensors may come from another stream than the current one.
        """
        for tensor in (*self.own, self.wire) if streams else ():
            if tensor is not None and tensor.is_cuda:
                tensor.record_stream(torch.cuda.current_stream(tensor.device))
        if self.wire is not None and self.check and (others := self.hop.packing.mismatched(self.wire)):
            raise different_plans(self.hop.ranks[self.hop.transport.rank], [self.hop.ranks[other] for other in others])
        return self.hop.packing.unpack(self.wire, self.own)


@dataclass(frozen=True, slots=True)
class Exchange:
    """The messages between homes and servers after one phase of a call: one hop, or two with a relay."""

    hops: tuple[Hop, ...]         # in sending order
    outer: Packing                # of the hop between all ranks
    relay: Relay | None = None

    @property
    def moves(self) -> bool:
        """Whether any rank sends anything; the same on all ranks of a node."""
        return any(hop.moves for hop in self.hops)

    @property
    def num_bytes(self) -> int:
        """Bytes sent and received by this rank; with two hops, only those of the hop between all ranks."""
        return self.outer.leaving.num_bytes + self.outer.arriving.num_bytes

    def start(
        self, tensors: Tensors, check: bool = False, carrier: Exchanges | None = None
    ) -> Callable[[], UnderWay]:
        """Start sending; the returned function waits for the last hop to start. `check` compares received stamps.

        A `carrier` exchanges in place of the transport, in one hop.
        """
        first = self.hops[0].start(tensors, check, carrier)
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
