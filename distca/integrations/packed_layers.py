"""Attention for trainers that hand every layer the edges of its documents: one tensor of cumulative lengths.

All layers of a forward get the same tensor, and so does a layer that recomputation replays: the first layer exchanges
lengths and plans, the others find the plan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from distca.integrations.document_lengths import RowSlices, check_keys, from_edges
from distca.integrations.packed import PackedAttention
from distca.planning.plan import Plan
from distca.runtime.transport import Transport
from distca.validation import UserError


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
        positions: torch.Tensor | None = None, key_edges: torch.Tensor | None = None,
        check: Callable[[], None] | None = None, layer: int | None = None, lasting: bool = False,
        scale: float | None = None, window: int | None = None, sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """q [tokens, heads, dim], k and v [tokens, kv_heads, dim], documents between neighbouring edges -> out like q.

        `positions` [tokens] or [rows, tokens], where a row of them begins past 0, say that it continues a document.
        `check` raises, when documents are read, what else is wrong with them. `layer` and `lasting` are `begin_once`'s:
        by which the layers of one forward are told.
        Only training leaves home: evaluation talks to nobody, so ranks may run unequal numbers of batches of it.
        """
        def read() -> RowSlices:
            check_keys(edges, key_edges)
            if check is not None:
                check()
            if positions is not None and positions.numel() != q.shape[0]:
                raise UserError(f"positions have shape {tuple(positions.shape)} for {q.shape[0]} tokens; give a "
                                "position for each token")
            rows = 1 if positions is None or positions.ndim == 1 else max(positions.shape[0], 1)
            return from_edges(edges, (rows, q.shape[0] // rows), positions)

        batch = self._attention.begin_once(edges, read, q, k, v, in_pool=training and self.group is not None,
                                           beside=positions, layer=layer, lasting=lasting)
        return self._attention.attend(q, k, v, batch, scale=scale, window=window, sinks=sinks)


_LAYERS: dict[tuple[dist.ProcessGroup | None, Options], PackedLayers] = {}


def layers_over(group: dist.ProcessGroup | None, options: Options) -> PackedLayers:
    """What all layers of a process share that have the same pool and options, so that they plan once."""
    pool = None if group is None or dist.get_world_size(group) == 1 else group
    if (pool, options) not in _LAYERS:
        _LAYERS[pool, options] = PackedLayers(pool, options)
    return _LAYERS[pool, options]

