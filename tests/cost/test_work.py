"""Closed forms against counting: every pair, FLOP and byte by brute force or by hand."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distca.cost.work import (
    activation_bytes,
    attention_backward_flops,
    attention_flops,
    backward_bytes,
    causal_pairs,
    head_flops,
    hidden_shards_bound,
    linear_flops,
    pairs_of_shard,
)
from distca.models import MODELS, model_named
from distca.spec import cluster_named

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


@given(st.sampled_from(["llama3-8b", "llama-34b"]), st.sampled_from([1, 2, 4, 8]), st.floats(1e14, 1e15))
def test_the_bound_is_where_communication_stops_hiding(name: str, tp: int, rate: float) -> None:
    model, cluster = model_named(name), replace(cluster_named("dgx-h200"), peak_flops_per_second=rate)
    shards = hidden_shards_bound(model, cluster, tp)
    compute_seconds = 2 * (4 * model.hidden**2 + 3 * model.hidden * model.ffn) / tp / rate
    token_bytes = model.q_token_bytes(tp) + (shards + 1) / 2 * model.kv_token_bytes(tp)
    assert token_bytes / 50e9 == pytest.approx(compute_seconds)


def test_about_31_shards_hide_for_llama_34b_at_50_gigabytes_a_second() -> None:
    # 4 * 8192**2 + 3 * 8192 * 22016 = 809.5 M weights, 1.619 GFLOP a token, 1.637 us at 989 TFLOP/s: the NIC carries
    # 81,849 bytes meanwhile. With h_q = 16,384 and h_kv = 4,096 bytes: 2 * (81,849 - 16,384) / 4,096 - 1 = 30.97.
    model, cluster = model_named("llama-34b"), cluster_named("dgx-h200")
    assert hidden_shards_bound(model, cluster) == pytest.approx(30.97, abs=0.01)
    assert hidden_shards_bound(model, cluster, tp=8) == pytest.approx(hidden_shards_bound(model, cluster))


def test_the_bound_falls_with_faster_compute_and_rises_with_bandwidth() -> None:
    cluster = cluster_named("dgx-h200")
    for model in MODELS.values():
        bound = hidden_shards_bound(model, cluster)
        assert hidden_shards_bound(model, replace(cluster, inter_node_bandwidth=100e9)) > bound
        assert hidden_shards_bound(model, replace(cluster, peak_flops_per_second=2e15)) < bound
