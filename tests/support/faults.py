"""Faults for servers that are real processes, at chosen moments of a run.

Servers are killed, stopped, lose packets or a connection, and their links are cut and slowed. Between these faults
some are asked to leave and others join. A fault counts once the kernel says that it happened.
"""

from __future__ import annotations

import json
import mmap
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial, wraps
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from distca.runtime.transport import TransportError
from distca.train.settings import Settings
from tests.support import sockets
from tests.support.hosts import Hosts, move_to
from tests.support.pools import SECRET, read_address
from tests.support.processes import fork_context
from tests.support.training import train_each

PROCESSES, CONNECTIONS, LINKS = ("kill", "stop", "blink"), ("reset", "loss"), ("cut", "slow")
CHANGES = ("leave", "join")      # no faults
MOMENTS = {  # where a training rank can be -> what it runs then: (module, class, method)
    "forward": [("distca.train.batches", "StageWork", "forward")],
    "backward": [("distca.train.batches", "StageWork", "backward")],
    "exchange": [("distca.runtime.pool.transport", "HomeCarrier", "exchange"),
                 ("distca.runtime.pool.home", "ServerPool", "wait")],
    "agreement": [("distca.train.batches", "Batches", "next"), ("distca.runtime.attention", "CoreAttention", "expect")],
    "save": [("distca.train.trainer", "Trainer", "save")],
}
ELSEWHERE = "elsewhere"          # between these
BOARD_BYTES = 64                 # ranks, a byte each
LONG_SECONDS = 1.5               # longer than the patience of the runs
SHORT_SECONDS = 0.1              # shorter
LOST_SHARE = 0.2                 # of packets
MOMENT_SECONDS = 2.0             # to wait for a moment
POLL_SECONDS = 0.0002
PATIENCE_SECONDS = 3.0           # for which a server tries to join again
END_SECONDS = 60.0               # for a server to end after its run: one attempt to join, its patience, and slack
GAVE_UP = 3                      # exit code of a server that could not join
Strike = tuple[float, Callable[[], bool]]  # what was done: when to undo it, and what does so and says if it happened


class Fault(NamedTuple):
    kind: str
    moment: str


def kinds(hosts: Hosts | None) -> tuple[str, ...]:
    """The faults that this system lets this user make."""
    return PROCESSES + (CONNECTIONS if sockets.can_reach() else ()) + (LINKS if hosts else ())


def serve_at(where: str, host: str) -> None:
    """A server's process: the run's address is in a file."""
    import torch

    from distca.runtime.liveness import end_process
    from distca.runtime.pool.server import Server
    from distca.train.servers import leave_on_signals

    if host:
        move_to(host)
    torch.set_num_threads(1)
    server = Server(partial(read_address, Path(where)), SECRET, patience_seconds=PATIENCE_SECONDS)
    leave_on_signals(server)
    try:
        server.run()
    except TransportError:
        end_process(GAVE_UP)
    end_process()


def train_noting_moments(transport: Any, runs: tuple[Settings, ...]) -> None:
    """On a training rank: train, and keep its byte of a shared file at the moment that it is in."""
    with Path(runs[0].log.folder, "moments").open("r+b") as file:
        board = mmap.mmap(file.fileno(), BOARD_BYTES)

    def noting(inner: Callable[..., Any], number: int) -> Callable[..., Any]:
        @wraps(inner)
        def run(*args: Any, **options: Any) -> Any:
            before, board[transport.rank] = board[transport.rank], number
            try:
                return inner(*args, **options)
            finally:
                board[transport.rank] = before
        return run

    for number, places in enumerate(MOMENTS.values(), 1):
        for module, owner, name in places:
            place = getattr(import_module(module), owner)
            setattr(place, name, noting(getattr(place, name), number))
    train_each(transport, runs)


class Disturber:
    """Starts the servers of a run, and disturbs them until there were enough faults; `seed` makes it choose.

    Then the first training rank gets the signal `last`: by default the one that asks the run to stop.
    """

    def __init__(self, log: Path, trainers: int, servers: int, *, seed: str, faults: int, pause_seconds: float,
                 hosts: Hosts | None = None, last: int = signal.SIGTERM) -> None:
        self.log, self.trainers, self.most, self.faults, self.last = log, trainers, servers, faults, last
        self.pause_seconds, self.hosts, self.random = pause_seconds, hosts, random.Random(seed)
        self.done: list[Fault] = []
        self.running: dict[int, Any] = {}                        # process id -> process, also after its end
        self.host_of: dict[int, str] = {}
        self._ends, self._timers = threading.Event(), list[threading.Timer]()
        log.mkdir(parents=True, exist_ok=True)
        (log / "moments").write_bytes(bytes(BOARD_BYTES))
        with (log / "moments").open("r+b") as file:
            self.board = mmap.mmap(file.fileno(), BOARD_BYTES)
        self.failed: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Disturber:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End, and check that every server has ended with the run, in a way that was meant."""
        self._ends.set()
        self._thread.join()
        deadline = time.monotonic() + END_SECONDS
        for process in self.running.values():
            process.join(max(deadline - time.monotonic(), 0.0))
        left = [*self._alive()]
        for pid in left:
            self.running[pid].kill()
            self.running[pid].join()
        assert self.failed is None, self.failed
        assert not left, f"{len(left)} servers outlived the run after {self.done}"
        codes = [process.exitcode for process in self.running.values()]
        assert {*codes} <= {0, GAVE_UP, -signal.SIGKILL}, codes

    def _start(self) -> None:
        host = self.random.choice(self.hosts.names) if self.hosts else ""
        process = fork_context().Process(target=serve_at, args=(str(self.log / "join.json"), host), daemon=True)
        process.start()
        assert process.pid is not None
        self.running[process.pid], self.host_of[process.pid] = process, host

    def members(self, state: str) -> list[int]:
        """The processes of this state, as the run lists them."""
        try:
            listed = json.loads((self.log / "members.json").read_text())["members"]
        except FileNotFoundError:
            return []
        return [one["pid"] for one in listed if one["state"] == state]

    def _run(self) -> None:
        try:
            while not (self.log / "join.json").exists() and not self._ends.wait(SHORT_SECONDS):
                pass
            for _ in range(self.most):
                self._start()
            while len(self.done) < self.faults and not self._ends.wait(
                    self.random.expovariate(1 / self.pause_seconds)):
                self._disturb()
        except Exception as error:
            self.failed = error
        for timer in self._timers:
            timer.join()
        for pid in [] if self._ends.is_set() else self.members("training")[:1]:  # it has seen enough
            with suppress(ProcessLookupError):
                os.kill(pid, self.last)

    def _disturb(self) -> None:
        """Wait for a moment at which some server serves, and do something to one that does."""
        kind = self.random.choice(kinds(self.hosts) + CHANGES)
        moment, alive = self.random.choice([*MOMENTS]), [*self._alive()]
        if not alive or (kind == "join" and len(alive) < 2 * self.most):
            return self._start()
        reached = self._wait_for(moment)
        serving = [pid for pid in self.members("serving") if pid in alive]
        if kind == "join" or not reached or not serving:
            return None
        pid = self.random.choice(serving)
        if kind == "leave":
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        else:
            self.strike(kind, pid, moment)
        if kind in ("kill", "leave") and self.random.random() < 0.8:
            self._start()
        return None

    def strike(self, kind: str, pid: int, moment: str) -> None:
        """Do it now, see at which moment that was, and after a while undo it and see whether it happened."""
        try:
            seconds, undo = getattr(self, f"_{kind}")(pid)
        except ProcessLookupError:                               # it has ended by itself
            return
        at = moment if self._is_at(moment) else ELSEWHERE

        def check() -> None:
            try:
                if undo():
                    self.done.append(Fault(kind, at))
            except Exception as error:
                self.failed = error

        if seconds:
            self._timers.append(threading.Timer(seconds, check))
            self._timers[-1].start()
        else:
            check()

    def _alive(self) -> Iterator[int]:
        return (pid for pid, process in [*self.running.items()] if process.is_alive())

    def _is_at(self, moment: str) -> bool:
        return 1 + [*MOMENTS].index(moment) in self.board[:self.trainers]

    def _wait_for(self, moment: str) -> bool:
        deadline = time.monotonic() + MOMENT_SECONDS
        while time.monotonic() < deadline and not self._ends.is_set():
            if self._is_at(moment):
                return True
            time.sleep(POLL_SECONDS)
        return False

    def _kill(self, pid: int) -> Strike:
        os.kill(pid, signal.SIGKILL)
        process = self.running[pid]

        def died() -> bool:
            process.join(END_SECONDS)
            return bool(process.exitcode == -signal.SIGKILL)
        return 0.0, died

    def _stop(self, pid: int, seconds: float = LONG_SECONDS) -> Strike:
        os.kill(pid, signal.SIGSTOP)

        def go_on() -> bool:
            with suppress(OSError):                              # it was killed meanwhile
                state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
                os.kill(pid, signal.SIGCONT)
                return state == "T"
            return False
        return seconds, go_on

    def _blink(self, pid: int) -> Strike:
        return self._stop(pid, SHORT_SECONDS)

    def _reset(self, pid: int) -> Strike:
        with sockets.connections(pid) as found:
            is_broken = bool(found) and sockets.reset(self.random.choice(found))
        return 0.0, lambda: is_broken

    def _loss(self, pid: int) -> Strike:
        with sockets.connections(pid) as found:
            for one in found:
                sockets.lose_packets(one, LOST_SHARE)

        def lost() -> bool:
            with sockets.connections(pid) as found:
                return sum(map(sockets.lose_no_more, found)) > 0
        return LONG_SECONDS, lost

    def _cut(self, pid: int) -> Strike:
        assert self.hosts is not None
        self.hosts.cut(self.host_of[pid])
        return LONG_SECONDS, partial(self.hosts.join, self.host_of[pid])

    def _slow(self, pid: int) -> Strike:
        assert self.hosts is not None
        self.hosts.slow(self.host_of[pid])
        return LONG_SECONDS, partial(self.hosts.hasten, self.host_of[pid])
