"""Model FLOPs utilization: what a training step must compute over what its GPUs could in that time.

Counted are the matrix products of the model and the pairs that its attention sees, once forward and twice backward.
What is computed again (activation checkpointing, scores in attention's backward) is not the model's and is left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import numpy as np

from distca.cost.work import attention_flops, head_flops, linear_flops
from distca.spec import ModelShape

# words of a GPU's name -> dense bf16 FLOP/s by its data sheet; of those that fit, the one with most words
PEAKS = {
    "GB200": 2500e12, "B200": 2250e12, "GH200": 989e12, "H200 NVL": 835e12, "H200": 989e12, "H100 NVL": 835e12,
    "H100 PCIe": 756e12, "H100": 989e12, "H800": 989e12, "H20": 148e12, "A100": 312e12, "A800": 312e12, "A30": 165e12,
    "A40": 149.7e12, "A10": 125e12, "L40S": 362e12, "L40": 181e12, "L4": 121e12, "RTX A6000": 154.8e12,
    "RTX 4090": 165.2e12, "RTX 3090": 71e12,
}


def training_flops(
    micro_batches: Iterable[np.ndarray], model: ModelShape, windows: Sequence[int | None] = ()
) -> float:
    """Forward and backward of a step whose micro-batches hold documents of these lengths, over all ranks.

    `windows` are the keys that a query of each layer sees, None for all before it; none named: all layers see all.
    """
    lengths = np.concatenate([np.asarray(one, dtype=np.int64) for one in micro_batches])
    tokens = int(lengths.sum())
    pairs = sum(_pairs(lengths, window) for window in windows or (None,) * model.num_layers)
    return 3.0 * (model.num_layers * linear_flops(tokens, model) + head_flops(tokens, model)
                  + attention_flops(pairs, model))


def peak_flops(gpu: str) -> float | None:
    """Dense bf16 FLOP/s of a GPU by the name that its driver gives; None where that is not known."""
    words = set(re.split(r"[^a-z0-9]+", gpu.lower()))
    fitting = [name for name in PEAKS if set(name.lower().split()) <= words]
    return PEAKS[max(fitting, key=lambda name: len(name.split()))] if fitting else None


def _pairs(lengths: np.ndarray, window: int | None) -> int:
    """Queries with the keys they see, themselves included."""
    seen = lengths if window is None else np.minimum(lengths, window)
    return int((lengths * seen - seen * (seen - 1) // 2).sum())
