"""Run a decoder's segments over one row, or over two nano-batches so that one computes while the other is exchanged.

With one row, every exchange is waited for. With two nano-batches, ping and pong, one computes while the other
is exchanged:

    ping:  segment  start ······  serve ·····  finish  segment  start ···
    pong:           segment  start ······  serve ·····  finish  segment …

Between sending for one row and using the result, the rank computes for the other row. Autograd runs the same order in
reverse, so communication is hidden in backward too. If a document is in both rows, pong's queries read ping's keys,
which are available because ping is ahead in every layer. In backward pong comes first, so ping's keys have all their
gradients when ping needs them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch

from distca.planning.plan import Plan
from distca.runtime.attention import CoreAttention, Pending

Segment = Callable[..., Any]
Runs = Sequence[tuple[int, int]]  # tokens [start, stop) of a row, ascending


def forward_segments(
    segments: Sequence[Segment], inputs: Sequence[tuple[Any, ...]], rotaries: Sequence[Any],
    plans: Sequence[Sequence[Plan]], attention: CoreAttention,
    backward_plans: Sequence[Sequence[Plan]] | None = None, reads: Sequence[Runs] | None = None,
) -> list[torch.Tensor]:
    """Return the last segment's output for every row.

    `segments` are first(*inputs, rotary) -> (x, q, k, v), middle(x, out, rotary) -> (x, q, k, v), last(x, out) -> y.
    `plans[row][depth]` is the plan of a row's attention after segment `depth`; backward follows the same plans, or
    `backward_plans`. `reads[row]` are tokens of the previous row that are key-only in this row's plans.
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
    """Return the runs of a row by a single split, so backward is one copy for any number of runs."""
    edges = [0, *(edge for run in runs for edge in run), len(row)]
    return list(row.split([b - a for a, b in pairwise(edges)]))[1::2]
