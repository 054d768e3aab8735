"""Attention for trainers that hand every layer the edges of its documents: one tensor of cumulative lengths.

All layers of a forward get the same tensor, and so does a layer that recomputation replays; the tensor therefore stands
for the micro-batch: its first layer exchanges lengths and plans, the others find the plan.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from distca.integrations.document_lengths import RowSlices, from_cumulative, from_positions, whole_documents
from distca.integrations.packed import PackedAttention
from distca.planning.plan import Plan
from distca.runtime.transport import Transport


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
        self._attention = PackedAttention(group, tolerance=options.tolerance, kernel=options.kernel,
                                          state=options.state, transport=options.transport)

    @property
    def latest(self) -> Plan | None:
        """The plan of the last training forward."""
        return self._attention.latest

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, edges: torch.Tensor, *, training: bool,
        positions: torch.Tensor | None = None, key_edges: torch.Tensor | None = None, scale: float | None = None,
        window: int | None = None, sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """q [tokens, heads, dim], k and v [tokens, kv_heads, dim], documents between neighbouring edges -> out like q.

        `positions` [tokens] or [rows, tokens], where a row of them begins past 0, say that it continues a document.
        Only training leaves home: evaluation talks to nobody, so ranks may run unequal numbers of batches of it.
        """
        def read() -> RowSlices:
            if key_edges is not None and key_edges is not edges and not torch.equal(key_edges, edges):
                raise ValueError("cumulative lengths of keys differ from those of queries; distca serves "
                                 "self-attention, where both are the same tokens")
            if positions is not None and positions.numel() and bool((positions[..., 0] != 0).any()):
                return from_positions(positions)
            return whole_documents(from_cumulative(edges, q.shape[0]))

        batch = self._attention.begin_once(edges, read, q, k, v, in_pool=training and self.group is not None,
                                           beside=positions)
        return self._attention.attend(q, k, v, batch, scale=scale, window=window, sinks=sinks)


_LAYERS: dict[tuple[dist.ProcessGroup | None, Options], PackedLayers] = {}


def layers_over(group: dist.ProcessGroup | None, options: Options) -> PackedLayers:
    """What all layers of a process share that have the same pool and options, so that they plan once."""
    pool = None if group is None or dist.get_world_size(group) == 1 else group
    if (pool, options) not in _LAYERS:
        _LAYERS[pool, options] = PackedLayers(pool, options)
    return _LAYERS[pool, options]

