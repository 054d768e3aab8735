"""The examination of a group of ranks: what is planted in one of them is named, and who hangs ends the wait."""

import os
import platform
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from distca import profiling
from distca.cost.attention_time import shipped_table
from distca.models import model_named
from distca.planning.traffic import two_hops_pay
from distca.profiling import doctor
from distca.profiling.machine import cpu_name
from distca.profiling.roll_call import RollCall
from distca.report.doctor import page, report
from distca.runtime.transport import C10dTransport, LoopbackWorld, Transport
from tests.support.processes import ProcessOutcome, free_port, run_processes, values


def test_a_rank_without_rank_0_gives_up_about_when_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """A TCPStore tries twice, so a rank would wait for two times --timeout-seconds."""
    tried = []

    def unreachable(*_: Any, timeout: timedelta, **__: Any) -> None:
        tried.append(2 * timeout.total_seconds())
        raise dist.DistNetworkError("timed out")

    monkeypatch.setattr(dist, "TCPStore", unreachable)
    with pytest.raises(RuntimeError, match="rank 1 does not reach rank 0 at node0:1 within 30 s"):
        RollCall("node0", 1, 1, 2, timeout_seconds=30, report=print)
    assert tried == [40]


def examined(transport: C10dTransport, nodes: list[str], fault: str, said: str, timeout_seconds: float) -> Any:
    """Examine a group that stands already, with a fault in one of its ranks; return the report."""
    rank = transport.rank
    port = transport.gather(free_port(), torch.device("cpu"))[0]
    call = RollCall("127.0.0.1", port, rank, transport.size, timeout_seconds=timeout_seconds,
                    report=Path(said, str(rank)).write_text)
    platform.node = lambda: nodes[rank]
    globals()[fault](rank)
    try:
        ranks = doctor.examine(call, torch.device("cpu"), join=lambda: None)
    except RuntimeError as error:
        call.lost(error)
    call.close()
    return report(ranks)


def nothing(rank: int) -> None:
    pass


def off_by_a_little(rank: int) -> None:
    """Rank 2 computes attention that is 1 % off, rank 1 is five times slower than it is, rank 3 has another Python."""
    from distca.kernels.sdpa import SdpaKernel

    exact, measure = SdpaKernel.forward, doctor.speed
    if rank == 1:
        doctor.speed = lambda device: measure(device) | {"linear_seconds": 1e3}
    if rank == 2:
        SdpaKernel.forward = (  # type: ignore[method-assign]
            lambda self, *args: (exact(self, *args)[0] * 1.01, exact(self, *args)[1]))
    if rank == 3:
        platform.python_version = lambda: "3.99.0"


def hanging_link(rank: int) -> None:
    """Rank 1 waits for what comes from rank 0, the other ranks have theirs."""
    exchange = C10dTransport.exchange

    def hang(self: C10dTransport, send: torch.Tensor, send_splits: list[int], recv_splits: list[int]) -> Any:
        handle = exchange(self, send, send_splits, recv_splits)
        time.sleep(100 if self.rank == 1 and recv_splits[0] else 0)
        return handle

    C10dTransport.exchange = hang  # type: ignore[method-assign]
    doctor.LINK_BYTES = {"cpu": (4_096, 8)}


def dying(rank: int) -> None:
    """Rank 1 is killed in the middle of attention."""
    if rank == 1:
        doctor.compared = lambda *_: os._exit(9)


def failing(rank: int) -> None:
    """Rank 1's GPU fails, so to say."""
    def fail(attend: object, plan: object, device: object, dtype: object) -> doctor.Record:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")

    if rank == 1:
        doctor.compared = fail


def another_torch(rank: int) -> None:
    if rank == 1:
        facts = doctor.facts
        doctor.facts = lambda device: (mine := facts(device)) | {"versions": mine["versions"] | {"torch": "1.0"}}


def run(size: int, nodes: str, fault: str, tmp_path: Path, timeout_seconds: float = 60.0) -> list[ProcessOutcome]:
    names = [f"node{node}" for node in nodes]
    return run_processes(size, examined, names, fault, str(tmp_path), timeout_seconds)


def named(tmp_path: Path) -> str:
    """The one line that one rank said."""
    (said,) = tmp_path.iterdir()
    return said.read_text()


@pytest.mark.multiprocess
def test_two_ranks_that_are_well(tmp_path: Path) -> None:
    first, second = values(run(2, "00", "nothing", tmp_path))
    assert first == second and first["ok"] and not first["problems"]
    for one in first["ranks"]:
        (attention,) = one["attention"]
        assert attention["moved"] == 2 and sorted(attention["servers"]) == [0, 1] and attention["hops"] == 1
        assert 0 < max(*attention["off"], attention["keys_off"]) < attention["allowed"]
    assert first["links"]["inside nodes"]["links"] == 2 and set(first["links"]) == {"inside nodes"}
    text = "\n".join(page(first))
    assert "exact over transport c10d, 2 of 4 tasks moved" in text and "node0: ranks 0-1" in text
    assert len(page(first)) < 30 and "distca train" in text


@pytest.mark.multiprocess
def test_what_is_wrong_or_slow_is_named(tmp_path: Path) -> None:
    """Two nodes of two ranks, so that attention also goes in two hops."""
    found = values(run(4, "0011", "off_by_a_little", tmp_path))[0]
    assert not found["ok"]
    python, c10d, flat = found["problems"]
    assert python.startswith("python differs: ") and "3.99.0 on rank 3; give" in python
    for name, line in (("c10d", c10d), ("flat", flat)):
        assert line.startswith(f"rank 2 (node1) computes wrong attention over transport {name}, off by 1.0e-02 of")
    assert [(one["transport"], one["hops"]) for one in found["ranks"][0]["attention"]] == [("c10d", 2), ("flat", 1)]
    assert [note for note in found["notes"] if note.startswith("rank 1 (node0): matrix products take ")]
    assert {kind: some["links"] for kind, some in found["links"].items()} == {"inside nodes": 4, "between nodes": 8}


def test_a_link_is_as_fast_as_the_faster_of_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks 0 and 1 both wait ten times as long in the exchange in which rank 0 sends to rank 1."""
    def seconds(transport: Transport, device: object, send: list[int], receive: list[int]) -> np.ndarray:
        (to,), num_bytes = np.flatnonzero(send), max(send)
        slow = (to - transport.rank) % transport.size == 1
        taken = num_bytes / 1e9 if num_bytes > 8 else 1e-4
        return np.array([[taken * (10 if slow and rank < 2 else 1) for rank in range(4)]])

    monkeypatch.setattr(doctor, "exchange_seconds", seconds)
    silent: Any = type("Silent", (), {"step": lambda self, what: None})()
    found = LoopbackWorld(4).run(lambda transport: doctor.links(silent, transport, torch.device("cpu"),
                                                                np.array([0, 0, 1, 1])))
    rates = {(one["from"], one["to"]): (one["bandwidth"], one["latency_seconds"]) for rank in found for one in rank}
    assert set(rates) == {(a, b) for a in range(4) for b in range(4) if a != b}
    assert all(rates[pair] == pytest.approx((1e8, 1e-3) if pair == (0, 1) else (1e9, 1e-4)) for pair in rates)
    assert [one["between_nodes"] for one in found[0]] == [False, True, True]


@pytest.mark.multiprocess
@pytest.mark.parametrize(("fault", "line"), [
    ("hanging_link", "rank 1 (node1) has not finished within 4 s (--timeout-seconds): sending 4,096 bytes to rank "),
    ("dying", "rank 1 (node1) ended or is stopped during attention over transport c10d"),
    pytest.param("failing", "rank 1 (node1) failed during attention over transport c10d: CUDA error: an illegal memory "
                 "access was encountered", marks=pytest.mark.slow),
])
def test_who_hangs_ends_or_fails_is_named_by_one_rank(fault: str, line: str, tmp_path: Path) -> None:
    outcomes = run(3, "012", fault, tmp_path, 4.0 if fault == "hanging_link" else 60.0)
    assert named(tmp_path).startswith(line)
    assert [outcome.exit_code for outcome in outcomes] == [1, 9 if fault == "dying" else 1, 1]


@pytest.mark.multiprocess
def test_ranks_with_another_torch_call_nothing_together(tmp_path: Path) -> None:
    found = values(run(2, "00", "another_torch", tmp_path))[0]
    (line,) = found["problems"]
    assert line == (f"torch differs: {torch.__version__} on rank 0, 1.0 on rank 1; give all ranks the same. "
                    "Nothing else was examined")
    assert "attention" not in found["ranks"][0] and page(found)[-2].startswith("WRONG      torch differs")


@pytest.mark.parametrize("nodes", [[0], [0, 0], [0, 0, 0], [0, 0, 1, 1], [0] * 16, list(range(40)),
                                   [rank // 8 for rank in range(64)], [0] * 3 + [1] * 2])
def test_the_plan_is_exact_and_uses_the_links_that_are_measured(nodes: list[int]) -> None:
    node = np.array(nodes)
    plan = doctor.moving_plan(node, model_named("tiny"), row_tiles=8)
    plan.validate()
    behind = (plan.tasks.server - plan.tasks.home) % len(node)
    used = set(zip(plan.tasks.home[behind > 0].tolist(), behind[behind > 0].tolist(), strict=True))
    assert used == {(home, distance) for home in range(len(node)) for distance in doctor.shifts(node)}
    if len(node) <= 16:
        assert doctor.shifts(node) == list(range(1, len(node)))
    apart = {bool(node[home] != node[(home + distance) % len(node)]) for home, distance in used}
    assert apart == ({False, True} if 1 < len(set(nodes)) < len(nodes) else {len(set(nodes)) > 1} if used else set())
    if 1 < len(set(nodes)) < len(nodes):
        assert two_hops_pay(plan.layout, plan.tasks, node, plan.model)
    assert plan.layout.tokens_per_rank().max() <= 17 * 128


def test_the_kernel_is_timed_beside_the_table_of_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table made up for this CPU: a call of one short shard takes the launch and that shard's tail on an idle GPU."""
    shipped = shipped_table("h200")
    about = {**shipped.metadata, "device": cpu_name(), "kernel": "sdpa"}
    monkeypatch.setattr(doctor, "shipped_names", lambda: ["abacus", "h200"])
    monkeypatch.setattr(doctor, "shipped_table", lambda name: replace(
        shipped, name=name, metadata=about if name == "abacus" else shipped.metadata))
    monkeypatch.setattr(profiling, "in_turns", lambda runs, device, **limits: [[1.0] for _ in runs])
    found = doctor.speed(torch.device("cpu"))
    assert (found["kernel"], found["table"], found["linear_seconds"]) == ("sdpa", "abacus", 1.0)
    assert found["attention_seconds"] == pytest.approx([1.0, 1.0])  # of the whole call, whatever its shards
    launches: Any = about["work_list"]
    assert found["shards"] == [1, 1]
    assert all(launch < seconds < 2 * launch
               for launch, seconds in zip(launches["launch_seconds"], found["table_seconds"], strict=True))
