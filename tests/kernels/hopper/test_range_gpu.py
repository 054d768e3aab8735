"""Forward takes exponentials from the largest score of the first keys it meets, the last of a row; here others follow.

Later keys' scores leave the range of float32 from there, rows meet no visible key at first, or a row is NaN beside
others of its warp. A warp repeats the former by itself, and every result stays as exact as rounding allows. Gradients
are looked at where probabilities stay above what float32 calls normal.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch

from distca.kernels.hopper.kernel import HopperKernel
from distca.kernels.interface import Scores, TaskRows
from tests.support import hopper_accuracy as accuracy
from tests.support.accuracy import check_attention

GPU = torch.device("cuda")
HOPPER = HopperKernel()
random_inputs = partial(accuracy.random_inputs, device=GPU)
DIMS = (64, 128, 192, 256)
MISSING = (HOPPER.supports(GPU, torch.bfloat16, 128) if torch.cuda.is_available()
           else "torch.cuda.is_available() is False")


def gpu(test: Callable[..., None]) -> Callable[..., None]:
    skipped = pytest.mark.skipif(MISSING is not None, reason=f"needs an NVIDIA Hopper GPU; {MISSING}")
    return pytest.mark.gpu(skipped(test))


def growing(tensors: list[torch.Tensor], factor: float, half: int = 450) -> list[torch.Tensor]:
    """Keys before `half` times `factor`: their scores, met last, are larger by it."""
    q, k, v, dout = tensors
    k = k.clone()
    k[:half] *= factor
    return [q, k, v, dout]


def assert_forward_exact(tensors: list[torch.Tensor], rows: TaskRows, window: int | None = None) -> None:
    q, k, v, dout = tensors
    out, lse = HOPPER.forward(q, k, v, HOPPER.prepare(rows, GPU, Scores(window=window)))
    check_attention([out, lse, None, None, None], q, k, v, dout, rows, window=window)


@gpu
@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("dim", DIMS)
def test_scores_grow_beyond_the_range_of_what_came_before(dim: int, window: int | None) -> None:
    rows = TaskRows.aligned(np.array([0, 300, 800]), np.array([300, 800, 900]), np.array([0, 0, 100]),
                            np.array([700, 900, 500]))
    tensors = growing(random_inputs(900, 900, 8, 2, dim), 60.0)
    logits = torch.einsum("qhd,khd->hqk", tensors[0][:, :2].double(), tensors[1].double()) * dim**-0.5
    assert float((logits[..., :450].amax() - logits[..., 450:].amax()) / np.log(2)) > 128  # not vacuous
    assert_forward_exact(tensors, rows, window)
    tensors = growing(tensors, 8 / 60)
    accuracy.assert_exact(accuracy.attend(HOPPER, tensors, rows, window), tensors, rows, window)


@gpu
@pytest.mark.parametrize("dim", DIMS[1:])
@pytest.mark.parametrize("group", [1, 7])
def test_rows_that_meet_no_visible_key_at_first(group: int, dim: int) -> None:
    """Tiles of queries end just behind a tile of keys, so that their first rows see none of the first keys met."""
    lengths = np.array([81, 129, 130, 161, 191, 257, 385])
    ends = np.cumsum(lengths)
    rows = TaskRows.aligned(ends - lengths, ends, ends - lengths, ends)
    tensors = growing(random_inputs(int(ends[-1]), int(ends[-1]), 2 * group, 2, dim), 30.0)
    assert_forward_exact(tensors, rows)


@gpu
@pytest.mark.parametrize("dim", DIMS)
def test_a_row_of_nan_leaves_the_others_of_its_warp_as_they_are(dim: int) -> None:
    rows = TaskRows.documents([700])
    q, k, v, _ = random_inputs(700, 700, 4, 1, dim)
    spoilt = q.clone()
    spoilt[333, 1] = torch.nan
    (expected, expected_lse), (out, lse) = (
        HOPPER.forward(x, k, v, HOPPER.prepare(rows, GPU)) for x in (q, spoilt))
    assert bool(out[333, 1].isnan().all()) and bool(lse[333, 1].isnan())
    out[333, 1], lse[333, 1] = expected[333, 1], expected_lse[333, 1]
    torch.testing.assert_close(lse, expected_lse, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out, expected, rtol=2**-6, atol=2**-8)  # a probability's and a result's rounding
