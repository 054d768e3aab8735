"""The rules by which servers come and go, without sockets, clocks or threads, so that a test can try every order.

**Roles.** A plan names its dedicated servers by number. Such a number is a role: a fixed share of every call, which any
process can run, since its inputs are all that it needs. Plans depend on the number of roles and never on who is there,
so cuts, merging order and every bit of the result stay the same when a server is lost or joins. A view says which
process owns each role: a server, or a trainer if there is no server.

**Agreement.** Training rank 0 coordinates. It alone makes views, and everybody gets them from it in order. If rank 0
dies, the run ends like after the loss of any trainer.

**Calls.** A home sends a role's inputs to the owner and keeps them until every home has its results. Whenever a view
gives a role of an unfinished call to somebody else, homes send its inputs again, to the new owner. Since every home
gets every view, all inputs of a role reach its last owner. Results carry call and role. The first that arrives is used,
another one has the same bits and is dropped, so nothing is ever counted twice.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

Message = dict[str, Any]                   # plain values, with the "kind" of the message
Outgoing = list[tuple[int, Message, Any]]  # (receiver's rank, message, payload)


class PoolShape(NamedTuple):
    """Who is in the pools: training rank r is a home of pool r % num_pools."""

    num_trainers: int
    num_pools: int
    num_roles: int  # of each pool

    def homes(self, pool: int) -> list[int]:
        return list(range(pool, self.num_trainers, self.num_pools))


class Peer(NamedTuple):
    """A training rank, where it listens."""

    rank: int
    host: str
    port: int
    pid: int


class Member(NamedTuple):
    """A server that has joined."""

    rank: int           # after the training ranks; never given twice
    pool: int           # tensor-parallel index that it serves
    host: str
    pid: int
    speed: float = 0.0  # measured work per second; 0: not measured yet


class View(NamedTuple):
    """The servers of a moment, and the owner of every role."""

    epoch: int
    members: tuple[Member, ...]
    owners: tuple[tuple[int, ...], ...]  # [pools][roles] rank of the process that runs the role

    @classmethod
    def from_json(cls, content: Message) -> View:
        return cls(int(content["epoch"]), tuple(Member(*one) for one in content["members"]),
                   tuple(tuple(map(int, one)) for one in content["owners"]))

    def member(self, rank: int) -> Member | None:
        return next((one for one in self.members if one.rank == rank), None)


@dataclass(slots=True)
class Faults:
    """What was lost since the last look, and what that cost."""

    lost: int = 0              # servers
    repeated_tasks: int = 0    # of roles whose inputs this rank sent again
    seconds: float = 0.0       # from the last sign of life of a lost server to the results that it owed
    gaps: list[tuple[str, float, float]] = field(default_factory=list)  # (who replaced whom, start, stop)


def deal(before: Sequence[int], members: Sequence[Member], homes: Sequence[int]) -> tuple[int, ...]:
    """Return the owner of every role: in proportion to the members' speed, and with as few moves as possible.

    `before` has the previous owners. A member that has not been measured counts as half as fast as the slowest that
    has, but gets a role if there are enough for all. Without members, roles go round the homes.
    """
    if not members:
        return tuple(homes[role % len(homes)] for role in range(len(before)))
    slowest = min((one.speed for one in members if one.speed), default=2.0)
    speed = {one.rank: one.speed or slowest / 2 for one in members}
    share = Counter(one.rank for one in members if not one.speed and len(before) >= len(members))
    for _ in range(len(before) - share.total()):
        share[min(speed, key=lambda rank: ((share[rank] + 1) / speed[rank], rank))] += 1
    owners: list[int | None] = []
    for owner in before:                                         # first, everybody keeps what is within the share
        keeps = share[owner] > 0
        owners.append(owner if keeps else None)
        share[owner] -= keeps
    rest = share.elements()
    return tuple(next(rest) if owner is None else owner for owner in owners)


class Coordinator:
    """Makes the views; each method returns the new one, or None if nothing changes."""

    def __init__(self, homes: Sequence[Sequence[int]], num_roles: int) -> None:
        self.homes = homes                                       # [pools][homes] training ranks
        self.view = View(0, (), tuple(deal([-1] * num_roles, (), one) for one in homes))
        self.given = {rank for one in homes for rank in one}     # ranks, each of which is given once

    def admit(self, host: str, pid: int, wish: int = -1) -> Member:
        """Give a new server a rank, `wish` if that is free, and the pool with the fewest members."""
        rank = max(self.given) + 1 if wish <= 0 or wish in self.given else wish
        self.given.add(rank)
        sizes = Counter(one.pool for one in self.view.members)
        return Member(rank, min(range(len(self.homes)), key=lambda pool: (sizes[pool], pool)), host, pid)

    def ready(self, member: Member) -> View | None:
        return self._changed((*self.view.members, member))

    def lost(self, rank: int) -> View | None:
        return self._changed(tuple(one for one in self.view.members if one.rank != rank))

    def measured(self, rank: int, speed: float) -> View | None:
        """Take a speed into account; roles are dealt again only if the member had not been measured before."""
        found = self.view.member(rank)
        if found is None or found.speed:
            return None
        return self._changed(tuple(one._replace(speed=speed) if one.rank == rank else one
                                   for one in self.view.members))

    def _changed(self, members: tuple[Member, ...]) -> View | None:
        if members == self.view.members:
            return None
        self.view = View(self.view.epoch + 1, members, tuple(
            deal(before, [one for one in members if one.pool == pool], homes)
            for pool, (before, homes) in enumerate(zip(self.view.owners, self.homes, strict=True))))
        return self.view


@dataclass(slots=True)
class CallInFlight:
    """What one home knows of a call that is not finished everywhere."""

    about: Message                       # what a server needs to know of the call
    inputs: Mapping[int, Any]            # role -> this home's inputs
    owner: dict[int, int]                # role -> the process that has them
    missing: set[int]                    # roles whose results this home waits for
    results: dict[int, Any] = field(default_factory=dict)
    repeated: dict[int, tuple[str, float]] = field(default_factory=dict)  # role sent again -> why, and since when


class HomeCalls:
    """One home's calls. Methods return what is to be sent."""

    def __init__(self, rank: int, homes: Iterable[int], owners: Sequence[int]) -> None:
        self.rank, self.others, self.owners = rank, [home for home in homes if home != rank], tuple(owners)
        self.calls: dict[int, CallInFlight] = {}                 # by number, in order
        self.done: defaultdict[int, set[int]] = defaultdict(set)  # number -> homes that have their results

    def begin(
        self, number: int, about: Message, inputs: Mapping[int, Any], expected: Iterable[int]
    ) -> tuple[CallInFlight, Outgoing]:
        """Send the inputs of each role to its owner; all homes begin the same calls with the same numbers."""
        call = CallInFlight(about, inputs, {role: self.owners[role] for role in inputs}, set(expected))
        self.calls[number] = call
        out = [self._inputs(number, role) for role in inputs]
        return call, out if call.missing else out + self._done_here(number)

    def follow(self, owners: Sequence[int], why: str = "", since: float = 0.0) -> Outgoing:
        """Send the inputs of every role that has a new owner again, also those whose results this home has."""
        self.owners, out = tuple(owners), []
        for number, call in self.calls.items():
            for role, owner in call.owner.items():
                if owner != owners[role]:
                    call.owner[role] = owners[role]
                    call.repeated.setdefault(role, (why, since))
                    out.append(self._inputs(number, role))
        return out

    def result(self, number: int, role: int, content: Any) -> Outgoing:
        """Take the results of a role, unless this home has them already."""
        call = self.calls.get(number)
        if call is None or role not in call.missing:
            return []
        call.missing.remove(role)
        call.results[role] = content
        return [] if call.missing else self._done_here(number)

    def done_by(self, home: int, number: int) -> None:
        """Forget the call once every home has its results."""
        self.done[number].add(home)
        if len(self.done[number]) > len(self.others):
            del self.done[number], self.calls[number]

    def _done_here(self, number: int) -> Outgoing:
        self.done_by(self.rank, number)
        return [(home, {"kind": "done", "call": number}, None) for home in self.others]

    def _inputs(self, number: int, role: int) -> tuple[int, Message, Any]:
        call = self.calls[number]
        about = {"kind": "inputs", "call": number, "role": role, "oldest": next(iter(self.calls)), **call.about}
        return call.owner[role], about, call.inputs[role]


class RoleInputs:
    """Inputs of roles that this process was given and has not run yet."""

    def __init__(self) -> None:
        self.waiting: dict[tuple[int, int], dict[int, Any]] = {}  # (call, role) -> home's rank -> inputs

    def add(self, number: int, role: int, home: int, content: Any, oldest: int) -> None:
        """Keep a home's inputs; forget those of calls before `oldest`, which are finished everywhere."""
        for key in [key for key in self.waiting if key[0] < oldest]:
            del self.waiting[key]
        self.waiting.setdefault((number, role), {})[home] = content

    def complete(self, number: int, role: int, needed: Iterable[int]) -> list[Any] | None:
        """Return the inputs of the `needed` homes, in their order, once all are here; then forget them."""
        found = self.waiting.get((number, role), {})
        if not all(home in found for home in needed):
            return None
        self.waiting.pop((number, role), None)
        return [found[home] for home in needed]
