"""Attention of a pipeline stage, part of which a neighbour computes in a thread while its own schedule waits.

Requests are not collectives: a caller that sees the neighbour wait hands it one block of queries with their keys over a
gloo group of its own, goes on with its other blocks and collects the answer. The serving thread waits in a receive, and
neither that nor the kernel holds Python's lock.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from stage_replay import Op, Piece

from distca.kernels import TaskRows, kernel_named
from distca.kernels.interface import BackwardInputs

STAGES, HEADS, KV_HEADS, DIM = 2, 8, 2, 32
BLOCK = 512                                                      # queries that are served together
WORTH = 2 ** 17                                                  # pairs of a block that are worth the way
KERNEL = kernel_named("sdpa")
TIMEOUT = timedelta(seconds=300)
Block = tuple[int, int, int, int]                                # queries [begin, end) and keys [begin, end)
Compute = Callable[[list[torch.Tensor]], list[torch.Tensor]]
Collect = Callable[[Block, list[torch.Tensor]], None]
Inputs = tuple[list[torch.Tensor], list[torch.Tensor]]           # by query and by key


class Clock:
    """What this process did in a step: ops of the schedule, attention inside them, and waits for the neighbour."""

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.waited = 0.0
        self._inside: list[tuple[float, float]] = []

    @contextmanager
    def op(self, forward: bool) -> Iterator[None]:
        self._inside, begin = [], time.perf_counter()
        yield
        pieces, at = [], begin
        for first, last in self._inside:
            pieces += [Piece(False, first - at), Piece(True, last - first)]
            at = last
        number = sum(op.forward == forward for op in self.ops)
        self.ops.append(Op(forward, number, (*pieces, Piece(False, time.perf_counter() - at))))

    @contextmanager
    def attention(self) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self._inside.append((begin, time.perf_counter()))


class Stage:
    """This process' attention, its flag and its serving thread."""

    def __init__(self, rank: int, folder: str) -> None:
        self.rank, self.other, self.clock, self.serves, self.served = rank, 1 - rank, Clock(), False, 0
        with open(f"{folder}/flags", "r+b") as file:
            self.flags = mmap.mmap(file.fileno(), STAGES)
        self.groups = [dist.new_group(timeout=TIMEOUT) for _ in range(STAGES)]  # by client
        self.caller = ThreadPoolExecutor(1)
        self.server = threading.Thread(target=self._serve, daemon=True)
        self.server.start()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        begin, self.flags[self.rank] = time.perf_counter(), 1
        yield
        self.flags[self.rank] = 0
        self.clock.waited += time.perf_counter() - begin

    def close(self) -> None:
        dist.send(torch.zeros(4, dtype=torch.int64), self.other, self.groups[self.rank])
        self.server.join()

    def each(self, large: list[Block], compute: Compute, inputs: Inputs, rest: Callable[[], None], collect: Collect
             ) -> None:
        """Compute `rest` here, and the large blocks here or, the largest first, where the neighbour waits."""
        todo = deque(sorted(large, key=_pairs, reverse=True))
        away = self._hand_over(todo, inputs)
        rest()
        while todo or away is not None:
            if away is not None and (away[0].done() or not todo):
                collect(away[1], away[0].result())
                away = None
            away = self._hand_over(todo, inputs) if away is None else away
            if todo:
                block = todo.pop()
                collect(block, compute(_cut(inputs, block)))

    def _hand_over(self, todo: deque[Block], inputs: Inputs) -> tuple[Future[list[torch.Tensor]], Block] | None:
        if not self.serves or len(todo) < 2 or not self.flags[self.other]:
            return None
        self.served += 1
        block = todo.popleft()
        return self.caller.submit(self._call, _cut(inputs, block)), block

    def _call(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """At the neighbour: a header, then all tensors in one message; the answer is one too."""
        group, forward = self.groups[self.rank], len(tensors) == 3
        queries, keys = tensors[0 if forward else 1].shape[0], tensors[-1 if forward else 2].shape[0]
        dist.send(torch.tensor([1, forward, queries, keys]), self.other, group)
        dist.send(torch.cat([x.reshape(-1) for x in tensors]), self.other, group)
        shapes = _answer_shapes(forward, queries, keys)
        return _receive(shapes, self.other, group)

    def _serve(self) -> None:
        torch.set_num_threads(1)
        group, header = self.groups[self.other], torch.zeros(4, dtype=torch.int64)
        with torch.no_grad():
            while True:
                dist.recv(header, self.other, group)
                more, forward, queries, keys = header.tolist()
                if not more:
                    return
                tensors = _receive(_request_shapes(bool(forward), queries, keys), self.other, group)
                answer = forward_block(tensors) if forward else backward_block(tensors)
                dist.send(torch.cat([x.reshape(-1) for x in answer]), self.other, group)


def blocks(lengths: list[int]) -> tuple[list[Block], list[Block]]:
    """Blocks that are worth the way, and the others."""
    found, begin = [], 0
    for length in lengths:
        for first in range(begin, begin + length, BLOCK):
            last = min(first + BLOCK, begin + length)
            found.append((first, last, begin, last))
        begin += length
    return ([block for block in found if _pairs(block) >= WORTH], [block for block in found if _pairs(block) < WORTH])


def _pairs(block: Block) -> int:
    return (block[1] - block[0]) * (block[3] - block[2])


def _cut(inputs: Inputs, block: Block) -> list[torch.Tensor]:
    """q, k, v of a block, or with gradients dout, q, k, v, out, lse."""
    by_query, by_key = ([x[first:last] for x in some] for some, first, last in
                        ((inputs[0], *block[:2]), (inputs[1], *block[2:])))
    return [*by_query, *by_key] if len(by_query) == 1 else [*by_query[:2], *by_key, *by_query[2:]]


def _request_shapes(forward: bool, queries: int, keys: int) -> list[tuple[int, ...]]:
    q, k = (queries, HEADS, DIM), (keys, KV_HEADS, DIM)
    return [q, k, k] if forward else [q, q, k, k, q, (queries, HEADS)]


def _answer_shapes(forward: bool, queries: int, keys: int) -> list[tuple[int, ...]]:
    q, k = (queries, HEADS, DIM), (keys, KV_HEADS, DIM)
    return [q, (queries, HEADS)] if forward else [q, k, k]


def _receive(shapes: list[tuple[int, ...]], source: int, group: Any) -> list[torch.Tensor]:
    sizes = [int(np.prod(shape)) for shape in shapes]
    flat = torch.empty(sum(sizes))
    dist.recv(flat, source, group)
    return [part.view(shape) for part, shape in zip(flat.split(sizes), shapes, strict=True)]


def forward_block(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    q, k, v = tensors
    return list(KERNEL.forward(q, k, v, _prepared([(0, len(q), 0, len(k))])))


def backward_block(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    inputs = BackwardInputs(*tensors)
    return list(KERNEL.backward(inputs, _prepared([(0, len(inputs.q), 0, len(inputs.k))])))


def _prepared(some: list[Block]) -> Any:
    return KERNEL.prepare(TaskRows.aligned(*np.array(some, dtype=np.int64).reshape(-1, 4).T), torch.device("cpu"))


class Attend(torch.autograd.Function):
    """Attention of packed documents in blocks, each computed here or by the neighbour."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, stage: Stage, lengths: list[int]
                ) -> torch.Tensor:
        large, small = blocks(lengths)
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:2])

        def rest() -> None:
            for whole, part in zip((out, lse), KERNEL.forward(q, k, v, _prepared(small)), strict=True):
                whole.copy_(part)

        def collect(block: Block, answer: list[torch.Tensor]) -> None:
            out[block[0]:block[1]], lse[block[0]:block[1]] = answer

        with stage.clock.attention():
            stage.each(large, forward_block, ([q], [k, v]), rest, collect)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.stage, ctx.large, ctx.small = stage, large, small
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))

        def rest() -> None:
            inputs = BackwardInputs(grads[0], q, k, v, out, lse)
            for whole, part in zip((dq, dk, dv), KERNEL.backward(inputs, _prepared(ctx.small)), strict=True):
                whole.copy_(part)

        def collect(block: Block, answer: list[torch.Tensor]) -> None:
            dq[block[0]:block[1]] = answer[0]
            dk[block[2]:block[3]] += answer[1]
            dv[block[2]:block[3]] += answer[2]

        with ctx.stage.clock.attention():
            ctx.stage.each(ctx.large, backward_block, ([grads[0], q, out, lse], [k, v]), rest, collect)
        return dq, dk, dv, None, None


class StageAttention(torch.nn.Module):
    """Megatron's place for core attention."""

    def __init__(self, *_: Any, stage: Stage, **__: Any) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, /, *, packed_seq_params: Any,
                **_: Any) -> torch.Tensor:
        lengths = packed_seq_params.cu_seqlens_q.diff().tolist()
        return Attend.apply(q, k, v, self.stage, lengths).flatten(1)
