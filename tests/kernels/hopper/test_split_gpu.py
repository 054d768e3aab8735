"""Keys, and in backward queries, of long tiles split over thread blocks, on a Hopper GPU: exact, the same bits always.

Every batch here is one whose tables say that tiles are split; test_split.py says when they are.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest
import torch

from distca.kernels.hopper import split as hopper_split
from distca.kernels.hopper.kernel import HopperKernel
from distca.kernels.interface import Scores, TaskRows
from tests.support import hopper_accuracy as accuracy
from tests.support.accuracy import check_attention
from tests.support.attention import determinism, task_rows

NAMES, attend, assert_exact, shards = accuracy.NAMES, accuracy.attend, accuracy.assert_exact, accuracy.shards

GPU = torch.device("cuda")
HOPPER = HopperKernel()
random_inputs = partial(accuracy.random_inputs, device=GPU)
MISSING = (HOPPER.supports(GPU, torch.bfloat16, 128) if torch.cuda.is_available()
           else "torch.cuda.is_available() is False")
pytestmark = [pytest.mark.gpu,
              pytest.mark.skipif(MISSING is not None, reason=f"needs an NVIDIA Hopper GPU; {MISSING}")]
DIMS = (64, 128, 192, 256)


def num_parts(rows: TaskRows, heads: tuple[int, int, int], window: int | None = None) -> int:
    """Of tables as a call prepares them."""
    prepared = HOPPER.prepare(rows, GPU, Scores(window=window))
    q, k, v, _ = random_inputs(int(rows.q_end.max()), int(rows.k_end.max()), *heads)
    return prepared.kind(q, k, v).tables.num_parts


SPLIT = {
    "one query": (TaskRows.aligned([0], [1], [0], [20_000]), None),
    "a few shards off the tile": (shards(3, 77, 30_001), None),
    "window": (shards(2, 90, 30_000), 11_111),
    "all see all": (task_rows([0], [200], [7], [16_390], [16_384]), None),
    "queries in several rows": (task_rows([0, 0, 50], [100, 100, 150], [0, 9_000, 20_001], [9_000, 20_001, 33_333],
                                          [9_000, 11_001, 13_332]), None),
    "queries in several rows, window": (task_rows([0, 0, 50], [100, 100, 150], [0, 9_000, 20_001],
                                                  [9_000, 20_001, 33_333], [9_000, 11_001, 13_332]), 8_000),
    "beside documents": (task_rows([0, 60, 700, 701], [60, 700, 701, 1_300], [0, 40_000, 40_640, 40_641],
                                   [40_000, 40_640, 40_641, 41_240], [39_940, 0, 0, 0]), None),
}


SHAPES = [*((dim, 4, 1) for dim in DIMS), (128, 7, 1), (128, 8, 2), (64, 2, 2)]  # head dim, query heads, KV heads


@pytest.fixture(scope="module")
def compiled() -> None:
    """Compile side by side what the tests would compile one after another."""
    def once(shape: tuple[int, int, int], window: int | None) -> None:
        dim, heads, kv_heads = shape
        for rows in (TaskRows.documents([1]), TaskRows.aligned([0], [1], [0], [20_000])):
            attend(HOPPER, random_inputs(1, 20_000, heads, kv_heads, dim), rows, window)

    for mode in (nullcontext, determinism):
        with mode(), ThreadPoolExecutor(16) as pool:
            list(pool.map(once, SHAPES * 2, [None] * len(SHAPES) + [15_000] * len(SHAPES)))


@pytest.mark.parametrize(("dim", "heads", "kv_heads"), SHAPES)
@pytest.mark.parametrize("name", SPLIT)
def test_split_rows_are_exact(compiled: None, name: str, dim: int, heads: int, kv_heads: int) -> None:
    """All gradients too; dQ by itself, which has parts as well, with wide heads and where it must be deterministic."""
    rows, window = SPLIT[name]
    assert num_parts(rows, (heads, kv_heads, dim), window) > 0
    tensors = random_inputs(int(rows.q_end.max()), int(rows.k_end.max()), heads, kv_heads, dim)
    with determinism():
        actual = attend(HOPPER, tensors, rows, window)
        again = attend(HOPPER, tensors, rows, window)
    assert_exact(actual, tensors, rows, window)
    assert all(torch.equal(a, e) for a, e in zip(again, actual, strict=True))  # parts merge in the table's order
    if dim <= 128:
        assert_exact(attend(HOPPER, tensors, rows, window), tensors, rows, window)


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_scores_that_grow_far_beyond_those_of_other_parts(dim: int) -> None:
    """Parts whose references lie far apart: all but one part's probabilities vanish, whichever part that is."""
    rows = shards(2, 64, 24_000)
    for large in (slice(0, 2_000), slice(11_000, 13_000), slice(22_000, 24_000)):
        q, k, v, dout = random_inputs(128, 24_000, 4, 1, dim)
        k = k.clone()
        k[large] *= 60.0
        out, lse = HOPPER.forward(q, k, v, HOPPER.prepare(rows, GPU))
        check_attention([out, lse, None, None, None], q, k, v, dout, rows)
        assert num_parts(rows, (4, 1, dim)) > 0


@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize(("dim", "heads", "kv_heads"), SHAPES)
def test_parts_of_single_steps(
    compiled: None, dim: int, heads: int, kv_heads: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if merging cost nothing: any rows have parts then, and parts have queries that see none of their keys."""
    monkeypatch.setattr(hopper_split, "MERGE_STEPS", 1e-3)
    lengths = np.array([129, 130, 191, 257, 385])
    ends = np.cumsum(lengths)
    batches = [TaskRows.aligned(ends - lengths, ends, ends - lengths, ends),
               *(accuracy.random_rows(seed, 5, 500, 2_100, apart=bool(seed)) for seed in (0, 1))]
    for rows in batches:
        tensors = random_inputs(1_092, 2_100, heads, kv_heads, dim)
        assert num_parts(rows, (heads, kv_heads, dim), window) > 0
        with determinism():
            assert_exact(attend(HOPPER, tensors, rows, window), tensors, rows, window)


MANY_QUERIES = {
    "one document": (TaskRows.documents([3_001]), None),
    "documents": (TaskRows.documents([2_500, 1, 0, 777, 129]), None),
    "window": (TaskRows.documents([3_001]), 2_222),
    "a prefix that shards share": (shards(5, 600, 700), None),
    "queries in several rows": (task_rows([0, 0, 1_500], [2_000, 2_000, 3_000], [0, 900, 1_400], [900, 1_400, 2_300],
                                          [1_400, 900, 600]), None),
}


@pytest.mark.parametrize(("dim", "heads", "kv_heads"), SHAPES)
@pytest.mark.parametrize("name", MANY_QUERIES)
def test_split_queries_are_exact(compiled: None, name: str, dim: int, heads: int, kv_heads: int) -> None:
    """dK and dV of tiles of few keys, which many queries see: added up by several thread blocks, in their order."""
    rows, window = MANY_QUERIES[name]
    tensors = random_inputs(int(rows.q_end.max()), int(rows.k_end.max()), heads, kv_heads, dim)
    prepared = HOPPER.prepare(rows, GPU, Scores(window=window))
    assert prepared.kind(*tensors[:3]).tables.num_key_parts > 0
    actual = attend(HOPPER, tensors, rows, window)
    assert_exact(actual, tensors, rows, window)
    again = attend(HOPPER, tensors, rows, window)
    assert all(torch.equal(a, e) for a, e in zip(again[3:], actual[3:], strict=True))
    with determinism():
        assert_exact(attend(HOPPER, tensors, rows, window), tensors, rows, window)


@pytest.mark.parametrize("softcap", [None, 4.0])
@pytest.mark.parametrize("dim", [128, 192, 256])
def test_split_queries_with_kept_ds(dim: int, softcap: float | None) -> None:
    """On 66 multiprocessors tiles of 64 or 128 keys are late and those of queries are not."""
    kernel, rows = HopperKernel(num_sms=66), TaskRows.documents([4_000, 50])
    tensors = random_inputs(4_050, 4_050, 8, 1, dim)
    with determinism():
        tables = kernel.prepare(rows, GPU, Scores(softcap=softcap)).kind(*tensors[:3]).tables
        assert tables.kept is not None and tables.num_key_parts > 0
        actual, again = (attend(kernel, tensors, rows, softcap=softcap) for _ in range(2))
    assert_exact(actual, tensors, rows, softcap=softcap)
    assert all(torch.equal(a, e) for a, e in zip(again, actual, strict=True))


def test_split_calls_neither_allocate_nor_wait() -> None:
    rows = shards(2, 128, 60_000)
    q, k, v, _ = random_inputs(256, 60_000, 8, 2, 128)
    prepared = HOPPER.prepare(rows, GPU)
    for _ in range(2):
        HOPPER.forward(q, k, v, prepared)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["num_device_alloc"], torch.cuda.memory_allocated()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(10):
            HOPPER.forward(q, k, v, prepared)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert (torch.cuda.memory_stats()["num_device_alloc"], torch.cuda.memory_allocated()) == before


def test_not_a_number_stays_in_its_row() -> None:
    rows = shards(2, 64, 24_000)
    q, k, v, _ = random_inputs(128, 24_000, 4, 1, 128)
    spoilt = q.clone()
    spoilt[33, 1] = torch.nan
    (expected, expected_lse), (out, lse) = (HOPPER.forward(x, k, v, HOPPER.prepare(rows, GPU)) for x in (q, spoilt))
    assert bool(out[33, 1].isnan().all()) and bool(lse[33, 1].isnan())
    out[33, 1], lse[33, 1] = expected[33, 1], expected_lse[33, 1]
    np.testing.assert_allclose(lse.cpu().numpy(), expected_lse.cpu().numpy(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out, expected, rtol=2**-6, atol=2**-8)
