"""Block tables for copying all fields of an exchange in one launch, built once per plan.

Tables count in units: the largest power of two up to 16 bytes that divides a token of every exchanged field, so any
number of heads and dims works. The fastest unit, 16 bytes, needs in bf16 dims divisible by 8 and heads divisible by 4.
A few runs can make 100,000 blocks, so the host lays out runs and the device cuts them. This module needs no triton.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

import numpy as np
import torch

from distca.columns import spread
from distca.dispatch import Side
from distca.runtime.exchange import ALIGNMENT, STAMP_BYTES, Combine, Dispatch, Packing, WireLayout

COPY_BYTES = 2**15  # per program, in a copy
PART_BYTES = 2**14  # per program, in a sum or a merge


@dataclass(frozen=True, slots=True)
class Copies:
    """Blocks to copy between numbered tensors."""

    table: torch.Tensor  # int64 [blocks, 5]: source, target, first unit of the source, first unit of the target, units
    unit: int            # bytes
    block: int           # maximum bytes of a block; a power of two


@dataclass(frozen=True, slots=True)
class Sums:
    """Blocks of rows to fill with the sum of their parts, in the order of the dispatch tables."""

    table: torch.Tensor  # int64 [blocks, 6]: field, first unit, units, offset in its interval, its parts [a, b)
    parts: torch.Tensor  # int64 [parts, 2]: whether on the wire (or local), first unit of the interval there
    unit: int            # bytes
    block: int           # maximum bytes of a block


@dataclass(frozen=True, slots=True)
class Merges:
    """Blocks of (token, head) pairs to fill with the merged attention of their parts."""

    table: torch.Tensor  # int64 [blocks, 5]: first pair, pairs, offset in its interval, its parts [a, b)
    parts: torch.Tensor  # int64 [parts, 3]: whether on the wire (or local), first unit of out, first pair of lse
    unit: int            # bytes of out
    block: int           # maximum pairs of a block; a power of two


@dataclass(frozen=True, slots=True)
class Intervals:
    """Intervals of a row whose tokens have the same parts: local runs first, then received runs, in table order."""

    begin: np.ndarray    # [intervals]
    length: np.ndarray   # [intervals]
    first: np.ndarray    # [intervals + 1] into the columns below
    run: np.ndarray      # [parts] local runs, then received runs
    offset: np.ndarray   # [parts] first token of the interval in the run


def packing(exchange: Packing, device: torch.device, block: int) -> Copies:
    """Return the copies of all fields onto the wire; the stamp is the last source."""
    runs = [(field, 0, start * size, at, tokens * size)
            for field, (size, copies) in enumerate(zip(exchange.token_bytes, exchange.leaving.copies, strict=True))
            for start, at, tokens in copies]
    runs += [(len(exchange.token_bytes), 0, 0, at, STAMP_BYTES) for at in exchange.leaving.stamps.values()]
    return _copies(runs, exchange.token_bytes, device, block)


def unpacking(exchange: Dispatch, device: torch.device, block: int) -> Copies:
    """Return the copies from the wire (source 0) and the row's tensors (sources 1 and on) into the server's buffers."""
    runs: list[tuple[int, int, int, int, int]] = []
    for field, size in enumerate(exchange.token_bytes):
        runs += [(0, field, at, start * size, tokens * size) for start, at, tokens in exchange.arriving.copies[field]]
        runs += [(1 + field, field, row * size, buffer * size, tokens * size)
                 for row, buffer, tokens in exchange.local[field]]
    return _copies(runs, exchange.token_bytes, device, block)


def _copies(
    runs: list[tuple[int, int, int, int, int]], token_bytes: Sequence[int], device: torch.device, block: int
) -> Copies:
    """Cut runs (source, target, first byte of the source, first byte of the target, bytes) into blocks.

    Blocks that read the same bytes are adjacent, to hit the cache: keys are often sent to many servers.
    """
    unit = gcd(ALIGNMENT, *token_bytes)
    columns = np.array(runs, dtype=np.int64).reshape(-1, 5)
    columns[:, 2:] //= unit
    run, begin, count = chunks(columns[:, 4], block // unit, columns[:, 2], device)
    table = _upload(columns, device)[run]
    table[:, 2:4] += begin[:, None]
    table[:, 4] = count
    return Copies(table[torch.argsort((table[:, 0] << 48) + table[:, 2])], unit, block)


def chunks(
    length: np.ndarray, block: int, at: np.ndarray, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Cut runs that begin at `at` at every multiple of `block`; return each piece's run, offset in it and length."""
    phase = at % block
    num = -(-(phase + length) // block) * (length > 0)
    of_run = _upload(np.stack([num, np.cumsum(num) - num, phase, length]), device)
    run = torch.repeat_interleave(of_run[0], output_size=int(num.sum()))
    _, first, phases, lengths = of_run[:, run]
    edge = (torch.arange(len(run), device=device) - first) * block - phases
    begin = edge.clamp(min=0)
    return run, begin, torch.minimum(edge + block, lengths) - begin


def intervals(side: Side) -> Intervals:
    start = np.concatenate([side.local.row, side.send.start])
    stop = start + np.concatenate([side.local.length, side.send.length])
    edges = np.unique(np.concatenate([[0, len(side.parts)], start, stop]))
    first = np.searchsorted(edges, start)
    num = np.searchsorted(edges, stop) - first
    run, within = spread(num)
    interval = first[run] + within
    order = np.lexsort((run, interval))
    run, interval = run[order], interval[order]
    return Intervals(edges[:-1], np.diff(edges), np.searchsorted(interval, np.arange(len(edges))), run,
                     edges[interval] - start[run])


def _offsets(side: Side, of: Intervals, field: int, size: int, arriving: WireLayout) -> tuple[np.ndarray, np.ndarray]:
    """Return per part whether it is on the wire, and its interval's byte offset on the wire or in the local buffer."""
    begin = np.concatenate([side.local.buffer * size,
                            np.array([at for _, at, _ in arriving.copies[field]], dtype=np.int64)])
    return of.run >= len(side.local.row), begin[of.run] + of.offset * size


def sums(exchange: Combine, device: torch.device, block: int) -> Sums:
    """Return the sums of all fields, except fields whose buffer already is the row."""
    unit = gcd(ALIGNMENT, *exchange.token_bytes)
    blocks, parts = [_upload(np.empty((0, 6)), device)], [np.empty((0, 2), dtype=np.int64)]
    for field, (side, size) in enumerate(zip(exchange.sides, exchange.token_bytes, strict=True)):
        if not side.is_untouched:
            of, per_token = intervals(side), size // unit
            first = of.first + sum(map(len, parts))
            interval, before, count = chunks(of.length * per_token, block // unit, of.begin * per_token, device)
            begin, a, b = _upload(np.stack([of.begin * per_token, first[:-1], first[1:]]), device)[:, interval]
            blocks.append(torch.stack([torch.full_like(count, field), begin + before, count, before, a, b], dim=1))
            is_on_wire, at = _offsets(side, of, field, size, exchange.arriving)
            parts.append(np.stack([is_on_wire, at // unit], axis=1))
    return Sums(torch.cat(blocks), _upload(np.concatenate(parts), device), unit, block)


def merges(exchange: Combine, device: torch.device, block: int) -> Merges:
    """Return the merges of out and log-sum-exp; `block` is in bytes of out."""
    assert exchange.merged_heads is not None
    side, heads, (out_size, lse_size) = exchange.sides[0], exchange.merged_heads, exchange.token_bytes
    unit, pairs = gcd(ALIGNMENT, out_size), max(1, block >> (out_size // heads - 1).bit_length())
    if side.is_untouched:
        return Merges(_upload(np.empty((0, 5)), device), _upload(np.empty((0, 3)), device), unit, pairs)
    of = intervals(side)
    interval, before, count = chunks(of.length * heads, pairs, of.begin * heads, device)
    begin, a, b = _upload(np.stack([of.begin * heads, of.first[:-1], of.first[1:]]), device)[:, interval]
    (is_on_wire, out_at), (_, lse_at) = (_offsets(side, of, field, size, exchange.arriving)
                                         for field, size in enumerate((out_size, lse_size)))
    parts = np.stack([is_on_wire, out_at // unit, lse_at * heads // lse_size], axis=1)
    return Merges(torch.stack([begin + before, count, before, a, b], dim=1), _upload(parts, device), unit, pairs)


def _upload(table: np.ndarray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(table, dtype=np.int64)).to(device)
