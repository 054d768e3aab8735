"""Pass activations to the next stage of a pipeline and gradients to the one before.

Only neighbours talk, in an order that both know from the ticks, so tensors carry no labels: the n-th that is sent one
way is the n-th that is received there. Each way has a process group of its own, because a backend that runs the
operations of a group one after another must not make a gradient wait for an activation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from distca.runtime.transport import Handle, LoopbackWorld, TransportError


class Neighbours(Protocol):
    """One rank's end of a chain of stages."""

    @property
    def stage(self) -> int: ...

    @property
    def num_stages(self) -> int: ...

    def send(self, tensor: torch.Tensor, stage: int) -> Handle:
        """Start sending to the stage before or after this one; `wait` until the tensor may be forgotten."""
        ...

    def receive(self, shape: Sequence[int], like: torch.Tensor, stage: int) -> Handle:
        """Start receiving from a neighbour a tensor of that shape, with the dtype and device of `like`."""
        ...


class C10dNeighbours:
    """torch.distributed's point-to-point between ranks that are a stage apart; every rank constructs it.

    `chain` names the ranks of the stages in order. On gloo, which sends from the host, GPU tensors go through it.
    """

    def __init__(self, chain: Sequence[int], *, down: dist.ProcessGroup, up: dist.ProcessGroup) -> None:
        self.chain, self._groups = list(chain), {False: down, True: up}
        self._stage = self.chain.index(dist.get_rank())

    @property
    def stage(self) -> int:
        return self._stage

    @property
    def num_stages(self) -> int:
        return len(self.chain)

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
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        return TransportError(f"stage {self.stage} of {self.num_stages}: a neighbouring stage died, or hung past the "
                              f"group's timeout; restart from the last checkpoint ({first_line})")


class _Passing:
    def __init__(self, ends: C10dNeighbours, work: Any, tensor: torch.Tensor, device: torch.device) -> None:
        self.ends, self.work, self.tensor, self.device = ends, work, tensor, device

    def wait(self) -> torch.Tensor:
        try:
            self.work.wait()
        except RuntimeError as error:
            raise self.ends.lost(error) from error
        return self.tensor.to(self.device)


class LoopbackNeighbours:
    """Stages as threads of one process; `chain` names their ranks in the world."""

    def __init__(self, world: LoopbackWorld, chain: Sequence[int], stage: int) -> None:
        self.world, self.chain, self._stage = world, list(chain), stage

    @property
    def stage(self) -> int:
        return self._stage

    @property
    def num_stages(self) -> int:
        return len(self.chain)

    def send(self, tensor: torch.Tensor, stage: int) -> Handle:
        with self.world.changed:
            self.world.passed.setdefault((self.chain[self.stage], self.chain[stage]), deque()).append(tensor.clone())
            self.world.changed.notify_all()
        return _Ready(tensor)

    def receive(self, shape: Sequence[int], like: torch.Tensor, stage: int) -> Handle:
        return _Awaited(self, stage, tuple(shape))


class _Ready:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def wait(self) -> torch.Tensor:
        return self.tensor


class _Awaited:
    def __init__(self, ends: LoopbackNeighbours, stage: int, shape: tuple[int, ...]) -> None:
        self.ends, self.stage, self.shape = ends, stage, shape

    def wait(self) -> torch.Tensor:
        world, chain = self.ends.world, self.ends.chain
        way = chain[self.stage], chain[self.ends.stage]
        with world.changed:
            world.changed.wait_for(lambda: world.failed is not None or world.passed.get(way),
                                   timeout=world.timeout_seconds)
            if not world.passed.get(way):
                reason = world.failed or f"nothing came within {world.timeout_seconds} s"
                raise TransportError(f"stage {self.ends.stage} of {len(chain)}: stage {self.stage} failed: {reason}")
            tensor = world.passed[way].popleft()
        if tuple(tensor.shape) != self.shape:
            raise TransportError(f"stage {self.ends.stage}: expected {self.shape} from stage {self.stage} and got "
                                 f"{tuple(tensor.shape)}; the stages do not follow the same ticks")
        return tensor


def _carries(group: dist.ProcessGroup, device: torch.device) -> bool:
    return device.type == "cpu" or "gloo" not in dist.get_backend_config(group).split(f"{device.type}:")[-1]
