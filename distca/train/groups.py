"""Which ranks of a run train and which only serve attention, and the process groups that follow from it.

Ranks that train come first, a mesh of pipeline × data × tensor ranks; the last `attention.dedicated` ranks hold no
layers and serve. Heads are sharded under tensor parallelism, so a server belongs to one tensor index, and since the
index runs fastest everywhere, the ranks of one index are every `parallel.tensor`-th of all.

What a rank does that only serves attention: no layers, no data, no checkpoints, nothing that outlives a call.

It runs whatever the first training rank of its pool announces, until that says that the run is over. Asked to stop, it
goes on serving: those that train agree on the last step, save, and let it go.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from distca.runtime.attention import CoreAttention
from distca.runtime.dedicated import serve_until_stopped
from distca.runtime.transport import C10dTransport, Transport, TransportError, over_nodes
from distca.train.agreement import set_timeouts
from distca.train.settings import Settings


@dataclass(frozen=True, slots=True)
class Groups:
    """What every rank of a run constructs at the same time."""

    mesh: DeviceMesh                        # of the ranks that train; those that serve are outside
    servers: dist.ProcessGroup              # attention's pool: this tensor index's ranks, dedicated ones last
    homes: dist.ProcessGroup | None         # those of them that train; None on a rank that serves
    trainers: dist.ProcessGroup | None      # all ranks that train; None on a rank that serves


def num_training(settings: Settings, world: int) -> int:
    """Ranks 0 to this number train, those from it on serve."""
    return world - settings.attention.dedicated


def groups_of(settings: Settings, device: torch.device) -> Groups:
    world, rank = dist.get_world_size(), dist.get_rank()
    training, tensor, stages = num_training(settings, world), settings.parallel.tensor, settings.parallel.pipeline
    timeout = timedelta(seconds=settings.run.timeout_seconds)
    servers = group_of(range(rank % tensor, world, tensor), timeout)  # while all ranks are in as many groups
    mesh = init_device_mesh(device.type, (stages, training // tensor // stages, tensor),
                            mesh_dim_names=("pipeline", "data", "tensor"))
    if training == world:
        return Groups(mesh, servers, servers, dist.group.WORLD)
    if rank >= training:
        return Groups(mesh, servers, None, None)
    return Groups(mesh, servers, group_of(range(rank % tensor, training, tensor), timeout),
                  group_of(range(training), timeout))


def group_of(ranks: Sequence[int], timeout: timedelta, backend: str | None = None) -> dist.ProcessGroup:
    """A process group that only its own ranks construct, as ranks that serve take no part in what trainers do.

    torch names it by its ranks and by the number of groups that a rank is in already: that must be the same on all.
    """
    return dist.new_group(list(ranks), timeout=timeout, backend=backend, use_local_synchronization=True)


def transport_between(group: dist.ProcessGroup, settings: Settings) -> str | Transport:
    """As the settings name it, or over nodes of as many ranks as they say; flat where some ranks only serve."""
    chosen, per_node = settings.attention.transport, settings.attention.ranks_per_node
    if chosen == "c10d" and settings.attention.dedicated:        # they are in no groups but this
        return "flat"
    if chosen != "c10d" or not per_node:
        return chosen
    return over_nodes(C10dTransport(group), [rank // per_node for rank in range(dist.get_world_size(group))])


def serve(settings: Settings, device: torch.device) -> int:
    """Serve to the end of the run; how many calls that were. The trainers' failure is an error here too."""
    asked: list[int] = []

    def note(number: int, frame: Any) -> None:
        asked.append(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, note)
    groups = groups_of(settings, device)
    attention = CoreAttention(groups.servers, kernel=settings.attention.kernel,
                              transport=transport_between(groups.servers, settings))
    set_timeouts(timedelta(seconds=settings.run.timeout_seconds))
    try:
        return serve_until_stopped(attention, device)
    except TransportError:
        if asked:  # the trainers were asked too, and some ended before they listened
            return 0
        raise
