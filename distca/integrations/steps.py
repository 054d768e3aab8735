"""Turn each rank's own packed documents into one plan that all ranks share.

A trainer knows only the documents of its own rank. Once per step, ahead of the first layer, the ranks tell each other
their lengths in one small collective; from there on every rank computes the same plan by itself and all layers use it.
`torch.compile` breaks its graph around all of this: lengths are numbers on the host and change with every step.
Documents never span ranks here, so whatever is not worth moving (evaluation, generation, sliding windows) is computed
at home without a word to anybody. Nothing in this file knows which framework trains.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from distca.cost.attention_time import AttentionTime
from distca.cost.latency_table import LatencyTable
from distca.planning.greedy import balance
from distca.planning.plan import Plan
from distca.planning.tasks import tasks_at_home
from distca.runtime.attention import CoreAttention
from distca.runtime.dedicated import PLANS_REMEMBERED
from distca.runtime.transport import LoopbackTransport, LoopbackWorld, TransportError
from distca.spec import ModelShape
from distca.workload.layout import layout_from_rows
from distca.workload.packing import check_tolerance

_not_compiled = torch.compiler.disable(reason="distca exchanges with other ranks, by lengths that change")
_FIRST_CAPACITY = 255                                            # documents of a rank that fit the first collective


@dataclass(frozen=True, slots=True)
class PackedStep:
    """One forward over packed documents: hold on to it for all layers, also where they are replayed."""

    lengths: tuple[int, ...]   # this rank's documents, in the order of its tokens
    plan: Plan | None          # of the whole group; None: everything is computed at home
    backward: Plan | None = None  # for the gradients, where seconds are known and these are not forward's

    def leaves_home(self, window: int | None) -> bool:
        """Whether a layer with this window follows the plan: a window shorter than a document makes its work linear."""
        return self.plan is not None and (window is None or window >= int(self.plan.layout.lengths.max()))


class PackedSteps:
    """The steps of one model over one group. All ranks of the group begin the same steps in the same order.

    `group` None is the default group, or no group where torch.distributed is not initialized: one process by itself.
    `model` says how many bytes a token's query and keys have; `kernel` and `state` are CoreAttention's.
    """

    def __init__(
        self,
        model: ModelShape,
        group: dist.ProcessGroup | None = None,
        *,
        tolerance: float = 0.05,
        kernel: str = "auto",
        state: str = "resend",
        cost: LatencyTable | None = None,
    ) -> None:
        check_tolerance(tolerance)
        self.model, self.group, self.tolerance = model, group, tolerance
        self.cost = None if cost is None else AttentionTime.of(cost, model)
        self.kernel, self.state = kernel, state
        self.latest: Plan | None = None                          # of the step begun last
        self._pool: CoreAttention | None = None                  # made when torch.distributed is initialized
        self._home = CoreAttention(transport=LoopbackTransport(LoopbackWorld(1), 0), kernel=kernel, state=state)
        self._capacity = _FIRST_CAPACITY
        self._plans: OrderedDict[tuple[tuple[int, ...], ...], Plan] = OrderedDict()
        self._backward_plans: OrderedDict[tuple[tuple[int, ...], ...], Plan] = OrderedDict()
        self._home_plans: OrderedDict[tuple[tuple[int, ...], ...], Plan] = OrderedDict()

    @_not_compiled
    def begin(self, lengths: Sequence[int], device: torch.device | str = "cpu") -> PackedStep:
        """Exchange lengths and plan; every rank of the group calls this once per step. `device` carries the lengths."""
        rows = self._everyones(lengths, torch.device(device))
        if not any(rows):
            return PackedStep(tuple(lengths), None)
        apart = self.cost is not None and self.state == "resend"  # servers that keep their inputs serve both ways
        return PackedStep(tuple(lengths), self._plan(rows), self._backward_plan(rows) if apart else None)

    @_not_compiled
    def at_home(self, lengths: Sequence[int]) -> PackedStep:
        """A step that talks to nobody, such as evaluation: ranks may run unequal numbers of these."""
        return PackedStep(tuple(lengths), None)

    @_not_compiled
    def plan_for(self, lengths: Sequence[int], device: torch.device | str = "cpu") -> Plan:
        """The plan of this step, the same on every rank, from the lengths of this rank's own documents."""
        return self._plan(self._everyones(lengths, torch.device(device)))

    @_not_compiled
    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, step: PackedStep, *,
        scale: float | None = None, window: int | None = None,
    ) -> torch.Tensor:
        """q [tokens, heads, dim], k and v [tokens, kv_heads, dim] of this rank's documents -> out like q."""
        if step.leaves_home(window):
            assert step.plan is not None
            pool = self._home if self._pool is None else self._pool
            return pool(q, k, v, step.plan, backward=step.backward, scale=scale)
        if not step.lengths:
            return q + k.sum() + v.sum()                         # no tokens, but gradients of 0 for what made them
        return self._home(q, k, v, self._home_plan(step.lengths), scale=scale, window=window)

    def _plan(self, rows: tuple[tuple[int, ...], ...]) -> Plan:
        if rows not in self._plans:
            self._plans[rows] = balance(layout_from_rows(rows), self.model, tolerance=self.tolerance, cost=self.cost)
        self.latest = _latest(self._plans, rows)
        return self.latest

    def _backward_plan(self, rows: tuple[tuple[int, ...], ...]) -> Plan:
        if rows not in self._backward_plans:
            self._backward_plans[rows] = balance(layout_from_rows(rows), self.model, tolerance=self.tolerance,
                                                 cost=self.cost, backward=True)
        return _latest(self._backward_plans, rows)

    def _home_plan(self, lengths: tuple[int, ...]) -> Plan:
        rows = (lengths,)
        if rows not in self._home_plans:
            layout = layout_from_rows(rows)
            self._home_plans[rows] = Plan(layout, tasks_at_home(layout), np.ones(1), 0.0, self.model)
        return _latest(self._home_plans, rows)

    def _everyones(self, lengths: Sequence[int], device: torch.device) -> tuple[tuple[int, ...], ...]:
        """Every rank's lengths in rank order: one collective, and one more where a rank has more than ever before."""
        if self._pool is None and dist.is_initialized():
            self._pool = CoreAttention(self.group, kernel=self.kernel, state=self.state)
        if self._pool is None:
            return (tuple(lengths),)
        while True:
            table = _gather(lengths, self._capacity, self.group, device)
            most = max(row[0] for row in table)
            if most <= self._capacity:
                return tuple(tuple(row[1:1 + row[0]]) for row in table)
            self._capacity = 2 ** most.bit_length() - 1


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
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise TransportError(
            f"rank {dist.get_rank(group)} of {dist.get_world_size(group)}: the ranks did not exchange their lengths, "
            "because one died, hung past the group's timeout or began another number of steps; restart from the last "
            f"checkpoint ({first_line})") from error
    return torch.stack(everyone).tolist()


def _latest(remembered: OrderedDict[tuple[tuple[int, ...], ...], Plan], key: tuple[tuple[int, ...], ...]) -> Plan:
    """The plan, which becomes the last to be forgotten."""
    remembered.move_to_end(key)
    while len(remembered) > PLANS_REMEMBERED:
        remembered.popitem(last=False)
    return remembered[key]
