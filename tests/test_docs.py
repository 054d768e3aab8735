"""Pages that are made from something are what they are made from, and links inside the repository lead somewhere."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

import distca

ROOT = Path(distca.__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_measured_page_is_what_the_results_say() -> None:
    written = load(ROOT / "benchmarks/measured_page.py").page()
    assert (ROOT / "docs/measured.md").read_text(encoding="utf-8") == written, "run: python benchmarks/measured_page.py"


def test_the_readmes_figures_are_of_the_measured_page() -> None:
    measured = (ROOT / "docs/measured.md").read_text(encoding="utf-8")
    rows = [line for line in (ROOT / "README.md").read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    assert len(rows) >= 4
    for row in rows:
        assert row in measured


def test_the_tree_is_the_tree_there_is() -> None:
    made = load(ROOT / "docs/make_tree.py")
    assert made.PAGE.read_text(encoding="utf-8") == made.page(), "run: python docs/make_tree.py"
    assert all(made.first_line(path) for path in (ROOT / "distca").rglob("*.py")), "every module says why it exists"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
