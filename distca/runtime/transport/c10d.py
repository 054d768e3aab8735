"""Transports over torch.distributed: NCCL between GPUs, gloo between CPUs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from distca.runtime.transport.interface import Handle, TransportError
from distca.validation import UserError


class C10dTransport:
    """torch.distributed's all-to-all on a process group: NCCL between GPUs, gloo on CPUs.

    `control` is the group that carries announcements to dedicated servers, gloo where the main group is NCCL.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, control: dist.ProcessGroup | None = None) -> None:
        if not dist.is_initialized():
            raise UserError("torch.distributed is not initialized; call torch.distributed.init_process_group first, "
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
            raise self.lost(error) from error
        return _C10dHandle(self, work, send, received)

    def gather(self, value: int, device: torch.device) -> list[int]:
        mine = torch.tensor([value], dtype=torch.int64, device=device)
        everyone = [torch.empty_like(mine) for _ in range(self.size)]
        try:
            dist.all_gather(everyone, mine, group=self.group)
        except RuntimeError as error:
            raise self.lost(error) from error
        return torch.cat(everyone).tolist()

    def tell(self, message: bytes, rank: int) -> None:
        content = torch.frombuffer(bytearray(message), dtype=torch.uint8) if message else torch.empty(0)
        try:
            dist.send(torch.tensor([len(content)]).to(self._told_on), group=self.control, group_dst=rank)
            if message:
                dist.send(content.to(self._told_on), group=self.control, group_dst=rank)
        except RuntimeError as error:
            raise self.lost(error) from error

    def hear(self) -> bytes:
        length = torch.zeros(1, dtype=torch.int64, device=self._told_on)
        try:
            dist.recv(length, group=self.control, group_src=0)
            content = torch.empty(int(length), dtype=torch.uint8, device=self._told_on)
            if len(content):
                dist.recv(content, group=self.control, group_src=0)
        except RuntimeError as error:
            raise self.lost(error) from error
        return content.cpu().numpy().tobytes()

    @property
    def _told_on(self) -> torch.device:
        """Where the tensors of announcements are."""
        return torch.device("cuda" if dist.get_backend(self.control) == "nccl" else "cpu")

    def lost(self, error: RuntimeError) -> TransportError:
        return TransportError(
            f"rank {self.rank} of {self.size}: an attention exchange did not complete, because another rank died, hung "
            "past the group's timeout, left the loop or follows another plan; restart from the last checkpoint "
            f"({first_line(error)})")


class _C10dHandle:
    def __init__(self, transport: C10dTransport, work: Any, send: torch.Tensor, received: torch.Tensor) -> None:
        self.transport, self.work, self.received = transport, work, received
        self.send: torch.Tensor | None = send                    # must live until the exchange is done

    def wait(self) -> torch.Tensor:
        try:
            self.work.wait()
        except RuntimeError as error:
            raise self.transport.lost(error) from error
        self.send = None
        return self.received


class C10dPointToPoint:
    """torch.distributed's sends and receives between ranks that are a stage apart; every rank constructs it.

    Each way has a process group of its own, because a backend that runs the operations of a group one after another
    must not make a gradient wait for an activation. `chain` names the ranks of the stages in order. On gloo, which
    sends from the host, GPU tensors go through it.
    """

    def __init__(self, chain: Sequence[int], *, down: dist.ProcessGroup, up: dist.ProcessGroup) -> None:
        self.chain, self._groups = list(chain), {False: down, True: up}
        self.stage, self.num_stages = self.chain.index(dist.get_rank()), len(self.chain)

    def send(self, tensor: torch.Tensor, stage: int) -> Handle:
        group = self._groups[stage < self.stage]
        sent = tensor.contiguous() if _carries(group, tensor.device) else tensor.cpu()
        try:
            return _Passing(self, dist.isend(sent, self.chain[stage], group), sent, tensor.device)
        except RuntimeError as error:
            raise self.lost(error) from error

    def receive(self, shape: Sequence[int], like: torch.Tensor, stage: int) -> Handle:
        group = self._groups[stage > self.stage]
        device = like.device if _carries(group, like.device) else torch.device("cpu")
        received = torch.empty(*shape, dtype=like.dtype, device=device)
        try:
            return _Passing(self, dist.irecv(received, self.chain[stage], group), received, like.device)
        except RuntimeError as error:
            raise self.lost(error) from error

    def lost(self, error: RuntimeError) -> TransportError:
        return TransportError(f"stage {self.stage} of {self.num_stages}: a neighbouring stage died, or hung past the "
                              f"group's timeout; restart from the last checkpoint ({first_line(error)})")


class _Passing:
    def __init__(self, ends: C10dPointToPoint, work: Any, tensor: torch.Tensor, device: torch.device) -> None:
        self.ends, self.work, self.tensor, self.device = ends, work, tensor, device

    def wait(self) -> torch.Tensor:
        try:
            self.work.wait()
        except RuntimeError as error:
            raise self.ends.lost(error) from error
        return self.tensor.to(self.device)


def _carries(group: dist.ProcessGroup, device: torch.device) -> bool:
    return device.type == "cpu" or "gloo" not in dist.get_backend_config(group).split(f"{device.type}:")[-1]


def first_line(error: BaseException) -> str:
    """What an error says, short enough for a message of ours."""
    said = str(error).strip()
    return said.splitlines()[0] if said else type(error).__name__
