"""Run parts of the tests with an environment's Python, and keep which versions it has and how the tests ended.

    python benchmarks/versions.py                                                # this Python, every selection
    python benchmarks/versions.py integrations --python .venv-torchtitan/bin/python
    python docs/make_tables.py                                                   # then writes docs/guide/versions.md

An environment is known by its versions: running it again replaces its counts, of the selections that were run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from outputs import RESULTS, write_json

ROOT = Path(__file__).resolve().parents[1]
OUTPUT = RESULTS / "versions.json"
QUICK = "not slow and not multiprocess and not browser"
SELECTIONS = {                                                   # name -> paths and options of pytest
    "planning": ["tests/workload", "tests/corpus", "tests/cost", "tests/planning", "tests/simulate", "tests/report",
                 "tests/test_api.py", "tests/test_baselines.py", "tests/test_dispatch.py", "tests/test_imports.py",
                 "tests/test_models.py", "tests/test_spec.py", "tests/test_validation.py", "-m", QUICK],
    "runtime": ["tests/kernels", "tests/runtime", "--ignore=tests/kernels/hopper"],
    "train": ["tests/train", "-m", QUICK],
    "integrations": ["tests/integrations"],
}
FACTS = """
import importlib.metadata, json, platform
found = {"python": platform.python_version()}
for name in ("torch", "transformers", "megatron-core", "torchtitan"):
    try:
        found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        found[name] = None
print(json.dumps(found))
"""


def versions_of(python: str) -> dict[str, str | None]:
    """Return the versions of Python and of the packages we support there; None where one is missing."""
    done = subprocess.run([python, "-c", FACTS], capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout))


def run(python: str, arguments: list[str]) -> dict[str, int]:
    """Run pytest and return how many tests passed, failed and were skipped, and the seconds they took."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        done = subprocess.run([python, "-m", "pytest", "-p", "no:cacheprovider", f"--junitxml={report}", *arguments],
                              cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"})
        if not report.exists():
            sys.exit(f"pytest ended with {done.returncode} and wrote no report")
        suite = next(ElementTree.parse(report).iter("testsuite"))
    failed, skipped = int(suite.get("failures", 0)) + int(suite.get("errors", 0)), int(suite.get("skipped", 0))
    return {"passed": int(suite.get("tests", 0)) - failed - skipped, "failed": failed, "skipped": skipped,
            "seconds": round(float(suite.get("time", 0)))}


def keep(path: Path, versions: dict[str, str | None], name: str, counts: dict[str, int]) -> None:
    """Write the counts of a selection beside those of the same environment, in the order of versions."""
    kept: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["environments"] if path.exists() else []
    mine = next((one for one in kept if one["versions"] == versions), None)
    if mine is None:
        kept.append(mine := {"versions": versions, "tests": {}})
    mine["tests"][name] = counts
    write_json(path, {"environments": sorted(kept, key=lambda one: [str(version) for version in
                                                                    one["versions"].values()])})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("selections", nargs="*", metavar="SELECTION", help=f"any of {', '.join(SELECTIONS)}")
    parser.add_argument("--python", default=sys.executable, help="the environment's Python")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    options = parser.parse_args()
    unknown = set(options.selections) - set(SELECTIONS)
    if unknown:
        parser.error(f"{', '.join(sorted(unknown))} is no selection; choose from {', '.join(SELECTIONS)}")
    versions = versions_of(options.python)
    print(versions)
    failed = 0
    for name in options.selections or SELECTIONS:
        counts = run(options.python, SELECTIONS[name])
        keep(options.output, versions, name, counts)
        failed += counts["failed"]
    sys.exit(failed != 0)


if __name__ == "__main__":
    main()
