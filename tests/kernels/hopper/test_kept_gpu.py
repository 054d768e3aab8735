"""Gradients on a GPU, both ways to dQ: dS kept, for all heads or a few at a time, and scores again."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from distca.kernels.hopper import buffers as hopper_buffers
from distca.kernels.hopper.kernel import HopperKernel
from distca.kernels.interface import Scores, TaskRows
from tests.support import hopper_accuracy as accuracy
from tests.support.attention import determinism

GPU = torch.device("cuda")
HOPPER = HopperKernel(num_sms=32)  # or tiles of few queries would be split, and scores computed again
MISSING = (HOPPER.supports(GPU, torch.bfloat16, 256) if torch.cuda.is_available()
           else "torch.cuda.is_available() is False")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(MISSING is not None, reason=f"needs a Hopper GPU; {MISSING}")]
random_inputs = partial(accuracy.random_inputs, device=GPU)


@pytest.mark.parametrize("heads", [0, 1, 2, 3])
@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("dim", [128, 192, 256])
def test_gradients_for_any_number_of_heads_at_a_time(
    dim: int, window: int | None, heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three KV heads; queries and keys are shared by rows."""
    rows = accuracy.random_rows(dim, 12, 1500, 2100, apart=False)
    with determinism(wanted=True):  # dim 128 keeps dS of so many keys only where sums need an order
        tensors = random_inputs(1500, 2100, 12, 3, dim)
        kept = HOPPER.prepare(rows, GPU, Scores(window=window)).kind(*tensors[:3]).tables.kept
        assert kept is not None
        assert kept.heads == 3
        monkeypatch.setattr(hopper_buffers, "most_places", lambda device, place_bytes: heads * kept.num_places)
        accuracy.assert_exact(accuracy.attend(HOPPER, tensors, rows, window), tensors, rows, window)


def test_dk_and_dv_have_the_same_bits_either_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """One kernel sums them in both: keeping dS only adds a store."""
    rows, tensors = TaskRows.documents([700, 1, 3000]), random_inputs(3701, 3701, 8, 2, 256)
    kept = accuracy.attend(HOPPER, tensors, rows)
    monkeypatch.setattr(hopper_buffers, "most_places", lambda device, place_bytes: 0)
    again = accuracy.attend(HOPPER, tensors, rows)
    assert [torch.equal(a, b) for a, b in zip(kept[-2:], again[-2:], strict=True)] == [True, True]
