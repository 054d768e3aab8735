"""A pool of homes and roles as attention's transport: homes exchange as without servers, roles by links."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

import torch

from distca.kernels.interface import Scores
from distca.planning.plan import Plan
from distca.runtime.pool.home import ServerPool
from distca.runtime.pool.protocol import CallInFlight, Message, Peer, PoolShape
from distca.runtime.pool.runner import describe, joined, settle
from distca.runtime.prepared import Shapes
from distca.runtime.transport import Handle, Transport, TransportError
from distca.runtime.transport.links import Address
from distca.validation import UserError

MEET_SECONDS = 60.0


class PoolTransport:
    """A home's end of attention's pool: homes exchange through `inner`, roles are the ranks after them."""

    def __init__(self, inner: Transport, pool: ServerPool) -> None:
        if inner.size != len(pool.homes) or pool.homes[inner.rank] != pool.rank:
            raise UserError(f"the transport is rank {inner.rank} of {inner.size} but the pool's rank {pool.rank} has "
                            f"{len(pool.homes)} homes; give the transport of these")
        self.inner, self.pool = inner, pool

    @property
    def rank(self) -> int:
        return self.inner.rank

    @property
    def size(self) -> int:
        return self.inner.size + self.pool.shape.num_roles

    def exchange(self, send: torch.Tensor, send_splits: list[int], recv_splits: list[int]) -> Handle:
        raise AssertionError("exchanges go through a call's carrier")

    @property
    def address(self) -> Address:
        """Where servers join."""
        return self.pool.peers[0].host, self.pool.peers[0].port

    def wait_for_servers(self, count: int, seconds: float) -> bool:
        """Wait until as many servers have joined; return whether they did in time."""
        return self.pool.wait_for_servers(count, seconds)

    def close(self) -> None:
        """Release the servers and end all connections; every rank calls it when it has made its last call."""
        self.pool.close()

    def gather(self, value: int, device: torch.device) -> list[int]:
        return self.inner.gather(value, device)

    def call(self, plan: Plan, number: int, backward: bool, shapes: Shapes, scores: Scores) -> HomeCarrier:
        """Return the carrier of one call."""
        return HomeCarrier(self, plan, describe(number, backward, shapes, scores))


class HomeCarrier:
    """Carries one call of a home: its inputs to homes and roles, then the results of both."""

    def __init__(self, transport: PoolTransport, plan: Plan, about: Message) -> None:
        self.transport, self.plan, self.about = transport, plan, about
        self._expected: list[int] | None = None
        self._call: CallInFlight | None = None

    def begin(self, expected: Sequence[int]) -> None:
        self._expected = list(expected)

    def exchange(self, send: torch.Tensor, send_splits: list[int], recv_splits: list[int]) -> Handle:
        homes = self.transport.inner.size
        theirs = sum(send_splits[:homes])
        if self._call is None:
            assert self._expected is not None
            to_roles = send[theirs:]
            settle(to_roles)
            offsets = [sum(send_splits[homes:at]) for at in range(homes, len(send_splits))]
            inputs = {role: to_roles[begin:begin + size] for role, (begin, size) in enumerate(
                zip(offsets, send_splits[homes:], strict=True)) if size}
            expected = [role for role, size in enumerate(self._expected[homes:]) if size]
            _, self._call = self.transport.pool.begin(self.about, self.plan, inputs, expected)
        inner = self.transport.inner.exchange(send[:theirs], send_splits[:homes], recv_splits[:homes])
        return _FromHomesAndRoles(self, inner, recv_splits[homes:]) if any(recv_splits[homes:]) else inner

    def results(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        """Wait for the results of all roles, which must have these sizes."""
        assert self._call is not None
        found = self.transport.pool.wait(self._call, self.plan)
        for role, size in enumerate(sizes):
            if size and len(found[role]) != size:
                raise TransportError(f"role {role} sent {len(found[role])} bytes where {size} are its results; run the "
                                     "same distca everywhere")
        return [found[role] for role, size in enumerate(sizes) if size]


class _FromHomesAndRoles:
    """What homes sent, followed by what roles sent."""

    def __init__(self, carrier: HomeCarrier, inner: Handle, sizes: Sequence[int]) -> None:
        self.carrier, self.inner, self.sizes = carrier, inner, sizes

    def wait(self) -> torch.Tensor:
        from_homes = self.inner.wait()
        return joined([from_homes, *self.carrier.results(self.sizes)], from_homes.device)


def connect_servers(
    transport: Transport, *, roles: int, secret: bytes, listen: Address = ("127.0.0.1", 0),
    device: torch.device | str = "cpu", kernel: str = "auto", patience_seconds: float = 10.0, links: str = "tcp",
) -> PoolTransport:
    """Let `roles` dedicated servers compute for the ranks of `transport`; a collective call.

    Every rank listens at its own `listen` address. Servers join at rank 0's, `address` of what is returned, and prove
    that they know `secret`. Until they do, the ranks compute their roles themselves. Tensors go to them by `links`,
    "tcp" or "nixl", which reads them where they are, also in the memory of GPUs.
    """
    device = torch.device(device)
    pool = ServerPool(PoolShape(transport.size, 1, roles), transport.rank, secret, listen=listen, device=device,
                      kernel=kernel, patience_seconds=patience_seconds, links=links)
    host, port = int.from_bytes(socket.inet_aton(pool.peer.host), "big"), pool.peer.port
    places = transport.gather(host << 16 | port, device)
    pool.meet([Peer(rank, socket.inet_ntoa((place >> 16).to_bytes(4, "big")), place & 0xffff, os.getpid())
               for rank, place in enumerate(places)], MEET_SECONDS)
    return PoolTransport(transport, pool)
