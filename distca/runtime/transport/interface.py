"""What moves bytes between ranks: exchanges among all of them, and point-to-point messages between two.

An exchange is one call, `exchange(send, send_splits, recv_splits) -> handle`, whose `wait()` gives what arrived. A rank
that dies or hangs ends in an error that says so, never in a silent wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch


class TransportError(RuntimeError):
    """An exchange failed because another rank died, hung, or disagrees about it."""


class Handle(Protocol):
    """Something that was started."""

    def wait(self) -> torch.Tensor:
        """What arrived: of an exchange, split after split in rank order."""


class Transport(Protocol):
    """One rank's end of a group whose ranks all exchange with each other."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def exchange(self, send: torch.Tensor, send_splits: list[int], recv_splits: list[int]) -> Handle:
        """Start sending `send` (uint8, splits in rank order) and receiving; every rank of the group takes part."""

    def gather(self, value: int, device: torch.device) -> list[int]:
        """Every rank's value, in rank order."""

    def send_message(self, message: bytes, rank: int) -> None:
        """Send one rank some bytes, or none; it must call `receive_message`."""

    def receive_message(self) -> bytes:
        """Wait for the next message of rank 0."""


class PointToPoint(Protocol):
    """One rank's end of a chain of pipeline stages: activations go to the next one, gradients to the one before.

    Only neighbours talk, in an order that both know from the ticks, so tensors carry no labels: the n-th that is sent
    one way is the n-th that is received there.
    """

    @property
    def stage(self) -> int: ...

    @property
    def num_stages(self) -> int: ...

    def send(self, tensor: torch.Tensor, stage: int) -> Handle:
        """Start sending to the stage before or after this one; `wait` until the tensor may be freed."""

    def receive(self, shape: Sequence[int], like: torch.Tensor, stage: int) -> Handle:
        """Start receiving from a neighbour a tensor of that shape, with the dtype and device of `like`."""
