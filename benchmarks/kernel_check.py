"""Run a kernel once, small, against the formula in float64: a subject for compute-sanitizer, or a first sign of life.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python3 benchmarks/kernel_check.py
    compute-sanitizer --tool racecheck python3 benchmarks/kernel_check.py --head-dim 128

Without torch's cache every tensor is an allocation of its own, whose ends memcheck watches.

Forward and backward for each head dim, with a window, a softcap or neither, in deterministic mode and out of it. Rows
share keys, share queries, end off the tile, hold one token or nothing, and one row is long. On two multiprocessors each
has many items, among them tall tiles with head dim 64; on all of them the long row's keys are split, and the queries of
a document's few key tiles. Random numbers and
the expected results are made on the CPU, so that next to nothing but the kernel runs on the device. Ends with status 1
where results differ.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator

import numpy as np
import torch

from distca.kernels import Kernel, TaskRows, kernel_named
from distca.kernels.dense import DenseKernel
from distca.kernels.hopper.kernel import HopperKernel
from distca.kernels.interface import BackwardInputs, Scores

NUM_Q, NUM_K = 470, 4_000
HEADS, KV_HEADS = 8, 2
HEAD_DIMS = (64, 128, 192, 256)
FEW_SMS = 2
LONG = TaskRows.aligned([3], [144], [90], [4_000])  # in tiles of 128 or 80 keys, enough of them to be split
WHOLE = TaskRows.documents([NUM_Q])  # of few key tiles with many queries
SOFTCAP = 2.0  # some scores are beyond it
VALUE_DIMS = {192: 128}  # of values, where it is not that of keys
MOST = 0.01  # relative error, of which bfloat16 alone makes up to half
NAMES = ("out", "lse", "dq", "dk", "dv")
ROWS = TaskRows(
    #    a shared prefix, the last shard off the tile; one token; queries of two rows; nothing; a rectangle
    q_begin=np.array([0, 128, 160, 290, 300, 300, 430, 440]),
    q_end=np.array([128, 160, 281, 291, 420, 420, 430, 470]),
    k_begin=np.array([0, 0, 0, 290, 291, 350, 7, 30]),
    k_end=np.array([128, 160, 281, 291, 350, 411, 7, 171]),
    q_offset=np.array([0, 128, 160, 0, 60, 1, 0, 200]),
)


def cases(name: str) -> Iterator[tuple[Kernel, TaskRows, Scores]]:
    kernel = kernel_named(name)
    few = HopperKernel(num_sms=FEW_SMS) if name == "hopper" else kernel
    for scores in (Scores(), Scores(window=50), Scores(softcap=SOFTCAP)):
        yield few, ROWS, scores
        if scores.window is None:
            yield few, LONG, scores
            yield kernel, LONG, scores
            yield kernel, WHOLE, scores


def attend(
    kernel: Kernel, tensors: list[torch.Tensor], rows: TaskRows, scores: Scores, device: torch.device
) -> list[torch.Tensor]:
    q, k, v, dout = tensors
    prepared = kernel.prepare(rows, device, scores)
    out, lse = kernel.forward(q, k, v, prepared)
    return [out, lse, *kernel.backward(BackwardInputs(dout, q, k, v, out, lse), prepared)]


def relative_errors(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> dict[str, float]:
    """By norm; infinite where something is not finite that should be, or the other way round."""
    errors = {}
    for name, a, e in zip(NAMES, (x.cpu().double() for x in actual), expected, strict=True):
        seen = e.isfinite()
        same = bool((a.isfinite() == seen).all()) and bool((a[~seen] == e[~seen]).all())
        errors[name] = float((a - e)[seen].norm() / e[seen].norm()) if same else float("inf")
    return errors


def check(name: str, device: torch.device, head_dims: tuple[int, ...]) -> bool:
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device is '{device}' but torch finds no GPU; give --device cpu --kernel sdpa")
    passed, generator = True, torch.Generator().manual_seed(0)
    for dim, (kernel, rows, scores) in itertools.product(head_dims, cases(name)):
        value_dim = VALUE_DIMS.get(dim, dim)
        reason = kernel.supports(device, torch.bfloat16, dim, scores, value_dim)
        if reason is not None:
            raise ValueError(f"kernel is {name!r}, which cannot run here: {reason}")
        shapes = (NUM_Q, HEADS, dim), (NUM_K, KV_HEADS, dim), (NUM_K, KV_HEADS, value_dim), (NUM_Q, HEADS, value_dim)
        tensors = [torch.randn(shape, generator=generator).to(torch.bfloat16) for shape in shapes]
        expected = attend(DenseKernel(), [x.double() for x in tensors], rows, scores, torch.device("cpu"))
        there = [x.to(device) for x in tensors]
        for deterministic in (False, True):
            torch.use_deterministic_algorithms(deterministic)
            errors = relative_errors(attend(kernel, there, rows, scores, device), expected)
            fine = max(errors.values()) <= MOST
            passed &= fine
            figures = ", ".join(f"{key} {value:.1e}" for key, value in errors.items())
            print(f"{kernel}, head_dim {dim}, {len(rows)} rows, {scores}, deterministic {deterministic}: {figures}"
                  f"{'' if fine else f'  MORE THAN {MOST}'}", flush=True)
    return passed


def main() -> None:
    parser = argparse.ArgumentParser(description="Check a kernel on a small batch; made for compute-sanitizer.")
    parser.add_argument("--kernel", default="hopper")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--head-dim", type=int, choices=HEAD_DIMS, help="default: all")
    options = parser.parse_args()
    head_dims = (options.head_dim,) if options.head_dim else HEAD_DIMS
    try:
        passed = check(options.kernel, torch.device(options.device), head_dims)
    except ValueError as problem:
        sys.exit(f"kernel_check.py: error: {problem}")
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    main()
