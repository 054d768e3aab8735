"""Ranks that only serve attention: the losses of one process whoever serves, and an end together however it ends.

Every test run has them beside the rest in test_together.py.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distca.models import model_named
from distca.train.batches import step_plan
from distca.train.settings import Settings
from distca.train.settings.checks import check_settings
from tests.support.training import command_of, logged, small_run, train

STEPS = 6
TOKENS = 2048  # of a step, in two micro-batches


def dedicated_run(folder: Path, ranks: int, dedicated: int, **values: Any) -> Settings:
    return small_run(folder, ranks, TOKENS // 2, **{
        "attention__dedicated": dedicated, "run__steps": STEPS, "optimizer__warmup_steps": 2,
        "optimizer__min_lr_ratio": 1.0, "data__max_document": 900, "batch__micro_batches": 2, **values})


def started(settings: Settings, folder: Path, steps_first: int) -> subprocess.Popen[str]:
    """A run of the command, once it has taken some steps."""
    process = subprocess.Popen([sys.executable, "-m", "distca", *command_of(settings, folder)], stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True)
    log, deadline = Path(settings.log.folder), time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None and (
            not (log / "steps.jsonl").exists() or len(logged(log, "step")) < steps_first):
        time.sleep(0.05)
    return process


def children(process: subprocess.Popen[str]) -> list[int]:
    """Its ranks, in order: the multiprocessing children that are no resource tracker."""
    found = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return sorted(int(pid) for pid in found if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes())


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """One process that computes everything itself."""
    folder = tmp_path_factory.mktemp("alone")
    train(dedicated_run(folder, 1, 0, attention__mode="home"))
    return logged(folder, "loss")


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize(("ranks", "dedicated", "values"), [
    (3, 1, {"parallel__pipeline": 2, "model__recompute": "full", "attention__transport": "auto"}),
    (3, 1, {}),
    (4, 2, {"parallel__fsdp": False}),
    (4, 2, {"parallel__tensor": 2, "batch__ping_pong": False}),
    (6, 2, {"parallel__pipeline": 2, "attention__placement": "given"}),
])
def test_the_loss_does_not_depend_on_who_serves(
    ranks: int, dedicated: int, values: dict[str, Any], alone: list[float], tmp_path: Path
) -> None:
    train(dedicated_run(tmp_path, ranks, dedicated, **values))
    assert logged(tmp_path, "loss") == pytest.approx(alone, abs=1e-10)
    assert sum(logged(tmp_path, "bytes_per_layer")) > 0
    for name in ("work_before", "work_after"):                   # at most all of it on one of the pool
        assert all(1.0 <= work <= ranks // values.get("parallel__tensor", 1) + 1e-9 for work in logged(tmp_path, name))


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_run_that_is_asked_to_stop_saves_and_goes_on_with_other_servers(alone: list[float], tmp_path: Path) -> None:
    """Two train and one serves, then one trains and one serves: the curve is that of one process."""
    log, saved = tmp_path / "log", str(tmp_path / "saved")
    process = started(dedicated_run(log, 3, 1, run__steps=500, checkpoint__folder=saved), tmp_path, steps_first=2)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, out + err
    assert "Traceback" not in err and "Stopped after step" in out
    taken = len(logged(log, "loss"))
    train(dedicated_run(log, 2, 1, run__steps=taken + 2, checkpoint__folder=saved))
    assert logged(log, "loss")[:STEPS] == pytest.approx(alone[:taken + 2], abs=1e-10)
    assert len(logged(log, "loss")) == taken + 2


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_run_goes_on_without_its_server(alone: list[float], tmp_path: Path) -> None:
    log = tmp_path / "log"
    process = started(dedicated_run(log, 3, 1), tmp_path, steps_first=1)
    ranks = children(process)
    assert len(ranks) == 3
    listed = {one["rank"]: one for one in json.loads((log / "members.json").read_text())["members"]}
    assert [listed[rank]["pid"] for rank in range(3)] == ranks
    assert [one["role"] for one in listed.values()] == ["trainer", "trainer", "server"]
    assert (log / "secret").stat().st_mode & 0o777 == 0o600
    os.kill(ranks[-1], signal.SIGKILL)
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, out + err
    assert "server rank 2 closed its connection; servers left: 0" in err and "Traceback" not in err
    assert "distca: rank 2 was ended by SIGKILL" in err
    assert logged(log, "loss") == pytest.approx(alone, abs=1e-10) and sum(logged(log, "faults")) == 1
    assert json.loads((log / "members.json").read_text())["members"][2]["state"] == "lost"
    assert not (log / "secret").exists()


@pytest.mark.slow
@pytest.mark.multiprocess
def test_trainers_that_fail_end_their_servers(tmp_path: Path) -> None:
    (tmp_path / "words.jsonl").write_text('{"other": "a"}\n')
    settings = dedicated_run(tmp_path / "log", 3, 1, data__source="jsonl", data__path=str(tmp_path / "words.jsonl"),
                             data__cache=str(tmp_path / "cache"))
    process = started(settings, tmp_path, steps_first=1)
    _, err = process.communicate(timeout=240)
    assert process.returncode == 2 and "words.jsonl" in err and "Traceback" not in err


@pytest.mark.parametrize(("tensor", "pipeline", "dedicated", "servers"), [
    (1, 1, 0, 2), (1, 1, 3, 5), (2, 1, 2, 3), (1, 2, 1, 5), (2, 2, 4, 6),
])
def test_a_plan_has_the_servers_of_one_tensor_rank(tensor: int, pipeline: int, dedicated: int, servers: int) -> None:
    settings = Settings().with_values({"parallel.tensor": tensor, "parallel.pipeline": pipeline,
                                       "attention.dedicated": dedicated})
    step = step_plan([np.array([3000, 1096])], settings, model_named("tiny"), num_data=2)
    step.validate()
    assert {plan.num_servers for plan in step.plans} == {servers}
    assert {plan.layout.num_ranks for plan in step.plans} == {2 * pipeline}
    for plan in step.plans:                                    # all serve alike, so dedicated ones too
        assert set(range(2 * pipeline, servers)) <= set(plan.tasks.server.tolist())


def test_work_before_is_counted_over_the_same_pool_as_work_after() -> None:
    """Two ranks hold 1024 tokens each, one document and two; with a third that serves the mean is a third of all."""
    settings = Settings().with_values({"attention.dedicated": 1, "batch.ping_pong": False})
    step = step_plan([np.array([1024, 512, 512])], settings, model_named("tiny"), num_data=2)
    largest, other = 1024 * 1025 / 2, 512 * 513
    assert step.summary().work_before == pytest.approx(largest / ((largest + other) / 3))


@pytest.mark.parametrize(("values", "words"), [
    ({"run.ranks": 2, "attention.dedicated": 2}, "attention.dedicated is 2 but there are 2 ranks"),
    ({"run.ranks": 5, "attention.dedicated": 1, "parallel.tensor": 2}, "give a multiple of 2"),
    ({"run.ranks": 5, "attention.dedicated": 2, "parallel.tensor": 2},
     "parallel.tensor is 2 but there are 3 ranks (run.ranks less attention.dedicated)"),
    ({"run.ranks": 4, "attention.dedicated": 1, "parallel.pipeline": 2},
     "parallel.pipeline is 2 but there are 3 ranks (run.ranks less attention.dedicated)"),
    ({"attention.dedicated": 1, "attention.mode": "home"}, "attention.mode is 'home'"),
    ({"attention.roles": 1, "attention.mode": "home"}, "attention.roles is 1 but attention.mode is 'home'"),
    ({"attention.roles": 3, "parallel.tensor": 2}, "attention.roles is 3 but heads are shared by 2 ranks"),
    ({"attention.roles": 2, "attention.adapt": True}, "attention.adapt is true but attention.roles is 2"),
    ({"attention.roles": 1, "parallel.schedule": "zb_h1", "parallel.pipeline": 2, "batch.micro_batches": 2},
     "parallel.schedule is 'zb_h1', in which attention stays within a stage, but attention.roles is 1"),
    ({"attention.dedicated": 1, "attention.state": "keep"}, "attention.state is 'keep'"),
    ({"attention.dedicated": -1}, "attention.dedicated is -1"),
])
def test_what_cannot_run_is_refused_in_one_line(values: dict[str, int | str], words: str) -> None:
    with pytest.raises(ValueError, match=r"dedicated|roles") as refused:
        check_settings(Settings().with_values(values))
    assert words in str(refused.value) and "\n" not in str(refused.value)
