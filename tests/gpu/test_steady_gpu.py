"""Ranks that share one GPU capture a layer's attention, both ways, and replay it with plans it has never seen.

Results are as far from float64 as rounding explains (tests.support.accuracy), and no farther. Neither a refill nor a
replay allocates device memory, and none of them waits for the device.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from distca.kernels import TaskRows
from distca.kernels.hopper.kernel import HopperKernel
from distca.planning.balance import balance
from distca.planning.plan import Plan
from distca.runtime.call import Shapes
from distca.runtime.steady import SteadyAttention
from distca.runtime.transport.c10d import C10dTransport
from distca.spec import ModelShape
from distca.workload.packing import pack
from tests.support import qkv_of, random_qkv, row_index, run_processes, scattered_plan
from tests.support.accuracy import expected_attention

GPU = torch.device("cuda", 0)
MISSING = (HopperKernel().supports(GPU, torch.bfloat16, 128, None) if torch.cuda.is_available()
           else "torch.cuda.is_available() is False")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.multiprocess,
    pytest.mark.skipif(MISSING is not None, reason=f"needs an NVIDIA Hopper GPU; {MISSING}"),
]

MODEL = ModelShape("small", 1, 512, 8, 2, 128, 1024, 64)
LENGTHS = [[2900, 1, 127, 68], [700, 1300, 513, 583], [3096], [1548, 1548]]  # 3096 = 2 x 1548 = 4 x 774


def plans(ranks: int) -> list[Plan]:
    """The first one in the most pieces."""
    layouts = [pack(lengths, ranks=ranks) for lengths in LENGTHS]
    found = [scattered_plan(1, layouts[0], ranks, MODEL), *(balance(one, MODEL, tolerance=0.05) for one in layouts),
             scattered_plan(2, layouts[1], ranks, MODEL)]
    assert sum(bool((plan.tasks.home != plan.tasks.server).any()) for plan in found) >= 3
    return found


class Layer:
    """A captured layer, its inputs and its results."""

    def __init__(self, steady: SteadyAttention) -> None:
        self.steady = steady
        queries, keys = steady.row_tokens
        tokens = [one.new_zeros(count, *one.shape[1:])
                  for one, count in zip(steady.shapes.empty_row()[:3], (queries, keys, keys), strict=True)]
        self.row = qkv_of(x.requires_grad_() for x in tokens)
        self.dout = torch.zeros_like(tokens[0])
        stream, self.graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            for _ in range(2):
                self.once()
        torch.cuda.synchronize()
        with torch.cuda.graph(self.graph, stream=stream):
            self.results = self.once()

    def once(self) -> tuple[torch.Tensor, ...]:
        out = self.steady(*self.row)
        return out.detach(), *torch.autograd.grad(out, self.row, self.dout)

    def replay(self, tensors: list[torch.Tensor]) -> None:
        with torch.no_grad():
            for there, here in zip((*self.row, self.dout), tensors, strict=True):
                there.copy_(here)
        self.graph.replay()


def layer_of(joined: C10dTransport) -> tuple[Layer, list[Plan]]:
    torch.cuda.set_device(0)
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    from distca.runtime.transport.symmetric import SymmetricTransport

    transport, found = SymmetricTransport(joined.group, timeout_seconds=60.0), plans(joined.size)
    return Layer(SteadyAttention(transport, found[0], Shapes(8, 2, 128, torch.bfloat16, GPU), room=3.0)), found


def replays_exactly(joined: C10dTransport) -> bool:
    layer, found = layer_of(joined)
    for seed, plan in enumerate([*found, found[0]]):
        layer.steady.refill(plan, found[0] if plan.layout is found[0].layout else None)
        batch = q, k, v, dout = tuple(x.to(torch.bfloat16).cuda() for x in random_qkv(
            seed, plan.layout.num_tokens, 8, 2, 128, torch.float32))
        index = row_index(plan.layout, joined.rank).cuda()
        layer.replay([x[index] for x in batch])
        expected = expected_attention(q, k, v, dout, TaskRows.documents(plan.layout.lengths))
        for whole, got in zip([expected[0], *expected[2:]], layer.results, strict=True):
            whole.at(index).check(got)
    return True


def allocations() -> tuple[int, ...]:
    stats: dict[str, Any] = torch.cuda.memory_stats()
    return tuple(stats[name] for name in ("allocation.all.allocated", "num_device_alloc", "reserved_bytes.all.peak"))


def replays_without_allocating(joined: C10dTransport) -> bool:
    layer, found = layer_of(joined)
    batch = [torch.randn_like(x) for x in (*layer.row, layer.dout)]
    for plan in found:                                           # pinned memory grows here, if ever
        layer.steady.refill(plan)
        layer.replay(batch)
    torch.cuda.synchronize()
    before = allocations()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for plan in found * 3:
            layer.steady.refill(plan)
            layer.replay(batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    return allocations() == before


@pytest.mark.parametrize(("body", "ranks"), [
    (replays_exactly, 2), (replays_exactly, 4), (replays_without_allocating, 2)])
def test_a_captured_layer(body: Any, ranks: int) -> None:
    outcomes = run_processes(ranks, body, timeout_seconds=90.0, deadline_seconds=240.0)
    for rank, outcome in enumerate(outcomes):
        assert outcome.error is None and outcome.exit_code == 0 and outcome.value is True, f"rank {rank}: {outcome}"
