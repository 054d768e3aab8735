"""A cluster of one's own, from a TOML file: rates, memory and links of its GPUs.

A file names what differs from a cluster that is known already, or everything:

    base = "dgx-h200"              # take the rest from here
    gpus_per_node = 4
    inter_node_bandwidth = 25e9    # bytes per second, one way, of a GPU's own NIC
"""

from __future__ import annotations

from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import Any

from distca.spec import CLUSTERS, ClusterShape, cluster_named, unknown_name
from distca.validation import UserError, check_name, check_number, read_toml

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
