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
rows of their micro-batch, the others an empty row, and all serve the tasks that the tick's plans assign to them. The
calls of a tick are numbered by depth, the layer inside its part. A part with fewer layers is idle at the depths it
lacks: the last of a forward and the first of a backward. Activations and gradients are sent to the neighbouring part's
stage while the next tick runs. A weight unit is computed in pieces, one per segment, before the tick's calls. Ticks
that mix phases (1F1B) run the same way, but attention is then only among the data ranks of a stage, which all run the
same phase at the same time, and idle stages do not take part.

**Head.** In a head tick the stage of the last part sends every stage an equal slice of a micro-batch's hidden states.
Each computes the loss of its tokens and their gradients at once, and sends these back for the last part's backward.
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
from distca.runtime.attention import CoreAttention, Pending
from distca.runtime.call import Phase
from distca.runtime.prepared import Shapes
from distca.runtime.transport import Handle, PointToPoint
from distca.validation import UserError

RowPlans = Sequence[Sequence[Plan]]  # [row][depth]


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
        self, part: int, micro_batch: int, received: Sequence[torch.Tensor], plans: RowPlans, backward_plans: RowPlans
    ) -> list[torch.Tensor]:
        """Return each row's activations for the next part; the first part receives nothing.

        The last part returns its hidden states, or the loss if the head belongs to it.
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

    received: list[torch.Tensor]
    outputs: list[torch.Tensor]


class _Here(NamedTuple):
    """A message to a part of the same stage, or a slice that stays there."""

    tensor: torch.Tensor

    def wait(self) -> torch.Tensor:
        return self.tensor


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
        self.arriving: dict[tuple[bool, int, int], list[Handle]] = {}  # by phase, part and micro-batch
        runs_backward = ticks.active[:, self.at] & ticks.backward[:, self.at]
        self.returns = {(int(ticks.part[tick, self.at]), int(ticks.micro_batch[tick, self.at])): int(tick)
                        for tick in np.flatnonzero(runs_backward)}
        weighs = np.flatnonzero(ticks.weight[:, self.at] != IDLE)
        self.last_weight = {int(ticks.weight_part[tick, self.at]): int(tick) for tick in weighs}  # tick, by part

    def run(self) -> None:
        ticks, leaving = self.ticks, list[Handle]()
        for tick in range(ticks.num_ticks):
            sent: list[Handle] = []
            if ticks.head[tick] != IDLE:
                with self._noted(f"head {ticks.head[tick]}", "pipeline"):
                    sent = self._head(int(ticks.head[tick]))
            elif not (self.forward_only and (ticks.backward[tick, self.at] or not ticks.active[tick].any())):
                sent = self._tick(tick)
            for handle in leaving:                               # sent in the previous tick
                handle.wait()
            leaving = sent
            self._expect(tick)
        for handle in leaving:
            handle.wait()

    def _tick(self, tick: int) -> list[Handle]:
        """Run this stage's unit of a tick and serve the tick's other calls; return what is being sent."""
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
            return []
        with self._noted(f"{'backward' if backward else 'forward'} {micro_batch}", "pipeline"):
            received = self._arrived(self.arriving.pop((backward, part, micro_batch), []))
            if backward:
                self._serve(plans, self.stage.num_layers(part), backward)
                return self._backward(part, micro_batch, received)
            back = tick if self.forward_only else self.returns[part, micro_batch]
            sent = self._forward(part, micro_batch, received, plans, self.plans[back])
            self._serve(plans, self.stage.num_layers(part), backward)
            return sent

    def _forward(
        self, part: int, micro_batch: int, received: list[torch.Tensor], plans: RowPlans, backward_plans: RowPlans
    ) -> list[Handle]:
        received = [x.requires_grad_() for x in received]
        outputs = self.stage.forward(part, micro_batch, received, plans, backward_plans)
        if not self.forward_only or (part == self.ticks.num_parts - 1 and self.ticks.spreads_head):
            self.live[part, micro_batch] = _Live(received, outputs)
        return self._send(False, part + 1, micro_batch, [output.detach() for output in outputs])

    def _backward(self, part: int, micro_batch: int, arrived: list[torch.Tensor]) -> list[Handle]:
        live, ticks = self.live.pop((part, micro_batch)), self.ticks
        if part == ticks.num_parts - 1 and ticks.spreads_head:
            arrived = list(torch.cat(arrived).split([len(output) for output in live.outputs]))
        self.stage.backward(part, micro_batch, live.outputs, arrived or None, apart=ticks.splits,
                            last=(part, micro_batch) == next(reversed(self.returns)))
        gradients = [received.grad for received in live.received]
        return self._send(True, part - 1, micro_batch, [gradient for gradient in gradients if gradient is not None])

    def _send(self, backward: bool, part: int, micro_batch: int, tensors: Sequence[torch.Tensor]) -> list[Handle]:
        """Start sending to a part, if there is such a part."""
        if not 0 <= part < self.ticks.num_parts:
            return []
        target = int(self.ticks.stage_of[part])
        if target == self.at:
            self.arriving[backward, part, micro_batch] = [_Here(tensor) for tensor in tensors]
            return []
        return [self.neighbours.send(tensor, target) for tensor in tensors]

    def _head(self, micro_batch: int) -> list[Handle]:
        """Compute the head for this stage's slice of a micro-batch's tokens; return what is being sent."""
        part, stages = self.ticks.num_parts - 1, self.ticks.num_stages
        shapes, source = self.stage.hidden(micro_batch), int(self.ticks.stage_of[part])
        edges = [sum(shape[0] for shape in shapes) * stage // stages for stage in range(stages + 1)]
        sizes = [torch.Size((end - begin, shapes[0][1])) for begin, end in pairwise(edges)]
        others = [stage for stage in range(stages) if stage != source and sizes[stage][0]]
        sent: list[Handle] = []
        if self.at == source:
            outputs = torch.cat([output.detach() for output in self.live[part, micro_batch].outputs])
            slices = outputs.split([size[0] for size in sizes])
            sent = [self.neighbours.send(slices[stage], stage) for stage in others]
            hidden = slices[source]
        else:
            hidden = torch.empty(sizes[self.at], dtype=self.stage.empty().dtype, device=self.stage.empty().device)
            if self.at in others:
                hidden, = self._arrived([self.neighbours.receive(sizes[self.at], self.stage.empty(), source)])
        gradient = self.stage.head(micro_batch, hidden, edges[self.at])
        if self.forward_only:
            self.live.pop((part, micro_batch), None)
            return sent
        assert gradient is not None
        if self.at != source:
            return [self.neighbours.send(gradient, source)] if self.at in others else []
        self.arriving[True, part, micro_batch] = [
            _Here(gradient) if stage == source else self.neighbours.receive(sizes[stage], self.stage.empty(), stage)
            for stage in range(stages) if stage == source or stage in others]
        return sent

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
                self.arriving[backward, part, micro_batch] = [
                    self.neighbours.receive(shape, self.stage.empty(), source)
                    for shape in self.stage.activations(micro_batch)]

    def _arrived(self, handles: Sequence[Handle]) -> list[torch.Tensor]:
        with self._noted("neighbour", "wait") if handles else nullcontext():
            return [handle.wait() for handle in handles]

    def _noted(self, name: str, lane: str) -> AbstractContextManager[None]:
        recorder = self.attention.recorder
        return nullcontext() if recorder is None or self.forward_only else recorder.span(name, lane)

    def _check(self) -> None:
        if self.ticks.num_stages != self.neighbours.num_stages:
            raise UserError(f"the ticks are for {self.ticks.num_stages} stages but the pipeline has "
                            f"{self.neighbours.num_stages}; make them with as many")
        if len(self.plans) != self.ticks.num_ticks:
            raise UserError(f"there are plans for {len(self.plans)} ticks of {self.ticks.num_ticks}; plan every tick")


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
