"""Run a decoder's segments over one row, or over two that take turns.

With one row every exchange is waited for. With two nano-batches, ping and pong, one computes while the other travels:

    ping:  segment  start ······  serve ·····  finish  segment  start ···
    pong:           segment  start ······  serve ·····  finish  segment …

Whatever computes for one row stands between the phase that sends for the other row and the phase that needs what was
sent. Autograd runs the same order in reverse, so communication is hidden in backward too.

Where a document lies in both rows, pong's queries read ping's keys, which are known because ping is ahead in every
layer. In backward pong comes first, so that ping's keys have all their gradients when ping needs them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch

from distca.planning.plan import Plan
from distca.runtime.attention import CoreAttention, Pending

Segment = Callable[..., Any]
Runs = Sequence[tuple[int, int]]  # tokens [start, stop) of a row, in order


def forward(
    segments: Sequence[Segment], inputs: Sequence[tuple[Any, ...]], rotaries: Sequence[Any],
    plans: Sequence[Sequence[Plan]], attention: CoreAttention,
    backward_plans: Sequence[Sequence[Plan]] | None = None, reads: Sequence[Runs] | None = None,
) -> list[torch.Tensor]:
    """The last segment's output for every row.

    `segments` are first(*inputs, rotary) -> (x, q, k, v), middle(x, out, rotary) -> (x, q, k, v), last(x, out) -> y.
    `plans[row][depth]` is the plan of a row's attention after segment `depth`; gradients go by the same plans, or by
    `backward_plans`. `reads[row]` are the tokens of the row before it whose keys the plans name as keys only.
    """
    rows = range(len(inputs))
    way_back = plans if backward_plans is None else backward_plans
    states: list[torch.Tensor] = []
    pending: list[Pending] = []
    own: list[tuple[torch.Tensor, torch.Tensor]] = [(torch.empty(0),) * 2] * len(inputs)  # this depth's keys and values

    def start(row: int, depth: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Pending:
        own[row] = k, v
        if reads is not None and reads[row]:
            k, v = (torch.cat([mine, *taken(before, reads[row])]) for mine, before in zip((k, v), own[row - 1],
                                                                                          strict=True))
        return attention.start(q, k, v, plans[row][depth], backward=way_back[row][depth])

    for row in rows:
        x, q, k, v = segments[0](*inputs[row], rotaries[row])
        states.append(x)
        pending.append(start(row, 0, q, k, v))
    for depth, segment in enumerate(segments[1:-1], start=1):
        for row in rows:
            attention.serve(pending[row])
        for row in rows:
            x, q, k, v = segment(states[row], attention.finish(pending[row]), rotaries[row])
            states[row] = x
            pending[row] = start(row, depth, q, k, v)
    for row in rows:
        attention.serve(pending[row])
    return [segments[-1](states[row], attention.finish(pending[row])) for row in rows]


def taken(row: torch.Tensor, runs: Runs) -> list[torch.Tensor]:
    """The runs of a row, by one split, whose backward is one copy however many runs there are."""
    edges = [0, *(edge for run in runs for edge in run), len(row)]
    return list(row.split([b - a for a, b in pairwise(edges)]))[1::2]
