"""Stages on real ranks over gloo: the losses and gradients of one process, level ticks, and an end when one dies."""

import os
import time
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from distca.kernels import dense_attention
from distca.models import MODELS
from distca.planning.plan import Plan, max_over_mean
from distca.planning.schedule import layers_of_stages
from distca.planning.step import StepPlan
from distca.runtime.attention import CoreAttention
from distca.runtime.pipeline import Pipeline, Send
from distca.runtime.transport import Handle
from distca.runtime.transport.c10d import C10dTransport
from distca.spec import ModelShape
from distca.train.batches import StageWork, step_plan
from distca.train.groups import set_timeouts
from distca.train.model.build import connect, stage_of
from distca.train.model.decoder import Decoder
from distca.train.model.loss import chunked_cross_entropy
from distca.train.model.parallel import parallelize
from distca.train.model.shape import DecoderShape
from distca.train.model.weight_gradients import WeightGradients
from distca.train.settings import Settings
from distca.train.settings.schedule import pipeline_ticks
from tests.support.attention import gradient
from tests.support.batches import batch_of, document_columns
from tests.support.decoders import hidden_of
from tests.support.plans import random_lengths
from tests.support.processes import run_processes

SHAPE = DecoderShape(ModelShape("small", 11, 24, 4, 2, 8, 40, 61))  # 11: no number of stages here divides the layers
TOKENS = 288                                                     # of a data rank in a micro-batch
PATIENT: dict[str, Any] = {"timeout_seconds": 120.0, "deadline_seconds": 280.0}  # for machines that others use too
MESHES = [(2, 1), (2, 2), (4, 1), (3, 1)]                        # stages × data ranks
LOCAL = ("home", "per_document_cp")
WITHIN = ("1f1b", "zb_h1", "interleaved_1f1b_2")                 # schedules with attention within stages
TOLERANCES = {"float32": 1e-5, "float64": 1e-10}


def settings_for(num_stages: int, way: str, ping_pong: bool, num_micro_batches: int = 1) -> Settings:
    """`way` is a schedule of the shared pool, or another mode of attention."""
    how = {"attention.mode": way} if way in LOCAL else {"parallel.schedule": way}
    return Settings().with_values({"parallel.pipeline": num_stages, "batch.ping_pong": ping_pong,
                                   "batch.micro_batches": num_micro_batches, **how})


def planned(num_stages: int, num_data: int, num_micro_batches: int, way: str, ping_pong: bool) -> StepPlan:
    lengths = [random_lengths(10 * num_micro_batches + number, num_data * TOKENS)
               for number in range(num_micro_batches)]
    return step_plan(lengths, settings_for(num_stages, way, ping_pong, num_micro_batches), SHAPE.model, num_data)


def decoder(dtype: torch.dtype) -> Decoder:
    """Weights large enough for attention to be anything but uniform."""
    whole = Decoder(SHAPE, generator=torch.Generator().manual_seed(3)).to(dtype)
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.mul_(10.0 if parameter.ndim > 1 else 1.0)
    return whole


def in_one_process(plan: StepPlan) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss and the gradient of every parameter by the formula, in float64."""
    whole, losses = decoder(torch.float64), []
    for number, micro_batch in enumerate(plan.micro_batches):
        lengths = micro_batch.lengths.tolist()
        tokens, labels, positions = document_columns(lengths, SHAPE.model.vocab, number)
        hidden = hidden_of(whole, tokens, positions, partial(dense_attention, lengths=lengths))
        losses.append(chunked_cross_entropy(hidden, whole.head_weight, labels, 50)[0] / plan.num_labels)
    loss = torch.stack(losses).sum()
    loss.backward()
    return loss.item(), {name: gradient(parameter) for name, parameter in whole.named_parameters()}


def whole_gradient(parameter: torch.Tensor) -> torch.Tensor:
    shard = gradient(parameter)
    return shard.full_tensor() if isinstance(shard, DTensor) else shard


class Rank:
    """What a training rank makes of its place among stages and data ranks."""

    def __init__(self, num_stages: int, num_data: int, timeout_seconds: float = PATIENT["timeout_seconds"]) -> None:
        timeout = timedelta(seconds=timeout_seconds)
        self.mesh = init_device_mesh("cpu", (num_stages, num_data, 1), mesh_dim_names=("pipeline", "data", "tensor"))
        self.pool = self.mesh["pipeline", "data"]._flatten("pool").get_group()
        set_timeouts(timeout)
        self.neighbours = connect(self.mesh["pipeline"], timeout)
        self.num_stages, self.num_data = num_stages, num_data
        self.stage, self.data = self.mesh["pipeline"].get_local_rank(), self.mesh["data"].get_local_rank()

    def work(self, way: str, dtype: torch.dtype, *, fsdp: bool = True, recompute: bool = False,
             make: type[StageWork] = StageWork) -> StageWork:
        ticks = pipeline_ticks(settings_for(self.num_stages, way, True, 2), SHAPE.model)
        part = stage_of(decoder(dtype), self.stage, layers_of_stages(SHAPE.model.num_layers, ticks.num_parts),
                        ticks.stage_of, ticks.spreads_head)
        parallelize(part, self.mesh, fsdp=fsdp, dtype=dtype, recompute="full" if recompute else "none",
                    homes=self.pool if ticks.spreads_head else None)
        attention = CoreAttention(self.mesh["data"].get_group() if way in (*LOCAL, *WITHIN) else self.pool)
        return make(part, attention, tensor=1, dtype=dtype, device=torch.device("cpu"), loss_chunk_tokens=50,
                    gradients=WeightGradients(part) if ticks.splits or ticks.spreads_head else None,
                    spreads_head=ticks.spreads_head)

    def step(self, work: StageWork, plan: StepPlan) -> None:
        work.begin(batch_of(plan, self.data, SHAPE.model.vocab))
        Pipeline(work, work.attention, self.neighbours).step(plan.ticks, plan.plans_of(self.stage))


def on_ranks(transport: C10dTransport, num_stages: int, num_data: int, cases: list[tuple[Any, ...]],
             folder: str) -> list[tuple[float, dict[str, float]]]:
    """For every case how far this rank is from one process: the loss of all ranks, its stage's gradients by name."""
    rank, works, apart = Rank(num_stages, num_data), {}, []
    for number, (num_micro_batches, way, ping_pong, dtype, *options) in enumerate(cases):
        key = way, dtype, *options
        if key not in works:
            works[key] = rank.work(way, getattr(torch, dtype), **dict(options))
        work, plan = works[key], planned(num_stages, num_data, num_micro_batches, way, ping_pong)
        rank.step(work, plan)
        loss = work.total.clone()
        dist.all_reduce(loss)
        want_loss, want = torch.load(f"{folder}/{number}")
        gradients = {name: float((whole_gradient(parameter) - want[name]).abs().max())
                     for name, parameter in work.decoder.named_parameters()}
        apart.append((abs(loss.item() / plan.num_labels - want_loss), gradients))
        work.decoder.zero_grad()
    return apart


def check(num_stages: int, num_data: int, cases: list[tuple[Any, ...]], folder: Path) -> None:
    names: set[str] = set()
    for number, (num_micro_batches, way, ping_pong, *_) in enumerate(cases):
        loss, gradients = in_one_process(planned(num_stages, num_data, num_micro_batches, way, ping_pong))
        assert all(grad.abs().max() > 1e-3 for grad in gradients.values())
        torch.save((loss, gradients), folder / str(number))
        names |= gradients.keys()
    outcomes = run_processes(num_stages * num_data, on_ranks, num_stages, num_data, cases, str(folder), **PATIENT)
    assert [outcome.error for outcome in outcomes] == [None] * len(outcomes)
    for number, case in enumerate(cases):
        losses, apart = zip(*(outcome.value[number] for outcome in outcomes), strict=True)
        assert max(losses) < TOLERANCES[case[3]], case
        assert max(max(of_stage.values()) for of_stage in apart) < TOLERANCES[case[3]], (case, apart)
        assert {name for of_stage in apart for name in of_stage} == names


@pytest.mark.multiprocess
@pytest.mark.parametrize(("num_stages", "num_data"), MESHES)
def test_losses_and_gradients_are_those_of_one_process(num_stages: int, num_data: int, tmp_path: Path) -> None:
    most = 2 * num_stages + 1
    check(num_stages, num_data, [
        (1, "interleaved_2", True, "float64"),
        (num_stages, "interleaved_1", False, "float64"),
        (most, "interleaved_2", True, "float32"),
        (most, "same_phase", True, "float64"),
        (num_stages, "1f1b", True, "float64"),
        (most, "zb_h1", True, "float64"),
        (1, "home", True, "float32"),
        (most, "home", True, "float64"),
    ], tmp_path)


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize(("num_stages", "num_data"), MESHES)
def test_every_number_of_micro_batches(num_stages: int, num_data: int, tmp_path: Path) -> None:
    ways = (("interleaved_2", True), ("interleaved_1", False), ("same_phase", True), ("same_phase", False),
            ("1f1b", True), ("zb_h1", True), ("interleaved_1f1b_2", False), ("home", True), ("per_document_cp", False))
    check(num_stages, num_data, [(number, *way, dtype) for dtype in TOLERANCES for way in ways
                                 for number in range(1 + (way[0] in WITHIN), 2 * num_stages + 2)], tmp_path)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_whole_parameters_and_replay_make_no_difference(tmp_path: Path) -> None:
    check(2, 2, [(number, way, True, "float64", ("fsdp", fsdp), ("recompute", recompute)) for number in (1, 4)
                 for way in ("interleaved_2", "same_phase", "home") for fsdp in (True, False)
                 for recompute in (True, False)], tmp_path)


class Vanishing(StageWork):
    """A stage that is gone in the middle of micro-batch 1: between two steps of attention, or of its backward."""

    how: tuple[str, str]                                         # dies or hangs, in forward or backward

    def forward(self, part: int, micro_batch: int, received: Sequence[Handle], send: Send,
                plans: Sequence[Sequence[Plan]], backward_plans: Sequence[Sequence[Plan]]) -> list[torch.Tensor]:
        how, where = self.how
        if micro_batch == 1 and where == "forward":
            self.attention.serve = lambda pending: vanish(how)  # type: ignore[method-assign]
        outputs = super().forward(part, micro_batch, received, send, plans, backward_plans)
        if micro_batch == 1:
            outputs[0].register_hook(lambda gradient: vanish(how))
        return outputs


def vanish(how: str) -> None:
    if how == "dies":
        os._exit(17)
    time.sleep(3600)


def lose_a_stage(transport: C10dTransport, num_stages: int, way: str, victim: int, how: tuple[str, str],
                 timeout_seconds: float) -> None:
    rank = Rank(num_stages, 1, timeout_seconds)
    work = rank.work(way, torch.float32, make=Vanishing if rank.stage == victim else StageWork)
    if isinstance(work, Vanishing):
        work.how = how
    plan = planned(num_stages, 1, 3, way, True)
    rank.step(work, plan)


@pytest.mark.multiprocess
@pytest.mark.parametrize(("way", "victim", "how"), [
    ("interleaved_2", 0, ("dies", "backward")),
    ("home", 2, ("dies", "forward")),
    ("home", 1, ("hangs", "backward")),
    pytest.param("interleaved_1", 1, ("hangs", "forward"), marks=pytest.mark.slow),
    pytest.param("same_phase", 2, ("dies", "forward"), marks=pytest.mark.slow),
    pytest.param("home", 0, ("dies", "forward"), marks=pytest.mark.slow),
])
def test_a_stage_that_vanishes_ends_the_others(way: str, victim: int, how: tuple[str, str]) -> None:
    timeout_seconds = 4.0 if how[0] == "hangs" else 60.0
    outcomes = run_processes(3, lose_a_stage, 3, way, victim, how, timeout_seconds, timeout_seconds=60.0,
                             deadline_seconds=50.0, lost=victim if how[0] == "hangs" else None)
    assert outcomes[victim].exit_code == (17 if how[0] == "dies" else None)
    for stage, outcome in enumerate(outcomes):
        if stage != victim:
            assert outcome.error is not None and outcome.error.startswith("TransportError: "), outcome
            assert "died" in outcome.error and "restart from the last checkpoint" in outcome.error
            assert (f"stage {stage} of 3" if way == "home" else f"rank {stage} of 3") in outcome.error
            assert outcome.seconds < 30.0                        # of starting, stepping and noticing


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**32), st.integers(2, 4), st.integers(1, 2), st.integers(1, 5), st.booleans(),
       st.sampled_from([0.02, 0.1]), st.sampled_from(["same_phase", "interleaved_1", "interleaved_4"]))
def test_every_tick_of_a_step_is_level(seed: int, num_stages: int, num_data: int, num_micro_batches: int,
                                       ping_pong: bool, tolerance: float, schedule: str) -> None:
    lengths = [random_lengths(seed + number, num_data * 16_384) for number in range(num_micro_batches)]
    chosen = settings_for(num_stages, schedule, ping_pong, num_micro_batches).with_values(
        {"attention.tolerance": tolerance})
    plan = step_plan(lengths, chosen, MODELS["llama3-8b"], num_data)
    plan.ticks.validate()
    plans = [of_depth for rows in plan.plans_of(0) for row in rows for of_depth in row]
    assert (plan.calls == plan.calls[0]).all()
    level = [max_over_mean(one.work(), one.speed) for one in plans if one.limit is None]
    assert max(level, default=1.0) <= 1.0 + tolerance + 1e-9
    if max(documents.max() for documents in lengths) >= 4096:    # long enough to be cut
        assert level and plan.summary().served_in_bubbles > 0.0
    local = settings_for(num_stages, "home", ping_pong, num_micro_batches)
    at_home = step_plan(lengths, local, MODELS["llama3-8b"], num_data).summary()
    assert at_home.served_in_bubbles == 0.0 and plan.summary().work_after <= at_home.work_after + 1e-9
