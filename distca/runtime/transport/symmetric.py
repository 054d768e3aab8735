"""Exchanges inside one node through symmetric memory: each rank writes directly into its peers' receive buffers.

A rank needs the offset of its split in each peer's buffer. So every exchange begins with a small gloo all-to-all, from
host to host, of offsets, sizes and required capacity. It costs a fraction of a millisecond and never waits for a GPU,
lets all ranks enlarge their buffers together, and detects a dead rank or a different plan before anything is launched.

The bytes then move on a side stream, in the order of the calls, which is the same on every rank:

    put      copy each split to its offset in the peer's slot
    barrier  one device-side barrier of all ranks: every split has arrived
    take     copy the slot into an ordinary tensor, which belongs to the caller

Two alternating slots are enough for any number of exchanges in flight. A rank puts exchange n only after its barrier
n - 1. A peer reaches barrier n - 1 only after it has taken exchange n - 2, since its side stream runs in order. So slot
n mod 2 of every peer has been taken before any rank writes to it again.
"""

from __future__ import annotations

import hashlib
import os
import platform
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory

from distca.runtime.transport.c10d import C10dTransport, initialized, subgroup
from distca.runtime.transport.interface import Handle, TransportError
from distca.validation import UserError

SLOTS = 2
MIN_CAPACITY = 2**24
SHARING = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"


class SymmetricTransport(C10dTransport):
    """A group of ranks on the GPUs of one node. Every rank of the group must construct it at the same time.

    If a rank dies between exchanges, the others' hosts detect it within the group's timeout. If it dies during an
    exchange, the others' device-side barrier ends their CUDA context after `timeout_seconds`.
    """

    def __init__(
        self, group: dist.ProcessGroup | None = None, device: torch.device | str | None = None, *,
        timeout_seconds: float = 600.0,
    ) -> None:
        if not torch.cuda.is_available():
            raise UserError("symmetric memory needs GPUs and torch finds none; use C10dTransport with gloo")
        self.device = _cuda_device(device)
        super().__init__(_with_gloo(group))
        self._timeout_ms = max(1, int(timeout_seconds * 1000))
        self._stream = torch.cuda.Stream(self.device)
        self._capacity, self._turn = 0, 0
        self._slots: torch.Tensor | None = None  # this rank's slots, which its peers write to
        self._shared: Any = None                 # torch's handle to the slots of all ranks
        self._peers: list[torch.Tensor] = []     # uint8 [SLOTS, capacity] of every rank
        self._check_node()

    def exchange(self, send: torch.Tensor, send_splits: list[int], recv_splits: list[int]) -> Handle:
        if send.device != self.device:
            raise UserError(f"send is on {send.device} but this transport is for {self.device}; move it there")
        offsets, needed = self._meet(send_splits, recv_splits)
        if self._slots is None or needed > self._capacity:
            self._grow(needed)
        slot, self._turn = self._turn, (self._turn + 1) % SLOTS
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            send.record_stream(self._stream)
            parts = send.split(send_splits)
            for distance in range(self.size):  # each rank starts with a different peer
                peer = (self.rank + distance) % self.size
                at, length = offsets[peer], send_splits[peer]
                if length:
                    self._peers[peer][slot, at:at + length].copy_(parts[peer], non_blocking=True)
            self._shared.barrier(channel=0, timeout_ms=self._timeout_ms)
            received = self._peers[self.rank][slot, :sum(recv_splits)].clone()
            done = torch.cuda.Event()
            done.record(self._stream)
        return _SymmetricHandle(received, done)

    def gather(self, value: int, device: torch.device) -> list[int]:
        return super().gather(value, torch.device("cpu"))

    def _meet(self, send_splits: list[int], recv_splits: list[int]) -> tuple[list[int], int]:
        """Return the offset of this rank's split in each peer's slot, and the bytes of the fullest slot."""
        begins = [sum(recv_splits[:peer]) for peer in range(self.size)]
        total = sum(recv_splits)
        sizes = torch.tensor([[begins[peer], recv_splits[peer], send_splits[peer], total] for peer in range(self.size)])
        share = [sizes[0].numel() * sizes.element_size()] * self.size
        wire = super().exchange(sizes.view(torch.uint8).flatten(), share, share).wait()
        theirs = wire.view(torch.int64).view(self.size, -1).tolist()
        for peer, (_, wanted, sent, _) in enumerate(theirs):
            if (wanted, sent) != (send_splits[peer], recv_splits[peer]):
                raise TransportError(
                    f"rank {self.rank}: sends {send_splits[peer]} bytes to rank {peer} and expects "
                    f"{recv_splits[peer]}, but that rank expects {wanted} and sends {sent}; the ranks do not follow "
                    "the same plan")
        return [begin for begin, *_ in theirs], max(total for *_, total in theirs)

    def _grow(self, needed: int) -> None:
        """Wait until no rank's side stream uses the old slots, then replace them by larger ones; a collective call."""
        self._stream.synchronize()
        self.gather(0, self.device)
        self._peers, self._shared, self._slots = [], None, None
        self._capacity, self._turn = max(MIN_CAPACITY, 1 << (needed - 1).bit_length()), 0
        with torch.cuda.device(self.device):
            self._slots = symmetric_memory.empty(SLOTS * self._capacity, dtype=torch.uint8, device=self.device)
            self._shared = symmetric_memory.rendezvous(self._slots, self.group)
        self._peers = [self._shared.get_buffer(peer, (SLOTS, self._capacity), torch.uint8)
                       for peer in range(self.size)]

    def _check_node(self) -> None:
        """Reject several nodes and unintended GPU sharing, which would fail later with less clear errors."""
        node, gpu = nodes_and_gpus(self, self.device)
        if len(set(node)) > 1:
            away = [rank for rank, other in enumerate(node) if other != node[self.rank]]
            raise UserError(f"ranks {away} are on another node than rank {self.rank}; use C10dTransport between nodes")
        sharing = [rank for rank, other in enumerate(gpu) if other == gpu[self.rank]]
        if len(sharing) > 1 and os.environ.get(SHARING) != "1":
            raise UserError(f"ranks {sharing} share one GPU; give each rank its own, or set {SHARING}=1 to allow it")


def nodes_and_gpus(transport: C10dTransport, device: torch.device) -> tuple[list[int], ...]:
    """Return a hash of every rank's node and a hash of its GPU."""
    names = platform.node(), str(torch.cuda.get_device_properties(device).uuid)
    return tuple(transport.gather(_number(name), device) for name in names)


class _SymmetricHandle:
    def __init__(self, received: torch.Tensor, done: torch.cuda.Event) -> None:
        self.received, self.done = received, done

    def wait(self) -> torch.Tensor:
        """Make the current stream wait, not the host."""
        stream = torch.cuda.current_stream(self.received.device)
        stream.wait_event(self.done)
        self.received.record_stream(stream)
        return self.received


def _cuda_device(device: torch.device | str | None) -> torch.device:
    named = torch.device("cuda" if device is None else device)
    if named.type != "cuda":
        raise UserError(f"device is {named}; symmetric memory needs a GPU (device cuda)")
    return torch.device("cuda", torch.cuda.current_device() if named.index is None else named.index)


def _with_gloo(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Return the group if it carries CPU tensors, else a new gloo group of the same ranks."""
    whole = initialized(group)
    if "cpu:gloo" in dist.get_backend_config(whole):
        return whole
    return subgroup(whole, range(dist.get_world_size(whole)), "gloo")


def _number(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)
