"""The public API: every name is there, says what it is, is documented, and costs no torch until it is used."""

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import distca

ROOT = Path(distca.__file__).parents[1]
API_PAGE = (ROOT / "docs" / "reference" / "api.md").read_text(encoding="utf-8")
NAMES = sorted(distca.__all__)


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_is_there_and_documented(name: str) -> None:
    pytest.importorskip("torch")
    value = getattr(distca, name)
    assert f"`distca.{name}`" in API_PAGE
    if name != "__version__":
        assert inspect.getdoc(value)
        assert getattr(value, "__module__", "distca").startswith("distca")


def test_the_page_names_nothing_else() -> None:
    assert set(re.findall(r"`distca\.(\w+)`", API_PAGE)) <= set(NAMES)
    assert set(dir(distca)) == set(NAMES)


def test_importing_distca_imports_no_torch() -> None:
    code = "import sys, distca; assert 'torch' not in sys.modules; distca.CoreAttention; assert 'torch' in sys.modules"
    pytest.importorskip("torch")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_lazy_names_are_those_that_type_checkers_see() -> None:
    """What loads on first use is what the typed import names, no more and no less."""
    source = (ROOT / "distca" / "__init__.py").read_text(encoding="utf-8")
    typed = source[source.index("if TYPE_CHECKING:"):source.index("__version__ =")]
    found = {name: module for module, names in re.findall(r"from (\S+) import (.+)", typed)
             for name in names.split(", ")}
    assert {name: f"{module}.{name}" if module == "distca" else module for name, module in found.items()} == (
        distca._NEED_TORCH)


def test_strategies_compare_in_one_call() -> None:
    answer = distca.compare(gpus=16, context=16_384, strategies=("fixed_packing", "distca"), lengths=[16_384, 512, 512])
    ours, packed = answer.outcome("distca"), answer.outcome("fixed_packing")
    assert ours.speedup_over(packed)[0] == pytest.approx(packed.step_seconds / ours.step_seconds)
    again = distca.compare(distca.model_named("llama3-8b"), distca.cluster_named("dgx-h200"), gpus=16, context=16_384,
                           strategies=("fixed_packing", "distca"), lengths=[16_384, 512, 512],
                           cost=distca.shipped_table("h200"))
    assert again.as_json() == answer.as_json()


@pytest.mark.slow
def test_type_checkers_know_public_names_and_refuse_others(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    script = tmp_path / "user.py"
    script.write_text("import distca\n"
                      "attend: distca.CoreAttention = distca.CoreAttention(transport='auto')\n"
                      "attend.start(1)\n"
                      "distca.pakc\n", encoding="utf-8")
    done = subprocess.run([sys.executable, "-m", "mypy", "--cache-dir", str(tmp_path / "cache"), str(script)], cwd=ROOT,
                          capture_output=True, text=True)
    said = [line for line in done.stdout.splitlines() if "user.py" in line]
    assert any(":3: error" in line for line in said) and any(':4: error' in line and "pakc" in line for line in said)
    assert not any(":2: error" in line for line in said)
