"""Dedicated servers: ranks beyond the layout's ranks, which own no tokens and have no model.

Training ranks serve within the phases of their calls. A dedicated server cannot know which call comes next, so the
first trainer announces every phase to it. It stores nothing between a call's forward and backward, so any of its tasks
could be rerun on another rank.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import astuple
from functools import partial
from typing import NamedTuple, Protocol

import torch

from distca.kernels.interface import PLAIN, Scores
from distca.planning.plan import Plan
from distca.planning.plan_bytes import plan_from_bytes, plan_to_bytes
from distca.runtime.call import Call, Phase
from distca.runtime.liveness import TRIM_CALLS, return_freed_memory
from distca.runtime.prepared import LRU, PLANS_KEPT, Shapes
from distca.runtime.transport import Transport
from distca.validation import UserError

DTYPES = {str(dtype).removeprefix("torch."): dtype
          for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)}


class Serving(Protocol):
    """The part of CoreAttention that a server uses."""

    @property
    def transport(self) -> Transport: ...

    def call(self, plan: Plan, shapes: Shapes, scores: Scores = PLAIN, backward: bool = False) -> Call: ...


class Announcement(NamedTuple):
    """Message about one phase of one direction of a call."""

    phase: Phase
    backward: bool
    call: int
    digest: int
    plan: Plan | None    # None if the servers have cached it
    shapes: Shapes       # on the server's device
    scores: Scores

    def to_bytes(self) -> bytes:
        """Encode as a line of JSON followed by the plan: plain data, which a server validates and never executes."""
        heads, kv_heads, head_dim, dtype, _, value_dim = self.shapes
        about = {"phase": self.phase.value, "backward": self.backward, "call": self.call, "digest": self.digest,
                 "sizes": (heads, kv_heads, head_dim, value_dim), "dtype": str(dtype).removeprefix("torch."),
                 "scores": astuple(self.scores)}
        return json.dumps(about).encode() + b"\n" + (b"" if self.plan is None else plan_to_bytes(self.plan))

    @classmethod
    def from_bytes(cls, content: bytes, device: torch.device) -> Announcement:
        line, _, plan = content.partition(b"\n")
        try:
            about = json.loads(line)
            heads, kv_heads, head_dim, value_dim = map(int, about["sizes"])
            shapes = Shapes(heads, kv_heads, head_dim, DTYPES[about["dtype"]], device, value_dim)
            return cls(Phase(about["phase"]), bool(about["backward"]), int(about["call"]), int(about["digest"]),
                       plan_from_bytes(plan) if plan else None, shapes, Scores(*about["scores"]))
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"an announcement of {len(content)} bytes cannot be read ({error}); run the same distca "
                            "on every rank") from None


class Announcer:
    """The first trainer's announcements; both ends see the same sequence, so their caches evict the same plans."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self._known: LRU[int, bool] = LRU(PLANS_KEPT)
        self._calls = 0

    def about(self, plan: Plan, digest: int, backward: bool, shapes: Shapes, scores: Scores) -> Callable[[Phase], None]:
        """Return a function that announces each phase of a new call to the servers."""
        self._calls += 1
        about = Announcement(Phase.DISPATCH, backward, self._calls, digest, None, shapes, scores)
        return partial(self._announce, plan, about)

    def _announce(self, plan: Plan, about: Announcement, phase: Phase) -> None:
        known = self._known.get(about.digest)
        self._known.put(about.digest, True)
        message = about._replace(phase=phase, plan=None if known else plan)
        for server in range(plan.layout.num_ranks, plan.num_servers):
            self.transport.send_message(message.to_bytes(), server)


def serve_until_stopped(attention: Serving, device: torch.device | str = "cpu") -> int:
    """Run every announced phase on a dedicated server until `stop_servers`; return the number of calls served."""
    calls: dict[int, Call] = {}
    plans: LRU[int, Plan] = LRU(PLANS_KEPT)
    served = 0
    while content := attention.transport.receive_message():
        about = Announcement.from_bytes(content, torch.device(device))
        plan = about.plan or plans.get(about.digest)
        assert plan is not None, "the announcer sends plans that are not cached here"
        plans.put(about.digest, plan)
        if about.phase is Phase.DISPATCH:
            calls[about.call] = attention.call(plan, about.shapes, about.scores, about.backward)
            served += not about.backward
        calls[about.call].run_without_tokens(about.phase)
        if about.phase is Phase.COMBINE:
            del calls[about.call]
            if about.shapes.device.type == "cpu" and about.call % TRIM_CALLS == 0:
                return_freed_memory()
    return served


def stop_servers(attention: Serving, plan: Plan | int) -> None:
    """End the loop of every dedicated server; may be called on all trainers, but only the first one sends.

    `plan` is any plan of the pool, or the number of ranks that own tokens.
    """
    if attention.transport.rank == 0:
        for server in range(plan if isinstance(plan, int) else plan.layout.num_ranks, attention.transport.size):
            attention.transport.send_message(b"", server)
