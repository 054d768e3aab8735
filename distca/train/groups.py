"""Process groups of a run, and collectives that exchange JSON.

Training ranks form a mesh of pipeline × data × tensor ranks. Tensor parallelism shards the heads, so attention is among
the ranks of one tensor index: those with the same rank modulo `parallel.tensor`. Dedicated servers are in no group.
Objects are sent as JSON, because torch's object collectives unpickle what they receive, and a compromised rank could
run code on all others.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.rendezvous import rendezvous

from distca.runtime.liveness import one_worker_per_group
from distca.runtime.pool.home import ServerPool
from distca.runtime.pool.transport import PoolTransport
from distca.runtime.transport import C10dTransport, Transport, over_nodes, transport_for
from distca.train.rank_env import restarts
from distca.train.settings import Settings
from distca.validation import UserError

Value = TypeVar("Value")


def start_group(settings: Settings, device: torch.device, local_world: int, **meeting: Any) -> None:
    """Join the launcher's process group, over NCCL if no two ranks share a GPU, else over gloo.

    `meeting` may be the store, rank and world_size of init_process_group, in place of the launcher's address.
    """
    own_gpu = device.type == "cuda" and local_world <= torch.cuda.device_count()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    one_worker_per_group()
    count, _ = restarts(os.environ)
    if count and "store" not in meeting:                         # torchrun's store has the lost ranks' addresses
        store, rank, world = next(rendezvous("env://", meeting.get("rank", -1), meeting.get("world_size", -1)))
        meeting = {"store": dist.PrefixStore(f"restart-{count}", store), "rank": rank, "world_size": world}
    dist.init_process_group("cpu:gloo,cuda:nccl" if own_gpu else "gloo",
                            timeout=timedelta(seconds=settings.run.timeout_seconds), **meeting)


def groups_of(settings: Settings, device: torch.device) -> tuple[DeviceMesh, dist.ProcessGroup]:
    """Return the mesh and the ranks of this tensor index, which share attention; all ranks call this together."""
    world, rank = dist.get_world_size(), dist.get_rank()
    tensor, stages = settings.parallel.tensor, settings.parallel.pipeline
    homes = group_of(range(rank % tensor, world, tensor), timedelta(seconds=settings.run.timeout_seconds))
    return init_device_mesh(device.type, (stages, world // tensor // stages, tensor),
                            mesh_dim_names=("pipeline", "data", "tensor")), homes


def group_of(ranks: Sequence[int], timeout: timedelta, backend: str | None = None) -> dist.ProcessGroup:
    """Create a process group by a call on its members only.

    torch names the group by its ranks and by the number of groups of the calling rank, which must be equal on all.
    """
    return dist.new_group(list(ranks), timeout=timeout, backend=backend, use_local_synchronization=True)


def transport_between(
    group: dist.ProcessGroup, settings: Settings, pool: ServerPool | None = None
) -> str | Transport:
    """Return the transport of `attention.transport`, with relays between nodes if `attention.ranks_per_node` is set.

    With dedicated servers every exchange is one hop.
    """
    chosen, per_node = settings.attention.transport, settings.attention.ranks_per_node
    if pool is not None:
        return PoolTransport(transport_for("flat" if chosen == "c10d" else chosen, group), pool)
    if chosen != "c10d" or not per_node:
        return chosen
    return over_nodes(C10dTransport(group), [rank // per_node for rank in range(dist.get_world_size(group))])


def set_timeouts(timeout: timedelta) -> None:
    """Set the timeout of every process group, including those that a mesh created with torch's default."""
    set_one = getattr(dist, "set_timeout", None) or distributed_c10d._set_pg_timeout  # the name before torch 2.15
    for group in list(distributed_c10d._world.pg_map):
        set_one(timeout, group)


def gather_json(value: Value, group: dist.ProcessGroup | None = None) -> list[Value]:
    """Return the values of all ranks, in rank order, on every rank; without a process group only this rank's value."""
    if not dist.is_initialized():
        return [value]
    mine = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    size = dist.get_world_size(group)
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(size)]
    dist.all_gather(lengths, torch.tensor([len(mine)]), group=group)
    longest = max(int(length) for length in lengths)
    padded = torch.nn.functional.pad(mine, (0, longest - len(mine)))
    gathered = [torch.empty(longest, dtype=torch.uint8) for _ in range(size)]
    dist.all_gather(gathered, padded, group=group)
    return [json.loads(bytes(part[:int(length)].numpy())) for part, length in zip(gathered, lengths, strict=True)]


def on_first(call: Callable[[], Value], group: dist.ProcessGroup | None = None) -> Value:
    """Call on rank 0 only; return its result, or raise its ValueError, on every rank."""
    if not dist.is_initialized():
        return call()
    answer: dict[str, Any] = {}
    if dist.get_rank() == 0:
        try:
            answer = {"value": call()}
        except ValueError as error:
            answer = {"error": str(error)}
    answer = json.loads(from_first(json.dumps(answer).encode(), group))
    if "error" in answer:
        raise UserError(answer["error"])
    return cast(Value, answer["value"])


def from_first(content: bytes, group: dist.ProcessGroup | None = None) -> bytes:
    """Return rank 0's `content`, of at least one byte, on every rank."""
    length = torch.tensor([len(content)])
    dist.broadcast(length, src=0, group=group)
    sent = torch.empty(int(length), dtype=torch.uint8)
    if dist.get_rank() == 0:
        sent = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    dist.broadcast(sent, src=0, group=group)
    return sent.numpy().tobytes()


def all_equal(numbers: list[int], group: dist.ProcessGroup | None = None) -> bool:
    """Return whether all ranks have the same numbers, of up to 63 bits, by one reduction."""
    most = torch.tensor([[number, -number] for number in numbers])
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
    return bool((most[:, 0] == -most[:, 1]).all())


def in_background(call: Callable[..., Value], *args: Any) -> Future[Value]:
    """Call on a daemon thread, which does not delay the end of the process."""
    future: Future[Value] = Future()

    def run() -> None:
        try:
            future.set_result(call(*args))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=f"distca-{call.__name__}", daemon=True).start()
    return future
