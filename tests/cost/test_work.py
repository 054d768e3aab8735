"""Closed forms against counting: every pair, FLOP and byte by brute force or by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distca.cost.work import (
    PEAKS,
    activation_bytes,
    attention_backward_flops,
    attention_flops,
    backward_bytes,
    causal_pairs,
    head_flops,
    linear_flops,
    pairs_of_shard,
    peak_flops,
    training_flops,
)
from distca.models import model_named
from distca.spec import ModelShape

position = st.integers(0, 24)


def counted(q_start: int, q_stop: int, kv_start: int, kv_stop: int) -> int:
    return sum(key <= query for query in range(q_start, q_stop) for key in range(kv_start, kv_stop))


@given(position, position, position, st.none() | position)
def test_causal_pairs_are_those_counted(q_start: int, q_stop: int, kv_start: int, kv_stop: int | None) -> None:
    expected = counted(q_start, q_stop, kv_start, 100 if kv_stop is None else kv_stop)
    actual = causal_pairs(q_start, q_stop, kv_start, kv_stop)
    assert actual == expected
    assert type(actual) is int


@given(st.lists(st.tuples(position, position, position, position), min_size=1, max_size=20))
def test_causal_pairs_of_columns(rows: list[tuple[int, ...]]) -> None:
    columns = [np.array(column) for column in zip(*rows, strict=True)]
    actual = causal_pairs(*columns)
    assert actual.dtype == np.int64
    assert actual.tolist() == [counted(*row) for row in rows]


def test_causal_pairs_broadcast() -> None:
    q_stop = np.array([2, 4])
    assert causal_pairs(0, q_stop).tolist() == [3, 10]
    assert causal_pairs(q_stop, 6, 1, 3).tolist() == [counted(2, 6, 1, 3), counted(4, 6, 1, 3)]


@given(st.integers(1, 2**31 - 1), st.data())
def test_any_cut_of_a_document_keeps_its_pairs(length: int, data: st.DataObject) -> None:
    q_cut, kv_cut = data.draw(st.integers(0, length)), data.draw(st.integers(0, length))
    queries, keys = ((0, q_cut), (q_cut, length)), ((0, kv_cut), (kv_cut, length))
    parts = [causal_pairs(*q, *kv) for q in queries for kv in keys]
    assert min(parts) >= 0
    assert sum(parts) == length * (length + 1) // 2


@given(st.integers(0, 2**31 - 1), st.integers(0, 2**31 - 1))
def test_a_shard_is_a_slice_with_its_whole_prefix(a: int, b: int) -> None:
    q_len, kv_len = sorted((a, b))
    expected = causal_pairs(kv_len - q_len, kv_len)
    assert pairs_of_shard(q_len, kv_len) == expected
    assert pairs_of_shard(np.array([q_len]), np.array([kv_len])).tolist() == [expected]
    assert pairs_of_shard(float(q_len), float(kv_len)) == pytest.approx(expected, rel=1e-12)


def test_attention_flops_by_hand() -> None:
    model = model_named("llama3-8b")
    assert attention_flops(10, model) == 4 * 10 * 32 * 128
    assert attention_flops(10, model, tp=8) == 4 * 10 * 4 * 128
    assert attention_backward_flops(10, model) == 2.5 * attention_flops(10, model)
    assert attention_flops(np.array([10, 20]), model).tolist() == [163840, 327680]


def test_linear_flops_are_twice_the_weights() -> None:
    # Llama 3 8B: q and o 4096 x 4096, k and v 4096 x 1024, three feed-forward matrices 4096 x 14336.
    assert linear_flops(1, model_named("llama3-8b")) == 2 * (2 * 16_777_216 + 2 * 4_194_304 + 3 * 58_720_256)
    assert head_flops(3, model_named("llama3-8b")) == 3 * 2 * 4096 * 128_256
    model = model_named("llama-34b")
    # All weights, with embedding and head, come to the 34 billion in its name.
    assert (48 * linear_flops(1, model) + 2 * head_flops(1, model)) / 2 == pytest.approx(33.7e9, rel=0.01)
    assert linear_flops(5, model, tp=8) * 8 == linear_flops(5, model)
    assert linear_flops(1, model, tp=16) * 16 > linear_flops(1, model)  # KV projections are replicated


def test_activation_bytes_by_hand() -> None:
    model = model_named("tiny")  # hidden 256, 8 heads and 2 KV heads of 32, ffn 704
    per_token = 2 * (4 * 256 + 256 + 2 * 64 + 256 + 3 * 704) + 4 * 8
    assert activation_bytes(10, model) == 10 * per_token
    assert activation_bytes(10, model, tp=2) == 5 * per_token


def test_backward_bytes_by_hand() -> None:
    model = model_named("llama3-8b")
    keep = 3 * (8192 + 8192 + 128 + 8192) + 5 * 4096  # O, dO and lse in, dQ out; dK and dV out
    assert backward_bytes(3, 5, model, state="keep") == keep
    assert backward_bytes(3, 5, model) == keep + 3 * 8192 + 5 * 4096  # Q in; K and V in
    with pytest.raises(ValueError, match="state 'kept' is unknown; did you mean 'keep'"):
        backward_bytes(3, 5, model, state="kept")  # type: ignore[arg-type]


# ---- FLOPs of a training step

SMALL = ModelShape("small", num_layers=3, hidden=24, num_heads=4, num_kv_heads=2, head_dim=8, ffn=40, vocab=61)


def counted_flops(lengths: list[int], windows: list[int | None]) -> int:
    """Two FLOPs for every multiply-add of every matrix and every pair, one query and one key at a time."""
    matrices = [(24, 32), (24, 16), (24, 16), (32, 24), (24, 40), (24, 40), (40, 24)]  # q, k, v, out, gate, up, down
    linear = sum(2 * rows * columns for rows, columns in matrices)
    pairs = sum(1 for window in windows for length in lengths for query in range(length) for key in range(query + 1)
                if window is None or query - key < window)
    return 3 * (sum(lengths) * (3 * linear + 2 * 24 * 61) + pairs * 4 * (2 * 8 + 2 * 8))


@pytest.mark.parametrize("windows", [[], [None, None, None], [5, None, 1], [100, 7, 33]])
@pytest.mark.parametrize("lengths", [[1], [33, 1, 7], [64]])
def test_flops_are_those_of_the_matrices_and_the_pairs(lengths: list[int], windows: list[int | None]) -> None:
    expected = counted_flops(lengths, windows or [None] * 3)
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
