"""Seconds of everything a layer does on one pool rank, from a latency table, a cluster and a model.

Attention comes from the table, scaled by heads: a table measured with 32 heads charges a rank with 4 an eighth. Linear
layers run at the table's measured rate. On another cluster than the table's, both scale with the cluster's own rates.

Tensor-parallel traffic (sequence parallelism: an all-gather before and a reduce-scatter behind each half of a layer)
runs chunk by chunk beside the products that make or use it, as the common trainers do: what is longer counts, and one
chunk of what is shorter. It is the same for all strategies and stays on the computing stream.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from distca.cost.latency_table import LatencyTable
from distca.cost.network import Network
from distca.cost.work import head_flops, linear_flops
from distca.spec import BF16_BYTES, ClusterShape, ModelShape, cluster_named

TABLE_CLUSTER = "dgx-h200"  # the machine of the shipped table; other clusters scale from it
ADAM_BYTES = 12             # float32 master weight and two moments of a parameter
OPTIMIZER_TRAFFIC = 32      # bytes of memory traffic per parameter: gradient in, state and weight in and out


@dataclass(frozen=True, slots=True, eq=False)
class Costs:
    """What one pool rank pays."""

    model: ModelShape
    tp: int
    table: LatencyTable
    network: Network
    pool_ranks_per_node: int
    attention_scale: float          # table seconds -> seconds here
    linear_flops_per_second: tuple[float, float]  # forward, backward
    memory_bandwidth: float
    free: bool = False              # links between pool ranks take no time

    @classmethod
    def of(cls, model: ModelShape, cluster: ClusterShape, tp: int, table: LatencyTable) -> Costs:
        about: Mapping[str, Any] = table.metadata
        if "num_heads" not in about or "head_dim" not in about:
            raise ValueError(f"latency table {table.name!r} does not say its num_heads and head_dim; profile again")
        base = cluster_named(TABLE_CLUSTER)
        heads = model.heads_per_rank(tp) * model.head_dim / (about["num_heads"] * about["head_dim"])
        gemm = cluster.gemm_flops_per_second / base.gemm_flops_per_second
        linear = about.get("linear")
        rates = ((gemm * linear["forward_flops_per_second"], gemm * linear["backward_flops_per_second"]) if linear
                 else (cluster.gemm_flops_per_second, cluster.gemm_flops_per_second))
        return cls(model, tp, table, Network.of(cluster), max(cluster.gpus_per_node // tp, 1),
                   heads * base.attention_flops_per_second / cluster.attention_flops_per_second, rates,
                   cluster.memory_bandwidth)

    def without_network(self) -> Costs:
        """The same with links between pool ranks that take no time; TP traffic stays as it is."""
        return replace(self, free=True)

    def attention_seconds(self, q_len: np.ndarray, kv_len: np.ndarray, backward: bool = False) -> np.ndarray:
        """Of shards aligned with the end of their keys."""
        return self.attention_scale * self.table.seconds(q_len, np.maximum(kv_len, q_len), backward=backward)

    def segment_seconds(self, tokens: np.ndarray, backward: bool) -> tuple[np.ndarray, np.ndarray]:
        """A layer's linear part before and behind its attention."""
        model, tp = self.model, self.tp
        whole = np.asarray(linear_flops(1.0, model, tp))
        qkv = 2 * model.hidden * model.head_dim * (model.heads_per_rank(tp) + 2 * model.kv_heads_per_rank(tp))
        rate = self.linear_flops_per_second[backward] / (2.0 if backward else 1.0)
        collective = self._tp_seconds(tokens)
        before = _beside(tokens * (qkv / rate), collective, tp)
        behind = _beside(tokens * ((whole - qkv) / rate), 3 * collective, tp)
        return before, behind

    def head_seconds(self, tokens: np.ndarray, backward: bool) -> np.ndarray:
        rate = self.linear_flops_per_second[backward] / (2.0 if backward else 1.0)
        return _beside(tokens * (head_flops(1.0, self.model, self.tp) / rate), self._tp_seconds(tokens), self.tp)

    def _tp_seconds(self, tokens: np.ndarray) -> np.ndarray:
        """One all-gather or reduce-scatter of the hidden states over the tensor-parallel ranks."""
        network, tp = self.network, self.tp
        if tp == 1:
            return np.zeros_like(tokens, dtype=np.float64)
        num_bytes = tokens * (self.model.hidden * BF16_BYTES)
        inside = tp <= network.gpus_per_node
        bandwidth = network.intra_node_bandwidth if inside else network.inter_node_bandwidth
        return np.asarray((tp - 1) / tp * num_bytes / bandwidth, dtype=np.float64)

    def layer_parameters(self) -> float:
        """Weights of one layer on one GPU."""
        return float(linear_flops(1, self.model, self.tp)) / 2

    def stage_parameters(self, stage: int, pp: int) -> float:
        """Weights of one stage on one GPU: its layers, the embedding on the first, the head on the last."""
        ends = (stage == 0) + (stage == pp - 1)
        return (self.model.num_layers / pp * self.layer_parameters()
                + ends * self.model.hidden * self.model.vocab / self.tp)

    def gather_seconds(self, num_bytes: float, num_ranks: int) -> float:
        """An all-gather (or reduce-scatter) that leaves (or takes) num_bytes on each of num_ranks pool ranks."""
        return 0.0 if self.free else self.network.all_gather_seconds(
            num_bytes, num_ranks, self.pool_ranks_per_node)

    def optimizer_seconds(self, parameters: float, shards: int) -> float:
        return parameters / shards * OPTIMIZER_TRAFFIC / self.memory_bandwidth


def _beside(compute: np.ndarray, travel: np.ndarray, chunks: int) -> np.ndarray:
    """Two streams that hand over chunk by chunk: the longer one, and one chunk of the shorter."""
    return np.asarray(np.maximum(compute, travel) + np.minimum(compute, travel) / chunks)
