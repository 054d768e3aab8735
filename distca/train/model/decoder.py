"""A decoder of the Llama family cut where attention leaves it, so that attention can run anywhere and at any time.

Between two attention calls stands one segment: what follows attention in layer i (output projection, feed-forward)
joined with what precedes it in layer i + 1 (norm, projections, rotation). A decoder of L layers has L + 1 segments:

    First   tokens -> x, q, k, v       Middle   x, out -> x, q, k, v       Last   x, out -> hidden

Rows are packed: no batch dimension, and every token is rotated by its position in its own document. q, k, v and out
are plain tensors with this rank's heads of all the row's tokens. x belongs to the segments: under tensor parallelism a
rank holds only its share of the tokens, padded to whole shares.
"""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from distca.spec import ModelShape
from distca.train.model.loss import chunked_cross_entropy
from distca.train.model.recompute import again
from distca.train.model.rotary import Rotary, rotary_table
from distca.train.model.shape import DecoderShape

__all__ = ["Decoder", "DecoderShape", "Rotary", "chunked_cross_entropy", "write_parameter"]

Attend = Callable[..., torch.Tensor]                             # of q, k, v, and of `window` where the layer has one
Result = TypeVar("Result")


class Pre(nn.Module):
    """What precedes attention: norm, projections, rotation."""

    def __init__(self, shape: DecoderShape, device: torch.device | str | None) -> None:
        super().__init__()
        self.head_dim = shape.model.head_dim
        self.norm = _norm(shape, device)
        self.qkv = Projections(shape, device)
        self.q_norm = _norm(shape, device, self.head_dim) if shape.qk_norm else None
        self.k_norm = _norm(shape, device, self.head_dim) if shape.qk_norm else None

    def forward(self, x: torch.Tensor, rotary: Rotary) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        num_tokens = rotary[0].shape[0]
        q, k, v = (y[:num_tokens].unflatten(1, (-1, self.head_dim)) for y in self.qkv(self.norm(x)))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return rotate(q, rotary), rotate(k, rotary), v.clone()   # [tokens, heads or kv_heads, dim]; FSDP wants no views


class Projections(nn.Module):
    def __init__(self, shape: DecoderShape, device: torch.device | str | None) -> None:
        super().__init__()
        model, bias = shape.model, shape.qkv_bias
        self.q = _linear(model.hidden, model.num_heads * model.head_dim, device, bias)
        self.k = _linear(model.hidden, model.num_kv_heads * model.head_dim, device, bias)
        self.v = _linear(model.hidden, model.num_kv_heads * model.head_dim, device, bias)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.q(x), self.k(x), self.v(x)


class Post(nn.Module):
    """What follows attention: output projection and feed-forward, each added to x."""

    def __init__(self, shape: DecoderShape, device: torch.device | str | None) -> None:
        super().__init__()
        model = shape.model
        self.output = _linear(model.num_heads * model.head_dim, model.hidden, device)
        self.norm = _norm(shape, device)
        self.mlp = SwiGlu(model, device)

    def forward(self, x: torch.Tensor, out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x with attention's part, and the feed-forward's part that is still to be added."""
        x = x + self.output(out.flatten(1))
        return x, self.mlp(self.norm(x))


class SwiGlu(nn.Module):
    def __init__(self, model: ModelShape, device: torch.device | str | None) -> None:
        super().__init__()
        self.gate = _linear(model.hidden, model.ffn, device)
        self.up = _linear(model.hidden, model.ffn, device)
        self.down = _linear(model.ffn, model.hidden, device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Segment(nn.Module):
    """What runs between two attention calls. `compute` is the work, `run` another way to do it: compiled, in tiles."""

    recompute: str = "none"                                      # how much is computed again in backward
    rows_multiple: int = 1                                       # tokens are padded to a multiple of this
    run: Callable[..., Any] | None = None
    post: Post
    pre: Pre

    def forward(self, *inputs: Any) -> Any:
        return self.compute(*inputs) if self.run is None else self.run(*inputs)

    def compute(self, *inputs: Any) -> Any:
        raise NotImplementedError

    def after(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """What follows attention."""
        x, added = again(self.recompute, self.post, x, self.pad(out))
        return x + added

    def before(self, x: torch.Tensor, rotary: Rotary) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What precedes attention; of it "selective" would keep all the same."""
        return again("none" if self.recompute == "selective" else self.recompute, self.pre, x, rotary)

    def pad(self, rows: torch.Tensor) -> torch.Tensor:
        missing = -rows.shape[0] % self.rows_multiple
        return F.pad(rows, [0, 0] * (rows.ndim - 1) + [0, missing]) if missing else rows


class First(Segment):
    def __init__(self, shape: DecoderShape, device: torch.device | str | None) -> None:
        super().__init__()
        self.embed = nn.Embedding(shape.model.vocab, shape.model.hidden, device="meta")
        self.embed.to_empty(device=device or "cpu")              # never spends time on a random start of its own
        self.pre = Pre(shape, device)

    def compute(self, tokens: torch.Tensor, rotary: Rotary) -> tuple[torch.Tensor, ...]:
        x = self.embed(self.pad(tokens))
        return x, *self.before(x, rotary)


class Middle(Segment):
    def __init__(self, shape: DecoderShape, device: torch.device | str | None) -> None:
        super().__init__()
        self.post = Post(shape, device)
        self.pre = Pre(shape, device)

    def compute(self, x: torch.Tensor, out: torch.Tensor, rotary: Rotary) -> tuple[torch.Tensor, ...]:
        x = self.after(x, out)
        return x, *self.before(x, rotary)


class Last(Segment):
    def __init__(self, shape: DecoderShape, device: torch.device | str | None) -> None:
        super().__init__()
        self.post = Post(shape, device)
        self.norm = _norm(shape, device)
        self.whole = nn.Identity()                               # where shares of the tokens come together again

    def compute(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        hidden = self.whole(self.norm(self.after(x, out)))
        return hidden if self.rows_multiple == 1 else hidden[: out.shape[0]].clone()


class Decoder(nn.Module):
    """Embedding, layers and head. Drive its segments inside `decoder(run)`, where all weights are at hand.

    Weights are drawn from `generator` (by default one seeded with 0), equal wherever they are drawn; on the "meta"
    device they are left for `reset_parameters` or `load_hf`.
    """

    def __init__(
        self, shape: DecoderShape, *, generator: torch.Generator | None = None, device: torch.device | str | None = None
    ) -> None:
        super().__init__()
        self.shape = shape
        middles = [Middle(shape, device) for _ in range(shape.model.num_layers - 1)]
        self.segments = nn.ModuleList([First(shape, device), *middles, Last(shape, device)])
        self.head = None if shape.tied else _linear(shape.model.hidden, shape.model.vocab, device)
        if not self.head_weight.is_meta:
            self.reset_parameters(generator)

    def forward(self, run: Callable[[Decoder], Result]) -> Result:
        """`run(self)`, with the embedding and the head gathered around it where they are sharded."""
        return run(self)

    @property
    def head_weight(self) -> torch.Tensor:
        """[vocab, hidden]"""
        assert self.head is not None or self.shape.tied, "only the last stage has the head"
        return self.segments[0].embed.weight if self.head is None else self.head.weight  # type: ignore[union-attr,return-value]

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Of the layers that stand here, in order."""
        first = int(next(iter(self.segments.named_children()))[0])
        return self.shape.model.layer_windows[first:first + len(self.segments) - 1]

    def rotary(self, positions: torch.Tensor) -> Rotary:
        """cos and sin [tokens, dim] in float32, by each token's position in its own document."""
        return rotary_table(self.shape, positions)

    def hidden(self, tokens: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """One row straight through: tokens [tokens] -> [tokens, hidden]."""
        rotary = self.rotary(positions)
        seen = [{} if window is None else {"window": window} for window in self.windows]
        x, q, k, v = self.segments[0](tokens, rotary)
        for middle, keys in zip(list(self.segments)[1:-1], seen[:-1], strict=True):
            x, q, k, v = middle(x, attend(q, k, v, **keys), rotary)
        return self.segments[-1](x, attend(q, k, v, **seen[-1]))

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Norms one, biases zero; matrices normal.

        Those that write to the residual stream are narrower the more layers add up there. A stage draws the whole
        decoder's weights and keeps its own.
        """
        generator = torch.Generator().manual_seed(0) if generator is None else generator
        narrow = self.shape.init_std / sqrt(2 * self.shape.model.num_layers)
        own = dict(self.named_parameters())
        for name, like in Decoder(self.shape, device="meta").named_parameters():
            whole = torch.full(like.shape, float(not name.endswith(".bias")), device=generator.device)
            if like.ndim > 1:
                std = narrow if name.endswith(("post.output.weight", "mlp.down.weight")) else self.shape.init_std
                whole.normal_(std=std, generator=generator)
            if name in own:
                write_parameter(own[name], whole)


def write_parameter(parameter: torch.Tensor, whole: torch.Tensor) -> None:
    """Copy a whole tensor into a parameter, or this rank's share of it where the parameter is sharded.

    Tensor ranks, the mesh's last dimension, cut first; data ranks cut what these leave. Nothing is communicated.
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
    """Rotate each head's halves [tokens, heads, dim]; in float32 at least, whatever x is in."""
    cos, sin = (table[:, None] for table in rotary)
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)


def _linear(num_in: int, num_out: int, device: torch.device | str | None, bias: bool = False) -> nn.Linear:
    return nn.Linear(num_in, num_out, bias=bias, device="meta").to_empty(device=device or "cpu")


def _norm(shape: DecoderShape, device: torch.device | str | None, size: int = 0) -> nn.RMSNorm:
    return nn.RMSNorm(size or shape.model.hidden, eps=shape.norm_eps, device=device)
