"""One cut: inside its room, on the tile, priced as it travels, and nearly as cheap as the best of all cuts."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distca.cost.latency_table import analytic_table
from distca.cost.work import causal_pairs, pairs_of_shard
from distca.models import MODELS
from distca.planning.shard_cut import Piece, Prices, cheapest_shard
from distca.planning.tasks import TILE, TaskTable
from distca.planning.traffic import traffic
from distca.spec import ModelShape
from distca.workload.layout import layout_from_slices

LLAMA = MODELS["llama3-8b"]
PRICES = Prices(2 * LLAMA.q_token_bytes(), LLAMA.kv_token_bytes(), pairs_of_shard)
EQUAL_PRICES = Prices(1024, 1024, pairs_of_shard)                # as many KV heads as query heads and outputs


@st.composite
def cuts(draw: st.DrawFn, whole_tiles: bool = False) -> tuple[Piece, float, float, int]:
    """(piece, wanted, room, keys_held): slices that begin anywhere, with or without keys cut off already."""
    start = draw(st.integers(0, 2500))
    key_start = TILE * draw(st.integers(0, start // TILE)) if draw(st.booleans()) else 0
    tail = 0 if whole_tiles else draw(st.integers(0, TILE - 1))
    stop = start + max(TILE * draw(st.integers(1, 13)) - tail, 1)
    piece = Piece(0, start, stop, key_start, start)
    whole = piece.work(pairs_of_shard)
    wanted = max(draw(st.floats(0, 1.5)) * whole, 1.0)
    room = max(draw(st.floats(0, 2)) * draw(st.sampled_from([wanted, whole])), 1.0)
    keys_held = draw(st.just(0) | st.integers(key_start, stop))
    return piece, wanted, room, keys_held


def all_shards(piece: Piece, keys_held: int, prices: Prices) -> list[tuple[int, int, int, int, float]]:
    """Every tile cut of a piece as (start, stop, key_stop, work, bytes): up to the diagonal, or fewer keys in tiles."""
    edges = [*range(piece.start, piece.stop, TILE), piece.stop]
    free = max(keys_held, piece.key_start)
    shards = []
    for i, start in enumerate(edges[:-1]):
        for stop in edges[i + 1:]:
            q_len = stop - start
            for key_stop in (stop, *range(piece.key_start + TILE, start + 1, TILE)):
                hidden = q_len * (q_len - 1) // 2 if key_stop == stop else 0
                shards.append((start, stop, key_stop, q_len * (key_stop - piece.key_start) - hidden,
                               q_len * prices.q_bytes + max(key_stop - free, 0) * prices.kv_bytes))
    return shards


@settings(max_examples=300, deadline=None)
@given(cuts(), st.sampled_from([PRICES, EQUAL_PRICES]))
def test_shards_are_tile_cuts_within_room_priced_exactly(cut: tuple[Piece, float, float, int], prices: Prices) -> None:
    piece, wanted, room, keys_held = cut
    shard = cheapest_shard(piece, wanted, room, keys_held, prices)
    possible = all_shards(piece, keys_held, prices)
    if shard is None:
        whole_tiles = [work for start, stop, _, work, _ in possible if stop - start >= TILE]
        assert not whole_tiles or min(whole_tiles) > room        # refuses only where not one tile fits
        return
    assert shard.key_start == piece.key_start
    assert shard.work <= room
    assert (shard.start, shard.stop, shard.key_stop, shard.work, shard.num_bytes) in possible


@settings(max_examples=200, deadline=None)
@given(cuts())
def test_a_piece_that_fits_and_is_wanted_moves_whole(cut: tuple[Piece, float, float, int]) -> None:
    piece, wanted, _, keys_held = cut
    whole = piece.work(pairs_of_shard)
    shard = cheapest_shard(piece, whole + wanted, whole, keys_held, PRICES)
    assert shard is not None
    assert (shard.start, shard.stop, shard.key_stop) == (piece.start, piece.stop, piece.stop)
    assert shard.work == causal_pairs(piece.start, piece.stop, piece.key_start)


@settings(max_examples=200, deadline=None)
@given(cuts(whole_tiles=True))
def test_whole_tiles_carry_about_what_is_wanted(cut: tuple[Piece, float, float, int]) -> None:
    """At least two fifths of the work asked for, or all but two tiles of queries: one for the end, one for the room."""
    piece, wanted, room, keys_held = cut
    shard = cheapest_shard(piece, wanted, room, keys_held, PRICES)
    if shard is not None:
        tile = TILE * (piece.stop - piece.key_start)
        asked = min(wanted, room, piece.work(pairs_of_shard))
        assert shard.work >= min(0.4 * asked, asked - 2 * tile)


def excess(seeds: range, draw_piece: Callable[..., Any], prices: Prices) -> np.ndarray:
    """Bytes over those of the cheapest tile cut that carries no less and stays in the room, for many pieces."""
    over = []
    for seed in seeds:
        piece, wanted, room, keys_held = draw_piece(np.random.default_rng(seed))
        shard = cheapest_shard(piece, wanted, room, keys_held, prices)
        if shard is None or shard.work >= piece.work(pairs_of_shard):
            continue
        rivals = [num_bytes for *_, work, num_bytes in all_shards(piece, keys_held, prices)
                  if shard.work <= work <= room]
        over.append(shard.num_bytes / min(rivals))
    assert len(over) > 0.5 * len(seeds)
    return np.array(over)


def deep_piece(rng: np.random.Generator, *, tail: bool = False, holds: bool = False) -> tuple[Piece, float, float, int]:
    start = int(rng.integers(0, 2500))
    stop = start + TILE * int(rng.integers(2, 14)) - (int(rng.integers(0, TILE)) if tail else 0)
    piece = Piece(0, start, stop, 0, start)
    wanted = rng.uniform(0.05, 1.0) * piece.work(pairs_of_shard)
    return piece, wanted, wanted * rng.uniform(1.0, 3.0), int(rng.integers(0, stop)) if holds else 0


@pytest.mark.parametrize("prices", [PRICES, EQUAL_PRICES])
def test_whole_tiles_are_cut_nearly_as_cheaply_as_any(prices: Prices) -> None:
    """The closed form rounds to one of the neighbouring tile cuts, which an exhaustive search rarely beats."""
    over = excess(range(300), deep_piece, prices)
    assert np.quantile(over, 0.9) <= 1.02
    assert over.max() <= 1.3


@pytest.mark.parametrize("prices", [PRICES, EQUAL_PRICES])
def test_odd_tails_and_held_keys_cost_little_in_general(prices: Prices) -> None:
    over = excess(range(300), lambda rng: deep_piece(rng, tail=True, holds=True), prices)
    assert np.median(over) <= 1.02
    assert over.mean() <= 1.25
    assert prices is EQUAL_PRICES or np.quantile(over, 0.9) <= 1.2


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 3000), st.integers(1, 3000), st.floats(0.01, 1.2), st.floats(1, 3), st.data())
def test_the_price_is_what_travels(before: int, length: int, part: float, more: float, data: st.DataObject) -> None:
    """The server owns a document's first tokens, so it holds their keys; the piece is the rest, at home elsewhere."""
    columns = [[0, 0], [0, before], [before, before + length], [1, 0]]
    document, start, stop, rank = (np.array(column if before else column[1:]) for column in columns)
    layout = layout_from_slices(np.array([before + length]), document, start, stop, rank, 2)
    piece = Piece(0, before, before + length, 0, before)
    wanted = part * piece.work(pairs_of_shard)
    shard = cheapest_shard(piece, wanted, wanted * more, before, PRICES)
    if shard is None:
        return
    tasks = TaskTable(*(np.array([value]) for value in (0, shard.start, shard.stop, 0, shard.key_stop, 0, 1)))
    moved = traffic(layout, tasks, 2)
    assert moved.sent_bytes(LLAMA).sum() == shard.num_bytes


def test_the_best_rectangle_has_four_keys_per_query() -> None:
    """bytes w·16384 + e·4096 at w·e = F are least at e = 4w: 1,024 queries x 4,096 keys here."""
    piece = Piece(0, 16_384, 32_768, 0, 16_384)
    shard = cheapest_shard(piece, 1024 * 4096, 1e12, 0, PRICES)
    assert shard is not None
    assert (shard.stop - shard.start, shard.key_stop - shard.key_start) == (1024, 4096)
    assert shard.num_bytes == 2 * 4096 * 4096


def test_keys_held_already_draw_the_cut_to_themselves() -> None:
    piece = Piece(0, 16_384, 32_768, 0, 16_384)
    shard = cheapest_shard(piece, 1024 * 4096, 1e12, 16_384, PRICES)
    assert shard is not None
    assert shard.key_stop == 16_384                              # all of them, since they are free
    assert shard.num_bytes == 256 * 16_384                       # so only a quarter of the queries need to travel


@pytest.mark.parametrize("key_stop", [None, 98_304])
def test_seconds_that_are_not_proportional_to_keys_still_fit_a_room(key_stop: int | None) -> None:
    """A task takes some seconds however few keys it has, so 0.9 of the keys take more than 0.9 of the seconds."""
    def seconds(q_len: float, kv_len: float) -> float:
        return 2e6 + pairs_of_shard(q_len, kv_len)

    piece = Piece(0, 98_304, 98_304 + TILE, 0, 98_304, key_stop)
    room = 0.9 * piece.work(seconds)
    shard = cheapest_shard(piece, 2 * room, room, 0, Prices(PRICES.q_bytes, PRICES.kv_bytes, seconds))
    assert shard is not None and shard.stop - shard.start == TILE
    assert 0.99 * room < shard.work <= room


@settings(max_examples=100, deadline=None)
@given(cuts(), st.sampled_from([LLAMA, ModelShape("mha", 2, 256, 8, 8, 32, 704, 257)]))
def test_seconds_stay_within_room_too(cut: tuple[Piece, float, float, int], model: ModelShape) -> None:
    piece, wanted, room, keys_held = cut
    table = analytic_table(model, 550e12, max_kv_len=8192)

    def seconds(q_len: float, kv_len: float) -> float:
        return table.seconds(q_len, max(q_len, kv_len))

    scale = piece.work(seconds) / piece.work(pairs_of_shard)
    prices = Prices(2 * model.q_token_bytes(), model.kv_token_bytes(), seconds)
    shard = cheapest_shard(piece, wanted * scale, room * scale, keys_held, prices)
    if shard is not None:
        assert 0 < shard.work <= room * scale
        assert (shard.start - piece.start) % TILE == 0
        assert (shard.stop - piece.start) % TILE == 0 or shard.stop == piece.stop
