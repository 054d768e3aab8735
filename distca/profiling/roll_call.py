"""Know where every rank is, to name the rank or the link that the others wait for.

Ranks write the step they are at into the launcher's key-value store, which works before any process group does, and a
thread of each rank writes signs of life. If a step takes too long, the first rank that notices reports who never
joined, else who gives no sign of life, else who is furthest behind. Then all ranks end.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NoReturn

import torch.distributed as dist

from distca.runtime.liveness import end_process
from distca.runtime.transport.c10d import first_line
from distca.runtime.transport.interface import TransportError

BEAT_SECONDS = 0.25
SILENT_SECONDS = 2.0   # without a sign of life
MAX_NAMED = 8          # ranks in one line


class RollCall:
    """One rank's part of the roll call, until `close`. `report` says why the ranks end; then the process ends.

    Torchrun and our launcher hold the store; under srun rank 0 does. Torch waits inside its connection to the store, so
    it gets its own, `for_torch`.
    """

    def __init__(
        self, address: str, port: int, rank: int, world: int, *, timeout_seconds: float, report: Callable[[str], object]
    ) -> None:
        self.rank, self.world, self.timeout_seconds, self.report = rank, world, timeout_seconds, report
        self.holds_store = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        connect = timedelta(seconds=timeout_seconds * 2 / 3)     # a TCPStore tries twice: 1.4 to 2.1 times as long
        try:
            self.for_torch, self.store = (dist.PrefixStore(f"{name}/{attempt}", dist.TCPStore(
                address, port, is_master=is_master, wait_for_workers=False, timeout=connect))
                for name, is_master in (("torch", self.holds_store), ("roll call", False)))
        except dist.DistError as error:
            raise TransportError(f"rank {rank} does not reach rank 0 at {address}:{port} within {timeout_seconds:g} s; "
                                 f"start it, or check MASTER_ADDR and the firewall ({first_line(error)})") from None
        for store in (self.for_torch, self.store):
            store.set_timeout(timedelta(seconds=timeout_seconds))
        self.name = f"rank {rank}"                               # with its host, once that is known
        self.count = -1
        self.step("its start")
        self._closed, self._ending = threading.Event(), threading.Lock()
        threading.Thread(target=self._watch, name="distca-roll-call", daemon=True).start()

    def step(self, what: str) -> None:
        """Begin a step, named by what this rank waits for in it; every rank must begin equally many."""
        self.count, self.what, self.since = self.count + 1, what, time.monotonic()
        self.store.set(f"at/{self.rank}", json.dumps([self.count, self.name, what]))

    def gather(self, what: str, value: Any) -> list[Any]:
        """Return the values of all ranks, in rank order, on every rank."""
        self.step(what)
        self.store.set(f"{self.count}/{self.rank}", json.dumps(value))
        self.store.add(f"{self.count}", 1)
        while self.store.add(f"{self.count}", 0) < self.world:   # `_watch` ends the process where a rank does not come
            time.sleep(BEAT_SECONDS / 10)
        return [json.loads(one) for one in self.store.multi_get([f"{self.count}/{rank}" for rank in range(self.world)])]

    def close(self) -> None:
        """Wait until all ranks have come to their end."""
        self.gather("the end", None)
        self._closed.set()
        time.sleep(4 * BEAT_SECONDS if self.holds_store else 0)  # in which the others read that

    def lost(self, error: Exception | None = None) -> NoReturn:
        """End this process, and say why, unless another rank does."""
        self._ending.acquire()                                   # never released: other threads wait for the end
        try:
            if self.store.add("speaker", 1) == 1:
                self.report(self._line(error))
                self.store.set("ended", "yes")
            deadline = time.monotonic() + 2 * SILENT_SECONDS
            while not self.store.check(["ended"]) and time.monotonic() < deadline:
                self.store.add(f"beat/{self.rank}", 1)           # instead of the thread, which may be here
                time.sleep(BEAT_SECONDS)
            time.sleep(4 * BEAT_SECONDS if self.holds_store else 0)
        except RuntimeError as unreachable:
            self.report(f"{self.name}: rank 0 or its launcher, which holds the ranks' store, does not answer "
                        f"({first_line(error or unreachable)})")
        end_process(1)

    def _line(self, error: Exception | None) -> str:
        at = {rank: json.loads(self.store.get(f"at/{rank}")) for rank in range(self.world)
              if self.store.check([f"at/{rank}"])}
        absent = [rank for rank in range(self.world) if rank not in at]
        within = f"within {self.timeout_seconds:g} s (--timeout-seconds)"
        if absent and error is None:
            return (f"rank {', '.join(map(str, absent[:MAX_NAMED]))} did not join {within}; start it, or check that "
                    f"its host reaches that of {self.name}")
        before = {rank: self.store.add(f"beat/{rank}", 0) for rank in at if rank != self.rank}
        time.sleep(SILENT_SECONDS)
        silent = [rank for rank in before if self.store.add(f"beat/{rank}", 0) == before[rank]]
        if error is not None and not silent:
            return f"{self.name} failed during {self.what}: {first_line(error)}"
        least = min(count for count, *_ in at.values())
        named = silent or [rank for rank in at if at[rank][0] == least]
        fate = "ended or is stopped during" if silent else f"has not finished {within}:"
        return "; ".join(f"{at[rank][1]} {fate} {at[rank][2]}" for rank in named[:MAX_NAMED])

    def _watch(self) -> None:
        while not self._closed.wait(BEAT_SECONDS):
            try:
                self.store.add(f"beat/{self.rank}", 1)
                is_over = self.store.check(["ended"]) or time.monotonic() - self.since > self.timeout_seconds
            except RuntimeError as error:
                self.lost(error)
            if is_over and not self._closed.is_set():
                self.lost()
