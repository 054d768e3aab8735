"""Move bytes between ranks.

One call, `exchange(send, send_splits, recv_splits) -> handle`, whose `wait()` gives what arrived. c10d carries it over
NCCL or gloo; the loopback carries it between threads of one process, so that many fake ranks fit in one test. A rank
that dies or hangs ends in an error that says so, never in a silent wait.
"""

from __future__ import annotations

import pickle
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

Result = TypeVar("Result")


class Handle(Protocol):
    def wait(self) -> torch.Tensor:
        """What arrived, segment after segment in rank order."""
        ...


class Transport(Protocol):
    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def exchange(self, send: torch.Tensor, send_splits: list[int], recv_splits: list[int]) -> Handle:
        """Start sending `send` (uint8, segments in rank order) and receiving; every rank of the group takes part."""
        ...

    def gather(self, value: int, device: torch.device) -> list[int]:
        """Every rank's value, in rank order."""
        ...

    def tell(self, message: Any, rank: int) -> None:
        """Give one rank an object; it must call `hear`."""
        ...

    def hear(self) -> Any:
        """Wait for the next object that rank 0 tells."""
        ...


class TransportError(RuntimeError):
    """An exchange failed because another rank died, hung, or disagrees about it."""


class C10dTransport:
    """torch.distributed's all-to-all on a process group: NCCL between GPUs, gloo on CPUs.

    `control` is the group that carries announcements to dedicated servers, gloo where the main group is NCCL.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, control: dist.ProcessGroup | None = None) -> None:
        if not dist.is_initialized():
            raise ValueError("torch.distributed is not initialized; call torch.distributed.init_process_group first, "
                             "or start the script with torchrun")
        self.group = dist.group.WORLD if group is None else group
        self.control = self.group if control is None else control
        self._rank, self._size = dist.get_rank(self.group), dist.get_world_size(self.group)

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._size

    def exchange(self, send: torch.Tensor, send_splits: list[int], recv_splits: list[int]) -> Handle:
        received = torch.empty(sum(recv_splits), dtype=torch.uint8, device=send.device)
        try:
            work = dist.all_to_all_single(received, send, recv_splits, send_splits, group=self.group, async_op=True)
        except RuntimeError as error:
            raise _lost(self, error) from error
        return _C10dHandle(self, work, send, received)

    def gather(self, value: int, device: torch.device) -> list[int]:
        mine = torch.tensor([value], dtype=torch.int64, device=device)
        everyone = [torch.empty_like(mine) for _ in range(self.size)]
        try:
            dist.all_gather(everyone, mine, group=self.group)
        except RuntimeError as error:
            raise _lost(self, error) from error
        return torch.cat(everyone).tolist()

    def tell(self, message: Any, rank: int) -> None:
        try:
            dist.send_object_list([message], group=self.control, group_dst=rank)
        except RuntimeError as error:
            raise _lost(self, error) from error

    def hear(self) -> Any:
        box = [None]
        try:
            dist.recv_object_list(box, group=self.control, group_src=0)
        except RuntimeError as error:
            raise _lost(self, error) from error
        return box[0]


class _C10dHandle:
    def __init__(self, transport: C10dTransport, work: Any, send: torch.Tensor, received: torch.Tensor) -> None:
        self.transport, self.work, self.received = transport, work, received
        self.send: torch.Tensor | None = send                    # must live until the exchange is done

    def wait(self) -> torch.Tensor:
        try:
            self.work.wait()
        except RuntimeError as error:
            raise _lost(self.transport, error) from error
        self.send = None
        return self.received


def _lost(transport: C10dTransport, error: RuntimeError) -> TransportError:
    first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return TransportError(
        f"rank {transport.rank} of {transport.size}: an attention exchange did not complete, because another rank "
        "died, hung past the group's timeout, left the loop or follows another plan; restart from the last checkpoint "
        f"({first_line})")


class LoopbackWorld:
    """Fake ranks as threads of one process. Exchanges match by the order in which each rank calls them."""

    def __init__(self, size: int, timeout_seconds: float = 60.0) -> None:
        self.size, self.timeout_seconds = size, timeout_seconds
        self.changed = threading.Condition()
        self.posted: dict[tuple[int, int], tuple[str, Any]] = {}  # (sequence, rank) -> call, and what the rank brought
        self.readers: dict[int, int] = {}                        # sequence -> ranks that have read all of it
        self.failed: BaseException | None = None
        self.told: list[deque[bytes]] = [deque() for _ in range(size)]  # messages to each rank, pickled
        self.passed: dict[tuple[int, int], deque[torch.Tensor]] = {}    # (from, to) -> tensors on their way

    def run(self, body: Callable[[LoopbackTransport], Result]) -> list[Result]:
        """Run `body` once per rank, side by side; the first failure ends every rank and is raised."""
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
        """What every rank brought to this exchange, once all have."""
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
    """One fake rank's end of a LoopbackWorld."""

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
        return _LoopbackHandle(self, sequence, recv_splits)

    def gather(self, value: int, device: torch.device) -> list[int]:
        sequence, self.sequence = self.sequence, self.sequence + 1
        self.world.post(sequence, self.rank, "gather", value)
        return self.world.collect(sequence, self.rank)

    def tell(self, message: Any, rank: int) -> None:
        with self.world.changed:
            self.world.told[rank].append(pickle.dumps(message))
            self.world.changed.notify_all()

    def hear(self) -> Any:
        world, told = self.world, self.world.told[self.rank]
        with world.changed:
            world.changed.wait_for(lambda: told or world.failed is not None, timeout=world.timeout_seconds)
            if told:
                return pickle.loads(told.popleft())
        reason = f"another rank failed: {world.failed}" if world.failed else f"none within {world.timeout_seconds} s"
        raise TransportError(f"rank {self.rank} of {self.size}: nothing to serve was announced ({reason})")


class _LoopbackHandle:
    def __init__(self, transport: LoopbackTransport, sequence: int, recv_splits: list[int]) -> None:
        self.transport, self.sequence, self.recv_splits = transport, sequence, recv_splits

    def wait(self) -> torch.Tensor:
        rank = self.transport.rank
        segments = [sent[rank] for sent in self.transport.world.collect(self.sequence, rank)]
        arrived = [len(segment) for segment in segments]
        if arrived != self.recv_splits:
            raise TransportError(f"rank {rank}: expected {self.recv_splits} bytes from each rank and got {arrived}; "
                                 "the ranks do not follow the same plan")
        return torch.cat(segments)
