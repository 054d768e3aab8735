"""What ranks tell each other besides tensors, as JSON: nothing that arrives is ever executed. And how long they wait.

torch's own object collectives pickle; a rank that was taken over could then run code on all others.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from distca.validation import UserError

Value = TypeVar("Value")


def gather_json(value: Value, group: dist.ProcessGroup | None = None) -> list[Value]:
    """Every rank's value, on every rank, in rank order; only this rank's where there is no process group."""
    if not dist.is_initialized():
        return [value]
    mine = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    size = dist.get_world_size(group)
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(size)]
    dist.all_gather(lengths, torch.tensor([len(mine)]), group=group)
    longest = max(int(length) for length in lengths)
    padded = torch.nn.functional.pad(mine, (0, longest - len(mine)))
    everyone = [torch.empty(longest, dtype=torch.uint8) for _ in range(size)]
    dist.all_gather(everyone, padded, group=group)
    return [json.loads(bytes(part[:int(length)].numpy())) for part, length in zip(everyone, lengths, strict=True)]


def first_says(ask: Callable[[], Value], group: dist.ProcessGroup | None = None) -> Value:
    """Rank 0's answer, or its ValueError, on every rank: they must not disagree about what is on disk."""
    if not dist.is_initialized():
        return ask()
    answer: dict[str, Any] = {}
    if dist.get_rank() == 0:
        try:
            answer = {"value": ask()}
        except ValueError as error:
            answer = {"error": str(error)}
    answer = json.loads(from_first(json.dumps(answer).encode(), group))
    if "error" in answer:
        raise UserError(answer["error"])
    return cast(Value, answer["value"])


def from_first(content: bytes, group: dist.ProcessGroup | None = None) -> bytes:
    """Rank 0's bytes, of which there are some, on every rank."""
    length = torch.tensor([len(content)])
    dist.broadcast(length, src=0, group=group)
    sent = torch.empty(int(length), dtype=torch.uint8)
    if dist.get_rank() == 0:
        sent = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    dist.broadcast(sent, src=0, group=group)
    return sent.numpy().tobytes()


def all_equal(numbers: list[int], group: dist.ProcessGroup | None = None) -> bool:
    """Whether all ranks hold the same numbers, of up to 63 bits; by one reduction."""
    most = torch.tensor([[number, -number] for number in numbers])
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
    return bool((most[:, 0] == -most[:, 1]).all())


def set_timeouts(timeout: timedelta) -> None:
    """Every process group of this process waits this long, also those that a mesh made with torch's 30 minutes."""
    set_one = getattr(dist, "set_timeout", None) or distributed_c10d._set_pg_timeout  # its name before torch 2.15
    for group in list(distributed_c10d._world.pg_map):
        set_one(timeout, group)
