"""Who serves: every training rank in place, or ranks that do nothing else.

In-place servers need no role: each rank runs its own steps. A rank that brings no tokens to a call takes the same steps
with an empty row: a stage of a pipeline that would idle, or a dedicated rank. The latter has no model either, so the
first trainer announces each step to it. It holds nothing between a call's forward and its backward, so any of its tasks
could run again elsewhere.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from distca.planning.plan import Plan
from distca.runtime.call import Call
from distca.runtime.prepared import Shapes
from distca.runtime.transport import Transport

if TYPE_CHECKING:
    from distca.runtime.core_attention import CoreAttention

PLANS_REMEMBERED = 16
_FIRST_STEPS, _LAST_STEPS = ("start_forward", "finish_backward"), ("finish_forward", "start_backward")


class Announcement(NamedTuple):
    """One step of one direction of a call. `plan` comes along the first time its key does."""

    step: str
    call: int
    plan_key: int
    plan: Plan | None
    shapes: Shapes
    scale: float | None
    window: int | None


class Plans:
    """The latest plans by key; teller and hearer forget in the same order."""

    def __init__(self) -> None:
        self._plans: OrderedDict[int, Plan] = OrderedDict()

    def __contains__(self, key: int) -> bool:
        return key in self._plans

    def __getitem__(self, key: int) -> Plan:
        return self._plans[key]

    def add(self, key: int, plan: Plan) -> None:
        self._plans[key] = plan
        while len(self._plans) > PLANS_REMEMBERED:
            self._plans.popitem(last=False)


class Announcer:
    """The first trainer's side of one call: tell every dedicated server which step comes next."""

    def __init__(self, transport: Transport, servers: range, told: Plans, plan: Plan, about: Announcement) -> None:
        self.transport, self.servers, self.told, self.plan, self.about = transport, servers, told, plan, about

    def __call__(self, step: str) -> None:
        new = self.about.plan_key not in self.told
        message = self.about._replace(step=step, plan=self.plan if new else None)
        if new:
            self.told.add(self.about.plan_key, self.plan)
        for server in self.servers:
            self.transport.tell(message, server)


class Steps:
    """The three steps of one call's forward or backward on one rank; the first of them begins the call."""

    def __init__(self, begin: Callable[[], Call], announce: Callable[[str], None]) -> None:
        self._begin, self._announce = begin, announce
        self._call: Call | None = None

    def take(self, step: str, *tensors: Any) -> Any:
        self._announce(step)
        if self._call is None:
            self._call = self._begin()
        return getattr(self._call, step)(*tensors)

    def take_empty(self, step: str, shapes: Shapes) -> None:
        """The step of a rank that brings no tokens."""
        q = torch.empty(0, shapes.num_heads, shapes.head_dim, dtype=shapes.dtype, device=shapes.device)
        k = torch.empty(0, shapes.num_kv_heads, shapes.head_dim, dtype=shapes.dtype, device=shapes.device)
        lse = torch.empty(0, shapes.num_heads, dtype=shapes.lse_dtype, device=shapes.device)
        rows = {"start_forward": (q, k, k), "finish_backward": (q, k, k, q, q, lse)}
        self.take(step, *rows.get(step, ()))


def say_nothing(step: str) -> None:
    """Without dedicated servers there is nobody to tell."""


def serve_until_stopped(attention: CoreAttention, device: torch.device | str = "cpu") -> int:
    """A dedicated rank's loop: take every announced step until `stop_servers`; returns the number of calls served."""
    calls: dict[int, Steps] = {}
    plans = Plans()
    served = 0
    while (heard := attention.transport.hear()) is not None:
        if heard.plan is not None:
            plans.add(heard.plan_key, heard.plan)
        shapes = heard.shapes._replace(device=torch.device(device))
        if heard.step in _FIRST_STEPS:
            begin = partial(attention.begin, plans[heard.plan_key], shapes, heard.scale, heard.window)
            calls[heard.call] = Steps(begin, say_nothing)
            served += heard.step == "start_forward"
        calls[heard.call].take_empty(heard.step, shapes)
        if heard.step in _LAST_STEPS:
            del calls[heard.call]
    return served


def stop_servers(attention: CoreAttention, plan: Plan) -> None:
    """Ends the loop of every dedicated server of the plan's pool; any trainer may call it, the first one speaks."""
    if attention.transport.rank == 0:
        for server in range(plan.layout.num_ranks, plan.num_servers):
            attention.transport.tell(None, server)
