"""Faults for servers that are real processes: they are killed, stopped, cut off, asked to leave, and started anew."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from tests.support.pools import SECRET, read_address

KINDS = ("kill", "stop", "blink", "leave", "join", "reset")
STOP_SECONDS = 1.5       # longer than the patience of the runs
BLINK_SECONDS = 0.1      # shorter
PATIENCE_SECONDS = 10.0  # for which a server tries to join again


def serve_at(where: str) -> None:
    """A server's process: the run's address is in a file."""
    import torch

    from distca.runtime.liveness import end_process
    from distca.runtime.pool.server import Server
    from distca.train.servers import leave_on_signals

    torch.set_num_threads(1)
    server = Server(partial(read_address, Path(where)), SECRET, patience_seconds=PATIENCE_SECONDS)
    leave_on_signals(server)
    server.run()
    end_process()


def can_reset() -> bool:
    """Whether this user may break connections of other processes."""
    return os.geteuid() == 0 and shutil.which("ss") is not None


class Servers:
    """The servers of a run, and an injector that `seed` makes choose."""

    def __init__(self, where: Path, count: int, seed: int, pause_seconds: float = 0.4) -> None:
        self.where, self.count, self.pause_seconds = where, count, pause_seconds
        self.random = random.Random(seed)
        self.context = multiprocessing.get_context("forkserver")
        self.processes: list[Any] = []
        self.done: list[str] = []                                # faults so far
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._inject, daemon=True)
        for _ in range(count):
            self.start()

    def start(self) -> None:
        process = self.context.Process(target=serve_at, args=(str(self.where),), daemon=True)
        process.start()
        self.processes.append(process)

    def inject(self) -> None:
        """Once a server serves, faults come at random moments, until `close`; the first is a kill."""
        self._thread.start()

    def close(self) -> int:
        """End the injector; return how many servers did not end with the run, and end these."""
        self._ends.set()
        if self._thread.is_alive():
            self._thread.join()
        deadline = time.monotonic() + PATIENCE_SECONDS + 30      # one that was stopped did not hear of the end
        for process in self.processes:
            process.join(max(deadline - time.monotonic(), 0.0))
        left = [process for process in self.processes if process.is_alive()]
        for process in left:
            process.kill()
            process.join()
        return len(left)

    def serving(self) -> list[int]:
        """The processes that members.json lists as serving and that live."""
        try:
            listed = json.loads(self.where.with_name("members.json").read_text())["members"]
        except FileNotFoundError:
            return []
        return [one["pid"] for one in listed if one["state"] == "serving" and Path(f"/proc/{one['pid']}").exists()]

    def _inject(self) -> None:
        while not self._ends.wait(self.random.uniform(0, 2 * self.pause_seconds)):
            serving, alive = self.serving(), sum(process.is_alive() for process in self.processes)
            kind = self.random.choice(KINDS) if self.done else "kill"
            if not serving:
                if alive == 0:
                    self.start()
                continue
            if kind == "join" and alive >= 2 * self.count:
                kind = "kill"
            if kind == "join":
                self.start()
            else:
                with suppress(ProcessLookupError):               # it has ended by itself meanwhile
                    self._harm(kind, self.random.choice(serving))
            self.done.append(kind)
            if kind in ("kill", "leave") and self.random.random() < 0.7:
                self.start()

    def _harm(self, kind: str, pid: int) -> None:
        if kind == "kill":
            os.kill(pid, signal.SIGKILL)
        elif kind == "leave":
            os.kill(pid, signal.SIGTERM)
        elif kind == "reset":
            self._reset(pid)
        else:
            os.kill(pid, signal.SIGSTOP)
            self._ends.wait(STOP_SECONDS if kind == "stop" else BLINK_SECONDS)
            os.kill(pid, signal.SIGCONT)

    def _reset(self, pid: int) -> None:
        """Break one connection of a server, which neither end has closed."""
        shown = subprocess.run(["ss", "-tnpH", "state", "established"], capture_output=True, text=True, check=False)
        ports = [line.split()[2].rpartition(":")[2] for line in shown.stdout.splitlines() if f"pid={pid}," in line]
        if ports:
            subprocess.run(["ss", "-K", "sport", "=", f":{self.random.choice(ports)}"], check=False,
                           stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
