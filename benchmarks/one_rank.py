"""One rank of a planned pool on one GPU: what its attention calls take besides the kernel.

Its exchanges return at once with random bytes, so packing, indexing and unpacking are real and the wire is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch

from distca.kernels import Kernel
from distca.planning.plan import Plan
from distca.runtime.call import BackwardCall, ForwardCall
from distca.runtime.exchange import STAMP_BYTES, Packing, Tensors
from distca.runtime.prepared import PlanCache, Shapes

LAYERS = 4  # calls issued back to back


@dataclass(frozen=True, slots=True)
class OneRank:
    """One rank's calls on one GPU."""

    placement: str
    rank: int
    which: str
    tasks: int
    bytes_in: int                # forward, both trips
    bytes_out: int
    kernel_forward_seconds: float
    kernel_backward_seconds: float
    copy_forward_seconds: float
    copy_backward_seconds: float
    copy_share: float            # of the kernel's time, forward and backward together
    host_forward_seconds: float
    host_backward_seconds: float
    prepare_seconds: float


class InstantTransport:
    """A pool's rank whose exchanges are done at once: random bytes arrive, nothing is sent."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.arrives = torch.empty(0, dtype=torch.uint8)

    def fill(self, exchanges: Sequence[Packing], device: torch.device) -> None:
        """Enough random bytes for each of these, with the stamps that a server looks for."""
        most_bytes = max(exchange.arriving.num_bytes for exchange in exchanges)
        self.arrives = torch.randn(-(-most_bytes // 2), dtype=torch.bfloat16, device=device).view(torch.uint8)
        for exchange in exchanges:
            for at in exchange.arriving.stamps.values():
                assert exchange.stamp is not None
                self.arrives[at:at + STAMP_BYTES] = exchange.stamp

    def gather(self, value: int, device: torch.device) -> list[int]:
        return [value] * self.size

    def exchange(self, send: torch.Tensor, send_splits: list[int], recv_splits: list[int]) -> InstantHandle:
        return InstantHandle(self.arrives[:sum(recv_splits)])


@dataclass(frozen=True, slots=True)
class InstantHandle:
    received: torch.Tensor

    def wait(self) -> torch.Tensor:
        return self.received


@dataclass(slots=True)
class TimedKernel:
    """A kernel between two events."""

    kernel: Kernel
    events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)

    def forward(self, *arguments: Any) -> Any:
        return self._timed(self.kernel.forward, arguments)

    def backward(self, *arguments: Any) -> Any:
        return self._timed(self.kernel.backward, arguments)

    def _timed(self, run: Any, arguments: tuple[Any, ...]) -> Any:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        result = run(*arguments)
        end.record()
        self.events.append((begin, end))
        return result

    def seconds(self) -> float:
        """Per call, and forget."""
        torch.cuda.synchronize()
        total = sum(begin.elapsed_time(end) for begin, end in self.events) / 1e3 / len(self.events)
        self.events.clear()
        return total


def one_rank(plan: Plan, placement: str, rank: int, which: str, repeats: int, kernel_name: str) -> OneRank:
    device, model = torch.device("cuda"), plan.model
    shapes = Shapes(model.num_heads, model.num_kv_heads, model.head_dim, torch.bfloat16, device)
    transport: Any = InstantTransport(rank, plan.num_servers)
    plans = PlanCache(transport, kernel_name)
    begin = perf_counter()
    prepared = plans.prepared(plan, shapes)
    exchanges = [one.outer for one in (prepared.inputs, prepared.outputs, prepared.backward_inputs, prepared.gradients)]
    prepare_seconds = perf_counter() - begin
    transport.fill(exchanges, device)
    timed: Any = TimedKernel(prepared.kernel)
    prepared.kernel = timed
    tokens = prepared.tables.row_tokens
    q, k, v, dout = (torch.randn(tokens, heads, model.head_dim, dtype=torch.bfloat16, device=device)
                     for heads in (model.num_heads, *[model.num_kv_heads] * 2, model.num_heads))

    def forward() -> Tensors:
        call = ForwardCall(plans, plan, shapes)
        call.dispatch(q, k, v)
        call.serve()
        return call.combine()

    out, lse = forward()

    def backward() -> object:
        call = BackwardCall(plans, plan, shapes)
        call.dispatch(q, k, v, out, dout, lse)
        call.serve()
        return call.combine()

    backward()
    forwards, backwards = (_calls(run, timed, repeats) for run in (forward, backward))
    copies, kernels = forwards.copy + backwards.copy, forwards.kernel + backwards.kernel
    return OneRank(
        placement=placement,
        rank=rank,
        which=which,
        tasks=len(prepared.tables.q_begin),
        bytes_in=sum(one.arriving.num_bytes for one in exchanges[:2]),
        bytes_out=sum(one.leaving.num_bytes for one in exchanges[:2]),
        kernel_forward_seconds=forwards.kernel,
        kernel_backward_seconds=backwards.kernel,
        copy_forward_seconds=forwards.copy,
        copy_backward_seconds=backwards.copy,
        copy_share=copies / kernels,
        host_forward_seconds=forwards.host,
        host_backward_seconds=backwards.host,
        prepare_seconds=prepare_seconds,
    )


@dataclass(frozen=True, slots=True)
class Calls:
    """Median seconds of one call: the kernel, everything else on the device, and the host until it is issued."""

    kernel: float
    copy: float
    host: float


def _calls(run: Any, timed: TimedKernel, repeats: int) -> Calls:
    kernels, copies, hosts = [], [], []
    run()
    timed.seconds()
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(LAYERS):
            run()
        end.record()
        kernel = timed.seconds()
        kernels.append(kernel)
        copies.append(begin.elapsed_time(end) / 1e3 / LAYERS - kernel)
        issued = perf_counter()
        run()
        hosts.append(perf_counter() - issued)
        timed.seconds()
    return Calls(median(kernels), median(copies), median(hosts))


def ranks_by_traffic(plan: Plan) -> list[tuple[str, int]]:
    """The rank with the median traffic and the one with the most."""
    summary = plan.summary()
    order = np.argsort(summary.bytes_sent + summary.bytes_received, kind="stable")
    return [("median", int(order[len(order) // 2])), ("busiest", int(order[-1]))]
