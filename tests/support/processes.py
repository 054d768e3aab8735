"""Run a function in real processes that form a gloo group, or one of NCCL, and say how each of them ended.

Arguments and results travel pickled, between the processes of one call only.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import runpy
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from inspect import getfile
from multiprocessing.connection import Connection, wait
from typing import Any

COMMON = (  # imported once for the ranks of all tests, where this process has imported them
    "pytest", "hypothesis.strategies", "distca.train.trainer", "distca.integrations.huggingface",
    "transformers.models.llama.modeling_llama", "distca.integrations.megatron_core")


@dataclass(frozen=True, slots=True)
class ProcessOutcome:
    """How a process ended: with a value, with an error, or with neither."""

    value: Any                # None where the body raised or never came back
    error: str | None         # "TypeOfError: message"
    exit_code: int | None     # None: it was still running and was ended
    seconds: float            # from the moment the group stood


def fork_context() -> Any:
    """Where processes are forked from one that has imported what this one has of `COMMON`: they start in no time."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "distca.runtime.attention", *filter(sys.modules.__contains__, COMMON)])
    return context


def run_processes(
    size: int, body: Callable[..., Any], *args: Any, timeout_seconds: float = 20.0, deadline_seconds: float = 60.0,
    lost: int | None = None, nccl: bool = False, in_group: int | None = None,
) -> list[ProcessOutcome]:
    """Run `body(transport, *args)` in real processes that form a gloo group; none of them outlives this call.

    `body` is a function at the top of a file. `timeout_seconds` is the group's. The `lost` rank is not waited for.
    With `nccl` the ranks share the first GPU, and NCCL carries its tensors by sockets on the loopback interface. Only
    the first `in_group` processes are in the group, if given; the others get None as transport.
    """
    context = fork_context()
    with tempfile.TemporaryDirectory() as folder:
        ends, processes = [], []
        for rank in range(size):
            end, child_end = context.Pipe(duplex=False)
            about = (rank, size if in_group is None else in_group, f"{folder}/store", timeout_seconds, nccl,
                     getfile(body), body.__name__, pickle.dumps(args))
            processes.append(context.Process(target=_one_process, args=(child_end, *about), daemon=True))
            processes[-1].start()
            child_end.close()
            ends.append(end)
        deadline = time.monotonic() + deadline_seconds
        sent: dict[int, bytes] = {}
        try:
            waited = [(rank, process) for rank, process in enumerate(processes) if rank != lost]
            for rank, process in waited:                         # all before any ends: ranks end together
                sent[rank] = _receive(ends[rank], process, deadline)
            for _, process in waited:
                process.join(max(deadline - time.monotonic(), 0.0))
            return [_outcome(process, sent.get(rank) or _receive(ends[rank], process, 0.0))
                    for rank, process in enumerate(processes)]
        finally:
            for process in processes:
                process.kill()
                process.join()


def free_port() -> int:
    """A port of the loopback interface that nobody listens on at the moment."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


def values(outcomes: Sequence[ProcessOutcome]) -> list[Any]:
    """Every process's value; raises the first error."""
    for rank, outcome in enumerate(outcomes):
        if outcome.error is not None or outcome.exit_code != 0:
            raise RuntimeError(f"rank {rank} failed: {outcome.error or f'exit code {outcome.exit_code}'}")
    return [outcome.value for outcome in outcomes]


def _receive(end: Connection, process: Any, deadline: float) -> bytes:
    """The message that a process sends before the deadline; empty if it ends without one."""
    wait([end, process.sentinel], timeout=max(deadline - time.monotonic(), 0.0))
    try:
        return end.recv_bytes() if end.poll() else b""
    except EOFError:
        return b""


def _outcome(process: Any, sent: bytes) -> ProcessOutcome:
    value, error, seconds = pickle.loads(sent) if sent else (None, None, 0.0)
    return ProcessOutcome(value, error, process.exitcode, seconds)


def _one_process(
    end: Connection, rank: int, size: int, store: str, timeout_seconds: float, nccl: bool, file: str, name: str,
    args: bytes,
) -> None:
    if nccl:                                                     # a host of its own, in NCCL's eyes
        os.environ.update(NCCL_HOSTID=f"h{rank}", NCCL_SOCKET_IFNAME="lo", GLOO_SOCKET_IFNAME="lo")
    import torch
    import torch.distributed as dist

    from distca.runtime.liveness import end_process, one_worker_per_group
    from distca.runtime.transport import C10dTransport

    torch.set_num_threads(1)
    body = runpy.run_path(file)[name]
    if rank >= size:
        _report(end, partial(body, None, *pickle.loads(args)))
        end_process()
    one_worker_per_group()
    if nccl:
        torch.cuda.set_device(0)
    dist.init_process_group("cpu:gloo,cuda:nccl" if nccl else "gloo", init_method=f"file://{store}", rank=rank,
                            world_size=size, timeout=timedelta(seconds=timeout_seconds))
    dist.barrier()
    if _report(end, partial(body, C10dTransport(), *pickle.loads(args))):
        dist.barrier()
    if not nccl:                                                 # which may wait for ranks that ended in an error
        dist.destroy_process_group()
    end_process()


def _report(end: Connection, body: Callable[[], Any]) -> bool:
    """Run the body, send what came of it, and return whether it came back."""
    begin, value, error = time.monotonic(), None, None
    try:
        value = body()
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    end.send_bytes(pickle.dumps((value, error, time.monotonic() - begin)))
    return error is None
