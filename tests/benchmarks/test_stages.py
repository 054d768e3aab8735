"""The replay of pipeline stages against schedules that are worked out by hand, and the benchmark at a small size."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import stage_replay as stages

import distca

ROOT = Path(distca.__file__).parents[1]


def op(forward: bool, micro_batch: int, attention: float, other: float = 1.0) -> Any:
    return stages.Op(forward, micro_batch, (stages.Piece(False, other), stages.Piece(True, attention)))


def test_a_stage_that_waits_halves_what_is_left_of_its_neighbours_attention() -> None:
    """Stage 1 idles through the forward of stage 0 (1 + 4 s) and stage 0 through both ops of stage 1."""
    pipeline = [[op(True, 0, 4.0), op(False, 0, 8.0)], [op(True, 0, 4.0), op(False, 0, 8.0)]]
    assert stages.replay(pipeline, serve=False) == pytest.approx(5 + 5 + 9 + 9)
    assert stages.replay(pipeline, serve=True) == pytest.approx(3 + 3 + 5 + 5)


def test_only_waits_are_filled() -> None:
    """Two micro-batches, 1F1B: only the forward before and the backward behind the busy part are helped."""
    first = [op(True, 0, 2.0), op(True, 1, 2.0), op(False, 0, 2.0), op(False, 1, 2.0)]
    second = [op(True, 0, 2.0), op(False, 0, 2.0), op(True, 1, 2.0), op(False, 1, 2.0)]
    # stage 0: F0 0-3, F1 3-6, B0 9-12 behind stage 1's, which waits 0-3; B1 of stage 1 at 12-15, of stage 0 at 15-18
    assert stages.replay([first, second], serve=False) == pytest.approx(18)
    # F0 0-2; F0' and F1 2-5 together; B0' 5-7 helped; B0 and F1' 7-10; B1' 10-12 helped; B1 12-14 helped
    assert stages.replay([first, second], serve=True) == pytest.approx(14)


def test_replicas_share_attention_inside_a_stage() -> None:
    long, short = ([[op(True, 0, seconds)], [op(True, 0, seconds)]] for seconds in (6.0, 2.0))
    assert stages.replay(stages.balanced_inside([long, short]), serve=False) == pytest.approx(2 * (1 + 4))


def test_longer_pipelines_run_1f1b_with_the_measured_pieces() -> None:
    """Equal ops that take a second: the well-known (micro-batches + stages - 1) slots of a forward and a backward."""
    two = [[op(True, 0, 0.5, 0.5), op(True, 1, 0.5, 0.5), op(False, 0, 0.5, 0.5), op(False, 1, 0.5, 0.5)]] * 2
    assert stages.one_forward_one_backward(0, 2, 2) == [(True, 0), (True, 1), (False, 0), (False, 1)]
    assert stages.one_forward_one_backward(1, 2, 2) == [(True, 0), (False, 0), (True, 1), (False, 1)]
    for count in (2, 3, 4):
        assert stages.replay(stages.stretched(two, count), serve=False) == pytest.approx(2 * (2 + count - 1))


def test_an_order_that_cannot_run_is_said() -> None:
    with pytest.raises(ValueError, match="every stage waits"):
        stages.replay([[op(False, 0, 1.0)], [op(True, 0, 1.0)]], serve=False)


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed: pip install "
                                                                         "'megatron-core>=0.16,<0.17'")
def test_serving_changes_no_figure_of_the_step(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks/megatron_stages.py"), "--tokens", "1536", "--micro-batches", "3",
         "--steps", "1", "--layers", "2", "--json", str(tmp_path / "it.json")], capture_output=True, text=True,
        timeout=250, env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    content = json.loads((tmp_path / "it.json").read_text(encoding="utf-8"))
    assert content["largest_relative_difference"] < 1e-5
    assert sum(map(sum, content["blocks_served_for_stages"])) > 0  # not vacuous
    home, _, replayed, ideal = (row["step_seconds"] for row in content["rows"][:4])
    assert ideal <= replayed * (1 + 1e-9) and home > 0
