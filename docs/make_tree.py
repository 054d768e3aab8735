"""Write the tree in docs/architecture.md from the first line of every module, so that it is the tree there is.

    python docs/make_tree.py            # after a module was added, moved or renamed
    python docs/make_tree.py --check    # says whether the page is up to date
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- tree -->\n", "<!-- /tree -->"


def tree(package: Path = ROOT / "distca") -> str:
    """Every module with the first line of what it says about itself, package by package."""
    loose = [path for path in sorted(package.glob("*.py")) if path.stem not in ("__init__", "__main__")]
    rows = [f"| | `{path.name}` | {first_line(path)} |" for path in loose]
    for folder in sorted(path.parent for path in package.rglob("__init__.py") if path.parent != package):
        name = folder.relative_to(package).as_posix()
        rows.append(f"| **{name}/** | | {first_line(folder / '__init__.py')} |")
        rows += [f"| | `{path.name}` | {first_line(path)} |" for path in sorted(folder.glob("*.py"))
                 if path.stem != "__init__"]
    return "\n".join(["| | module | |", "|---|---|---|", *rows]) + "\n"


def first_line(path: Path) -> str:
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return text.split("\n\n")[0].replace("\n", " ").replace("|", "\\|")


def page() -> str:
    """The page as it is, with the tree as it should be."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    return f"{before}{BEGIN}{tree()}{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(page(), encoding="utf-8")
    elif PAGE.read_text(encoding="utf-8") != page():
        sys.exit(f"{PAGE} is not the tree there is; run: python docs/make_tree.py")
