"""A dedicated server: a process that joins a run, computes attention for it, and leaves.

It holds nothing that anybody needs: a server that dies, hangs or loses a connection is out, and what it owed is
computed elsewhere. If it still runs, it notices, forgets everything, and joins again as a new one.
"""

from __future__ import annotations

import atexit
import logging
import os
import platform
import threading
import time
from collections.abc import Callable

import torch

from distca.runtime.pool.protocol import Message
from distca.runtime.pool.runner import Runner
from distca.runtime.transport import TransportError
from distca.runtime.transport.links import Address, Link, Links
from distca.runtime.transport.nixl import memory_for
from distca.validation import UserError

RETRY_SECONDS = 0.2
JOIN_SECONDS = 10.0   # that one attempt to join may take
LEAVE_SECONDS = 60.0  # that homes may take to let a leaving server go
LOG = logging.getLogger("distca")


class Server:
    """A server's life: join, serve, and join again whenever the run let it go, until the run ends or `leave`."""

    def __init__(
        self, find: Callable[[], Address], secret: bytes, *, device: torch.device | str = "cpu", wish: int = -1,
        patience_seconds: float = 60.0,
    ) -> None:
        self.find, self.secret, self.device = find, secret, torch.device(device)
        self.wish, self.patience_seconds, self.served = wish, patience_seconds, 0
        self.leaving = False
        self._session: _Session | None = None
        self._thread: threading.Thread | None = None             # the one that runs

    def run(self) -> int:
        """Serve until the run ends or this server was asked to leave; return the number of forward roles served.

        A run that cannot be joined for `patience_seconds` raises a TransportError.
        """
        self._thread = threading.current_thread()
        if self._thread is not threading.main_thread():
            atexit.register(self._end)
        try:
            return self._join_and_serve()
        finally:
            atexit.unregister(self._end)

    def _join_and_serve(self) -> int:
        deadline, why = time.monotonic() + self.patience_seconds, ""
        while not self.leaving:
            self._session = _Session(self)
            try:
                address = self.find()
                joined = self._session.join(address)
            except OSError as error:
                joined, why = False, str(error) or type(error).__name__
            except UserError:
                self._session.close()
                raise
            if joined:
                LOG.info("server rank %d serves", self._session.rank)
                self._session.serve()
                self.served += self._session.served
                deadline, why = time.monotonic() + self.patience_seconds, "the run let it go"
                if not (self._session.is_over or self.leaving):
                    LOG.info("server rank %d was let go and joins again", self._session.rank)
            self._session.close()
            if self._session.is_over:
                return self.served
            if time.monotonic() > deadline:
                raise TransportError(f"the run could not be joined for {self.patience_seconds:g} s ({why}); check the "
                                     "address and the secret, and whether the run still runs")
            if not self.leaving:
                time.sleep(RETRY_SECONDS)
        return self.served

    def leave(self) -> None:
        """Finish what is being computed and go; may be called by a signal handler."""
        self.leaving = True
        if self._session is not None:
            self._session.wake()

    def _end(self) -> None:
        """End after the role that runs now: Python, which is ending, aborts if a thread is in torch then."""
        self.leaving = True
        if self._session is not None:
            self._session.end()
        if self._thread is not None:
            self._thread.join()


class _Session:
    """A server's membership, from joining until it ends."""

    def __init__(self, server: Server) -> None:
        self.server, self.rank = server, -1
        self.is_over = self.is_out = False                       # the run has ended; this membership has
        self.links: dict[int, Link] = {}
        self.known: set[int] = set()                             # homes that know this server
        self.released: set[int] = set()                          # homes that will send nothing more
        self.changed = threading.Condition()
        self.welcome: Message | None = None
        self.runner: Runner | None = None
        self._links = Links(server.secret, self._receive, self._closed)

    @property
    def served(self) -> int:
        return 0 if self.runner is None else self.runner.served

    def join(self, address: Address) -> bool:
        """Ask rank 0 for a place, connect to all homes, and say that this server is ready."""
        first = self._connect(0, address)
        first.send({"kind": "join", "host": platform.node(), "pid": os.getpid(), "wish": self.server.wish})
        if not self._wait_for(lambda: self.welcome is not None):
            return False
        assert self.welcome is not None
        self.rank = int(self.welcome["rank"])
        links, theirs, mine = self.welcome["links"], self.welcome["device"], self.server.device
        if links == "nixl" and mine.type != theirs:
            raise UserError(f"attention.links is 'nixl', with which servers compute where the run's tensors are, on "
                            f"{theirs}, but this one's device is {mine.type}; use {theirs}, or train with links 'tcp'")
        if self.server.device.type == "cpu":
            torch.set_num_threads(int(self.welcome["threads"]))  # results depend on the number
        homes = [(int(rank), (str(host), int(port))) for rank, host, port in self.welcome["homes"]]
        self.runner = Runner([rank for rank, _ in homes], int(self.welcome["roles"]), self._send,
                             device=self.server.device, kernel=str(self.welcome["kernel"]))
        self._links.memory = memory_for(links, self.runner.device, address)
        for rank, home in homes:
            if rank != 0:
                self._connect(rank, home).send({"kind": "server", "rank": self.rank})
        if not self._wait_for(lambda: len(self.known) == len([rank for rank, _ in homes if rank != 0])):
            return False
        first.send({"kind": "ready"})
        return True

    def serve(self) -> None:
        """Run roles until this membership ends."""
        runner, said = self.runner, False
        assert runner is not None
        while not self.is_out:
            if self.server.leaving:
                return self._leave()
            with torch.no_grad():
                runner.run_next()
            if not said and (speed := runner.speed):
                said = True
                self._send(0, {"kind": "speed", "speed": speed}, None)

    def _leave(self) -> None:
        """Run what every home has sent until it let this server go."""
        runner, deadline = self.runner, time.monotonic() + LEAVE_SECONDS
        assert runner is not None
        self._send(0, {"kind": "leave"}, None)
        timer = threading.Timer(LEAVE_SECONDS, self.wake)
        timer.daemon = True
        timer.start()
        while not self.is_out and time.monotonic() < deadline and not (
                self.released.issuperset(runner.homes) and runner.offered.empty()):
            runner.run_next()
        timer.cancel()

    def wake(self) -> None:
        """End a wait of the runner."""
        if self.runner is not None:
            self.runner.offered.put(None)

    def close(self) -> None:
        self._links.close()

    def _connect(self, rank: int, address: Address) -> Link:
        link = self._links.connect(address)
        link.peer = rank
        with self.changed:
            self.links[rank] = link
        return link

    def _wait_for(self, reached: Callable[[], bool]) -> bool:
        with self.changed:
            return self.changed.wait_for(lambda: reached() or self.is_out, JOIN_SECONDS) and not self.is_out

    def _send(self, rank: int, message: Message, payload: torch.Tensor | None) -> None:
        self.links[rank].send(message, payload)

    def _receive(self, link: Link, message: Message, payload: torch.Tensor | None) -> None:
        kind = message["kind"]
        if kind in ("inputs", "plan"):
            assert self.runner is not None
            self.runner.offer(link.peer, message, payload)
        elif kind == "ping":
            link.send({"kind": "pong", "running": 0.0 if self.runner is None else self.runner.running_seconds})
        else:
            with self.changed:
                if kind == "welcome":
                    self.welcome = message
                elif kind == "known":
                    self.known.add(link.peer)
                elif kind == "released":
                    self.released.add(link.peer)
                elif kind == "bye":
                    self.is_over = True
                self.changed.notify_all()
            if kind == "released":
                self.wake()
            if kind == "bye":
                self.end()

    def _closed(self, link: Link) -> None:
        """A lost connection ends this membership."""
        self.end()

    def end(self) -> None:
        with self.changed:
            self.is_out = True
            self.changed.notify_all()
        self.wake()
