"""Count work, bytes and memory in closed form, so that planning never loops over tokens.

Counts are for one layer and, where `tp` is given, for one tensor-parallel rank. Python numbers and numpy arrays both
work; whole numbers stay whole, so counts are exact as long as documents are below 2**31 tokens.

The FLOPs of a training step, for model FLOPs utilization, are the matrix products of the model and the pairs that its
attention sees, once forward and twice backward. Recomputation (of activations, of scores in attention's backward) is
not counted.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Literal, TypeVar, overload

import numpy as np
import numpy.typing as npt

from distca.spec import BF16_BYTES, ModelShape, unknown_name

IntArray = npt.NDArray[np.int64]
Number = TypeVar("Number", int, float, npt.NDArray[np.int64], npt.NDArray[np.float64])

ServerState = Literal["resend", "keep"]


def _triangle(n: IntArray) -> IntArray:
    """Return 1 + 2 + ... + n, and 0 for n below 0."""
    n = np.maximum(n, 0)
    return n * (n + 1) // 2


@overload
def causal_pairs(  # type: ignore[overload-overlap]
    q_start: int, q_stop: int, kv_start: int = 0, kv_stop: int | None = None
) -> int: ...
@overload
def causal_pairs(
    q_start: IntArray | int, q_stop: IntArray | int, kv_start: IntArray | int = 0, kv_stop: IntArray | int | None = None
) -> IntArray: ...
def causal_pairs(
    q_start: IntArray | int, q_stop: IntArray | int, kv_start: IntArray | int = 0, kv_stop: IntArray | int | None = None
) -> IntArray | int:
    """Count pairs (query, key) with key <= query, query in [q_start, q_stop) and key in [kv_start, kv_stop).

    A query sees max(0, query + 1 - kv_start) keys from kv_start on, minus max(0, query + 1 - kv_stop) from kv_stop on,
    and each of the two sums to a difference of triangles. `kv_stop=None` means the whole prefix. Empty ranges
    (stop <= start) have no pairs.
    """
    first = np.asarray(q_start, dtype=np.int64)
    last = np.maximum(first, np.asarray(q_stop, dtype=np.int64))
    low = np.asarray(kv_start, dtype=np.int64)
    pairs = _triangle(last - low) - _triangle(first - low)
    if kv_stop is not None:
        high = np.maximum(low, np.asarray(kv_stop, dtype=np.int64))
        pairs = pairs - (_triangle(last - high) - _triangle(first - high))
    return pairs if np.ndim(pairs) else int(pairs)


def pairs_of_shard(q_len: Number, kv_len: Number) -> Number:
    """Count pairs of q_len queries aligned with the end of kv_len keys: a shard with its whole prefix.

    Without checks, because the planner's inner loops call it. Fractional lengths are off by less than one pair.
    """
    return q_len * kv_len - q_len * (q_len - 1) // 2


def attention_flops(pairs: Number, model: ModelShape, tp: int = 1) -> Number:
    """Count forward FLOPs: a multiply and an add for QK and again for PV, for every pair, head and dimension."""
    return pairs * (2 * model.heads_per_rank(tp) * (model.head_dim + model.value_dim))


def attention_backward_flops(pairs: Number, model: ModelShape, tp: int = 1) -> Number:
    """Count backward FLOPs: five products (QK again, dQ, dK; dV, dP) where forward has two, 2.5 times its FLOPs."""
    return pairs * (2 * model.heads_per_rank(tp) * (3 * model.head_dim + 2 * model.value_dim))


def qkv_parameters(model: ModelShape, tp: int = 1) -> int:
    """Count the weights of one layer's Q, K and V projections. Those that compress latents are on every rank."""
    heads, kv_heads = model.heads_per_rank(tp), model.kv_heads_per_rank(tp)
    latent = model.latent
    if latent is None:
        return model.hidden * (heads * model.head_dim + kv_heads * (model.head_dim + model.value_dim))
    queries = model.hidden * latent.q_rank + (latent.q_rank or model.hidden) * heads * model.head_dim
    expanded = heads * (model.head_dim - latent.rope_dim + model.value_dim)
    return queries + model.hidden * (latent.kv_rank + latent.rope_dim) + latent.kv_rank * expanded


def layer_parameters(model: ModelShape, tp: int = 1, *, active: bool = False, ep: int = 1) -> float:
    """Count the weights of one layer, averaged over all layers; `active` counts only the experts of one token."""
    width = feed_forward_width(model, tp, active=active, ep=ep)
    router = 0.0 if model.experts is None else (
        model.hidden * model.experts.num * (model.num_layers - model.experts.dense_layers) / model.num_layers)
    attention = qkv_parameters(model, tp) + model.hidden * model.heads_per_rank(tp) * model.value_dim
    return attention + 3 * model.hidden * width + router


def model_parameters(model: ModelShape, *, active: bool = False) -> float:
    """Count the weights of a model whose embedding and head are two matrices."""
    return model.num_layers * layer_parameters(model, active=active) + 2 * model.hidden * model.vocab


def routed_width(model: ModelShape, tp: int = 1, *, active: bool = True, ep: int = 1) -> int:
    """Return the inner width of all routed experts on one rank, in a layer that has them; `active`: of one token's.

    Experts are sharded over tp. With expert parallelism, over ep > 1 GPUs, a GPU has num / ep experts, and these whole.
    """
    experts = model.experts
    if experts is None:
        return 0
    if active or ep == 1:
        return -(-experts.ffn // tp) * (experts.per_token if active else experts.num)
    return experts.ffn * experts.num // ep


def feed_forward_width(model: ModelShape, tp: int = 1, *, active: bool = True, ep: int = 1) -> float:
    """Return the inner width of a feed-forward on one rank, averaged over all layers."""
    plain, experts = -(-model.ffn // tp), model.experts
    if experts is None:
        return plain
    several = routed_width(model, tp, active=active, ep=ep) - (-experts.shared_ffn // tp)
    return (experts.dense_layers * plain + (model.num_layers - experts.dense_layers) * several) / model.num_layers


def linear_flops(tokens: Number, model: ModelShape, tp: int = 1) -> Number:
    """Count forward FLOPs of one layer's linear part: Q, K, V and output projections, three products of SwiGLU."""
    return tokens * round(2 * layer_parameters(model, tp, active=True))


def head_flops(tokens: Number, model: ModelShape, tp: int = 1) -> Number:
    """Count forward FLOPs of the output head, once per model rather than per layer."""
    model.heads_per_rank(tp)
    return tokens * (2 * model.hidden * -(-model.vocab // tp))


RECOMPUTE = ("none", "selective", "full", "offload")  # what backward recomputes, from the most memory to the least


def activation_bytes(tokens: Number, model: ModelShape, tp: int = 1, recompute: str = "none") -> Number:
    """Count the bytes that one layer keeps for its backward, in bf16.

    `none`: the inputs and outputs of both norms (sharded over tp, as sequence parallelism does), Q, K, V and the
    attention output, a copy of the token for each of its routed experts, gate, up and their product in the
    feed-forward, and the float32 log-sum-exp. `selective`: the same, but the product of gate and up is recomputed.
    `full`: the layer's input and attention's inputs and outputs. `offload`: its input, attention's output and
    log-sum-exp, in host memory. Not counted: score matrices (never stored), the logits, and what an attention server
    stores for others.
    """
    hidden, width = -(-model.hidden // tp) * BF16_BYTES, feed_forward_width(model, tp) * BF16_BYTES
    out = model.out_token_bytes(tp) + model.lse_token_bytes(tp)
    attention = model.q_token_bytes(tp) + model.kv_token_bytes(tp) + out
    copies = 0 if model.experts is None else round(model.experts.per_token * model.expert_share * hidden)
    return tokens * {"none": 4 * hidden + copies + attention + round(3 * width),
                     "selective": 4 * hidden + copies + attention + round(2 * width),  # without the SwiGLU's product
                     "full": hidden + attention, "offload": hidden + out}[recompute]


def backward_bytes(
    q_tokens: Number, kv_tokens: Number, model: ModelShape, tp: int = 1, *, state: ServerState = "resend"
) -> Number:
    """Count the bytes that cross ranks in backward, for the same moved queries and keys as in forward.

    `keep`: the server still has Q, K and V. It receives O, dO and the log-sum-exp over all of a query's keys, and sends
    dQ, dK and dV. `resend`: it also receives Q, K and V again.
    """
    if state not in ("resend", "keep"):
        raise unknown_name("state", state, ("resend", "keep"))
    q_bytes = 2 * model.out_token_bytes(tp) + model.lse_token_bytes(tp) + model.q_token_bytes(tp)
    kv_bytes = model.kv_token_bytes(tp)
    if state == "resend":
        q_bytes += model.q_token_bytes(tp)
        kv_bytes *= 2
    return q_tokens * q_bytes + kv_tokens * kv_bytes


# words of a GPU's name -> dense bf16 FLOP/s by its data sheet; among entries that match, the one with most words counts
PEAKS = {
    "GB200": 2500e12, "B200": 2250e12, "GH200": 989e12, "H200 NVL": 835e12, "H200": 989e12, "H100 NVL": 835e12,
    "H100 PCIe": 756e12, "H100": 989e12, "H800": 989e12, "H20": 148e12, "A100": 312e12, "A800": 312e12, "A30": 165e12,
    "A40": 149.7e12, "A10": 125e12, "L40S": 362e12, "L40": 181e12, "L4": 121e12, "RTX A6000": 154.8e12,
    "RTX 4090": 165.2e12, "RTX 3090": 71e12,
}


def training_flops(
    micro_batches: Iterable[np.ndarray], model: ModelShape, windows: Sequence[int | None] = ()
) -> float:
    """Count the FLOPs of a step, forward and backward over all ranks, from the documents of its micro-batches.

    `windows` has the number of keys that a query sees in each layer, None for all; empty if no layer has a window.
    """
    lengths = np.concatenate([np.asarray(one, dtype=np.int64) for one in micro_batches])
    tokens = int(lengths.sum())
    pairs = sum(int(pairs_of_shard(lengths if window is None else np.minimum(lengths, window), lengths).sum())
                for window in windows or (None,) * model.num_layers)
    return 3.0 * (model.num_layers * linear_flops(tokens, model) + head_flops(tokens, model)
                  + attention_flops(pairs, model))


def peak_flops(gpu: str) -> float | None:
    """Return the dense bf16 FLOP/s of a GPU by the name that its driver reports; None if unknown."""
    words = set(re.split(r"[^a-z0-9]+", gpu.lower()))
    fitting = [name for name in PEAKS if set(name.lower().split()) <= words]
    return PEAKS[max(fitting, key=lambda name: len(name.split()))] if fitting else None
