"""Keys of a tile of queries, and queries of a tile of keys, split over work items, only where that is worth it.

Every pair is computed once by one part. Tables are walked and launches played by hopper_walk.py, on the CPU. Tiles of 8
keys make long tiles of short rows.
"""

import heapq
from collections import defaultdict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distca.kernels import TaskRows
from distca.kernels.hopper import buffers as hopper_buffers
from distca.kernels.hopper import kernel as hopper
from distca.kernels.hopper import split as hopper_split
from distca.kernels.hopper.kernel import HopperKernel, HopperTasks
from distca.kernels.hopper.tables import BackwardTables, ForwardTables, backward_tables, forward_tables
from distca.kernels.interface import BackwardInputs, Scores, joined, visible
from tests.support import hopper_accuracy as accuracy
from tests.support import hopper_walk

CPU = torch.device("cpu")
HOPPER = HopperKernel()
KEYS = 8


def forward(
    rows: TaskRows, window: int | None, group: int, kv_heads: int, num_sms: int, keys: int = KEYS
) -> ForwardTables:
    return forward_tables(joined(visible(rows, window), window), window, group, kv_heads, num_sms, keys)


def backward(
    rows: TaskRows, window: int | None, group: int, kv_heads: int, num_sms: int, keys: int = 128
) -> BackwardTables:
    return backward_tables(joined(visible(rows, window), window), window, group, kv_heads, num_sms, keys)


def parts_are_those_of_whole_tiles(split: Any, cut: dict[Any, Any], whole: dict[Any, Any]) -> None:
    """`cut` and `whole` have the steps (part, …) of each tile (head, first, count) with and without parts."""
    assert cut.keys() == whole.keys()
    numbers = {(tile_first, tile_count): range(first + 1, first + 1 + count)
               for tile_first, tile_count, first, count in split.merges.tolist()}
    for (head, *tile), expected in whole.items():
        walked = sorted(cut[head, *tile], key=lambda step: step[0])  # stable: steps of a part stay in order
        assert [step[1:] for step in walked] == [step[1:] for step in expected]
        assert sorted({step[0] for step in walked}) == list(numbers.get(tuple(tile), [0]))
        lengths = np.bincount([step[0] for step in walked])
        assert lengths.max() - lengths[lengths > 0].min() <= 1
    assert sorted(number for tile in numbers.values() for number in tile) == list(range(1, split.num_parts + 1))


@given(st.integers(0, 10**6), st.booleans(), st.none() | st.integers(100, 900), st.sampled_from([1, 4, 7]),
       st.sampled_from([1, 2]), st.sampled_from([1e-3, 2.0]))
@settings(max_examples=80, deadline=None)
def test_parts_have_every_pair_of_their_tile_once(
    seed: int, apart: bool, window: int | None, group: int, kv_heads: int, merge_steps: float
) -> None:
    """And keys from the last to the first over all parts of a tile, as the tile itself would walk them."""
    rows = accuracy.random_rows(seed, 4, 150, 900, apart)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hopper_split, "MERGE_STEPS", merge_steps)
        split = forward(rows, window, group, kv_heads, 132)
    whole = forward(rows, window, group, kv_heads, 1)
    assert whole.num_parts == 0 and len(whole.merges) == 0
    steps = []
    for tables in (split, whole):
        found: Any = defaultdict(list)
        for head, q_first, q_count, part, *step in hopper_walk.walk_forward(
            tables.pack(), group, kv_heads, window, KEYS
        ):
            found[head, q_first, q_count].append((part, *step))
        steps.append(found)
    parts_are_those_of_whole_tiles(split, *steps)


@given(st.integers(0, 10**6), st.booleans(), st.none() | st.integers(100, 900), st.sampled_from([4, 7, 64]),
       st.sampled_from([1, 2]), st.sampled_from([1e-3, 2.0]), st.sampled_from([64, 192]))
@settings(max_examples=80, deadline=None)
def test_parts_have_every_block_of_their_tile_once(
    seed: int, apart: bool, window: int | None, group: int, kv_heads: int, merge_steps: float, keys: int
) -> None:
    """And blocks in the order in which the tile itself would walk them, with the same places for dQ and dS."""
    rows = accuracy.random_rows(seed, 6, 900, 700, apart)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hopper_split, "MERGE_STEPS", merge_steps)
        split = backward(rows, window, group, kv_heads, 132, keys)
    whole = backward(rows, window, group, kv_heads, 1, keys)
    assert whole.num_parts == 0 and len(whole.merges) == 0
    np.testing.assert_array_equal(split.blocks, whole.blocks)
    steps = []
    for tables in (split, whole):
        found: Any = defaultdict(list)
        for head, k_first, k_count, part, block, *step, k_begin, k_end, shift, pair in hopper_walk.walk_backward(
            tables.pack(), group, kv_heads, window, keys
        ):
            found[head, k_first, k_count].append((part, block, *step, k_begin, k_end, shift, pair))
        steps.append(found)
    parts_are_those_of_whole_tiles(split, *steps)


@pytest.mark.parametrize(("group", "kv_heads", "num_tokens"), [(8, 1, 16_384), (4, 1, 8_192), (4, 2, 8_192)])
def test_one_document_of_few_key_tiles_fills_the_multiprocessors_in_backward(
    group: int, kv_heads: int, num_tokens: int
) -> None:
    """Its first tile of keys alone has two to four times an even share of the work."""
    rows = TaskRows.documents([num_tokens])
    length = backward(rows, None, group, kv_heads, 132).items[:, 2]
    even = kv_heads * length.sum() / 132
    whole = backward(rows, None, group, kv_heads, 1).items[:, 2]
    assert whole.max() > 1.9 * even and length.max() <= 1.1 * even
    assert dealt(np.repeat(length, kv_heads).tolist(), 132) <= 1.15 * even


def dealt(items: list[int], workers: int) -> int:
    """When the last worker is done if each draws the next item as soon as it is free."""
    free = [0] * workers
    for item in items:
        heapq.heapreplace(free, free[0] + item)
    return max(free)


def test_two_shards_before_512k_keys_fill_the_multiprocessors() -> None:
    """64 tiles of 4,096 steps on 132: in halves, 2,048 steps where the even share is 1,986."""
    shard = np.arange(2)
    tables = forward(TaskRows.aligned(128 * shard, 128 * shard + 128, 2**19 * shard, 2**19 * (shard + 1)), None, 4, 8,
                     132, 128)
    assert tables.tiles[:, 2].tolist() == [2_048] * 16
    assert tables.merges[:, 3].tolist() == [2] * 8
    first = tables.segments[tables.tiles[:, 3]][:, :2].tolist()
    assert first[0] == first[1] == first[2] == first[3] != first[4]  # tiles with the same keys side by side


def test_one_tile_is_spread_over_all() -> None:
    tables = forward(TaskRows.aligned([0], [32], [0], [2**19]), None, 4, 1, 132, 128)
    assert len(tables.merges) == 1
    assert 115 <= tables.num_parts <= 132


@pytest.mark.parametrize("lengths", [[32_768], [8_192] * 4, [1_024] * 32, [20_001, 7_777, 3_333, 1_111, 300, 129, 17]])
@pytest.mark.parametrize(("group", "kv_heads"), [(4, 8), (4, 1), (1, 32)])
def test_batches_that_spread_evenly_are_not_split(lengths: list[int], group: int, kv_heads: int) -> None:
    assert forward(TaskRows.documents(lengths), None, group, kv_heads, 132, 128).num_parts == 0
    is_late = len(set(lengths)) > 1 and kv_heads == 1            # the longest document's first keys, by 40 %
    assert (backward(TaskRows.documents(lengths), None, group, kv_heads, 132).num_parts > 0) is is_late


def test_short_tiles_are_not_split() -> None:
    """What merging costs, 8 steps, is more than what is gained."""
    assert forward(TaskRows.aligned([0], [32], [0], [2_000]), None, 4, 1, 132, 128).num_parts == 0


@pytest.fixture
def many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches played on the CPU, tables as for 132 multiprocessors and as if merging cost next to nothing."""
    monkeypatch.setattr(hopper, "run_forward", hopper_walk.launch_forward)
    monkeypatch.setattr(hopper, "run_backward", hopper_walk.launch_backward)
    monkeypatch.setattr(hopper, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(hopper_split, "MERGE_STEPS", 0.1)


def attend(tensors: list[torch.Tensor], prepared: HopperTasks) -> list[torch.Tensor]:
    q, k, v, dout = tensors
    out, lse = HOPPER.forward(q, k, v, prepared)
    return [out, lse, *HOPPER.backward(BackwardInputs(dout, q, k, v, out, lse), prepared)]


def tables_of(tensors: list[torch.Tensor], prepared: HopperTasks) -> hopper_buffers.Tables:
    q, k, v, _ = tensors
    return prepared.kind(q, k, v).tables


@pytest.mark.parametrize("window", [None, 400])
@pytest.mark.parametrize("dim", [64, 128, 192, 256])
def test_split_calls_are_exact(many: None, dim: int, window: int | None) -> None:
    """Wide heads compute dQ by itself on forward's parts, in steps of other lengths."""
    for seed in range(2):
        rows = accuracy.random_rows(seed, 5, 60, 900, apart=bool(seed))
        tensors = [x.double() for x in accuracy.random_inputs(60, 900, 2, 1, dim, CPU, seed)]
        prepared = HOPPER.prepare(rows, CPU, Scores(window=window))
        accuracy.assert_exact(attend(tensors, prepared), tensors, rows, window)
        tables = tables_of(tensors, prepared)
        assert tables.num_parts > 0 and tables.num_key_parts > 0
