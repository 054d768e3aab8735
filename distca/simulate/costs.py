"""Seconds and bytes of everything a layer does on one pool rank, from a latency table, a cluster and a model.

Attention is charged by `AttentionTime`, as in planning. Linear layers run at the table's measured rate. On a cluster
other than the table's, both scale with the cluster's rates. Links are the cluster's, or as the table's profile measured
them. Tensor-parallel traffic (sequence parallelism: an all-gather before and a reduce-scatter after each half of a
layer) overlaps chunk by chunk with the products that make or use it: the longer of the two counts, and one chunk of the
shorter. It is the same for all strategies and stays on the computing stream.

Memory is the peak over the step. Weights stay in bf16 on every rank of a stage; the float32 master copy and Adam's
moments are sharded over its data ranks. Float32 gradients are sharded too if a step is one micro-batch, and whole
otherwise. Activations are kept from forward to backward, without recomputation, and so are the keys that a
context-parallel group gathers. Exchange buffers live for one layer, two at a time under ping-pong. A dedicated server
has only buffers.
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
from distca.cost.work import activation_bytes, head_flops, layer_parameters, linear_flops, qkv_parameters
from distca.planning.schedule import Ticks
from distca.simulate.setting import Setting
from distca.spec import BF16_BYTES, FLOAT32_BYTES, MAX_RATE, ClusterShape, ModelShape, cluster_named
from distca.validation import UserError, check_number

TABLE_CLUSTER = "dgx-h200"  # the machine of the shipped table; other clusters scale from it
ADAM_BYTES = 12             # float32 master weight and two moments of a parameter
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
            forward, backward = (_rate(linear, f"{way}_flops_per_second") for way in ("forward", "backward"))
            rates = (gemm * forward, gemm * backward)
        scale = base.attention_flops_per_second / cluster.attention_flops_per_second
        network = Network.measured(table, cluster)
        return cls(model, tp, _attention_time(cost, model, tp, scale), network, network, network,
                   cluster.ranks_per_node(tp), rates, cluster.memory_bandwidth)

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
        are on the GPU already: TP traffic belongs to dX.
        """
        model, tp = self.model, self.tp
        whole, qkv = np.asarray(linear_flops(1.0, model, tp)), 2 * qkv_parameters(model, tp)
        rate = self.linear_flops_per_second[backward] / (2.0 if backward and weights is None else 1.0)
        collective = self._tp_seconds(tokens) * (not weights)
        return (_overlapped(tokens * (qkv / rate), collective, tp),
                _overlapped(tokens * ((whole - qkv) / rate), 3 * collective, tp))

    def head_seconds(self, tokens: np.ndarray, backward: bool) -> np.ndarray:
        """Seconds of the output head, proportional to the tokens."""
        rate = self.linear_flops_per_second[backward] / (2.0 if backward else 1.0)
        return _overlapped(tokens * (head_flops(1.0, self.model, self.tp) / rate), self._tp_seconds(tokens), self.tp)

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
        parameters = np.array(layers) * layer_parameters(self.model, self.tp)
        parameters[0] += self.model.hidden * self.model.vocab / self.tp
        parameters[slice(None) if spreads_head else -1] += self.model.hidden * self.model.vocab / self.tp
        return parameters

    def gather_seconds(self, num_bytes: float, num_ranks: int) -> float:
        """Seconds of an all-gather of weights, num_bytes on each rank in the end, or of their reduce-scatter."""
        return self.links.all_gather_seconds(num_bytes, num_ranks, self.ranks_per_node)

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
        return self.stage_parameters(layers) / shards * OPTIMIZER_TRAFFIC / self.memory_bandwidth


def _rate(linear: Any, name: str) -> float:
    """Read a rate of linear layers from a table's profile."""
    value = linear.get(name) if isinstance(linear, Mapping) else None
    return check_number(f"linear.{name} of the latency table", value, above=0, most=MAX_RATE)


@lru_cache(maxsize=8)
def _attention_time(cost: Cost, model: ModelShape, tp: int, scale: float) -> AttentionTime:
    """Call `time_of`; cached, because it may load another shipped table."""
    return time_of(cost, model, tp, scale)


def _overlapped(compute: np.ndarray, travel: np.ndarray, chunks: int) -> np.ndarray:
    """Seconds of two streams that overlap chunk by chunk: the longer one, and one chunk of the shorter."""
    return np.asarray(np.maximum(compute, travel) + np.minimum(compute, travel) / chunks)


@dataclass(frozen=True, slots=True, eq=False)
class Memory:
    """Bytes on each GPU of every pool rank."""

    states: np.ndarray        # [ranks] weights, gradients, optimizer
    activations: np.ndarray   # [ranks]
    gathered_kv: np.ndarray   # [ranks]
    buffers: np.ndarray       # [ranks]

    @property
    def total(self) -> np.ndarray:
        return self.states + self.activations + self.gathered_kv + self.buffers

    @property
    def peak(self) -> float:
        return float(self.total.max())


def memory(
    costs: Costs, layers: Sequence[int], ticks: Ticks, tokens: np.ndarray, *, gather_ranks: int = 1,
    buffers: np.ndarray | None = None,
) -> Memory:
    """Memory of a step with [micro-batches, data ranks] tokens; groups of `gather_ranks` ranks gather their keys."""
    num_data, stages = tokens.shape[1], ticks.num_stages
    held = np.zeros(stages * num_data) if buffers is None else buffers
    of_stages = np.bincount(ticks.stage_of, weights=layers, minlength=stages)
    states = np.broadcast_to(state_bytes(costs, of_stages, num_data, len(tokens), ticks.spreads_head)[:, None],
                             (stages, num_data))
    live = activation_bytes(peak_live(ticks, layers, tokens), costs.model, costs.tp)
    gathered = np.zeros_like(live)
    if gather_ranks > 1:
        groups = np.repeat(tokens.reshape(len(tokens), -1, gather_ranks).sum(axis=2), gather_ranks, axis=1)
        gathered = peak_live(ticks, layers, groups) * costs.model.kv_token_bytes(costs.tp)
    states, live, gathered = (np.append(part.ravel(), np.zeros(len(held) - part.size))  # dedicated servers follow
                              for part in (states, live, gathered))
    return Memory(states, live, gathered, held)


def state_bytes(
    costs: Costs, layers: Sequence[int] | np.ndarray, num_data: int, num_micro_batches: int, spreads_head: bool = False
) -> np.ndarray:
    """[stages] bytes of weights, gradients and optimizer on one GPU; a head on all stages is sharded over them too."""
    gradients = FLOAT32_BYTES / (num_data if num_micro_batches == 1 else 1)
    parameters = costs.stage_parameters(layers, spreads_head)
    head = costs.model.hidden * costs.model.vocab / costs.tp * (1 - 1 / len(parameters)) if spreads_head else 0.0
    return parameters * (BF16_BYTES + gradients) + (parameters - head) * (ADAM_BYTES / num_data)


def peak_live(ticks: Ticks, layers: Sequence[int], tokens: np.ndarray) -> np.ndarray:
    """[stages, data ranks] peak of tokens times layers whose activations are kept, for [micro-batches, data ranks]."""
    return ticks.alive(np.array(layers, dtype=np.float64)[:, None, None] * tokens)


def check_holds_model(setting: Setting, costs: Costs) -> None:
    """Refuse a cluster whose GPUs cannot hold their share of the model."""
    needed, there = float(_states(setting, costs).max()), setting.cluster.memory_bytes
    if needed >= there:
        raise UserError(
            f"cluster {setting.cluster.name!r} cannot hold {setting.model.name!r}: weights, gradients and optimizer "
            f"need {needed / 1e9:.0f} GB of each GPU's {there / 1e9:.0f} GB; give more --gpus, or a larger "
            "--tp or --pp")


def check_holds_step(setting: Setting, costs: Costs) -> None:
    """Refuse a step whose activations do not fit even with equal tokens per rank and the live micro-batches of 1F1B."""
    stages_behind = setting.pp - np.arange(setting.pp)
    alive = setting.tokens_per_rank * np.minimum(stages_behind, setting.num_micro_batches)
    room = max_live_tokens(setting, costs)
    tightest = int((room - alive).argmin())
    if alive[tightest] > room[tightest]:
        raise UserError(
            f"a step of {setting.num_tokens} tokens does not fit {setting.gpus} GPUs of "
            f"{setting.cluster.memory_bytes / 1e9:.0f} GB: {alive[tightest]} tokens of activations are alive on each "
            f"and {room[tightest]:.0f} fit; give fewer --sequences or a shorter --context, more "
            "--gpus, or a larger --tp")


def max_live_tokens(setting: Setting, costs: Costs) -> np.ndarray:
    """[stages] tokens of activations that fit a GPU beside its states."""
    room = setting.cluster.memory_bytes - _states(setting, costs)
    return room / (np.array(setting.layers) * float(activation_bytes(1, setting.model, setting.tp)))


def _states(setting: Setting, costs: Costs) -> np.ndarray:
    return state_bytes(costs, setting.layers, setting.num_data, setting.num_micro_batches)
