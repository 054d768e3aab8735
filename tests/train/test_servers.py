"""Runs whose dedicated servers are killed, stopped, cut off, leave and come: losses and weights keep their bits.

Bits are compared because roles, their cuts and the order of merging do not depend on who is there, and everybody
computes with one thread on tensors of the same shapes and offsets.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from safetensors import deserialize
from torch.distributed import TCPStore

from distca.train.servers import (
    find_in_store,
    listens_at,
    port_before_restart,
    publish_in_store,
    read_secret,
    secret_in,
)
from distca.train.settings import Settings
from distca.validation import UserError
from tests.support.faults import MOMENTS, Disturber, Fault, kinds, train_noting_moments
from tests.support.hosts import NEEDS, Hosts, can_make_hosts
from tests.support.pools import NEEDS_NIXL
from tests.support.training import command_of, logged, outcomes_of, small_run, train

pytestmark = pytest.mark.multiprocess
FAULTS, FAULTS_OF_A_RUN = 1000, 25
PAUSE_SECONDS = 0.1
WAIT_SECONDS = 120


def served_run(folder: Path, trainers: int, roles: int, **values: Any) -> Settings:
    """A run whose servers are processes of the test, which find it by a file. Its steps do not depend on its length."""
    return small_run(folder / "log", trainers, 384, **{
        "attention__roles": roles, "attention__patience": 0.6, "run__steps": 100_000, "batch__micro_batches": 2,
        "model__layers": 2, "model__hidden": 64, "model__ffn": 64, "model__heads": 4, "model__kv_heads": 2,
        "optimizer__warmup_steps": 2, "optimizer__min_lr_ratio": 1.0, "checkpoint__folder": str(folder / "saved"),
        "checkpoint__every": 3, **values})


def results(folder: Path) -> tuple[list[float], list[float], dict[str, bytes]]:
    """Losses and gradient norms of every step, and the bytes of the last checkpoint's tensors."""
    last = max((folder / "saved").glob("step_*"), key=lambda path: int(path.name.rpartition("_")[2]))
    tensors = {name: bytes(one["data"]) for path in sorted(last.glob("*.safetensors"))
               for name, one in deserialize(path.read_bytes())}
    return logged(folder / "log", "loss"), logged(folder / "log", "grad_norm"), {
        name: content for name, content in tensors.items() if not name.startswith("rng.")}  # nobody draws, nor seeds


def disturbed(
    folder: Path, servers: int, faults: int, seed: str, hosts: Hosts | None = None, **values: Any
) -> list[Fault]:
    """Disturb a run until there were as many faults; it ends with the bits of one without servers."""
    settings = served_run(folder / "disturbed", **values, attention__listen=hosts.address if hosts else "")
    with Disturber(folder / "disturbed" / "log", settings.run.ranks, servers, seed=seed, faults=faults, hosts=hosts,
                   pause_seconds=PAUSE_SECONDS) as disturber:
        train(settings, body=train_noting_moments)
    assert len(disturber.done) >= faults
    found = results(folder / "disturbed")
    train(served_run(folder / "calm", **values, run__steps=len(found[0])))  # homes run the roles
    assert found == results(folder / "calm"), disturber.done
    return disturber.done


WAYS: dict[str, dict[str, Any]] = {
    "ping-pong": {"trainers": 2, "roles": 2},
    "pipeline": {"trainers": 2, "roles": 3, "parallel__pipeline": 2, "run__dtype": "float32"},
    "one trainer": {"trainers": 1, "roles": 4, "batch__ping_pong": False},
    "tensor": {"trainers": 2, "roles": 4, "parallel__tensor": 2, "run__dtype": "float32"},
    "nixl": {"trainers": 2, "roles": 2, "attention__links": "nixl"},
    "three trainers": {"trainers": 3, "roles": 3, "attention__cost": "h200"},
}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("way", ["ping-pong", "pipeline", pytest.param("nixl", marks=NEEDS_NIXL)])
def test_faults_change_no_bit(way: str, tmp_path: Path) -> None:
    """Ten each, at any moment of forward, backward, exchange, plan agreement and save."""
    disturbed(tmp_path, 2, 10, way, **WAYS[way])


@pytest.mark.timeout(900)
def test_the_coordinator_dies_and_the_run_is_resumed(tmp_path: Path) -> None:
    """Rank 0 is killed amid faults of servers. The run and its servers end, and the same command goes on."""
    settings = served_run(tmp_path / "disturbed", **WAYS["ping-pong"])
    log = tmp_path / "disturbed" / "log"
    with Disturber(log, 2, 2, seed="coordinator", faults=5, pause_seconds=PAUSE_SECONDS, last=signal.SIGKILL):
        killed, other = outcomes_of(settings, body=train_noting_moments)
    assert killed.exit_code == -signal.SIGKILL and other.error is not None
    steps = len(logged(log, "loss")) + 2
    for folder in ("disturbed", "calm"):
        train(served_run(tmp_path / folder, **WAYS["ping-pong"], run__steps=steps))
    assert results(tmp_path / "disturbed") == results(tmp_path / "calm")


@pytest.mark.slow
@pytest.mark.timeout(6 * 3600)
@pytest.mark.parametrize("way", [pytest.param(way, marks=NEEDS_NIXL if way == "nixl" else ()) for way in WAYS])
def test_a_thousand_faults_change_no_bit(way: str, tmp_path: Path) -> None:
    """An equal share of them here, with one to four servers, on hosts of their own where this user can make some."""
    done, seed = list[Fault](), 0
    while len(done) * len(WAYS) < FAULTS:
        values = {**WAYS[way], "run__dtype": ("float64", "float32")[seed // 4 % 2]}
        with Hosts(1 + seed % 4) if can_make_hosts() else nullcontext() as hosts:
            done += disturbed(tmp_path / str(seed), 1 + seed % 4, FAULTS_OF_A_RUN, f"{way} {seed}", hosts, **values)
        shutil.rmtree(tmp_path / str(seed))
        seed += 1
    print(f"{way}: {seed} runs,", *(f"{kind} in {moment} {n}," for (kind, moment), n in sorted(Counter(done).items())))
    assert {one.kind for one in done} == {*kinds(hosts)} and {one.moment for one in done} >= {*MOMENTS}


def test_the_command_serves_a_run_and_leaves_it(tmp_path: Path) -> None:
    """`distca train` without servers of its own, which another process joins by the run's file with the secret."""
    settings = served_run(tmp_path, 1, 1, checkpoint__folder="", checkpoint__every=0)
    log = tmp_path / "log"
    run = subprocess.Popen([sys.executable, "-m", "distca", *command_of(settings, tmp_path)], stderr=subprocess.PIPE,
                           stdout=subprocess.DEVNULL, text=True)
    server = None
    try:
        members = listed(log, "trainer", "training")
        assert [one["pid"] for one in members] != [run.pid], "a rank is a process of its own"
        address = json.loads((log / "members.json").read_text())["join"]
        assert address.startswith("127.0.0.1:") and (log / "secret").stat().st_mode & 0o777 == 0o600
        server = subprocess.Popen([sys.executable, "-m", "distca", "serve", "--join", address, "--secret-file",
                                   str(log / "secret"), "--device", "cpu"], stdout=subprocess.PIPE, text=True)
        assert [one["pid"] for one in listed(log, "server", "serving")] == [server.pid]
        server.send_signal(signal.SIGTERM)
        said = server.communicate(timeout=WAIT_SECONDS)[0]
        assert server.returncode == 0 and said.startswith("Served ") and said.endswith("roles of forward calls.\n")
        assert [one["pid"] for one in listed(log, "server", "left")] == [server.pid]
    finally:
        if server is not None:
            server.kill()
        run.send_signal(signal.SIGTERM)
        said = run.communicate(timeout=WAIT_SECONDS)[1]
    assert run.returncode == 0 and "Traceback" not in said
    assert not (log / "secret").exists() and sum(logged(log, "faults")) == 0
    listing = json.loads((log / "members.json").read_text())
    assert [one["state"] for one in listing["members"]] == ["left", "left"] and "join" not in listing


@pytest.mark.slow
@pytest.mark.skipif(not can_make_hosts(), reason=NEEDS)
def test_a_link_that_is_slow_loses_packets_or_is_cut(tmp_path: Path) -> None:
    """A server on another host: at 1 MB/s, with packets dropped, it serves on; cut off it is lost, and joins again."""
    with Hosts(1) as hosts:
        [name], log = hosts.names, tmp_path / "cut" / "log"
        settings = served_run(tmp_path / "cut", 1, 2, checkpoint__folder="", checkpoint__every=0,
                              attention__listen=hosts.address, attention__patience=3.0)
        run = subprocess.Popen([sys.executable, "-m", "distca", *command_of(settings, tmp_path)], text=True,
                               stderr=subprocess.PIPE, stdout=subprocess.DEVNULL)
        server = None
        try:
            listed(log, "trainer", "training")
            address = json.loads((log / "members.json").read_text())["join"]
            server = subprocess.Popen(["ip", "netns", "exec", name, sys.executable, "-m", "distca", "serve", "--join",
                                       address, "--device", "cpu", "--secret-file", str(log / "secret")],
                                      stdout=subprocess.DEVNULL)
            listed(log, "server", "serving")
            hosts.slow(name)
            before = len(logged(log, "loss"))
            wait_for(lambda: len(logged(log, "loss")) >= before + 3)
            assert hosts.hasten(name)
            hosts.cut(name)
            listed(log, "server", "lost")
            wait_for(lambda: len(logged(log, "loss")) >= before + 6)
            assert hosts.join(name)
            listed(log, "server", "serving")
        finally:
            if server is not None:
                server.kill()
                server.wait()
            run.send_signal(signal.SIGTERM)
            said = run.communicate(timeout=WAIT_SECONDS)[1]
    assert run.returncode == 0 and "Traceback" not in said
    train(served_run(tmp_path / "calm", 1, 2, run__steps=len(logged(log, "loss"))))
    assert logged(log, "loss") == logged(tmp_path / "calm" / "log", "loss")


def wait_for(reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def listed(log: Path, role: str, state: str) -> list[dict[str, Any]]:
    """Wait until members.json has somebody of this role and state."""
    deadline = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < deadline:
        path = log / "members.json"
        members = json.loads(path.read_text())["members"] if path.exists() else []
        if found := [one for one in members if (one["role"], one["state"]) == (role, state)]:
            return found
        time.sleep(0.05)
    raise AssertionError(f"no {role} was {state} within {WAIT_SECONDS} s")


@pytest.mark.parametrize(("listen", "environ", "expected"), [
    ("", {}, ("127.0.0.1", 0)), ("", {"MASTER_ADDR": "127.0.0.1", "RANK": "3"}, ("127.0.0.1", 0)),
    ("10.0.0.7", {"RANK": "3"}, ("10.0.0.7", 0)), ("10.0.0.7:29600", {"RANK": "3"}, ("10.0.0.7", 29603)),
])
def test_where_ranks_listen(listen: str, environ: dict[str, str], expected: tuple[str, int]) -> None:
    assert listens_at(listen, environ) == expected


def test_servers_and_ranks_meet_over_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun's servers know the number of restarts; a local launcher's outlive some, and look for the latest."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def after(count: int, most: int) -> None:
        for name, value in (("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", store.port),
                            ("TORCHELASTIC_RESTART_COUNT", count), ("TORCHELASTIC_MAX_RESTARTS", most)):
            monkeypatch.setenv(name, str(value))

    after(0, 3)
    with pytest.raises(ConnectionError, match="rank 0 has not said"):
        find_in_store()
    assert port_before_restart() == 0
    with socket.create_server(("127.0.0.1", 0)) as listener:
        first = listener.getsockname()[:2]
        publish_in_store(first)
        assert find_in_store() == first
        after(2, 3)                                              # the first restart failed before it said anything
        assert port_before_restart() == 0                        # somebody listens there
        with pytest.raises(ConnectionError, match="rank 0 has not said"):
            find_in_store()
    assert port_before_restart() == first[1]
    publish_in_store(("127.0.0.1", 9))
    for count in (0, 1, 2):
        after(count, 3)
        assert find_in_store() == ("127.0.0.1", 9)


def test_secrets_are_long_and_their_files_private(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"DISTCA_SECRET has 0 characters.*export DISTCA_SECRET="):
        secret_in({})
    with pytest.raises(UserError, match="DISTCA_SECRET has 15 characters"):
        secret_in({"DISTCA_SECRET": "x" * 15})
    path = tmp_path / "secret"
    path.write_text("y" * 16 + "\n")
    path.chmod(0o644)
    with pytest.raises(UserError, match=r"can be read by others; run: chmod 600"):
        read_secret(path)
    path.chmod(0o600)
    with pytest.raises(UserError, match=r"where there is no file; a run has one.*only while it runs"):
        read_secret(tmp_path / "gone")
    assert read_secret(path) == b"y" * 16 == secret_in({"DISTCA_SECRET": "y" * 16})


@pytest.mark.parametrize("listen", ["host:x", ":29600", "::1", "[::1]:29600", "host:", "host:65535", "a b"])
def test_addresses_at_which_ranks_cannot_listen(listen: str) -> None:
    with pytest.raises(UserError, match=f"attention.listen is {re.escape(repr(listen))}; give an IPv4 address"):
        listens_at(listen, {"RANK": "1"})
