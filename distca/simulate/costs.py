"""Seconds of everything a layer does on one pool rank, from a latency table, a cluster and a model.

Attention is `AttentionTime`'s, the same that plans balance. Linear layers run at the table's measured rate. On another
cluster than the table's, both scale with the cluster's own rates. Links are the cluster's, or as the table's profile
measured them.

Tensor-parallel traffic (sequence parallelism: an all-gather before and a reduce-scatter behind each half of a layer)
runs chunk by chunk beside the products that make or use it, as the common trainers do: what is longer counts, and one
chunk of what is shorter. It is the same for all strategies and stays on the computing stream.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf
from typing import Any

import numpy as np

from distca.cost.attention_time import AttentionTime
from distca.cost.mixed_pool import Cost, MixedPool, time_of
from distca.cost.network import Network
from distca.cost.work import head_flops, layer_parameters, linear_flops, qkv_parameters
from distca.spec import BF16_BYTES, MAX_RATE, ClusterShape, ModelShape, cluster_named
from distca.validation import UserError, check_number

TABLE_CLUSTER = "dgx-h200"  # the machine of the shipped table; other clusters scale from it
ADAM_BYTES = 12             # float32 master weight and two moments of a parameter
OPTIMIZER_TRAFFIC = 32      # bytes of memory traffic per parameter: gradient in, state and weight in and out
FREE = Network(1, inf, inf, 0.0, 0.0)


@dataclass(frozen=True, slots=True, eq=False)
class Costs:
    """What one pool rank pays."""

    model: ModelShape
    tp: int
    attention: AttentionTime
    tensor_links: Network           # between the GPUs of a pool rank
    links: Network                  # between pool ranks: weights, gradients, activations of stages
    attention_links: Network        # between pool ranks: what attention sends
    ranks_per_node: int             # pool ranks
    linear_flops_per_second: tuple[float, float]  # forward, backward
    memory_bandwidth: float

    @classmethod
    def of(cls, model: ModelShape, cluster: ClusterShape, tp: int, cost: Cost) -> Costs:
        """Servers of a mixed pool differ in attention; linear layers and links are those of its first table."""
        table = cost.first if isinstance(cost, MixedPool) else cost
        about: Mapping[str, Any] = table.metadata
        if "num_heads" not in about or "head_dim" not in about:
            raise UserError(f"latency table {table.name!r} does not say its num_heads and head_dim; profile again")
        base = cluster_named(TABLE_CLUSTER)
        gemm = cluster.gemm_flops_per_second / base.gemm_flops_per_second
        rates = (cluster.gemm_flops_per_second, cluster.gemm_flops_per_second)
        if (linear := about.get("linear")) is not None:
            forward, backward = (_rate(linear, f"{way}_flops_per_second") for way in ("forward", "backward"))
            rates = (gemm * forward, gemm * backward)
        scale = base.attention_flops_per_second / cluster.attention_flops_per_second
        network = Network.measured(table, cluster)
        return cls(model, tp, _attention_time(cost, model, tp, scale), network, network, network,
                   cluster.ranks_per_node(tp), rates, cluster.memory_bandwidth)

    @property
    def ranks_per_pod(self) -> int:
        """Pool ranks; 0 where there is one pod."""
        return self.ranks_per_node * self.tensor_links.nodes_per_pod

    def without_network(self) -> Costs:
        """The same with links between pool ranks that take no time; TP traffic stays as it is."""
        return replace(self, links=FREE, attention_links=FREE)

    def with_one_byte(self) -> Costs:
        """The same where what attention sends is a byte a message: only latencies remain of it."""
        return replace(self, attention_links=replace(self.attention_links, intra_node_bandwidth=inf,
                                                     inter_node_bandwidth=inf, inter_pod_bandwidth=inf))

    def segment_seconds(self, tokens: np.ndarray, backward: bool) -> tuple[np.ndarray, np.ndarray]:
        """A layer's linear part before and behind its attention, proportional to the tokens."""
        model, tp = self.model, self.tp
        whole = np.asarray(linear_flops(1.0, model, tp))
        qkv = 2 * qkv_parameters(model, tp)
        rate = self.linear_flops_per_second[backward] / (2.0 if backward else 1.0)
        collective = self._tp_seconds(tokens)
        before = _beside(tokens * (qkv / rate), collective, tp)
        behind = _beside(tokens * ((whole - qkv) / rate), 3 * collective, tp)
        return before, behind

    def head_seconds(self, tokens: np.ndarray, backward: bool) -> np.ndarray:
        """Of the output head, proportional to the tokens."""
        rate = self.linear_flops_per_second[backward] / (2.0 if backward else 1.0)
        return _beside(tokens * (head_flops(1.0, self.model, self.tp) / rate), self._tp_seconds(tokens), self.tp)

    def _tp_seconds(self, tokens: np.ndarray) -> np.ndarray:
        """One all-gather or reduce-scatter of the hidden states over the tensor-parallel ranks."""
        network, tp = self.tensor_links, self.tp
        if tp == 1:
            return np.zeros_like(tokens, dtype=np.float64)
        num_bytes = tokens * (self.model.hidden * BF16_BYTES)
        inside = tp <= network.gpus_per_node
        bandwidth = network.intra_node_bandwidth if inside else network.inter_node_bandwidth
        return np.asarray((tp - 1) / tp * num_bytes / bandwidth, dtype=np.float64)

    def stage_parameters(self, layers: Sequence[int]) -> np.ndarray:
        """[stages] weights of one GPU of each stage: its layers, the embedding on the first, the head on the last."""
        parameters = np.array(layers) * layer_parameters(self.model, self.tp)
        for end in (0, -1):
            parameters[end] += self.model.hidden * self.model.vocab / self.tp
        return parameters

    def gather_seconds(self, num_bytes: float, num_ranks: int) -> float:
        """An all-gather (or reduce-scatter) of weights that leaves (or takes) num_bytes on each of num_ranks ranks."""
        return self.links.all_gather_seconds(num_bytes, num_ranks, self.ranks_per_node)

    def ring_seconds(self, num_bytes: float, num_ranks: int) -> float:
        """The same of keys over a context-parallel group."""
        return self.attention_links.all_gather_seconds(num_bytes, num_ranks, self.ranks_per_node)

    def send_seconds(self, tokens: np.ndarray, num_data: int) -> np.ndarray:
        """Hidden states of a micro-batch to the stage `num_data` ranks on: each GPU sends its own share of them."""
        size = tokens * (self.model.hidden * BF16_BYTES / self.tp)
        links = self.links
        leaves_pods = 0 < self.ranks_per_pod <= num_data
        return np.where(tokens > 0, links.inter_node_latency_seconds + size / links.nic_bandwidths[leaves_pods], 0.0)

    def optimizer_seconds(self, layers: Sequence[int], shards: int) -> np.ndarray:
        """[stages] of one GPU, which updates its share of the stage's weights."""
        return self.stage_parameters(layers) / shards * OPTIMIZER_TRAFFIC / self.memory_bandwidth


def _rate(linear: Any, name: str) -> float:
    """Of what a table's profile says about linear layers."""
    value = linear.get(name) if isinstance(linear, Mapping) else None
    return check_number(f"linear.{name} of the latency table", value, above=0, most=MAX_RATE)


@lru_cache(maxsize=8)
def _attention_time(cost: Cost, model: ModelShape, tp: int, scale: float) -> AttentionTime:
    """Reads the shipped table of these heads, so once is enough."""
    return time_of(cost, model, tp, scale)


def _beside(compute: np.ndarray, travel: np.ndarray, chunks: int) -> np.ndarray:
    """Two streams that hand over chunk by chunk: the longer one, and one chunk of the shorter."""
    return np.asarray(np.maximum(compute, travel) + np.minimum(compute, travel) / chunks)
