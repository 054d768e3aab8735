"""A decoder cut into stages is the whole decoder: in one process, on ranks with micro-batches in flight, on disk."""

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from distca.kernels import dense_attention
from distca.runtime.transport.c10d import C10dTransport
from distca.spec import ModelShape
from distca.train.checkpoint.checkpointer import Checkpointer
from distca.train.model.build import stage_of
from distca.train.model.decoder import Decoder, Segment, write_parameter
from distca.train.model.loss import chunked_cross_entropy
from distca.train.model.parallel import accumulating, clip_grad_norm, parallelize
from distca.train.model.shape import DecoderShape
from tests.support.attention import gradient
from tests.support.decoders import hidden_of
from tests.support.processes import run_processes, values

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
SHAPE = DecoderShape(ModelShape("small", 3, 24, 4, 2, 8, 40, 61))
PATIENT: dict[str, Any] = {"timeout_seconds": 120.0, "deadline_seconds": 240.0}  # for machines that others use too
CLIP = 0.05


def generator(seed: int = 3) -> Any:
    return torch.Generator().manual_seed(seed)


def with_layers(num_layers: int, tied: bool = False) -> DecoderShape:
    return replace(SHAPE, model=replace(SHAPE.model, num_layers=num_layers), tied=tied)


def through(part: Decoder, x: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """One row straight through a decoder or a stage of one."""
    positions = torch.cat([torch.arange(length) for length in lengths])
    return hidden_of(part, x, positions, lambda q, k, v: dense_attention(q, k, v, lengths))


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(1, 3), min_size=1, max_size=4), st.lists(st.integers(1, 6), min_size=1, max_size=3),
       st.booleans())
def test_stages_one_after_the_other_are_the_whole_decoder(layers: list[int], lengths: list[int],
                                                          recompute: bool) -> None:
    """Bit for bit: cut or not, the same operations on the same shapes make one graph."""
    whole = Decoder(with_layers(sum(layers)), generator=generator())
    stages = [stage_of(whole, stage, layers) for stage in range(len(layers))]
    assert [len(list(stage.segments)) for stage in stages] == [num + 1 for num in layers]
    names = [name for stage in stages for name, _ in stage.named_parameters()]
    assert sorted(names) == sorted(name for name, _ in whole.named_parameters())
    for stage in stages:
        assert all(parameter is whole.get_parameter(name) for name, parameter in stage.named_parameters())
        for segment in stage.segments:
            assert isinstance(segment, Segment)
            segment.recompute = "full" if recompute else "none"
    tokens = torch.randint(0, 61, (sum(lengths),), generator=generator())
    through(whole, tokens, lengths).square().sum().backward()
    expected = {name: gradient(parameter).clone() for name, parameter in whole.named_parameters()
                if name != "head.weight"}
    whole.zero_grad()
    x = tokens
    for stage in stages:
        x = stage(lambda part, x=x: through(part, x, lengths))
    assert torch.equal(x, through(whole, tokens, lengths))
    assert stages[-1].head_weight is whole.head_weight
    x.square().sum().backward()
    assert all(torch.equal(gradient(whole.get_parameter(name)), grad) for name, grad in expected.items())


def test_one_stage_is_the_decoder_and_only_the_last_has_the_head() -> None:
    tied = Decoder(with_layers(3, tied=True), device="meta")
    assert stage_of(tied, 0, (3,)) is tied
    with pytest.raises(AssertionError, match="this stage has no head"):
        _ = stage_of(Decoder(SHAPE, device="meta"), 0, (2, 1)).head_weight


def test_a_stage_without_memory_draws_the_whole_decoders_weights() -> None:
    """Bit for bit: it draws the other stages' too, into the same shapes."""
    whole = Decoder(SHAPE, generator=generator())
    stage = stage_of(Decoder(SHAPE, device="meta"), 1, (1, 1, 1))
    assert all(parameter.is_meta for parameter in stage.parameters())
    stage.to_empty(device="cpu").reset_parameters(generator())
    assert all(torch.equal(parameter, whole.get_parameter(name)) for name, parameter in stage.named_parameters())


@dataclass(frozen=True)
class Case:
    """A mesh of pipeline × data × tensor ranks; with pipeline 1 every rank runs both stages, one after the other."""

    pipeline: int
    data: int
    tensor: int = 1
    fsdp: bool = True
    recompute: bool = False
    dtype: torch.dtype = torch.float64


LAYERS = (2, 1)
CASES = {
    2: (Case(1, 2), Case(1, 2, recompute=True), Case(1, 2, fsdp=False), Case(1, 2, fsdp=False, recompute=True),
        Case(1, 1, 2, recompute=True), Case(1, 2, dtype=torch.bfloat16)),
    4: (Case(2, 2), Case(2, 2, fsdp=False, recompute=True), Case(2, 1, 2, fsdp=False)),
}
ROWS = [[[9, 4], [2, 11]], [[13], [1, 1, 11]], [[3, 3, 7], [12, 1]]]      # of each micro-batch; 13 tokens in each
ORDERS = {                                                       # (stage, m): m-th micro-batch's forward; -m: backward
    "both": [(0, 1), (1, 1), (0, 2), (1, 2), (1, -1), (0, -1), (0, 3), (1, 3), (1, -2), (0, -2), (1, -3), (0, -3)],
    0: [(0, 1), (0, 2), (0, 3), (0, -1), (0, -2), (0, -3)],
    1: [(1, 1), (1, 2), (1, -1), (1, 3), (1, -2), (1, -3)],
}
NUM_STEPS = 2


def batch(data_rank: int, micro_batch: int, step: int) -> list[tuple[torch.Tensor, torch.Tensor, list[int]]]:
    """Tokens, labels and lengths of each row; the same wherever it is asked for."""
    rows = []
    for number, lengths in enumerate(ROWS[micro_batch]):
        seed = 100 * step + 20 * micro_batch + 2 * data_rank + number
        tokens = torch.randint(0, 61, (13,), generator=generator(seed))
        labels = torch.cat([torch.cat((document[1:], torch.tensor([-100]))) for document in tokens.split(lengths)])
        rows.append((tokens, labels, lengths))
    return rows


def loss_of(part: Decoder, states: list[torch.Tensor],
            rows: list[tuple[torch.Tensor, torch.Tensor, list[int]]], num_data: int) -> torch.Tensor:
    total = torch.stack([chunked_cross_entropy(x, part.head_weight, labels, 5)[0]
                         for x, (_, labels, _) in zip(states, rows, strict=True)]).sum()
    return total / (num_data * sum(length - 1 for micro in ROWS for lengths in micro for length in lengths))


def own_dtype(case: Case) -> torch.dtype:
    return torch.float32 if case.dtype == torch.bfloat16 else case.dtype


class Ticks:
    """Runs the stages that this rank has in a given order; x and its gradient go by hand or over the wire."""

    def __init__(self, case: Case, parts: dict[int, Decoder], mesh: DeviceMesh) -> None:
        self.case, self.parts, self.data = case, parts, mesh["data"].get_local_rank()
        self.peer = None if case.pipeline == 1 else mesh["pipeline"].get_group()
        self.by_hand: dict[tuple[int, Any], list[torch.Tensor]] = {}
        self.on_the_wire: list[tuple[Any, torch.Tensor]] = []
        self.live: dict[Any, Any] = {}
        self.shards = {stage: dict(part.named_parameters()) for stage, part in parts.items()}

    def give(self, to: int, key: int, tensors: list[torch.Tensor]) -> None:
        if to in self.parts:
            self.by_hand[to, key] = [tensor.detach() for tensor in tensors]
            return
        sent = [tensor.detach().contiguous() for tensor in tensors]
        self.on_the_wire += [(dist.isend(tensor, group=self.peer, group_dst=to), tensor) for tensor in sent]

    def take(self, by: int, key: int) -> list[torch.Tensor]:
        if (by, key) in self.by_hand:
            return self.by_hand.pop((by, key))
        rows = -(-13 // self.case.tensor)
        received = [torch.empty(rows, SHAPE.model.hidden, dtype=self.case.dtype) for _ in range(2)]
        for tensor in received:
            dist.recv(tensor, group=self.peer, group_src=1 - by)
        return received

    def step(self, order: list[tuple[int, int]], number: int) -> None:
        for stage, what in order:
            run = self.forward if what > 0 else self.backward
            run(stage, abs(what) - 1, number)
        for work, _ in self.on_the_wire:
            work.wait()
        assert not self.by_hand and not self.live

    def forward(self, stage: int, micro_batch: int, number: int) -> None:
        part, rows = self.parts[stage], batch(self.data, micro_batch, number)
        inputs = [tokens for tokens, _, _ in rows]
        if stage > 0:
            inputs = [x.requires_grad_() for x in self.take(stage, micro_batch)]

        def run(part: Decoder) -> list[torch.Tensor]:
            states = [through(part, x, lengths) for x, (_, _, lengths) in zip(inputs, rows, strict=True)]
            return states if stage == 0 else [loss_of(part, states, rows, self.case.data)]

        outputs = part(run)
        self.live[stage, micro_batch] = inputs, outputs
        if stage == 0:
            self.give(1, micro_batch, outputs)

    def backward(self, stage: int, micro_batch: int, number: int) -> None:
        inputs, outputs = self.live.pop((stage, micro_batch))
        grads = [None] if stage == 1 else self.take(0, -micro_batch - 1)
        with accumulating(self.parts[stage], last=micro_batch == len(ROWS) - 1):
            torch.autograd.backward(outputs, grads)
        reduced = {name for name, parameter in self.shards[stage].items() if parameter.grad is not None}
        assert reduced == (set() if micro_batch < len(ROWS) - 1 else self.shards[stage].keys())
        if stage == 1:
            self.give(0, -micro_batch - 1, [x.grad for x in inputs])


@cache
def in_one_process(num_data: int, dtype: torch.dtype) -> tuple[dict[str, torch.Tensor], float, dict[str, torch.Tensor]]:
    """Gradients of the last step, their norm, and they clipped, of a plain whole decoder with all data ranks' rows."""
    whole = Decoder(SHAPE, generator=generator()).to(dtype)
    optimizer = torch.optim.SGD(whole.parameters(), lr=1.0)
    for number in range(NUM_STEPS):
        optimizer.step()
        optimizer.zero_grad()
        for data_rank in range(num_data):
            for micro_batch in range(len(ROWS)):
                rows = batch(data_rank, micro_batch, number)
                states = [through(whole, tokens, lengths) for tokens, _, lengths in rows]
                loss_of(whole, states, rows, num_data).backward()
    grads = {name: gradient(parameter).clone() for name, parameter in whole.named_parameters()}
    norm = torch.nn.utils.clip_grad_norm_(whole.parameters(), CLIP)
    return grads, float(norm), {name: gradient(parameter) for name, parameter in whole.named_parameters()}


def on_ranks(case: Case) -> dict[str, float]:
    """How far this rank is from one process: gradients, norm and clipped gradients after the last of several steps."""
    if case.pipeline == 1:
        mesh = init_device_mesh("cpu", (case.data, case.tensor), mesh_dim_names=("data", "tensor"))
        stages, order = [0, 1], ORDERS["both"]
    else:
        mesh = init_device_mesh("cpu", (case.pipeline, case.data, case.tensor),
                                mesh_dim_names=("pipeline", "data", "tensor"))
        stages = [mesh["pipeline"].get_local_rank()]
        order = ORDERS[stages[0]]
    whole = Decoder(SHAPE, generator=generator()).to(own_dtype(case))
    parts = {stage: stage_of(whole, stage, LAYERS) for stage in stages}
    for part in parts.values():
        parallelize(part, mesh, fsdp=case.fsdp, dtype=case.dtype,
                    recompute="full" if case.recompute else "none")
    named = {name: parameter for part in parts.values() for name, parameter in part.named_parameters()}
    optimizer = torch.optim.SGD(named.values(), lr=1.0)
    for number in range(NUM_STEPS):
        optimizer.step()
        optimizer.zero_grad()
        Ticks(case, parts, mesh).step(order, number)
    grads, norm, clipped = in_one_process(case.data, own_dtype(case))
    assert norm > 2 * CLIP
    apart = {"gradient": farthest(grads, {name: gradient(parameter) for name, parameter in named.items()})}
    apart["norm"] = abs(float(clip_grad_norm(named.values(), CLIP, mesh.get_all_groups())) - norm)
    return apart | {"clipped": farthest(clipped, {name: gradient(parameter) for name, parameter in named.items()})}


def farthest(want: dict[str, torch.Tensor], got: dict[str, torch.Tensor]) -> float:
    """Over this rank's shares of the tensors it has."""
    assert got.keys() <= want.keys() and got
    apart = [0.0]
    for name, tensor in got.items():
        assert want[name].abs().max() > 0
        mine = tensor.detach()
        write_parameter(expected := torch.empty_like(mine), want[name])
        mine, expected = ((x.to_local() if hasattr(x, "to_local") else x) for x in (mine, expected))
        apart.append(float((mine - expected).abs().max()) if mine.numel() else 0.0)
    return max(apart)


def on_all_ranks(transport: C10dTransport) -> list[dict[str, float]]:
    return [on_ranks(case) for case in CASES[transport.size]]


@pytest.mark.multiprocess
@pytest.mark.parametrize("num_ranks", CASES)
def test_micro_batches_in_flight_give_the_gradients_of_a_single_process(num_ranks: int) -> None:
    for cases in values(run_processes(num_ranks, on_all_ranks, **PATIENT)):
        for case, apart in zip(CASES[num_ranks], cases, strict=True):
            assert max(apart.values()) < (2e-2 if case.dtype == torch.bfloat16 else 1e-10), (case, apart)


def build(layers: tuple[int, ...] | None = None, data: int = 1, seed: int = 3) -> tuple[Decoder,
          torch.optim.AdamW]:
    """A decoder or, on ranks, this rank's stage of it, and an optimizer."""
    whole = Decoder(SHAPE, generator=generator(seed))
    if layers is not None:
        mesh = init_device_mesh("cpu", (len(layers), data, 1), mesh_dim_names=("pipeline", "data", "tensor"))
        whole = stage_of(whole, mesh["pipeline"].get_local_rank(), layers)
        parallelize(whole, mesh, fsdp=True, dtype=torch.float32)
    return whole, torch.optim.AdamW(whole.parameters(), lr=1e-2, fused=True)


def train(part: Decoder, optimizer: torch.optim.AdamW) -> None:
    """Two steps with gradients that depend on a parameter's name alone."""
    for step in range(2):
        for name, parameter in part.named_parameters():
            grad = torch.randn(parameter.shape, generator=generator(step + sum(map(ord, name))))
            parameter.grad = torch.zeros_like(parameter)
            write_parameter(parameter.grad, grad)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def everything(part: Decoder, optimizer: torch.optim.AdamW) -> dict[str, torch.Tensor]:
    """Weights and moments by name."""
    found = {}
    for name, parameter in part.named_parameters():
        found[name] = parameter.detach()
        found |= {f"{name} {key}": optimizer.state[parameter][key] for key in ("exp_avg", "exp_avg_sq", "step")}
    return found


def resumed(folder: Path | str, layers: tuple[int, ...] | None = None, data: int = 1) -> float:
    """How far from a run that never stopped, all in one process."""
    run = build(layers, data, seed=8)
    saver = Checkpointer(folder, *run)
    state = saver.resume()
    saver.close()
    assert state is not None
    assert (state.step, state.loader) == (2, {"at": 2})
    never_stopped = build()
    train(*never_stopped)
    return farthest(everything(*never_stopped), everything(*run))


def save(folder: Path | str, layers: tuple[int, int] | None = None) -> None:
    run = build(layers)
    train(*run)
    saver = Checkpointer(folder, *run)
    saver.save(2, {"at": 2})
    saver.close()


def save_and_resume(transport: C10dTransport, folder: str) -> tuple[float, float]:
    save(f"{folder}/staged", LAYERS)
    return resumed(f"{folder}/whole", LAYERS), resumed(f"{folder}/staged", (1, 2))


def resume_cut_otherwise(transport: C10dTransport, folder: str, layers: tuple[int, ...], data: int) -> float:
    return resumed(f"{folder}/staged", layers, data)


@pytest.mark.multiprocess
def test_a_checkpoint_goes_on_with_other_stages(tmp_path: Path) -> None:
    save(tmp_path / "whole")
    assert values(run_processes(2, save_and_resume, str(tmp_path), **PATIENT)) == [(0.0, 0.0)] * 2
    assert resumed(tmp_path / "staged") == 0.0
    for layers, data in (((1, 1, 1), 1), ((1, 2), 2)):
        ranks = run_processes(len(layers) * data, resume_cut_otherwise, str(tmp_path), layers, data, **PATIENT)
        assert values(ranks) == [0.0] * (len(layers) * data)
    alone = stage_of(Decoder(SHAPE), 0, LAYERS)
    saver = Checkpointer(tmp_path / "staged", alone, torch.optim.AdamW(alone.parameters()))
    with pytest.raises(ValueError, match=r"of another run: .* and nothing here"):
        saver.resume()
