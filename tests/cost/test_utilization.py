"""Model FLOPs against sums over matrices and over pairs of tokens, peaks against names that drivers give."""

import numpy as np
import pytest

from distca.cost.work import PEAKS, peak_flops, training_flops
from distca.models import model_named
from distca.spec import ModelShape

SMALL = ModelShape("small", num_layers=3, hidden=24, num_heads=4, num_kv_heads=2, head_dim=8, ffn=40, vocab=61)


def counted(lengths: list[int], windows: list[int | None]) -> int:
    """Two FLOPs for every multiply-add of every matrix and every pair, one query and one key at a time."""
    matrices = [(24, 32), (24, 16), (24, 16), (32, 24), (24, 40), (24, 40), (40, 24)]  # q, k, v, out, gate, up, down
    linear = sum(2 * rows * columns for rows, columns in matrices)
    pairs = sum(1 for window in windows for length in lengths for query in range(length) for key in range(query + 1)
                if window is None or query - key < window)
    return 3 * (sum(lengths) * (3 * linear + 2 * 24 * 61) + pairs * 4 * (2 * 8 + 2 * 8))


@pytest.mark.parametrize("windows", [[], [None, None, None], [5, None, 1], [100, 7, 33]])
@pytest.mark.parametrize("lengths", [[1], [33, 1, 7], [64]])
def test_flops_are_those_of_the_matrices_and_the_pairs(lengths: list[int], windows: list[int | None]) -> None:
    expected = counted(lengths, windows or [None] * 3)
    assert training_flops([np.array(lengths)], SMALL, windows) == expected
    halves = [np.array([length]) for length in lengths]          # the same documents in micro-batches of their own
    assert training_flops(halves, SMALL, windows) == expected


def test_a_large_model_is_six_flops_a_weight_and_token() -> None:
    """Short documents make attention negligible: then the field's rule of thumb holds, without the embedding."""
    weights = 32 * (4096 * (4096 + 1024 + 1024 + 4096) + 3 * 4096 * 14336) + 4096 * 128256
    assert training_flops([np.ones(1000, dtype=np.int64)], model_named("llama3-8b")) == pytest.approx(
        6000 * weights, rel=1e-3)


@pytest.mark.parametrize(("name", "peak"), [
    ("NVIDIA H200", 989e12), ("NVIDIA H100 80GB HBM3", 989e12), ("NVIDIA H100 PCIe", 756e12),
    ("NVIDIA H100 NVL", 835e12),
    ("NVIDIA A100-SXM4-80GB", 312e12), ("NVIDIA GH200 480GB", 989e12), ("NVIDIA L40S", 362e12), ("NVIDIA L4", 121e12),
    ("NVIDIA B200", 2250e12), ("NVIDIA GeForce RTX 4090", 165.2e12), ("NVIDIA GeForce GTX 1080", None), ("", None),
    ("NVIDIA A1000", None),
])
def test_a_gpu_is_known_by_the_words_of_its_name(name: str, peak: float | None) -> None:
    assert peak_flops(name) == peak


def test_every_known_gpu_finds_itself() -> None:
    assert all(peak_flops(f"NVIDIA {name} 80GB") == peak for name, peak in PEAKS.items())
