"""What is built installs and runs without this checkout, and nothing names an index that does not have the package."""

import os
import re
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from email import message_from_bytes
from email.message import Message
from pathlib import Path

import pytest

import distca
from distca.validation import EXTRA_OF, to_install

ROOT = Path(distca.__file__).parents[1]
TEXTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*"), *ROOT.glob("distca/**/*.py"),
                *ROOT.glob("tests/**/*.py"), *ROOT.glob("benchmarks/*.py")])
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a wheel and an sdist, made as `python -m build` does, without fetching the build's requirements."""
    folder, code = tmp_path_factory.mktemp("dist"), "from setuptools import build_meta; import sys; "
    for kind in ("sdist", "wheel"):
        copy = tmp_path_factory.mktemp(kind) / "distca"
        listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True,
                                text=True)
        if listed.returncode:
            pytest.skip("the checkout is no git repository, so its own files are not known")
        for name in listed.stdout.splitlines():
            if (ROOT / name).is_file():
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                (copy / name).write_bytes((ROOT / name).read_bytes())
        done = subprocess.run([sys.executable, "-c", f"{code}build_meta.build_{kind}(sys.argv[1])", folder], cwd=copy,
                              capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def installed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of a fresh environment with the wheel; what it needs is borrowed from the tests' environment."""
    folder = tmp_path_factory.mktemp("fresh") / "venv"
    venv.create(folder, symlinks=True)
    site = next(folder.glob("lib/python*/site-packages"))
    (wheel,) = built.glob("*.whl")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(folder / "bin/python")]
    done = subprocess.run([*pip, "install", "--quiet", "--no-deps", "--no-index", "--no-compile", str(wheel)],
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    borrowed = [path for path in sys.path if path.endswith("site-packages")]
    (site / "borrowed.pth").write_text("\n".join(borrowed) + "\n")
    return folder / "bin"


def metadata(built: Path) -> Message:
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return message_from_bytes(archive.read(name))


def test_the_metadata_is_complete_and_its_links_lead_somewhere_from_anywhere(built: Path) -> None:
    about = metadata(built)
    assert (about["Name"], about["Version"]) == ("distca", distca.__version__)
    assert about["License-Expression"] == "Apache-2.0" and about["Author"] and about["Requires-Python"] == ">=3.11"
    assert about["Summary"] and about["Keywords"] and about["Description-Content-Type"] == "text/markdown"
    assert all(url.partition(", ")[2].startswith("https://") for url in about.get_all("Project-URL", []))
    text = str(about.get_payload())
    assert text.startswith("# distca") and len(text) > 2000
    targets = re.findall(r"\]\(([^)\s]+)", text)
    assert targets and all(target.startswith("https://") for target in targets)
    assert "![" not in text and "All measurements include" in text  # the words of a link stay
    assert set(about.get_all("Provides-Extra", [])) == set(PROJECT["optional-dependencies"])


def test_the_sdist_has_docs_and_tests_and_nothing_that_was_built(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"README.md", "LICENSE", "CHANGELOG.md", "Makefile", "constraints.txt", "docs/guide/train.md", "setup.py",
            "docs/images/plan.png", "tests/conftest.py", "tests/support/rank_mains.py", "examples/demo.toml",
            "benchmarks/planner.py", "distca/py.typed"} <= names
    assert not [name for name in names if "__pycache__" in name or name.startswith((".git", ".ci", ".venv", "runs"))]


def test_the_wheel_has_the_package_and_its_data_alone(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    package = {path.relative_to(ROOT).as_posix() for path in (ROOT / "distca").rglob("*.py")}
    assert package <= names and {"distca/py.typed", "distca/report/assets/plotly-LICENSE.txt"} & names
    assert {name.partition("/")[0] for name in names} == {"distca", f"distca-{distca.__version__}.dist-info"}


@pytest.mark.parametrize("arguments", [
    ["--version"], ["-h"], ["train", "--help"], ["plan", "prolong", "--ranks", "4", "--html", "plan.html"],
])
def test_an_installed_wheel_runs_elsewhere(installed: Path, arguments: list[str], tmp_path: Path) -> None:
    done = subprocess.run([installed / "distca", *arguments], cwd=tmp_path, capture_output=True, text=True,
                          env={"PATH": str(installed), "COLUMNS": "120"})
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert done.stdout


def test_the_installed_package_is_the_wheels(installed: Path, tmp_path: Path) -> None:
    done = subprocess.run([installed / "python", "-c", "import distca; print(distca.__file__)"], cwd=tmp_path, env={},
                          capture_output=True, text=True, check=True)
    assert Path(done.stdout.strip()).is_relative_to(installed.parent)


def test_a_shell_completes_commands(installed: Path) -> None:
    done = subprocess.run([installed / "distca"], capture_output=True, text=True, check=True, env={
        "PATH": str(installed), "_DISTCA_COMPLETE": "complete_bash", "COMP_WORDS": "distca p", "COMP_CWORD": "1"})
    assert {"plan", "profile"} <= set(done.stdout.split())


def test_the_readme_installs_by_lines_that_work_today() -> None:
    """From a checkout; the environment is activated first, so that bare `distca` is found."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    lines = "".join(re.findall(r"^```sh\n(.*?)^```", readme, re.DOTALL | re.MULTILINE)).splitlines()
    commands = [line.partition("#")[0].strip() for line in lines]
    assert {"pip install .", "pip install '.[train]'"} <= set(commands)
    assert "source .venv/bin/activate" in readme
    assert ".venv/bin/distca" not in readme
    for extra in re.findall(r"\.\[([\w,-]+)\]", readme):
        assert set(extra.split(",")) <= set(PROJECT["optional-dependencies"])


def test_the_readme_and_messages_name_every_extra() -> None:
    extras = PROJECT["optional-dependencies"]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    table = readme[readme.index("| extra | for |"):].partition("\n\n")[0]
    assert set(re.findall(r"`([\w-]+)`(?=[^|]*\|[^|]*\|)", table)) == set(extras) - {"dev", "site"}  # contributors'
    for package, extra in EXTRA_OF.items():
        assert any(one.startswith(package) for one in extras[extra]), package
    ours = [one for extra in ("train", "data", "text", "plot", "nixl", "tensorboard", "wandb") for one in extras[extra]]
    assert set(EXTRA_OF) == {one.partition(">")[0] for one in ours}
    assert to_install("pyarrow") == "run: pip install pyarrow, or install distca with the extra data"


def test_a_missing_package_is_one_line_with_its_extra(tmp_path: Path) -> None:
    for package, arguments, extra in (("torch", ("profile",), "train"), ("torch", ("train",), "train"),
                                      ("matplotlib", ("plan", "prolong", "--plot", "a.png"), "plot")):
        code = f"import sys; sys.modules[{package!r}] = None; from distca.cli import main; main({arguments!r})"
        done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True,
                              env={**os.environ, "PYTHONPATH": str(ROOT)})
        assert (done.returncode, done.stdout) == (2, "") and done.stderr.count("\n") == 1
        assert f"{package}" in done.stderr and f"or install distca with the extra {extra}" in done.stderr


def test_nothing_is_installed_from_an_index_that_does_not_have_us() -> None:
    """A hint names the package that is missing, or `pip install .` in a checkout."""
    wanted = re.compile(r"pip install[^\n`,]*?['\" ]distca(?![\w/.])|distca\[")
    assert wanted.search("pip install distca") and wanted.search("pip install 'distca[plot]'")
    others = [path for path in TEXTS if path.name != Path(__file__).name]
    assert len(others) > 100 and not [path for path in others if wanted.search(path.read_text(encoding="utf-8"))]
