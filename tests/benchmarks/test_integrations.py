"""The benchmarks of integrations run, with few tokens, and their ratios are those of their rows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import distca

ROOT = Path(distca.__file__).parents[1]
pytest.importorskip("transformers")
pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]


def measured(benchmark: str, folder: Path, *options: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / benchmark), *options, "--json", str(folder / "it.json")],
        capture_output=True, text=True, timeout=280,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    content: dict[str, Any] = json.loads((folder / "it.json").read_text(encoding="utf-8"))
    return content


def test_documents_on_ranks_of_their_own(tmp_path: Path) -> None:
    content = measured("integrations.py", tmp_path, "--tokens", "512", "--short", "64", "--layers", "2", "--steps", "1")
    sdpa, home, balanced = content["rows"]
    assert content["speedup"] == pytest.approx(balanced["tokens_per_second"] / home["tokens_per_second"])
    assert content["speedup_over_sdpa"] == pytest.approx(balanced["tokens_per_second"] / sdpa["tokens_per_second"])
    assert balanced["work_max_over_mean"] < home["work_max_over_mean"] and content["largest_loss_difference"] < 1e-4


def test_one_document_over_all_ranks(tmp_path: Path) -> None:
    content = measured("spanning.py", tmp_path, "--tokens", "1024", "--layers", "1", "--steps", "1")
    rows = {row["mode"]: row for row in content["rows"]}
    alone, home, ours = (rows[mode] for mode in ("one rank alone", "slices in order", "distca"))
    assert content["speedup_over"]["one rank alone"] == pytest.approx(
        ours["tokens_per_second"] / alone["tokens_per_second"])
    assert home["work_max_over_mean"] == pytest.approx(1.5, abs=0.01)   # three quarters of the pairs in the second half
    assert rows["head and tail"]["work_max_over_mean"] == pytest.approx(1.0, abs=0.01)
    assert ours["work_max_over_mean"] < 1.1 and content["largest_loss_difference"] < 1e-4


def test_what_a_layer_costs_the_host(tmp_path: Path) -> None:
    content = measured("host_overhead.py", tmp_path, "--layers", "1", "--steps", "2")
    assert [row["documents"] for row in content["rows"]] == ["at home", "over ranks"]
    assert content["options"] == {"ranks": 2, "layers": 1, "steps": 2} and content["host"]["cores"] >= 1
