"""The Hopper kernel on streams and devices other than torch's current ones."""

from __future__ import annotations

import pytest
import torch

from distca.kernels.hopper.kernel import HopperKernel
from distca.kernels.interface import BackwardInputs, TaskRows
from tests.kernels.hopper.test_kernel_gpu import GPU, NAMES, assert_exact, attend, gpu, random_inputs, shards
from tests.support.attention import determinism

HOPPER = HopperKernel()
CYCLES = 200_000_000  # about a tenth of a second


@gpu
def test_launches_go_to_the_current_stream() -> None:
    """What another stream is busy with does not delay them, and they are ordered behind their own stream."""
    rows, tensors = TaskRows.documents([700, 300]), random_inputs(1000, 1000, 8, 2, 128)
    attend(HOPPER, tensors, rows)
    prepared = HOPPER.prepare(rows, GPU)
    q, k, v, dout = tensors
    side, behind = torch.cuda.Stream(), torch.cuda.Event()
    HOPPER.forward(q, k, v, prepared)  # tables are built here
    torch.cuda.synchronize()
    torch.cuda._sleep(CYCLES)
    with torch.cuda.stream(side):
        out, lse = HOPPER.forward(q, k, v, prepared)
        gradients = HOPPER.backward(BackwardInputs(dout, q, k, v, out, lse), prepared)
        behind.record()
    behind.synchronize()
    assert not torch.cuda.default_stream().query()  # still asleep
    assert_exact([out, lse, *gradients], tensors, rows)


@gpu
@pytest.mark.parametrize("deterministic", [False, True])
def test_one_prepared_batch_on_overlapping_streams(deterministic: bool) -> None:
    rows, num_streams = shards(64, 128, 8_192), 3
    inputs = [random_inputs(8_192, 8_192, 8, 2, 128, seed=i) for i in range(num_streams)]
    prepared = HOPPER.prepare(rows, GPU)
    streams = [torch.cuda.Stream() for _ in inputs]
    torch.cuda.synchronize()
    with determinism(deterministic):
        results: list[list[torch.Tensor]] = [[] for _ in inputs]
        for _ in range(4):
            for i, (stream, (q, k, v, dout)) in enumerate(zip(streams, inputs, strict=True)):
                with torch.cuda.stream(stream):
                    out, lse = HOPPER.forward(q, k, v, prepared)
                    results[i] = [out, lse, *HOPPER.backward(BackwardInputs(dout, q, k, v, out, lse), prepared)]
        torch.cuda.synchronize()
        expected = [attend(HOPPER, tensors, rows) for tensors in inputs]
    for mine, right in zip(results, expected, strict=True):
        for name, a, e in zip(NAMES, mine, right, strict=True):
            if deterministic or name in ("out", "lse"):
                assert torch.equal(a, e), name
            else:
                assert (a - e).norm(dtype=torch.float32) <= 1e-2 * e.norm(dtype=torch.float32), name


@gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_two_devices_in_one_process(dim: int) -> None:
    """Tensors of every device in turn, with the first one current, forward and backward, deterministic or not."""
    rows = TaskRows.documents([700, 300])
    for _ in range(2):
        for index in range(torch.cuda.device_count()):
            tensors = [x.to(torch.device("cuda", index)) for x in random_inputs(1000, 1000, 8, 2, dim, seed=index)]
            for mode in (False, True):
                with determinism(mode):
                    assert_exact(attend(HOPPER, tensors, rows), tensors, rows)
            assert torch.cuda.current_device() == 0
