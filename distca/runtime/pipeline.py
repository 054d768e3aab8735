"""Run one rank's part of a pipeline step tick by tick.

**Ticks.** In a same-phase tick every rank of every stage takes part in every attention call: active stages bring the
rows of their micro-batch, the others an empty row, and all serve the tasks that the tick's plans assign to them. The
calls of a tick are numbered by depth, the layer inside its part. A part with fewer layers is idle at the depths it
lacks: the last of a forward and the first of a backward. Each row's activations are sent to the next part's stage once
they are computed, and its gradients to the previous part's; a unit waits for a row when it needs it. A weight unit is
computed in pieces, one per segment, before the tick's calls. Ticks that mix phases (1F1B) run the same way, but
attention is then only among the data ranks of a stage, which all run the same phase at the same time, and idle stages
do not take part.

**Head.** In a head tick the stage of the last part sends every stage an equal slice of each row's hidden states. Each
computes the loss of its tokens and their gradients, row by row, and sends these back for the last part's backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

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
Send = Callable[[torch.Tensor], torch.Tensor]  # starts sending a row's output; returns what stands for it in backward


class Stage(Protocol):
    """The parts of the model on one stage: they compute between attention calls, and receive from neighbours."""

    @property
    def shapes(self) -> Shapes:
        """Shapes of this rank's attention tensors, for calls in which it has no tokens."""

    def num_layers(self, part: int) -> int: ...

    def activations(self, micro_batch: int) -> list[torch.Size]:
        """Return the shape of each row's activations between parts."""

    def hidden(self, micro_batch: int) -> list[torch.Size]:
        """Return the shape of each row's hidden states after the last part."""

    def empty(self) -> torch.Tensor:
        """Return any tensor with the dtype and device of activations."""

    def forward(
        self, part: int, micro_batch: int, received: Sequence[Handle], send: Send, plans: RowPlans,
        backward_plans: RowPlans,
    ) -> list[torch.Tensor]:
        """Return what `send` returned for each row's activations, or the loss if the head belongs to the last part.

        Wait for a row when it is needed, and `send` its activations or, after the last part, its hidden states. The
        first part receives nothing.
        """

    def head(self, micro_batch: int, hidden: torch.Tensor, begin: int) -> torch.Tensor | None:
        """Compute the loss of tokens from `begin` on of a micro-batch's rows; return hidden's gradient, if enabled."""

    def backward(
        self, part: int, micro_batch: int, outputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor] | None,
        *, last: bool, apart: bool,
    ) -> None:
        """Run a part's backward, without its weight unit if `apart`. `last` marks the step's last one on this stage."""

    def weigh(self, part: int, micro_batch: int, segment: int, *, last: bool) -> None:
        """Compute one segment of a weight unit. `last` marks the part's last unit of a step."""

    def finish(self) -> None:
        """End a step or an evaluation: its last unit has run."""


class _Live(NamedTuple):
    """A part's micro-batch between its forward and its backward."""

    outputs: list[torch.Tensor]
    gradients: list[_Gradient]  # of the rows that were sent


class _Here(NamedTuple):
    """A message to a part of the same stage, or a slice that stays there."""

    tensor: torch.Tensor

    def wait(self) -> torch.Tensor:
        return self.tensor


class _Row(NamedTuple):
    """A row that arrives in slices; `wait` returns it whole, and tells how long it waited."""

    slices: Sequence[Handle]
    noted: Callable[[str, str], AbstractContextManager[None]]

    def wait(self) -> torch.Tensor:
        with self.noted("neighbour", "wait"):
            arrived = [one.wait() for one in self.slices]
        return arrived[0] if len(arrived) == 1 else torch.cat(arrived)


class _Input:
    """A row that a part receives and whose gradient it passes on as soon as backward has it."""

    def __init__(self, row: Handle, passes_on: Callable[[torch.Tensor], None]) -> None:
        self.row, self.passes_on = row, passes_on

    def wait(self) -> torch.Tensor:
        tensor = self.row.wait().requires_grad_()
        tensor.register_post_accumulate_grad_hook(self._pass_on)
        return tensor

    def _pass_on(self, tensor: torch.Tensor) -> None:
        assert tensor.grad is not None
        self.passes_on(tensor.grad)


class _Gradient:
    """The gradient of a row that was sent, which backward waits for when it needs it."""

    row: Handle


class _Sent(torch.autograd.Function):
    """Stands for a row that was sent: backward takes its gradient from the next part's stage."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, gradient: _Gradient) -> torch.Tensor:
        ctx.gradient = gradient
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, placeholder: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.gradient.row.wait(), None


class Pipeline:
    """One rank's stage and its neighbours, to which it sends activations and gradients."""

    def __init__(self, stage: Stage, attention: CoreAttention, neighbours: PointToPoint) -> None:
        self.stage, self.attention, self.neighbours = stage, attention, neighbours
        self.at = neighbours.stage

    def step(self, ticks: Ticks, plans: Sequence[RowPlans]) -> None:
        """Run forward and backward of all micro-batches; gradients accumulate in the stage's parameters.

        `plans[tick][row][depth]` are the plans of each tick, the same on every rank of the attention's pool. In a tick
        without plans an idle stage serves nothing.
        """
        _Step(self, ticks, plans, forward_only=False).run()
        self.stage.finish()

    def forward_only(self, ticks: Ticks, plans: Sequence[RowPlans]) -> None:
        """Run the forward and head ticks of a step on all stages. Call it under torch.no_grad."""
        _Step(self, ticks, plans, forward_only=True).run()
        self.stage.finish()


class _Step:
    """One run over a step's ticks."""

    def __init__(self, pipeline: Pipeline, ticks: Ticks, plans: Sequence[RowPlans], forward_only: bool) -> None:
        self.stage, self.attention, self.neighbours = pipeline.stage, pipeline.attention, pipeline.neighbours
        self.at, self.ticks, self.plans, self.forward_only = pipeline.at, ticks, plans, forward_only
        self._check()
        self.live: dict[tuple[int, int], _Live] = {}             # by part and micro-batch
        self.hidden: dict[int, list[torch.Tensor]] = {}          # rows that wait for the head, by micro-batch
        self.arriving: dict[tuple[bool, int, int], list[Handle]] = {}  # rows, by phase, part and micro-batch
        self.sent: list[Handle] = []                             # in this tick
        runs_backward = ticks.active[:, self.at] & ticks.backward[:, self.at]
        self.returns = {(int(ticks.part[tick, self.at]), int(ticks.micro_batch[tick, self.at])): int(tick)
                        for tick in np.flatnonzero(runs_backward)}
        weighs = np.flatnonzero(ticks.weight[:, self.at] != IDLE)
        self.last_weight = {int(ticks.weight_part[tick, self.at]): int(tick) for tick in weighs}  # tick, by part

    def run(self) -> None:
        ticks, leaving, in_step = self.ticks, list[Handle](), self.ticks.same_phase
        for tick in range(ticks.num_ticks):
            if ticks.head[tick] != IDLE:
                with self._noted(f"head {ticks.head[tick]}", "pipeline"):
                    self._head(int(ticks.head[tick]))
            elif not (self.forward_only and (ticks.backward[tick, self.at] or not ticks.active[tick].any())):
                self._tick(tick)
            if in_step:                                          # else a neighbour may be ticks behind
                while leaving:                                   # sent in the previous tick
                    leaving.pop().wait()
            leaving, self.sent = leaving + self.sent, []
            self._expect(tick)
        for handle in leaving:
            handle.wait()

    def _tick(self, tick: int) -> None:
        """Run this stage's unit of a tick and serve the tick's other calls."""
        ticks, plans = self.ticks, self.plans[tick]
        part, micro_batch = int(ticks.part[tick, self.at]), int(ticks.micro_batch[tick, self.at])
        backward, weight = bool(ticks.backward[tick, self.at]), int(ticks.weight[tick, self.at])
        if micro_batch == IDLE:
            if weight == IDLE or self.forward_only:
                with self._noted("bubble", "bubble"):
                    self._serve(plans, 0, backward)
            else:
                with self._noted(f"weights {weight}", "pipeline"):
                    self._serve(plans, 0, backward, self._pieces(tick))
            return
        with self._noted(f"{'backward' if backward else 'forward'} {micro_batch}", "pipeline"):
            arriving = self.arriving.pop((backward, part, micro_batch), [])
            if backward:
                self._serve(plans, self.stage.num_layers(part), backward)
                self._backward(part, micro_batch, arriving)
            else:
                back = tick if self.forward_only else self.returns[part, micro_batch]
                self._forward(part, micro_batch, arriving, plans, self.plans[back])
                self._serve(plans, self.stage.num_layers(part), backward)

    def _forward(
        self, part: int, micro_batch: int, arriving: list[Handle], plans: RowPlans, backward_plans: RowPlans
    ) -> None:
        gradients: list[_Gradient] = []

        def send(output: torch.Tensor) -> torch.Tensor:
            self._send(False, part + 1, micro_batch, output.detach())
            if self.forward_only:
                return output
            gradients.append(_Gradient())
            return _Sent.apply(output, gradients[-1])

        rows = [_Input(row, lambda gradient: self._send(True, part - 1, micro_batch, gradient)) for row in arriving]
        outputs = self.stage.forward(part, micro_batch, rows, send, plans, backward_plans)
        if not self.forward_only:
            self.live[part, micro_batch] = _Live(outputs, gradients)

    def _backward(self, part: int, micro_batch: int, arriving: list[Handle]) -> None:
        live = self.live.pop((part, micro_batch))
        for gradient, row in zip(live.gradients, arriving, strict=True):
            gradient.row = row
        placeholders = [output.new_empty(()).expand_as(output) for output in live.outputs] if arriving else None
        self.stage.backward(part, micro_batch, live.outputs, placeholders, apart=self.ticks.splits,
                            last=(part, micro_batch) == next(reversed(self.returns)))

    def _send(self, backward: bool, part: int, micro_batch: int, row: torch.Tensor) -> None:
        """Start sending a row to a part, or keep it for the head. In backward, the last row comes first."""
        if part == self.ticks.num_parts:
            self.hidden.setdefault(micro_batch, []).append(row)
        elif part >= 0 and (target := int(self.ticks.stage_of[part])) != self.at:
            self.sent.append(self.neighbours.send(row, target))
        elif part >= 0:
            rows = self.arriving.setdefault((backward, part, micro_batch), [])
            rows.insert(0 if backward else len(rows), _Row([_Here(row)], self._noted))

    def _head(self, micro_batch: int) -> None:
        """Compute the head for this stage's slice of each of a micro-batch's rows."""
        part, stages, empty = self.ticks.num_parts - 1, self.ticks.num_stages, self.stage.empty()
        source, first = int(self.ticks.stage_of[part]), 0
        slices: list[tuple[int, list[torch.Size], Handle]] = []  # of each row: first token, shapes, this stage's own
        for number, (num_tokens, width) in enumerate(self.stage.hidden(micro_batch)):
            edges = [num_tokens * stage // stages for stage in range(stages + 1)]
            shapes = [torch.Size((end - begin, width)) for begin, end in pairwise(edges)]
            own: Handle
            if self.at == source:
                cut = self.hidden[micro_batch][number].split([shape[0] for shape in shapes])
                self.sent += [self.neighbours.send(one, stage) for stage, one in enumerate(cut)
                              if stage != source and len(one)]
                own = _Here(cut[source])
            elif shapes[self.at][0]:
                own = _Row([self.neighbours.receive(shapes[self.at], empty, source)], self._noted)
            else:
                own = _Here(empty.new_empty(shapes[self.at]))
            slices.append((first + edges[self.at], shapes, own))
            first += num_tokens
        self.hidden.pop(micro_batch, None)
        for begin, shapes, own in slices:
            gradient = self.stage.head(micro_batch, own.wait(), begin)
            if gradient is None:
                continue
            if self.at == source:
                self.arriving.setdefault((True, part, micro_batch), []).append(_Row([
                    _Here(gradient) if stage == source else self.neighbours.receive(shape, empty, stage)
                    for stage, shape in enumerate(shapes) if stage == source or shape[0]], self._noted))
            elif len(gradient):
                self.sent.append(self.neighbours.send(gradient, source))

    def _pieces(self, tick: int) -> Iterator[None]:
        """Compute a weight unit segment by segment, in the order of the tick's phase, one with every `next`."""
        part, micro_batch = int(self.ticks.weight_part[tick, self.at]), int(self.ticks.weight[tick, self.at])
        segments = range(self.stage.num_layers(part) + 1)
        for segment in reversed(segments) if self.ticks.backward[tick, self.at] else segments:
            self.stage.weigh(part, micro_batch, segment, last=tick == self.last_weight[part])
            yield

    def _serve(
        self, plans: RowPlans, first_depth: int, backward: bool, pieces: Iterator[None] = iter(())  # noqa: B008
    ) -> None:
        """Take part without tokens in the tick's calls from `first_depth` on, in the order of the active stages.

        One of `pieces` is computed before each call, and the rest after the last.
        """
        depths = range(first_depth, len(plans[0]) if plans else 0)
        for depth in reversed(depths) if backward else depths:
            next(pieces, None)
            rows = reversed(plans) if backward else plans
            calls = [self.attention.call(row[depth], self.stage.shapes, backward=backward) for row in rows]
            for phase in Phase:
                for call in calls:
                    call.run_without_tokens(phase)
        for _ in pieces:
            pass

    def _expect(self, tick: int) -> None:
        """Start receiving this tick's messages: activations from the previous part, gradients from the next."""
        ticks = self.ticks
        for source in np.flatnonzero(ticks.active[tick]).tolist():
            backward, micro_batch = bool(ticks.backward[tick, source]), int(ticks.micro_batch[tick, source])
            part = int(ticks.part[tick, source]) + (-1 if backward else 1)
            if (source != self.at and 0 <= part < ticks.num_parts and ticks.stage_of[part] == self.at
                    and not (backward and self.forward_only)):
                way = -1 if backward else 1                      # the last row's gradients come first
                rows: list[Handle] = [_Row([self.neighbours.receive(shape, self.stage.empty(), source)], self._noted)
                                      for shape in self.stage.activations(micro_batch)[::way]]
                self.arriving[backward, part, micro_batch] = rows[::way]

    def _noted(self, name: str, lane: str) -> AbstractContextManager[None]:
        recorder = self.attention.recorder
        return nullcontext() if recorder is None or self.forward_only else recorder.span(name, lane)

    def _check(self) -> None:
        if self.ticks.num_stages != self.neighbours.num_stages:
            raise UserError(f"the ticks are for {self.ticks.num_stages} stages but the pipeline has "
                            f"{self.neighbours.num_stages}; make them with as many")
        if len(self.plans) != self.ticks.num_ticks:
            raise UserError(f"there are plans for {len(self.plans)} ticks of {self.ticks.num_ticks}; plan every tick")
