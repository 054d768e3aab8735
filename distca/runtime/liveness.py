"""Notice a dead or stuck rank in time, and end this one with a line that names it.

gloo fails a collective as soon as a peer's connection closes. NCCL does not: survivors sit in a CUDA call until torch's
watchdog aborts them. So a thread of every rank sends a heartbeat to the next rank, over a gloo connection of its own:
- the connection closes: the rank before ended (found at once);
- no heartbeat for `timeout_seconds`: it is stopped, or its host is gone;
- an NCCL collective of this rank is older than `timeout_seconds`: another rank hung or left the loop.
Whoever notices passes the verdict on around the ring, so that all ranks end within seconds with the same reason.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from distca.runtime.transport.c10d import first_line
from distca.runtime.transport.interface import TransportError

ALIVE, DONE, ENDED, SILENT, STUCK = range(5)  # what a message says; the last three are verdicts about a rank
MAX_INTERVAL_SECONDS = 5.0
GRACE_SECONDS = 1.5  # in which the main thread may fail by itself, and close what it has open


class Liveness:
    """Watch the ranks of the default process group from `start` to `close`; `on_lost` ends the process."""

    def __init__(self, timeout_seconds: float, on_lost: Callable[[str], object]) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.timeout_seconds, self.on_lost = timeout_seconds, on_lost
        self.verdict: tuple[int, int] | None = None              # what, and of which rank
        self._decided, self._wake = threading.Event(), threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self) -> Liveness:
        if self.world == 1:
            return self
        after, before = (self.rank + 1) % self.world, (self.rank - 1) % self.world
        edges = [(self.rank, after), (before, self.rank)]
        made = {edge: self._connect(*edge) for edge in (edges if self.rank % 2 == 0 else reversed(edges))}
        self._to, self._from = made[edges[0]], made[edges[1]]
        self._threads = [threading.Thread(target=run, daemon=True) for run in (self._send, self._receive)]
        for thread in self._threads:
            thread.start()
        return self

    def close(self) -> None:
        """This rank is done: the next one must not take its end for a failure."""
        self._wake.set()
        for thread in self._threads[:1]:
            thread.join(timeout=GRACE_SECONDS)

    def explained(self, error: RuntimeError) -> TransportError:
        """The error of a collective, with the rank that caused it where the others know."""
        if self._threads and self._decided.wait(timeout=GRACE_SECONDS / 2):
            self._threads[0].join(timeout=GRACE_SECONDS / 2)     # passes it on: else the next rank would name this one
        if self.verdict is not None:
            return TransportError(self.line())
        if isinstance(error, TransportError):
            return error
        return TransportError(
            f"rank {self.rank} of {self.world}: a collective did not complete, because another rank ended, or did not "
            f"answer within run.timeout_seconds ({self.timeout_seconds:g}); restart from the last checkpoint "
            f"({first_line(error)})")

    def line(self) -> str:
        """The verdict, for people."""
        assert self.verdict is not None
        what, rank = self.verdict
        waited = f"{self.timeout_seconds:g} s (run.timeout_seconds)"
        reason = {
            ENDED: f"rank {rank} ended in the middle of the run; its own output says why",
            SILENT: f"rank {rank} gave no sign of life for {waited}",
            STUCK: f"a collective of rank {rank} has not completed for {waited}: another rank hung or left the loop",
        }[what]
        return f"rank {self.rank} of {self.world}: {reason}; restart from the last checkpoint"

    def _connect(self, sender: int, receiver: int) -> Any:
        store = dist.PrefixStore(f"liveness/{sender}-{receiver}", distributed_c10d._get_default_store())
        return dist.ProcessGroupGloo(store, int(self.rank == receiver), 2, timedelta(seconds=self.timeout_seconds))

    def _send(self) -> None:
        """Send a heartbeat now and then, and at the end the verdict, or that this rank is done."""
        while not self._wake.wait(min(MAX_INTERVAL_SECONDS, self.timeout_seconds / 8)):
            if oldest_nccl_seconds() > self.timeout_seconds:
                self._decide(STUCK, self.rank)
                break
            if not self._say(ALIVE, self.rank):
                return                                           # the next rank is gone, which is not ours to judge
        self._say(*(self.verdict or (DONE, self.rank)))
        if self.verdict == (STUCK, self.rank):
            self._end()

    def _say(self, what: int, rank: int) -> bool:
        try:
            self._to.send([torch.tensor([what, rank])], 1, 0).wait()
        except RuntimeError:
            return False
        return True

    def _receive(self) -> None:
        message = torch.tensor([ALIVE, self.rank])
        while message[0] == ALIVE:
            try:
                self._from.recv([message], 0, 0).wait()
            except RuntimeError as error:
                what = SILENT if "imed out" in str(error) else ENDED
                message = torch.tensor([what, (self.rank - 1) % self.world])
        if message[0] != DONE:
            self._decide(*message.tolist())
            self._threads[0].join(timeout=GRACE_SECONDS)         # which passes it on
            self._end()

    def _decide(self, what: int, rank: int) -> None:
        self.verdict = self.verdict or (what, rank)
        self._decided.set()
        self._wake.set()

    def _end(self) -> None:
        time.sleep(GRACE_SECONDS)
        self.on_lost(self.line())


def is_lost(error: RuntimeError) -> bool:
    """Whether an error is torch.distributed's, or our transports', word of another rank's end."""
    return isinstance(error, (TransportError, dist.DistError)) or "/gloo/" in str(error)


def oldest_nccl_seconds() -> float:
    """Age of this process's oldest NCCL collective that has not completed, by torch's flight recorder of NCCL."""
    dump = getattr(torch._C._distributed_c10d, "_dump_nccl_trace_json", None)  # absent in builds without NCCL
    active = json.loads(dump(includeCollectives=True, onlyActive=True)).get("entries", ()) if dump else ()
    return max((time.time() - entry["time_created_ns"] / 1e9 for entry in active), default=0.0)
