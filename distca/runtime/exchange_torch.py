"""Dispatch and combine: what goes to servers and what comes back to homes, packed by torch on any device.

The wire has one split per peer. A split holds several fields one after another (queries, keys, values; or outputs and
log-sum-exps), each field's runs in table order, so nothing on it needs a header. Where everything lies is worked out
once per plan. Results that several servers computed for the same token are merged or summed in float32.
`exchange_triton` does the same in one launch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import torch

from distca.dispatch.tables import RankTables, Runs, Side
from distca.kernels.interface import accumulation_dtype, merge

ALIGNMENT = 16  # bytes; every field of a split begins on it, whatever its element size
STAMP_BYTES = 16

Tensors = tuple[torch.Tensor, ...]
Copy = tuple[int, int, int]  # (first token or byte there, first one here, tokens)
Part = tuple[int, int, int, int]  # (first token in the row, source, first token there, tokens)


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
        """Of fields with so many bytes a token; with `stamped`, splits that are not empty begin with room for one."""
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
        """A field's runs as they stand on the wire, in table order: tokens of `like`'s kind."""
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
class Stamp:
    """A plan's digest on every split, so that a rank notices when another follows a different plan."""

    value: torch.Tensor  # [STAMP_BYTES] uint8

    @classmethod
    def of(cls, digest: int, device: torch.device) -> Stamp:
        value = torch.frombuffer(bytearray(digest.to_bytes(STAMP_BYTES, "little", signed=True)), dtype=torch.uint8)
        return cls(value.to(device))

    def mismatched(self, wire: torch.Tensor, layout: WireLayout) -> list[int]:
        """Peers whose splits carry another stamp; waits for the wire."""
        carried = [wire[at:at + STAMP_BYTES] for at in layout.stamps.values()]
        if wire.device.type == "cpu":
            return [peer for peer, stamp in zip(layout.stamps, carried, strict=True)
                    if not torch.equal(stamp, self.value)]
        wrong = (torch.stack(carried) != self.value).any(dim=1).tolist() if carried else []
        return [peer for peer, is_wrong in zip(layout.stamps, wrong, strict=True) if is_wrong]


@dataclass(frozen=True, slots=True)
class Dispatch:
    """The row's tensors go from homes to servers."""

    sides: Sequence[Side]         # per field: queries or keys
    token_bytes: Sequence[int]    # per field
    leaving: WireLayout
    arriving: WireLayout
    stamp: Stamp | None           # on every split
    local: Sequence[list[Copy]]   # per field: (in the row, in the buffer, tokens) of what stays home
    moves_keys: bool              # else every field is the queries'
    is_row: bool                  # the server's buffers are the row's tensors themselves

    @classmethod
    def of(cls, tables: RankTables, fields: Sequence[tuple[str, int]], stamp: Stamp | None = None) -> Dispatch:
        """`fields` are ("q" or "k", bytes of a token)."""
        sides, sizes = _sides(tables, fields)
        leaving, arriving = (WireLayout.of(runs, sizes, tables.num_ranks, stamped=stamp is not None) for runs in (
            [side.send for side in sides], [side.receive for side in sides]))
        local = [[] if side.is_row else _tuples(side.local.row, side.local.buffer, side.local.length) for side in sides]
        return cls(sides, sizes, leaving, arriving, stamp, local, any(name == "k" for name, _ in fields),
                   all(side.is_row for side in sides))

    def ready(self, row: Tensors) -> Tensors:
        """The row's tensors in the form that `pack` and `unpack` read."""
        return row

    def pack(self, row: Tensors) -> torch.Tensor:
        stamps = [] if self.stamp is None else [(self.stamp.value, at) for at in self.leaving.stamps.values()]
        return _pack(row, self.leaving, stamps)

    def unpack(self, wire: torch.Tensor | None, row: Tensors) -> Tensors:
        """The server's buffers: what arrived and what stays home, in task order."""
        if self.is_row:
            return row
        buffers = server_buffers(row, self.sides)
        to, source = [], []
        for field, (tensor, buffer, local) in enumerate(zip(row, buffers, self.local, strict=True)):
            to += [buffer.narrow(0, at, tokens) for _, at, tokens in local]
            source += [tensor.narrow(0, start, tokens) for start, _, tokens in local]
            if wire is not None:
                to += [buffer.narrow(0, start, tokens) for start, _, tokens in self.arriving.copies[field]]
                source += self.arriving.views(wire, field, buffer)
        _copy_all(to, source)
        return buffers


@dataclass(frozen=True, slots=True)
class Combine:
    """The servers' results go back to homes, where the parts of each token come together."""

    sides: Sequence[Side]        # per field, as in dispatch
    token_bytes: Sequence[int]
    leaving: WireLayout
    arriving: WireLayout
    parts: Sequence[RowParts]
    merged_heads: int | None     # the fields are out and log-sum-exp of so many heads, which merge; else all are summed
    moves_keys: bool             # as in dispatch
    is_untouched: bool           # the row's results are the server's themselves

    @classmethod
    def of(cls, tables: RankTables, fields: Sequence[tuple[str, int]], merged_heads: int | None = None) -> Combine:
        """`fields` are ("q" or "k", bytes of a token)."""
        sides, sizes = _sides(tables, fields)
        leaving, arriving = (WireLayout.of(runs, sizes, tables.num_ranks) for runs in (
            [side.receive for side in sides], [side.send for side in sides]))
        parts = {name: RowParts.of(side) for (name, _), side in zip(fields, sides, strict=True)}
        return cls(sides, sizes, leaving, arriving, [parts[name] for name, _ in fields], merged_heads, "k" in parts,
                   all(side.is_untouched for side in sides))

    def ready(self, buffers: Tensors) -> Tensors:
        """The server's results in the form that `pack` and `unpack` read."""
        return buffers

    def pack(self, buffers: Tensors) -> torch.Tensor:
        return _pack(buffers, self.leaving)

    def unpack(self, wire: torch.Tensor | None, buffers: Tensors) -> Tensors:
        """The row's results: own ones and those that arrived, merged or summed in the order of the tables."""
        if self.is_untouched:
            return buffers
        rows = home_rows(buffers, self.sides)
        sources = [[buffer, *([] if wire is None else self.arriving.views(wire, field, buffer))]
                   for field, buffer in enumerate(buffers)]
        for fields in [(0, 1)] if self.merged_heads else [(field,) for field in range(len(rows))]:
            if not self.sides[fields[0]].is_untouched:
                self.parts[fields[0]].fill(
                    tuple(rows[field] for field in fields), tuple(sources[field] for field in fields),
                    _merge if self.merged_heads else _add)
        return rows


Exchange = TypeVar("Exchange", Dispatch, Combine)
Fold = Callable[[Tensors, Tensors], None]


@dataclass(frozen=True, slots=True)
class RowParts:
    """Where a row's results come from: each token's first part is copied, what other servers had of it is folded in.

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

    def fill(self, rows: Tensors, sources: tuple[list[torch.Tensor], ...], fold: Fold) -> None:
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


def server_buffers(row: Tensors, sides: Sequence[Side]) -> Tensors:
    """The row's tensors themselves where they are the server's buffers, else empty buffers."""
    return tuple(tensor if side.is_row else tensor.new_empty((side.buffer_tokens, *tensor.shape[1:]))
                 for tensor, side in zip(row, sides, strict=True))


def home_rows(buffers: Tensors, sides: Sequence[Side]) -> Tensors:
    """The server's results themselves where they are the row's, else empty rows, of zeros where not all get results."""
    return tuple(buffer if side.is_untouched else
                 (buffer.new_zeros if side.leaves_some else buffer.new_empty)((len(side.parts), *buffer.shape[1:]))
                 for buffer, side in zip(buffers, sides, strict=True))


def _sides(tables: RankTables, fields: Sequence[tuple[str, int]]) -> tuple[list[Side], list[int]]:
    sides = {"q": tables.queries, "k": tables.keys}
    return [sides[name] for name, _ in fields], [size for _, size in fields]


def _tuples(*columns: np.ndarray) -> list[Any]:
    return list(zip(*(column.tolist() for column in columns), strict=True))


def _pack(tensors: Tensors, layout: WireLayout, stamps: Sequence[tuple[torch.Tensor, int]] = ()) -> torch.Tensor:
    """Tokens onto the wire: uint8, one split per peer."""
    wire = layout.empty(tensors[0].device)
    to = [wire.narrow(0, at, STAMP_BYTES) for _, at in stamps]
    source = [value for value, _ in stamps]
    for field, tensor in enumerate(tensors):
        to += layout.views(wire, field, tensor)
        source += [tensor.narrow(0, start, tokens) for start, _, tokens in layout.copies[field]]
    _copy_all(to, source)
    return wire


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
