"""A decoder of the Llama family, split into segments at its attention calls so that attention can run elsewhere.

A segment is the part of the model between two attention calls: output projection and feed-forward of layer i, then
norm, projections and rotation of layer i + 1. A decoder of L layers has L + 1 segments:

    first   tokens -> x, q, k, v       middle   x, out -> x, q, k, v       last   x, out -> hidden

Rows are packed: there is no batch dimension, and every token is rotated by its position in its document. q, k, v and
out are plain tensors with this rank's heads of all the row's tokens. Under tensor parallelism x is sharded by tokens
(sequence parallel), padded to equal shards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import ceil, floor, log, pi, sqrt
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from distca.train.model.recompute import call_with_recompute, pad_tokens
from distca.train.model.shape import DecoderShape, LinearScaling, Llama3Scaling, YarnScaling
from distca.train.model.split_linear import Collector, Linear, Probes

Rotary = tuple[torch.Tensor, torch.Tensor]                       # cos, sin [tokens, dim], float32
QKV = tuple[torch.Tensor, torch.Tensor, torch.Tensor]            # [tokens, heads or kv_heads, dim]
Split = Sequence[Probes | None]                                  # for each linear layer; None: dW in backward
FUSED: Split = (None,) * 4
NONE_APART: Mapping[str, Split] = {"post": FUSED, "pre": FUSED}
Result = TypeVar("Result")


class Pre(nn.Module):
    """The part of a layer before attention: norm, projections, rotation."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.head_dim = shape.model.head_dim
        self.norm = nn.RMSNorm(shape.model.hidden, eps=shape.norm_eps)
        self.qkv = Projections(shape)
        self.q_norm = nn.RMSNorm(self.head_dim, eps=shape.norm_eps) if shape.qk_norm else None
        self.k_norm = nn.RMSNorm(self.head_dim, eps=shape.norm_eps) if shape.qk_norm else None

    def forward(self, x: torch.Tensor, rotary: Rotary, split: Split = FUSED) -> QKV:
        num_tokens = rotary[0].shape[0]
        q, k, v = (y[:num_tokens].unflatten(1, (-1, self.head_dim)) for y in self.qkv(self.norm(x), split=split))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return rotate(q, rotary), rotate(k, rotary), v.clone()   # FSDP accepts no views


class Projections(nn.Module):
    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        model = shape.model
        self.q = Linear(model.hidden, model.num_heads * model.head_dim, bias=shape.qkv_bias)
        self.k = Linear(model.hidden, model.num_kv_heads * model.head_dim, bias=shape.qkv_bias)
        self.v = Linear(model.hidden, model.num_kv_heads * model.head_dim, bias=shape.qkv_bias)

    def forward(self, x: torch.Tensor, split: Split = FUSED) -> QKV:
        return self.q(x, probes=split[0]), self.k(x, probes=split[1]), self.v(x, probes=split[2])


class Post(nn.Module):
    """The part of a layer after attention: output projection and feed-forward, each added to x."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        model = shape.model
        self.output = Linear(model.num_heads * model.head_dim, model.hidden, bias=False)
        self.norm = nn.RMSNorm(model.hidden, eps=shape.norm_eps)
        self.mlp = SwiGlu(model.hidden, model.ffn)

    def forward(
        self, x: torch.Tensor, out: torch.Tensor, split: Split = FUSED
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return x with attention's output added, and the feed-forward's output, which the caller adds."""
        x = x + self.output(out.flatten(1), probes=split[0])
        return x, self.mlp(self.norm(x), split=split[1:])


class SwiGlu(nn.Module):
    def __init__(self, hidden: int, ffn: int) -> None:
        super().__init__()
        self.gate = Linear(hidden, ffn, bias=False)
        self.up = Linear(hidden, ffn, bias=False)
        self.down = Linear(ffn, hidden, bias=False)

    def forward(self, x: torch.Tensor, split: Split = FUSED) -> torch.Tensor:
        gate, up = self.gate(x, probes=split[0]), self.up(x, probes=split[1])
        return self.down(F.silu(gate) * up, probes=split[2])


class Segment(nn.Module):
    """The part of the model between two attention calls: embed, post, pre, norm in this order, each optional.

    The first segment has an embedding, the last a norm. At a boundary of pipeline stages a segment is split into one
    with `post` only and one with `pre` only.
    """

    recompute: str = "none"                                      # as the setting model.recompute
    num_shares: int = 1                                          # token shards of x, one per tensor rank
    run: Callable[..., Any] | None = None                        # replaces `compute`: compiled, or in tiles
    in_tiles: bool = False                                       # `run` works in tiles or offloads
    weight_gradients: Collector | None = None                    # computes dW apart from backward

    def __init__(
        self, *, embed: nn.Embedding | None = None, post: Post | None = None, pre: Pre | None = None,
        norm: nn.RMSNorm | None = None,
    ) -> None:
        super().__init__()
        self.embed, self.post, self.pre, self.norm = embed, post, pre, norm
        self.gather = nn.Identity() if norm else None            # tensor parallelism gathers the token shards here

    def forward(self, *inputs: Any) -> Any:
        run, apart = self.run or self.compute, self.weight_gradients
        if apart is None or not apart.enabled or not torch.is_grad_enabled():
            return run(*inputs)
        shares = self.num_shares
        num_tokens = inputs[0].shape[0] * shares if self.embed is None else -(-inputs[0].shape[0] // shares) * shares
        return run(*inputs, split={part: apart.probes(self.get_submodule(part), num_tokens) for part in ("post", "pre")
                                   if getattr(self, part) is not None})

    def compute(self, x: torch.Tensor, *inputs: Any, split: Mapping[str, Split] = NONE_APART) -> Any:
        """Take tokens or x, then attention's output after `post`, then the rotary table before `pre`."""
        if self.embed is not None:
            x = self.embed(pad_tokens(x, self.num_shares))
        if self.post is not None:
            out = pad_tokens(inputs[0], self.num_shares)
            x, added = call_with_recompute(self.recompute, self.post, x, out, split["post"])
            x = x + added
        if self.pre is not None:
            recompute = "full" if self.recompute == "full" else "none"  # "selective" would keep everything in `pre`
            return x, *call_with_recompute(recompute, self.pre, x, inputs[-1], split["pre"])
        if self.norm is not None and self.gather is not None:
            hidden = self.gather(self.norm(x))
            return hidden if self.num_shares == 1 else hidden[: inputs[0].shape[0]].clone()
        return x


class Decoder(nn.Module):
    """Embedding, layers and head. Run the segments inside `decoder(run)`, which gathers the root's sharded weights.

    Weights are drawn from `generator` (default: seed 0) and do not depend on the device. On the "meta" device they
    are set later, by `reset_parameters` or `load_hf`.
    """

    def __init__(
        self, shape: DecoderShape, *, generator: torch.Generator | None = None, device: torch.device | str = "cpu"
    ) -> None:
        super().__init__()
        self.shape = shape
        with torch.device("meta"):                               # so that modules do not initialize weights
            vocab, hidden = shape.model.vocab, shape.model.hidden
            first = Segment(embed=nn.Embedding(vocab, hidden), pre=Pre(shape))
            middles = [Segment(post=Post(shape), pre=Pre(shape)) for _ in range(shape.model.num_layers - 1)]
            last = Segment(post=Post(shape), norm=nn.RMSNorm(hidden, eps=shape.norm_eps))
            self.segments = nn.ModuleList([first, *middles, last])
            self.head = None if shape.tied else nn.Linear(hidden, vocab, bias=False)
        self.parts: dict[int, list[Segment]] = {0: [first, *middles, last]}  # of the pipeline; a stage has some
        if torch.device(device).type != "meta":
            self.to_empty(device=device)
            self.reset_parameters(generator)

    def forward(self, run: Callable[[Decoder], Result]) -> Result:
        """Call `run(self)`; FSDP gathers a sharded embedding and head around it."""
        return run(self)

    @property
    def output(self) -> nn.Linear | nn.Embedding:
        """The output layer, or the embedding if that is tied to it."""
        assert self.head is not None or self.shape.tied, "this stage has no head"
        return self.segments.get_submodule("0").embed if self.head is None else self.head  # type: ignore[return-value]

    @property
    def head_weight(self) -> torch.Tensor:
        """Weight of the output layer [vocab, hidden]."""
        return self.output.weight

    def rotary(self, positions: torch.Tensor) -> Rotary:
        """Return cos and sin for each token's position in its document."""
        angles = positions[:, None].float() * rotary_frequencies(self.shape, positions.device)  # [tokens, dim / 2]
        angles = torch.cat((angles, angles), dim=1)
        scaling = self.shape.rope_scaling
        factor = scaling.attention_factor if isinstance(scaling, YarnScaling) else 1.0
        return angles.cos() * factor, angles.sin() * factor

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Set norms to one, biases to zero, and draw matrices from a normal distribution.

        The standard deviation of matrices that write to the residual stream falls with the number of layers. A stage
        draws all weights of the decoder and keeps those of its parameters.
        """
        generator = torch.Generator().manual_seed(0) if generator is None else generator
        narrow = self.shape.init_std / sqrt(2 * self.shape.model.num_layers)
        parameters = dict(self.named_parameters())
        for name, like in Decoder(self.shape, device="meta").named_parameters():
            whole = torch.full(like.shape, float(not name.endswith(".bias")), device=generator.device)
            if like.ndim > 1:
                std = narrow if name.endswith(("post.output.weight", "mlp.down.weight")) else self.shape.init_std
                whole.normal_(std=std, generator=generator)
            if name in parameters:
                write_parameter(parameters[name], whole)


def write_parameter(parameter: torch.Tensor, whole: torch.Tensor) -> None:
    """Copy an unsharded tensor, or this rank's shard of it, into a parameter, without communication.

    Tensor ranks, the last mesh dimension, shard first; data ranks then shard the result.
    """
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        for axis in reversed(range(mesh.ndim)):
            placement = parameter.placements[axis]
            if not isinstance(placement, Replicate):
                dim, index = int(placement.dim), mesh.get_local_rank(axis)  # type: ignore[attr-defined]
                share = -(-whole.shape[dim] // mesh.size(axis))
                begin = min(index * share, whole.shape[dim])
                whole = whole.narrow(dim, begin, min(share, whole.shape[dim] - begin))
        parameter = parameter.to_local()
    parameter.copy_(whole)


def rotate(x: torch.Tensor, rotary: Rotary) -> torch.Tensor:
    """Apply rotary embeddings to x [tokens, heads, dim], computed in at least float32."""
    cos, sin = (table[:, None] for table in rotary)
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)


def rotary_frequencies(shape: DecoderShape, device: torch.device) -> torch.Tensor:
    """Return radians per position [dim / 2], in float32 as in pretraining."""
    dim, scaling = shape.model.head_dim, shape.rope_scaling
    frequencies = 1.0 / shape.rope_theta ** (torch.arange(0, dim, 2, device=device).float() / dim)
    if scaling is None:
        return frequencies
    if isinstance(scaling, LinearScaling):
        return frequencies / scaling.factor
    if isinstance(scaling, Llama3Scaling):
        turns = scaling.original_max_positions * frequencies / (2 * pi)  # in the original context
        kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    else:
        low, high = _yarn_range(dim, shape.rope_theta, scaling)
        kept = 1.0 - (torch.arange(dim // 2, device=device).float() - low) / (high - low or 0.001)
    kept = kept.clamp(0.0, 1.0)                                  # 1: wavelength unchanged (short); 0: times `factor`
    return kept * frequencies + (1.0 - kept) * frequencies / scaling.factor


def _yarn_range(dim: int, theta: float, scaling: YarnScaling) -> tuple[float, float]:
    """Return the rotary dimensions that make `beta_fast` and `beta_slow` turns in the original context."""
    low, high = (dim * log(scaling.original_max_positions / (turns * 2 * pi)) / (2 * log(theta))
                 for turns in (scaling.beta_fast, scaling.beta_slow))
    if scaling.truncate:
        low, high = floor(low), ceil(high)
    return max(low, 0), min(high, dim - 1)
