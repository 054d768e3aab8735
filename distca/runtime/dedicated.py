"""Servers that do nothing else: ranks beyond the layout's, which own no tokens and have no model.

Every training rank serves in place, phase by phase of its own calls. A dedicated rank cannot know which call comes
next, so the first trainer announces every phase to it. It holds nothing between a call's forward and its backward, so
any of its tasks could run again elsewhere.
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
    """What CoreAttention is to a server."""

    @property
    def transport(self) -> Transport: ...

    def call(self, plan: Plan, shapes: Shapes, scores: Scores = PLAIN, backward: bool = False) -> Call: ...


class Announcement(NamedTuple):
    """One phase of one direction of a call."""

    phase: Phase
    backward: bool
    call: int
    digest: int
    plan: Plan | None    # sent only if the servers do not have it
    shapes: Shapes       # on the server's own device
    scores: Scores

    def to_bytes(self) -> bytes:
        """A line of JSON, and the plan behind it: data, which a server checks and never runs."""
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
    """The first trainer's side of all calls; both sides see the same announcements and so evict identical plans."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self._known: LRU[int, bool] = LRU(PLANS_KEPT)
        self._calls = 0

    def about(self, plan: Plan, digest: int, backward: bool, shapes: Shapes, scores: Scores) -> Callable[[Phase], None]:
        """A function that announces each phase of one more call to the servers."""
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
    """A dedicated rank's loop: run every announced phase until `stop_servers`; returns the number of calls served."""
    calls: dict[int, Call] = {}
    plans: LRU[int, Plan] = LRU(PLANS_KEPT)
    served = 0
    while content := attention.transport.receive_message():
        about = Announcement.from_bytes(content, torch.device(device))
        plan = about.plan or plans.get(about.digest)
        assert plan is not None, "the announcer knows which plans are kept here"
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
    """End the loop of every dedicated server. Any trainer may call it, only the first one sends.

    `plan` is any plan of the pool, or the number of ranks that own tokens.
    """
    if attention.transport.rank == 0:
        for server in range(plan if isinstance(plan, int) else plan.layout.num_ranks, attention.transport.size):
            attention.transport.send_message(b"", server)
