"""The example of a document longer than a rank, and the benchmark of one, at lengths that a test can afford."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import distca

ROOT = Path(distca.__file__).parents[1]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def said_by(ranks: int) -> list[tuple[int, int, float]]:
    """Step, tokens held and loss, of every line that the example prints."""
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks),
         str(ROOT / "examples/long_document.py"), "1000", "2"], capture_output=True, text=True, timeout=200,
        env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr[-3000:]
    return sorted((int(step), int(held), float(loss)) for step, held, loss in re.findall(
        r"step (\d): rank \d holds (\d+) of 1000 tokens.*? loss (\S+), peak memory \S+ GiB", done.stdout))


@pytest.mark.slow
@pytest.mark.multiprocess
def test_the_example_is_short_and_has_the_losses_of_one_rank() -> None:
    assert len((ROOT / "examples/long_document.py").read_text(encoding="utf-8").splitlines()) < 60
    whole, halves = said_by(1), said_by(2)
    assert [held for _, held, _ in halves] == [500] * 4
    for step, _, loss in halves:
        assert loss == pytest.approx(whole[step][2], abs=2e-4)
    assert whole[1][2] < whole[0][2]


@pytest.mark.slow
@pytest.mark.multiprocess
def test_the_benchmark_measures_all_modes_in_one_run(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks/spanning.py"), "--tokens", "1024", "--layers", "1", "--steps", "1",
         "--json", str(tmp_path / "it.json")], capture_output=True, text=True, timeout=200, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr[-3000:]
    content = json.loads((tmp_path / "it.json").read_text(encoding="utf-8"))
    rows = {row["mode"]: row for row in content["rows"]}
    alone, home, ours = (rows[mode] for mode in ("one rank alone", "slices in order", "distca"))
    assert content["speedup_over"]["one rank alone"] == pytest.approx(
        ours["tokens_per_second"] / alone["tokens_per_second"])
    assert home["work_max_over_mean"] == pytest.approx(1.5, abs=0.01)   # three quarters of the pairs in the second half
    assert rows["head and tail"]["work_max_over_mean"] == pytest.approx(1.0, abs=0.01)
    assert ours["work_max_over_mean"] < 1.1 and content["largest_loss_difference"] < 1e-4
