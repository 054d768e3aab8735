"""Where tensors stand on the wire, and the copies between a home's row, the wire and a server's buffer.

A segment of the wire, one per peer, holds several fields one after another (queries, keys, values; or outputs and
log-sum-exps): each field's runs in table order. Where everything lies is worked out once per plan. Results that several
servers computed for the same token are merged or summed in float32. The trips here copy with torch, on any device;
`gpu_copies` has the same trips in one launch a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import numpy as np
import torch

from distca.dispatch.tables import LocalRuns, RankTables, Runs, Side
from distca.kernels.interface import accumulation_dtype, merge

ALIGNMENT = 16  # bytes; every field of a segment begins on it, whatever its element size
STAMP_BYTES = 16

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class Field:
    """One tensor's share of a segment: which runs of it travel, and how many bytes one token takes."""

    runs: Runs
    token_bytes: int


@dataclass(frozen=True, slots=True)
class Segments:
    """Where every run of every field lies on one side of the wire."""

    splits: list[int]                        # bytes per peer
    copies: list[list[tuple[int, int, int]]]  # per field: (first token, tokens, first byte on the wire)
    stamps: dict[int, int]                   # peer -> first byte of its segment, kept free for a stamp; may be none

    @property
    def num_bytes(self) -> int:
        return sum(self.splits)


def segments(fields: Sequence[Field], num_ranks: int, *, stamped: bool = False) -> Segments:
    """Lay out one side of the wire; with `stamped`, every segment that is not empty begins with room for a stamp."""
    per_peer = np.array([f.runs.tokens_per_peer(num_ranks) * f.token_bytes for f in fields])  # [field, peer]
    per_peer += -per_peer % ALIGNMENT
    splits = per_peer.sum(axis=0)
    room = np.where(splits > 0, STAMP_BYTES, 0) if stamped else np.zeros_like(splits)
    splits = splits + room
    begin = np.cumsum(splits) - splits                           # [peer]
    field_begin = begin + room + np.cumsum(per_peer, axis=0) - per_peer
    stamps = {int(peer): int(begin[peer]) for peer in np.flatnonzero(room)}
    copies = []
    for field, here in zip(fields, field_begin, strict=True):
        runs = field.runs
        tokens = runs.tokens_per_peer(num_ranks)
        before = np.cumsum(runs.length) - runs.length - (np.cumsum(tokens) - tokens)[runs.peer]  # within the peer
        at = here[runs.peer] + before * field.token_bytes
        copies.append(list(zip(runs.start.tolist(), runs.length.tolist(), at.tolist(), strict=True)))
    return Segments(splits.tolist(), copies, stamps)


@dataclass(frozen=True, slots=True)
class Stamp:
    """A plan's digest on every segment, so that a rank notices when another follows a different plan."""

    value: torch.Tensor  # [STAMP_BYTES] uint8

    @classmethod
    def of(cls, digest: int, device: torch.device) -> Stamp:
        value = torch.frombuffer(bytearray(digest.to_bytes(STAMP_BYTES, "little", signed=True)), dtype=torch.uint8)
        return cls(value.to(device))

    def put(self, wire: torch.Tensor, segments: Segments) -> None:
        for at in segments.stamps.values():
            wire[at:at + STAMP_BYTES] = self.value

    def strangers(self, wire: torch.Tensor, segments: Segments) -> list[int]:
        """Peers whose segments carry another stamp; waits for the wire."""
        carried = [wire[at:at + STAMP_BYTES] for at in segments.stamps.values()]
        wrong = (torch.stack(carried) != self.value).any(dim=1).tolist() if carried else []
        return [peer for peer, is_wrong in zip(segments.stamps, wrong, strict=True) if is_wrong]


@dataclass(frozen=True, slots=True)
class ToServers:
    """A trip of the row's tensors from homes to servers."""

    sides: Sequence[Side]        # per field: queries or keys
    token_bytes: Sequence[int]   # per field
    leaving: Segments
    arriving: Segments
    stamp: Stamp | None          # on every segment

    @classmethod
    def of(cls, tables: RankTables, fields: Sequence[tuple[str, int]], stamp: Stamp | None = None) -> ToServers:
        """`fields` are ("q" or "k", bytes of a token)."""
        sides, sizes = _sides(tables, fields)
        leaving, arriving = (
            segments([Field(runs, size) for runs, size in zip(which, sizes, strict=True)], tables.num_ranks,
                     stamped=stamp is not None)
            for which in ([side.send for side in sides], [side.receive for side in sides]))
        return cls(sides, sizes, leaving, arriving, stamp)

    def ready(self, row: Tensors) -> Tensors:
        """The row's tensors in the form that `pack` and `unpack` read."""
        return row

    def pack(self, row: Tensors) -> torch.Tensor:
        wire = pack(row, self.leaving)
        if self.stamp is not None:
            self.stamp.put(wire, self.leaving)
        return wire

    def unpack(self, wire: torch.Tensor | None, row: Tensors) -> Tensors:
        """The server's buffers: what arrived and what stays home, in task order."""
        buffers = server_buffers(row, self.sides)
        for tensor, buffer, side in zip(row, buffers, self.sides, strict=True):
            if not side.is_row:
                copy_local(tensor, buffer, side.local)
        if wire is not None:
            unpack(wire, buffers, self.arriving)
        return buffers


@dataclass(frozen=True, slots=True)
class ToHomes:
    """A trip of the server's results back to homes, where the parts of each token come together."""

    sides: Sequence[Side]        # per field, as on the way to servers
    token_bytes: Sequence[int]
    leaving: Segments
    arriving: Segments
    combinations: Sequence[Combination]
    merged_heads: int | None     # the fields are out and log-sum-exp of so many heads, which merge; else all are summed

    @classmethod
    def of(
        cls, tables: RankTables, fields: Sequence[tuple[str, int]], merged_heads: int | None = None
    ) -> ToHomes:
        sides, sizes = _sides(tables, fields)
        leaving, arriving = (
            segments([Field(runs, size) for runs, size in zip(which, sizes, strict=True)], tables.num_ranks)
            for which in ([side.receive for side in sides], [side.send for side in sides]))
        how = {"q": combination(tables.queries), "k": combination(tables.keys)}
        return cls(sides, sizes, leaving, arriving, [how[name] for name, _ in fields], merged_heads)

    def ready(self, buffers: Tensors) -> Tensors:
        """The server's results in the form that `pack` and `unpack` read."""
        return buffers

    def pack(self, buffers: Tensors) -> torch.Tensor:
        return pack(buffers, self.leaving)

    def unpack(self, wire: torch.Tensor | None, buffers: Tensors) -> Tensors:
        """The row's results: own ones and those that arrived, merged or summed in the order of the tables."""
        rows = home_rows(buffers, self.sides)
        sources = [[buffer, *([] if wire is None else run_views(wire, buffer, copies))]
                   for buffer, copies in zip(buffers, self.arriving.copies, strict=True)]
        for group in [(0, 1)] if self.merged_heads else [(field,) for field in range(len(rows))]:
            if not untouched(self.sides[group[0]]):
                combine, empty = (merge_attention, (0.0, -torch.inf)) if self.merged_heads else (add, (0.0,))
                bring_together(tuple(rows[field] for field in group), tuple(sources[field] for field in group),
                               self.combinations[group[0]], combine, empty)
        return rows


Trip = TypeVar("Trip", ToServers, ToHomes)


def _sides(tables: RankTables, fields: Sequence[tuple[str, int]]) -> tuple[list[Side], list[int]]:
    sides = {"q": tables.queries, "k": tables.keys}
    return [sides[name] for name, _ in fields], [size for _, size in fields]


def untouched(side: Side) -> bool:
    """Every token is served at home, once and in the row's order: the server's results are the row's."""
    return side.is_row and len(side.send.peer) == 0


def server_buffers(row: Tensors, sides: Sequence[Side]) -> Tensors:
    """The row's tensors themselves where they are the server's buffers, else empty buffers."""
    return tuple(tensor if side.is_row else tensor.new_empty((side.buffer_tokens, *tensor.shape[1:]))
                 for tensor, side in zip(row, sides, strict=True))


def home_rows(buffers: Tensors, sides: Sequence[Side]) -> Tensors:
    """The server's results themselves where they are the row's, else empty rows."""
    return tuple(buffer if untouched(side) else buffer.new_empty((len(side.parts), *buffer.shape[1:]))
                 for buffer, side in zip(buffers, sides, strict=True))


def pack(tensors: Tensors, segments: Segments) -> torch.Tensor:
    """Tokens onto the wire: uint8, one segment per peer."""
    wire = empty_wire(segments, tensors[0].device)
    to, source = [], []
    for tensor, copies in zip(tensors, segments.copies, strict=True):
        for start, length, at in copies:
            source.append(tensor[start:start + length])
            to.append(on_wire(wire, at, length, tensor))
    copy_all(to, source)
    return wire


def empty_wire(segments: Segments, device: torch.device) -> torch.Tensor:
    return torch.empty(segments.num_bytes, dtype=torch.uint8, device=device)


def unpack(wire: torch.Tensor, tensors: Tensors, segments: Segments) -> None:
    """Tokens from the wire into their places."""
    to, source = [], []
    for tensor, copies in zip(tensors, segments.copies, strict=True):
        for start, length, at in copies:
            to.append(tensor[start:start + length])
            source.append(on_wire(wire, at, length, tensor))
    copy_all(to, source)


def on_wire(wire: torch.Tensor, at: int, length: int, like: torch.Tensor) -> torch.Tensor:
    """`length` tokens of `like`'s kind that stand at byte `at`."""
    trailing = like.shape[1:]
    num_bytes = length * trailing.numel() * like.element_size()
    return wire[at:at + num_bytes].view(like.dtype).view(length, *trailing)


def copy_all(to: list[torch.Tensor], source: list[torch.Tensor]) -> None:
    if to:
        torch._foreach_copy_(to, source)


def copy_local(row: torch.Tensor, buffer: torch.Tensor, local: LocalRuns) -> None:
    """What stays home goes from the row into the buffer without touching the wire."""
    rows, buffers, lengths = local.row.tolist(), local.buffer.tolist(), local.length.tolist()
    copy_all([buffer[b:b + n] for b, n in zip(buffers, lengths, strict=True)],
             [row[r:r + n] for r, n in zip(rows, lengths, strict=True)])


def run_views(wire: torch.Tensor, like: torch.Tensor, copies: list[tuple[int, int, int]]) -> list[torch.Tensor]:
    """A field's runs as they stand on the wire, in table order."""
    return [on_wire(wire, at, length, like) for _, length, at in copies]


@dataclass(frozen=True, slots=True)
class Combination:
    """How one row's results come together: copied where one server had the token, combined where several did.

    Sources are numbered: 0 is this rank's own server buffer, 1 + i the i-th run that comes back.
    """

    num_combined: int
    compact: list[tuple[int, int, int]]         # (row, compact, tokens): where combined tokens stand in the row
    copies: list[tuple[int, int, int, int]]     # (row, source, first token there, tokens)
    combines: list[tuple[int, int, int, int]]   # (compact, source, first token there, tokens)


def combination(side: Side) -> Combination:
    """For results that come back along what `side` sent and kept."""
    several = side.parts > 1
    place: np.ndarray = np.cumsum(several) - several                         # compact position of every combined token
    edges = np.flatnonzero(np.diff(several.astype(np.int8), prepend=0, append=0)).tolist()
    compact = [(a, int(place[a]), b - a) for a, b in zip(edges[::2], edges[1::2], strict=True)]
    parts = [(row, 0, buffer, length) for row, buffer, length in zip(
        side.local.row.tolist(), side.local.buffer.tolist(), side.local.length.tolist(), strict=True)]
    parts += [(row, 1 + run, 0, length) for run, (row, length) in enumerate(zip(
        side.send.start.tolist(), side.send.length.tolist(), strict=True))]
    copies, combines = [], []
    change = np.flatnonzero(np.diff(several.astype(np.int8))) + 1  # where tokens turn from one server's to several's
    for row, source, first, length in parts:
        inner = change[np.searchsorted(change, row, side="right"):np.searchsorted(change, row + length)].tolist()
        for a, b in pairwise([row, *inner, row + length]):
            if several[a]:
                combines.append((int(place[a]), source, first + a - row, b - a))
            else:
                copies.append((a, source, first + a - row, b - a))
    return Combination(int(several.sum()), compact, copies, combines)


Combine = Callable[[Tensors, Tensors], None]


def bring_together(
    rows: Tensors, sources: tuple[list[torch.Tensor], ...], how: Combination, combine: Combine, empty: tuple[float, ...]
) -> None:
    """Fill each of `rows` from its sources; `combine` folds a part into the running result of all fields at once."""
    for row, parts in zip(rows, sources, strict=True):
        copy_all([row[start:start + tokens] for start, _, _, tokens in how.copies],
                 [parts[source][first:first + tokens] for _, source, first, tokens in how.copies])
    if how.num_combined == 0:
        return
    running = tuple(
        row.new_full((how.num_combined, *row.shape[1:]), value, dtype=accumulation_dtype(row.dtype))
        for row, value in zip(rows, empty, strict=True))
    for compact, source, first, tokens in how.combines:
        combine(tuple(total[compact:compact + tokens] for total in running),
                tuple(parts[source][first:first + tokens] for parts in sources))
    for row, total in zip(rows, running, strict=True):
        for start, compact, tokens in how.compact:
            row[start:start + tokens] = total[compact:compact + tokens]


def add(running: Tensors, part: Tensors) -> None:
    for total, piece in zip(running, part, strict=True):
        total += piece


def merge_attention(running: Tensors, part: Tensors) -> None:
    """Fold a partial (out, lse) into the running one."""
    out, lse = merge(running[0], running[1], *part)
    running[0].copy_(out)
    running[1].copy_(lse)
