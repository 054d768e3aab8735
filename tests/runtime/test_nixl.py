"""Registered memory: payloads are read whole or refused, blocks are used again, and a lost peer is named."""

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from distca.runtime.transport import nixl
from distca.runtime.transport.nixl import EXPOSED, HEAD, RegisteredMemory, memory_for
from distca.validation import UserError
from tests.support.pools import NEEDS_NIXL

CPU, LOOPBACK = torch.device("cpu"), ("127.0.0.1", 0)


def memories(count: int) -> list[RegisteredMemory]:
    return [RegisteredMemory(CPU, on_loopback=True) for _ in range(count)]


@dataclass(eq=False)
class End:
    """What registered memory knows of a link."""

    is_open: bool = True


def whole(memory: RegisteredMemory, other: Any, about: list[Any], meanwhile: Callable[[], object]) -> torch.Tensor:
    fetch = memory.fetch(other, about)
    while True:
        try:
            next(fetch)
        except StopIteration as end:
            return end.value
        meanwhile()


@NEEDS_NIXL
def test_payloads_are_whole_and_blocks_are_used_again() -> None:
    """A block that was taken serves the next payload that it can hold without being more than twice as large."""
    (mine, theirs), here, there = memories(2), End(), End()
    for size in (1, 1000, 1_000_003, 600_000, 1_000_003):
        payload = torch.arange(size, dtype=torch.float64)
        about = mine.expose(here, payload)
        assert mine.held and about[3] == payload.nbytes
        got = whole(theirs, there, about, mine.progress)
        assert torch.equal(got.view(torch.float64), payload)
        mine.taken(here, about[0])
        assert not mine.held
    assert [len(one.memory) for one in mine.blocks] == [1 << 16, 8 * 1_000_003 + HEAD]


@NEEDS_NIXL
def test_what_was_taken_back_is_refused() -> None:
    """The link had ended at its sender, whose block holds another payload by now, also one that looks the same."""
    (mine, theirs), here, there = memories(2), End(), End()
    about = mine.expose(here, torch.ones(1000))
    mine.forget(here)
    assert not mine.held
    whole(theirs, there, about, mine.progress)                   # nothing is there in its place
    again = mine.expose(End(), torch.ones(1000))
    assert again[0] == about[0]
    with pytest.raises(ConnectionError, match="taken back before it was read"):
        whole(theirs, there, about, mine.progress)
    mine.close()
    with pytest.raises(ConnectionError, match="a payload could not be read"):
        whole(theirs, there, again, lambda: None)
    assert not any(block.memory[:8].any() for block in mine.blocks)


@NEEDS_NIXL
def test_what_is_exposed_to_a_link_that_has_ended_holds_no_block() -> None:
    (mine,), here = memories(1), End()
    here.is_open = False
    mine.expose(here, torch.ones(10))
    assert not mine.held and here not in mine.blocks[0].known


def fails(*args: Any) -> Any:
    raise RuntimeError("NIXL_ERR_BACKEND")


@NEEDS_NIXL
def test_an_agent_that_registers_no_memory_any_more_is_replaced_at_both_ends() -> None:
    """As after a reset of its connection to itself. What it has registered is read on; links and names stay."""
    (mine, theirs), here, there = memories(2), End(), End()
    first = mine.expose(here, torch.arange(1000))
    assert torch.equal(whole(theirs, there, first, mine.progress).view(torch.int64), torch.arange(1000))
    for memory in (mine, theirs):
        memory.agents[-1].register_memory = fails
    second = mine.expose(here, torch.arange(20_000))             # the first one is held
    assert torch.equal(whole(theirs, there, second, mine.progress).view(torch.int64), torch.arange(20_000))
    mine.taken(here, first[0])
    again = mine.expose(here, torch.arange(5))
    assert again[0] == first[0] and again[-1] == "", "the old agent's block, which the other end knows"
    assert torch.equal(whole(theirs, there, again, mine.progress).view(torch.int64), torch.arange(5))
    assert len(mine.agents) == 2 and len(theirs.agents) == 1, "who has no block is not kept"
    theirs.forget(there)
    assert not theirs._names and not theirs._told
    for memory in (mine, theirs):
        memory.close()


@dataclass
class Meanwhile:
    """A payload, and what happens while it is being copied."""

    content: torch.Tensor
    happens: Callable[[], object]

    @property
    def nbytes(self) -> int:
        return self.content.nbytes

    def reshape(self, *shape: int) -> torch.Tensor:
        self.happens()
        return self.content.reshape(*shape)


@NEEDS_NIXL
def test_a_link_that_ends_while_something_is_exposed_to_it_spoils_nobody_elses_payload() -> None:
    (mine, theirs), here, other, there, found = memories(2), End(), End(), End(), list[list[Any]]()

    def ends() -> None:
        here.is_open = False
        mine.forget(here)
        found.append(mine.expose(other, torch.ones(1000)))

    payload: Any = Meanwhile(torch.zeros(1000), ends)
    spoiled = mine.expose(here, payload)
    got = whole(theirs, there, found[0], mine.progress)
    assert torch.equal(got.view(torch.float32), torch.ones(1000))
    assert [mine.blocks[about[0]].holder for about in (spoiled, found[0])] == [None, other]


@NEEDS_NIXL
@pytest.mark.parametrize("answers", [True, False])
def test_memory_that_is_being_read_into_outlives_its_owner(answers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other side has to let NIXL work, or the reading does not end."""
    (mine, theirs), there, ends, kept = memories(2), End(), threading.Event(), list[Any]()
    monkeypatch.setattr(nixl, "UNFINISHED", kept)
    monkeypatch.setattr(nixl, "CLOSE_SECONDS", 20.0 if answers else 0.1)

    def works() -> None:
        while not ends.is_set():
            mine.progress()

    assert theirs.receive(there, {EXPOSED: mine.expose(End(), torch.arange(1 << 22))}) is None
    fetch: Any = theirs._fetches[there]
    thread = threading.Thread(target=works)
    if answers:
        thread.start()
    theirs.close()
    assert (fetch.gi_frame is None, kept) == ((True, []) if answers else (False, [theirs]))
    ends.set()
    if answers:
        thread.join()
    else:
        while theirs.progress():                                 # before the memory goes
            mine.progress()


def exposes(end: Connection) -> None:
    memory = RegisteredMemory(CPU, on_loopback=True)
    end.send(memory.expose(End(), torch.arange(1000)))
    while True:
        memory.progress()


@NEEDS_NIXL
@pytest.mark.multiprocess
def test_a_killed_process_is_named_at_the_next_read() -> None:
    mine, there, context = memories(1)[0], End(), multiprocessing.get_context("forkserver")
    end, child_end = context.Pipe()
    process = context.Process(target=exposes, args=(child_end,), daemon=True)
    process.start()
    about = end.recv()
    assert torch.equal(whole(mine, there, about, mine.progress).view(torch.int64), torch.arange(1000))
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join()
    with pytest.raises(ConnectionError, match=r"a payload could not be read.*DISCONNECT"):
        whole(mine, there, about, mine.progress)
    mine.forget(there)
    again = mine.expose(there, torch.ones(3))                    # the others are served on
    assert torch.equal(whole(memories(1)[0], End(), again, mine.progress).view(torch.float32), torch.ones(3))


@NEEDS_NIXL
def test_a_process_without_a_network_is_told_so_as_an_error_of_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers try again after these."""
    monkeypatch.setattr(nixl, "ON_LOOPBACK", {"engine_config": "NET_DEVICES=none0"})
    with pytest.raises(ConnectionError, match=r"finds no way to other processes.*use links 'tcp'"):
        memories(1)


def test_a_process_without_nixl_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl", None)
    with pytest.raises(UserError, match=r"need nixl.*install.*nixl.*or use links 'tcp'"):
        memory_for("nixl", CPU, LOOPBACK)
    assert memory_for("tcp", CPU, LOOPBACK) is None
    with pytest.raises(UserError, match="links is 'rdma'; choose one of: tcp, nixl"):
        memory_for("rdma", CPU, LOOPBACK)
