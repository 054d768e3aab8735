"""Write the table of rooms in docs/design/architecture.md from the packages' own first lines.

    python docs/make_tree.py            # after a room was added, moved or renamed
    python docs/make_tree.py --files    # print every module with its first line instead
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "distca"
PAGE = ROOT / "docs" / "design" / "architecture.md"
BEGIN, END = "<!-- rooms -->\n", "<!-- /rooms -->"


def rooms() -> list[Path]:
    """The folders of the package, and the files at its top that users do not import through `distca` itself."""
    folders = sorted(path.parent for path in PACKAGE.rglob("__init__.py") if path.parent != PACKAGE)
    return [path for path in sorted(PACKAGE.glob("*.py")) if path.stem not in ("__init__", "__main__")] + folders


def table() -> str:
    rows = [f"| `{path.relative_to(PACKAGE).as_posix()}{'/' * path.is_dir()}` | {first_line(path)} |"
            for path in rooms()]
    return "\n".join(["| room | what it is for |", "|---|---|", *rows]) + "\n"


def first_line(path: Path) -> str:
    """The first paragraph of a module's or a package's docstring."""
    source = path / "__init__.py" if path.is_dir() else path
    text = ast.get_docstring(ast.parse(source.read_text(encoding="utf-8"))) or ""
    return text.split("\n\n")[0].replace("\n", " ").replace("|", "\\|")


def page() -> str:
    """The page as it is, with the table as it should be."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    return f"{before}{BEGIN}{table()}{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    if "--files" in sys.argv[1:]:
        for module in sorted(PACKAGE.rglob("*.py")):
            print(f"{module.relative_to(ROOT).as_posix():44}{first_line(module)}")
    else:
        PAGE.write_text(page(), encoding="utf-8")
