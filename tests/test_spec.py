"""The named shapes and the bytes derived from them, against arithmetic done by hand."""

from dataclasses import replace
from typing import Any

import pytest

from distca.models import MODELS, model_named
from distca.spec import CLUSTERS, cluster_named


def test_token_bytes_of_llama3_8b() -> None:
    model = model_named("llama3-8b")
    assert model.q_token_bytes() == 32 * 128 * 2
    assert model.kv_token_bytes() == 2 * 8 * 128 * 2
    assert model.out_token_bytes() == model.q_token_bytes()
    assert model.lse_token_bytes() == 32 * 4
    assert model.q_token_bytes(element_bytes=4) == 32 * 128 * 4


@pytest.mark.parametrize("tp, kv_heads", [(1, 8), (2, 4), (8, 1), (16, 1), (32, 1)])
def test_kv_heads_are_replicated_beyond_their_number(tp: int, kv_heads: int) -> None:
    model = model_named("llama3-8b")
    assert model.kv_token_bytes(tp) == 2 * kv_heads * 128 * 2
    assert model.q_token_bytes(tp) * tp == model.q_token_bytes()
    assert model.lse_token_bytes(tp) * tp == model.lse_token_bytes()


@pytest.mark.parametrize("tp", [0, -1, 3, 64, True, 2.0])
def test_tp_must_divide_the_heads(tp: Any) -> None:
    with pytest.raises(ValueError, match=r"tp is .* 32 heads; choose"):
        model_named("llama3-8b").q_token_bytes(tp)


def test_tp_must_fit_the_kv_heads() -> None:
    model = replace(model_named("tiny"), num_heads=12, num_kv_heads=6)
    assert model.heads_per_rank(4) == 3
    with pytest.raises(ValueError, match=r"tp is 4 .* 6 KV heads"):
        model.kv_token_bytes(4)


@pytest.mark.parametrize("change, message", [
    ({"num_layers": 0}, "num_layers is 0"),
    ({"hidden": -1}, "hidden is -1"),
    ({"ffn": 1.5}, "ffn is 1.5"),
    ({"vocab": True}, "vocab is True"),
    ({"num_kv_heads": 3}, "num_heads is 8, not a multiple of num_kv_heads 3"),
])
def test_model_shapes_are_checked(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(model_named("tiny"), **change)


@pytest.mark.parametrize("change, message", [
    ({"gpus_per_node": 0}, "gpus_per_node is 0"),
    ({"inter_node_bandwidth": 0.0}, "inter_node_bandwidth is 0.0; .* above 0"),
    ({"memory_bytes": float("nan")}, "memory_bytes is nan"),
    ({"inter_node_latency_seconds": -1e-6}, "of at least 0"),
])
def test_cluster_shapes_are_checked(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(cluster_named("dgx-h200"), **change)


def test_unknown_names_list_the_known_and_the_nearest() -> None:
    with pytest.raises(ValueError, match="'llama-8b' is unknown; did you mean 'llama3-8b'") as caught:
        model_named("llama-8b")
    named = [name for name in MODELS if f" {name}," in str(caught.value)]  # of many the nearest, and how many more
    assert {"llama3-8b", "llama2-7b", "llama-34b"} <= set(named)
    assert f"{len(MODELS) - len(named)} more; or give a folder" in str(caught.value)
    with pytest.raises(ValueError, match="cluster 'zzz' is unknown; choose one of") as caught:
        cluster_named("zzz")
    assert all(name in str(caught.value) for name in CLUSTERS)
    assert "\n" not in str(caught.value)


def test_registries_are_keyed_by_name() -> None:
    assert all(model_named(name).name == name for name in MODELS)
    assert all(cluster_named(name).name == name for name in CLUSTERS)


@pytest.mark.parametrize(("name", "gpus_per_node"), [
    ("dgx-a100", 8), ("dgx-h100", 8), ("dgx-h200", 8), ("dgx-b200", 8), ("gb200-nvl72", 72)])
def test_clusters_reach_the_h200_s_part_of_their_peak(name: str, gpus_per_node: int) -> None:
    """Rates that nobody measured are the H200's share of the published peak."""
    cluster, measured = cluster_named(name), cluster_named("dgx-h200")
    assert cluster.gpus_per_node == cluster.ranks_per_node(1) == gpus_per_node
    for rate in ("gemm_flops_per_second", "attention_flops_per_second"):
        share = getattr(measured, rate) / measured.peak_flops_per_second
        assert getattr(cluster, rate) == pytest.approx(share * cluster.peak_flops_per_second, rel=0.01)
    assert cluster.intra_node_bandwidth > cluster.inter_node_bandwidth
