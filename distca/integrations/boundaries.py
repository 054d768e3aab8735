"""Attention for trainers that hand every layer the edges of its documents: one tensor of cumulative lengths.

All layers of a forward get the same tensor, and so does a layer that recomputation replays; the tensor therefore stands
for the step. Its first layer exchanges lengths and plans, the others find the step, and it is forgotten with the
tensor. One that is overwritten for the next micro-batch begins another step.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
from torch.utils.weak import WeakTensorKeyDictionary

from distca.integrations.steps import PackedStep, PackedSteps
from distca.planning.plan import Plan
from distca.spec import ModelShape


@dataclass(frozen=True, slots=True)
class Options:
    """What every integration lets its user choose; they are plan's and CoreAttention's."""

    tolerance: float = 0.05
    kernel: str = "auto"
    state: str = "resend"


class PackedLayers:
    """The attention of a model's layers over one pool: `group`, or this process alone where that is None."""

    def __init__(self, group: dist.ProcessGroup | None, options: Options) -> None:
        self.group, self.options = group, options
        self._steps: PackedSteps | None = None                   # made when the first layer shows its heads
        self._begun = WeakTensorKeyDictionary()                  # edges -> (version, in the pool or not), PackedStep

    @property
    def latest(self) -> Plan | None:
        """The plan of the step begun last."""
        return None if self._steps is None else self._steps.latest

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, edges: torch.Tensor, *, training: bool,
        key_edges: torch.Tensor | None = None, scale: float | None = None, window: int | None = None,
    ) -> torch.Tensor:
        """q [tokens, heads, dim], k and v [tokens, kv_heads, dim], documents between neighbouring edges -> out like q.

        Only training leaves home: evaluation talks to nobody, so ranks may run unequal numbers of batches of it.
        """
        if self._steps is None:
            options = self.options
            self._steps = PackedSteps(_shape_of(q, k), self.group, tolerance=options.tolerance, kernel=options.kernel,
                                      state=options.state)
        step = self._step(self._steps, edges, key_edges, q, training and self.group is not None)
        return self._steps.attend(q, k, v, step, scale=scale, window=window)

    def _step(
        self, steps: PackedSteps, edges: torch.Tensor, key_edges: torch.Tensor | None, q: torch.Tensor, in_pool: bool
    ) -> PackedStep:
        about = None if edges.is_inference() else edges._version, in_pool
        begun = self._begun.get(edges)
        if begun is None or begun[0] != about:
            if key_edges is not None and key_edges is not edges and not torch.equal(key_edges, edges):
                raise ValueError("cumulative lengths of keys differ from those of queries; distca serves "
                                 "self-attention, where both are the same tokens")
            lengths = document_lengths(edges, q.shape[0])
            begun = about, steps.begin(lengths, q.device) if in_pool else steps.at_home(lengths)
            self._begun[edges] = begun
        return begun[1]


_LAYERS: dict[tuple[dist.ProcessGroup | None, Options], PackedLayers] = {}


def layers_over(group: dist.ProcessGroup | None, options: Options) -> PackedLayers:
    """What all layers of a process share that have the same pool and options, so that they plan once."""
    pool = None if group is None or dist.get_world_size(group) == 1 else group
    if (pool, options) not in _LAYERS:
        _LAYERS[pool, options] = PackedLayers(pool, options)
    return _LAYERS[pool, options]


def latest_plan(model: torch.nn.Module) -> Plan:
    """The plan of the last training forward of a model whose layers are balanced; `summary()` says how well."""
    pools = (getattr(module, "pool", None) for module in model.modules())
    plan = next((pool.latest for pool in pools if isinstance(pool, PackedLayers) and pool.latest is not None), None)
    if plan is None:
        raise ValueError(f"model is a {type(model).__name__} whose attention has not been planned; train it on several "
                         "ranks first")
    return plan


def document_lengths(edges: torch.Tensor, num_tokens: int) -> list[int]:
    """Lengths of the documents, without empty ones."""
    at = edges.tolist()
    lengths = [stop - start for start, stop in pairwise(at)]
    if not at or at[0] != 0 or at[-1] != num_tokens or min(lengths, default=0) < 0:
        shown = ", ".join(str(edge) for edge in at[:8]) + (", …" if len(at) > 8 else "")
        raise ValueError(f"cumulative lengths are [{shown}] for {num_tokens} tokens; give rising numbers from 0 to the "
                         "number of tokens, padding included")
    return [length for length in lengths if length]


def check_version(package: str, version: str, extra: str, first: tuple[int, int], below: tuple[int, int]) -> None:
    """One line for a package that an integration was not written for."""
    found = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if not first <= found < below:
        raise ImportError(f"{package} is {version} but distca supports from {first[0]}.{first[1]} to below "
                          f"{below[0]}.{below[1]}; pip install 'distca[{extra}]'")


def _shape_of(q: torch.Tensor, k: torch.Tensor) -> ModelShape:
    """Planning asks only for the bytes of a token's query and keys."""
    _, heads, dim = q.shape
    return ModelShape(name="packed layers", num_layers=1, hidden=heads * dim, num_heads=heads, num_kv_heads=k.shape[1],
                      head_dim=dim, ffn=heads * dim, vocab=1)
