"""Turn bytes into seconds with the alpha-beta model: a start-up latency, then bandwidth.

Two kinds of link are enough to tell plans apart: NVLink inside a node and the GPU's own NIC between nodes. Both run
at once, and both directions of a link run at once, so a rank is as slow as its busiest direction of its busiest link.
What a NIC sends to another pod goes out at the rate that the links between pods leave each GPU.

A cluster of one's own, from a TOML file: rates, memory and links of its GPUs.

A file names what differs from a cluster that is known already, or everything:

    base = "dgx-h200"              # take the rest from here
    gpus_per_node = 4
    inter_node_bandwidth = 25e9    # bytes per second, one way, of a GPU's own NIC
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from distca.cost.latency_table import LatencyTable
from distca.spec import CLUSTERS, MAX_RATE, ClusterShape, cluster_named, unknown_name
from distca.validation import UserError, check_name, check_number, check_whole, read_toml, short

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class MeasuredNetwork:
    """Exchanges between the ranks that `distca profile` ran on, all of which sent at once."""

    num_ranks: int
    latency_seconds: float
    bandwidth: float  # bytes per second that one rank sends

    @classmethod
    def of(cls, table: LatencyTable) -> MeasuredNetwork | None:
        """What the table's profile measured; None where it measured no network."""
        about = table.metadata.get("network")
        if about is None:
            return None
        found = about if isinstance(about, Mapping) else {}
        try:
            return cls(check_whole("num_ranks", found.get("num_ranks"), least=2),
                       check_number("latency_seconds", found.get("latency_seconds"), least=0, most=MAX_RATE),
                       check_number("bandwidth", found.get("bandwidth"), above=0, most=MAX_RATE))
        except ValueError as error:
            raise UserError(f"latency table {table.name!r} has network {short(about)}: {error}; or profile again with "
                            "--ranks") from None

    def seconds(self, num_bytes: float) -> float:
        """An exchange in which a rank sends so many bytes."""
        return 0.0 if num_bytes == 0 else self.latency_seconds + num_bytes / self.bandwidth


@dataclass(frozen=True, slots=True)
class Network:
    """Links of one GPU. Ranks are numbered node by node; bandwidths are bytes per second one way."""

    gpus_per_node: int
    intra_node_bandwidth: float
    inter_node_bandwidth: float
    intra_node_latency_seconds: float
    inter_node_latency_seconds: float
    nodes_per_pod: int = 0            # 0: one pod
    inter_pod_bandwidth: float = 0.0  # 0: as between nodes

    def __post_init__(self) -> None:
        check_whole("gpus_per_node", self.gpus_per_node)
        for name in ("intra_node_bandwidth", "inter_node_bandwidth"):
            if not getattr(self, name) > 0:
                raise UserError(f"{name} is {getattr(self, name)!r}; give bytes per second above 0")
        for name in ("intra_node_latency_seconds", "inter_node_latency_seconds"):
            if not getattr(self, name) >= 0:
                raise UserError(f"{name} is {getattr(self, name)!r}; give seconds of at least 0")

    @classmethod
    def of(cls, cluster: ClusterShape) -> Network:
        return cls(
            gpus_per_node=cluster.gpus_per_node,
            intra_node_bandwidth=cluster.intra_node_bandwidth,
            inter_node_bandwidth=cluster.inter_node_bandwidth,
            intra_node_latency_seconds=cluster.intra_node_latency_seconds,
            inter_node_latency_seconds=cluster.inter_node_latency_seconds,
            nodes_per_pod=cluster.nodes_per_pod,
            inter_pod_bandwidth=cluster.inter_pod_bandwidth,
        )

    @property
    def nic_bandwidths(self) -> tuple[float, float]:
        """To nodes of the same pod, and of another."""
        return self.inter_node_bandwidth, self.inter_pod_bandwidth or self.inter_node_bandwidth

    @classmethod
    def measured(cls, table: LatencyTable, cluster: ClusterShape) -> Network:
        """The cluster's links, of which those that the table's profile exchanged over are as it found them.

        More ranks than a node has GPUs can only have exchanged between nodes, so what they reached is that link's.
        Fewer were ranks of one node, as `distca profile --ranks` starts them, and theirs is the link inside one. A run
        of few ranks on several nodes cannot be told from that: profile with more ranks than a node has.
        """
        network, found = cls.of(cluster), MeasuredNetwork.of(table)
        if found is None:
            return network
        if found.num_ranks <= cluster.gpus_per_node:
            return replace(network, intra_node_bandwidth=found.bandwidth,
                           intra_node_latency_seconds=found.latency_seconds)
        return replace(network, inter_node_bandwidth=found.bandwidth, inter_node_latency_seconds=found.latency_seconds)

    def seconds(self, num_bytes: float, same_node: bool) -> float:
        """One message from one GPU to another; nothing is sent, and nothing waited for, when it is empty."""
        if num_bytes == 0:
            return 0.0
        if same_node:
            return self.intra_node_latency_seconds + num_bytes / self.intra_node_bandwidth
        return self.inter_node_latency_seconds + num_bytes / self.inter_node_bandwidth

    def exchange_seconds(self, matrix_bytes: npt.ArrayLike, gpus_per_node: int | None = None) -> FloatArray:
        """Seconds each rank spends in an all-to-all whose [src, dst] entry is the bytes from src to dst.

        The diagonal stays on its rank and is free. `gpus_per_node` overrides the network's where the ranks of the
        matrix are only some of each node's GPUs: with TP 8 on nodes of 8, a pool has 1 rank per node.
        """
        sent = np.asarray(matrix_bytes, dtype=np.float64)  # [src, dst]
        if sent.ndim != 2 or sent.shape[0] != sent.shape[1]:
            raise UserError(f"matrix_bytes has shape {sent.shape}; give a square [src, dst] matrix")
        if not (sent >= 0).all():
            raise UserError("matrix_bytes has an entry that is negative or not a number; give bytes of at least 0")
        per_node = check_whole("gpus_per_node", self.gpus_per_node if gpus_per_node is None else gpus_per_node)
        rank = np.arange(sent.shape[0])
        same_node = rank[:, None] // per_node == rank // per_node  # [src, dst]
        between = np.where(same_node, 0.0, sent)
        within = np.where(same_node & (rank[:, None] != rank), sent, 0.0)
        intra = np.maximum(within.sum(axis=1), within.sum(axis=0))
        inter = np.maximum(between.sum(axis=1), between.sum(axis=0))
        nvlink = (intra > 0) * self.intra_node_latency_seconds + intra / self.intra_node_bandwidth
        nic = (inter > 0) * self.inter_node_latency_seconds + inter / self.inter_node_bandwidth
        return np.asarray(np.maximum(nvlink, nic), dtype=np.float64)  # [ranks]

    def all_gather_seconds(self, num_bytes: float, num_ranks: int, gpus_per_node: int | None = None) -> float:
        """Ring all-gather that leaves `num_bytes` on every rank: num_ranks - 1 steps of one share each.

        Over several nodes there are as many rings as GPUs of a node take part, each crossing by its own NIC.
        """
        if num_ranks < 1:
            raise UserError(f"num_ranks is {num_ranks!r}; give a whole number of at least 1")
        per_node = check_whole("gpus_per_node", self.gpus_per_node if gpus_per_node is None else gpus_per_node)
        if num_bytes == 0 or num_ranks == 1:
            return 0.0
        if num_ranks <= per_node:
            latency, bandwidth = self.intra_node_latency_seconds, self.intra_node_bandwidth
        else:
            is_in_pod = not self.nodes_per_pod or num_ranks <= per_node * self.nodes_per_pod
            latency, bandwidth = self.inter_node_latency_seconds, per_node * self.nic_bandwidths[not is_in_pod]
            if per_node > 1:
                bandwidth = min(bandwidth, self.intra_node_bandwidth)
        return (num_ranks - 1) * (latency + num_bytes / num_ranks / bandwidth)


_NAMES = tuple(field.name for field in fields(ClusterShape))
_NEEDED = tuple(field.name for field in fields(ClusterShape) if field.default is MISSING)
_TEXT = ("name", "gpu")


def find_cluster(name: str) -> ClusterShape:
    """A known cluster by its name, or the one that a TOML file describes."""
    if name in CLUSTERS:
        return CLUSTERS[name]
    if not Path(name).suffix and not Path(name).exists():
        raise UserError(f"{unknown_name('cluster', name, CLUSTERS)}, or give the path of a TOML file")
    return read_cluster(name)


def read_cluster(path: str | Path) -> ClusterShape:
    """The cluster in a TOML file; every refusal names the file, the field, its value and the remedy."""
    content = read_toml(path)
    try:
        return _cluster(content, Path(path).stem)
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None


def _cluster(content: dict[str, Any], stem: str) -> ClusterShape:
    base = content.pop("base", None)
    for key in content:
        if key not in _NAMES:
            raise unknown_name("field", key, ("base", *_NAMES))
    values: dict[str, Any] = {} if base is None else asdict(cluster_named(check_name("base", base)))
    values["name"] = stem
    values |= content
    missing = [name for name in _NEEDED if name not in values]
    if missing:
        raise UserError(f"{', '.join(missing)} not given; add them, or base = {next(iter(CLUSTERS))!r} to take the "
                        "rest from a known cluster")
    for name, value in values.items():
        (check_name if name in _TEXT else check_number)(name, value)
    return ClusterShape(**values)
