"""Ranks that only serve attention: the losses of one process whoever serves, and an end together however it ends.

Every test run has them beside the rest in test_together.py.
"""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from distca.models import model_named
from distca.train.batches import step_plan
from distca.train.settings import Settings
from distca.train.settings.checks import check_settings

STEPS = 6
TOKENS = 2048  # of a step, in two micro-batches


def command(folder: Path, ranks: int, dedicated: int, *more: str, tensor: int = 1, pipeline: int = 1,
            steps: int = STEPS) -> list[str]:
    data = (ranks - dedicated) // tensor // pipeline
    return [sys.executable, "-m", "distca", "train", "--run.ranks", str(ranks), "--attention.dedicated", str(dedicated),
            "--run.steps", str(steps), "--run.dtype", "float64", "--run.threads", "1", "--run.timeout_seconds", "120",
            "--optimizer.warmup_steps", "2", "--optimizer.min_lr_ratio", "1", "--data.max_document", "900",
            "--parallel.tensor", str(tensor), "--parallel.pipeline", str(pipeline), "--batch.micro_batches", "2",
            "--batch.tokens_per_rank", str(TOKENS // 2 // data), "--log.folder", str(folder), *more]


def run(*arguments: object, **sizes: int) -> None:
    folder, ranks, dedicated, *more = arguments
    assert isinstance(folder, Path) and isinstance(ranks, int) and isinstance(dedicated, int)
    done = subprocess.run(command(folder, ranks, dedicated, *map(str, more), **sizes), capture_output=True, text=True,
                          timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr


def steps(folder: Path) -> list[dict[str, float]]:
    path = folder / "steps.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def losses(folder: Path) -> list[float]:
    return [step["loss"] for step in steps(folder)]


def started(folder: Path, *arguments: str, steps_first: int) -> subprocess.Popen[str]:
    """A run of two ranks that train and one that serves, once it has taken some steps."""
    process = subprocess.Popen(command(folder, 3, 1, *arguments, steps=500), stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while len(steps(folder)) < steps_first and time.monotonic() < deadline and process.poll() is None:
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
    run(folder, 1, 0, "--attention.mode", "home")
    return losses(folder)


@pytest.mark.multiprocess
@pytest.mark.parametrize(("ranks", "dedicated", "tensor", "pipeline", "more"), [
    pytest.param(3, 1, 1, 2, ("--model.recompute", "full", "--attention.transport", "auto"), marks=pytest.mark.slow),
    pytest.param(3, 1, 1, 1, (), marks=pytest.mark.slow),
    pytest.param(4, 2, 1, 1, ("--parallel.fsdp", "false"), marks=pytest.mark.slow),
    pytest.param(4, 2, 2, 1, ("--batch.ping_pong", "false"), marks=pytest.mark.slow),
    pytest.param(6, 2, 1, 2, ("--attention.placement", "given"), marks=pytest.mark.slow),
])
def test_the_loss_does_not_depend_on_who_serves(
    ranks: int, dedicated: int, tensor: int, pipeline: int, more: tuple[str, ...], alone: list[float], tmp_path: Path
) -> None:
    run(tmp_path, ranks, dedicated, *more, tensor=tensor, pipeline=pipeline)
    assert losses(tmp_path) == pytest.approx(alone, abs=1e-10)
    assert sum(step["bytes_per_layer"] for step in steps(tmp_path)) > 0
    for step in steps(tmp_path):                                 # at most all of it on one of the pool
        assert all(1.0 <= step[name] <= ranks // tensor + 1e-9 for name in ("work_before", "work_after"))


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_run_that_is_asked_to_stop_saves_and_goes_on_with_other_servers(alone: list[float], tmp_path: Path) -> None:
    """Two train and one serves, then one trains and one serves: the curve is that of one process."""
    saved = ("--checkpoint.folder", str(tmp_path / "saved"))
    log = tmp_path / "log"
    process = started(log, *saved, steps_first=2)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, out + err
    assert "Traceback" not in err and "Stopped after step" in out
    taken = len(steps(log))
    run(log, 2, 1, *saved, steps=taken + 2)
    assert losses(log)[:STEPS] == pytest.approx(alone[:taken + 2], abs=1e-10)
    assert len(losses(log)) == taken + 2


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_server_that_dies_ends_the_run_by_its_name(tmp_path: Path) -> None:
    process = started(tmp_path, steps_first=1)
    ranks = children(process)
    assert len(ranks) == 3
    subprocess.run(["kill", "-9", str(ranks[-1])], check=True)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGKILL, out + err
    assert "rank 2 was ended by SIGKILL" in err


@pytest.mark.slow
@pytest.mark.multiprocess
def test_trainers_that_fail_end_their_servers(tmp_path: Path) -> None:
    (tmp_path / "words.jsonl").write_text('{"other": "a"}\n')
    done = subprocess.run(command(tmp_path / "log", 3, 1, "--data.source", "jsonl", "--data.path",
                                  str(tmp_path / "words.jsonl")), capture_output=True, text=True, timeout=240)
    assert done.returncode == 2 and "words.jsonl" in done.stderr and "Traceback" not in done.stderr


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
    ({"attention.dedicated": 1, "attention.state": "keep"}, "attention.state is 'keep'"),
    ({"attention.dedicated": -1}, "attention.dedicated is -1"),
])
def test_what_cannot_run_is_refused_in_one_line(values: dict[str, int | str], words: str) -> None:
    with pytest.raises(ValueError, match="dedicated") as refused:
        check_settings(Settings().with_values(values))
    assert words in str(refused.value) and "\n" not in str(refused.value)
