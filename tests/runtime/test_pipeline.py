"""A pipeline on fake ranks: whatever its stages, ticks and documents, the losses and gradients of one process."""

import weakref
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from distca.baselines import at_home_step, per_document_cp_step
from distca.kernels import dense_attention
from distca.planning.choose import distinct_calls, plan_step
from distca.planning.orders import order_named, same_phase_ticks
from distca.planning.plan import Plan
from distca.planning.schedule import IDLE, Ticks
from distca.planning.step import StepPlan
from distca.runtime.attention import CoreAttention
from distca.runtime.pipeline import Pipeline, Send
from distca.runtime.pool.transport import PoolTransport
from distca.runtime.recorder import Recorder
from distca.runtime.transport import Handle, LoopbackPointToPoint, LoopbackTransport, LoopbackWorld
from distca.spec import ModelShape
from distca.train.batches import StageWork
from distca.train.model.build import stage_of
from distca.train.model.decoder import Decoder, Segment
from distca.train.model.loss import chunked_cross_entropy
from distca.train.model.shape import DecoderShape
from distca.train.model.weight_gradients import WeightGradients
from tests.support.attention import gradient
from tests.support.batches import batch_of, document_columns
from tests.support.decoders import hidden_of
from tests.support.plans import random_lengths, scattered_plan
from tests.support.pools import server_pools

SHAPE = DecoderShape(ModelShape("small", 1, 16, 4, 2, 4, 24, 31))
CPU = torch.device("cpu")
CHUNK = 7                                                        # tokens of the loss
LOCAL = ("home", "per_document_cp", "within_stages")             # with 1F1B, among a stage's data ranks
PLANNINGS = ("balanced", "scattered", *LOCAL)


@dataclass(frozen=True)
class Step:
    """What all ranks run together: layers of each part, lengths of the documents, and who attends."""

    layers: tuple[int, ...]
    num_data: int
    documents: tuple[tuple[int, ...], ...]                       # [micro-batch] lengths
    ping_pong: bool = True
    placement: str = "given"
    planning: str = "balanced"
    num_dedicated: int = 0
    num_steps: int = 1
    recompute: bool = False
    chunks: int = 0                                              # parts a stage of an interleaved order; 0: same phase
    tied: bool = False
    order: str = ""                                              # by name, with `chunks` parts a stage

    @property
    def num_stages(self) -> int:
        return len(self.layers) // max(1, self.chunks)

    @property
    def ticks(self) -> Ticks:
        order = f"interleaved_{self.chunks}" if self.chunks else "1f1b" if self.planning in LOCAL else "same_phase"
        return order_named(self.order or order, self.num_stages, len(self.documents))

    @property
    def num_ranks(self) -> int:
        return self.num_stages * self.num_data

    @property
    def model(self) -> ModelShape:
        return replace(SHAPE.model, num_layers=sum(self.layers))

    @property
    def num_labels(self) -> int:
        return sum(length - 1 for lengths in self.documents for length in lengths)

    def decoder(self) -> Decoder:
        """The same wherever it is made, with weights large enough for attention to be anything but uniform."""
        shape = replace(SHAPE, model=self.model, tied=self.tied)
        whole = Decoder(shape, generator=torch.Generator().manual_seed(3)).double()
        for segment in whole.segments:
            assert isinstance(segment, Segment)
            segment.recompute = "full" if self.recompute else "none"
        with torch.no_grad():
            for parameter in whole.parameters():
                parameter.mul_(10.0 if parameter.ndim > 1 else 1.0)
        return whole

    def plan(self) -> StepPlan:
        lengths = [np.array(lengths) for lengths in self.documents]
        options: dict[str, Any] = {"num_data": self.num_data, "layers": self.layers}
        if self.planning == "home":
            return at_home_step(lengths, self.model, **options)
        if self.planning == "per_document_cp":
            return per_document_cp_step(lengths, self.model, **options)
        num_servers = self.num_ranks + self.num_dedicated
        plan = plan_step(lengths, self.model, **options, ping_pong=self.ping_pong, placement=self.placement,
                         speed=np.ones(num_servers), ticks=self.ticks)
        if self.planning != "scattered":
            return plan
        seeds = count()
        calls, number = distinct_calls(plan.ticks, plan.micro_batches, self.layers, phases_differ=False)
        return replace(plan, calls=number, plans=tuple(
            scattered_plan(next(seeds), call.layout, num_servers, self.model) for call in calls))


class Unsharded(WeightGradients):
    """Weight gradients of a stage that is not sharded: they are added where autograd adds its own."""

    def total(self, module: torch.nn.Module) -> torch.Tensor:
        weight = module.weight
        assert isinstance(weight, torch.nn.Parameter)
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
        return weight.grad

    def deliver(self) -> None:
        assert self._unit is None

    gather_head = release_head = deliver


class Work(StageWork):
    """A stage that is not sharded, and notes what became of each micro-batch."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.losses: defaultdict[int, float] = defaultdict(float)
        self.finals: list[bool] = []

    def forward(self, part: int, micro_batch: int, received: Sequence[Handle], send: Send,
                plans: Sequence[Sequence[Plan]], backward_plans: Sequence[Sequence[Plan]]) -> list[torch.Tensor]:
        outputs = super().forward(part, micro_batch, received, send, plans, backward_plans)
        if self.decoder.parts[part][-1].norm is not None and not self.spreads_head:
            self.losses[micro_batch] += outputs[0].item()
        return outputs

    def head(self, micro_batch: int, hidden: torch.Tensor, begin: int) -> torch.Tensor | None:
        before = float(self.total)
        gradient = super().head(micro_batch, hidden, begin)
        self.losses[micro_batch] += (float(self.total) - before) / self.num_labels
        return gradient

    def accumulate(self, last: bool) -> nullcontext[None]:
        self.finals.append(last)
        return nullcontext()


def on_fake_ranks(step: Step, make: type[Work] = Work, recorders: list[Recorder] | None = None,
                  timeout_seconds: float = 20.0) -> list[list[Work]]:
    """Every training rank's work after the step's ticks, [stage][data]."""
    plan = step.plan()
    world = LoopbackWorld(step.num_ranks, timeout_seconds)
    stages = [LoopbackWorld(step.num_data, timeout_seconds) for _ in range(step.num_stages)]

    def body(transport: LoopbackTransport) -> Any:
        stage, data = divmod(transport.rank, step.num_data)
        attention = CoreAttention(
            transport=PoolTransport(transport, pools[transport.rank]) if step.num_dedicated else
            transport if plan.is_shared else LoopbackTransport(stages[stage], data),
            recorder=None if recorders is None else recorders[transport.rank])
        ticks = plan.ticks
        part = stage_of(step.decoder(), stage, step.layers, ticks.stage_of, ticks.spreads_head)
        work = make(part, attention, tensor=1, dtype=torch.float64, device=CPU, loss_chunk_tokens=CHUNK,
                    gradients=Unsharded(part) if ticks.splits or ticks.spreads_head else None,
                    spreads_head=ticks.spreads_head)
        neighbours = LoopbackPointToPoint(world, range(data, step.num_ranks, step.num_data), stage)
        for _ in range(step.num_steps):
            work.begin(batch_of(plan, data, SHAPE.model.vocab))
            Pipeline(work, attention, neighbours).step(plan.ticks, plan.plans_of(stage))
        return work

    with ExitStack() as stack:
        pools = stack.enter_context(server_pools(step.num_ranks, step.num_dedicated)) if step.num_dedicated else []
        works = world.run(body)
    assert not any(world.passed.values()), "all that was sent was received"
    return [works[first:first + step.num_data] for first in range(0, step.num_ranks, step.num_data)]


def in_one_process(step: Step) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The loss of each micro-batch and the gradient of every parameter, by the formula."""
    whole = step.decoder()
    losses = []
    for number, lengths in enumerate(step.documents):
        tokens, labels, positions = document_columns(lengths, SHAPE.model.vocab, number)
        hidden = hidden_of(whole, tokens, positions, partial(dense_attention, lengths=lengths))
        total = chunked_cross_entropy(hidden, whole.head_weight, labels, CHUNK)[0] / step.num_labels
        total.backward()
        losses.append(total.item())
    return losses, {name: gradient(parameter) for name, parameter in whole.named_parameters()}


def check(step: Step, works: list[list[Work]]) -> None:
    losses, gradients = in_one_process(step)
    everyone = [work for stage in works for work in stage]
    for number, loss in enumerate(losses):
        assert sum(work.losses[number] for work in everyone) == pytest.approx(step.num_steps * loss, abs=1e-10)
    assert sum(float(work.total) for work in everyone) / step.num_labels == pytest.approx(sum(losses), abs=1e-10)
    held: defaultdict[str, list[torch.Tensor]] = defaultdict(list)  # a head on all stages is held by all of them
    for work in everyone:
        for name, parameter in work.decoder.named_parameters():
            held[name].append(gradient(parameter))
    assert sorted(held) == sorted(gradients)
    for name, parts in held.items():
        torch.testing.assert_close(torch.stack(parts).sum(0), step.num_steps * gradients[name], rtol=1e-10, atol=1e-10)
    num_units = len(step.documents) * max(1, step.chunks)
    ticks = step.plan().ticks
    finals = [*[False] * (num_units - 1), not (ticks.splits or ticks.spreads_head)] * step.num_steps
    assert all(work.finals == finals for work in everyone)


@st.composite
def steps(draw: st.DrawFn) -> Step:
    num_stages = draw(st.integers(1, 4))
    planning = draw(st.sampled_from(PLANNINGS))
    chunks = 0 if planning in LOCAL or num_stages == 1 else draw(st.integers(0, 3))
    num_parts = num_stages * max(1, chunks)
    layers = tuple(draw(st.lists(st.integers(1, 3 - (chunks > 1)), min_size=num_parts, max_size=num_parts)))
    num_data = draw(st.integers(1, 4 if num_stages == 1 else 2))
    num_micro_batches = draw(st.integers(1, 2 * num_stages + 1))
    num_tokens = st.sampled_from([2, 10, 20, 140])               # 140: longer than what balancing leaves whole
    documents = tuple(tuple(random_lengths(draw(st.integers(0, 2**32)), num_data * draw(num_tokens)).tolist())
                      for _ in range(num_micro_batches))
    num_dedicated = 0 if planning in LOCAL else draw(st.integers(0, 2))
    return Step(layers, num_data, documents, draw(st.booleans()), draw(st.sampled_from(["given", "balanced"])),
                planning, num_dedicated, recompute=draw(st.booleans()), chunks=chunks,
                tied=chunks > 0 and draw(st.booleans()))


FEW_LAYERS_FIRST = Step((1, 3, 2), 2, ((150, 1, 9, 20), (40, 7, 9)), True, "balanced", "scattered", 1)
DEEP = Step((2, 1, 1, 2), 1, tuple((length, 3, 1) for length in (200, 2, 4, 60, 2, 2, 34, 2, 10)))
ONE_DOCUMENT = Step((2,), 4, ((560,),))                          # pong reads keys of ping on every rank


@settings(max_examples=8, deadline=None)
@given(steps())
@example(FEW_LAYERS_FIRST)
@example(DEEP)
@example(replace(DEEP, planning="home"))
@example(replace(DEEP, planning="per_document_cp"))
@example(replace(DEEP, planning="within_stages", num_data=2, documents=((340, 60), (200, 100, 100), (3, 397))))
@example(replace(DEEP, chunks=2, num_steps=2))
@example(replace(DEEP, planning="within_stages", order="zb_h1", num_steps=2, recompute=True))
@example(replace(DEEP, planning="within_stages", order="interleaved_1f1b_2", chunks=2))
@example(replace(DEEP, chunks=2, recompute=True, tied=True, planning="scattered", num_dedicated=1))
@example(replace(DEEP, layers=(1, 2, 1, 2, 1, 1, 2, 1), chunks=4, tied=True, placement="balanced"))
@example(Step((1, 1), 2, ((3, 1),), planning="home"))            # one micro-batch: no tick mixes phases
@example(Step((1, 2), 1, ((30, 1, 1),) * 2, num_steps=3))
@example(ONE_DOCUMENT)
@example(replace(ONE_DOCUMENT, planning="scattered", num_dedicated=2, recompute=True))
@example(replace(ONE_DOCUMENT, placement="balanced", layers=(1, 2)))
@example(Step((1, 2, 1), 2, ((281, 7), (200, 2, 86)), placement="balanced", num_dedicated=1))
def test_losses_and_gradients_are_those_of_one_process(step: Step) -> None:
    assume(step.num_labels)
    plan = step.plan()
    if step.planning != "scattered":                             # whose cuts are nowhere near a tile
        plan.validate()
    if step in (ONE_DOCUMENT, FEW_LAYERS_FIRST):
        assert any(len(micro_batch.key_runs(1, 0)) for micro_batch in plan.micro_batches)
    check(step, on_fake_ranks(step))


@pytest.mark.parametrize("cut", range(1, 12))
def test_a_document_may_be_cut_between_ping_and_pong_anywhere(cut: int) -> None:
    """Two documents whose lengths decide where the longer one is cut; of three ranks some hold none of it."""
    step = Step((1,), 3, ((12 + cut, 12 - cut),))
    pong = step.plan().micro_batches[0].layouts[1]
    long, short = 12 + cut, 12 - cut
    is_lone = long**2 > 0.75 * (long**2 + short**2)              # then it is cut into halves of equal work, if they fit
    assert len(pong.key_only) and pong.key_only.stop.max() == (min(int(long * 0.5**0.5), 12) if is_lone else 12)
    check(step, on_fake_ranks(step))


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(steps())
def test_many_more(step: Step) -> None:
    assume(step.num_labels)
    check(step, on_fake_ranks(step))


@pytest.mark.slow
@pytest.mark.parametrize("num_stages", range(2, 7))
def test_every_order_is_exact(num_stages: int) -> None:
    """Up to 12 micro-batches and 3 parts a stage; one layer a part, one data rank."""
    for number in range(1, 13):
        documents = tuple((2 + 2 * (3 * at % 7), 5, 3) for at in range(number))  # even tokens: ping and pong
        for chunks in (0, 1, 2, 3):
            check(step := Step((1,) * num_stages * max(1, chunks), 1, documents, chunks=chunks), on_fake_ranks(step))
        for order, chunks in (("1f1b", 0), ("zb_h1", 0), ("interleaved_1f1b_2", 2)):
            step = Step((1,) * num_stages * max(1, chunks), 1, documents, planning="within_stages", order=order,
                        chunks=chunks)
            check(step, on_fake_ranks(step))


class Watched(Work):
    """Counts the micro-batches of which anything is kept: what backward needs, what came in, what went out."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.saved: Counter[int] = Counter()
        self.passed: dict[int, list[weakref.ref[torch.Tensor]]] = {}
        self.most_saved, self.most_passed = 0, 0

    def forward(self, part: int, micro_batch: int, received: Sequence[Handle], send: Send,
                plans: Sequence[Sequence[Plan]], backward_plans: Sequence[Sequence[Plan]]) -> list[torch.Tensor]:
        def keep(tensor: torch.Tensor) -> Box:
            box = Box(tensor)
            self.saved[micro_batch] += 1
            weakref.finalize(box, self.saved.subtract, {micro_batch: 1})
            self.most_saved = max(self.most_saved, sum(number > 0 for number in self.saved.values()))
            return box

        taken: list[weakref.ref[torch.Tensor]] = []
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda box: box.tensor):
            outputs = super().forward(part, micro_batch, [Taken(row, taken) for row in received], send, plans,
                                      backward_plans)
        self.passed[micro_batch] = [*taken, *(weakref.ref(output) for output in outputs)]
        alive = [any(tensor() is not None for tensor in tensors) for tensors in self.passed.values()]
        self.most_passed = max(self.most_passed, sum(alive))
        return outputs


class Taken:
    """A row that is noted when it is taken."""

    def __init__(self, row: Handle, taken: list[weakref.ref[torch.Tensor]]) -> None:
        self.row, self.taken = row, taken

    def wait(self) -> torch.Tensor:
        tensor = self.row.wait()
        self.taken.append(weakref.ref(tensor))
        return tensor


class Box:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


@pytest.mark.parametrize("planning", ["balanced", "home"])
@pytest.mark.parametrize("num_micro_batches", [2, 6])
def test_no_more_micro_batches_are_alive_than_the_ticks_say(planning: str, num_micro_batches: int) -> None:
    step = Step((1, 2, 1), 1, ((20, 4, 9, 1),) * num_micro_batches, planning=planning)
    works = on_fake_ranks(step, make=Watched)
    for (work,), most in zip(works, step.plan().ticks.peak_live().tolist(), strict=True):
        assert isinstance(work, Watched)
        assert work.most_saved == most                           # neither more nor, with so many, fewer
        assert work.most_passed == most
        assert not any(work.saved.values())


def test_a_trace_shows_every_tick_and_what_bubbles_served() -> None:
    step = Step((1, 2), 2, tuple((length, 4, 8) for length in (300, 8, 60)))
    recorders = [Recorder(CPU) for _ in range(step.num_ranks)]
    on_fake_ranks(step, recorders=recorders)
    plan = step.plan()
    ticks, plans = plan.ticks, plan.plans_of(0)
    assert plan.summary().served_in_bubbles > 0
    for rank, recorder in enumerate(recorders):
        spans = recorder.end_step(rank, 1).spans
        shown = [span for span in spans if span.lane in ("pipeline", "bubble")]
        assert len(shown) == ticks.num_ticks
        for tick, span in enumerate(shown):
            number, backward = int(ticks.micro_batch[tick, rank // 2]), ticks.phase(tick)
            way = "backward" if backward else "forward"
            lane, name = ("bubble", "bubble") if number == IDLE else ("pipeline", f"{way} {number}")
            assert (span.lane, span.name) == (lane, name)
            within = [other.name for other in spans if other.lane == "attention"
                      and span.start_seconds <= other.start_seconds <= other.stop_seconds <= span.stop_seconds]
            assert within == [f"attention {way}"] * 2 * len(plans[tick][0])  # rows × depths, wherever they are served


def test_a_stage_that_fails_ends_all_of_them() -> None:
    class Failing(Work):
        def loss(self, hidden: torch.Tensor, head_weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            if self.losses:
                raise ArithmeticError("the head fell off")
            return super().loss(hidden, head_weight, labels)

    for planning, chunks in (("balanced", 0), ("home", 0), ("balanced", 1)):
        with pytest.raises(ArithmeticError, match="the head fell off"):  # and not when others' waits end: a test's do
            on_fake_ranks(Step((1, 1, 1), 1, ((5, 3),) * 4, planning=planning, chunks=chunks), make=Failing,
                          timeout_seconds=1000.0)


def test_ticks_and_plans_that_do_not_fit_are_refused() -> None:
    plan = Step((1, 1), 1, ((5, 3),) * 2).plan()
    nothing: Any = None
    pipeline = Pipeline(nothing, nothing, LoopbackPointToPoint(LoopbackWorld(2), [0, 1], 0))
    with pytest.raises(ValueError, match="the ticks are for 3 stages but the pipeline has 2; make them with as many"):
        pipeline.step(same_phase_ticks(3, 2), plan.plans_of(0))
    with pytest.raises(ValueError, match="there are plans for 5 ticks of 6; plan every tick"):
        pipeline.step(plan.ticks, plan.plans_of(0)[1:])
