"""Where to cut a document so that a wanted amount of work travels in the fewest bytes.

A shard of w queries ending at position e costs Q and O for w tokens and KV for e tokens, and carries w·e − w(w−1)/2
causal pairs. For a fixed amount of work the bytes 2·w·h_q + e·h_kv are least where w/e is about h_kv / (2·h_q + h_kv/2):
a few queries from the middle of a long document, while its home keeps the tail whose keys it holds anyway. Keys that
the server holds already cost nothing, which pulls the shard up to where they end.
"""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt
from typing import NamedTuple

from distca.planning.tasks import TILE

Measure = Callable[[int, int], float]  # (q_len, kv_len) of a whole-prefix shard -> work


class Piece(NamedTuple):
    """Queries [start, stop) of a document that one rank still computes; cuts lie on the tile grid of its slice."""

    document: int
    start: int
    stop: int
    slice_start: int
    slice_stop: int


class Shard(NamedTuple):
    """Queries [start, stop) to move, with the work they carry and the forward bytes they cost."""

    start: int
    stop: int
    work: float
    num_bytes: float


def cheapest_shard(
    piece: Piece, wanted: float, room: float, keys_held: int, q_bytes: float, kv_bytes: float, measure: Measure
) -> Shard | None:
    """The shard of `piece` that carries about `wanted` work, never more than `room`, at the least bytes per work.

    `q_bytes` is what one moved query costs (Q in and O out), `kv_bytes` one key with its value, and keys before
    `keys_held` are free. Returns None where not even one tile fits the room.
    """
    whole = measure(piece.stop - piece.start, piece.stop)
    if whole <= min(wanted, room):
        return _priced(piece.start, piece.stop, keys_held, q_bytes, kv_bytes, whole)

    rate = whole / _pairs(piece.stop - piece.start, piece.stop)  # pairs -> work, near this piece
    pairs = max(min(wanted, room) / rate, 1.0)
    stop = _best_stop(piece, pairs, keys_held, q_bytes, kv_bytes)
    width = stop - sqrt(max(stop * stop - 2.0 * pairs, 0.0))
    best: Shard | None = None
    for q_len in _tile_widths(width, piece):
        shard = _snap(piece, q_len, wanted, room, rate, keys_held, q_bytes, kv_bytes, measure)
        if shard is not None and (best is None or shard.work * best.num_bytes > best.work * shard.num_bytes):
            best = shard
    return best


def _best_stop(piece: Piece, pairs: float, keys_held: int, q_bytes: float, kv_bytes: float) -> float:
    """Continuous optimum of the shard's end, inside what the piece allows."""
    width = sqrt(pairs * kv_bytes / (q_bytes + 0.5 * kv_bytes))
    stop = pairs / width + 0.5 * width
    stop = max(stop, min(keys_held, piece.stop))                 # free keys: fewer queries carry the same work
    earliest = sqrt(piece.start * piece.start + 2.0 * pairs)     # the shard may not begin before the piece
    return min(max(stop, earliest), piece.stop)


def _tile_widths(width: float, piece: Piece) -> tuple[int, ...]:
    """Shard lengths to try: the tiles around the optimum."""
    tiles = int(width // TILE)
    longest = -(-(piece.stop - piece.start) // TILE)
    return tuple(q_len * TILE for q_len in (tiles, tiles + 1) if 1 <= q_len <= longest)


def _snap(
    piece: Piece, q_len: int, wanted: float, room: float, rate: float, keys_held: int, q_bytes: float, kv_bytes: float,
    measure: Measure,
) -> Shard | None:
    """Place a shard of about `q_len` queries on the slice's grid: up to carry `wanted`, down to stay in `room`."""
    ideal = min(wanted, room) / rate / q_len + 0.5 * (q_len - 1)
    if wanted <= room:
        stop = _grid_up(ideal, piece)
        shard = _at(piece, stop, q_len, keys_held, q_bytes, kv_bytes, measure)
        if shard.work <= room:
            return shard
    stop = _grid_down(ideal, piece)
    while stop > piece.start:
        shard = _at(piece, stop, q_len, keys_held, q_bytes, kv_bytes, measure)
        if shard.work <= room:
            return shard
        stop = _grid_down(stop - TILE * max(1.0, (shard.work - room) / rate / q_len / TILE), piece)
    return None


def _at(
    piece: Piece, stop: int, q_len: int, keys_held: int, q_bytes: float, kv_bytes: float, measure: Measure
) -> Shard:
    ragged = (stop - piece.slice_start) % TILE                   # the slice's own end is off the grid
    start = max(stop - q_len if ragged == 0 else stop - ragged - q_len + TILE, piece.start)
    return _priced(start, stop, keys_held, q_bytes, kv_bytes, measure(stop - start, stop))


def _priced(start: int, stop: int, keys_held: int, q_bytes: float, kv_bytes: float, work: float) -> Shard:
    return Shard(start, stop, work, (stop - start) * q_bytes + max(stop - keys_held, 0) * kv_bytes)


def _grid_up(position: float, piece: Piece) -> int:
    tiles = -(-(position - piece.slice_start) // TILE)
    return max(min(piece.slice_start + int(tiles) * TILE, piece.stop), piece.start + min(TILE, piece.stop - piece.start))


def _grid_down(position: float, piece: Piece) -> int:
    if position >= piece.stop:
        return piece.stop
    tiles = (position - piece.slice_start) // TILE
    return piece.slice_start + int(tiles) * TILE


def _pairs(q_len: int, kv_len: int) -> float:
    return q_len * kv_len - 0.5 * q_len * (q_len - 1)
