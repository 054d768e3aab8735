"""Topology of a pool: which servers share a node, and which nodes a pod.

NVLink has about ten times the bandwidth of a NIC, and between pods there is less than between nodes. Placement and
balancing therefore work level by level, pods first, and bytes between nodes are counted once per node. A pool of one
node, or of nodes with one rank each, has no levels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from distca.columns import freeze
from distca.spec import ClusterShape
from distca.validation import UserError, check_whole


@dataclass(frozen=True, slots=True, eq=False)
class Topology:
    """The node and the pod of every server: first the ranks that own tokens, then dedicated servers."""

    node: np.ndarray  # [servers] numbered from 0 in the order of their first server
    pod: np.ndarray   # [servers] numbered in the same way; all 0 if there is one pod

    def __post_init__(self) -> None:
        freeze(self, ("node", "pod"))
        if self.node.ndim != 1 or len(self.node) == 0 or self.node.shape != self.pod.shape:
            raise UserError(f"node has shape {self.node.shape} and pod {self.pod.shape}; give one of each per server")
        for name in ("node", "pod"):
            if (least := int(getattr(self, name).min())) < 0:
                raise UserError(f"{name} is {least} for some server; number {name}s from 0")
        wrong = self.pod_of_node()[self.node] != self.pod
        if wrong.any():
            at = int(self.node[np.flatnonzero(wrong)[0]])
            raise UserError(f"node {at} is in several pods; put all its servers into one")

    @classmethod
    def regular(cls, num_servers: int, ranks_per_node: int, nodes_per_pod: int = 0) -> Topology:
        """Return nodes of consecutive servers and pods of consecutive nodes (0: one pod); the last may be smaller."""
        servers = np.arange(check_whole("num_servers", num_servers))
        node = servers // check_whole("ranks_per_node", ranks_per_node)
        if check_whole("nodes_per_pod", nodes_per_pod, least=0) == 0:
            return cls(node, np.zeros_like(node))
        return cls(node, node // nodes_per_pod)

    @classmethod
    def of_hosts(cls, hosts: Sequence[str], pods: Sequence[str] | None = None) -> Topology:
        """Return a topology whose nodes are the servers with the same host name; pods likewise."""
        return cls(_numbered(hosts), _numbered(pods) if pods is not None else np.zeros(len(hosts)))

    @classmethod
    def of_cluster(cls, cluster: ClusterShape, num_servers: int, tp: int = 1) -> Topology:
        """Return the topology of a pool with one rank of every tensor-parallel group; groups are inside nodes."""
        return cls.regular(num_servers, cluster.ranks_per_node(tp), cluster.nodes_per_pod)

    @property
    def num_servers(self) -> int:
        return len(self.node)

    @property
    def num_nodes(self) -> int:
        return int(self.node.max()) + 1

    @property
    def num_pods(self) -> int:
        return int(self.pod.max()) + 1

    def pod_of_node(self) -> np.ndarray:
        """Return the pod of each node, [nodes]."""
        pod = np.zeros(self.num_nodes, dtype=np.int64)
        pod[self.node] = self.pod
        return pod

    @property
    def ranks_per_node(self) -> int:
        """Ranks on the largest node."""
        return int(np.bincount(self.node).max())

    def levels(self) -> tuple[np.ndarray, ...]:
        """Return the group index per server for each non-trivial level, outermost first."""
        found: list[np.ndarray] = []
        for group in (self.pod, self.node):
            is_new = not found or len(np.unique(found[-1])) < len(np.unique(group))
            if 1 < len(np.unique(group)) < self.num_servers and is_new:
                found.append(group)
        return tuple(found)

    def first(self, num_servers: int) -> Topology:
        """Return the topology of the first `num_servers` servers."""
        return Topology(self.node[:num_servers], self.pod[:num_servers])


def check_topology(topology: Topology | None, num_servers: int) -> tuple[np.ndarray, ...]:
    """Check that a topology has `num_servers` servers and return its levels; none if the topology is None."""
    if topology is None:
        return ()
    if topology.num_servers != num_servers:
        raise UserError(f"the topology has {topology.num_servers} servers but the pool has {num_servers}; give the "
                        "node of every server, the dedicated ones last")
    return topology.levels()


def _numbered(names: Sequence[str]) -> np.ndarray:
    numbers: dict[str, int] = {}
    return np.array([numbers.setdefault(name, len(numbers)) for name in names], dtype=np.int64)
