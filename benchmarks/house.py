"""How large the package is, room by room, so that growth is seen: `python benchmarks/house.py`.

A room is a folder of `distca/`; its subfolders are rooms of their own. The report counts files and lines of Python and
CUDA, names the longest functions and the widest signatures, and shows which rooms import which.
"""

from __future__ import annotations

import argparse
import ast
import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "distca"
CUDA = (".cu", ".cuh")
MAX_FILES, MAX_LINES, MAX_PARAMETERS = 14, 60, 8  # of a room, of a function, of a signature
SHOWN = 10


@dataclass(frozen=True, slots=True)
class Room:
    """One folder of the package."""

    name: str
    num_files: int           # of Python
    num_lines: int
    num_cuda_lines: int
    imports: dict[str, int]  # room of the package -> import statements


@dataclass(frozen=True, slots=True)
class Function:
    """A function or method, and where it is."""

    where: str
    num_lines: int
    num_parameters: int


def room_of(path: Path) -> str:
    """The folder of a file, relative to the package; `distca` for the files at its top."""
    folder = path.parent.relative_to(PACKAGE).as_posix()
    return "distca" if folder == "." else folder


def room_of_module(name: str) -> str | None:
    """The room of an imported module; None outside the package."""
    head, *parts = name.split(".")
    if head != "distca":
        return None
    path = PACKAGE.joinpath(*parts)
    return room_of(path / "__init__.py") if path.is_dir() else room_of(path)


def imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def functions(path: Path, tree: ast.Module) -> Iterator[Function]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            given = node.args
            names = [one.arg for one in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
            yield Function(f"{path.relative_to(ROOT).as_posix()}:{node.lineno} {node.name}",
                           (node.end_lineno or node.lineno) - node.lineno + 1,
                           len([name for name in names if name not in ("self", "cls")]))


def measure() -> tuple[list[Room], list[Function]]:
    files: dict[str, list[Path]] = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*")):
        if path.suffix in (".py", *CUDA):
            files[room_of(path)].append(path)
    rooms, found = [], []
    for name, paths in files.items():
        python = [path for path in paths if path.suffix == ".py"]
        trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in python}
        others = Counter(room for tree in trees.values() for module in imported(tree)
                         if (room := room_of_module(module)) is not None and room != name)
        lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in paths}
        rooms.append(Room(name, len(python), sum(lines[path] for path in python),
                          sum(lines[path] for path in paths if path not in trees), dict(others)))
        found += [one for path, tree in trees.items() for one in functions(path, tree)]
    return rooms, found


def show(rooms: list[Room], found: list[Function], console: Console) -> None:
    table = Table("room", "files", "lines", "CUDA", "imports", box=SIMPLE_HEAD)
    for room in rooms:
        names = ", ".join(f"{name} {count}" for name, count in sorted(room.imports.items(), key=lambda one: -one[1]))
        table.add_row(room.name, f"{room.num_files}{' (!)' if room.num_files > MAX_FILES else ''}",
                      f"{room.num_lines:,}", f"{room.num_cuda_lines:,}" if room.num_cuda_lines else "", names)
    table.add_row("all", str(sum(room.num_files for room in rooms)), f"{sum(room.num_lines for room in rooms):,}",
                  f"{sum(room.num_cuda_lines for room in rooms):,}", "")
    console.print(table)
    long = [one for one in found if one.num_lines > MAX_LINES]
    wide = [one for one in found if one.num_parameters > MAX_PARAMETERS]
    console.print(f"{len(long)} functions of more than {MAX_LINES} lines, {len(wide)} with more than {MAX_PARAMETERS} "
                  f"parameters; (!) marks a room of more than {MAX_FILES} files.")
    for one in sorted(found, key=lambda one: -one.num_lines)[:SHOWN]:
        console.print(f"  {one.num_lines:4} lines       {one.where}", highlight=False)
    for one in sorted(found, key=lambda one: -one.num_parameters)[:SHOWN]:
        console.print(f"  {one.num_parameters:4} parameters  {one.where}", highlight=False)


def main() -> None:
    parser = argparse.ArgumentParser(description="How large the package is, room by room.")
    parser.add_argument("--json", action="store_true", help="print rooms and functions as JSON")
    options = parser.parse_args()
    rooms, found = measure()
    if options.json:
        print(json.dumps({"rooms": [asdict(room) for room in rooms], "functions": [asdict(one) for one in found]}))
    else:
        show(rooms, found, Console())


if __name__ == "__main__":
    main()
