"""Latency tables that come with the package, so that a plan in seconds needs no GPU of one's own.

`tables/h200.json` is `h200`. Tables of the same GPU and kernel for other heads are in the folder `tables/h200`.
"""

from fractions import Fraction
from importlib.resources import as_file, files
from pathlib import Path

from distca.cost.latency_table import LatencyTable
from distca.spec import unknown_name

_TABLES = files("distca.cost") / "tables"


def shipped_names() -> list[str]:
    """The names of the tables in this package."""
    if not _TABLES.is_dir():
        return []
    return sorted(entry.name.removesuffix(".json") for entry in _TABLES.iterdir() if entry.name.endswith(".json"))


def find_table(name: str) -> LatencyTable:
    """A file where there is one, else a table that comes with the package."""
    if not Path(name).exists() and name in shipped_names():
        return shipped_table(name)
    return LatencyTable.load(name)


def shipped_table(name: str) -> LatencyTable:
    """The measured table of this name, such as `h200`."""
    if name not in shipped_names():
        raise unknown_name("latency table", name, shipped_names())
    with as_file(_TABLES / f"{name}.json") as path:
        return LatencyTable.load(path)


def other_heads(name: str) -> list[LatencyTable]:
    """Tables that were measured like the one of this name, with other heads."""
    folder = _TABLES / name
    if name not in shipped_names() or not folder.is_dir():       # the name may be a file's
        return []
    with as_file(folder) as path:
        return [LatencyTable.load(file) for file in sorted(path.glob("*.json"))]


def nearest_heads(table: LatencyTable, heads: int, kv_heads: int, head_dim: int) -> LatencyTable:
    """Of a shipped table and its like the one of this head dim that is nearest in heads; any other table itself."""
    name = table.metadata.get("shipped")
    if not isinstance(name, str) or _is_of(table, heads, kv_heads, head_dim):
        return table
    fitting = [one for one in (table, *other_heads(name)) if one.metadata.get("head_dim") == head_dim]
    return min(fitting, key=lambda one: _distance(one, heads, kv_heads), default=table)


def _is_of(table: LatencyTable, heads: int, kv_heads: int, head_dim: int) -> bool:
    about = table.metadata
    return (about.get("num_heads"), about.get("num_kv_heads"), about.get("head_dim")) == (heads, kv_heads, head_dim)


def _distance(table: LatencyTable, heads: int, kv_heads: int) -> Fraction:
    """The factor between the KV heads, which make the items of a work list, times that of query heads per KV head."""
    about = table.metadata
    q, kv = about["num_heads"], about["num_kv_heads"]
    assert isinstance(q, int) and isinstance(kv, int)
    factors = Fraction(kv, kv_heads), Fraction(q * kv_heads, kv * heads)
    return max(factors[0], 1 / factors[0]) * max(factors[1], 1 / factors[1])
