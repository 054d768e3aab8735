"""Connections between pairs of processes, each for itself: when one breaks, the others never notice.

A process group is one communicator: a peer that dies or stops blocks it for all. Here every pair has its own TCP
connection, nothing waits for a particular peer, and connections are made at any time.

**Frames.** A message is a JSON text of plain values, and may carry a payload, whose bytes are received into a tensor of
their own. `send` writes what the kernel takes at once; one thread of the process writes the rest, receives, and calls
`on_message` for each message of a link in the order of sending, and `on_closed` once a link has broken. With registered
memory (`nixl.py`) a payload is not in its message, but where the message says that it can be read.

**Trust.** Both ends prove that they know the run's secret before anything else is read: each answers the other's random
challenge by an HMAC, which neither shows the secret nor can be used twice. A stranger gets a few bytes and a few
seconds, on a thread of its own. What follows is neither encrypted nor signed, like the bytes of NCCL and gloo.
"""

from __future__ import annotations

import hmac
import json
import logging
import os
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from distca.runtime.transport.nixl import EXPOSED, MAX_PAYLOAD, TAKEN, RegisteredMemory
from distca.validation import UserError

Address = tuple[str, int]
HEAD = struct.Struct("<IQ")      # bytes of the text, bytes of the payload
MAX_TEXT = 16 << 20
CHALLENGE_BYTES = 32
HANDSHAKE_SECONDS = 5.0
MAX_STRANGERS = 32               # connections that have not proved anything yet
READS_IN_TURN = 64               # reads from one link before the others have their turn
CLOSE_SECONDS = 2.0              # time to write what was sent before `close`, and for peers to read what is exposed
KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}  # an idle link to a lost host ends in a minute
_READ, _WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE
LOG = logging.getLogger("distca")


class Link:
    """One connection. `peer` is set by whoever learns who is at the other end."""

    def __init__(self, sock: socket.socket, links: Links) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in KEEPALIVE.items():
            if hasattr(socket, name):                            # macOS has not all of them
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        sock.setblocking(False)
        self.sock, self.peer, self.heard = sock, -1, time.perf_counter()
        self.is_open, self.polled = True, 0                      # events that the thread waits for
        self.lock = threading.Lock()
        self.leaving: deque[memoryview] = deque()                # bytes that the kernel has not taken yet
        self.arrived: deque[tuple[dict[str, Any], torch.Tensor | None]] = deque()  # and not passed on yet
        self._links = links
        self._buffer, self._into = bytearray(), memoryview(b"")  # what is being received, and the part still to come
        self._expect(HEAD.size)
        self._lengths: tuple[int, int] | None = None
        self._message: Any = None
        self._payload: torch.Tensor | None = None

    def send(self, message: dict[str, Any], payload: torch.Tensor | None = None) -> None:
        """Send a message and the bytes of a tensor, which is complete and must not change; waits for no peer."""
        memory = self._links.memory
        if not self.is_open:
            return
        if payload is not None and payload.nbytes and memory is not None and payload.device.type == memory.device.type:
            try:
                exposed = memory.expose(self, payload)
            except ConnectionError as error:
                LOG.warning("sent a payload of %d bytes to rank %d over TCP: %s", payload.nbytes, self.peer, error)
            else:
                message, payload = {**message, EXPOSED: exposed}, None
                self._links.wake()
        if payload is not None:
            payload = payload.cpu()
        text = json.dumps(message).encode()
        parts = [memoryview(HEAD.pack(len(text), 0 if payload is None else payload.nbytes) + text)]
        if payload is not None and payload.nbytes:
            parts.append(_bytes_of(payload))
        with self.lock:
            was_idle = not self.leaving
            self.leaving.extend(parts)
            if was_idle:
                self.write()
            if self.leaving:
                self._links.wake()

    def write(self) -> None:
        """Write what the kernel takes; the caller holds the lock."""
        try:
            while self.leaving:
                sent = self.sock.sendmsg([self.leaving[at] for at in range(min(len(self.leaving), 8))])
                while self.leaving and sent >= len(self.leaving[0]):
                    sent -= len(self.leaving.popleft())
                if sent:
                    self.leaving[0] = self.leaving[0][sent:]
        except BlockingIOError:
            pass
        except OSError:                                          # reading notices it too, and says so
            self.leaving.clear()

    def read(self) -> bool:
        """Receive what there is; return whether the connection still stands."""
        for _ in range(READS_IN_TURN):
            try:
                count = self.sock.recv_into(self._into)
            except BlockingIOError:
                return True
            except OSError:
                return False
            if count == 0:
                return False
            self.heard = time.perf_counter()
            self._into = self._into[count:]
            while not len(self._into):
                if not self._advance():
                    return False
                if self._message is not None and not len(self._into):
                    self.arrived.append((self._message, self._payload))
                    self._lengths = self._message = self._payload = None
                    self._expect(HEAD.size)
        return True

    def close(self) -> None:
        """Break the connection, at both ends."""
        with self.lock:
            self.is_open = False
            self.leaving.clear()
            with suppress(OSError):
                self.sock.shutdown(socket.SHUT_RDWR)             # the reading thread sees the end, and closes

    def _expect(self, num_bytes: int) -> None:
        self._buffer = bytearray(num_bytes)
        self._into = memoryview(self._buffer)

    def _advance(self) -> bool:
        """Go on from the part that is complete: the head, the text or the payload; False if it is not ours."""
        if self._lengths is None:
            self._lengths = HEAD.unpack(self._buffer)
            if not 0 < self._lengths[0] <= MAX_TEXT or self._lengths[1] > MAX_PAYLOAD:
                return False
            self._expect(self._lengths[0])
        elif self._message is None:
            try:
                self._message = json.loads(self._buffer)
            except (ValueError, RecursionError):
                return False
            if not isinstance(self._message, dict):
                return False
            if self._lengths[1]:
                self._payload = torch.empty(self._lengths[1], dtype=torch.uint8)
                self._into = _bytes_of(self._payload)
        return True


class Links:
    """All connections of a process, and the thread that serves them; listens only if `listen` is given."""

    def __init__(
        self, secret: bytes, on_message: Callable[[Link, dict[str, Any], torch.Tensor | None], None],
        on_closed: Callable[[Link], None], *, listen: Address | None = None,
    ) -> None:
        self.secret, self.on_message, self.on_closed = secret, on_message, on_closed
        self.links: set[Link] = set()
        self.memory: RegisteredMemory | None = None              # where payloads are, unless in their messages
        self._added: deque[Link] = deque()
        self._ends, self._strangers, self._dropped = threading.Event(), threading.Semaphore(MAX_STRANGERS), 0
        self._selector = selectors.DefaultSelector()
        self._woken, self._waker = socket.socketpair()
        self._waker.setblocking(False)
        self._selector.register(self._woken, _READ)
        self.address: Address = ("", 0)
        self._listener = None
        if listen is not None:
            try:
                self._listener = socket.create_server(listen, family=socket.getaddrinfo(*listen)[0][0])
            except OSError as error:
                raise UserError(f"nobody can listen at {listen[0]}:{listen[1]} ({error.strerror}); give an address of "
                                "this host and a free port") from None
            self.address = self._listener.getsockname()[:2]
            self._selector.register(self._listener, _READ)
        self._thread = threading.Thread(target=self._run, name="distca-links", daemon=True)
        self._thread.start()

    def connect(self, address: Address, seconds: float = HANDSHAKE_SECONDS) -> Link:
        """Connect to a process that listens and knows the secret; raise OSError if there is none.

        That is a PermissionError if there is one with another secret. One that is busy with strangers closes at once.
        """
        sock, proves = socket.create_connection(address, timeout=seconds), False
        try:
            theirs, mine = _receive(sock, CHALLENGE_BYTES), os.urandom(CHALLENGE_BYTES)
            proves = True
            sock.sendall(mine + self._proof(b"connects", theirs, mine))
            if not hmac.compare_digest(_receive(sock, CHALLENGE_BYTES), self._proof(b"accepts", theirs, mine)):
                raise ConnectionError
        except OSError as error:
            sock.close()
            if proves and isinstance(error, ConnectionError):
                raise PermissionError("it has another secret, or ended") from None
            raise
        return self._add(sock)

    def close(self) -> None:
        """Write what was sent, then break all connections and end the thread."""
        deadline = time.monotonic() + CLOSE_SECONDS
        while time.monotonic() < deadline and (any(link.leaving for link in list(self.links)) or
                                               (self.memory is not None and self.memory.held)):
            time.sleep(0.01)
        self._ends.set()
        self.wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        ready: list[Any] = []
        while not self._ends.is_set():
            ready = self._selector.select(None if self.memory is None else self.memory.pause(bool(ready)))
            for key, events in ready:
                if key.data is not None:
                    self._serve(key.data, events)
                elif key.fileobj is self._woken:
                    self._woken.recv(4096)
                else:
                    self._meet_stranger()
            for link in () if self.memory is None else self.memory.waiting:
                self._serve(link, 0)
            while self._added:
                link = self._added.popleft()
                link.polled = self._selector.register(link.sock, _READ, link).events
            for link in list(self.links):
                if link.polled and link.polled != (wanted := _READ | (_WRITE if link.leaving else 0)):
                    link.polled = self._selector.modify(link.sock, wanted, link).events
        for link in list(self.links):
            self._drop(link)
        if self.memory is not None:
            self.memory.close()
        for one in (self._listener, self._woken, self._waker):
            if one is not None:
                one.close()
        self._selector.close()

    def _serve(self, link: Link, events: int) -> None:
        if events & _WRITE:
            with link.lock:
                link.write()
        try:
            stands = not events & _READ or link.read()
            self._pass_on(link)
        except ConnectionError as error:
            LOG.warning("dropped the connection to rank %d: %s", link.peer, error)
            stands = False
        except (LookupError, TypeError, ValueError) as error:      # a message that is not ours
            LOG.warning("dropped the connection to rank %d, which sent what cannot be read (%r)", link.peer, error)
            stands = False
        if not stands:
            self._drop(link)
            self.on_closed(link)

    def _pass_on(self, link: Link) -> None:
        """Pass on messages in the order of sending, each when its payload is here."""
        while link.arrived:
            message, payload = link.arrived[0]
            if EXPOSED in message:
                payload = self._registered().receive(link, message)
                if payload is None:
                    return
            link.arrived.popleft()
            if message.get("kind") == TAKEN:
                self._registered().taken(link, int(message["block"]))
            else:
                self.on_message(link, message, payload)

    def _registered(self) -> RegisteredMemory:
        if self.memory is None:
            raise ValueError("where to read memory, over links without it")
        return self.memory

    def _drop(self, link: Link) -> None:
        link.close()
        if self.memory is not None:
            self.memory.forget(link)
        if link.polled:
            self._selector.unregister(link.sock)
            link.polled = 0
        link.sock.close()
        self.links.discard(link)

    def _meet_stranger(self) -> None:
        assert self._listener is not None
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return
        if not self._strangers.acquire(blocking=False):
            sock.close()
            return
        threading.Thread(target=self._accept, args=(sock,), name="distca-accept", daemon=True).start()

    def _accept(self, sock: socket.socket) -> None:
        """Let a stranger prove that it knows the secret, or drop it."""
        try:
            deadline = time.monotonic() + HANDSHAKE_SECONDS
            mine = os.urandom(CHALLENGE_BYTES)
            sock.settimeout(HANDSHAKE_SECONDS)
            sock.sendall(mine)
            answer = _receive(sock, 2 * CHALLENGE_BYTES, deadline)
            theirs, proof = answer[:CHALLENGE_BYTES], answer[CHALLENGE_BYTES:]
            if not hmac.compare_digest(proof, self._proof(b"connects", mine, theirs)):
                raise ConnectionError("it does not know the secret")
            sock.sendall(self._proof(b"accepts", mine, theirs))
            self._add(sock)
        except OSError as error:
            self._dropped += 1
            if not self._dropped & (self._dropped - 1):          # 1, 2, 4 ...: strangers cannot fill the log
                LOG.warning("dropped %d connections that did not prove to know the run's secret (the last one: %s)",
                            self._dropped, error)
            sock.close()
        finally:
            self._strangers.release()

    def _add(self, sock: socket.socket) -> Link:
        link = Link(sock, self)
        self.links.add(link)
        self._added.append(link)
        self.wake()
        return link

    def _proof(self, role: bytes, acceptor: bytes, connector: bytes) -> bytes:
        return hmac.digest(self.secret, b"distca " + role + acceptor + connector, "sha256")

    def wake(self) -> None:
        with suppress(OSError):                                  # it is awake already, or has ended
            self._waker.send(b"w")


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    content: Any = tensor.view(torch.uint8).numpy()
    return memoryview(content).cast("B")


def _receive(sock: socket.socket, num_bytes: int, deadline: float | None = None) -> bytes:
    content = b""
    while len(content) < num_bytes:
        if deadline is not None:
            sock.settimeout(max(deadline - time.monotonic(), 1e-3))
        got = sock.recv(num_bytes - len(content))
        if not got:
            raise ConnectionError("it closed the connection")
        content += got
    return content
