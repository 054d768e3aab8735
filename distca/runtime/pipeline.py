"""Run one rank's part of a pipeline step, tick by tick.

In a same-phase tick every rank of every stage takes part in every attention call: active stages bring the rows of their
micro-batch, idle ones an empty row, and all serve what the tick's plans give them. The calls of a tick are numbered by
depth, the layer inside its stage. A stage with fewer layers than others is idle at the depths it does not have, the
last of a forward and the first of a backward. Activations and gradients travel to the neighbouring stage while the next
tick runs. Ticks that mix phases, as 1F1B's do, run the same way without the idle ones: attention is then among the data
ranks of a stage, which run the same thing at the same time.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, Protocol

import numpy as np
import torch

from distca.planning.plan import Plan
from distca.planning.schedule import IDLE, Ticks
from distca.runtime.attention import CoreAttention
from distca.runtime.call import Phase
from distca.runtime.prepared import Shapes
from distca.runtime.transport import Handle, PointToPoint
from distca.validation import UserError

RowPlans = Sequence[Sequence[Plan]]  # [row][depth]


class Stage(Protocol):
    """What a rank computes between attention calls, and what it takes from its neighbours."""

    @property
    def num_layers(self) -> int: ...

    @property
    def shapes(self) -> Shapes:
        """Of this rank's attention, for the calls to which it brings no tokens."""

    def activations(self, micro_batch: int) -> list[torch.Size]:
        """Shape of each row's activations between stages."""

    def empty(self) -> torch.Tensor:
        """Any tensor with the dtype and device of activations."""

    def forward(
        self, micro_batch: int, received: Sequence[torch.Tensor], plans: RowPlans, backward_plans: RowPlans
    ) -> list[torch.Tensor]:
        """Activations of every row for the next stage; on the last stage the loss. The first stage receives nothing."""

    def accumulate(self, last: bool) -> AbstractContextManager[None]:
        """Stands around each micro-batch's backward; `last` on the step's last one."""


class _Live(NamedTuple):
    """A micro-batch between its forward and its backward."""

    received: list[torch.Tensor]
    outputs: list[torch.Tensor]


class Pipeline:
    """One rank's stage, and the neighbours it passes activations and gradients to."""

    def __init__(self, stage: Stage, attention: CoreAttention, neighbours: PointToPoint) -> None:
        self.stage, self.attention, self.neighbours = stage, attention, neighbours
        self.at, self.last = neighbours.stage, neighbours.num_stages - 1

    def step(self, ticks: Ticks, plans: Sequence[RowPlans]) -> None:
        """Forward and backward of all micro-batches; gradients add up in the stage's parameters.

        `plans[tick][row][depth]` are the plans of each tick, the same on every rank of the attention's pool; a tick
        without any leaves an idle stage nothing to serve.
        """
        self._run(ticks, plans, forward_only=False)

    def forward_only(self, ticks: Ticks, plans: Sequence[RowPlans]) -> None:
        """The forward ticks of a step, on all stages. Call it without gradients."""
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
            for handle in leaving:                               # the ticks before this one
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
        """Take part without tokens in the tick's calls from `first_depth` on, in the order of those who bring some."""
        depths = range(first_depth, len(plans[0]) if plans else 0)
        for depth in reversed(depths) if backward else depths:
            rows = reversed(plans) if backward else plans
            calls = [self.attention.call(row[depth], self.stage.shapes, backward=backward) for row in rows]
            for phase in Phase:
                for call in calls:
                    call.run_without_tokens(phase)

    def _expect(self, ticks: Ticks, tick: int, forward_only: bool) -> dict[tuple[bool, int], list[Handle]]:
        """Receive what the neighbours sent in this tick: activations of the stage before, gradients of the next."""
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
