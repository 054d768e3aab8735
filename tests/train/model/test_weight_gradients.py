"""Weight gradients computed apart from backward are those of one process, on any mesh, compiled and recomputed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from distca.kernels import dense_attention
from distca.runtime.transport.c10d import C10dTransport
from distca.spec import ModelShape
from distca.train.model.decoder import Decoder, write_parameter
from distca.train.model.loss import chunked_cross_entropy
from distca.train.model.parallel import accumulating, parallelize
from distca.train.model.segment_runs import Offload, run_segments
from distca.train.model.shape import DecoderShape
from distca.train.model.split_linear import Linear
from distca.train.model.weight_gradients import WeightGradients, WeightUnit, is_supported
from tests.support.attention import gradient
from tests.support.decoders import hidden_of
from tests.support.processes import run_processes, values

MODEL = ModelShape("small", 3, 24, 4, 2, 8, 40, 61)
LENGTHS = [[[9, 4], [2, 11, 1]], [[13], [1, 1, 11]], [[3, 3, 7], [12]]]  # of the rows of each micro-batch
NUM_STEPS = 2
PATIENT: dict[str, Any] = {"timeout_seconds": 120.0, "deadline_seconds": 240.0}
LIMITS = {torch.float64: 1e-10, torch.bfloat16: 2e-2}


@dataclass(frozen=True)
class Case:
    data: int = 1
    tensor: int = 1
    fsdp: bool = True
    tied: bool = False
    family: str = "llama"
    recompute: str = "none"
    compile: bool = False
    dtype: torch.dtype = torch.float64

    @property
    def shape(self) -> DecoderShape:
        return DecoderShape(MODEL, tied=self.tied, family=self.family)

    @property
    def own_dtype(self) -> torch.dtype:
        return torch.float32 if self.dtype == torch.bfloat16 else self.dtype


CASES = {
    "1": (Case(), Case(recompute="selective", family="qwen2"), Case(recompute="full", tied=True),
        Case(compile=True, recompute="full", family="qwen2"), Case(dtype=torch.bfloat16)),
    "2": (Case(2), Case(2, fsdp=False, recompute="full"), Case(2, compile=True, tied=True),
        Case(2, dtype=torch.bfloat16), Case(1, 2, family="qwen2"), Case(1, 2, recompute="selective"),
        Case(1, 2, fsdp=False, tied=True, family="qwen3"), Case(1, 2, dtype=torch.bfloat16)),
    "2, compiled": (Case(1, 2, compile=True, recompute="full"),),
    "4": (Case(2, 2), Case(2, 2, fsdp=False, family="qwen2")),
}


def generator(seed: int = 3) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def loss_of(decoder: Decoder, data_rank: int, micro_batch: int, step: int) -> torch.Tensor:
    """Of a micro-batch's two rows on one data rank."""
    total = torch.zeros((), dtype=torch.float64)
    for number, lengths in enumerate(LENGTHS[micro_batch]):
        seed = 1000 * step + 100 * data_rank + 10 * micro_batch + number
        tokens = torch.randint(0, 61, (sum(lengths),), generator=generator(seed))
        positions = torch.cat([torch.arange(length) for length in lengths])
        hidden = hidden_of(decoder, tokens, positions, lambda q, k, v, of=lengths: dense_attention(q, k, v, of))
        total = total + chunked_cross_entropy(hidden, decoder.head_weight, tokens.roll(-1), 5)[0]
    return total / 100


def build(case: Case, **how: Any) -> tuple[Decoder, int]:
    mesh = init_device_mesh("cpu", (case.data, case.tensor), mesh_dim_names=("data", "tensor"))
    decoder = with_biases(Decoder(case.shape, generator=generator()).to(case.own_dtype))
    parallelize(decoder, mesh, fsdp=case.fsdp, dtype=case.dtype, recompute=case.recompute)
    run_segments(decoder, compile=case.compile, backend="aot_eager", **how)
    return decoder, mesh["data"].get_local_rank()


def with_biases(decoder: Decoder) -> Decoder:
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(generator=generator(len(name)))
    return decoder


@cache
def in_one_process(case: Case) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of all steps, and gradients of the last, of a plain decoder with all data ranks' rows."""
    decoder = with_biases(Decoder(case.shape, generator=generator()).to(case.own_dtype))
    optimizer, losses = torch.optim.SGD(decoder.parameters(), lr=0.1), []
    for step in range(NUM_STEPS):
        optimizer.step()
        optimizer.zero_grad()
        loss = torch.stack([loss_of(decoder, rank, number, step) for rank in range(case.data)
                            for number in range(len(LENGTHS))]).sum()
        loss.backward()
        losses.append(float(loss))
    return losses, {name: gradient(parameter) for name, parameter in decoder.named_parameters()}


def run_apart(decoder: Decoder, data_rank: int, case: Case) -> list[float]:
    """Two micro-batches in flight; weight gradients come late, and one micro-batch has them in its backward.

    Compiled without probes, segments are other graphs, which test_segment_runs tries on data ranks.
    """
    apart = WeightGradients(decoder)
    optimizer, losses = torch.optim.SGD(decoder.parameters(), lr=0.1), []

    def forward(micro_batch: int, step: int) -> torch.Tensor:
        return decoder(lambda decoder: loss_of(decoder, data_rank, micro_batch, step))

    def backward(loss: torch.Tensor) -> WeightUnit:
        with accumulating(decoder, last=False), apart.collecting() as unit:
            loss.backward()
        assert len(unit.pairs) == 7 * MODEL.num_layers * 2
        return unit

    for step in range(NUM_STEPS):
        optimizer.step()
        optimizer.zero_grad()
        first, second = forward(0, step), forward(1, step)
        units = [backward(first)]
        apart.enabled = step > 0 or (case.compile and case.data > 1)  # false: the forward has no probes
        third = forward(2, step)
        apart.enabled = True
        with accumulating(decoder, last=False):
            third.backward()
        assert all(parameter.grad is None for parameter in optimizer.param_groups[0]["params"])
        units.append(backward(second))
        for number, unit in enumerate(units):
            for segment in reversed(decoder.segments):
                unit.run(segment, last=number == len(units) - 1)
            assert not unit.pairs
        apart.deliver()
        losses.append(float(first + second + third))
    return losses


def farthest(case: Case) -> dict[str, float]:
    torch._dynamo.reset()
    decoder, data_rank = build(case)
    losses = run_apart(decoder, data_rank, case)
    want_losses, want = in_one_process(case)
    apart = {"loss": max(abs(a - b) for a, b in zip(losses, want_losses, strict=True)) if case.data == 1 else 0.0}
    got = dict(decoder.named_parameters())
    assert got.keys() == want.keys()
    for name, parameter in got.items():
        grad = gradient(parameter)
        assert want[name].abs().max() > 0 and grad.dtype == case.own_dtype
        write_parameter(expected := torch.empty_like(grad), want[name])
        mine, whole = ((x.to_local() if isinstance(x, DTensor) else x) for x in (grad, expected))
        apart[name] = float((mine - whole).abs().max()) if mine.numel() else 0.0
    return apart


def all_cases(transport: C10dTransport, ranks: str) -> list[dict[str, float]]:
    return [farthest(case) for case in CASES[ranks]]


@pytest.mark.multiprocess
@pytest.mark.parametrize("ranks", [
    pytest.param(ranks, marks=[pytest.mark.slow] * ("compiled" in ranks)) for ranks in CASES])
def test_gradients_computed_apart_are_those_of_one_process(ranks: str) -> None:
    for rank in values(run_processes(int(ranks[0]), all_cases, ranks, **PATIENT)):
        for case, apart in zip(CASES[ranks], rank, strict=True):
            assert max(apart.values()) < LIMITS[case.dtype], (case, max(apart, key=lambda name: apart[name]), apart)


def kept_and_fused(transport: C10dTransport) -> None:
    for compile in (False, True):
        keeps_nothing_twice(replace(Case(), compile=compile))
    fused_has_the_same_bits()
    for how in ({"tile_tokens": 6}, {"offload": Offload(torch.device("cpu"), 2**20, page_bytes=256, min_bytes=16)}):
        decoder, _ = build(Case(), **how)
        assert not is_supported(decoder) and not WeightGradients(decoder).segment


def keeps_nothing_twice(case: Case) -> None:
    """Layers with one input keep it once: x of q, k and v, and of gate and up; a run frees every pair."""
    torch._dynamo.reset()
    decoder, _ = build(case)
    apart = WeightGradients(decoder)
    loss = decoder(lambda decoder: loss_of(decoder, 0, 1, 0))
    with accumulating(decoder, last=False), apart.collecting() as unit:
        loss.backward()
    kept: dict[torch.nn.Module, list[torch.Tensor]] = {
        linear: [x for one, x, _ in unit.pairs if one is linear] for linear, _, _ in unit.pairs}
    for segment in decoder.segments:
        for together in (("pre.qkv.q", "pre.qkv.k", "pre.qkv.v"), ("post.mlp.gate", "post.mlp.up")):
            if getattr(segment, together[0][: together[0].index(".")]) is not None:
                addresses = {tuple(x.data_ptr() for x in kept[segment.get_submodule(name)]) for name in together}
                assert len(addresses) == 1 and len(set(*addresses)) == 2
    alive = [torch.UntypedStorage._weak_ref(x.untyped_storage()) for _, x, dy in unit.pairs for x in (x, dy)]
    del kept, loss
    for segment in decoder.segments:
        unit.run(segment)
    assert all(torch.UntypedStorage._expired(one) for one in alive)


def fused_has_the_same_bits() -> None:
    """Bit for bit: while `enabled` is false a forward and a backward are the same operations on the same shapes."""
    grads = []
    for attached in (False, True):
        decoder, _ = build(Case())
        if attached:
            WeightGradients(decoder).enabled = False
        decoder(lambda decoder: loss_of(decoder, 0, 0, 0)).backward()
        grads.append([gradient(parameter).to_local() for parameter in decoder.parameters()])  # type: ignore[attr-defined]
        assert sum(isinstance(module, Linear) for module in decoder.modules()) == 7 * MODEL.num_layers
    assert all(torch.equal(*pair) for pair in zip(*grads, strict=True))


@pytest.mark.multiprocess
def test_pairs_are_kept_once_and_fused_backward_is_unchanged() -> None:
    body: Callable[..., Any] = kept_and_fused
    values(run_processes(1, body, **PATIENT))
