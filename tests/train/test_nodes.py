"""A run whose ranks share nodes: exchanges in two hops and plans by levels do not change the loss."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


def losses(folder: Path, ranks: int, *more: str) -> list[float]:
    command = [sys.executable, "-m", "distca", "train", "--model.name", "tiny", "--optimizer.warmup_steps", "3",
               "--run.threads", "1", "--run.timeout_seconds", "120", "--run.steps", "4", "--run.dtype", "float64",
               "--data.max_document", "700", "--run.ranks", str(ranks), "--batch.tokens_per_rank", str(1024 // ranks),
               "--log.folder", str(folder), *more]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line)["loss"] for line in (folder / "steps.jsonl").read_text().splitlines()]


@pytest.mark.multiprocess
@pytest.mark.parametrize("per_node", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_the_loss_does_not_depend_on_nodes(per_node: int, tmp_path: Path) -> None:
    alone = losses(tmp_path / "alone", 1, "--attention.mode", "home")
    nodes = losses(tmp_path / "nodes", 4, "--attention.ranks_per_node", str(per_node))
    assert nodes == pytest.approx(alone, rel=1e-9)
