"""Forward in tiles of three blocks of queries, with head dim 64: where it is faster, and as exact as others.

On the CPU launches are played by hopper_walk.py. On a GPU any rows are made to take tall tiles.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch

from distca.kernels.hopper import buffers as hopper_buffers
from distca.kernels.hopper import kernel as hopper
from distca.kernels.hopper.kernel import HopperKernel, HopperTasks
from distca.kernels.interface import BackwardInputs, Scores, TaskRows, joined, visible
from tests.support import hopper_accuracy as accuracy
from tests.support import hopper_walk
from tests.support.accuracy import check_attention, check_each, expected_attention
from tests.support.attention import determinism, task_rows

CPU, GPU = torch.device("cpu"), torch.device("cuda")
HOPPER = HopperKernel()
gpu_inputs = partial(accuracy.random_inputs, device=GPU)
MISSING = (HOPPER.supports(GPU, torch.bfloat16, 64) if torch.cuda.is_available()
           else "torch.cuda.is_available() is False")
MIXED = task_rows([0, 193, 193, 500, 501, 900], [193, 500, 500, 501, 900, 964], [0, 100, 700, 0, 1, 40],
                  [193, 700, 900, 1, 400, 904], [0, 293, 200, 0, 0, 800])  # shared keys, shared queries, one token
MIXED_BY_7 = task_rows([0, 28, 28, 72, 73, 130], [28, 72, 72, 73, 130, 139], [0, 100, 700, 0, 1, 40],
                       [193, 700, 900, 1, 400, 904], [165, 556, 200, 0, 342, 855])  # as many tiles for 7 heads a key


def gpu(test: Callable[..., None]) -> Callable[..., None]:
    skipped = pytest.mark.skipif(MISSING is not None, reason=f"needs an NVIDIA Hopper GPU; {MISSING}")
    return pytest.mark.gpu(skipped(test))


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper_buffers, "TALL_GAIN", 100.0)


def is_tall(rows: TaskRows, heads: tuple[int, int, int], window: int | None = None) -> bool:
    inside = joined(visible(rows, window), window)
    return hopper_buffers.Tables.build(inside, window, hopper_buffers.Heads(*heads), CPU, 132).tall is not None


def tables_of(tensors: list[torch.Tensor], prepared: HopperTasks) -> hopper_buffers.Tables:
    q, k, v, _ = tensors
    return prepared.kind(q, k, v).tables


def test_only_long_rows_that_fill_the_device_take_tall_tiles() -> None:
    """With 1,024 tokens a document has 32 steps of 192 rows or 36 of 128, a third more work and not a tenth."""
    assert is_tall(TaskRows.documents([32_768]), (32, 32, 64))
    assert is_tall(TaskRows.documents([8_192] * 4), (32, 8, 64), 4_096)
    assert not is_tall(TaskRows.documents([1_024] * 32), (32, 32, 64))
    assert not is_tall(TaskRows.documents([32_768]), (32, 8, 128))
    assert not is_tall(TaskRows.documents([2_000]), (4, 1, 64))  # a few items, each alone on a multiprocessor
    assert not is_tall(accuracy.shards(2, 128, 524_288), (32, 8, 64))  # keys are split instead


@pytest.mark.parametrize(("group", "window"), [
    (1, None), (1, 60), (7, None), pytest.param(7, 60, marks=pytest.mark.slow)])
def test_tall_calls_are_exact(
    always: None, group: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """dQ by itself stays on tiles of two blocks."""
    monkeypatch.setattr(hopper, "run_forward", hopper_walk.launch_forward)
    monkeypatch.setattr(hopper, "run_backward", hopper_walk.launch_backward)
    for rows in (MIXED if group == 1 else MIXED_BY_7, TaskRows.documents([300, 77])):
        num_q, num_k = int(rows.q_end.max()), int(rows.k_end.max())
        q, k, v, dout = tensors = [x.double() for x in accuracy.random_inputs(num_q, num_k, 2 * group, 2, 64, CPU)]
        prepared = HOPPER.prepare(rows, CPU, Scores(window=window))
        out, lse = HOPPER.forward(q, k, v, prepared)
        assert tables_of(tensors, prepared).tall is not None
        expected = expected_attention(q, k, v, dout, rows, window=window)
        for deterministic in (False, True):
            with determinism(deterministic):
                gradients = HOPPER.backward(BackwardInputs(dout, q, k, v, out, lse), prepared)
            check_each(expected, [out, lse, *gradients], q.dtype)


@gpu
@pytest.mark.parametrize(("group", "window"), [(1, None), (4, 300), (7, None)])
def test_tall_tiles_are_exact(always: None, group: int, window: int | None) -> None:
    """Lengths off the tile, and the same bits as tiles of two blocks give: a row's sums are taken in the same order."""
    for rows in (MIXED, TaskRows.documents([2_000, 1, 385, 192, 64, 17])):
        q, k, v, dout = tensors = gpu_inputs(int(rows.q_end.max()), int(rows.k_end.max()), 2 * group, 2, 64)
        prepared = HOPPER.prepare(rows, GPU, Scores(window=window))
        results = HOPPER.forward(q, k, v, prepared)
        assert tables_of(tensors, prepared).tall is not None
        check_attention([*results, None, None, None], q, k, v, dout, rows, window=window)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(hopper_buffers, "TALL_GAIN", 0.0)
            usual = HOPPER.forward(q, k, v, HOPPER.prepare(rows, GPU, Scores(window=window)))
        assert all(torch.equal(a, e) for a, e in zip(results, usual, strict=True))


@gpu
@pytest.mark.parametrize("window", [None, 300])
def test_tall_tiles_repeat_scores_that_leave_their_range(always: None, window: int | None) -> None:
    rows = TaskRows.aligned(np.array([0, 300, 800]), np.array([300, 800, 900]), np.array([0, 0, 100]),
                            np.array([700, 900, 500]))
    q, k, v, dout = gpu_inputs(900, 900, 8, 2, 64)
    k = k.clone()
    k[:450] *= 60.0
    results = HOPPER.forward(q, k, v, HOPPER.prepare(rows, GPU, Scores(window=window)))
    check_attention([*results, None, None, None], q, k, v, dout, rows, window=window)


@gpu
def test_what_stands_behind_a_tall_tile_does_not_spread(always: None) -> None:
    rows = TaskRows.documents([200])
    q, k, v, _ = gpu_inputs(400, 400, 4, 1, 64)
    expected = HOPPER.forward(q, k, v, HOPPER.prepare(rows, GPU))
    for bad in (torch.nan, torch.inf, 1e30):
        spoilt_q, spoilt_k, spoilt_v = (x.clone() for x in (q, k, v))
        for x in (spoilt_q, spoilt_k, spoilt_v):
            x[200:] = bad
        actual = HOPPER.forward(spoilt_q, spoilt_k, spoilt_v, HOPPER.prepare(rows, GPU))
        assert all(torch.equal(a[:200], e[:200]) for a, e in zip(actual, expected, strict=True))
