"""A rank that dies, stops or hangs ends the others in time, also while they wait for something that never fails.

Processes with gloo groups keep their memory whole and end with their own exit code, however late a thread is.
"""

import os
import queue
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import distca
from distca.runtime import liveness
from distca.runtime.liveness import Liveness, is_lost
from distca.runtime.transport import TransportError
from distca.runtime.transport.c10d import C10dTransport
from tests.support.processes import ProcessOutcome, run_processes, values

pytestmark = pytest.mark.multiprocess
VICTIM = 1
TIMEOUT_SECONDS = 2.0    # of ranks that must notice a silence
NEVER_SECONDS = 120.0    # of ranks that must notice by something else


def wait_for_the_verdict(transport: C10dTransport, timeout_seconds: float, how: str) -> tuple[str, str]:
    """Wait as in a CUDA call that never returns, while the victim comes to its end."""
    vars(liveness)["MAX_INTERVAL_SECONDS"] = 0.3
    lines: queue.Queue[str] = queue.Queue()
    ranks = Liveness(timeout_seconds, lines.put).start()
    transport.gather(0, torch.device("cpu"))
    if transport.rank == VICTIM:
        if how == "stuck":
            vars(liveness)["oldest_nccl_seconds"] = lambda: 2 * NEVER_SECONDS
        elif how == "stops":
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            os._exit(17)
    line = lines.get(timeout=60)
    return line, str(ranks.explained(RuntimeError("[/src/gloo/pair.cc] Connection closed by peer")))


def lines_of(outcomes: list[ProcessOutcome], victims: set[int]) -> dict[int, str]:
    survivors = {rank: outcome.value for rank, outcome in enumerate(outcomes) if rank not in victims}
    assert all(value is not None and value[0] == value[1] for value in survivors.values()), outcomes
    return {rank: value[0] for rank, value in survivors.items()}


@pytest.mark.parametrize("size", [2, 3])
def test_a_death_is_noticed_at_once_by_all(size: int) -> None:
    outcomes = run_processes(size, wait_for_the_verdict, NEVER_SECONDS, "dies", timeout_seconds=NEVER_SECONDS,
                             deadline_seconds=90, lost=VICTIM)
    for rank, line in lines_of(outcomes, {VICTIM}).items():
        assert line == (f"rank {rank} of {size}: rank 1 ended in the middle of the run; its own output says why; "
                        "restart from the last checkpoint")
        assert outcomes[rank].seconds < NEVER_SECONDS


def fail_by_itself(transport: C10dTransport, slow: int) -> str:
    """The main thread notices the death by itself, as on gloo, and ends its process; one is slow to pass it on."""
    ranks = Liveness(NEVER_SECONDS, print).start()
    if transport.rank == slow:
        pass_on = ranks._pass_on

        def pass_on_late(what: int, rank: int) -> bool:
            time.sleep(0.3)
            return pass_on(what, rank)

        vars(ranks)["_pass_on"] = pass_on_late
    try:
        for call in range(1_000_000):
            if transport.rank == VICTIM and call == 3:
                os._exit(17)
            transport.gather(0, torch.device("cpu"))
    except TransportError as error:
        return str(ranks.explained(error))
    return ""


def test_the_rank_that_died_is_named_though_others_end_at_once() -> None:
    outcomes = run_processes(4, fail_by_itself, 2, timeout_seconds=NEVER_SECONDS, deadline_seconds=90, lost=VICTIM)
    for rank in (0, 2, 3):
        assert f"rank {rank} of 4: rank 1 ended" in outcomes[rank].value, outcomes


@pytest.mark.parametrize("size", [3])
def test_a_stopped_rank_is_noticed_within_the_timeout(size: int) -> None:
    outcomes = run_processes(size, wait_for_the_verdict, TIMEOUT_SECONDS, "stops", timeout_seconds=4.0,
                             deadline_seconds=90, lost=VICTIM)
    for rank, line in lines_of(outcomes, {VICTIM}).items():
        assert f"rank {rank} of {size}: rank 1 gave no sign of life for 2 s (run.timeout_seconds)" in line
        assert outcomes[rank].seconds < NEVER_SECONDS


def test_a_collective_that_is_too_old_ends_all() -> None:
    outcomes = run_processes(3, wait_for_the_verdict, NEVER_SECONDS, "stuck", timeout_seconds=NEVER_SECONDS,
                             deadline_seconds=90)
    for rank, line in lines_of(outcomes, set()).items():
        assert f"rank {rank} of 3: a collective of rank 1 has not completed for 120 s" in line


def leave_early(transport: C10dTransport) -> Any:
    ranks = Liveness(TIMEOUT_SECONDS, lambda line: os._exit(9)).start()
    if transport.rank == VICTIM:
        ranks.close()
        return None
    time.sleep(2 * TIMEOUT_SECONDS)
    ranks.close()
    return ranks.verdict


def test_a_rank_that_is_done_may_leave_before_the_others() -> None:
    assert values(run_processes(3, leave_early, timeout_seconds=NEVER_SECONDS)) == [None] * 3


def test_errors_of_other_ranks_are_told_from_our_own() -> None:
    assert is_lost(TransportError("an exchange did not complete"))
    assert is_lost(RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer"))
    assert not is_lost(RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)"))


ROOT = Path(distca.__file__).parents[1]
WORKER = "pt_gloo_runloop"                                       # torch's name of such a thread


def num_workers(transport: C10dTransport) -> int:
    """Of three groups: the world, another of all ranks, and one of this rank alone."""
    groups = [dist.new_group(timeout=timedelta(seconds=60)),
              dist.new_group([transport.rank], timeout=timedelta(seconds=60), use_local_synchronization=True)]
    for group in groups:
        dist.barrier(group)
    return [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")].count(WORKER)


@pytest.mark.multiprocess
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted in /proc")
def test_a_group_has_one_worker() -> None:
    """Two that finish functional all-gathers together free one string twice."""
    assert values(run_processes(2, num_workers, timeout_seconds=60)) == [3, 3]


LATE_WORKER = """
import os, sys, threading, time, weakref
from datetime import timedelta
from distca import cli
from distca.train import launch

def late_worker(settings, main):
    # a thread of gloo lets go of a tensor in many small steps, each of which needs the interpreter
    import torch, torch.distributed as dist
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=60))
    launch.kept, launch.begun, last = dist.group.WORLD, threading.Event(), torch.zeros(1)
    weakref.finalize(last, lambda: (launch.begun.set(), [time.sleep(0.01) for _ in range(200)]))
    dist.all_reduce(last, async_op=True)
    del last
    launch.begun.wait()
    print("said before the end")
    if sys.argv[1] == "fails":
        raise RuntimeError("a mistake of ours")
    dist.destroy_process_group()
    return int(sys.argv[1])

launch.launch = late_worker
os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", MASTER_ADDR="here", MASTER_PORT="1")
cli.main(["train"])
"""


@pytest.mark.parametrize(("how", "code"), [("0", 0), ("3", 3), ("fails", 1)])
def test_a_rank_of_torchrun_ends_with_its_own_code_ahead_of_a_late_worker(how: str, code: int) -> None:
    """An interpreter that finalizes while the worker wants it aborts the process."""
    done = subprocess.run([sys.executable, "-c", LATE_WORKER, how], capture_output=True, text=True, timeout=100,
                          env={**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"})
    assert (done.returncode, done.stdout) == (code, "said before the end\n"), done.stderr[-2000:]
    assert ("RuntimeError: a mistake of ours" in done.stderr) == (how == "fails")
