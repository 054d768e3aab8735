"""Interfaces of transports: exchanges among all ranks, and point-to-point messages between two.

An exchange is one call, `exchange(send, send_splits, recv_splits) -> handle`; `handle.wait()` returns the received
bytes. If a rank dies or hangs, the others raise an error instead of waiting forever.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch


class TransportError(RuntimeError):
    """Error for an exchange that failed because another rank died, hung or made a different call."""


class Handle(Protocol):
    """A started operation."""

    def wait(self) -> torch.Tensor:
        """Wait and return the received tensor; for an exchange, the splits in rank order."""


class Exchanges(Protocol):
    """Anything that exchanges."""

    def exchange(self, send: torch.Tensor, send_splits: list[int], recv_splits: list[int]) -> Handle:
        """Start sending `send` (uint8, splits in rank order) and receiving; every rank of the group takes part."""


class Transport(Exchanges, Protocol):
    """One rank's end of an all-to-all group."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def gather(self, value: int, device: torch.device) -> list[int]:
        """Return every rank's value, in rank order."""


class PointToPoint(Protocol):
    """One rank's end of a chain of pipeline stages: activations are sent to the next stage, gradients to the previous.

    Only neighbours communicate, in an order that both know from the ticks, so tensors need no labels: the n-th tensor
    sent in a direction is the n-th received.
    """

    @property
    def stage(self) -> int: ...

    @property
    def num_stages(self) -> int: ...

    def send(self, tensor: torch.Tensor, stage: int) -> Handle:
        """Start sending to a neighbouring stage; after `wait` the tensor may be freed."""

    def receive(self, shape: Sequence[int], like: torch.Tensor, stage: int) -> Handle:
        """Start receiving a tensor of that shape, with the dtype and device of `like`, from a neighbouring stage."""
