"""A rank that dies, stops or hangs ends the others in time, also while they wait for something that never fails."""

import os
import queue
import signal
import time
from typing import Any

import pytest
import torch

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
        say = ranks._say

        def say_late(what: int, rank: int) -> bool:
            time.sleep(0.3)
            return say(what, rank)

        vars(ranks)["_say"] = say_late
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
