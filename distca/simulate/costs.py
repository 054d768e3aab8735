"""Seconds and bytes of everything a layer does on one pool rank, from a latency table, a cluster and a model.

Attention is charged by `AttentionTime`, as in planning. Linear layers run at the table's measured rate. On a cluster
other than the table's, both scale with the cluster's rates. Links are the cluster's, or as the table's profile measured
them. Tensor-parallel traffic (sequence parallelism: an all-gather before and a reduce-scatter after each half of a
layer) overlaps chunk by chunk with the products that make or use it: the longer of the two counts, and one chunk of the
shorter. It is the same for all strategies and stays on the computing stream.

What backward recomputes is charged in backward, before dX. `selective` recomputes only element-wise operations, at the
memory's bandwidth; `full` all matrix products but the last of the feed-forward, whose output nothing needs; `offload`
all of them, and Q, K, V twice (for attention and for their own backward). Attention is never recomputed: its output is
kept. Offloaded activations travel over the host link beside a layer's computation: the longer of the two counts.

Experts are divided over groups of `ep` GPUs. In every layer, each token is sent to its experts in one all-to-all and
their outputs return in another, in backward as in forward. Routing is assumed to be uniform: every GPU of a group
computes as much.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf
from typing import Any

import numpy as np

from distca.cost import work
from distca.cost.attention_time import AttentionTime
from distca.cost.mixed_pool import Cost, MixedPool, time_of
from distca.cost.network import Network
from distca.spec import BF16_BYTES, MAX_RATE, ClusterShape, ModelShape, cluster_named
from distca.validation import UserError, check_number

TABLE_CLUSTER = "dgx-h200"  # the machine of the shipped table; other clusters scale from it
OPTIMIZER_TRAFFIC = 32      # bytes of memory traffic per parameter: gradient in, state and weight in and out
FREE = Network(1, inf, inf, 0.0, 0.0)


@dataclass(frozen=True, slots=True, eq=False)
class Costs:
    """Rates and links of one pool rank."""

    model: ModelShape
    tp: int
    attention: AttentionTime
    tensor_links: Network           # between the GPUs of a pool rank
    links: Network                  # between pool ranks: weights, gradients, activations of stages
    attention_links: Network        # between pool ranks: what attention sends
    ranks_per_node: int             # pool ranks
    linear_flops_per_second: tuple[float, float]  # forward, backward
    memory_bandwidth: float
    host_bandwidth: float
    recompute: str = "none"         # see `cost.work.RECOMPUTE`
    gather_ranks: int = 1           # of a context-parallel group, whose keys are offloaded too
    ep: int = 1                     # GPUs over which a layer's experts are divided

    @classmethod
    def of(cls, model: ModelShape, cluster: ClusterShape, tp: int, cost: Cost) -> Costs:
        """Combine a table with a cluster. In a mixed pool, linear layers and links are those of its first table."""
        table = cost.first if isinstance(cost, MixedPool) else cost
        about: Mapping[str, Any] = table.metadata
        if "num_heads" not in about or "head_dim" not in about:
            raise UserError(f"latency table {table.name!r} does not say its num_heads and head_dim; profile again")
        base = cluster_named(TABLE_CLUSTER)
        gemm = cluster.gemm_flops_per_second / base.gemm_flops_per_second
        rates = (cluster.gemm_flops_per_second, cluster.gemm_flops_per_second)
        if (linear := about.get("linear")) is not None:
            forward, backward = (check_number(
                f"linear.{name} of the latency table", linear.get(name) if isinstance(linear, Mapping) else None,
                above=0, most=MAX_RATE) for name in ("forward_flops_per_second", "backward_flops_per_second"))
            rates = (gemm * forward, gemm * backward)
        scale = base.attention_flops_per_second / cluster.attention_flops_per_second
        network = Network.measured(table, cluster)
        return cls(model, tp, _attention_time(cost, model, tp, scale), network, network, network,
                   cluster.ranks_per_node(tp), rates, cluster.memory_bandwidth, cluster.host_bandwidth)

    @property
    def ranks_per_pod(self) -> int:
        """Pool ranks per pod; 0 for a single pod."""
        return self.ranks_per_node * self.tensor_links.nodes_per_pod

    def without_network(self) -> Costs:
        """Make links between pool ranks free; TP traffic keeps its seconds."""
        return replace(self, links=FREE, attention_links=FREE)

    def with_one_byte(self) -> Costs:
        """Give attention's links infinite bandwidth: only their latency remains."""
        return replace(self, attention_links=replace(self.attention_links, intra_node_bandwidth=inf,
                                                     inter_node_bandwidth=inf, inter_pod_bandwidth=inf))

    def segment_seconds(
        self, tokens: np.ndarray, backward: bool, weights: bool | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Seconds of a layer's linear part before and after its attention, proportional to the tokens.

        Backward is two products per weight; with `weights` False it is dX alone, with True dW alone, whose operands
        are on the GPU already: TP traffic, recomputation and offloading belong to dX.
        """
        model, tp = self.model, self.tp
        whole, qkv = float(work.linear_flops(1.0, model, tp)), 2 * work.qkv_parameters(model, tp)
        rate = self.linear_flops_per_second[backward] / (2.0 if backward and weights is None else 1.0)
        collective = self._tp_seconds(tokens) * (not weights)
        before, behind = (_overlapped(tokens * (qkv / rate), collective, tp),
                          _overlapped(tokens * ((whole - qkv) / rate), self._collectives * collective, tp))
        if weights:
            return before, behind
        if backward:
            again = self._recompute_seconds(tokens, qkv, whole - qkv)
            before, behind = before + again[0], behind + again[1]
        if self.recompute == "offload":
            keys = self.gather_ranks * model.kv_token_bytes(tp) * (self.gather_ranks > 1)
            host = (work.activation_bytes(tokens, model, tp, "offload") + tokens * keys) / self.host_bandwidth
            behind = np.maximum(behind, host - before)
        return before, behind

    def _recompute_seconds(self, tokens: np.ndarray, qkv: float, rest: float) -> tuple[np.ndarray, np.ndarray]:
        """Seconds of what backward recomputes before and after attention; `qkv` and `rest` are forward FLOPs."""
        model, tp, rate, collective = self.model, self.tp, self.linear_flops_per_second[0], self._tp_seconds(tokens)
        width = work.feed_forward_width(model, tp)
        if self.recompute == "full":                             # all but the last product and its reduce-scatter
            return (_overlapped(tokens * (qkv / rate), collective, tp),
                    _overlapped(tokens * ((rest - 2 * model.hidden * width) / rate),
                                (self._collectives - 1) * collective, tp))
        if self.recompute == "offload":
            return (2 * _overlapped(tokens * (qkv / rate), collective, tp),
                    _overlapped(tokens * (rest / rate), self._collectives * collective, tp))
        moved = 0.0                                              # bytes per token
        if self.recompute == "selective":                        # add and norm: 5 passes; gate, up in and product out
            moved = (5 * model.hidden / tp + 3 * width) * BF16_BYTES
        return np.zeros_like(tokens, dtype=np.float64), tokens * (moved / self.memory_bandwidth)

    @property
    def _collectives(self) -> float:
        """Count the TP collectives after a layer's attention; with EP, routed tokens are sent as TP ranks hold them."""
        experts = self.model.experts
        return 3.0 if experts is None or self.ep == 1 or experts.shared_ffn else 3.0 - 2.0 * self.model.expert_share

    @property
    def expert_ranks(self) -> int:
        """Pool ranks of a group over which experts are divided."""
        return max(self.ep // self.tp, 1)

    @property
    def routed_share(self) -> float:
        """Share of the computation after a layer's attention that routed experts do."""
        model, tp = self.model, self.tp
        rest = float(work.linear_flops(1.0, model, tp)) - 2 * work.qkv_parameters(model, tp)
        return 6 * model.hidden * work.routed_width(model, tp) * model.expert_share / rest

    def expert_bytes(self, tokens: np.ndarray) -> np.ndarray:
        """Bytes that a GPU sends in one all-to-all: its tokens to each of their experts, as if all were as popular."""
        experts = self.model.experts
        copies = 0.0 if experts is None else experts.per_token * self.model.expert_share * (self.ep - 1) / self.ep
        return np.asarray(tokens * (copies * self.model.hidden * BF16_BYTES / self.tp))

    def expert_seconds(self, num_bytes: np.ndarray) -> np.ndarray:
        """Seconds of an all-to-all: the longer one of what stays inside the node and what leaves it."""
        links, ep = self.links if self.expert_ranks > 1 else self.tensor_links, self.ep
        near = min(ep, links.gpus_per_node)
        seconds = links.intra_node_latency_seconds + num_bytes * ((near - 1) / (ep - 1) / links.intra_node_bandwidth)
        if near == ep:
            return seconds
        leaves_pods = 0 < links.nodes_per_pod * links.gpus_per_node < ep
        rate = (ep - near) / (ep - 1) / links.nic_bandwidths[leaves_pods]
        return np.maximum(seconds, links.inter_node_latency_seconds + num_bytes * rate)

    def head_seconds(self, tokens: np.ndarray, backward: bool) -> np.ndarray:
        """Seconds of the output head, proportional to the tokens."""
        rate = self.linear_flops_per_second[backward] / (2.0 if backward else 1.0)
        flops = work.head_flops(1.0, self.model, self.tp)
        return _overlapped(tokens * (flops / rate), self._tp_seconds(tokens), self.tp)

    def _tp_seconds(self, tokens: np.ndarray) -> np.ndarray:
        """Seconds of one all-gather or reduce-scatter of the hidden states over the tensor-parallel ranks."""
        network, tp = self.tensor_links, self.tp
        if tp == 1:
            return np.zeros_like(tokens, dtype=np.float64)
        num_bytes = tokens * (self.model.hidden * BF16_BYTES)
        bandwidth = network.intra_node_bandwidth if tp <= network.gpus_per_node else network.inter_node_bandwidth
        return np.asarray((tp - 1) / tp * num_bytes / bandwidth, dtype=np.float64)

    def stage_parameters(self, layers: Sequence[int] | np.ndarray, spreads_head: bool = False) -> np.ndarray:
        """[stages] parameters of a GPU: its stage's layers, the embedding on the first, the head on the last or all."""
        parameters = np.array(layers) * work.layer_parameters(self.model, self.tp, ep=self.ep)
        parameters[0] += self.model.hidden * self.model.vocab / self.tp
        parameters[slice(None) if spreads_head else -1] += self.model.hidden * self.model.vocab / self.tp
        return parameters

    def gather_seconds(self, num_bytes: float, num_ranks: int) -> float:
        """Seconds of an all-gather of weights, num_bytes on each rank in the end, or of their reduce-scatter."""
        return self.links.all_gather_seconds(num_bytes, num_ranks, self.ranks_per_node)

    def layer_gather_seconds(self, parameters: float, element_bytes: int, num_data: int) -> float:
        """Seconds to gather a layer's weights over the data ranks, and its experts over the GPUs that have the same."""
        if self.ep == 1:
            return self.gather_seconds(parameters * element_bytes, num_data)
        width = work.routed_width(self.model, self.tp, active=False, ep=self.ep) * self.model.expert_share
        routed, per_node = 3 * self.model.hidden * width, max(self.tensor_links.gpus_per_node // self.ep, 1)
        return self.gather_seconds((parameters - routed) * element_bytes, num_data) + (
            self.links.all_gather_seconds(routed * element_bytes, num_data * self.tp // self.ep, per_node))

    def ring_seconds(self, num_bytes: float, num_ranks: int) -> float:
        """Seconds of an all-gather of keys over a context-parallel group."""
        return self.attention_links.all_gather_seconds(num_bytes, num_ranks, self.ranks_per_node)

    def send_seconds(self, tokens: np.ndarray, num_data: int) -> np.ndarray:
        """Seconds to send a micro-batch's hidden states to the rank `num_data` further; each GPU sends its share."""
        size = tokens * (self.model.hidden * BF16_BYTES / self.tp)
        links = self.links
        leaves_pods = 0 < self.ranks_per_pod <= num_data
        return np.where(tokens > 0, links.inter_node_latency_seconds + size / links.nic_bandwidths[leaves_pods], 0.0)

    def optimizer_seconds(self, layers: Sequence[int] | np.ndarray, shards: int) -> np.ndarray:
        """[stages] seconds that a GPU takes to update its share of the stage's weights."""
        return replace(self, ep=1).stage_parameters(layers) / shards * OPTIMIZER_TRAFFIC / self.memory_bandwidth


@lru_cache(maxsize=8)
def _attention_time(cost: Cost, model: ModelShape, tp: int, scale: float) -> AttentionTime:
    """Call `time_of`; cached, because it may load another shipped table."""
    return time_of(cost, model, tp, scale)


def _overlapped(compute: np.ndarray, travel: np.ndarray, chunks: int) -> np.ndarray:
    """Seconds of two streams that overlap chunk by chunk: the longer one, and one chunk of the shorter."""
    return np.asarray(np.maximum(compute, travel) + np.minimum(compute, travel) / chunks)


def linear_tables(costs: Costs, tokens: np.ndarray, splits: bool) -> tuple[np.ndarray, np.ndarray]:
    """[pieces, kinds, micro-batches, nano-batches, first/middle/last, data ranks] seconds of segments; and the head's.

    Kinds are forward, backward, and weight units in forward and in backward ticks. With expert parallelism a segment
    has five pieces: what precedes the experts, the bytes sent to them, their seconds, the bytes returned, and the rest.
    """
    tables, heads = [], []
    for backward, weighs in ((False, False), (True, False), (False, True), (True, True)):
        before, behind = costs.segment_seconds(tokens, backward or weighs, weighs if splits else None)
        enter, leave = (behind, before) if backward else (before, behind)
        pieces = [np.stack([enter, before + behind, leave], axis=2)]
        if costs.ep > 1:
            pieces = _around_experts(costs, tokens, before, behind, backward, weighs)
        tables.append(pieces)
        heads.append(costs.head_seconds(tokens, backward))
    return np.stack([np.stack(kinds) for kinds in zip(*tables, strict=True)]), np.stack(heads)


def _around_experts(
    costs: Costs, tokens: np.ndarray, before: np.ndarray, behind: np.ndarray, backward: bool, weighs: bool
) -> list[np.ndarray]:
    """The five pieces of segments with routed experts, each [micro-batches, nano-batches, segments, data ranks].

    Experts of a group get the mean of its tokens. Weight units have what they need: they compute and send nothing.
    """
    nothing, group = np.zeros_like(tokens), costs.expert_ranks
    sent = costs.expert_bytes(np.maximum(tokens, _group_mean(tokens, group)))
    routed = _group_mean(behind, group) * costs.routed_share
    rest = behind * (1 - costs.routed_share)
    if weighs:
        sent, routed, rest = nothing, nothing, rest + routed
    again = 2 if backward and costs.recompute in ("full", "offload") else 1  # recomputed experts get their tokens again
    there, back = sent * again, sent
    columns = ((nothing, nothing, nothing, nothing, before), (rest, there, routed, back, before),
               (rest, there, routed, back, nothing))             # first, middle and last segment, forward
    if backward:
        columns = ((nothing, there, routed, back, rest), (before, there, routed, back, rest),
                   (before, nothing, nothing, nothing, nothing))
    return [np.stack(piece, axis=2) for piece in zip(*columns, strict=True)]


def _group_mean(values: np.ndarray, group: int) -> np.ndarray:
    """Mean over each group of `group` neighbours along the last axis, repeated for every member."""
    return np.repeat(values.reshape(*values.shape[:-1], -1, group).mean(axis=-1), group, axis=-1)
