"""Compiled, in tiles, offloaded: losses and gradients of plain segments in float64, on any mesh, for any lengths."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from distca.kernels import dense_attention
from distca.planning.schedule import layers_of_stages
from distca.runtime.attention import CoreAttention
from distca.runtime.pipeline import Pipeline
from distca.spec import ModelShape
from distca.train.batches import StageWork, step_plan
from distca.train.model.build import connect, stage_of
from distca.train.model.decoder import Decoder
from distca.train.model.loss import chunked_cross_entropy
from distca.train.model.parallel import parallelize
from distca.train.model.segment_runs import HostPages, Offload, run_segments
from distca.train.model.shape import DecoderShape
from distca.train.settings import Settings
from tests.support.batches import batch_of
from tests.support.decoders import hidden_of
from tests.support.processes import run_processes

SHAPE = DecoderShape(ModelShape("small", 3, 24, 4, 2, 8, 40, 61))
CPU = torch.device("cpu")
EXACT = 1e-10


def small_offload(max_bytes: int = 2**20) -> Offload:
    return Offload(CPU, max_bytes, page_bytes=256, min_bytes=16)


def one_step(lengths: Sequence[int], recompute: str = "none", offload: Offload | None = None,
             **how: Any) -> list[torch.Tensor]:
    """Loss and gradients of one row in one process."""
    decoder = Decoder(SHAPE).double()
    for segment in decoder.segments:
        segment.recompute = recompute  # type: ignore[assignment]
    run_segments(decoder, offload=offload, **how)
    tokens = torch.randint(0, 61, (sum(lengths),), generator=torch.Generator().manual_seed(len(lengths)))
    positions = torch.cat([torch.arange(length) for length in lengths])
    with nullcontext() if offload is None else offload.keeping():
        hidden = hidden_of(decoder, tokens, positions, lambda q, k, v: dense_attention(q, k, v, lengths))
    total, _ = chunked_cross_entropy(hidden, decoder.head_weight, tokens.roll(-1), 7)
    total.backward()
    grads = [parameter.grad for parameter in decoder.parameters()]
    assert all(grad is not None for grad in grads)
    return [total.detach(), *(grad for grad in grads if grad is not None)]


def farthest(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(one, other, strict=True))


@settings(max_examples=8, deadline=None)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=4), st.integers(1, 30),
       st.sampled_from([None, 0, 5000, 2**20]))
def test_tiles_and_offloading_change_nothing(lengths: list[int], tile_tokens: int, host_bytes: int | None) -> None:
    offload = None if host_bytes is None else small_offload(host_bytes)
    got = one_step(lengths, tile_tokens=tile_tokens, offload=offload)
    assert farthest(got, one_step(lengths)) < EXACT
    if offload is not None:                                      # everything that was kept was asked for and let go
        assert not offload.sent and not offload.resident
        assert len(offload.pages.free) + offload.pages.num_left == (host_bytes or 0) // 256


def test_offloading_keeps_x_and_attentions_output_alone() -> None:
    """Of every layer 24 + 32 numbers a token go to the host, and none but the log-sum-exp and rotations stay."""
    offload, num_tokens = small_offload(), 64
    decoder = Decoder(SHAPE).double()
    run_segments(decoder, offload=offload)
    with offload.keeping():
        hidden = hidden_of(decoder, torch.arange(num_tokens) % 61, torch.arange(num_tokens), attend_and_save)
    assert sum(kept.shape.numel() for kept in offload.sent) == 3 * num_tokens * (24 + 32)
    assert all(kept.tensor is None for kept in offload.sent)
    staying = {kept.shape for kept in offload.resident.values()}
    assert staying <= {torch.Size([num_tokens]), torch.Size([num_tokens, 8])}  # tokens; cos and sin
    hidden.sum().backward()
    assert not offload.sent and not offload.resident


class AttendAndSave(torch.autograd.Function):
    """Saves what the runtime's attention saves; any function of it will do."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = 2 * q
        ctx.save_for_backward(q, k, v, out)
        return out

    @staticmethod
    def backward(ctx: Any, *douts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, v, out = ctx.saved_tensors
        assert torch.equal(out, 2 * q) and k.shape == v.shape    # times two is exact
        return 2 * douts[0], torch.zeros_like(k), torch.zeros_like(v)


def attend_and_save(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = AttendAndSave.apply(q, k, v)
    return out


def test_tiles_never_hold_the_widest_activation() -> None:
    """No tensor of a step in tiles of 8 tokens has 40 numbers, the feed-forward's width, for more than 8 tokens."""
    widest: list[int] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = function(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.ndim == 2 and out.shape[1] == 40:
                widest.append(out.shape[0])
            return out

    with Watch():
        one_step([33, 30], tile_tokens=8)
    assert max(rows for rows in widest if rows != 24) == 8       # 24 rows: a weight's


@pytest.mark.parametrize("how", [
    {"recompute": "full"}, {"tile_tokens": 6}, pytest.param({}, marks=pytest.mark.slow),
    pytest.param({"recompute": "selective"}, marks=pytest.mark.slow),
])
def test_compiled_segments_take_any_lengths(how: dict[str, Any]) -> None:
    torch._dynamo.reset()
    graphs = []
    for lengths in ([13, 7], [5, 6], [30], [2, 2, 2], [41, 1]):
        before = counters["stats"]["unique_graphs"]
        got = one_step(lengths, compile=True, backend="aot_eager", **how)
        graphs.append(counters["stats"]["unique_graphs"] - before)
        assert farthest(got, one_step(lengths)) < EXACT
    assert graphs[0] in (3, 6) and not any(graphs[1:])           # one for each class of segment, tiles without gradient


def test_host_pages_run_out_and_come_back() -> None:
    pages = HostPages(10 * 256, pinned=False, page_bytes=256)
    first = pages.take(7 * 256 - 3)
    assert first is not None and len(first) == 7
    assert pages.take(4 * 256) is None
    pages.free += first
    assert len(pages.take(10 * 256) or []) == 10


MESHES = {"data": (1, 2, 1), "tensor": (1, 1, 2), "pipeline": (2, 1, 1)}
WAYS: dict[str, dict[str, Any]] = {
    "tiles": {"tile_tokens": 50}, "offload": {"offload": True},
    "tiles and offload": {"tile_tokens": 30, "offload": True},
    "compiled": {"compile": True}, "compiled, recomputed": {"compile": True, "recompute": "full"},
    "compiled, tiles": {"compile": True, "tile_tokens": 50},
}


def step_on(mesh_shape: tuple[int, int, int], way: dict[str, Any]) -> list[torch.Tensor]:
    """Loss and this rank's gradients of two micro-batches, as the trainer runs them."""
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("pipeline", "data", "tensor"))
    stages, num_data, tensor = mesh_shape
    chosen = Settings().with_values({"parallel.pipeline": stages, "parallel.tensor": tensor})
    lengths = [np.array([90, 31, 7]) * num_data, np.array([128]) * num_data]
    plan = step_plan(lengths, chosen, SHAPE.model, num_data)
    whole = Decoder(SHAPE, generator=torch.Generator().manual_seed(3)).double()
    part = stage_of(whole, mesh["pipeline"].get_local_rank(), layers_of_stages(3, stages))
    parallelize(part, mesh, fsdp=True, dtype=torch.float64, recompute=way.get("recompute", "none"))
    offload = small_offload() if way.get("offload") else None
    torch._dynamo.reset()
    run_segments(part, compile=way.get("compile", False), backend="aot_eager", offload=offload,
                 tile_tokens=way.get("tile_tokens", 0))
    attention = CoreAttention(mesh["pipeline", "data"]._flatten("pool").get_group())
    work = StageWork(part, attention, tensor=tensor, dtype=torch.float64, device=CPU, loss_chunk_tokens=50,
                     offload=offload)
    work.begin(batch_of(plan, mesh["data"].get_local_rank(), SHAPE.model.vocab))
    Pipeline(work, attention, connect(mesh["pipeline"], timedelta(seconds=100))).step(
        plan.ticks, plan.plans_of(mesh["pipeline"].get_local_rank()))
    if offload is not None:
        assert not offload.sent and not offload.resident
    grads = [parameter.grad for parameter in part.parameters()]
    return [work.total, *(grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads
                          if grad is not None)]


def some_ways(transport: Any, mesh: str, ways: Sequence[str]) -> list[float]:
    plain = step_on(MESHES[mesh], {})
    assert all(grad.abs().max() > 0 for grad in plain[1:])
    return [farthest(step_on(MESHES[mesh], WAYS[way]), plain) for way in ways]


@pytest.mark.multiprocess
@pytest.mark.parametrize(("mesh", "ways"), [
    ("data", ("tiles and offload", "compiled")),
    *(pytest.param(mesh, tuple(WAYS), marks=pytest.mark.slow) for mesh in MESHES),
])
def test_ways_on_meshes(mesh: str, ways: tuple[str, ...]) -> None:
    for outcome in run_processes(2, some_ways, mesh, ways, timeout_seconds=120.0, deadline_seconds=240.0):
        assert outcome.error is None
        assert len(outcome.value) == len(ways) and max(outcome.value) < EXACT, outcome.value
