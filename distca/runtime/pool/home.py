"""A training rank's end of a pool of dedicated servers.

What trainers send to each other goes through their own transport, as without servers. What goes to roles and comes
back goes over links, so no collective ever includes a server. The thread of the links handles every message, so views
and losses are acted on while the rank computes, waits in a collective or sleeps. If no server is left, roles run on a
thread of their own in the homes, because another home may wait for them while this rank is in a collective.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from distca.planning.plan import Plan
from distca.planning.plan_bytes import plan_to_bytes
from distca.runtime.pool.protocol import (
    CallInFlight,
    Coordinator,
    Faults,
    HomeCalls,
    Member,
    Message,
    Outgoing,
    Peer,
    PoolShape,
    View,
)
from distca.runtime.pool.runner import Runner, StandIn
from distca.runtime.prepared import LRU, digest
from distca.runtime.transport import TransportError
from distca.runtime.transport.links import Address, Link, Links
from distca.runtime.transport.nixl import memory_for
from distca.validation import UserError

PATIENCE_FACTOR = 20.0      # times its predicted seconds that a role may take
UNMEASURED_SECONDS = 60.0   # that a role may take before any has been measured: kernels are loaded and compiled
POLL_SECONDS = 0.1
CLOSE_POLL_SECONDS = 0.005
PLANS_KEPT = 512
LOG = logging.getLogger("distca")


class ServerPool:
    """This training rank's connections to servers and other trainers, and its calls on the servers."""

    def __init__(
        self, shape: PoolShape, rank: int, secret: bytes, *, listen: Address, device: torch.device,
        kernel: str = "auto", patience_seconds: float = 10.0, links: str = "tcp",
    ) -> None:
        self.shape, self.rank, self.pool = shape, rank, rank % shape.num_pools
        self.homes = shape.homes(self.pool)
        self.secret, self.patience_seconds, self.faults = secret, patience_seconds, Faults()
        self.on_change: Callable[[View, str], None] | None = None  # rank 0's, called in the thread of the links
        self.coordinator = Coordinator([shape.homes(pool) for pool in range(shape.num_pools)], shape.num_roles)
        self.view = self.coordinator.view
        self.calls = HomeCalls(rank, self.homes, self.view.owners[self.pool])
        self.links: dict[int, Link] = {}
        self.peers: list[Peer] = []
        self.joining: dict[int, Member] = {}                     # rank 0's: welcomed, not ready yet
        self.running: dict[int, float] = {}                      # server -> seconds that its role takes so far
        self.rates = [0.0, 0.0]                                  # seconds per work, forward and backward
        self.plans, self.encoded = LRU[int, Plan](PLANS_KEPT), LRU[int, torch.Tensor](PLANS_KEPT)
        self.number, self.closing, self.failed = 0, False, ""
        self.followed = 0.0                                      # when the view came
        self.changed = threading.Condition(threading.RLock())
        self.runner = Runner(self.homes, shape.num_roles, self.post, device=device, kernel=kernel)
        self.stand_in = StandIn(self.runner, self._fail)
        memory = memory_for(links, self.runner.device, listen)
        self._links = Links(secret, self._receive, self._closed, listen=listen)
        self._links.memory = memory
        self.peer = Peer(rank, *self._links.address, os.getpid())

    def meet(self, peers: Sequence[Peer], seconds: float) -> None:
        """Connect to the other training ranks, which must be in rank order."""
        self.peers = list(peers)
        for peer in peers[:self.rank]:
            link = self._connect(peer, time.monotonic() + seconds)
            link.peer = peer.rank
            with self.changed:
                self.links[peer.rank] = link
            link.send({"kind": "trainer", "rank": self.rank})
        if not self._wait_for(lambda: self.has_met, seconds):
            lacking = [peer.rank for peer in peers if peer.rank != self.rank and peer.rank not in self.links]
            raise TransportError(self.failed or f"rank {self.rank}: ranks {lacking} have not connected within "
                                 f"{seconds:g} s; attention.listen names an address that they reach")

    @property
    def has_met(self) -> bool:
        """Whether all training ranks are here, to whom views can be sent."""
        return bool(self.peers) and all(peer.rank in self.links for peer in self.peers if peer.rank != self.rank)

    def _connect(self, peer: Peer, deadline: float) -> Link:
        """Connect to a training rank, which turns some away while many come at once."""
        while True:
            try:
                return self._links.connect((peer.host, peer.port))
            except OSError as error:
                why = f"rank {self.rank} cannot connect to rank {peer.rank} at {peer.host}:{peer.port}: {error}"
                if isinstance(error, PermissionError):
                    raise UserError(f"{why}; all ranks need the same one (DISTCA_SECRET)") from None
                if time.monotonic() > deadline:
                    raise TransportError(f"{why}; attention.listen names an address that the others reach") from None
            time.sleep(POLL_SECONDS)

    def wait_for_servers(self, count: int, seconds: float) -> bool:
        """Wait until as many servers have joined; return whether they did in time."""
        return self._wait_for(lambda: len(self.view.members) >= count, seconds)

    def push(self, plans: Iterable[Plan]) -> None:
        """Send plans to the servers before their calls. Servers ask for plans that they lack."""
        for plan in plans:
            self.plans.put(digest(plan), plan)
            for member in self.view.members if self.rank == self.homes[0] else ():
                if member.pool == self.pool:
                    self._send_plan(member.rank, digest(plan))

    def begin(
        self, about: Message, plan: Plan, inputs: Mapping[int, torch.Tensor], expected: Iterable[int]
    ) -> tuple[int, CallInFlight]:
        """Send inputs to the roles' owners; return the call's number and what will hold its results."""
        with self.changed:
            self.number += 1
            self.plans.put(int(about["digest"]), plan)
            call, out = self.calls.begin(self.number, about, inputs, expected)
            number = self.number
        self._post(out)
        return number, call

    def wait(self, call: CallInFlight, plan: Plan) -> dict[int, torch.Tensor]:
        """Wait until all results of a call are here; report servers that are late, and let others repeat their work."""
        began = time.perf_counter()
        with self.changed:
            while call.missing:
                if self.failed:
                    raise TransportError(self.failed)
                if not self.changed.wait(POLL_SECONDS):
                    self._look_for_late(call, plan, began)
        return call.results

    def take_faults(self) -> Faults:
        """Return what was lost since the last call of this."""
        with self.changed:
            taken, self.faults = self.faults, Faults()
        return taken

    def close(self) -> None:
        """Release the servers and end all connections, once every home has the results of all calls."""
        deadline = time.monotonic() + self.patience_seconds
        while self.calls.calls and not self.failed and time.monotonic() < deadline:
            time.sleep(CLOSE_POLL_SECONDS)
        with self.changed:
            self.closing = True
            links = list(self.links.values())
        for link in links:
            link.send({"kind": "bye"})
        self.stand_in.end(max(deadline - time.monotonic(), 0.0))
        self._links.close()

    def post(self, rank: int, message: Message, payload: torch.Tensor | None) -> None:
        """Send a message to a process, which may be this one; what is sent to a lost one is lost."""
        if rank == self.rank:
            self._handle(rank, message, payload)
        elif (link := self.links.get(rank)) is not None:
            link.send(message, payload)

    def _post(self, out: Outgoing) -> None:
        for rank, message, payload in out:
            self.post(rank, message, payload)

    def _wait_for(self, reached: Callable[[], bool], seconds: float) -> bool:
        with self.changed:
            return self.changed.wait_for(lambda: reached() or bool(self.failed), seconds) and not self.failed

    def _look_for_late(self, call: CallInFlight, plan: Plan, began: float) -> None:
        """Ask the owners of missing roles for a sign of life; report those that have given none for too long."""
        now, backward = time.perf_counter(), bool(call.about["backward"])
        for role in sorted(call.missing):
            owner = call.owner[role]
            link = self.links.get(owner)
            if owner < self.shape.num_trainers or link is None:
                continue
            rate = self.rates[backward]
            predicted = PATIENCE_FACTOR * rate * float(plan.work()[len(self.homes) + role]) if rate else (
                UNMEASURED_SECONDS)
            late = max(now - max(link.heard, began, self.followed), self.running.get(owner, 0.0))
            if late > max(self.patience_seconds, predicted):
                self._report(owner, late, f"gave no results for {late:.1f} s")
            else:
                link.send({"kind": "ping"})

    def _report(self, rank: int, silent: float, why: str) -> None:
        """Tell the coordinator that a server is lost."""
        self.post(0, {"kind": "lost", "rank": rank, "silent": silent, "why": why}, None)

    def _closed(self, link: Link) -> None:
        with self.changed:
            if self.links.get(link.peer) is not link:
                return
            del self.links[link.peer]
            self.joining.pop(link.peer, None)
            if link.peer < self.shape.num_trainers:
                if not self.closing:
                    self.failed = f"rank {self.rank}: rank {link.peer} ended; restart from the last checkpoint"
                self.changed.notify_all()
            elif self.view.member(link.peer) is not None and not self.closing:
                self._report(link.peer, 0.0, "closed its connection")

    def _receive(self, link: Link, message: Message, payload: torch.Tensor | None) -> None:
        """Handle a message in the thread of the links; the first one of a link says who sends it."""
        if link.peer >= 0:
            self._handle(link.peer, message, payload)
        elif message["kind"] == "trainer":
            self._welcome(link, int(message["rank"]))
        elif message["kind"] == "server":
            self._welcome(link, int(message["rank"]))
            link.send({"kind": "known"})
        elif message["kind"] == "join":
            self._admit(link, message)
        else:
            link.close()

    def _welcome(self, link: Link, rank: int) -> None:
        with self.changed:
            link.peer = rank
            self.links[rank] = link
            self.changed.notify_all()

    def _admit(self, link: Link, message: Message) -> None:
        """Rank 0 gives a new server a rank and the addresses of its homes, once the training ranks have met."""
        with self.changed:
            if self.rank != 0 or self.closing or not self.has_met:
                link.close()
                return
            member = self.coordinator.admit(str(message["host"]), int(message["pid"]), int(message["wish"]))
            self.joining[member.rank] = member
        self._welcome(link, member.rank)
        homes = [peer for peer in self.peers if peer.rank in self.shape.homes(member.pool)]
        link.send({"kind": "welcome", "rank": member.rank, "roles": self.shape.num_roles,
                   "threads": self.stand_in.num_threads, "kernel": self.runner.kernel,
                   "links": "tcp" if self._links.memory is None else "nixl", "device": self.runner.device.type,
                   "homes": [[peer.rank, peer.host, peer.port] for peer in homes]})

    def _handle(self, sender: int, message: Message, payload: torch.Tensor | None) -> None:
        kind, out = message["kind"], list[tuple[int, Message, torch.Tensor | None]]()
        with self.changed:
            if kind == "result":
                out = self._take(sender, message, payload)
            elif kind == "done":
                self.calls.done_by(sender, int(message["call"]))
            elif kind == "view":
                out = self._follow(View.from_json(message["view"]), message)
            elif kind == "pong":
                self.running[sender] = float(message["running"])
            elif kind in ("inputs", "plan"):
                self.stand_in.offer(sender, message, payload)
            elif kind == "bye":
                self.closing = True
            elif self.rank == 0:
                self._coordinate(sender, message)
        if kind == "want":
            self._send_plan(sender, int(message["digest"]))
        self._post(out)

    def _take(self, sender: int, message: Message, payload: torch.Tensor | None) -> Outgoing:
        number, role = int(message["call"]), int(message["role"])
        call = self.calls.calls.get(number)
        if call is None or role not in call.missing:
            return []
        plan, backward = self.plans.get(int(call.about["digest"])), bool(call.about["backward"])
        assert plan is not None
        work = float(plan.work()[len(self.homes) + role])
        self.rates[backward] = max(0.9 * self.rates[backward], float(message["seconds"]) / work if work else 0.0)
        self.running.pop(sender, None)
        out = self.calls.result(number, role, payload)
        if role in call.repeated:
            (why, since), now = call.repeated[role], time.perf_counter()
            self.faults.gaps.append((f"{why}; role {role} by rank {sender}", since, now))
            self.faults.seconds = max(self.faults.seconds, now - since)
        self.changed.notify_all()
        return out

    def _follow(self, view: View, message: Message) -> Outgoing:
        """Go over to a new view: let go of who is not in it any more, and send again what they owed."""
        gone = [one.rank for one in self.view.members if one.rank in self.links and view.member(one.rank) is None]
        self.view, self.followed = view, time.perf_counter()     # new owners have had no time yet
        for rank in gone:
            if message["reason"] == "leave":                     # it closes, once it has run what it was given
                self.links[rank].send({"kind": "released"})
            else:
                self.links.pop(rank).close()
            self.running.pop(rank, None)
        self.faults.lost += message["reason"] == "lost"
        out = self.calls.follow(view.owners[self.pool], str(message["why"]),
                                time.perf_counter() - float(message["silent"]))
        for _, about, _ in out:
            plan = self.plans.get(int(about["digest"]))
            if plan is not None:
                self.faults.repeated_tasks += int((plan.tasks.server == len(self.homes) + int(about["role"])).sum())
        for member in view.members:
            if member.pool == self.pool and member.rank not in self.links:
                self._report(member.rank, 0.0, "closed its connection")
        self.changed.notify_all()
        return out

    def _coordinate(self, sender: int, message: Message) -> None:
        """Rank 0: make a new view if this message asks for one, and tell all training ranks."""
        kind, why = message["kind"], ""
        if kind == "ready" and sender in self.joining:
            member = self.joining.pop(sender)
            view, why = self.coordinator.ready(member), f"rank {sender} joined"
            LOG.info("server rank %d (process %d on %s) joined", sender, member.pid, member.host)
        elif kind == "lost":
            view = self.coordinator.lost(int(message["rank"]))
            why = f"rank {message['rank']} {message['why']}"
            if view is not None:
                LOG.warning("server %s; servers left: %d", why, len(view.members))
        elif kind == "leave":
            view, why = self.coordinator.lost(sender), f"rank {sender} left"
            LOG.info("server rank %d leaves", sender)
        elif kind == "speed":
            view, why = self.coordinator.measured(sender, float(message["speed"])), f"rank {sender} was measured"
        else:
            return
        if view is not None:
            about = {"kind": "view", "view": view._asdict(), "reason": kind, "why": why,
                     "silent": float(message.get("silent", 0.0))}
            for rank in range(1, self.shape.num_trainers):
                self.post(rank, about, None)
            self._post(self._follow(view, about))
            if self.on_change is not None:
                self.on_change(view, kind)

    def _fail(self, error: Exception) -> None:
        with self.changed:
            self.failed = f"rank {self.rank}: a role that has no server failed here: {error}"
            self.changed.notify_all()

    def _send_plan(self, rank: int, number: int) -> None:
        content, plan = self.encoded.get(number), self.plans.get(number)
        if content is None and plan is not None:
            content = torch.frombuffer(bytearray(plan_to_bytes(plan)), dtype=torch.uint8)
            self.encoded.put(number, content)
        if content is not None:
            self.post(rank, {"kind": "plan", "digest": number}, content)


def local_address(host: str = "127.0.0.1") -> Address:
    """Return this host's own address on the way to `host`, and any free port."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        one.connect((host, 9))
        return one.getsockname()[0], 0
