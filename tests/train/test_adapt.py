"""attention.adapt: every rank learns the same speeds, a slower one gets less, and the loss stays what it was."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distca.cli.report import read_log
from distca.train.display import plain_line, server_speeds
from distca.train.launch import launch
from distca.train.run_log import StepRecord, as_json, figures
from distca.train.settings import Settings
from distca.train.settings.checks import check_settings
from tests.support import rank_mains as mains

RECORD = StepRecord(step=3, loss=2.5, lr=1e-3, grad_norm=1.0, tokens=100, seconds=1.0, tokens_per_second=100.0,
                    work_before=2.0, work_after=1.0, bytes_per_layer=10.0, exposed_seconds=0.0, host_seconds=0.0,
                    memory_bytes=10, plan_seconds=0.0, attention_seconds_max=0.5, server_speed=(1.0, 0.52))


@pytest.mark.parametrize(("values", "message"), [
    ({"attention.mode": "home"}, "attention.adapt is true but attention.mode is 'home', .*; use 'disaggregated'"),
    ({"attention.dedicated": 1}, "attention.adapt is true but attention.dedicated is 1, .*; set attention.adapt to f"),
])
def test_what_cannot_adapt_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_settings(Settings().with_values({"attention.adapt": True, **values}))


def test_the_log_the_display_and_the_page_show_each_servers_speed(tmp_path: Path) -> None:
    assert as_json(RECORD)["server_speed"] == [1.0, 0.52]
    assert figures(RECORD)["server_speed/1"] == 0.52
    assert "speeds 0.52–1.00" in plain_line(RECORD, 10) and "rank 1 of the pool" in server_speeds((1.0, 0.52))
    log = tmp_path / "steps.jsonl"
    log.write_text("".join(json.dumps({**as_json(RECORD), "step": step}) + "\n" for step in (1, 2)))
    run = read_log(log).run
    assert run is not None
    curves = dict(run.series)
    assert curves["speed of server 1, × the median"].tolist() == [0.52, 0.52]
    assert curves["attention of the slowest rank, seconds"].tolist() == [0.5, 0.5]
    log.write_text(json.dumps({**as_json(RECORD), "server_speed": ["fast", None]}) + "\n")
    with pytest.raises(ValueError, match=r"steps.jsonl: server_speed is 'fast'"):
        read_log(log)


def chosen(folder: Path, **values: Any) -> Settings:
    return Settings().with_values({
        "model.name": "tiny", "run.steps": 8, "run.dtype": "float64", "run.threads": 1, "run.device": "cpu",
        "run.timeout_seconds": 120, "optimizer.warmup_steps": 3, "data.max_document": 700, "log.folder": str(folder),
        **{name.replace("__", "."): value for name, value in values.items()}})


def steps(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]


@pytest.mark.multiprocess
@pytest.mark.parametrize("grid", [
    {"run__ranks": 2},
    pytest.param({"run__ranks": 4, "parallel__tensor": 2}, marks=pytest.mark.slow),
    pytest.param({"run__ranks": 4, "parallel__pipeline": 2, "batch__micro_batches": 2}, marks=pytest.mark.slow),
])
def test_a_slow_rank_gets_less_and_the_loss_does_not_notice(
    grid: dict[str, Any], tmp_path: Path
) -> None:
    """The last rank says that its attention takes twice what its work does. Ranks whose plans differ would fail."""
    data = grid["run__ranks"] // grid.get("parallel__tensor", 1) // grid.get("parallel__pipeline", 1)
    rows = {"batch__tokens_per_rank": 2048 // data}
    assert launch(chosen(tmp_path / "adapt", attention__adapt=True, **rows, **grid), mains.train_with_a_slow_rank) == 0
    alone = [sys.executable, "-m", "distca", "train", "--attention.mode", "home", "--run.ranks", "1",
             "--batch.tokens_per_rank", "2048", "--batch.micro_batches", str(grid.get("batch__micro_batches", 1)),
             "--model.name", "tiny", "--run.steps", "8", "--run.dtype", "float64", "--run.threads", "1",
             "--optimizer.warmup_steps", "3", "--data.max_document", "700", "--log.folder", str(tmp_path / "alone")]
    subprocess.run(alone, check=True, capture_output=True, timeout=240)
    found = steps(tmp_path / "adapt")
    assert [step["loss"] for step in found] == pytest.approx([step["loss"] for step in steps(tmp_path / "alone")],
                                                             rel=1e-9)
    speed = found[-1]["server_speed"]
    assert speed[:-1] == pytest.approx([1.0] * (len(speed) - 1), abs=1e-3)
    assert speed[-1] == pytest.approx(0.5, abs=0.5 * 0.7**8 + 1e-3)
    said = [json.loads(path.read_text()) for path in sorted((tmp_path / "adapt").glob("rank*.json"))]
    assert all(one["work"] == said[0]["work"] for one in said)   # the same plans everywhere
    share = np.array(said[0]["work"])                            # [steps, servers]
    share = share[:, -1] / share[:, :-1].mean(axis=1)
    assert (share[:2] > 0.9).all()                               # planned before the first step taught anything
    assert (share[-3:] < 0.65).all()                             # 0.5 and what 700-token documents leave uneven
