"""Attention for trainers that hand every layer the edges of its documents: one tensor of cumulative lengths.

All layers of a forward get the same tensor, and so does a layer that recomputation replays; the tensor therefore stands
for the micro-batch. Its first layer exchanges lengths and plans, the others find the plan, which is dropped with the
tensor. One that is overwritten for the next micro-batch is planned again.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.utils.weak import WeakTensorKeyDictionary

from distca.integrations.document_lengths import from_cumulative
from distca.integrations.packed import PackedAttention, PackedBatch
from distca.planning.plan import Plan
from distca.runtime.transport import Transport
from distca.spec import ModelShape


@dataclass(frozen=True, slots=True)
class Options:
    """What every integration lets its user choose; they are plan's and CoreAttention's."""

    tolerance: float = 0.05
    kernel: str = "auto"
    state: str = "resend"
    transport: str | Transport = "c10d"


class PackedLayers:
    """The attention of a model's layers over one pool: `group`, or this process alone where that is None."""

    def __init__(self, group: dist.ProcessGroup | None, options: Options) -> None:
        self.group, self.options = group, options
        self._attention: PackedAttention | None = None           # made when the first layer shows its heads
        self._begun = WeakTensorKeyDictionary()                  # edges -> (version, in the pool or not), PackedBatch

    @property
    def latest(self) -> Plan | None:
        """The plan of the last training forward."""
        return None if self._attention is None else self._attention.latest

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, edges: torch.Tensor, *, training: bool,
        key_edges: torch.Tensor | None = None, scale: float | None = None, window: int | None = None,
    ) -> torch.Tensor:
        """q [tokens, heads, dim], k and v [tokens, kv_heads, dim], documents between neighbouring edges -> out like q.

        Only training leaves home: evaluation talks to nobody, so ranks may run unequal numbers of batches of it.
        """
        if self._attention is None:
            options = self.options
            self._attention = PackedAttention(_shape_of(q, k), self.group, tolerance=options.tolerance,
                                              kernel=options.kernel, state=options.state, transport=options.transport)
        batch = self._batch(self._attention, edges, key_edges, q, training and self.group is not None)
        return self._attention.attend(q, k, v, batch, scale=scale, window=window)

    def _batch(
        self, attention: PackedAttention, edges: torch.Tensor, key_edges: torch.Tensor | None, q: torch.Tensor,
        in_pool: bool,
    ) -> PackedBatch:
        about = None if edges.is_inference() else edges._version, in_pool
        begun = self._begun.get(edges)
        if begun is None or begun[0] != about:
            if key_edges is not None and key_edges is not edges and not torch.equal(key_edges, edges):
                raise ValueError("cumulative lengths of keys differ from those of queries; distca serves "
                                 "self-attention, where both are the same tokens")
            lengths = from_cumulative(edges, q.shape[0])
            begun = about, attention.begin(lengths, q.device) if in_pool else attention.at_home(lengths)
            self._begun[edges] = begun
        return begun[1]


_LAYERS: dict[tuple[dist.ProcessGroup | None, Options], PackedLayers] = {}


def layers_over(group: dist.ProcessGroup | None, options: Options) -> PackedLayers:
    """What all layers of a process share that have the same pool and options, so that they plan once."""
    pool = None if group is None or dist.get_world_size(group) == 1 else group
    if (pool, options) not in _LAYERS:
        _LAYERS[pool, options] = PackedLayers(pool, options)
    return _LAYERS[pool, options]


def _shape_of(q: torch.Tensor, k: torch.Tensor) -> ModelShape:
    """Planning asks only for the bytes of a token's query and keys."""
    _, heads, dim = q.shape
    return ModelShape(name="packed layers", num_layers=1, hidden=heads * dim, num_heads=heads, num_kv_heads=k.shape[1],
                      head_dim=dim, ffn=heads * dim, vocab=1)
