"""Payloads of links through NIXL: they stay in their sender's registered memory, where the receiver reads them.

The memory is a GPU's if the tensors are there, otherwise the host's. NIXL chooses the way: the GPU's or the host's own
memory inside a node, RDMA between nodes. Messages, membership and losses stay on the links. What NIXL needs to know of
a peer's memory comes over them too, so that only who knows the run's secret gets it.

**Reads, not writes.** A process that was given up may wake up at any moment. It can then read what is no longer of use
to anybody, but it writes into nobody's memory.

**Stamps.** A block of registered memory begins with a random number that changes with each payload put there, before
its first byte does. The receiver reads the number after the payload: if it is still the one in the message, the payload
is whole. If it is not, the sender had ended this link, and the receiver ends it too.

**Agents.** If an agent's connection to itself breaks, it registers no memory any more, but what is registered can still
be read. A new agent then registers what comes, and the peers' metadata is loaded into it again.

Without a thread of its own NIXL works when it is called: by the links' thread, while anything is to be read.
"""

from __future__ import annotations

import base64
import logging
import secrets
import socket
import threading
import time
from collections.abc import Generator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Any

import torch

from distca.validation import UserError, to_install

HEAD = 64                        # bytes before a payload: its stamp, and room that keeps payloads aligned
LEAST_BLOCK = 1 << 16
MAX_PAYLOAD = 1 << 40
EAGER_SECONDS = 0.02             # for which the links' thread does not sleep if something may be read soon
PATIENT_SECONDS = 0.001          # for which it sleeps then
LINKS = ("tcp", "nixl")          # how payloads go
EXPOSED, TAKEN = "exposed", "taken"  # a message's key for where its payload is; the kind that says that it was read
ON_LOOPBACK = {"engine_config": "NET_DEVICES=lo"}
CLOSE_SECONDS = 1.0              # for fetches in flight to end
UNFINISHED: list[Any] = []       # memory with fetches that did not: NIXL may write to it until this process ends
LOG = logging.getLogger("distca")
Fetch = Generator[None, None, torch.Tensor]


@dataclass(slots=True)
class Block:
    """Registered memory of this process. `holder` is the link whose other end may read it now.

    While a payload is put into it, nobody else may have it, even if that link ends meanwhile.
    """

    number: int
    memory: torch.Tensor
    agent: Any                   # NIXL's, which registered it
    metadata: str
    holder: Any = None
    fills: bool = False
    known: set[Any] = field(default_factory=set)  # links whose other ends have the metadata


class RegisteredMemory:
    """What the links of this process expose and fetch; `expose` may be called by any thread, the rest by the links'."""

    def __init__(self, device: torch.device, *, on_loopback: bool) -> None:
        try:
            import nixl
        except ImportError as error:
            raise UserError(f"links over NIXL need nixl, which cannot be imported ({error}); {to_install('nixl')}, or "
                            "use links 'tcp'") from None
        logging.getLogger("nixl").setLevel(logging.WARNING)
        self.device, self.blocks, self.lock = device, list[Block](), threading.Lock()
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._nixl, self._options = nixl, ON_LOOPBACK if on_loopback else {}
        self.agents = [self._new_agent()]                        # the last one registers; others have blocks
        self._told: dict[Any, dict[int, bytes]] = {}             # link -> its other end's metadata, by block
        self._names: dict[tuple[Any, Any, int], str] = {}        # agent, link, block -> its owner's name to the agent
        self._fetches: dict[Any, Fetch] = {}                     # link -> the payload of its oldest message
        self._eager_until = 0.0
        self._abandoned: list[tuple[Any, Fetch]] = []            # of links that have ended

    @property
    def held(self) -> bool:
        """Whether a peer has not read something yet."""
        return any(block.holder is not None for block in self.blocks)

    @property
    def waiting(self) -> list[Any]:
        """The links whose oldest message waits for its payload."""
        return list(self._fetches)

    def pause(self, is_busy: bool) -> float | None:
        """Let NIXL work; return how many seconds to wait for sockets, None if nothing is to be read."""
        if is_busy:
            self._eager_until = time.perf_counter() + EAGER_SECONDS
        if not (self.progress() or self._fetches):
            return None
        return 0.0 if time.perf_counter() < self._eager_until else PATIENT_SECONDS

    def expose(self, link: Any, payload: torch.Tensor) -> list[Any]:
        """Put a complete tensor where the other end of a link may read it; return what that needs to know.

        Raises ConnectionError if NIXL cannot register memory any more.
        """
        stamp = secrets.randbits(63)
        with self.lock:
            fits = [one for one in self.blocks if one.holder is None and
                    payload.nbytes + HEAD <= len(one.memory) <= 2 * payload.nbytes + LEAST_BLOCK]
            block = min(fits, key=lambda one: len(one.memory)) if fits else self._new(payload.nbytes + HEAD)
            block.holder, block.fills = link, True
            metadata = "" if link in block.known else block.metadata
            block.known.add(link)
        block.memory[:8].view(torch.int64).fill_(stamp)
        block.memory[HEAD:HEAD + payload.nbytes].copy_(payload.reshape(-1).view(torch.uint8))
        if self.stream is not None:
            torch.cuda.current_stream(self.device).synchronize()
        with self.lock:
            block.fills = False
            if not link.is_open:                                 # `forget` may have been here before
                block.holder = None
                block.known.discard(link)
        return [block.number, stamp, block.memory.data_ptr(), payload.nbytes, block.memory.get_device(), metadata]

    def taken(self, link: Any, number: int) -> None:
        """The other end of a link has read a block."""
        if self.blocks[number].holder is link:
            self.blocks[number].holder = None

    def forget(self, link: Any) -> None:
        """A link has ended: nobody waits for what was exposed to it, nor for what was being fetched."""
        with self.lock:
            for block in self.blocks:
                block.known.discard(link)
                if block.holder is link and not block.fills:
                    block.holder = None
        if (fetch := self._fetches.pop(link, None)) is not None:
            self._abandoned.append((link, fetch))
        else:
            self._told.pop(link, None)
            gone = {key: name for key, name in self._names.items() if key[1] is link}
            self._names = {key: name for key, name in self._names.items() if key not in gone}
            for agent, name in {(key[0], name) for key, name in gone.items()}:
                with suppress(Exception):                        # it is gone either way
                    agent.remove_remote_agent(name)

    def receive(self, link: Any, message: dict[str, Any]) -> torch.Tensor | None:
        """Return the payload of a link's oldest message if it is here; raise ConnectionError if it cannot be read."""
        if link not in self._fetches:
            self._fetches[link] = self.fetch(link, message[EXPOSED])
        try:
            return next(self._fetches[link])
        except StopIteration as end:
            del self._fetches[link]
            link.send({"kind": TAKEN, "block": message.pop(EXPOSED)[0]})
            payload: torch.Tensor = end.value
            return payload

    def fetch(self, link: Any, about: list[Any]) -> Fetch:
        """Read what the other end of a link has exposed: yield until it is here; raise ConnectionError if it is not.

        Nobody may use the memory while NIXL writes to it, so a fetch that has begun goes on until it ends.
        """
        number, stamp, address, num_bytes, place, metadata = about
        if not 0 < num_bytes <= MAX_PAYLOAD:
            raise ValueError(f"a payload of {num_bytes} bytes")
        try:
            if self.stream is not None:
                torch.cuda.set_device(self.device)               # of this thread
            if metadata:
                self._told.setdefault(link, {})[number] = base64.b64decode(metadata)
            with self._alone():
                into = torch.empty(HEAD + num_bytes, dtype=torch.uint8, device=self.device)
            with self.lock:
                agent, registered = self._register(into)
            try:
                owner = self._owner(agent, link, number)
                for begin, size in ((HEAD, num_bytes), (0, HEAD)):
                    yield from self._read(agent, owner, into[begin:begin + size],
                                          (address + begin, size, max(place, 0)))
            finally:
                agent.deregister_memory(registered)
            with self._alone():
                found = int(into[:8].view(torch.int64))
        except Exception as error:
            raise ConnectionError(f"a payload could not be read ({error})") from None
        if found != stamp:
            raise ConnectionError("a payload was taken back before it was read")
        return into[HEAD:]

    def progress(self) -> bool:
        """Let NIXL work; return whether it has more to do."""
        for agent in self.agents:
            agent.get_new_notifs()
        for link, fetch in list(self._abandoned):
            if is_over(fetch):
                self._abandoned.remove((link, fetch))
                self.forget(link)
        return bool(self._abandoned) or self.held

    def close(self) -> None:
        """Make sure that nobody takes for a payload what memory holds after this, and that NIXL writes nothing more."""
        for link in self.waiting:
            self.forget(link)
        deadline = time.monotonic() + CLOSE_SECONDS
        while self._abandoned and time.monotonic() < deadline:
            self.progress()
        if self._abandoned:
            UNFINISHED.append(self)
            return
        for block in self.blocks:
            block.memory[:8].zero_()
            block.agent = None
        if self.stream is not None:
            torch.cuda.synchronize(self.device)
        self.agents.clear()                                      # the last references: NIXL lets go of the memory
        self._names.clear()

    def _new(self, num_bytes: int) -> Block:
        memory = torch.empty(max(num_bytes, LEAST_BLOCK), dtype=torch.uint8, device=self.device)
        try:
            agent, registered = self._register(memory)
            metadata = agent.get_partial_agent_metadata(registered, True, ["UCX"])
        except Exception as error:                               # NIXL's have no base of their own
            raise ConnectionError(f"memory cannot be registered ({error})") from None
        self.blocks.append(Block(len(self.blocks), memory, agent, base64.b64encode(metadata).decode()))
        return self.blocks[-1]

    def _new_agent(self) -> Any:
        agent = self._nixl.nixl_agent(secrets.token_hex(8), self._nixl.nixl_agent_config(
            enable_prog_thread=False, backends=[], sync_mode=self._nixl.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT))
        try:
            agent.create_backend("UCX", self._options)
        except Exception as error:                               # where no network is up, for example
            raise ConnectionError(f"NIXL finds no way to other processes ({error}); use links 'tcp'") from None
        return agent

    def _register(self, memory: torch.Tensor) -> tuple[Any, Any]:
        """Register memory, by a new agent if the last one cannot; the caller holds the lock."""
        try:
            return self.agents[-1], self.agents[-1].register_memory(memory)
        except Exception as error:
            LOG.warning("NIXL registers no memory any more (%s): a new agent of it does from now on", error)
            fresh = self._new_agent()
            registered = fresh.register_memory(memory)
            self.agents = [*(one for one in self.agents if any(block.agent is one for block in self.blocks)), fresh]
            return fresh, registered

    def _owner(self, agent: Any, link: Any, number: int) -> str:
        """Return what an agent calls the owner of a block at the other end of a link."""
        key = agent, link, number
        if key not in self._names:
            self._names[key] = agent.add_remote_agent(self._told[link][number])
        return self._names[key]

    def _alone(self) -> AbstractContextManager[Any]:
        """A stream with no kernels: memory that is allocated on it is used by nobody, also not by waiting kernels."""
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def _read(
        self, agent: Any, owner: str, into: torch.Tensor, place: tuple[int, int, int]
    ) -> Generator[None, None, None]:
        handle = agent.initialize_xfer("READ", agent.get_xfer_descs(into), agent.get_xfer_descs(
            [place], "DRAM" if self.stream is None else "VRAM"), owner)
        state = agent.transfer(handle)
        while state == "PROC":
            yield
            state = agent.check_xfer_state(handle)
        agent.release_xfer_handle(handle)
        if state != "DONE":
            raise ConnectionError(f"NIXL says {state}")


def is_over(fetch: Fetch) -> bool:
    """Advance a fetch that nobody waits for."""
    try:
        next(fetch)
    except (StopIteration, ConnectionError, ValueError):
        return True
    return False


def memory_for(links: str, device: torch.device, address: tuple[str, int]) -> RegisteredMemory | None:
    """Return the memory for links of this name; on the loopback interface alone, if the address is there."""
    if links not in LINKS:
        raise UserError(f"links is {links!r}; choose one of: {', '.join(LINKS)}")
    if links == "tcp":
        return None
    return RegisteredMemory(device, on_loopback=ip_address(socket.getaddrinfo(*address)[0][4][0]).is_loopback)
