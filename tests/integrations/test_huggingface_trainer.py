"""Whole runs of other people's trainers with documents over two ranks have the losses of one process."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import distca

pytest.importorskip("transformers")

from distca.integrations.huggingface_callbacks import FIGURES, figures
from distca.models import model_named
from distca.planning.balance import balance
from distca.trace import Span, StepTrace
from distca.workload.layout import layout_from_rows

ROOT = Path(distca.__file__).parents[1]
HAVE_TRL = all(importlib.util.find_spec(name) is not None for name in ("trl", "peft", "datasets"))


def launched(ranks: int, *command: object) -> str:
    """What a script said under torchrun."""
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks),
         *map(str, command)], capture_output=True, text=True, timeout=200,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout + done.stderr


def history(folder: Path, ranks: int, *options: object) -> list[dict[str, Any]]:
    launched(ranks, ROOT / "examples/transformers_trainer.py", "--cpu", "--over-ranks", "--longest", 400, "--steps", 20,
             "--documents", 8 // ranks, "--output", folder, *options)
    rows: list[dict[str, Any]] = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    return rows


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("options", [("llama",), ("gemma3", "--checkpointing")], ids=["llama", "gemma3"])
def test_twenty_steps_of_trainer_are_those_of_one_process(options: tuple[str, ...], tmp_path: Path) -> None:
    """Training and evaluation; and the figures are in the logs."""
    ours = history(tmp_path / "two", 2, "--model", *options)
    plain = history(tmp_path / "one", 1, "--attention", "sdpa", "--model", *options)
    for name, count in (("loss", 20), ("eval_loss", 2)):
        mine, theirs = ([row[name] for row in rows if name in row] for rows in (ours, plain))
        assert len(mine) == len(theirs) == count
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=2e-4)
    logged = [row for row in ours if "loss" in row]
    assert all(name in row for row in logged for name in FIGURES)
    assert all(row["attention_moved_bytes"] > 0 for row in logged)


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.skipif(not HAVE_TRL, reason="trl, peft or datasets is not installed: pip install trl peft datasets")
def test_sft_trainer_with_lora_is_that_of_one_process_and_wrapped_packing_is_warned_of(tmp_path: Path) -> None:
    script, losses = ROOT / "tests/support/sft.py", {}
    for ranks in (1, 2):
        launched(ranks, script, tmp_path / str(ranks), "rows", ranks)
        losses[ranks] = json.loads((tmp_path / str(ranks) / "losses.json").read_text())
    assert len(losses[1]) == 6
    np.testing.assert_allclose(losses[2], losses[1], rtol=0, atol=1e-4)
    assert launched(2, script, tmp_path / "wrapped", "wrapped", 2).count("packing_strategy is 'wrapped'") == 1
    launched(2, script, tmp_path / "bfd", "bfd", 2)


def test_figures_of_a_step() -> None:
    plan = balance(layout_from_rows([[512], [256, 256]]), model_named("tiny"), tolerance=0.0)
    summary = plan.summary()
    spans = (Span("attention forward", "attention", 0.0, 2.0), Span("exchange", "wait", 2.0, 2.25, 640))
    found = dict(zip(FIGURES, figures(plan, StepTrace(0, 1, spans), 0), strict=True))
    assert found["attention_work_at_home"] == summary.work_max_over_mean_at_home > 1.3
    assert found["attention_moved_bytes"] == 640 and found["attention_wait_seconds"] == 0.25
    pairs = 512 * 513 / 2                                        # the busiest rank at home, against the busiest server
    rate = 2.0 / summary.work[0]
    assert found["attention_seconds_saved"] == pytest.approx(rate * (pairs - summary.work.max()) - 0.25)
