"""Notice a dead or stuck rank in time, and end this one with a line that names it.

gloo fails a collective as soon as a peer's connection closes. NCCL does not: survivors sit in a CUDA call until torch's
watchdog aborts them. So a thread of every rank sends a heartbeat to the next rank, over a gloo connection of its own:
- the connection closes: the rank before ended (found at once);
- no heartbeat for `timeout_seconds`: it is stopped, or its host is gone;
- an NCCL collective of this rank is older than `timeout_seconds`: another rank hung or left the loop.
Whoever notices passes the verdict on around the ring, so that all ranks end within seconds with the same reason.

Keep clear of two races in torch's gloo groups (seen in 2.13 and 2.15, without any code of ours).

A group runs its collectives on two worker threads. Both write the name of what they finished into one string of the
group, without a lock. Names of up to 15 characters stay inside the string; that of a functional all-gather, which
DTensor uses, is longer, and two workers that finish together free it twice: the heap is corrupt. One worker has nobody
to race with, and collectives of a group keep their order anyway.

A worker also takes the GIL to let go of tensors that Python holds too, and it outlives `destroy_process_group` wherever
DDP, FSDP2, a device mesh or a functional collective kept the group. A late one then finds the interpreter finalizing,
which ends the thread inside a destructor ("terminate called without an active exception"), or DDP's destructor, which
waits for the worker and holds the GIL that it needs. So our processes end without finalizing the interpreter.

Give memory that was freed back to the system, which glibc's heap does not do by itself.

Exchanges have other sizes in every step, so that tensors on a CPU leave holes that the next ones do not fit: processes
grow for hundreds of steps, although their live bytes do not. Trimming the heap now and then stops that for next to no
time. A small threshold for mmap does so too, but pays with page faults in every step; fewer arenas do not help.
`benchmarks/host_memory.py` compares them.
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


@cache
def one_worker_per_group() -> None:
    """Give every gloo group that this process makes from now on one worker thread; torch has no option for it."""
    import torch.distributed as dist

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
    """End this process with its output written, the interpreter not finalized and exit handlers not run.

    The last call of a rank, behind `dist.barrier()` and `dist.destroy_process_group()` where all went well, and while
    its model lives: that is the last to hold the group, and waits for its workers.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


TRIM_STEPS = 10    # optimizer steps between two trims
TRIM_CALLS = 256   # calls of a server that only serves, which knows no steps


def return_freed_memory() -> None:
    """Let the system have every page of the heap that holds nothing; where the C library has no such call, nothing."""
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@cache
def _malloc_trim() -> Callable[[int], int] | None:
    """glibc's; musl and macOS have none."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
