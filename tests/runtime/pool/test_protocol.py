"""Every order of messages, crashes, wrong suspicions and leaves for two trainers and two servers, and one that joins.

The explorer below stands for sockets and processes. It visits every state that can be reached, and asks of each that
nothing was counted twice, and of each in which nothing can happen any more that every call is finished everywhere.
"""

import pickle
from collections import Counter, defaultdict
from collections.abc import Iterator
from operator import eq
from typing import Any

import pytest

from distca.runtime.pool.protocol import Coordinator, HomeCalls, Member, Message, Outgoing, RoleInputs, View, deal

HOMES = (0, 1)
ROLES = 2
END = {"kind": "end"}  # of a connection


class World:
    """Two homes, their servers, and the connections between all of them; each has its messages in order."""

    def __init__(
        self, calls: int, at_once: int, crashes: int, suspicions: int, joins: bool = False, leaves: int = 0
    ) -> None:
        self.num_calls, self.at_once, self.crashes, self.suspicions = calls, at_once, crashes, suspicions
        self.leaves = leaves
        self.released: dict[int, set[int]] = {}                  # server that leaves -> homes that let it go
        self.coordinator = Coordinator([HOMES], ROLES)
        for rank in (2, 3):
            self.coordinator.ready(Member(rank, 0, "host", rank))
        self.views: list[View] = [self.coordinator.view] * 2
        self.homes = [HomeCalls(rank, HOMES, self.coordinator.view.owners[0]) for rank in HOMES]
        self.begun: list[list[Any]] = [[], []]
        self.runners = {rank: RoleInputs() for rank in range(5 if joins else 4)}
        self.wires: dict[tuple[int, int], list[tuple[Message, Any]]] = defaultdict(list)
        self.linked = [{one for one in self.runners if one >= 2} for _ in HOMES]
        if joins:
            self.wires[4, 0].append(({"kind": "ready"}, None))

    def moves(self) -> Iterator[tuple[Any, ...]]:
        """What must happen at some time, in any order."""
        yield from (("deliver", *pair) for pair, wire in sorted(self.wires.items()) if wire)
        for home in HOMES:
            waiting = sum(bool(call.missing) for call in self.begun[home])
            if len(self.begun[home]) < self.num_calls and waiting < self.at_once:
                yield "begin", home

    def mishaps(self) -> Iterator[tuple[Any, ...]]:
        """What may happen."""
        servers = [rank for rank in self.runners if rank >= 2]
        if self.crashes:
            yield from (("crash", rank, lost) for rank in servers for lost in ((), (0,), (1,), (0, 1)))
        if self.leaves:
            yield from (("leave", rank) for rank in servers if rank not in self.released)
        if self.suspicions:
            yield from (("suspect", home, owner) for home in HOMES for owner in sorted({
                call.owner[role] for call in self.begun[home] for role in call.missing} - set(HOMES)))

    def do(self, what: str, *args: Any) -> None:
        getattr(self, what)(*args)

    def begin(self, home: int) -> None:
        number = len(self.begun[home])
        call, out = self.homes[home].begin(number, {}, {role: (number, role, home) for role in range(ROLES)},
                                           range(ROLES))
        self.begun[home].append(call)
        self.post(home, out)

    def crash(self, rank: int, lost: tuple[int, ...]) -> None:
        """A server dies; what it has sent may still arrive, or not at the homes in `lost`."""
        self.crashes -= 1
        self.ended(rank, lost)

    def leave(self, rank: int) -> None:
        """A server says that it goes; it runs what it gets until every home has let it go."""
        self.leaves -= 1
        self.released[rank] = set()
        self.post(rank, [(0, {"kind": "leave"}, None)])

    def ended(self, rank: int, lost: tuple[int, ...] = ()) -> None:
        del self.runners[rank]
        self.released.pop(rank, None)
        for home in HOMES:
            if home in lost:
                self.wires[rank, home].clear()
            self.wires[home, rank].clear()
            self.wires[rank, home].append((END, None))

    def suspect(self, home: int, rank: int) -> None:
        self.suspicions -= 1
        self.post(home, [(0, {"kind": "lost", "rank": rank}, None)])

    def deliver(self, source: int, target: int) -> None:
        message, content = self.wires[source, target].pop(0)
        if target not in HOMES:
            if message["kind"] == "end":
                self.ended(target)                               # it is out, and ends all its connections
            elif message["kind"] == "released":
                self.released[target].add(source)
                if len(self.released[target]) == len(HOMES):
                    self.ended(target)
            elif target in self.runners:
                self.run(target, source, message, content)
            return
        self.handle(target, source, message, content)

    def run(self, rank: int, source: int, message: Message, content: Any) -> None:
        """Take inputs; with those of both homes run the role and send the results to both."""
        key = message["call"], message["role"]
        self.runners[rank].add(*key, source, content, message["oldest"])
        found = self.runners[rank].complete(*key, HOMES)
        if found is not None:
            assert found == [(*key, home) for home in HOMES], "a role runs on its own inputs"
            self.post(rank, [(home, {"kind": "result", "call": key[0], "role": key[1]}, key) for home in HOMES])

    def handle(self, home: int, source: int, message: Message, content: Any) -> None:
        kind, calls = message["kind"], self.homes[home]
        if kind == "inputs":
            self.run(home, source, message, content)
        elif kind == "result":
            before = calls.calls.get(message["call"])
            counted = 0 if before is None else len(before.results)
            self.post(home, calls.result(message["call"], message["role"], content))
            assert before is None or len(before.results) - counted in (0, 1)
        elif kind == "done":
            calls.done_by(source, message["call"])
        elif kind == "view":
            self.follow(home, message["view"], message["reason"])
        elif kind == "end":
            self.linked[home].discard(source)
            if self.views[home].member(source) is not None:
                self.post(home, [(0, {"kind": "lost", "rank": source}, None)])
        elif kind == "lost":
            self.announce(self.coordinator.lost(message["rank"]), kind)
        elif kind == "leave":
            self.announce(self.coordinator.lost(source), kind)
        elif kind == "ready":
            self.announce(self.coordinator.ready(Member(source, 0, "host", source)), kind)

    def announce(self, view: View | None, reason: str) -> None:
        if view is not None:
            self.post(0, [(1, {"kind": "view", "view": view, "reason": reason}, None)])
            self.follow(0, view, reason)

    def follow(self, home: int, view: View, reason: str) -> None:
        gone = [one.rank for one in self.views[home].members if view.member(one.rank) is None]
        self.views[home] = view
        for rank in gone:
            if reason == "leave":
                self.post(home, [(rank, {"kind": "released"}, None)])
                continue
            self.linked[home].discard(rank)
            self.wires[rank, home].clear()                       # the home breaks the connection and reads no more
            if rank in self.runners:
                self.wires[home, rank] = [(END, None)]
        self.post(home, self.homes[home].follow(view.owners[0]))
        for member in view.members:
            if member.rank not in self.linked[home]:
                self.post(home, [(0, {"kind": "lost", "rank": member.rank}, None)])

    def post(self, sender: int, out: Outgoing) -> None:
        for target, message, content in out:
            if target == sender:
                self.handle(target, sender, message, content)
            else:
                home, other = min(sender, target), max(sender, target)
                if other in HOMES or (other in self.linked[home] and (other == sender or other in self.runners)):
                    self.wires[sender, target].append((message, content))

    def check_finished(self) -> None:
        for home in HOMES:
            assert len(self.begun[home]) == self.num_calls
            for number, call in enumerate(self.begun[home]):
                assert not call.missing and call.results == {role: (number, role) for role in range(ROLES)}
            assert not self.homes[home].calls and not self.homes[home].done, "nothing is kept for longer"
        assert self.views[0] == self.views[1] == self.coordinator.view, "they agree on who takes part"
        assert {one.rank for one in self.views[0].members} == {rank for rank in self.runners if rank >= 2}

    def key(self) -> int:
        """The same number for the same state, however it came about."""
        homes = [(sorted((number, sorted(call.owner.items()), sorted(call.results)) for number, call in
                         home.calls.items()), sorted((number, sorted(done)) for number, done in home.done.items()))
                 for home in self.homes]
        runners = [(rank, sorted((key, sorted(found)) for key, found in one.waiting.items()))
                   for rank, one in sorted(self.runners.items())]
        wires = [(pair, [sorted((name, str(value)) for name, value in message.items()) for message, _ in wire])
                 for pair, wire in sorted(self.wires.items()) if wire]
        begun = [[sorted(call.missing) for call in calls] for calls in self.begun]
        return hash(repr((homes, runners, wires, begun, self.views, self.coordinator.view, self.linked, self.crashes,
                          self.suspicions, self.leaves, sorted(self.released.items()))))


def explore(world: World) -> tuple[int, int]:
    """Visit every state; return how many there are, and in how many everything had ended."""
    first = pickle.dumps(world)
    seen, stack, ends = {world.key()}, [first], 0
    while stack:
        state = stack.pop()
        world = pickle.loads(state)
        moves = list(world.moves())
        if not moves:
            ends += 1
            world.check_finished()
        for move in (*moves, *world.mishaps()):
            after = pickle.loads(state)
            after.do(*move)
            reached = after.key()
            if reached not in seen:
                seen.add(reached)
                stack.append(pickle.dumps(after))
    return len(seen), ends


# (calls, of these begun at once by a home, servers that crash, wrong suspicions, one more joins, servers that leave)
SMALL = [(1, 1, 2, 0, False, 0), (1, 1, 0, 0, False, 1)]
LARGE = [(2, 1, 1, 0, False, 0), (1, 1, 1, 1, False, 0), (1, 1, 0, 1, True, 0), (1, 1, 1, 0, True, 0),
         (2, 2, 1, 0, False, 0), (1, 1, 2, 1, False, 0), (3, 1, 1, 0, False, 0), (2, 1, 2, 0, False, 0),
         (1, 1, 1, 0, False, 1), (1, 1, 0, 1, False, 1), (2, 1, 0, 0, False, 1), (1, 1, 0, 0, True, 1)]


@pytest.mark.parametrize("case", [*SMALL, *(pytest.param(one, marks=pytest.mark.slow) for one in LARGE)], ids=str)
def test_every_order_ends_with_every_result_once(case: tuple[int, int, int, int, bool, int]) -> None:
    states, ends = explore(World(*case))
    print(f"{case}: {states} states, {ends} ends")
    assert states > 1000 and ends > 1


class OnlyMissing(HomeCalls):
    """Sends again only what it misses itself: the other home may miss what this one has."""

    def follow(self, owners: Any, why: str = "", since: float = 0.0) -> Outgoing:
        return [(rank, about, content) for rank, about, content in super().follow(owners, why, since)
                if about["role"] in self.calls[about["call"]].missing]


class Forgetful(HomeCalls):
    """Keeps inputs only until it has its own results."""

    def result(self, number: int, role: int, content: Any) -> Outgoing:
        out = super().result(number, role, content)
        if out:
            for other in self.others:
                self.done_by(other, number)
        return out


@pytest.mark.parametrize("wrong", [OnlyMissing, Forgetful])
def test_the_exploration_finds_what_is_wrong(wrong: type[HomeCalls]) -> None:
    world = World(1, 1, 1, 0)
    world.homes = [wrong(rank, HOMES, world.coordinator.view.owners[0]) for rank in HOMES]
    with pytest.raises((AssertionError, KeyError)):
        explore(world)


def members(*speeds: float) -> list[Member]:
    return [Member(10 + at, 0, "host", at, speed) for at, speed in enumerate(speeds)]


@pytest.mark.parametrize(("before", "speeds", "after"), [
    ([-1] * 4, [0, 0], [10, 10, 11, 11]),
    ([10, 11, 10, 11], [0], [10, 10, 10, 10]),
    ([10, 10, 10, 10], [0, 0], [10, 10, 11, 11]),                # two move, the others stay
    ([10, 10, 11, 11], [1, 1, 0], [10, 10, 11, 12]),             # new: half as fast, and one at least
    ([10] * 6, [2, 2, 0], [10, 10, 10, 11, 11, 12]),             # 3/2 and 2/2 of their time, 1/1 of its
    ([10, 11], [8, 1], [10, 10]),                                # both on the fast one take 2/8, one on the other 1/1
    ([10, 11, 12], [], [0, 1, 0]),
])
def test_roles_are_dealt_by_speed_with_few_moves(before: list[int], speeds: list[float], after: list[int]) -> None:
    owners = deal(before, members(*speeds), HOMES)
    assert Counter(owners) == Counter(after)
    assert sum(map(eq, before, owners)) == (Counter(before) & Counter(after)).total()  # all that can stay do


def test_servers_get_ranks_once_and_the_emptiest_pool() -> None:
    coordinator = Coordinator([[0, 2], [1, 3]], 2)
    first, second = coordinator.admit("a", 1, 5), coordinator.admit("b", 2, 4)
    assert (first.rank, first.pool, second.rank) == (5, 0, 4)
    coordinator.ready(first)
    third = coordinator.admit("c", 3, 5)                         # 5 has been given
    assert (third.rank, third.pool) == (6, 1)
    assert coordinator.view.owners == ((5, 5), (1, 3))
    assert coordinator.lost(6) is None and coordinator.lost(5) is not None
    assert coordinator.view.owners == ((0, 2), (1, 3)) and coordinator.view.epoch == 2
