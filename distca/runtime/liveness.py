"""Detect dead or stuck ranks, avoid torch's gloo races, and return freed host memory to the system.

**Liveness.** gloo fails a collective as soon as a peer's connection closes. NCCL does not: the other ranks block in a
CUDA call until torch's watchdog aborts them. So a thread of every rank sends heartbeats to the next rank, over a
separate gloo connection:
- the connection closes: the previous rank ended (detected at once);
- no heartbeat for `timeout_seconds`: the previous rank is stopped, or its host is down;
- an NCCL collective of this rank is older than `timeout_seconds`: another rank hung or left the loop.
The rank that detects this sends the verdict around the ring, so all ranks end within seconds with the same reason.

**gloo** (torch 2.13 and 2.15, also without distca). The two worker threads of a group write the name of the finished
operation into one string without a lock; long names, such as DTensor's functional all-gather, are freed twice, which
corrupts the heap. With one worker per group there is no race. A worker also needs the GIL, and outlives
`destroy_process_group` if DDP, FSDP2, a device mesh or a functional collective holds the group: it then aborts the
process while the interpreter finalizes, or deadlocks with DDP's destructor. So our processes end without finalizing.

**Memory.** Exchange sizes differ in every step, so CPU tensors fragment glibc's heap and processes grow for hundreds of
steps. Trimming the heap periodically prevents this at almost no cost (`benchmarks/host_memory.py` compares it with a
small mmap threshold and with fewer arenas).
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from distca.runtime.transport.c10d import first_line
from distca.runtime.transport.interface import TransportError

ALIVE, DONE, ENDED, SILENT, STUCK = range(5)  # message kinds; the last three are verdicts about a rank
MAX_INTERVAL_SECONDS = 5.0
MEET_SECONDS = 0.1
GRACE_SECONDS = 1.5  # time for the main thread to fail by itself and close its files
TRIM_STEPS = 10      # optimizer steps between two trims of the heap
TRIM_CALLS = 256     # calls between two trims, on a dedicated server, which has no steps


class Liveness:
    """Watch the ranks of the default process group from `start` to `close`; `on_lost` ends the process."""

    def __init__(self, timeout_seconds: float, on_lost: Callable[[str], object]) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.timeout_seconds, self.on_lost = timeout_seconds, on_lost
        self.verdict: tuple[int, int] | None = None              # kind and rank
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

    def meet(self) -> None:
        """Wait, once and however long, until every rank has called this; a lost rank ends the run."""
        store = distributed_c10d._get_default_store()
        store.add("liveness/met", 1)
        while store.add("liveness/met", 0) < self.world:
            time.sleep(MEET_SECONDS)

    def close(self) -> None:
        """Announce that this rank is done, so that the next rank does not report its end as a failure."""
        self._wake.set()
        for thread in self._threads[:1]:
            thread.join(timeout=GRACE_SECONDS)

    def explained(self, error: RuntimeError) -> TransportError:
        """Return the error of a failed collective, naming the rank that caused it if known."""
        if self._threads and self._decided.wait(timeout=GRACE_SECONDS / 2):
            self._threads[0].join(timeout=GRACE_SECONDS / 2)     # sends the verdict, else the next blames this rank
        if self.verdict is not None:
            return TransportError(self.line())
        if isinstance(error, TransportError):
            return error
        return TransportError(
            f"rank {self.rank} of {self.world}: a collective did not complete, because another rank ended, or did not "
            f"answer within run.timeout_seconds ({self.timeout_seconds:g}); restart from the last checkpoint "
            f"({first_line(error)})")

    def line(self) -> str:
        """Return the verdict as a message."""
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
        """Send heartbeats and, at the end, the verdict or DONE."""
        while not self._wake.wait(min(MAX_INTERVAL_SECONDS, self.timeout_seconds / 8)):
            if oldest_nccl_seconds() > self.timeout_seconds:
                self._decide(STUCK, self.rank)
                break
            if not self._pass_on(ALIVE, self.rank):
                return                                           # the next rank is dead; its successor reports that
        self._pass_on(*(self.verdict or (DONE, self.rank)))
        if self.verdict == (STUCK, self.rank):
            self._end()

    def _pass_on(self, what: int, rank: int) -> bool:
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
            self._threads[0].join(timeout=GRACE_SECONDS)         # sends the verdict on
            self._end()

    def _decide(self, what: int, rank: int) -> None:
        self.verdict = self.verdict or (what, rank)
        self._decided.set()
        self._wake.set()

    def _end(self) -> None:
        time.sleep(GRACE_SECONDS)
        self.on_lost(self.line())


def is_lost(error: RuntimeError) -> bool:
    """Return whether torch.distributed or a transport raised this error because another rank ended."""
    return isinstance(error, (TransportError, dist.DistError)) or "/gloo/" in str(error)


def oldest_nccl_seconds() -> float:
    """Return the age of this process's oldest unfinished NCCL collective, from torch's flight recorder."""
    dump = getattr(torch._C._distributed_c10d, "_dump_nccl_trace_json", None)  # absent in builds without NCCL
    active = json.loads(dump(includeCollectives=True, onlyActive=True)).get("entries", ()) if dump else ()
    return max((time.time() - entry["time_created_ns"] / 1e9 for entry in active), default=0.0)


@cache
def one_worker_per_group() -> None:
    """Give every gloo group created from now on a single worker thread; torch has no option for this."""
    gloo: Any = dist.ProcessGroupGloo
    start = gloo.__init__

    def start_one_worker(self: Any, store: Any, rank: int, size: int, timeout: timedelta, **more: Any) -> None:
        options = gloo._Options()
        options._threads, options._timeout = 1, timeout
        interfaces = os.environ.get("GLOO_SOCKET_IFNAME")        # as torch reads it
        options._devices = [gloo.create_device(interface=name) for name in interfaces.split(",")] if interfaces else [
            gloo.create_default_device()]
        for name, value in more.items():
            setattr(options, name, value)
        start(self, store, rank, size, options)

    gloo.__init__ = start_one_worker


def end_process(code: int = 0) -> NoReturn:
    """Flush output and end this process, without finalizing the interpreter or running exit handlers.

    Call it last: after `dist.barrier()` and `dist.destroy_process_group()` on success, and while the model is still
    referenced, because DDP's destructor would wait for the group's workers.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def return_freed_memory() -> None:
    """Return free heap pages to the system, if the C library can (glibc; not musl or macOS)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is not None:
        trim(0)
