"""Transports over torch.distributed: NCCL between GPUs, gloo between CPUs."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store, _world

from distca.runtime.transport.interface import Handle, TransportError
from distca.validation import UserError

Lost = Callable[[RuntimeError], TransportError]  # turns torch.distributed's error into one with a remedy


_SUBGROUPS: Counter[str] = Counter()  # made of each group so far


def subgroup(group: dist.ProcessGroup, members: Sequence[int], backend: str) -> dist.ProcessGroup:
    """Create a group of some of this group's ranks; every rank calls this at the same time, with its own members.

    torch names the new group after its ranks and the number of groups that the calling process is in. Processes with
    different names would wait for each other forever, so those in fewer groups first create groups of their own.
    """
    store, everyone, name = _get_default_store(), dist.get_process_group_ranks(group), group.group_name
    _SUBGROUPS[name] += 1
    key = f"distca/groups/{name}/{_SUBGROUPS[name]}"
    store.set(f"{key}/{dist.get_rank()}", str(len(_world.pg_names)))
    most = max(int(store.get(f"{key}/{rank}")) for rank in everyone)
    device = torch.device("cuda" if "cuda:nccl" in dist.get_backend_config(group) else "cpu")
    timeout = group._get_backend(device).options._timeout
    while len(_world.pg_names) < most:
        dist.new_group([dist.get_rank()], backend="gloo", timeout=timeout, use_local_synchronization=True)
    return dist.new_group([everyone[member] for member in members], backend=backend, timeout=timeout,
                          use_local_synchronization=True)


class C10dTransport:
    """torch.distributed's all-to-all on a process group: NCCL between GPUs, gloo on CPUs."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = initialized(group)
        self._rank, self._size = dist.get_rank(self.group), dist.get_world_size(self.group)

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._size

    def exchange(self, send: torch.Tensor, send_splits: list[int], recv_splits: list[int]) -> Handle:
        received = torch.empty(sum(recv_splits), dtype=torch.uint8, device=send.device)
        with _raising(self.lost):
            work = dist.all_to_all_single(received, send, recv_splits, send_splits, group=self.group, async_op=True)
        return _Started(work, self.lost, received, send)

    def gather(self, value: int, device: torch.device) -> list[int]:
        mine = torch.tensor([value], dtype=torch.int64, device=device)
        everyone = [torch.empty_like(mine) for _ in range(self.size)]
        with _raising(self.lost):
            dist.all_gather(everyone, mine, group=self.group)
        return torch.cat(everyone).tolist()

    def hosts(self) -> list[str]:
        """Return the host name of every rank; a collective call.

        Names are exchanged through the default store, because tensors of the group may need a GPU before one has been
        selected. Groups of up to two ranks never use two hops, so their names are left empty.
        """
        if self.size <= 2:
            return [""] * self.size
        store = _get_default_store()
        with _raising(self.lost):
            store.set(f"distca/host/{dist.get_rank()}", platform.node())
            return [store.get(f"distca/host/{rank}").decode() for rank in dist.get_process_group_ranks(self.group)]

    def subgroup(self, members: Sequence[int]) -> C10dTransport:
        """Return a transport over a new group of some of this group's ranks; every rank calls this, with its own."""
        return C10dTransport(subgroup(self.group, members, dist.get_backend_config(self.group)))

    def lost(self, error: RuntimeError) -> TransportError:
        return TransportError(
            f"rank {self.rank} of {self.size}: an attention exchange did not complete, because another rank died, hung "
            "past the group's timeout, left the loop or follows another plan; restart from the last checkpoint "
            f"({first_line(error)})")


class C10dPointToPoint:
    """torch.distributed's sends and receives between neighbouring stages.

    Each direction has a separate process group, so that a backend that serializes the operations of a group does not
    make a gradient wait for an activation. `chain` lists the ranks of the stages in order. With gloo, GPU tensors are
    copied through host memory.
    """

    def __init__(self, chain: Sequence[int], *, down: dist.ProcessGroup, up: dist.ProcessGroup) -> None:
        self.chain, self._groups = list(chain), {False: down, True: up}
        self.stage, self.num_stages = self.chain.index(dist.get_rank()), len(self.chain)

    def send(self, tensor: torch.Tensor, stage: int) -> Handle:
        group = self._groups[stage < self.stage]
        sent = tensor.contiguous() if _carries(group, tensor.device) else tensor.cpu()
        with _raising(self.lost):
            return _Started(dist.isend(sent, self.chain[stage], group), self.lost, tensor, sent)

    def receive(self, shape: Sequence[int], like: torch.Tensor, stage: int) -> Handle:
        group = self._groups[stage > self.stage]
        device = like.device if _carries(group, like.device) else torch.device("cpu")
        received = torch.empty(*shape, dtype=like.dtype, device=device)
        with _raising(self.lost):
            return _Started(dist.irecv(received, self.chain[stage], group), self.lost, received, device=like.device)

    def lost(self, error: RuntimeError) -> TransportError:
        return TransportError(f"stage {self.stage} of {self.num_stages}: a neighbouring stage died, or hung past the "
                              f"group's timeout; restart from the last checkpoint ({first_line(error)})")


class _Started:
    """A started operation; holds the sent tensor until the operation is done.

    On a GPU, `wait` makes the current stream wait, not the host. A relay waits on a stream of its own, so the sent
    tensor's memory must not return to the stream that allocated it before the relay's stream has waited.
    """

    def __init__(self, work: Any, lost: Lost, result: torch.Tensor, sent: torch.Tensor | None = None,
                 device: torch.device | None = None) -> None:
        self.work, self.lost, self.result, self.sent, self.device = work, lost, result, sent, device

    def wait(self) -> torch.Tensor:
        with _raising(self.lost):
            self.work.wait()
        if self.sent is not None and self.sent.is_cuda:
            self.sent.record_stream(torch.cuda.current_stream(self.sent.device))
        self.sent = None
        return self.result if self.device is None else self.result.to(self.device)


@contextmanager
def _raising(lost: Lost) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise lost(error) from error


def initialized(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Return the group, or the default group if None."""
    if not dist.is_initialized():
        raise UserError("torch.distributed is not initialized; call torch.distributed.init_process_group first, or "
                        "start the script with torchrun")
    whole = dist.group.WORLD if group is None else group
    assert whole is not None
    return whole


def _carries(group: dist.ProcessGroup, device: torch.device) -> bool:
    return device.type == "cpu" or "gloo" not in dist.get_backend_config(group).split(f"{device.type}:")[-1]


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, for quoting in our messages."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
