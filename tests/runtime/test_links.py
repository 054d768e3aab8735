"""Connections between pairs: messages in order and whole, strangers dropped, and nobody held up by anybody."""

import fcntl
import queue
import socket
import struct
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from distca.runtime.transport import links as module
from distca.runtime.transport.links import CHALLENGE_BYTES, HEAD, Link, Links
from distca.runtime.transport.nixl import MAX_PAYLOAD, RegisteredMemory, memory_for
from distca.validation import UserError
from tests.support.pools import LINKS, NEEDS_NIXL
from tests.support.sockets import lose_packets

SECRET = b"what both ends know"
LOOPBACK = "127.0.0.1", 0
WAIT_SECONDS = 20


class End:
    """One process's links; notes what arrives and which links end."""

    def __init__(self, secret: bytes = SECRET, listens: bool = True, links: str = "tcp") -> None:
        self.arrived: queue.Queue[tuple[Link, dict[str, Any], torch.Tensor | None]] = queue.Queue()
        self.closed: queue.Queue[Link] = queue.Queue()
        self.links = Links(secret, lambda *about: self.arrived.put(about), self.closed.put,
                           listen=LOOPBACK if listens else None)
        self.links.memory = memory_for(links, torch.device("cpu"), LOOPBACK)


@contextmanager
def ends(*secrets: bytes, links: str = "tcp") -> Iterator[list[End]]:
    made = [End(secret, links=links) for secret in secrets]
    try:
        yield made
    finally:
        for end in made:
            end.links.close()


@pytest.fixture(params=LINKS)
def two(request: pytest.FixtureRequest) -> Iterator[tuple[End, End, Link]]:
    with ends(SECRET, SECRET, links=request.param) as (one, other):
        yield one, other, one.links.connect(other.links.address)


def test_messages_arrive_whole_and_in_order(two: tuple[End, End, Link]) -> None:
    """Empty ones, tensors of any dtype, and more than the kernel takes at once."""
    one, other, link = two
    sent: list[tuple[dict[str, Any], torch.Tensor | None]] = [
        ({"kind": "a", "n": [1, None, "é"]}, None), ({"kind": "b"}, torch.arange(7.0)), ({"kind": "c"}, torch.empty(0)),
        ({"kind": "d"}, torch.arange(5_000_000, dtype=torch.int64)), ({"kind": "e"}, torch.ones(3).bfloat16()),
        ({"kind": "f"}, None)]
    for message, payload in sent:
        link.send(message, payload)
    for message, payload in sent:
        _, got, content = other.arrived.get(timeout=WAIT_SECONDS)
        assert got == message
        if payload is None or not len(payload):
            assert content is None
        else:
            assert content is not None and torch.equal(content.view(payload.dtype), payload)
    assert one.links.memory is None or 0 < len(one.links.memory.blocks) <= 4


@NEEDS_NIXL
def test_a_payload_for_which_no_memory_can_be_registered_goes_over_tcp(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*args: Any) -> Any:
        raise RuntimeError("no room")

    with ends(SECRET, SECRET, links="nixl") as (one, other):
        link = one.links.connect(other.links.address)
        monkeypatch.setattr(RegisteredMemory, "_register", fails)
        link.send({"kind": "a"}, torch.arange(7.0))
        monkeypatch.undo()
        link.send({"kind": "b"}, torch.arange(3.0))
        for size in (7, 3):
            payload = other.arrived.get(timeout=WAIT_SECONDS)[2]
            assert payload is not None and torch.equal(payload.view(torch.float32), torch.arange(float(size)))
    assert "sent a payload of 28 bytes to rank -1 over TCP: memory cannot be registered (no room)" in caplog.text


def test_both_directions_at_once(two: tuple[End, End, Link]) -> None:
    """Megabytes each way, although neither end reads before it has sent all: a blocking send would wait forever."""
    one, other, link = two
    link.send({"kind": "first"})
    back, _, _ = other.arrived.get(timeout=WAIT_SECONDS)
    for _ in range(4):
        link.send({"kind": "there"}, torch.zeros(8 << 20, dtype=torch.uint8))
        back.send({"kind": "back"}, torch.ones(8 << 20, dtype=torch.uint8))
    for end, value in ((one, 1), (other, 0)):
        for _ in range(4):
            _, _, content = end.arrived.get(timeout=WAIT_SECONDS)
            assert content is not None and len(content) == 8 << 20 and bool((content == value).all())


def test_an_end_that_closes_or_vanishes_is_noticed_at_once(two: tuple[End, End, Link]) -> None:
    one, other, link = two
    link.send({"kind": "last"}, torch.zeros(1 << 20))
    link.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    other.arrived.get(timeout=WAIT_SECONDS)
    began = time.monotonic()
    link.close()
    other.closed.get(timeout=WAIT_SECONDS)
    assert one.closed.get(timeout=WAIT_SECONDS) is link and time.monotonic() - began < WAIT_SECONDS
    link.send({"kind": "more"}, torch.zeros(1 << 20))            # lost, without an error


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux, whose sockets take a filter")
def test_a_link_over_which_nothing_arrives_any_more_is_noticed_at_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing tells either end, and neither sends anything: a server would wait for hours for a home that is gone."""
    monkeypatch.setattr(module, "KEEPALIVE", {"TCP_KEEPIDLE": 1, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 2})
    with ends(SECRET, SECRET) as (one, other):
        link = one.links.connect(other.links.address)
        link.send({"kind": "a"})
        back, message, _ = other.arrived.get(timeout=WAIT_SECONDS)
        assert message == {"kind": "a"}
        while any(fcntl.ioctl(link.sock, termios.TIOCOUTQ, bytes(4))):  # not acknowledged yet
            time.sleep(0.01)
        for each in (link, back):
            lose_packets(each.sock, 1.0)
        assert one.closed.get(timeout=WAIT_SECONDS) is link
        assert other.closed.get(timeout=WAIT_SECONDS) is back


def test_who_does_not_know_the_secret_learns_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with ends(SECRET, b"another secret") as (one, other):
        with pytest.raises(PermissionError, match="another secret"):
            other.links.connect(one.links.address)
        for _ in range(7):
            with pytest.raises(PermissionError, match="another secret"):
                one.links.connect(other.links.address)
        assert one.arrived.empty() and other.arrived.empty() and not one.links.links
    said = [one.message.split()[1] for one in caplog.records if "did not prove to know the run's secret" in one.message]
    assert sorted(said) == ["1", "1", "2", "4"], "ever fewer lines, by either end"


def test_an_acceptor_without_the_secret_is_found_out() -> None:
    """It lets anybody in, and shows a connecting end's own proof back to it."""
    with socket.create_server(LOOPBACK) as false, ends(SECRET) as (one,):
        import threading

        def accept() -> None:
            sock, _ = false.accept()
            sock.sendall(b"c" * CHALLENGE_BYTES)
            answer = sock.recv(2 * CHALLENGE_BYTES, socket.MSG_WAITALL)
            sock.sendall(answer[CHALLENGE_BYTES:])

        threading.Thread(target=accept, daemon=True).start()
        with pytest.raises(OSError, match="another secret"):
            one.links.connect(false.getsockname())


def silent(sock: socket.socket) -> None:
    """Say nothing at all."""


def noisy(sock: socket.socket) -> None:
    sock.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)


def leaving(sock: socket.socket) -> None:
    sock.close()


@pytest.mark.parametrize("behave", [silent, noisy, leaving])
def test_strangers_are_dropped_without_harm(
    behave: Callable[[socket.socket], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """More of them than are listened to at once; who knows the secret gets in afterwards and is served meanwhile."""
    monkeypatch.setattr(module, "HANDSHAKE_SECONDS", 0.3)
    with ends(SECRET, SECRET) as (one, other):
        link = one.links.connect(other.links.address)
        strangers = [socket.create_connection(other.links.address) for _ in range(module.MAX_STRANGERS + 5)]
        for stranger in strangers:
            behave(stranger)
        link.send({"kind": "meanwhile"})
        assert other.arrived.get(timeout=WAIT_SECONDS)[1] == {"kind": "meanwhile"}
        time.sleep(0.5)
        one.links.connect(other.links.address).send({"kind": "afterwards"})
        assert other.arrived.get(timeout=WAIT_SECONDS)[1] == {"kind": "afterwards"}
        assert len(other.links.links) == 2
        for stranger in strangers:
            stranger.close()


@pytest.mark.parametrize("content", [
    HEAD.pack(0, 0), HEAD.pack(module.MAX_TEXT + 1, 0), HEAD.pack(5, MAX_PAYLOAD + 1) + b"{}   ",
    HEAD.pack(2, 0) + b"[]", HEAD.pack(3, 0) + b"\xff\xfe{", HEAD.pack(1 << 16, 0) + b"[" * (1 << 16),
], ids=["empty", "long text", "long payload", "no object", "no text", "deep"])
def test_a_peer_that_sends_anything_else_is_dropped(two: tuple[End, End, Link], content: bytes) -> None:
    """Sizes are checked before anything is allocated for them."""
    _, other, link = two
    with link.lock:
        link.leaving.append(memoryview(content))
        link.write()
    other.closed.get(timeout=WAIT_SECONDS)
    assert other.arrived.empty()


@pytest.mark.parametrize("message", [
    {"kind": "taken", "block": 99}, {"kind": "taken"}, {"exposed": [0]},
    {"exposed": [0, 1, 2, MAX_PAYLOAD + 1, -1, ""]}, {"exposed": [0, 1, 2, 8, -1, "no name"]}])
def test_a_peer_that_says_anything_else_of_memory_is_dropped(two: tuple[End, End, Link], message: Any) -> None:
    one, other, link = two
    link.send(message)
    assert other.closed.get(timeout=WAIT_SECONDS) and one.closed.get(timeout=WAIT_SECONDS) is link
    assert other.arrived.empty()


def test_an_address_that_cannot_be_listened_at_is_named() -> None:
    with socket.create_server(LOOPBACK) as taken, pytest.raises(UserError, match=r"nobody can listen at 127\.0\.0\.1:"):
        Links(SECRET, lambda *_: None, lambda _: None, listen=taken.getsockname())
    assert End(listens=False).links.address == ("", 0)
