"""Servers that end, hang, leave or come in the middle of calls: the results have the bits of a pool that nobody left.

Bits are compared because the same kernel runs on buffers of the same shapes and offsets with as many threads, whoever
runs it: see `distca.runtime.pool.protocol`.
"""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from distca.planning.plan import Plan
from distca.runtime.attention import CoreAttention
from distca.runtime.pool import home as home_module
from distca.runtime.pool import server as server_module
from distca.runtime.pool.home import ServerPool
from distca.runtime.pool.protocol import Faults, Message, PoolShape
from distca.runtime.pool.runner import Runner
from distca.runtime.pool.transport import PoolTransport
from distca.runtime.transport import LoopbackTransport, LoopbackWorld, TransportError
from distca.runtime.transport import links as links_module
from distca.runtime.transport.links import Link
from distca.spec import ModelShape
from distca.validation import UserError
from distca.workload.layout import layout_from_rows
from tests.support.attention import dense_on_one, from_rows, gradient, qkv_of, random_qkv, row_index
from tests.support.plans import scattered_plan
from tests.support.pools import CPU, LINKS, MEET_SECONDS, SECRET, USED, server_for, server_pools, start

MODEL = ModelShape("tiny", 1, 32, 4, 2, 8, 64, 64)
HOMES, ROLES, CALLS = 2, 2, 4
LAYOUT = layout_from_rows([[130, 17], [90, 57]])
PLANS = [scattered_plan(seed, LAYOUT, HOMES + ROLES, MODEL) for seed in (10, 11)]
assert all({2, 3} <= set(plan.tasks.server.tolist()) for plan in PLANS), "every role has tasks"
Rows = list[list[torch.Tensor]]  # [home][out, dq, dk, dv of every call]


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True, scope="module", params=LINKS)
def _links(request: pytest.FixtureRequest) -> Any:
    before = USED["links"]
    USED["links"] = request.param
    yield
    USED["links"] = before


def tensors_of(plan: Plan, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    return random_qkv(0, plan.layout.num_tokens, dtype=dtype)


def run_calls(
    pools: list[ServerPool], dtype: torch.dtype = torch.float64, between: Callable[[int], None] = lambda call: None
) -> Rows:
    """Two interleaved nano-batches of each plan, forward and backward, several times."""

    def body(transport: LoopbackTransport) -> list[torch.Tensor]:
        torch.set_num_threads(1)
        attend = CoreAttention(transport=PoolTransport(transport, pools[transport.rank]), kernel="sdpa")
        index, results = row_index(LAYOUT, transport.rank), list[torch.Tensor]()
        for call in range(CALLS):
            if transport.rank == 0:
                between(call)
            rows = [[x[index].requires_grad_() for x in tensors_of(plan, dtype)[:3]] for plan in PLANS]
            pending = [attend.start(*qkv_of(row), plan) for row, plan in zip(rows, PLANS, strict=True)]
            for one in pending:
                attend.serve(one)
            outs = [attend.finish(one) for one in pending]
            torch.autograd.backward(outs, [tensors_of(plan, dtype)[3][index] for plan in PLANS])
            results += [x for out, row in zip(outs, rows, strict=True) for x in (out.detach(), *map(gradient, row))]
        return results

    return LoopbackWorld(HOMES, timeout_seconds=60).run(body)


def same_bits(one: Rows, other: Rows) -> bool:
    return all(torch.equal(a, b) for mine, theirs in zip(one, other, strict=True)
               for a, b in zip(mine, theirs, strict=True))


@pytest.fixture(scope="module", params=[torch.float64, torch.float32], ids=["float64", "float32"])
def undisturbed(request: pytest.FixtureRequest, _links: None) -> tuple[torch.dtype, Rows]:
    with server_pools(HOMES, ROLES) as pools:
        rows = run_calls(pools, request.param)
        assert sum(pool.take_faults().lost for pool in pools) == 0
    for first in range(0, len(rows[0]), 8) if request.param is torch.float64 else ():
        for at, plan in enumerate(PLANS):
            q, k, v, dout = tensors_of(plan, torch.float64)
            for field, want in enumerate(dense_on_one(q, k, v, dout, LAYOUT.lengths)):
                got = from_rows([row[first + 4 * at + field] for row in rows], LAYOUT)
                torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
    return request.param, rows


class Ending:
    """Breaks all connections of the first servers that reach a moment of chosen calls, as their processes' end would.

    The calls are those of one direction, in the order in which any server first has one, without the first `skipped`.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, skipped: int, backward: bool, after: bool, most: int, calls: int = 1
    ) -> None:
        self.chosen = slice(skipped, skipped + calls)
        self.backward, self.after, self.most = backward, after, most
        self.seen: list[int] = []                                # calls
        self.calls: list[int] = []                               # in which they ended
        self.gone: list[Any] = []                                # sessions, each once: more roles may wait for it
        self.lock, inner = threading.Lock(), Runner._run_if_complete
        ending = self

        def run(runner: Runner, number: int, role: int) -> None:
            about = runner._about[number, role]
            session = getattr(runner.send, "__self__", None)
            if not hasattr(session, "server") or bool(about["backward"]) != ending.backward:
                return inner(runner, number, role)
            if session in ending.gone:
                return None
            with ending.lock:
                ending.seen += [number] * (number not in ending.seen)
            before = runner.runs
            if ending.after:
                inner(runner, number, role)
                if runner.runs == before:                        # more inputs are to come
                    return None
            with ending.lock:
                ends = number in ending.seen[ending.chosen] and len(ending.calls) < ending.most
                ending.calls += [number] * ends
                ending.gone += [session] * ends
            if ends:
                assert session is not None
                session.server.leaving = True                    # it does not come back
                session.is_over = True
                for link in list(session._links.links):
                    link.close()
                return None
            return None if ending.after else inner(runner, number, role)

        monkeypatch.setattr(Runner, "_run_if_complete", run)


in_a_call = pytest.mark.parametrize(("skipped", "backward", "after"), [
    (0, False, False), (3, False, False), (3, False, True), (2, True, False), (2, True, True)])


def die_in_a_call(servers: int, ending: Ending, undisturbed: tuple[torch.dtype, Rows]) -> None:
    (dtype, expected), dying = undisturbed, ending.most
    with server_pools(HOMES, ROLES, servers) as pools:
        rows = run_calls(pools, dtype)
        faults = pools[0].take_faults()
        assert len(ending.calls) == dying and len({*ending.calls}) == 1, "in one call"
        assert faults.lost == dying and len(pools[0].view.members) == servers - dying
        deadline = time.monotonic() + 20
        while any(pool.calls.calls for pool in pools):           # nothing is kept once all have said that they are done
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert same_bits(rows, expected)


@in_a_call
def test_a_server_dies_in_a_call_and_another_does_its_work(
    skipped: int, backward: bool, after: bool, undisturbed: tuple[torch.dtype, Rows], monkeypatch: pytest.MonkeyPatch
) -> None:
    die_in_a_call(ROLES, Ending(monkeypatch, skipped, backward, after, 1), undisturbed)


@in_a_call
def test_two_servers_die_in_one_call_and_the_third_does_their_work(
    skipped: int, backward: bool, after: bool, undisturbed: tuple[torch.dtype, Rows], monkeypatch: pytest.MonkeyPatch
) -> None:
    die_in_a_call(ROLES + 1, Ending(monkeypatch, skipped, backward, after, 2), undisturbed)


@in_a_call
def test_all_servers_die_in_one_call_and_homes_compute_alone(
    skipped: int, backward: bool, after: bool, undisturbed: tuple[torch.dtype, Rows], monkeypatch: pytest.MonkeyPatch
) -> None:
    die_in_a_call(ROLES, Ending(monkeypatch, skipped, backward, after, ROLES), undisturbed)


def test_servers_die_faster_than_they_join(
    undisturbed: tuple[torch.dtype, Rows], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each dies in the first role that it is given, one at least in every call, and two more start before the next."""
    dtype, expected = undisturbed
    ending = Ending(monkeypatch, 0, False, after=False, most=3 * CALLS, calls=2 * CALLS)
    with server_pools(HOMES, ROLES, servers=0) as pools:
        threads: list[threading.Thread] = []

        def between(call: int) -> None:
            threads.extend(start(server_for(pools)) for _ in range(2))
            assert pools[0].wait_for_servers(1, 20)

        rows = run_calls(pools, dtype, between)
        assert len(ending.calls) >= CALLS
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert same_bits(rows, expected)


def test_connections_break_at_any_moment(
    undisturbed: tuple[torch.dtype, Rows], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to a hundred times a second, until three dozen servers were lost; all of them join again at once."""
    dtype, expected = undisturbed
    monkeypatch.setattr(server_module, "RETRY_SECONDS", 0.01)
    draw, ends, lost = random.Random(3), threading.Event(), 0
    with server_pools(HOMES, ROLES, servers=0) as pools:
        servers = [server_for(pools) for _ in range(ROLES + 1)]
        threads = [start(one) for one in servers]

        def break_connections() -> None:
            while not ends.wait(draw.expovariate(100)):
                session = draw.choice(servers)._session
                links = [] if session is None else list(session._links.links)
                if links and session and (pools[0].view.member(session.rank) or draw.random() < 1 / 16):
                    draw.choice(links).close()                   # rarely while it joins, so that it does at any load

        threads.append(threading.Thread(target=break_connections))
        threads[-1].start()
        try:
            while lost < 36:
                assert same_bits(run_calls(pools, dtype), expected)
                lost += pools[0].take_faults().lost
        finally:
            ends.set()
        assert pools[0].wait_for_servers(len(servers), 20)
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()


@pytest.mark.parametrize("how", ["kernel", "process"])
def test_a_server_that_hangs_is_out_after_its_patience_and_late_results_do_no_harm(
    how: str, undisturbed: tuple[torch.dtype, Rows], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its kernel does not come back, or it does not even answer; later it goes on and joins again as a new one."""
    from distca.runtime.pool.server import _Session

    dtype, expected = undisturbed
    monkeypatch.setattr(home_module, "UNMEASURED_SECONDS", 0.5)
    awake, hung, inner, receive = threading.Event(), list[_Session](), Runner._run_if_complete, _Session._receive

    def run(runner: Runner, number: int, role: int) -> None:
        session = getattr(runner.send, "__self__", None)
        if isinstance(session, _Session) and runner.served == 2 and not hung:
            hung.append(session)
            runner.running_since = time.monotonic()
            awake.wait(20)
        inner(runner, number, role)

    def deaf(session: _Session, *args: Any) -> None:
        if how == "process" and session in hung:
            awake.wait(20)
        receive(session, *args)

    monkeypatch.setattr(Runner, "_run_if_complete", run)
    monkeypatch.setattr(_Session, "_receive", deaf)
    with server_pools(HOMES, ROLES, patience_seconds=0.5) as pools:
        began = time.monotonic()
        rows = run_calls(pools, dtype)
        assert time.monotonic() - began >= 0.5
        faults = [pool.take_faults() for pool in pools]
        assert len(hung) == 1 and [one.lost for one in faults] == [1, 1]
        assert max(one.seconds for one in faults) > 0.4 and any(one.repeated_tasks for one in faults)
        awake.set()
        assert pools[1].wait_for_servers(ROLES, 20), "it joins again"
        assert same_bits(run_calls(pools, dtype), expected)
    assert same_bits(rows, expected)


def test_servers_come_and_leave_between_calls(undisturbed: tuple[torch.dtype, Rows]) -> None:
    """From no server to three, of which one then leaves; a server that leaves loses nothing."""
    dtype, expected = undisturbed
    with server_pools(HOMES, ROLES, servers=0) as pools:
        servers = [server_for(pools) for _ in range(3)]
        threads: list[threading.Thread] = []

        def between(call: int) -> None:
            if call in (1, 2):
                threads.extend(start(one) for one in (servers[:1] if call == 1 else servers[1:]))
                assert pools[0].wait_for_servers(2 * call - 1, 20)
            elif call == 3:
                servers[0].leave()

        rows = run_calls(pools, dtype, between)
        threads[0].join(20)
        assert not threads[0].is_alive() and servers[0].served > 0
        assert pools[0].take_faults().lost == 0 and len(pools[0].view.members) == 2
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive(), "the end of the run ends its servers"
    assert same_bits(rows, expected)


def test_a_result_that_comes_twice_is_used_once() -> None:
    """By whoever sends it, and however late."""
    with server_pools(HOMES, ROLES) as pools:
        pool, taken = pools[0], list[Any]()
        inner = pool.calls.result

        def twice(number: int, role: int, content: Any) -> Any:
            out = inner(number, role, content)
            wrong = torch.zeros_like(content)
            taken.append((pool._take(1, {"call": number, "role": role, "seconds": 0.0}, wrong),
                          inner(number, role, wrong)))
            return out

        pool.calls.result = twice  # type: ignore[method-assign]
        rows = run_calls(pools)
    assert taken and all(one == ([], []) for one in taken)
    with server_pools(HOMES, ROLES) as pools:
        assert same_bits(rows, run_calls(pools))


def test_gaps_say_who_filled_them(monkeypatch: pytest.MonkeyPatch) -> None:
    Ending(monkeypatch, 2, False, after=False, most=1)
    with server_pools(HOMES, ROLES) as pools:
        began = time.perf_counter()
        run_calls(pools)
        faults: list[Faults] = [pool.take_faults() for pool in pools]
        gaps = [gap for one in faults for gap in one.gaps]       # of the homes that waited for the lost server
        assert gaps and pools[0].take_faults().gaps == []
        for name, start_seconds, stop in gaps:
            assert "closed its connection; role" in name and "by rank" in name
            assert began < start_seconds <= stop < time.perf_counter()


def test_a_home_that_closes_first_has_sent_what_the_others_wait_for(undisturbed: tuple[torch.dtype, Rows]) -> None:
    """No server is there. Home 0 has its results, and closes, before its role's results leave for home 1."""
    with server_pools(HOMES, ROLES, servers=0) as pools:
        send = pools[0].runner.send

        def late(rank: int, message: Any, payload: Any) -> None:
            if message["kind"] == "result" and rank == 1:
                time.sleep(0.5)
            send(rank, message, payload)

        pools[0].runner.send = late

        def body(transport: LoopbackTransport) -> torch.Tensor:
            attend = CoreAttention(transport=PoolTransport(transport, pools[transport.rank]), kernel="sdpa")
            q, k, v = (x[row_index(LAYOUT, transport.rank)] for x in tensors_of(PLANS[0], torch.float64)[:3])
            out = attend(q, k, v, PLANS[0])
            pools[transport.rank].close()
            return out

        outs = LoopbackWorld(HOMES, timeout_seconds=30).run(body)
    if undisturbed[0] is torch.float64:
        assert all(torch.equal(out, row[0]) for out, row in zip(outs, undisturbed[1], strict=True))


def test_training_ranks_meet_although_some_are_turned_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank listens to few at once that have proved nothing yet; with many ranks, that many come at once."""
    monkeypatch.setattr(links_module, "MAX_STRANGERS", 1)
    monkeypatch.setattr(links_module, "HANDSHAKE_SECONDS", 0.5)
    first, second = (ServerPool(PoolShape(2, 1, 1), rank, SECRET, listen=("127.0.0.1", 0), device=CPU)
                     for rank in range(2))
    with socket.create_connection((first.peer.host, first.peer.port)), ThreadPoolExecutor(1) as thread:
        met = thread.submit(first.meet, [first.peer, second.peer], MEET_SECONDS)
        second.meet([first.peer, second.peer], MEET_SECONDS)
        met.result()
    assert [*first.links] == [1] and [*second.links] == [0]
    for pool in (first, second):
        pool.close()


def test_a_server_that_comes_before_the_training_ranks_have_met_joins_afterwards(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a restart, when servers know the port: it would serve nobody, or be in a view that some never get."""
    came, admit = threading.Semaphore(0), ServerPool._admit

    def noting(self: ServerPool, link: Link, message: Message) -> None:
        admit(self, link, message)
        came.release()

    monkeypatch.setattr(ServerPool, "_admit", noting)
    pools = [ServerPool(PoolShape(2, 1, 1), rank, SECRET, listen=("127.0.0.1", 0), device=CPU) for rank in range(2)]
    server, peers = server_for(pools), [pool.peer for pool in pools]
    thread = start(server)
    assert came.acquire(timeout=MEET_SECONDS)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(pools[0].meet, peers, MEET_SECONDS)
        assert came.acquire(timeout=MEET_SECONDS)                # rank 0 knows the others, which are not here yet
        pools[1].meet(peers, MEET_SECONDS)
        first.result()
    assert all(pool.wait_for_servers(1, MEET_SECONDS) for pool in pools)
    session = server._session
    assert session is not None and session.runner is not None and session.runner.homes == [0, 1]
    for pool in pools:
        pool.close()
    thread.join(MEET_SECONDS)
    assert not thread.is_alive()


def test_a_training_rank_with_another_secret_is_refused_at_once() -> None:
    first, second = (ServerPool(PoolShape(2, 1, 1), rank, secret, listen=("127.0.0.1", 0), device=CPU)
                     for rank, secret in enumerate((SECRET, b"another one")))
    with pytest.raises(UserError, match=r"rank 1 cannot connect to rank 0 at 127.*all ranks need the same one"):
        second.meet([first.peer, second.peer], MEET_SECONDS)
    with pytest.raises(TransportError, match=r"rank 0: ranks \[1\] have not connected within 0.1 s"):
        first.meet([first.peer, second.peer], 0.1)
    for pool in (first, second):
        pool.close()


def test_a_server_on_another_kind_of_device_is_refused_where_memory_is_read() -> None:
    """Over TCP it serves: tensors come through host memory anyway."""
    with server_pools(HOMES, ROLES, servers=0) as pools:
        pools[0].runner.device = torch.device("meta")            # what rank 0 says that tensors are on
        server = server_for(pools)
        if USED["links"] == "nixl":
            with pytest.raises(UserError, match=r"attention.links is 'nixl', .* on meta, but this one's device is cpu"):
                server.run()
        else:
            start(server)
            assert pools[0].wait_for_servers(1, 20)
