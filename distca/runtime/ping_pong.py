"""Run a decoder's segments over one row, or over two that take turns.

With one row every exchange is waited for. With two nano-batches, ping and pong, one computes while the other travels:

    ping:  segment  start ······  serve ·····  finish  segment  start ···
    pong:           segment  start ······  serve ·····  finish  segment …

Each step that computes for one row stands between a step that sends for the other and the step that needs it. Autograd
runs the same steps backwards, so the backward pass is hidden the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from distca.planning.plan import Plan
from distca.runtime.core_attention import CoreAttention, Pending

Segment = Callable[..., Any]


def forward(
    segments: Sequence[Segment],
    inputs: Sequence[tuple[Any, ...]],
    rotaries: Sequence[Any],
    plans: Sequence[Sequence[Plan]],
    attention: CoreAttention,
    backward_plans: Sequence[Sequence[Plan]] | None = None,
) -> list[torch.Tensor]:
    """The last segment's output for every row.

    `segments` are first(*inputs, rotary) -> (x, q, k, v), middle(x, out, rotary) -> (x, q, k, v), last(x, out) -> y.
    `plans[row][depth]` is the plan of a row's attention after segment `depth`; gradients go by the same plans, or by
    `backward_plans`.
    """
    rows = range(len(inputs))
    way_back = plans if backward_plans is None else backward_plans
    states: list[torch.Tensor] = []
    pending: list[Pending] = []
    for row in rows:
        x, q, k, v = segments[0](*inputs[row], rotaries[row])
        states.append(x)
        pending.append(attention.start(q, k, v, plans[row][0], backward=way_back[row][0]))
    for depth, segment in enumerate(segments[1:-1], start=1):
        for row in rows:
            attention.serve(pending[row])
        for row in rows:
            x, q, k, v = segment(states[row], attention.finish(pending[row]), rotaries[row])
            states[row] = x
            pending[row] = attention.start(q, k, v, plans[row][depth], backward=way_back[row][depth])
    for row in rows:
        attention.serve(pending[row])
    return [segments[-1](states[row], attention.finish(pending[row])) for row in rows]
