"""What several runtime tests share: a transport that writes down what it is asked to do."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch


class RecordingTransport:
    """Passes everything on; keeps the order of exchanges and waits, and weak references to all that travelled."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.log: list[tuple[str, int]] = []                     # ("send" | "wait", number of the exchange)
        self.sent_bytes: list[int] = []
        self.received_bytes: list[int] = []
        self.travelled: list[weakref.ref[torch.Tensor]] = []

    def exchange(self, send: torch.Tensor, send_splits: list[int], recv_splits: list[int]) -> Any:
        number = len(self.sent_bytes)
        self.log.append(("send", number))
        self.sent_bytes.append(sum(send_splits))
        assert send_splits[self.rank] == 0 == recv_splits[self.rank], "what stays home is not sent"
        self.received_bytes.append(sum(recv_splits))
        self.travelled.append(weakref.ref(send))
        return _RecordingHandle(self, self.inner.exchange(send, send_splits, recv_splits), number)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)                         # rank, size, gather and messages

    @property
    def alive(self) -> int:
        """Buffers that travelled and are still held by someone."""
        return sum(ref() is not None for ref in self.travelled)


class _RecordingHandle:
    def __init__(self, transport: RecordingTransport, inner: Any, number: int) -> None:
        self.transport, self.inner, self.number = transport, inner, number

    def wait(self) -> torch.Tensor:
        self.transport.log.append(("wait", self.number))
        arrived = self.inner.wait()
        self.transport.travelled.append(weakref.ref(arrived))
        return arrived


@pytest.fixture
def recording() -> type[RecordingTransport]:
    return RecordingTransport
