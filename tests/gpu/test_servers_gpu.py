"""Homes and servers as processes of one GPU, over NIXL and over TCP: exact, and the same bits whoever is killed.

Bits are compared because the same kernels run on tensors of the same shapes and offsets of the same GPU. The same
bodies run on CPUs (slow there), which tells a mistake in a test from one that only a GPU shows.
"""

import json
import multiprocessing
import os
import random
import signal
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from distca.planning.plan import Plan
from distca.runtime.attention import CoreAttention
from distca.runtime.liveness import end_process
from distca.runtime.pool.server import Server
from distca.runtime.pool.transport import connect_servers
from distca.runtime.transport import C10dTransport
from distca.spec import ModelShape
from distca.workload.layout import layout_from_rows
from tests.support.attention import dense_on_one, gradient, qkv_of, random_qkv, row_index
from tests.support.plans import scattered_plan
from tests.support.pools import LINKS, SECRET, read_address, write_address
from tests.support.processes import run_processes, values

HOMES, ROLES = 2, 2
MODEL = ModelShape("tiny", 1, 32, 4, 2, 8, 64, 64)
LAYOUT = layout_from_rows([[1300, 170], [900, 570]])
PLAN = scattered_plan(10, LAYOUT, HOMES + ROLES, MODEL)
assert {2, 3} <= set(PLAN.tasks.server.tolist()), "every role has tasks"
FAULTS, SECONDS, JOIN_SECONDS = 20, 30.0, 120.0
PATIENCE_SECONDS, STOP_SECONDS = 1.5, 3.0
DEVICES = [pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(
               not torch.cuda.is_available(), reason="needs an NVIDIA GPU; torch.cuda.is_available() is False")]),
           pytest.param("cpu", marks=pytest.mark.slow)]
pytestmark = pytest.mark.multiprocess


def serve_at(where: str, device: str) -> None:
    """A server's process, until it cannot join the run any more."""
    torch.set_num_threads(1)
    Server(partial(read_address, Path(where)), SECRET, device=device, patience_seconds=JOIN_SECONDS).run()
    end_process()


class Faults:
    """The run's servers, as processes of the test, of which one after the other is killed, and some are stopped."""

    def __init__(self, where: Path, device: str) -> None:
        self.where, self.device, self.random, self.done = where, device, random.Random(1), list[str]()
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(["torch", "distca.runtime.pool.server"])
        self.processes: list[Any] = []
        self._ends, self._thread = threading.Event(), threading.Thread(target=self._inject, daemon=True)

    def __enter__(self) -> "Faults":
        for _ in range(ROLES + 1):
            self.start()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()
        for process in self.processes:
            process.kill()
            process.join()

    def start(self) -> None:
        self.processes.append(self.context.Process(target=serve_at, args=(str(self.where), self.device), daemon=True))
        self.processes[-1].start()

    def _inject(self) -> None:
        while not self._ends.wait(self.random.uniform(0.0, 1.0)):
            members = self.where.with_name("serving")
            pids = json.loads(members.read_text()) if members.exists() else []
            serving = [process for process in self.processes if process.pid in pids and process.is_alive()]
            if len(serving) < ROLES:
                continue
            kind, victim = self.random.choice(["kill", "kill", "kill", "stop"]), self.random.choice(serving)
            self.done.append(kind)
            if kind == "kill":
                victim.kill()
                self.start()
            else:
                os.kill(victim.pid, signal.SIGSTOP)
                self._ends.wait(STOP_SECONDS)
                os.kill(victim.pid, signal.SIGCONT)


def train(transport: C10dTransport, plan: Plan, links: str, device: str, where: str) -> dict[str, Any]:
    """A home: calls without servers, then with servers that are killed, until there were enough."""
    on, rank = torch.device(device), transport.rank
    pool = connect_servers(transport, roles=ROLES, secret=SECRET, device=on, kernel="sdpa", links=links,
                           patience_seconds=PATIENCE_SECONDS)
    attend = CoreAttention(transport=pool, kernel="sdpa")
    tensors = [x.to(on) for x in random_qkv(0, plan.layout.num_tokens, dtype=torch.float64)]
    index = row_index(plan.layout, rank).to(on)

    def call() -> list[torch.Tensor]:
        leaves = [x[index].requires_grad_() for x in tensors[:3]]
        out = attend(*qkv_of(leaves), plan)
        out.backward(tensors[3][index])
        return [out.detach(), *map(gradient, leaves)]

    expected = call()                                            # the homes compute the roles
    if rank == 0:
        serving = Path(where).with_name("serving")
        pool.pool.on_change = lambda view, _: write_address(serving, [one.pid for one in view.members])
        write_address(Path(where), pool.address)
    assert pool.wait_for_servers(ROLES, JOIN_SECONDS)
    found: dict[str, Any] = {"calls": 0, "wrong": 0, "lost": 0, "repeated": 0}
    deadline, enough = time.monotonic() + SECONDS, False
    while not enough:
        got, faults = call(), pool.pool.take_faults()
        found["wrong"] += not all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
        for name, more in (("calls", 1), ("lost", faults.lost), ("repeated", faults.repeated_tasks)):
            found[name] += more
        over = found["lost"] >= FAULTS or time.monotonic() > deadline
        enough = any(transport.gather(int(over and rank == 0), on))
    memory = pool.pool._links.memory
    found["blocks"] = 0 if memory is None else len(memory.blocks)
    pool.close()
    q, k, v, dout = (x.cpu() for x in tensors)
    return {**found, "error": [float((a.cpu() - b[index.cpu()]).abs().max()) for a, b in zip(
        expected, dense_on_one(q, k, v, dout, plan.layout.lengths), strict=True)]}


@pytest.mark.parametrize("links", LINKS)
@pytest.mark.parametrize("device", DEVICES)
def test_servers_of_one_gpu_are_killed_and_change_no_bit(device: str, links: str, tmp_path: Path) -> None:
    where = tmp_path / "join"
    with Faults(where, device) as faults:
        found = values(run_processes(HOMES, train, PLAN, links, device, str(where), timeout_seconds=60.0,
                                     deadline_seconds=240.0, nccl=device == "cuda"))
    print(f"{device}, {links}: {faults.done.count('kill')} kills and {faults.done.count('stop')} stops, {found}")
    assert faults.done and all(one["lost"] and one["calls"] for one in found)
    assert [one["wrong"] for one in found] == [0] * HOMES
    assert all((one["blocks"] > 0) == (links == "nixl") for one in found)
    assert max(max(one["error"]) for one in found) < 1e-10
