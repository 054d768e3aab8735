"""Write the tables of docs/ that are made from something: rooms, settings of `distca train`, versions that were tested.

    python docs/make_tables.py            # after a room or a setting changed, or after benchmarks/versions.py
    python docs/make_tables.py --files    # print every module with its first line instead
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Callable
from pathlib import Path

from distca.train.settings import known_settings
from distca.train.settings.declare import toml_value

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "distca"


def rooms() -> str:
    """The modules at the top of the package and its folders, each with the first line of its docstring."""
    modules = [path for path in sorted(PACKAGE.glob("*.py")) if path.stem not in ("__init__", "__main__")]
    folders = sorted(path.parent for path in PACKAGE.rglob("__init__.py") if path.parent != PACKAGE)
    entries = [f"| `{path.relative_to(PACKAGE).as_posix()}{'/' * path.is_dir()}` | {first_line(path)} |"
               for path in (*modules, *folders)]
    return "\n".join(["| room | what it is for |", "|---|---|", *entries]) + "\n"


def settings() -> str:
    entries = [f"| `{known.name}` | `{toml_value(known.default)}` | {known.meaning} |"
               for known in known_settings().values()]
    return "\n".join(["| setting | default | meaning |", "|---|---|---|", *entries]) + "\n"


def versions() -> str:
    """The environments that benchmarks/versions.py ran, and how the tests ended in each."""
    kept = json.loads((ROOT / "benchmarks/results/versions.json").read_text(encoding="utf-8"))["environments"]
    names = list(dict.fromkeys(name for one in kept for name in one["tests"]))
    heads = ["Python" if package == "python" else package for package in kept[0]["versions"]]
    rows = [[*(version or "–" for version in one["versions"].values()),
             *(_ended(one["tests"].get(name)) for name in names)] for one in kept]
    return "".join(f"| {' | '.join(row)} |\n" for row in ([*heads, *names], ["---"] * (len(heads) + len(names)), *rows))


def _ended(counts: dict[str, int] | None) -> str:
    if counts is None:
        return "not run"
    return f"{counts['passed']:,} passed" + (f", **{counts['failed']} failed**" if counts["failed"] else "") + (
        f", {counts['skipped']} skipped" if counts["skipped"] else "")


TABLES: dict[str, tuple[str, Callable[[], str]]] = {  # mark in the page -> page, table
    "rooms": ("docs/design/architecture.md", rooms),
    "settings": ("docs/reference/settings.md", settings),
    "versions": ("docs/guide/versions.md", versions),
}


def first_line(path: Path) -> str:
    """Return the first paragraph of a module's or a package's docstring."""
    source = path / "__init__.py" if path.is_dir() else path
    text = ast.get_docstring(ast.parse(source.read_text(encoding="utf-8"))) or ""
    return text.split("\n\n")[0].replace("\n", " ").replace("|", "\\|")


def page(mark: str) -> str:
    """Return a page as it is, with its table as it should be."""
    name, table = TABLES[mark]
    before, begin, rest = (ROOT / name).read_text(encoding="utf-8").partition(f"<!-- {mark} -->\n")
    return f"{before}{begin}{table()}<!-- /{mark} -->{rest.partition(f'<!-- /{mark} -->')[2]}"


if __name__ == "__main__":
    if "--files" in sys.argv[1:]:
        for module in sorted(PACKAGE.rglob("*.py")):
            print(f"{module.relative_to(ROOT).as_posix():44}{first_line(module)}")
    else:
        for mark, (name, _) in TABLES.items():
            (ROOT / name).write_text(page(mark), encoding="utf-8")
