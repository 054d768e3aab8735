"""The simulator computes what the runtime computes, in the runtime's order.

Every rank runs the runtime's own pipeline and ping-pong over operations that only note their names. The notes are then
timed one by one, each after the one before it on its rank and after what it waits for on others, with links that take
no time; the simulator has to come to the same spans on every rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")
import torch

from distca.baselines import at_home_step
from distca.cost.latency_table import analytic_table
from distca.planning.choose import plan_step
from distca.planning.orders import order_named
from distca.planning.plan import Plan, server_work
from distca.planning.step import StepPlan
from distca.runtime.attention import Pending, _Finish, _Serve, _Start
from distca.runtime.call import Phase
from distca.runtime.ping_pong import forward_segments
from distca.runtime.pipeline import Pipeline
from distca.simulate.costs import Costs
from distca.simulate.execute import execute
from distca.spec import ClusterShape, ModelShape
from tests.support.plans import random_lengths

MODEL = ModelShape("m", 8, 64, 4, 2, 16, 128, 100)
SLOW = ClusterShape("slow", "g", 4, 1e9, 1e9, 1e9, 1e12, 1e30, 1000.0, 100.0, 0.0, 0.0)
COSTS = Costs.of(MODEL, SLOW, 1, analytic_table(MODEL, 1e9)).without_network()


class Note(NamedTuple):
    what: str | tuple[Phase, bool]
    about: Any = None


class Call:
    """The phases of one direction of a call, noted."""

    keep = False

    def __init__(self, notes: list[Note], plan: Plan, backward: bool) -> None:
        self.notes, self.plan, self.backward = notes, plan, backward

    def run_without_tokens(self, phase: Phase) -> None:
        self.notes.append(Note((phase, self.backward), self.plan))

    def dispatch(self, *row: torch.Tensor) -> None:
        self.run_without_tokens(Phase.DISPATCH)

    def serve(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        self.run_without_tokens(Phase.SERVE)
        return (torch.zeros(1),) * 3

    def combine(self) -> tuple[torch.Tensor, ...]:
        self.run_without_tokens(Phase.COMBINE)
        return (torch.zeros(1),) * (3 if self.backward else 2)


class Attention:
    recorder = None

    def __init__(self, notes: list[Note]) -> None:
        self.notes = notes

    def call(self, plan: Plan, shapes: None, backward: bool) -> Call:
        return Call(self.notes, plan, backward)

    def start(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: Plan, *, backward: Plan) -> Pending:
        forth, back = Call(self.notes, plan, False), Call(self.notes, backward, True)
        pending = Pending(cast(Any, forth), cast(Any, back), (q, k, v, None))
        pending.token = _Start.apply(pending, q, k, v)
        return pending

    def serve(self, pending: Pending) -> None:
        pending.token = _Serve.apply(pending, pending.token)

    def finish(self, pending: Pending) -> torch.Tensor:
        return _Finish.apply(pending, pending.token, *pending.inputs)


class Computed(torch.autograd.Function):
    """Something linear: `about` is (kind, row)."""

    @staticmethod
    def forward(ctx: Any, notes: list[Note], about: tuple[str, int, int], num_outputs: int,
                *inputs: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        ctx.notes, ctx.about, ctx.num_inputs = notes, about, len(inputs)
        notes.append(Note("linear", (*about, False)))
        outputs = tuple(torch.zeros(1) for _ in range(num_outputs))
        return outputs if num_outputs > 1 else outputs[0]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.notes.append(Note("linear", (*ctx.about, True)))
        return None, None, None, *(torch.zeros(1) for _ in range(ctx.num_inputs))


class Stage:
    """The parts of one rank's stage; a row is as many rows of one number as it has tokens."""

    shapes = None

    def __init__(self, notes: list[Note], attention: Attention, step: StepPlan, stage: int, data: int) -> None:
        self.notes, self.attention, self.step, self.data = notes, attention, step, data
        self.last = len(step.layers) - 1
        self.turn: Counter[int] = Counter()

    def num_layers(self, part: int) -> int:
        return self.step.layers[part]

    def activations(self, micro_batch: int) -> list[torch.Size]:
        return [torch.Size((1,))] * self.step.num_nano_batches

    def hidden(self, micro_batch: int) -> list[torch.Size]:
        return [torch.Size((int(layout.tokens_per_rank()[self.data]), 1))
                for layout in self.step.micro_batches[micro_batch].layouts]

    def empty(self) -> torch.Tensor:
        return torch.zeros(1)

    def backward(self, part: int, micro_batch: int, outputs: list[torch.Tensor], gradients: list[torch.Tensor] | None,
                 *, last: bool, apart: bool) -> None:
        torch.autograd.backward(outputs, gradients)

    def weigh(self, part: int, micro_batch: int, segment: int, *, last: bool) -> None:
        kind = "first" if segment == 0 else "last" if segment == self.step.layers[part] else "middle"
        for row in range(self.step.num_nano_batches):
            self.notes.append(Note("linear", (kind, micro_batch, row, "weights")))

    def finish(self) -> None:
        pass

    def head(self, micro_batch: int, hidden: torch.Tensor, begin: int) -> torch.Tensor:
        row = int(begin >= self.hidden(micro_batch)[0][0])
        self.notes.append(Note("linear", ("spread", micro_batch, row, "head")))
        return torch.zeros_like(hidden)

    def forward(self, part: int, micro_batch: int, received: list[Any], send: Callable[..., torch.Tensor],
                plans: tuple[tuple[Plan, ...], ...], backward_plans: tuple[tuple[Plan, ...], ...]
                ) -> list[torch.Tensor]:
        rows = range(self.step.num_nano_batches)
        has_loss = part == self.last and not self.step.ticks.spreads_head
        shapes = self.hidden(micro_batch)
        inputs = [(row, torch.zeros(1, requires_grad=True) if part == 0 else received[row]) for row in rows]

        def segment(kind: str, num_outputs: int) -> Callable[..., Any]:
            return lambda x, *rest: Computed.apply(self.notes, (kind, micro_batch, self.row()), num_outputs, x,
                                                   *(one for one in rest if isinstance(one, torch.Tensor)))

        first, last = segment("first", 4), segment("last", 1)

        def arrived(x: Any, rotary: None) -> Any:
            return first(x if part == 0 else x.wait(), rotary)

        def passed_on(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
            row, y = self.row(), last(x, out)
            return y if has_loss else send(y.expand(shapes[row]) if part == self.last else y)

        middle = [segment("middle", 4)] * (self.step.layers[part] - 1)
        segments: list[Callable[..., Any]] = [arrived, *middle, passed_on]
        self.turn = Counter()
        states = forward_segments([self.numbered(at, one) for at, one in enumerate(segments)],
                                  [(x,) for _, x in inputs], [None for _ in rows], plans, cast(Any, self.attention),
                                  backward_plans)
        if not has_loss:
            return states
        losses = [Computed.apply(self.notes, ("head", micro_batch, row), 1, x) for row, x in enumerate(states)]
        return [torch.stack(losses).sum()]

    def numbered(self, at: int, segment: Callable[..., Any]) -> Callable[..., torch.Tensor | tuple[torch.Tensor, ...]]:
        def run(*arguments: Any) -> torch.Tensor | tuple[torch.Tensor, ...]:
            self.row = lambda: self.turn[at]
            result = segment(*arguments)
            self.turn[at] += 1
            return result
        return run


class Handle:
    def __init__(self, notes: list[Note], what: str, about: tuple[int, int, int], tensor: torch.Tensor) -> None:
        self.notes, self.note, self.tensor = notes, Note(what, about), tensor

    def wait(self) -> torch.Tensor:
        self.notes.append(self.note)
        return self.tensor


class Neighbours:
    def __init__(self, notes: list[Note], stage: int, num_stages: int) -> None:
        self.notes, self.stage, self.num_stages = notes, stage, num_stages
        self.counts: Counter[tuple[int, int]] = Counter()

    def send(self, tensor: torch.Tensor, stage: int) -> Handle:
        return self._passed("send", "sent", (self.stage, stage), tensor)

    def receive(self, shape: torch.Size, like: torch.Tensor, stage: int) -> Handle:
        return self._passed("post", "received", (stage, self.stage), torch.zeros(shape))

    def _passed(self, now: str, later: str, way: tuple[int, int], tensor: torch.Tensor) -> Handle:
        message = (*way, self.counts[way])
        self.counts[way] += 1
        self.notes.append(Note(now, message))
        return Handle(self.notes, later, message, tensor)


def noted(step: StepPlan) -> list[list[Note]]:
    """[ranks] what the runtime does, in order."""
    found = []
    for rank in range(step.num_stages * step.num_data):
        notes: list[Note] = []
        stage = rank // step.num_data
        attention = Attention(notes)
        parts: tuple[Any, ...] = (Stage(notes, attention, step, stage, rank % step.num_data), attention,
                                  Neighbours(notes, stage, step.num_stages))
        Pipeline(*parts).step(step.ticks, step.plans_of(stage))
        found.append(notes)
    return found


Computing = tuple[float, float, str]  # start, stop, lane


def joined(spans: list[Computing]) -> list[tuple[float, float]]:
    """In order, attention by itself, and linear work without gaps as one: pieces of a weight unit may be any."""
    found: list[tuple[float, float]] = []
    before = ""
    for start, stop, lane in sorted(spans):
        if lane == before == "linear" and start <= found[-1][1] * (1 + 1e-12):
            found[-1] = found[-1][0], stop
        else:
            found.append((start, stop))
        before = lane
    return found


WAITS = {Phase.SERVE: Phase.DISPATCH, Phase.COMBINE: Phase.SERVE}


class Timed:
    """The notes of all ranks on clocks of their own."""

    def __init__(self, step: StepPlan, costs: Costs, notes: list[list[Note]]) -> None:
        self.step, self.costs, self.notes = step, costs, notes
        self.linear: dict[tuple[Any, ...], np.ndarray] = {}
        for number, micro_batch in enumerate(step.micro_batches):
            for row, layout in enumerate(micro_batch.layouts):
                tokens = layout.tokens_per_rank().astype(float)
                splits = step.ticks.splits
                for backward in (False, True, "weights"):
                    before, behind = costs.segment_seconds(tokens, bool(backward),
                                                           backward == "weights" if splits else None)
                    for kind, seconds in (("first", before), ("middle", before + behind), ("last", behind),
                                          ("head", costs.head_seconds(tokens, bool(backward)))):
                        self.linear[kind, number, row, backward] = seconds
                both = [costs.head_seconds(tokens / step.num_stages, backward) for backward in (False, True)]
                self.linear["spread", number, row, "head"] = both[0] + both[1]
        self.ends: list[list[float]] = [[] for _ in notes]       # [ranks][notes]
        self.spans: list[list[Computing]] = [[] for _ in notes]  # [ranks] of what computes
        self.done: dict[tuple[Any, Any, int], float] = {}        # (what, about, nth or message) -> end

    def run(self) -> Timed:
        counts: list[Counter[Any]] = [Counter() for _ in self.notes]
        moved = True
        while moved:
            moved = False
            for rank, notes in enumerate(self.notes):
                while len(self.ends[rank]) < len(notes) and self._take(rank, notes[len(self.ends[rank])], counts[rank]):
                    moved = True
        assert all(len(ends) == len(notes) for ends, notes in zip(self.ends, self.notes, strict=True)), "stuck"
        return self

    def _take(self, rank: int, note: Note, counts: Counter[Any]) -> bool:
        now = self.ends[rank][-1] if self.ends[rank] else 0.0
        data, first = rank % self.step.num_data, 0 if self.step.is_shared else rank - rank % self.step.num_data
        what, about = note
        needs: list[tuple[Any, Any, int]] = []
        key: tuple[Any, Any, int] | None = None
        seconds = 0.0
        if what == "linear":
            seconds = float(self.linear[about][data])
        elif what in ("send", "post"):
            key = what, about, data
        elif what in ("sent", "received"):
            needs = [("send", about, data), ("post", about, data)]
        else:
            assert isinstance(what, tuple)
            nth, (phase, backward) = counts[what], what
            key = what, nth, rank
            if phase is Phase.SERVE:
                work = server_work(about.tasks, about.num_servers, self.costs.attention, backward)
                seconds = float(work[rank - first])
            if phase in WAITS:
                needs = [((WAITS[phase], backward), nth, first + other)
                         for other in self._senders(about, rank - first, *what)]
        if any(need not in self.done for need in needs):
            return False
        start = max([now, *(self.done[need] for need in needs)])
        self.ends[rank].append(start + seconds)
        if seconds > 0:
            self.spans[rank].append((start, start + seconds, "linear" if what == "linear" else "attention"))
        if key is not None:
            counts[what] += 1
            self.done[key] = start + seconds
        return True

    def _senders(self, plan: Plan, rank: int, phase: Phase, backward: bool) -> set[int]:
        moved = plan.traffic()
        ways = [(moved.q_home, moved.q_server), (moved.kv_home, moved.kv_server)]
        if phase is Phase.SERVE:
            return {int(home) for homes, servers in ways for home, server in zip(homes, servers, strict=True)
                    if server == rank}
        back = ways if backward else ways[:1]                    # forward only outputs come back
        return {int(server) for homes, servers in back for home, server in zip(homes, servers, strict=True)
                if home == rank}


@st.composite
def steps(draw: st.DrawFn) -> StepPlan:
    num_stages, chunks = draw(st.integers(1, 3)), draw(st.integers(0, 3))
    layers = draw(st.lists(st.integers(1, 3), min_size=num_stages, max_size=num_stages))
    num_data, tokens = draw(st.integers(1, 3)), draw(st.sampled_from([128, 600]))
    documents = [random_lengths(draw(st.integers(0, 2**32)), num_data * tokens) for _ in range(draw(st.integers(1, 4)))]
    if draw(st.integers(0, 3)) == 0:
        return at_home_step(documents, MODEL, num_data=num_data, layers=layers)
    order = f"interleaved_{chunks}" if chunks and num_stages > 1 else "same_phase"
    ticks = order_named(order, num_stages, len(documents))
    if order != "same_phase":
        layers = [draw(st.integers(1, 2))] * ticks.num_parts
    return plan_step(documents, MODEL, num_data=num_data, layers=layers, ticks=ticks,
                     ping_pong=draw(st.booleans()), placement=draw(st.sampled_from(["given", "balanced"])),
                     tolerance=draw(st.sampled_from([0.0, 0.05, 0.5])),
                     cost=draw(st.sampled_from([None, COSTS.attention])))


SENDS_BEFORE_SERVING = plan_step(  # a stage of one layer sends its activations on, then serves a stage of two
    [np.array([285, 2, 97]), np.array([4, 1, 1, 126, 228, 24])], MODEL, num_data=3, layers=[1, 2, 1], ping_pong=False,
    placement="given", tolerance=0.0)


@settings(max_examples=40, deadline=None)
@given(steps())
@example(SENDS_BEFORE_SERVING)
def test_spans_are_those_of_the_runtimes_own_order(step: StepPlan) -> None:
    timed = Timed(step, COSTS, noted(step)).run()
    found = execute(step, COSTS, record=True)
    for trace, spans in zip(found.traces, timed.spans, strict=True):
        computed = [(span.start_seconds, span.stop_seconds, span.lane) for span in trace.spans
                    if span.lane in ("linear", "attention")]
        np.testing.assert_allclose(joined(computed), joined(spans), rtol=1e-9, atol=1e-12)
    of_stages = np.bincount(step.ticks.stage_of, weights=step.layers)
    optimizer = COSTS.optimizer_seconds(of_stages, step.num_data).max()
    assert found.seconds == pytest.approx(max(ends[-1] for ends in timed.ends) + optimizer)
