"""Run a decoder's segments over one or two rows, and one rank's part of a pipeline step tick by tick.

**Rows.** With one row, every exchange is waited for. With two nano-batches, ping and pong, one computes while the other
is exchanged:

    ping:  segment  start ······  serve ·····  finish  segment  start ···
    pong:           segment  start ······  serve ·····  finish  segment …

Between sending for one row and using the result, the rank computes for the other row. Autograd runs the same order in
reverse, so communication is hidden in backward too. If a document is in both rows, pong's queries read ping's keys,
which are available because ping is ahead in every layer. In backward pong comes first, so ping's keys have all their
gradients when ping needs them.

**Ticks.** In a same-phase tick every rank of every stage takes part in every attention call: active stages bring the
rows of their micro-batch, idle stages an empty row, and all serve the tasks that the tick's plans assign to them. The
calls of a tick are numbered by depth, the layer inside its stage. A stage with fewer layers is idle at the depths it
lacks: the last of a forward and the first of a backward. Activations and gradients are sent to the neighbouring stage
while the next tick runs. Ticks that mix phases (1F1B) run the same way, but attention is then only among the data ranks
of a stage, which all run the same phase at the same time, and idle stages do not take part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from distca.planning.plan import Plan
from distca.planning.schedule import IDLE, Ticks
from distca.runtime.attention import CoreAttention, Pending
from distca.runtime.call import Phase
from distca.runtime.prepared import Shapes
from distca.runtime.transport import Handle, PointToPoint
from distca.validation import UserError

RowPlans = Sequence[Sequence[Plan]]  # [row][depth]


class Stage(Protocol):
    """The model part of one pipeline stage: it computes between attention calls and receives from neighbours."""

    @property
    def num_layers(self) -> int: ...

    @property
    def shapes(self) -> Shapes:
        """Shapes of this rank's attention tensors, for calls in which it has no tokens."""

    def activations(self, micro_batch: int) -> list[torch.Size]:
        """Return the shape of each row's activations between stages."""

    def empty(self) -> torch.Tensor:
        """Return any tensor with the dtype and device of activations."""

    def forward(
        self, micro_batch: int, received: Sequence[torch.Tensor], plans: RowPlans, backward_plans: RowPlans
    ) -> list[torch.Tensor]:
        """Return each row's activations for the next stage, or the loss on the last; the first receives nothing."""

    def accumulate(self, last: bool) -> AbstractContextManager[None]:
        """Return a context for one micro-batch's backward; `last` marks the step's last one."""


class _Live(NamedTuple):
    """A micro-batch between its forward and its backward."""

    received: list[torch.Tensor]
    outputs: list[torch.Tensor]


class Pipeline:
    """One rank's stage and its neighbours, to which it sends activations and gradients."""

    def __init__(self, stage: Stage, attention: CoreAttention, neighbours: PointToPoint) -> None:
        self.stage, self.attention, self.neighbours = stage, attention, neighbours
        self.at, self.last = neighbours.stage, neighbours.num_stages - 1

    def step(self, ticks: Ticks, plans: Sequence[RowPlans]) -> None:
        """Run forward and backward of all micro-batches; gradients accumulate in the stage's parameters.

        `plans[tick][row][depth]` are the plans of each tick, the same on every rank of the attention's pool. In a tick
        without plans an idle stage serves nothing.
        """
        self._run(ticks, plans, forward_only=False)

    def forward_only(self, ticks: Ticks, plans: Sequence[RowPlans]) -> None:
        """Run the forward ticks of a step on all stages. Call it under torch.no_grad."""
        self._run(ticks, plans, forward_only=True)

    def _run(self, ticks: Ticks, plans: Sequence[RowPlans], forward_only: bool) -> None:
        self._check(ticks, plans)
        live: dict[int, _Live] = {}
        arriving: dict[tuple[bool, int], list[Handle]] = {}      # by phase and micro-batch
        leaving: list[Handle] = []
        runs_backward = ticks.active[:, self.at] & ticks.backward[:, self.at]
        returns = {int(ticks.micro_batch[tick, self.at]): int(tick) for tick in np.flatnonzero(runs_backward)}
        for tick in range(ticks.num_ticks):
            micro_batch, backward = int(ticks.micro_batch[tick, self.at]), bool(ticks.backward[tick, self.at])
            sent: list[Handle] = []
            if not (backward and forward_only):
                received = arriving.pop((backward, micro_batch), [])
                with nullcontext() if forward_only else self._noted(micro_batch, backward):
                    if micro_batch == IDLE:
                        self._serve(plans[tick], 0, backward)
                    elif backward:
                        is_last = micro_batch == next(reversed(returns))
                        sent = self._backward(live.pop(micro_batch), received, plans[tick], is_last)
                    else:
                        back = tick if forward_only else returns[micro_batch]
                        live[micro_batch] = self._forward(micro_batch, received, plans[tick], plans[back])
                        if self.at < self.last:
                            sent = [self.neighbours.send(output.detach(), self.at + 1)
                                    for output in live[micro_batch].outputs]
                        if forward_only:
                            del live[micro_batch]
                        self._serve(plans[tick], self.stage.num_layers, backward)
            for handle in leaving:                               # sent in the previous tick
                handle.wait()
            leaving = sent
            arriving.update(self._expect(ticks, tick, forward_only))
        for handle in leaving:
            handle.wait()

    def _forward(
        self, micro_batch: int, activations: Sequence[Handle], plans: RowPlans, backward_plans: RowPlans
    ) -> _Live:
        received = [x.requires_grad_() for x in self._arrived(activations)]
        return _Live(received, self.stage.forward(micro_batch, received, plans, backward_plans))

    def _backward(self, live: _Live, gradients: Sequence[Handle], plans: RowPlans, final: bool) -> list[Handle]:
        arrived = self._arrived(gradients)
        self._serve(plans, self.stage.num_layers, backward=True)
        with self.stage.accumulate(final):
            torch.autograd.backward(live.outputs, arrived or None)
        sent = []
        for received in live.received:
            assert received.grad is not None
            sent.append(self.neighbours.send(received.grad, self.at - 1))
        return sent

    def _serve(self, plans: RowPlans, first_depth: int, backward: bool) -> None:
        """Take part without tokens in the tick's calls from `first_depth` on, in the order of the active stages."""
        depths = range(first_depth, len(plans[0]) if plans else 0)
        for depth in reversed(depths) if backward else depths:
            rows = reversed(plans) if backward else plans
            calls = [self.attention.call(row[depth], self.stage.shapes, backward=backward) for row in rows]
            for phase in Phase:
                for call in calls:
                    call.run_without_tokens(phase)

    def _expect(self, ticks: Ticks, tick: int, forward_only: bool) -> dict[tuple[bool, int], list[Handle]]:
        """Start receiving this tick's messages: activations from the previous stage, gradients from the next."""
        expected = {}
        for backward, source in ((False, self.at - 1), (True, self.at + 1))[:1 if forward_only else 2]:
            if 0 <= source <= self.last and bool(ticks.backward[tick, source]) == backward:
                micro_batch = int(ticks.micro_batch[tick, source])
                if micro_batch != IDLE:
                    expected[backward, micro_batch] = [
                        self.neighbours.receive(shape, self.stage.empty(), source)
                        for shape in self.stage.activations(micro_batch)]
        return expected

    def _arrived(self, handles: Sequence[Handle]) -> list[torch.Tensor]:
        recorder = self.attention.recorder
        with nullcontext() if recorder is None or not handles else recorder.span("neighbour", "wait"):
            return [handle.wait() for handle in handles]

    def _noted(self, micro_batch: int, backward: bool) -> AbstractContextManager[None]:
        recorder = self.attention.recorder
        if recorder is None:
            return nullcontext()
        if micro_batch == IDLE:
            return recorder.span("bubble", "bubble")
        return recorder.span(f"{'backward' if backward else 'forward'} {micro_batch}", "pipeline")

    def _check(self, ticks: Ticks, plans: Sequence[RowPlans]) -> None:
        if ticks.num_stages != self.neighbours.num_stages:
            raise UserError(f"the ticks are for {ticks.num_stages} stages but the pipeline has "
                            f"{self.neighbours.num_stages}; make them with as many")
        if len(plans) != ticks.num_ticks:
            raise UserError(f"there are plans for {len(plans)} ticks of {ticks.num_ticks}; plan every tick")


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
