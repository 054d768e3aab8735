"""Checks of attention on ranks that stand already, on one GPU over NCCL or on CPUs over gloo.

NCCL's kernels run on streams of its own, so what counts is who waits for whom: a buffer that is reused before it was
sent, a collective that another rank launches in another order, a rank that is late, an exchange inside a graph.
"Exact": as far from float64 as rounding explains (tests.support.accuracy), and no farther.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from distca.kernels import TaskRows
from distca.planning.balance import balance
from distca.planning.plan import Plan
from distca.planning.step import MicroBatch
from distca.planning.windows import windowed
from distca.profiling import network
from distca.runtime.attention import CoreAttention
from distca.runtime.ping_pong import taken
from distca.runtime.pool.server import Server
from distca.runtime.pool.transport import connect_servers
from distca.runtime.transport import C10dTransport, HierarchicalTransport, Transport, over_nodes
from distca.spec import ModelShape
from distca.workload.packing import pack, pack_ping_pong
from tests.support.accuracy import Expected, expected_attention
from tests.support.attention import gradient, qkv_of, random_qkv, row_index
from tests.support.batches import nano_index
from tests.support.plans import scattered_plan
from tests.support.pools import SECRET

MODEL = ModelShape("small", 1, 512, 4, 2, 64, 1024, 64)
LENGTHS = {"cuda": [1451, 1, 127, 350, 650, 256, 269],           # 3104 = 16 x 194, cut anywhere by the ranks
           "cpu": [363, 1, 32, 88, 163, 64, 73]}                 # 784 = 16 x 49
WINDOW = 100
DIMS = 64, 64         # of queries and keys, and of values
LATENT_DIMS = 192, 128
SLEEP = 20_000_000    # cycles of a GPU, about 10 ms

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]  # q, k, v, dout


class Ranks:
    """This rank's transport, plans of its pool, and random documents."""

    def __init__(self, transport: C10dTransport, device: str) -> None:
        self.transport, self.rank, self.size = transport, transport.rank, transport.size
        self.device = torch.device("cuda", 0) if device == "cuda" else torch.device("cpu")
        self.on_gpu = device == "cuda"
        self.dtype = torch.bfloat16 if self.on_gpu else torch.float32
        self.lengths = np.array(LENGTHS[device])
        layout = pack(self.lengths, ranks=self.size)
        self.index = row_index(layout, self.rank).to(self.device)
        self.good = balance(layout, MODEL, tolerance=0.05)
        self.senseless = scattered_plan(1, layout, self.size, MODEL)
        assert all((plan.tasks.home != plan.tasks.server).any() for plan in (self.good, self.senseless))
        self.tensors, self.expected = cache(self._tensors), cache(self._expected)

    def _tensors(self, seed: int, dims: tuple[int, int]) -> Tensors:
        (q, k, *_), (*_, v, dout) = (random_qkv(seed + dim, int(self.lengths.sum()), 4, 2, dim, torch.float32)
                                     for dim in dims)
        q, k, v, dout = (x.to(self.dtype).to(self.device) for x in (q, k, v, dout))
        return q, k, v, dout

    def _expected(self, seed: int, dims: tuple[int, int], window: int | None, whole: bool) -> list[Expected]:
        """Out, dq, dk and dv, of the documents or of one that is as long as all."""
        lengths = [int(self.lengths.sum())] if whole else self.lengths
        out, _, *rest = expected_attention(*self.tensors(seed, dims), TaskRows.documents(lengths), window=window)
        return [out, *rest]

    def row(self, seed: int, index: torch.Tensor | None = None, dims: tuple[int, int] = DIMS) -> Row:
        return Row(self, seed, self.index if index is None else index, dims)

    def rows(self) -> list[Row]:
        return [self.row(0), self.row(1)]

    def interleaved(
        self, attend: CoreAttention, rows: Sequence[Row], plans: Sequence[Plan], backward: Sequence[Plan],
        between: Callable[[], object] = lambda: None, **about: Any,
    ) -> None:
        """Calls as ping-pong makes them; `between` runs wherever an exchange is under way."""
        pending = []
        for row, plan, back in zip(rows, plans, backward, strict=True):
            pending.append(attend.start(*row.leaves, plan, backward=back, **about))
            between()
        for call in pending:
            attend.serve(call)
            between()
        outs = [attend.finish(call) for call in pending]
        torch.autograd.backward(outs, [row.dout for row in rows])
        for row, out in zip(rows, outs, strict=True):
            row.check(out, **about)

    def sleep(self, cycles: int) -> None:
        """Keep the current stream busy."""
        if self.on_gpu:
            torch.cuda._sleep(cycles)

    def scribble(self) -> None:
        """Overwrite whatever memory the allocator has to give on this stream, in all sizes of wires."""
        held = [torch.empty(2**power, dtype=torch.uint8, device=self.device) for power in range(9, 23) for _ in "abc"]
        for one in held:
            one.fill_(255)                                       # NaN in bf16 and float32


ranks_on = cache(Ranks)  # the transport's, made by its first check


class Row:
    """A rank's row of random documents: its leaves, and what a call over them has to give."""

    def __init__(self, ranks: Ranks, seed: int, index: torch.Tensor, dims: tuple[int, int]) -> None:
        self.ranks, self.about, self.index = ranks, (seed, dims), index
        *qkv, self.dout = (x[index] for x in ranks.tensors(*self.about))
        self.leaves = qkv_of(x.requires_grad_() for x in qkv)

    def check(self, out: torch.Tensor, window: int | None = None, whole: bool = False) -> None:
        found = out.detach(), *map(gradient, self.leaves)
        for one, got in zip(self.ranks.expected(*self.about, window, whole), found, strict=True):
            one.at(self.index).check(got)


def states_and_plans(ranks: Ranks) -> None:
    """Two calls at a time, also with another plan for backward; the second time everything is cached."""
    good, senseless = ranks.good, ranks.senseless
    for state in ("keep", "resend"):
        attend = CoreAttention(state=state, transport=ranks.transport)
        attend.expect([good, senseless], ranks.device)
        back = (good, senseless) if state == "keep" else (senseless, good)
        for _ in range(2):
            ranks.interleaved(attend, ranks.rows(), (good, senseless), back)


def windows_and_value_dims(ranks: Ranks) -> None:
    attend = CoreAttention(transport=ranks.transport)
    for plan in (windowed(ranks.good, WINDOW), ranks.senseless):
        ranks.interleaved(attend, [ranks.row(0)], [plan], [plan], window=WINDOW)
    ranks.interleaved(attend, [ranks.row(2, dims=LATENT_DIMS)], [ranks.senseless], [ranks.good])


def ping_and_pong(ranks: Ranks) -> None:
    """One document lies in both nano-batches, and pong's queries read ping's keys."""
    lengths = np.array([ranks.lengths.sum()])
    both = MicroBatch(lengths, pack_ping_pong(lengths, ranks=ranks.size))
    plans = [balance(layout, MODEL, tolerance=0.05) for layout in both.layouts]
    attend = CoreAttention(transport=ranks.transport)
    ping, pong = rows = [ranks.row(3, nano_index(both, nano, ranks.rank).to(ranks.device)) for nano in range(2)]
    runs = both.key_runs(1, ranks.rank)
    first = attend.start(*ping.leaves, plans[0])
    keys, worth = (torch.cat([own, *taken(before, runs)])
                   for own, before in zip(pong.leaves[1:], ping.leaves[1:], strict=True))
    second = attend.start(pong.leaves[0], keys, worth, plans[1])
    for call in (first, second):
        attend.serve(call)
    outs = [attend.finish(call) for call in (first, second)]
    torch.autograd.backward(outs, [row.dout for row in rows])
    assert runs
    for row, out in zip(rows, outs, strict=True):
        row.check(out, whole=True)


def dedicated_server(ranks: Ranks) -> None:
    """The last rank only serves, and is in no exchange of the others."""
    if (rows := ranks.size - 1) < 2:
        return
    lengths = np.array([int(ranks.lengths.sum()) // rows * rows])
    layout = pack(lengths, ranks=rows)
    plan = balance(layout, MODEL, tolerance=0.1, speed=np.ones(ranks.size))
    assert (plan.tasks.server == rows).any()
    group, address = dist.new_group(range(rows)), list[Any]([None])
    if ranks.rank < rows:
        pool = connect_servers(C10dTransport(group), roles=1, secret=SECRET, device=ranks.device)
        address = [pool.address]
    dist.broadcast_object_list(address, src=0)
    if ranks.rank == rows:
        assert Server(lambda: address[0], SECRET, device=ranks.device).run() == 2
        return
    assert pool.wait_for_servers(1, 60)
    attend = CoreAttention(transport=pool)
    q, k, v, dout = (x[:lengths[0]] for x in ranks.tensors(0, DIMS))
    out, _, *rest = expected_attention(q, k, v, dout, TaskRows.documents(lengths))
    index = row_index(layout, ranks.rank).to(ranks.device)
    for _ in range(2):
        leaves = qkv_of(x[index].requires_grad_() for x in (q, k, v))
        result = attend(*leaves, plan)
        result.backward(dout[index])
        for one, got in zip((out, *rest), (result.detach(), *map(gradient, leaves)), strict=True):
            one.at(index).check(got)
    pool.close()


def allocator(ranks: Ranks) -> None:
    """Nobody holds what travels, on a stream that is not the default one, and others want its memory."""
    good, senseless = ranks.good, ranks.senseless
    attend, stream = CoreAttention(transport=ranks.transport), torch.cuda.Stream()
    for _ in range(3):
        rows = ranks.rows()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            ranks.interleaved(attend, rows, (senseless, good), (good, senseless), ranks.scribble)
        torch.cuda.current_stream().wait_stream(stream)


def late_ranks(ranks: Ranks) -> None:
    """One rank's host is late, then its GPU's stream; the others are ahead by several exchanges."""
    attend = CoreAttention(transport=ranks.transport)
    for late in range(min(ranks.size, 4)):
        def between(late: int = late) -> None:
            if ranks.rank == late:
                time.sleep(0.02)
                ranks.sleep(2 * SLEEP)

        ranks.interleaved(attend, ranks.rows(), (ranks.good, ranks.senseless), (ranks.senseless, ranks.good), between)


def groups_and_streams(ranks: Ranks) -> None:
    """Between the phases, collectives of other groups are launched on another stream, in one order on all ranks."""
    half = ranks.size // 2
    pairs = [dist.new_group(range(first, ranks.size, half)) for first in range(half)]
    groups, side = (pairs[ranks.rank % half], dist.new_group()), torch.cuda.Stream() if ranks.on_gpu else None
    attend, seen = CoreAttention(transport=ranks.transport), []

    def between() -> None:
        if side is not None:
            side.wait_stream(torch.cuda.current_stream())
        with nullcontext() if side is None else torch.cuda.stream(side):
            for group in groups:
                total = torch.full((2**18,), 1.0 + ranks.rank, device=ranks.device)
                wanted = sum(1.0 + other for other in dist.get_process_group_ranks(group))
                seen.append((dist.all_reduce(total, group=group, async_op=True), total, wanted))
            ranks.sleep(SLEEP // 10 * (1 + ranks.rank))

    ranks.interleaved(attend, ranks.rows(), (ranks.good, ranks.senseless), (ranks.senseless, ranks.good), between)
    for work, total, wanted in seen:
        work.wait()
        assert bool((total == wanted).all())
    assert len(seen) == 8


def two_hops(ranks: Ranks) -> None:
    """A relay sends from buffers of another stream, whose later work must not overwrite them."""
    if ranks.size == 2:
        return
    half = ranks.size // 2
    relayed = over_nodes(ranks.transport, [rank // half for rank in range(ranks.size)])
    assert isinstance(relayed, HierarchicalTransport)
    in_hops(ranks, relayed)


def two_hops_and_symmetric_memory(ranks: Ranks) -> None:
    if ranks.size == 2:
        return
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    from distca.runtime.transport.symmetric import SymmetricTransport

    half = ranks.size // 2
    here = ranks.transport.subgroup([rank for rank in range(ranks.size) if rank // half == ranks.rank // half])
    inner = SymmetricTransport(here.group, timeout_seconds=60.0)
    in_hops(ranks, HierarchicalTransport(ranks.transport, inner, [rank // half for rank in range(ranks.size)]))


def in_hops(ranks: Ranks, relayed: Transport) -> None:
    good, senseless = ranks.good, ranks.senseless
    for state in ("keep", "resend"):
        attend = CoreAttention(state=state, transport=relayed)
        back = (senseless, good) if state == "keep" else (good, senseless)
        for _ in range(3):
            ranks.interleaved(attend, ranks.rows(), (senseless, good), back, ranks.scribble)
    hops = [prepared.hops for prepared in attend.plans._prepared._entries.values()]
    assert any(hop is not None and hop.crosses and hop.passes for hop in hops)


def graphs(ranks: Ranks) -> None:
    """A graph that holds forward and backward with their exchanges, replayed over other inputs."""
    attend, row, stream = CoreAttention(transport=ranks.transport), ranks.row(0), torch.cuda.Stream()

    def run() -> list[torch.Tensor]:
        out = attend(*row.leaves, ranks.good)
        return [out.detach(), *torch.autograd.grad(out, row.leaves, row.dout)]

    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        out, *found = run()
    for seed in (1, 0):
        other = ranks.row(seed)
        with torch.no_grad():
            for mine, theirs in zip((*row.leaves, row.dout), (*other.leaves, other.dout), strict=True):
                mine.copy_(theirs)
        graph.replay()
        for leaf, got in zip(other.leaves, found, strict=True):
            leaf.grad = got.clone()
        other.check(out.clone())


def profile_of_the_network(ranks: Ranks) -> None:
    vars(network)["CUDA_SIZES"] = network.CPU_SIZES              # larger ones take seconds by sockets
    cost = network.measure_exchange(ranks.transport, ranks.device, dist.get_backend())
    assert cost.num_ranks == ranks.size and len(cost.seconds) == len(network.CPU_SIZES) and min(cost.seconds) > 0
    assert 0 < cost.bandwidth < float("inf") and 0 <= cost.latency_seconds < float("inf")


ANYWHERE = (states_and_plans, windows_and_value_dims, ping_and_pong, dedicated_server, late_ranks, groups_and_streams,
            two_hops, profile_of_the_network)
ON_A_GPU = (allocator, two_hops_and_symmetric_memory)
AT_THE_END = (graphs,)  # a capture that fails leaves NCCL unusable
