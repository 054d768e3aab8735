"""The counts that benchmarks/versions.py keeps are pytest's, and a second run of an environment replaces its first."""

import json
import sys
from pathlib import Path

import versions


def test_counts_are_those_of_pytest(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(
        "import pytest\n\ndef test_right(): ...\ndef test_too(): ...\ndef test_wrong(): assert False\n"
        "def test_left(): pytest.skip()\n@pytest.fixture\ndef broken(): raise OSError\ndef test_error(broken): ...\n")
    counts = versions.run(sys.executable, [str(tmp_path), "-q"])
    assert {name: counts[name] for name in ("passed", "failed", "skipped")} == {"passed": 2, "failed": 2, "skipped": 1}


def test_an_environment_is_known_by_its_versions(tmp_path: Path) -> None:
    path, first, second = tmp_path / "versions.json", {"python": "3.13.0", "torch": None}, {"python": "3.12.1"}
    for found, name, passed in ((first, "train", 1), (second, "train", 2), (first, "train", 3), (first, "runtime", 4)):
        versions.keep(path, dict(found), name, {"passed": passed})
    assert json.loads(path.read_text(encoding="utf-8"))["environments"] == [
        {"versions": second, "tests": {"train": {"passed": 2}}},
        {"versions": first, "tests": {"train": {"passed": 3}, "runtime": {"passed": 4}}}]
    assert versions.versions_of(sys.executable)["python"] == ".".join(map(str, sys.version_info[:3]))
