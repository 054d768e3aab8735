"""Where to cut a document so that a wanted amount of work travels in the fewest bytes.

Moving w queries against e keys costs Q and O for w tokens and KV for e tokens. Two shapes carry work F:

- a rectangle: w·e = F, both sides free. Bytes w·q + e·kv are least at w/e = kv/q, four times as many keys as queries
  for llama3-8b. The queries' remaining keys, near the diagonal, stay with the home rank, which owns them.
- a trapezoid up to the diagonal: w·e − w(w−1)/2 = F. The closed form is the same with half a key more per query, so a
  server often gets queries from the middle of a document while the home keeps the tail.

Rectangles need queries with enough keys before them; short documents and remainders move as trapezoids. Keys that a
server already holds are free, so either shape is extended to the end of those keys.
"""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt
from typing import NamedTuple

from distca.planning.tasks import TILE

Measure = Callable[[float, float], float]  # (q_len, kv_len) of queries aligned with the end of their keys -> work


class Prices(NamedTuple):
    """Forward bytes of moving one query (Q in, O out) and one key with its value, and the measure of work."""

    q_bytes: float
    kv_bytes: float
    measure: Measure


class Piece(NamedTuple):
    """Queries [start, stop) against keys from key_start on; cuts are on the tile grid of their slice."""

    document: int
    start: int
    stop: int
    key_start: int
    slice_start: int
    key_stop: int | None = None  # for a rectangle, at most `start`; None: causal, each query's keys end at the query

    def work(self, measure: Measure) -> float:
        q_len = self.stop - self.start
        if self.key_stop is not None:
            return measure(q_len, self.key_stop - self.key_start + 0.5 * (q_len - 1))
        return measure(q_len, self.stop - self.key_start)

    @property
    def key_end(self) -> int:
        return self.stop if self.key_stop is None else self.key_stop


class Shard(NamedTuple):
    """Queries [start, stop) and keys [key_start, key_stop) to move, with their work and the bytes that moving costs."""

    start: int
    stop: int
    key_start: int
    key_stop: int
    work: float
    num_bytes: float

    def beats(self, other: Shard | None) -> bool:
        """Return whether this shard carries more work per byte."""
        return other is None or self.work * other.num_bytes > other.work * self.num_bytes


def cheapest_shard(piece: Piece, wanted: float, room: float, keys_held: int, prices: Prices) -> Shard | None:
    """Return the shard of `piece` with the most work per byte: about `wanted` work, never more than `room`.

    Keys before `keys_held` are free. Return None if not even one tile fits the room.
    """
    whole = piece.work(prices.measure)
    if piece.key_stop is not None:
        return _part_of_rectangle(piece, whole, wanted, room, keys_held, prices)
    if whole <= min(wanted, room):
        return _trapezoid_at(piece, piece.start, piece.stop, keys_held, prices)
    rate = whole / _pairs(piece.stop - piece.start, piece.stop - piece.key_start)  # pairs -> work, near this piece
    pairs = max(min(wanted, room) / rate, 1.0)
    best = _rectangle(piece, pairs, wanted, room, keys_held, prices)
    if best is None:                                             # if a rectangle fits, no trapezoid is cheaper
        for shard in _trapezoids(piece, pairs, wanted, room, rate, keys_held, prices):
            if shard.beats(best):
                best = shard
    return best or _one_tile(piece, room, rate, keys_held, prices)


def _rectangle(piece: Piece, pairs: float, wanted: float, room: float, keys_held: int, prices: Prices) -> Shard | None:
    """Return the piece's last queries against its first keys, in whole tiles; None if it has too few keys for that."""
    ideal_keys = max(sqrt(pairs * prices.q_bytes / prices.kv_bytes), keys_held - piece.key_start)
    start = _tail_start(piece, round(pairs / ideal_keys / TILE) or 1)
    tiles = pairs / (piece.stop - start) / TILE                  # tiles of keys
    for key_tiles in ((-int(-tiles // 1), int(tiles)) if wanted <= room else (int(tiles),)):
        if 0 < key_tiles <= (start - piece.key_start) // TILE:
            return _with_fewer_keys(piece, start, piece.stop, key_tiles, room, keys_held, prices)
    return None


def _part_of_rectangle(
    piece: Piece, whole: float, wanted: float, room: float, keys_held: int, prices: Prices
) -> Shard | None:
    """Return a rectangle within a rectangular piece: its last queries against its first keys."""
    assert piece.key_stop is not None
    num_keys = piece.key_stop - piece.key_start
    if whole <= min(wanted, room):
        return _rectangle_at(piece, piece.start, piece.stop, num_keys, keys_held, prices)
    rate = whole / ((piece.stop - piece.start) * num_keys)
    pairs = max(min(wanted, room) / rate, 1.0)
    ideal_keys = min(max(sqrt(pairs * prices.q_bytes / prices.kv_bytes), keys_held - piece.key_start), num_keys)
    for num_tiles in (max(round(pairs / ideal_keys / TILE), 1), 1):
        start = _tail_start(piece, num_tiles)
        tiles = pairs / (piece.stop - start) / TILE
        shard = _with_fewer_keys(piece, start, piece.stop, -int(-tiles // 1) if wanted <= room else int(tiles), room,
                                 keys_held, prices)
        if shard is not None:
            return shard
    return None


def _with_fewer_keys(
    piece: Piece, start: int, stop: int, key_tiles: int, room: float, keys_held: int, prices: Prices
) -> Shard | None:
    """Return a rectangle with `key_tiles` tiles of keys, or with as many fewer as the room requires.

    Seconds are not proportional to keys, so a rectangle cut in proportion to the room may just exceed it.
    """
    most = piece.key_end - piece.key_start
    while key_tiles > 0:
        shard = _rectangle_at(piece, start, stop, min(key_tiles * TILE, most), keys_held, prices)
        if shard.work <= room:
            return shard
        key_tiles = min(key_tiles - 1, int(key_tiles * room / shard.work))
    return None


def _one_tile(piece: Piece, room: float, rate: float, keys_held: int, prices: Prices) -> Shard | None:
    """Return the last tile of queries with the keys that the room allows, or else the first tile up to the diagonal."""
    start = max(_grid_up(piece.stop - 2 * TILE + 1, piece), piece.start)
    stop = min(start + TILE, piece.stop)
    key_tiles = min((start - piece.key_start) // TILE, int(room / rate / (stop - start) / TILE))
    shard = _with_fewer_keys(piece, start, stop, key_tiles, room, keys_held, prices)
    if shard is not None:
        return shard
    shard = _trapezoid_at(piece, piece.start, min(piece.start + TILE, piece.stop), keys_held, prices)
    return shard if shard.work <= room else None


def _trapezoids(
    piece: Piece, pairs: float, wanted: float, room: float, rate: float, keys_held: int, prices: Prices
) -> list[Shard]:
    """Return trapezoids near the continuous optimum, its width rounded down and up to the tile grid."""
    k = piece.key_start
    width = sqrt(pairs * prices.kv_bytes / (prices.q_bytes + 0.5 * prices.kv_bytes))
    depth = max(pairs / width + 0.5 * width, min(keys_held, piece.stop) - k)
    earliest = sqrt((piece.start - k) ** 2 + 2.0 * pairs)        # the shard may not begin before the piece
    depth = min(max(depth, earliest), piece.stop - k)
    tiles = int((depth - sqrt(max(depth * depth - 2.0 * pairs, 0.0))) // TILE)
    shards = (_snapped(piece, k + pairs / q_len + 0.5 * (q_len - 1), q_len, wanted, room, rate, keys_held, prices)
              for q_len in (tiles * TILE, (tiles + 1) * TILE) if 0 < q_len < piece.stop - piece.start + TILE)
    return [shard for shard in shards if shard is not None]


def _snapped(
    piece: Piece, stop: float, q_len: int, wanted: float, room: float, rate: float, keys_held: int, prices: Prices
) -> Shard | None:
    """Round the stop up to a tile, to carry `wanted`, or else down until the work fits `room`."""
    first = min(piece.start + TILE, piece.stop)
    if wanted <= room:
        end = max(min(_grid_up(stop, piece), piece.stop), first)
        shard = _trapezoid_at(piece, max(_grid_up(end - q_len, piece), piece.start), end, keys_held, prices)
        if shard.work <= room:
            return shard
    end = piece.stop if stop >= piece.stop else _grid_up(stop - TILE + 1, piece)
    while end >= first:
        shard = _trapezoid_at(piece, max(_grid_up(end - q_len, piece), piece.start), end, keys_held, prices)
        if shard.work <= room:
            return shard
        end = _grid_up(end - max(TILE, (shard.work - room) / rate / q_len), piece)
    return None


def _tail_start(piece: Piece, num_tiles: int) -> int:
    """Return where the last `num_tiles` tiles of queries begin; a partial tile at the end joins the tile before it."""
    return max(_grid_up(piece.stop - (num_tiles + 1) * TILE + 1, piece), piece.start)


def _rectangle_at(piece: Piece, start: int, stop: int, kv_len: int, keys_held: int, prices: Prices) -> Shard:
    q_len, key_stop = stop - start, piece.key_start + kv_len
    num_bytes = q_len * prices.q_bytes + max(min(key_stop - keys_held, kv_len), 0) * prices.kv_bytes
    work = prices.measure(q_len, kv_len + 0.5 * (q_len - 1))     # causal shard with the same number of pairs
    return Shard(start, stop, piece.key_start, key_stop, work, num_bytes)


def _trapezoid_at(piece: Piece, start: int, stop: int, keys_held: int, prices: Prices) -> Shard:
    num_bytes = (stop - start) * prices.q_bytes + max(stop - max(keys_held, piece.key_start), 0) * prices.kv_bytes
    work = prices.measure(stop - start, stop - piece.key_start)
    return Shard(start, stop, piece.key_start, stop, work, num_bytes)


def _grid_up(position: float, piece: Piece) -> int:
    """Return the first grid position at or after `position`, in whole tiles from the slice's start."""
    return piece.slice_start - int((piece.slice_start - position) // TILE) * TILE


def _pairs(q_len: int, kv_len: int) -> float:
    return q_len * kv_len - 0.5 * q_len * (q_len - 1)
