"""What the pages for new readers say runs: commands, Python blocks, the skill for agents, and the notebook."""

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import distca

ROOT = Path(distca.__file__).parents[1]
GUIDES = (ROOT / "README.md", *(ROOT / "docs/guide").glob("*.md"))   # tests of their own run these
PAGES = ("index", "start/install", "start/when", "start/planner", "start/kernels", "start/contributor",
         "start/trainer", "skills/distca/SKILL")
STARTING = ("start/tour",)                           # ranks
MODULES = {"distca": "-m distca ", "python": ""}
SHORT = " --batch.tokens_per_rank 128"                               # for training runs
NUMBER = re.compile(r"-?\d[\d,]*\.?\d*")


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def commands(text: str) -> list[str]:
    """The lines of a page's commands without their comments."""
    return [re.sub(r" +# .*", "", line) for line in "".join(blocks(text, "bash")).splitlines()]


@pytest.mark.parametrize("name", [*PAGES, *(pytest.param(name, marks=pytest.mark.multiprocess) for name in STARTING)])
def test_commands_and_code_of_a_page_run(run: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch,
                                         tmp_path: Path, name: str) -> None:
    """In the page's order, in one folder; training runs have short rows."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    text = (ROOT / f"docs/{name}.md").read_text(encoding="utf-8")
    of_guides = [line for guide in GUIDES for line in commands(guide.read_text(encoding="utf-8"))]
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    for line in commands(text):
        first, *arguments = shlex.split(line)
        if first == "make":
            assert arguments[0] in targets, line
        elif first == "torchrun" or arguments[0] == "doctor":    # the guide has it, or what begins so
            assert any(other.startswith(line) for other in of_guides), line
        elif first == "distca" and arguments[0] != "train" and ">" not in arguments:
            code, _, err = run(*arguments)
            assert (code, err) == (0, ""), line
        else:
            line = re.sub("^(distca|python) ", lambda match: f"{shlex.quote(sys.executable)} {MODULES[match[1]]}", line)
            short = SHORT if first == "distca" and ">" not in arguments else ""
            done = subprocess.run(line + short, shell=True, cwd=tmp_path, capture_output=True, text=True)
            assert done.returncode == 0, (line, done.stderr)
    for block in blocks(text, "python"):
        done = subprocess.run([sys.executable, "-c", block], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    assert commands(text) or blocks(text, "python")


def test_the_install_page_installs_as_the_readme_does() -> None:
    """Whose lines tests/test_install.py tries."""
    page, readme = ((ROOT / name).read_text(encoding="utf-8") for name in ("docs/start/install.md", "README.md"))
    assert blocks(page, "sh") == blocks(readme, "sh") != []


def test_figures_that_the_pages_say_are_those_of_the_results() -> None:
    """Ranges and medians of predicted speeds, and errors of predictions."""
    results = {name: json.loads((ROOT / f"benchmarks/results/{name}.json").read_text(encoding="utf-8"))
               for name in ("paper", "simulator_cpu", "planner")}
    rows = [row for figure in ("fig9", "fig10") for row in results["paper"]["rows"][figure]]
    of_8b = [row["distca"] for row in rows if row["model"] == "llama3-8b"]
    index = (ROOT / "docs/index.md").read_text(encoding="utf-8")
    assert f"[{min(of_8b):.2f}–{max(of_8b):.2f}× as fast]" in index
    groups: dict[object, list[float]] = {}
    for number, row in enumerate(rows):
        groups.setdefault((number < len(results["paper"]["rows"]["fig9"]), row["model"], row["data"]), []).append(
            row["distca"])
    medians = [sorted(group)[len(group) // 2] for group in groups.values()]
    when = (ROOT / "docs/start/when.md").read_text(encoding="utf-8")
    assert f"a median of {min(medians):.2f}–{max(medians):.2f}×" in when
    planner = (ROOT / "docs/start/planner.md").read_text(encoding="utf-8")
    assert f"off by {100 * results['simulator_cpu']['median_error']:.0f} % in the median" in planner


@pytest.mark.multiprocess
def test_the_notebook_runs_and_prints_what_it_was_saved_with(tmp_path: Path) -> None:
    """Its cells in one program, without Jupyter; printed numbers within a hundredth of the saved ones, or 0.02.

    Those by step are of the standard library's files, which are others in another Python: of two ranks, the slowest has
    at most twice the mean.
    """
    cells = [cell for cell in json.loads((ROOT / "examples/first_steps.ipynb").read_text(encoding="utf-8"))["cells"]
             if cell["cell_type"] == "code"]
    program = "import matplotlib\nmatplotlib.use('agg')\n" + "\n\n".join("".join(cell["source"]) for cell in cells)
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], cwd=tmp_path, capture_output=True, text=True,
                          env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    saved = "".join("".join(output["text"]) for cell in cells for output in cell["outputs"] if "text" in output)
    assert NUMBER.sub("#", done.stdout) == NUMBER.sub("#", saved)
    for line, then in zip(done.stdout.splitlines(), saved.splitlines(), strict=True):
        now, expected = ([float(one.replace(",", "")) for one in NUMBER.findall(said)] for said in (line, then))
        if "by step" in line:
            assert all(1 <= after <= before <= 2 for before, after in zip(now[::2], now[1::2], strict=True))
        else:
            assert now == pytest.approx(expected, rel=0.01, abs=0.02)
    steps = [json.loads(line) for line in (tmp_path / "runs/disaggregated/steps.jsonl").read_text().splitlines()]
    assert len(steps) == 10 and steps[-1]["loss"] < steps[0]["loss"]
    assert sum("image/png" in output.get("data", {}) for cell in cells for output in cell["outputs"]) == 2
