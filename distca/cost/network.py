"""Links between GPUs by the alpha-beta model, a start-up latency and then bandwidth; and clusters from TOML files.

Two kinds of link are enough to compare plans: NVLink inside a node and the GPU's own NIC between nodes. A NIC sends to
another pod at the GPU's share of the links between pods.

A cluster file gives the fields that differ from a known cluster, or all fields:

    base = "dgx-h200"              # take the rest from here
    gpus_per_node = 4
    inter_node_bandwidth = 25e9    # bytes per second, one way, of a GPU's own NIC
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from distca.cost.latency_table import LatencyTable
from distca.spec import CLUSTERS, MAX_RATE, ClusterShape, cluster_named, unknown_name
from distca.validation import UserError, check_name, check_number, check_whole, errors_in, read_toml, short


@dataclass(frozen=True, slots=True)
class MeasuredNetwork:
    """Measured exchange between the ranks of `distca profile`, all of which sent at once."""

    num_ranks: int
    latency_seconds: float
    bandwidth: float  # bytes per second that one rank sends

    @classmethod
    def of(cls, table: LatencyTable) -> MeasuredNetwork | None:
        """Return the network that the table's profile measured, None if it measured none."""
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
        """Return the seconds of an exchange in which a rank sends `num_bytes`."""
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

    @classmethod
    def of(cls, cluster: ClusterShape) -> Network:
        return cls(**{field.name: getattr(cluster, field.name) for field in fields(cls)})

    @property
    def nic_bandwidths(self) -> tuple[float, float]:
        """Bandwidths of a NIC to nodes of the same pod and of another pod."""
        return self.inter_node_bandwidth, self.inter_pod_bandwidth or self.inter_node_bandwidth

    @classmethod
    def measured(cls, table: LatencyTable, cluster: ClusterShape) -> Network:
        """Return the cluster's links, with measured values for the link that the table's profile used.

        A profile of more ranks than a node has GPUs measured the link between nodes. Fewer ranks are assumed to be in
        one node, where `distca profile --ranks` starts them.
        """
        network, found = cls.of(cluster), MeasuredNetwork.of(table)
        if found is None:
            return network
        if found.num_ranks <= cluster.gpus_per_node:
            return replace(network, intra_node_bandwidth=found.bandwidth,
                           intra_node_latency_seconds=found.latency_seconds)
        return replace(network, inter_node_bandwidth=found.bandwidth, inter_node_latency_seconds=found.latency_seconds)

    def all_gather_seconds(self, num_bytes: float, num_ranks: int, gpus_per_node: int | None = None) -> float:
        """Return the seconds of a ring all-gather of `num_bytes`: num_ranks - 1 sends of one share each.

        Over several nodes there is one ring per participating GPU of a node, each of which uses its own NIC. A ring
        crosses nodes once per node, and all other sends have the latency inside a node, as in NCCL's own model.
        """
        if num_bytes == 0 or num_ranks == 1:
            return 0.0
        per_node = gpus_per_node or self.gpus_per_node
        crossings, bandwidth = -(-num_ranks // per_node) - 1, self.intra_node_bandwidth
        if crossings:
            is_in_pod = not self.nodes_per_pod or num_ranks <= per_node * self.nodes_per_pod
            of_nics = per_node * self.nic_bandwidths[not is_in_pod]
            bandwidth = min(of_nics, bandwidth) if per_node > 1 else of_nics
        latency = (num_ranks - 1 - crossings) * self.intra_node_latency_seconds + (
            crossings * self.inter_node_latency_seconds)
        return latency + (num_ranks - 1) * (num_bytes / num_ranks / bandwidth)


_NAMES = tuple(field.name for field in fields(ClusterShape))
_NEEDED = tuple(field.name for field in fields(ClusterShape) if field.default is MISSING)
_TEXT = ("name", "gpu")


def find_cluster(name: str) -> ClusterShape:
    """Return a known cluster by its name, or the one that a TOML file describes."""
    if name in CLUSTERS:
        return CLUSTERS[name]
    if not Path(name).suffix and not Path(name).exists():
        raise UserError(f"{unknown_name('cluster', name, CLUSTERS)}, or give the path of a TOML file")
    return read_cluster(name)


def read_cluster(path: str | Path) -> ClusterShape:
    """Return the cluster in a TOML file."""
    content = read_toml(path)
    with errors_in(path):
        return _cluster(content, Path(path).stem)


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
