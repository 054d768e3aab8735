"""Softcaps in the Hopper kernel: exact whether scores stay below the cap, lie beyond it or do both in one warp."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import pytest
import torch

from distca.kernels.dense import DenseKernel
from distca.kernels.hopper import buffers as hopper_buffers
from distca.kernels.hopper.kernel import HopperKernel
from distca.kernels.interface import Scores, TaskRows
from tests.kernels.hopper.test_kernel_gpu import DIMS, GPU, gpu, random_inputs
from tests.support import hopper_accuracy
from tests.support.accuracy import check_attention
from tests.support.attention import determinism

HOPPER = HopperKernel()
attend, assert_exact = hopper_accuracy.attend, hopper_accuracy.assert_exact
random_rows, shards = hopper_accuracy.random_rows, hopper_accuracy.shards
SHAPES = [(group, dim, window) for group in (1, 4) for dim in DIMS for window in (None, 300)]
MODES = pytest.mark.parametrize("mode", [nullcontext, determinism], ids=["any order", "deterministic"])
Mode = Callable[[], AbstractContextManager[None]]


@pytest.fixture(scope="module")
def compiled() -> None:
    """Compile side by side what the tests would compile one after another."""
    def once(shape: tuple[int, int, int | None]) -> None:
        group, dim, window = shape
        attend(HOPPER, random_inputs(1, 1, group, 1, dim), TaskRows.documents([1]), window, softcap=50.0)

    for mode in (nullcontext, determinism):
        with mode(), ThreadPoolExecutor(8) as pool:
            list(pool.map(once, SHAPES))


@gpu
@MODES
@pytest.mark.parametrize(("group", "dim", "window"), SHAPES)
@pytest.mark.parametrize("softcap", [50.0, 4.0, 0.5], ids=["all below", "a few beyond", "many beyond"])
def test_random_rows(compiled: None, group: int, dim: int, window: int | None, softcap: float, mode: Mode) -> None:
    rows = random_rows(group + dim, 12, 1500, 2100, apart=False)
    tensors = random_inputs(1500, 2100, 2 * group, 2, dim)
    with mode():
        actual = attend(HOPPER, tensors, rows, window, softcap=softcap)
    assert_exact(actual, tensors, rows, window, softcap=softcap)


LONG = {
    "documents": TaskRows.documents([8_001, 1, 3_777, 0, 333, 129, 127]),
    "shards": shards(48, 129, 12_000),
    "split keys": shards(3, 77, 30_001),
}


@gpu
@MODES
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("name", LONG)
def test_long_rows(compiled: None, name: str, dim: int, mode: Mode) -> None:
    rows = LONG[name]
    tensors = random_inputs(int(rows.q_end.max()), int(rows.k_end.max()), 4, 1, dim)
    with mode():
        actual = attend(HOPPER, tensors, rows, softcap=30.0)
    assert_exact(actual, tensors, rows, softcap=30.0)


@gpu
@pytest.mark.parametrize("window", [None, 300])
def test_tall_tiles(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper_buffers, "TALL_GAIN", 100.0)
    rows = TaskRows.documents([2_000, 1, 385, 192, 64, 17])
    q, k, v, dout = random_inputs(2_659, 2_659, 4, 2, 64)
    prepared = HOPPER.prepare(rows, GPU, Scores(window=window, softcap=4.0))
    results = HOPPER.forward(q, k, v, prepared)
    assert prepared.kind(q, k, v).tables.tall is not None
    check_attention([*results, None, None, None], q, k, v, dout, rows, window=window, softcap=4.0)


@gpu
@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("dim", DIMS)
def test_scores_grow_beyond_the_range_of_what_came_before(dim: int, window: int | None) -> None:
    """A cap of 500 lets the scores of the first keys, met last, leave the range of those before: warps repeat them."""
    rows = TaskRows.aligned(np.array([0, 300, 800]), np.array([300, 800, 900]), np.array([0, 0, 100]),
                            np.array([700, 900, 500]))
    q, k, v, dout = random_inputs(900, 900, 8, 2, dim)
    k[:450] *= 60.0
    out, lse = HOPPER.forward(q, k, v, HOPPER.prepare(rows, GPU, Scores(window=window, softcap=500.0)))
    check_attention([out, lse, None, None, None], q, k, v, dout, rows, window=window, softcap=500.0)


@gpu
@pytest.mark.parametrize("dim", DIMS)
def test_error_is_at_most_twice_that_of_plain_bf16(dim: int) -> None:
    """By norm, against the formula in float64; half of the scores are beyond the cap."""
    rows, tensors = TaskRows.documents([900, 400]), random_inputs(1300, 1300, 8, 2, dim)
    tensors[0] *= 20.0
    expected = attend(DenseKernel(), [x.double() for x in tensors], rows, softcap=15.0)
    plain = attend(DenseKernel(), tensors, rows, softcap=15.0)
    actual = attend(HOPPER, tensors, rows, softcap=15.0)
    for name, a, bf16, exact in zip(hopper_accuracy.NAMES, actual, plain, expected, strict=True):
        if name != "lse":  # which plain bf16 computes in float32
            assert (a - exact).norm() <= 2 * (bf16 - exact).norm(), name


@gpu
def test_what_is_not_a_number_stays_in_its_row() -> None:
    lengths, bad = [333, 50, 401], slice(333, 383)
    rows, tensors = TaskRows.documents(lengths), random_inputs(784, 784, 8, 2, 128)
    clean, poisoned = attend(HOPPER, tensors, rows, softcap=50.0), [x.clone() for x in tensors]
    for x in poisoned:
        x[bad] = torch.nan
    actual = attend(HOPPER, poisoned, rows, softcap=50.0)
    for a, e in zip(actual, clean, strict=True):
        assert a[bad].isnan().all()
        a[bad] = e[bad]
    assert_exact(actual, tensors, rows, softcap=50.0)
