"""Latency tables that come with the package, so that a plan in seconds needs no GPU of one's own."""

from importlib.resources import as_file, files
from pathlib import Path

from distca.cost.latency_table import LatencyTable
from distca.spec import unknown_name


def shipped_names() -> list[str]:
    """The names of the tables in this package."""
    folder = files("distca.cost") / "tables"
    if not folder.is_dir():
        return []
    return sorted(entry.name.removesuffix(".json") for entry in folder.iterdir() if entry.name.endswith(".json"))


def find_table(name: str) -> LatencyTable:
    """A file where there is one, else a table that comes with the package."""
    if not Path(name).exists() and name in shipped_names():
        return shipped_table(name)
    return LatencyTable.load(name)


def shipped_table(name: str) -> LatencyTable:
    """The measured table of this name, such as `h200`."""
    if name not in shipped_names():
        raise unknown_name("latency table", name, shipped_names())
    with as_file(files("distca.cost") / "tables" / f"{name}.json") as path:
        return LatencyTable.load(path)
