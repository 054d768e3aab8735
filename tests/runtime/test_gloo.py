"""Processes with gloo groups keep their memory whole and end with their own exit code, however late a thread is."""

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

import distca
from distca.runtime.transport.c10d import C10dTransport
from tests.support.processes import run_processes, values

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
