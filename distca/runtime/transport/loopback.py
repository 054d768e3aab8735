"""Loopback transport: ranks are threads of one process, so a test can run a pool or pipeline without process groups."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch

from distca.runtime.transport.interface import Handle, TransportError

Result = TypeVar("Result")


class LoopbackWorld:
    """Ranks as threads of one process. Exchanges match by the order in which each rank calls them."""

    def __init__(self, size: int, timeout_seconds: float = 60.0) -> None:
        self.size, self.timeout_seconds = size, timeout_seconds
        self.changed = threading.Condition()
        self.posted: dict[tuple[int, int], tuple[str, Any]] = {}  # (sequence, rank) -> call, and the rank's value
        self.readers: dict[int, int] = {}                        # sequence -> number of ranks that have read it
        self.failed: BaseException | None = None
        self.passed: defaultdict[tuple[int, int], dict[int, torch.Tensor]] = defaultdict(dict)  # (from, to) in flight

    def run(self, body: Callable[[LoopbackTransport], Result]) -> list[Result]:
        """Run `body` once per rank, in parallel; the first failure ends every rank and is raised."""
        results: list[Any] = [None] * self.size

        def one(rank: int) -> None:
            try:
                results[rank] = body(LoopbackTransport(self, rank))
            except BaseException as error:
                with self.changed:
                    self.failed = self.failed or error
                    self.changed.notify_all()

        threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.failed is not None:
            raise self.failed
        return results

    def post(self, sequence: int, rank: int, call: str, value: Any) -> None:
        with self.changed:
            self.posted[sequence, rank] = call, value
            self.changed.notify_all()

    def collect(self, sequence: int, rank: int) -> list[Any]:
        """Wait until every rank has posted its value for this exchange, and return the values."""
        with self.changed:
            arrived = self.changed.wait_for(
                lambda: self.failed is not None or all((sequence, r) in self.posted for r in range(self.size)),
                timeout=self.timeout_seconds)
            if self.failed is not None:
                raise TransportError(f"rank {rank} of {self.size}: another rank failed: {self.failed}")
            if not arrived:
                missing = [r for r in range(self.size) if (sequence, r) not in self.posted]
                raise TransportError(f"rank {rank} of {self.size}: ranks {missing} did not come to exchange {sequence} "
                                     f"within {self.timeout_seconds} s; every rank must make the same calls in order")
            calls = [self.posted[sequence, r][0] for r in range(self.size)]
            if len(set(calls)) > 1:
                raise TransportError(f"rank {rank} of {self.size}: at call {sequence} the ranks do different things, "
                                     f"{calls}; one of them follows another plan")
            values = [self.posted[sequence, r][1] for r in range(self.size)]
            self.readers[sequence] = self.readers.get(sequence, 0) + 1
            if self.readers[sequence] == self.size:
                del self.readers[sequence]
                for r in range(self.size):
                    del self.posted[sequence, r]
            return values


class LoopbackTransport:
    """One rank's end of a LoopbackWorld."""

    def __init__(self, world: LoopbackWorld, rank: int) -> None:
        self.world, self._rank, self.sequence = world, rank, 0

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self.world.size

    def exchange(self, send: torch.Tensor, send_splits: list[int], recv_splits: list[int]) -> Handle:
        sequence, self.sequence = self.sequence, self.sequence + 1
        self.world.post(sequence, self.rank, "exchange", send.split(send_splits))
        return _LoopbackHandle(partial(self._received, sequence, recv_splits))

    def gather(self, value: int, device: torch.device) -> list[int]:
        sequence, self.sequence = self.sequence, self.sequence + 1
        self.world.post(sequence, self.rank, "gather", value)
        return self.world.collect(sequence, self.rank)

    def _received(self, sequence: int, recv_splits: list[int]) -> torch.Tensor:
        splits = [sent[self.rank] for sent in self.world.collect(sequence, self.rank)]
        arrived = [len(split) for split in splits]
        if arrived != recv_splits:
            raise TransportError(f"rank {self.rank}: expected {recv_splits} bytes from each rank and got {arrived}; "
                                 "the ranks do not follow the same plan")
        return torch.cat(splits)


class LoopbackPointToPoint:
    """Stages as threads of one process; `chain` lists their ranks in the world."""

    def __init__(self, world: LoopbackWorld, chain: Sequence[int], stage: int) -> None:
        self.world, self.chain = world, list(chain)
        self.stage, self.num_stages = stage, len(self.chain)
        self._sent, self._expected = Counter[int](), Counter[int]()  # messages to and from each stage so far

    def send(self, tensor: torch.Tensor, stage: int) -> Handle:
        with self.world.changed:
            self.world.passed[self.chain[self.stage], self.chain[stage]][self._sent[stage]] = tensor.clone()
            self.world.changed.notify_all()
        self._sent[stage] += 1
        return _LoopbackHandle(lambda: tensor)

    def receive(self, shape: Sequence[int], like: torch.Tensor, stage: int) -> Handle:
        self._expected[stage] += 1
        return _LoopbackHandle(partial(self._received, tuple(shape), stage, self._expected[stage] - 1))

    def _received(self, shape: tuple[int, ...], stage: int, number: int) -> torch.Tensor:
        world, passed = self.world, self.world.passed[self.chain[stage], self.chain[self.stage]]
        with world.changed:
            world.changed.wait_for(lambda: world.failed is not None or number in passed, timeout=world.timeout_seconds)
            if number not in passed:
                reason = world.failed or f"nothing came within {world.timeout_seconds} s"
                raise TransportError(f"stage {self.stage} of {self.num_stages}: stage {stage} failed: {reason}")
            tensor = passed.pop(number)
        if tuple(tensor.shape) != shape:
            raise TransportError(f"stage {self.stage}: expected {shape} from stage {stage} and got "
                                 f"{tuple(tensor.shape)}; the stages do not follow the same ticks")
        return tensor


class _LoopbackHandle:
    def __init__(self, wait: Callable[[], torch.Tensor]) -> None:
        self.wait = wait
