"""Programs that end while roles run on threads of theirs end as they would without, also by an error in a call."""

import subprocess
import sys

import pytest

PROGRAM = """
import threading, time, torch, distca
from distca.runtime.pool.runner import Runner

inside = threading.Event()

def runs_long(runner, number, role):
    inside.set()
    x, until = torch.ones(1200, 1200), time.monotonic() + 1.0
    while time.monotonic() < until:
        x @ x

Runner._run_if_complete = runs_long
plan = distca.plan(distca.pack([900, 124], ranks=1), model="tiny", speed=[1, 1])

def trains(transport):
    secret = b"of this program alone"
    pool = distca.connect_servers(transport, roles=1, secret=secret)
    if SERVES:
        threading.Thread(target=distca.Server(lambda: pool.address, secret).run, daemon=True).start()
        assert pool.wait_for_servers(1, 60)
    distca.CoreAttention(transport=pool).start(*(torch.randn(1024, heads, 32) for heads in (8, 2, 2)), plan)
    inside.wait()
    raise RuntimeError("the loop fails")

distca.LoopbackWorld(1).run(trains)
"""


@pytest.mark.multiprocess
@pytest.mark.parametrize("serves", [False, True])
def test_a_program_that_fails_in_a_call_ends_with_its_own_error(serves: bool) -> None:
    """Python aborts if it ends while a thread is in torch, here one that runs a role: a home's, or a server's."""
    ended = subprocess.run([sys.executable, "-c", f"SERVES = {serves}\n{PROGRAM}"], capture_output=True, text=True,
                           timeout=120)
    assert ended.returncode == 1, ended.stderr
    assert "the loop fails" in ended.stderr and "terminate called" not in ended.stderr
