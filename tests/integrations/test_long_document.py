"""The example of a document longer than a rank, at a length that a test can afford."""

from __future__ import annotations

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
