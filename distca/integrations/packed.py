"""Turn each rank's own packed documents into one plan that all ranks share.

A trainer knows only the documents of its own rank. Once per forward, ahead of the first layer, the ranks tell each
other their lengths in one small collective; from there on every rank computes the same plan by itself and all layers
use it.
`torch.compile` breaks its graph around all of this: lengths are numbers on the host and change with every batch.
Documents never span ranks here, so whatever is not worth moving (evaluation, generation, sliding windows) is computed
at home without a word to anybody. Nothing in this file knows which framework trains.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist

from distca.cost.attention_time import AttentionTime
from distca.cost.latency_table import LatencyTable
from distca.planning.balance import balance
from distca.planning.plan import Plan
from distca.planning.tasks import tasks_at_home
from distca.runtime.attention import CoreAttention, not_compiled
from distca.runtime.registry import PLANS_KEPT
from distca.runtime.transport import LoopbackTransport, LoopbackWorld, Transport, TransportError
from distca.runtime.transport.c10d import first_line
from distca.spec import ModelShape
from distca.workload.layout import layout_from_rows
from distca.workload.packing import check_tolerance
from distca.workload.topology import Topology

_FIRST_CAPACITY = 255                                            # documents of a rank that fit the first collective
Rows = tuple[tuple[int, ...], ...]                               # [ranks] lengths of each rank's documents


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """A micro-batch of packed documents: hold on to it for all layers, also where they are replayed."""

    lengths: tuple[int, ...]   # this rank's documents, in the order of its tokens
    plan: Plan | None          # of the whole group; None: everything is computed at home
    backward: Plan | None = None  # for the gradients, where seconds are known and these are not forward's

    def leaves_home(self, window: int | None) -> bool:
        """Whether a layer with this window follows the plan: a window shorter than a document makes its work linear."""
        return self.plan is not None and (window is None or window >= int(self.plan.layout.lengths.max()))


class PackedAttention:
    """Attention over this rank's packed documents, computed where a plan of the whole group says.

    `group` None is the default group, or no group where torch.distributed is not initialized: one process by itself.
    `model` says how many bytes a token's query and keys have; `kernel`, `state` and `transport` are CoreAttention's.
    """

    def __init__(
        self,
        model: ModelShape,
        group: dist.ProcessGroup | None = None,
        *,
        tolerance: float = 0.05,
        kernel: str = "auto",
        state: str = "resend",
        transport: str | Transport = "c10d",
        cost: LatencyTable | None = None,
    ) -> None:
        check_tolerance(tolerance)
        self.group, self.kernel, self.state, self.transport = group, kernel, state, transport
        time = None if cost is None else AttentionTime.of(cost, model)
        self.latest: Plan | None = None                          # of the batch begun last
        self._two_plans = time is not None and state == "resend"  # servers that keep their inputs serve both ways
        self._plan = lru_cache(PLANS_KEPT)(partial(_balanced, model, tolerance, time))
        self._home_plan = lru_cache(PLANS_KEPT)(partial(_at_home, model))
        self._pool: CoreAttention | None = None                  # made when torch.distributed is initialized
        self._topology: Topology | None = None                   # found then
        self._home = CoreAttention(transport=LoopbackTransport(LoopbackWorld(1), 0), kernel=kernel, state=state)
        self._capacity = _FIRST_CAPACITY

    @not_compiled
    def begin(self, lengths: Sequence[int], device: torch.device | str = "cpu") -> PackedBatch:
        """Exchange lengths and plan; every rank calls this once per forward. `device` carries the lengths."""
        rows = self._everyones(lengths, torch.device(device))
        if not any(rows):
            return PackedBatch(tuple(lengths), None)
        self.latest = self._plan(rows, False, self._topology)
        return PackedBatch(tuple(lengths), self.latest,
                           self._plan(rows, True, self._topology) if self._two_plans else None)

    @not_compiled
    def at_home(self, lengths: Sequence[int]) -> PackedBatch:
        """A batch that talks to nobody, such as evaluation's: ranks may run unequal numbers of these."""
        return PackedBatch(tuple(lengths), None)

    @not_compiled
    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: PackedBatch, *,
        scale: float | None = None, window: int | None = None,
    ) -> torch.Tensor:
        """q [tokens, heads, dim], k and v [tokens, kv_heads, dim] of this rank's documents -> out like q."""
        if batch.leaves_home(window):
            assert batch.plan is not None
            pool = self._home if self._pool is None else self._pool
            return pool(q, k, v, batch.plan, backward=batch.backward, scale=scale)
        if not batch.lengths:
            return q + k.sum() + v.sum()                         # no tokens, but gradients of 0 for what made them
        return self._home(q, k, v, self._home_plan(batch.lengths), scale=scale, window=window)

    def _everyones(self, lengths: Sequence[int], device: torch.device) -> Rows:
        """Every rank's lengths in rank order: one collective, and one more where a rank has more than ever before."""
        if self._pool is None and dist.is_initialized():
            self._pool = CoreAttention(self.group, kernel=self.kernel, state=self.state, transport=self.transport)
            self._topology = self._pool.topology
        if self._pool is None:
            return (tuple(lengths),)
        while True:
            table = _gather(lengths, self._capacity, self.group, device)
            most = max(row[0] for row in table)
            if most <= self._capacity:
                return tuple(tuple(row[1:1 + row[0]]) for row in table)
            self._capacity = 2 ** most.bit_length() - 1


def _balanced(
    model: ModelShape, tolerance: float, cost: AttentionTime | None, rows: Rows, backward: bool,
    topology: Topology | None,
) -> Plan:
    return balance(layout_from_rows(rows), model, tolerance=tolerance, cost=cost, backward=backward, topology=topology)


def _at_home(model: ModelShape, lengths: tuple[int, ...]) -> Plan:
    layout = layout_from_rows((lengths,))
    return Plan(layout, tasks_at_home(layout), np.ones(1), 0.0, model)


def _gather(
    lengths: Sequence[int], capacity: int, group: dist.ProcessGroup | None, device: torch.device
) -> list[list[int]]:
    """A row per rank: the number of its documents, then as many of their lengths as fit."""
    mine = torch.zeros(1 + capacity, dtype=torch.int64)
    mine[0] = len(lengths)
    fit = torch.as_tensor(lengths[:capacity], dtype=torch.int64)
    mine[1:1 + len(fit)] = fit
    mine = mine.to(device)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    try:
        dist.all_gather(everyone, mine, group=group)
    except RuntimeError as error:
        raise TransportError(
            f"rank {dist.get_rank(group)} of {dist.get_world_size(group)}: the ranks did not exchange their lengths, "
            "because one died, hung past the group's timeout or began another number of batches; restart from the last "
            f"checkpoint ({first_line(error)})") from error
    return torch.stack(everyone).tolist()


class Planned(Protocol):
    """Something that knows the plan of its last training forward."""

    @property
    def latest(self) -> Plan | None: ...


_PLANNED: dict[int, Any] = {}                                    # by id of a layer, or of a config that layers share


def attach(owner: object, planned: Planned) -> None:
    """Let `latest_plan` find what plans for a layer, or for all layers with this config."""
    if id(owner) not in _PLANNED:
        weakref.finalize(owner, _PLANNED.pop, id(owner), None)
    _PLANNED[id(owner)] = planned


def attached(owner: object) -> Any:
    return _PLANNED.get(id(owner))


def latest_plan(model: torch.nn.Module) -> Plan:
    """The plan of a model's last training forward, whichever trainer's `enable` it was; `summary()` says how good."""
    for module in model.modules():
        for owner in (module, getattr(module, "config", None)):
            planned = attached(owner)
            if planned is not None and planned.latest is not None:
                return planned.latest
    raise ValueError(f"model is a {type(model).__name__} whose attention has not been planned; enable it, and train it "
                     "for a step")
