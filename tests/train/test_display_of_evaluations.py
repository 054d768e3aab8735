"""A held-out loss is shown where there is one: in lines, the panel, the log, TensorBoard and the summary."""

import io
import json
import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from distca.train.display import Observer
from distca.train.run_log import StepRecord
from distca.train.settings import Settings

RECORD = StepRecord(
    step=1, loss=5.5, lr=1e-3, grad_norm=2.25, tokens=8192, seconds=2.0, tokens_per_second=4096.0, work_before=1.75,
    work_after=1.05, bytes_per_layer=12.5e6, exposed_seconds=0.5, host_seconds=0.1, memory_bytes=3 * 10**9,
    plan_seconds=0.01)


@pytest.mark.parametrize("terminal", [False, True])
def test_a_held_out_loss_is_shown_logged_and_kept(
    terminal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scalars = []

    class SummaryWriter:
        def __init__(self, folder: str) -> None: ...

        def add_scalar(self, name: str, value: float, step: int) -> None:
            if name == "eval_loss":
                scalars.append((value, step))

        def close(self) -> None: ...

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", types.SimpleNamespace(SummaryWriter=SummaryWriter))
    output = io.StringIO()
    console = Console(file=output, width=100, force_terminal=terminal, color_system=None, highlight=False)
    settings = Settings().with_values({"log.folder": str(tmp_path), "run.steps": 3, "log.every": 10,
                                       "log.tensorboard": True})
    observer = Observer(settings, 0, 2, console)
    for record in (RECORD, replace(RECORD, step=2, eval_loss=4.25), replace(RECORD, step=3)):
        observer.step(record)
    summary = observer.close()
    assert summary is not None and summary.eval_loss == 4.25
    said = output.getvalue()
    assert ("4.2500 at step 2" if terminal else "step 2/3  loss 5.5000  held out 4.2500  lr") in said
    assert "held out        4.2500 at the last evaluation" in said
    assert "step 1/3" not in said                                # evaluations are always told, steps by log.every
    logged = [json.loads(line).get("eval_loss") for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert logged == [None, 4.25, None] and scalars == [(4.25, 2)]
    assert json.loads((tmp_path / "summary.json").read_text())["eval_loss"] == 4.25
