"""Exchanges at two levels: what crosses nodes goes over all ranks' group, what stays inside over the node's own.

A transport only moves bytes, so it is the tables that know what several ranks of a node need alike; they ask this one
which ranks share a node, and route tokens over a gateway (`dispatch/hops.py`). Asked for a plain exchange, it is the
transport between all ranks.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from distca.runtime.transport.c10d import C10dTransport
from distca.runtime.transport.interface import Handle, Transport
from distca.runtime.transport.relay import Relay
from distca.validation import UserError


@dataclass(frozen=True, slots=True)
class Way:
    """The transports of what goes to servers, or of what comes back, and what starts second hops on them."""

    outer: Transport
    inner: Transport
    relay: Relay


class HierarchicalTransport:
    """One rank's end of a group in nodes: `outer` between all ranks, `inner` between those of this rank's node.

    `back` are the same for what comes back to homes, if those are groups of their own: second hops may then be started
    by threads, each the only one to start anything on its group.
    """

    def __init__(
        self, outer: Transport, inner: Transport, node: Sequence[object],
        back: tuple[Transport, Transport] | None = None,
    ) -> None:
        self.outer, self.inner = outer, inner
        self.going = Way(outer, inner, Relay(threaded=back is not None))
        self.coming = Way(*(back or (outer, inner)), Relay(threaded=back is not None))
        numbers = {one: number for number, one in enumerate(dict.fromkeys(node))}
        self.node = np.array([numbers[one] for one in node], dtype=np.int64)  # [ranks] numbered as they come
        here = int((self.node == self.node[outer.rank]).sum()) if len(self.node) == outer.size else 0
        if here != inner.size:
            raise UserError(f"node is {list(node)} for {outer.size} ranks, of which {inner.size} share the node of "
                            f"rank {outer.rank}; give the node of every rank")

    @property
    def rank(self) -> int:
        return self.outer.rank

    @property
    def size(self) -> int:
        return self.outer.size

    def exchange(self, send: torch.Tensor, send_splits: list[int], recv_splits: list[int]) -> Handle:
        return self.outer.exchange(send, send_splits, recv_splits)

    def gather(self, value: int, device: torch.device) -> list[int]:
        return self.outer.gather(value, device)

    def tell(self, message: bytes, rank: int) -> None:
        self.outer.tell(message, rank)

    def hear(self) -> bytes:
        return self.outer.hear()


def hosts_of(transport: C10dTransport) -> list[str]:
    """The host of every rank; every rank of the group asks at once.

    They are told over the store that the ranks met at, not over the group, whose tensors may need a GPU that nobody has
    chosen yet. Two ranks have no levels, whatever their hosts, and are not asked.
    """
    if transport.size <= 2:
        return [""] * transport.size
    store = _get_default_store()
    try:
        store.set(f"distca/host/{dist.get_rank()}", platform.node())
        return [store.get(f"distca/host/{rank}").decode() for rank in dist.get_process_group_ranks(transport.group)]
    except RuntimeError as error:
        raise transport.lost(error) from error


def has_levels(node: Sequence[object]) -> bool:
    """Whether ranks are on several nodes, and some of them share one."""
    return 1 < len(set(node)) < len(node)


def group_of_node(transport: C10dTransport, node: Sequence[object]) -> dist.ProcessGroup:
    """A group of the ranks that share this rank's node; every rank of the transport's group asks for it at once."""
    return _group_of(transport, [rank for rank, other in enumerate(node) if other == node[transport.rank]])


def groups_back(transport: C10dTransport, node: Sequence[object]) -> tuple[C10dTransport, C10dTransport] | None:
    """Groups of their own for what comes back; none with NCCL, which needs no threads. Every rank asks at once."""
    if "nccl" in dist.get_backend_config(transport.group):
        return None
    return C10dTransport(_group_of(transport, list(range(transport.size)))), C10dTransport(
        group_of_node(transport, node))


def _group_of(transport: C10dTransport, members: list[int]) -> dist.ProcessGroup:
    everyone = dist.get_process_group_ranks(transport.group)
    group = transport.group
    assert group is not None
    device = torch.device("cuda" if "cuda:nccl" in dist.get_backend_config(group) else "cpu")
    return dist.new_group([everyone[member] for member in members], backend=dist.get_backend_config(group),
                          timeout=group._get_backend(device).options._timeout, use_local_synchronization=True)
