"""Pages that are made from something are what they are made from; links lead somewhere and options exist."""

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import typer

import distca
from distca.cli import app
from distca.train.settings import known_settings
from tests.support.modules import load

ROOT = Path(distca.__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
OPTION = re.compile(r"(?<![\w-])--[a-z][\w.-]*\w")


def test_the_measured_page_is_what_the_results_say() -> None:
    written = load(ROOT / "benchmarks/measured_page.py").page()
    page = (ROOT / "docs/reference/measured.md").read_text(encoding="utf-8")
    assert page == written, "run: python benchmarks/measured_page.py"


def test_the_readmes_figures_are_of_the_measured_page() -> None:
    measured = (ROOT / "docs/reference/measured.md").read_text(encoding="utf-8")
    section = (ROOT / "README.md").read_text(encoding="utf-8").partition("## What it does\n")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ")]
    assert len(rows) >= 4
    for row in rows:
        assert row in measured


@pytest.mark.parametrize("mark", ["rooms", "settings", "versions"])
def test_tables_are_those_of_the_package(mark: str) -> None:
    made = load(ROOT / "docs/make_tables.py")
    page = (ROOT / made.TABLES[mark][0]).read_text(encoding="utf-8")
    assert f"<!-- {mark} -->" in page and page == made.page(mark), "run: python docs/make_tables.py"


FIGURES = load(ROOT / "docs/make_figures.py")
NUMBER = re.compile(r"-?\d+\.?\d*")


@pytest.mark.parametrize("name", sorted(FIGURES.FIGURES))
def test_drawings_are_those_of_the_code_and_the_results(name: str) -> None:
    """Word for word, and number for number within 0.2 of a pixel: another CPU may round a prediction differently."""
    kept, made = FIGURES.path(name).read_text(encoding="utf-8"), FIGURES.FIGURES[name]()
    assert NUMBER.sub("#", kept) == NUMBER.sub("#", made), "run: python docs/make_figures.py"
    for one, other in zip(NUMBER.findall(kept), NUMBER.findall(made), strict=True):
        assert abs(float(one) - float(other)) <= 0.2, "run: python docs/make_figures.py"


def test_the_front_pages_step_is_the_median_of_its_batches() -> None:
    step = FIGURES.step
    ratios = {seed: home.seconds / ours.seconds for seed in range(step.SEEDS)
              for home, ours in [step.simulated(seed)]}
    assert sorted(ratios, key=ratios.__getitem__)[step.SEEDS // 2] == step.SEED
    assert f"Of {step.SEEDS} sampled" in " ".join((ROOT / "docs/index.md").read_text(encoding="utf-8").split())


def test_messages_that_are_explained_are_messages_of_the_package() -> None:
    """What a table has in backticks in its first column is, up to the next ellipsis, a part of a text in the code."""
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "distca").rglob("*.py")]
    texts = [node.value for source in sources for node in ast.walk(ast.parse(source))
             if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    page = (ROOT / "docs/reference/messages.md").read_text(encoding="utf-8").partition("## It runs, but")[0]
    rows = "".join(re.findall(r"^\| ([^|]+) \|", page, re.MULTILINE))
    said = [message for message in re.findall(r"`([^`]+)`", rows) if not message.startswith("distca ")]
    assert len(said) > 20
    for message in said:
        part = next(part.strip(" ()") for part in re.split("…|N |: |; ", message) if part.strip(" ()"))
        assert any(part in text for text in texts), f"{message}: {part}"


def test_every_drawing_of_a_page_is_made_by_code() -> None:
    drawn = {name for page in PAGES for name in re.findall(r"images/(\w+)\.svg\)", page.read_text(encoding="utf-8"))}
    assert drawn == set(FIGURES.FIGURES)


def test_every_module_says_why_it_exists() -> None:
    made = load(ROOT / "docs/make_tables.py")
    assert all(made.first_line(path) for path in (ROOT / "distca").rglob("*.py"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def options_of(command: Any) -> set[str]:
    """Those of its own and of its subcommands."""
    own = {option for one in command.params for option in (*one.opts, *one.secondary_opts)}
    return own.union(*map(options_of, getattr(command, "commands", {}).values()))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_options_that_a_page_gives_exist(page: Path) -> None:
    text, root = page.read_text(encoding="utf-8"), typer.main.get_command(app)
    options = {name: options_of(command) for name, command in vars(root)["commands"].items()}
    options["train"] |= {f"--{name}" for name in known_settings()}
    for name, said in re.findall(r"\bdistca ([a-z]+)\b([^`\n#]*)", text):
        if name in options:
            assert set(OPTION.findall(said)) <= options[name], f"{page.name}: distca {name}{said}"
    for script, said in re.findall(r"benchmarks/(\w+\.py)([^`\n#)]*)", text):
        source = (ROOT / "benchmarks" / script).read_text(encoding="utf-8")
        assert all(f'"{option}"' in source for option in OPTION.findall(said)), f"{page.name}: {script}{said}"
