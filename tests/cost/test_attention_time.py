"""Attention's seconds: bounds by arithmetic, tails against items dealt one by one, heads that fit or are refused."""

import functools
import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distca.cost import attention_time
from distca.cost.attention_time import AttentionTime, shipped_names, shipped_table
from distca.cost.dealing import WorkList
from distca.cost.latency_table import LatencyTable, analytic_table
from distca.models import model_named
from distca.spec import ModelShape

MODEL = model_named("llama3-8b")
FACTS = {"num_workers": 132, "query_rows": 128, "key_tokens": 128, "launch_seconds": [8e-6, 24e-6],
         "idle_speedup": [1.0, 1.0]}
HEADS = {"num_heads": 4, "num_kv_heads": 1, "head_dim": 128}


def flat_table(rate: float = 1e11, **metadata: Any) -> LatencyTable:
    """Every shard at the same rate: seconds are pairs / rate, backward twice as many."""
    grid = 128 * 2 ** np.arange(13)
    q = grid[:, None].astype(float)
    seconds = np.where(q <= grid, q * (grid - (q - 1) / 2) / rate, np.nan)
    return LatencyTable("flat", grid, grid, seconds, 2 * seconds, rate, metadata)


@functools.cache
def rough_time(seed: int, work_list: bool, scale: float = 1.0) -> AttentionTime:
    rng = np.random.default_rng(seed)
    table = flat_table()
    noise = rng.uniform(0.5, 2.0, (2, *table.forward_seconds.shape))
    table = replace(table, forward_seconds=table.forward_seconds * noise[0],
                    backward_seconds=table.backward_seconds * noise[1],
                    metadata={**HEADS, **({"work_list": FACTS} if work_list else {})})
    return AttentionTime.of(table, MODEL, tp=8, scale=scale)


WITH_LIST = AttentionTime.of(flat_table(**HEADS, work_list=FACTS), MODEL, tp=8)
WITHOUT = AttentionTime.of(flat_table(**HEADS), MODEL, tp=8)

Tasks = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray, int]


@st.composite
def batches(draw: st.DrawFn, most_servers: int = 4) -> Tasks:
    """q_len, kv_len, server, aligned, document, kv_start of some tasks, and the number of servers."""
    num_servers = draw(st.integers(1, most_servers))
    rows = draw(st.lists(st.tuples(st.integers(1, 20_000), st.integers(0, 60_000), st.integers(0, num_servers - 1),
                                   st.booleans(), st.integers(0, 2), st.integers(0, 5_000)), max_size=20))
    q, more, server, aligned, document, start = np.array(rows, dtype=np.int64).reshape(-1, 6).T
    aligned = aligned.astype(bool)
    return q, np.where(aligned, q + more, more), server, aligned, document, start, num_servers


def pairs_of(q: np.ndarray, kv: np.ndarray, aligned: np.ndarray) -> np.ndarray:
    return np.where(aligned, q * (kv - (q - 1) / 2), q * kv)


def columns(q: list[int], kv: list[int], server: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return np.array(q), np.array(kv), np.array(server)


@settings(max_examples=150, deadline=None)
@given(batches(), st.integers(0, 5), st.booleans(), st.booleans(), st.booleans())
def test_no_batch_beats_the_least(batch: Tasks, seed: int, work_list: bool, backward: bool,
                                  shared: bool) -> None:
    q, kv, server, aligned, document, start, num_servers = batch
    time = rough_time(seed, work_list, 1.5)
    where = {"document": document, "kv_start": start} if shared else {}
    found = time.servers(q, kv, server, num_servers, backward, aligned=aligned, **where)
    assert found.shape == (num_servers,)
    pairs = np.bincount(server, weights=pairs_of(q, kv, aligned), minlength=num_servers)
    for seconds, number in zip(found, pairs, strict=True):
        assert seconds >= time.least(number, backward) * (1 - 1e-12)
        assert (seconds == 0) == (number == 0)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 20), st.integers(1, 600_000), st.integers(0, 600_000), st.booleans())
def test_the_least_is_below_every_shard_also_between_points_and_beyond(seed: int, q: int, more: int,
                                                                       backward: bool) -> None:
    time = rough_time(seed, False)
    kv = q + more
    assert time.shard(q, kv, backward) >= time.least(q * (kv - (q - 1) / 2), backward) * (1 - 1e-12)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 20), st.integers(1, 300), st.integers(0, 600_000), st.integers(0, 1_000), st.booleans(),
       st.booleans(), st.booleans())
def test_no_shard_of_a_document_beats_what_its_length_allows(seed: int, tiles: int, more: int, rest: int,
                                                             work_list: bool, backward: bool, aligned: bool) -> None:
    """A document of `length` tokens has no shard with more keys: a trapezoid, or a rectangle before its queries."""
    time, q = rough_time(seed, work_list), tiles * 7
    kv = q + more if aligned else max(more, 1)
    length = (kv if aligned else kv + q) + rest
    pairs = float(pairs_of(*(np.array([one]) for one in (q, kv, aligned)))[0])
    found = time.tasks(np.array([q]), np.array([kv]), np.array([aligned]), backward)[0]
    assert found >= time.least(pairs, backward, length) * (1 - 1e-12)
    assert time.least(pairs, backward, length) >= time.least(pairs, backward) * (1 - 1e-12)


def test_short_documents_have_a_floor_of_their_own() -> None:
    time = AttentionTime.of(shipped_table("h200"), MODEL)
    for backward in (False, True):
        assert time.least(1e9, backward, 2_048) > 1.05 * time.least(1e9, backward)
    short, long = time.least(1e9, True, 2_048), time.least(2e9, True, 131_072)
    assert time.least(np.array([1e9, 2e9]), True, np.array([2_048, 131_072])) == pytest.approx(short + long)


def test_a_partial_tile_takes_as_long_as_a_whole_one_of_the_kernels() -> None:
    """128 rows of four heads are 32 queries: the table's shortest shard of 128 queries is four such tiles."""
    time = AttentionTime.of(shipped_table("h200"), MODEL)
    whole = time.shard(128, 16_384)
    assert time.shard(1, 16_384) == time.shard(32, 16_384) == pytest.approx(whole / 4, rel=0.01)
    assert time.shard(33, 16_384) == pytest.approx(whole / 2, rel=0.01)
    assert time.shard(1, 16_384, True) == time.shard(128, 16_384, True)  # asked as the same tile
    alone = time.servers(*columns([8], [16_384], [0]), 1)[0]
    assert alone <= time.servers(*columns([32], [16_384], [0]), 1)[0]


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 5), st.integers(1, 50_000), st.integers(0, 50_000), st.integers(0, 3_000), st.booleans())
def test_shards_never_fall_and_agree_with_their_arrays(seed: int, q: int, more: int, extra: int,
                                                       backward: bool) -> None:
    time, kv = rough_time(seed, True), q + more
    here = time.shard(q, kv, backward)
    assert time.shard(q, kv + extra, backward) >= here * (1 - 1e-12)
    assert time.shard(min(q + extra, kv), kv, backward) >= here * (1 - 1e-12)
    np.testing.assert_allclose(time.shards(np.array([q]), np.array([kv]), backward), [here], rtol=1e-12)
    assert time.shard(0, kv, backward) == 0


@settings(max_examples=100, deadline=None)
@given(batches(), st.booleans())
def test_without_a_work_list_seconds_add_up(batch: Tasks, backward: bool) -> None:
    q, kv, server, aligned, _, _, num_servers = batch
    found = WITHOUT.servers(q, kv, server, num_servers, backward, aligned=aligned)
    expected = np.bincount(server, weights=pairs_of(q, kv, aligned) * (2 if backward else 1) / 1e11,
                           minlength=num_servers)
    long = kv >= np.where(aligned, 128, q)                       # shorter ones pay for a whole tile
    if (long & (q >= 128)).all():
        np.testing.assert_allclose(found, expected, rtol=2e-3)


def test_a_rectangle_is_a_shard_of_as_many_pairs() -> None:
    for q, kv in ((512, 4_096), (4_096, 512)):
        (found,) = WITHOUT.servers(*columns([q], [kv], [0]), 1, aligned=np.array([False]))
        assert found == pytest.approx(q * kv / 1e11, rel=2e-3)


@settings(max_examples=60, deadline=None)
@given(batches(most_servers=6), st.booleans())
def test_servers_do_not_disturb_each_other(batch: Tasks, backward: bool) -> None:
    """As long as no server has so many items that all servers' are dealt in larger lots: 40 lots of 33, or 1,320."""
    q, kv, server, aligned, document, start, num_servers = batch
    q = np.maximum(1, q // 10)                                   # at most 20 tasks of 63 items
    kv = np.where(aligned, np.maximum(kv // 10, q), kv // 10)
    together = WITH_LIST.servers(q, kv, server, num_servers, backward, aligned=aligned, document=document,
                                 kv_start=start)
    for one in range(num_servers):
        mine = server == one
        alone = WITH_LIST.servers(q[mine], kv[mine], np.zeros(int(mine.sum()), dtype=int), 1, backward,
                                  aligned=aligned[mine], document=document[mine], kv_start=start[mine])
        np.testing.assert_allclose(alone[0], together[one], rtol=1e-9)


# ---------------------------------------------------------------------------------------------------------- work lists


@pytest.mark.parametrize(("num_items", "waves"), [(125, 1), (132, 1), (133, 2), (264, 2), (265, 3), (1_056, 8)])
def test_equal_items_take_whole_waves(num_items: int, waves: int) -> None:
    """Backward, one KV head: an item is 128 keys."""
    (found,) = WITH_LIST.servers(*columns([256], [128 * num_items], [0]), 1, True, aligned=np.array([False]))
    assert found == pytest.approx(waves * 2 * 256 * 128 / 1e11 * 132 + 24e-6, rel=0.01)


@pytest.mark.parametrize(("num_items", "waves"), [
    (4, 1 / 33), (64, 1 / 2), (120, 1), (132, 1), (192, 3 / 2), (250, 2), (264, 2), (1_056, 8),
])
def test_long_items_are_split_in_forward(num_items: int, waves: float) -> None:
    """4 query heads: an item is 32 queries. Whole waves of parts come near the even share, where that is far.

    4 items in 33 parts and 64 in 2 are one wave, 192 in 2 three of half the length. 120 and 250 end 10 and 6 % late at
    most, which cutting would not gain. A launch and a part cost 8 and 3 µs more.
    """
    one = 32 * 65_536 / 1e11 * 132
    (found,) = WITH_LIST.servers(*columns([32 * num_items], [65_536], [0]), 1, aligned=np.array([False]))
    assert found == pytest.approx(waves * one + 8e-6, rel=0.01, abs=20e-6)


def test_items_too_short_to_split_take_the_time_of_the_longest() -> None:
    """One tile of 32 queries before 256 keys: 11 µs, of which no part would be worth 8 of merging."""
    (found,) = WITH_LIST.servers(*columns([32], [256], [0]), 1, aligned=np.array([False]))
    assert found == pytest.approx(32 * 256 / 1e11 * 132 + 8e-6, rel=0.01)


def test_a_document_of_few_items_is_split_in_backward() -> None:
    """16K tokens are 128 items on 132 workers; the first, which all queries see, has twice the mean.

    Its parts and those of others end within a tenth of the even share, and cost a launch and a part or two of 9.6 µs.
    """
    n = 16_384
    (found,) = WITH_LIST.servers(*columns([n], [n], [0]), 1, True)
    even = 2 * n * (n + 1) / 2 / 1e11
    assert even + 48e-6 <= found <= 1.1 * even + 48e-6 + 2 * 9.6e-6


def test_tasks_that_share_keys_share_items() -> None:
    """Four shards of one document's 8K keys: 64 items that walk all queries, in halves, or 256 that walk a quarter."""
    q, kv, server = np.full(4, 512), np.full(4, 8_192), np.zeros(4, dtype=int)
    (apart,) = WITH_LIST.servers(q, kv, server, 1, True, aligned=np.zeros(4, bool))
    (together,) = WITH_LIST.servers(q, kv, server, 1, True, aligned=np.zeros(4, bool), document=server)
    (behind,) = WITH_LIST.servers(q, kv, server, 1, True, aligned=np.zeros(4, bool), document=server,
                                  kv_start=8_192 * np.arange(4))
    item = 2 * 512 * 128 / 1e11 * 132
    assert apart == pytest.approx(2 * item + 24e-6, rel=0.01) == behind
    assert together == pytest.approx(4 * item / 2 + 24e-6 + 1.4 * 24e-6, rel=0.01)  # merging, and a part each


@given(st.integers(2, 12))
def test_merging_items_hardly_changes_the_tail(copies: int) -> None:
    """A batch on each of so many servers that their items are merged, and on one alone."""
    rng = np.random.default_rng(copies)
    q = rng.integers(128, 6_000, 12)
    kv = q + rng.integers(0, 40_000, 12)
    server = np.repeat(np.arange(8 * copies), 12)
    for backward in (False, True):
        many = WITH_LIST.servers(np.tile(q, 8 * copies), np.tile(kv, 8 * copies), server, 8 * copies, backward)
        (alone,) = WITH_LIST.servers(q, kv, np.zeros(12, dtype=int), 1, backward)
        np.testing.assert_allclose(many, alone, rtol=0.05)


@pytest.mark.parametrize(("changes", "fragment"), [
    ({"num_workers": 0}, "at least 1"), ({"launch_seconds": [0.1]}, "a number for forward"),
    ({"idle_speedup": [0.5, 1]}, "1"),
])
def test_a_broken_work_list_is_refused(changes: dict[str, int | list[float]], fragment: str) -> None:
    with pytest.raises(ValueError, match=fragment):
        WorkList.of({**FACTS, **changes}, 4, 1)
    with pytest.raises(ValueError, match="work_list has no key_tokens"):
        WorkList.of({name: value for name, value in FACTS.items() if name != "key_tokens"}, 4, 1)


# --------------------------------------------------------------------------------------------------------------- heads


def test_another_head_dim_is_refused() -> None:
    narrow = ModelShape("narrow", 2, 2_048, 32, 8, 64, 8_192, 32_000)
    with pytest.raises(ValueError) as refusal:
        AttentionTime.of(flat_table(**HEADS), narrow)
    for fragment in ("'flat'", "head_dim 128", "64", "distca profile --model narrow"):
        assert fragment in str(refusal.value)


def test_another_head_dim_of_a_shipped_table_is_scaled_by_flops_and_said() -> None:
    latent = ModelShape("latent", 2, 2_048, 4, 4, 192, 8_192, 32_000, value_dim=128)
    mine, whole = (AttentionTime.of(flat_table(**{**HEADS, "num_kv_heads": 4}, shipped="x"), model)
                   for model in (latent, ModelShape("whole", 2, 2_048, 4, 4, 128, 8_192, 32_000)))
    assert mine.shard(512, 4_096) == pytest.approx(320 / 256 * whole.shard(512, 4_096))
    assert mine.note is not None and "192 for keys and 128 for values" in mine.note and "FLOPs" in mine.note
    assert mine != whole and whole.note is None


def test_other_heads_are_scaled_and_said() -> None:
    time = AttentionTime.of(flat_table(**HEADS), MODEL, tp=1, scale=2.0)
    assert time.shard(1_024, 4_096) == pytest.approx(16 * WITHOUT.shard(1_024, 4_096))
    assert time.note is not None and "32 query and 8 KV heads" in time.note and "4 and 1" in time.note
    assert WITHOUT.note is None


def test_a_table_that_says_nothing_of_its_heads_is_taken_as_it_is() -> None:
    time = AttentionTime.of(flat_table(), MODEL, tp=4)
    assert time.note is None and time.shard(128, 128) == flat_table().seconds(128, 128)


def test_an_analytic_table_needs_no_measurement() -> None:
    time = AttentionTime.of(analytic_table(MODEL, 550e12, tp=8), MODEL, tp=8)
    assert time.work_list is None and time.least(1e9) == pytest.approx(1e9 * 4 * 4 * 128 / 550e12, rel=0.01)


def test_a_table_without_backward_says_so() -> None:
    time = AttentionTime.of(replace(flat_table(**HEADS), backward_seconds=None), MODEL, tp=8)
    for ask in (lambda: time.shard(128, 128, True), lambda: time.least(1.0, True),
                lambda: time.servers(*columns([128], [128], [0]), 1, True)):
        with pytest.raises(ValueError, match="no backward_seconds"):
            ask()


@pytest.mark.parametrize("scale", [0.0, -1.0, float("inf"), float("nan")])
def test_scales_are_checked(scale: float) -> None:
    with pytest.raises(ValueError, match="scale"):
        AttentionTime.of(flat_table(**HEADS), MODEL, tp=8, scale=scale)


def test_it_travels_to_other_processes() -> None:
    again = pickle.loads(pickle.dumps(WITH_LIST))
    assert again == WITH_LIST and hash(again) == hash(WITH_LIST) and again != WITHOUT
    q, kv = np.array([512, 9_000]), np.array([4_096, 9_000])
    server = np.array([0, 1])
    np.testing.assert_array_equal(again.servers(q, kv, server, 2), WITH_LIST.servers(q, kv, server, 2))


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("name", shipped_names())
def test_shipped_tables_serve_every_tensor_parallel_size(name: str, tp: int) -> None:
    time = AttentionTime.of(shipped_table(name), MODEL, tp)
    flops = 4 * MODEL.heads_per_rank(tp) * MODEL.head_dim
    assert 300e12 < flops * 1e9 / time.least(1e9) < 800e12       # an H200's rates
    assert 300e12 < 2.5 * flops * 1e9 / time.least(1e9, True) < 800e12


def test_the_nearest_of_a_shipped_tables_heads_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def table(heads: int, kv_heads: int, dim: int = 128) -> LatencyTable:
        return flat_table(num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, shipped="x")

    others = [table(8, 2), table(4, 1), table(8, 1), table(32, 8, 64)]
    monkeypatch.setattr(attention_time, "other_heads", lambda name: others)
    main = table(32, 8)

    def found(*wanted: int) -> tuple[object, object, object]:
        about = attention_time.nearest_heads(main, *wanted).metadata
        return about["num_heads"], about["num_kv_heads"], about["head_dim"]

    assert found(32, 8, 128) == (32, 8, 128) and found(4, 1, 128) == (4, 1, 128) and found(8, 2, 128) == (8, 2, 128)
    assert found(16, 2, 128) in {(8, 2, 128), (8, 1, 128)} and found(2, 1, 128) == (4, 1, 128)
    assert found(32, 8, 64) == (32, 8, 64) == found(4, 1, 64)
    assert found(8, 2, 32) == (32, 8, 128)                       # which is then scaled
    own = flat_table(num_heads=32, num_kv_heads=8, head_dim=128)
    assert attention_time.nearest_heads(own, 4, 1, 128) is own
