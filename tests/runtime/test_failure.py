"""A rank that dies or hangs: the others stop with an error that says so, in time, and leave no process behind."""

import os
import time
from pathlib import Path

import pytest
import torch

from distca.planning.plan import Plan
from distca.runtime.attention import CoreAttention
from distca.runtime.pool.transport import connect_servers
from distca.runtime.transport.c10d import C10dTransport
from distca.spec import ModelShape
from distca.workload.layout import layout_from_rows
from tests.support.attention import qkv_of, random_qkv, row_index
from tests.support.plans import misplaced_plan
from tests.support.processes import ProcessOutcome, run_processes

pytestmark = pytest.mark.multiprocess
MODEL = ModelShape("tiny", 1, 32, 4, 2, 8, 64, 64)
VICTIM = 1
TIMEOUT_SECONDS = 2.0                                            # of a group in which a rank hangs
NEVER_SECONDS = 120.0                                            # of one in which nobody should wait for it
STEPS = ["before", "start", "serve", "finish", "backward"]       # how far the victim comes


def vanish(how: str) -> None:
    if how == "dies":
        os._exit(17)
    time.sleep(3600)


def train(transport: C10dTransport, plan: Plan, how: str, last_step: str) -> None:
    """One attention call, forward and backward, in which the victim vanishes after its last step."""
    attend = CoreAttention(transport=transport)
    mine = transport.rank == VICTIM
    attend_once(attend, plan)                                    # all is well once: plans agreed, tables built
    if mine and last_step == "before":
        vanish(how)
    leaves = [x[row_index(plan.layout, transport.rank)].requires_grad_()
              for x in random_qkv(0, plan.layout.num_tokens)[:3]]
    pending = attend.start(*qkv_of(leaves), plan)
    if mine and last_step == "start":
        vanish(how)
    attend.serve(pending)
    if mine and last_step == "serve":
        vanish(how)
    out = attend.finish(pending)
    if mine and last_step == "finish":
        vanish(how)
    out.sum().backward()
    if mine and last_step == "backward":
        vanish(how)
    attend_once(attend, plan)


def attend_once(attend: CoreAttention, plan: Plan) -> None:
    row = [x[row_index(plan.layout, attend.transport.rank)].requires_grad_()
           for x in random_qkv(0, plan.layout.num_tokens)[:3]]
    attend(*qkv_of(row), plan).sum().backward()


def vanish_with_megabytes_under_way(transport: C10dTransport) -> None:
    """The victim has promised more than it stays to deliver."""
    size = 16 * 2**20
    handle = transport.exchange(torch.zeros(size * transport.size, dtype=torch.uint8), [size] * transport.size,
                                [size] * transport.size)
    if transport.rank == VICTIM:
        os._exit(17)
    handle.wait()


def train_with_a_pool(transport: C10dTransport, plan: Plan, how: str) -> None:
    """Roles without servers run in the homes: the pool is that of the training ranks."""
    attend = CoreAttention(transport=connect_servers(transport, roles=2, secret=b"of this test alone"))
    attend_once(attend, plan)
    attend_once(attend, plan) if transport.rank != VICTIM else vanish(how)


def check(outcomes: list[ProcessOutcome], victim: int, how: str) -> None:
    assert outcomes[victim].exit_code == (17 if how == "dies" else None), "the victim did vanish"
    for rank, outcome in enumerate(outcomes):
        if rank != victim:
            assert outcome.error is not None and outcome.error.startswith("TransportError: "), outcome
            assert f"rank {rank} of {len(outcomes)}" in outcome.error
            assert "did not complete" in outcome.error and "restart" in outcome.error
            assert how == "hangs" or outcome.seconds < NEVER_SECONDS, "it waited for the timeout"
            assert outcome.exit_code == 0, "it could end in good order"


@pytest.mark.parametrize("last_step", STEPS)
def test_a_rank_that_dies_ends_the_others_at_once(last_step: str) -> None:
    plan = misplaced_plan(layout_from_rows([[30], [40], [20, 5]]), 3, MODEL)
    outcomes = run_processes(3, train, plan, "dies", last_step, timeout_seconds=NEVER_SECONDS, deadline_seconds=180)
    check(outcomes, VICTIM, "dies")


def test_a_rank_that_dies_with_megabytes_under_way() -> None:
    outcomes = run_processes(3, vanish_with_megabytes_under_way, timeout_seconds=NEVER_SECONDS, deadline_seconds=180)
    check(outcomes, VICTIM, "dies")


@pytest.mark.parametrize("last_step", ["start", "finish"])
def test_a_rank_that_hangs_ends_the_others_within_the_timeout(last_step: str) -> None:
    plan = misplaced_plan(layout_from_rows([[30], [40], [20, 5]]), 3, MODEL)
    outcomes = run_processes(3, train, plan, "hangs", last_step, timeout_seconds=TIMEOUT_SECONDS,
                             deadline_seconds=60, lost=VICTIM)
    check(outcomes, VICTIM, "hangs")


@pytest.mark.parametrize("how", ["dies", "hangs"])
def test_a_pool_of_servers_does_not_outlast_a_trainer(how: str) -> None:
    plan = misplaced_plan(layout_from_rows([[30], [20, 5], [7]]), 5, MODEL, shift=3)
    outcomes = run_processes(3, train_with_a_pool, plan, how, deadline_seconds=180,
                             timeout_seconds=TIMEOUT_SECONDS if how == "hangs" else NEVER_SECONDS,
                             lost=VICTIM if how == "hangs" else None)
    check(outcomes, VICTIM, how)


def note_and_hang(transport: C10dTransport, folder: str) -> None:
    (Path(folder) / str(os.getpid())).touch()
    transport.gather(0, torch.device("cpu"))
    if transport.rank == VICTIM:
        vanish("hangs")


def test_no_process_is_left_behind(tmp_path: Path) -> None:
    run_processes(2, note_and_hang, str(tmp_path), timeout_seconds=TIMEOUT_SECONDS, deadline_seconds=60, lost=VICTIM)
    processes = [int(path.name) for path in tmp_path.iterdir()]
    assert len(processes) == 2
    for process in processes:
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)
