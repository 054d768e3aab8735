"""Whole runs in real processes: where attention ran must not change the loss, nor must being interrupted."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from distca.cost.latency_table import analytic_table
from distca.models import model_named

SMALL = ["--model.name", "tiny", "--optimizer.warmup_steps", "3", "--run.threads", "1",
         "--run.timeout_seconds", "120"]
TOKENS = 1024  # of all ranks


def command(
    folder: Path, ranks: int, *more: str, tensor: int = 1, pipeline: int = 1, tokens: int = TOKENS, longest: int = 700
) -> list[str]:
    return [sys.executable, "-m", "distca", "train", *SMALL, "--run.ranks", str(ranks),
            "--data.max_document", str(longest),
            "--parallel.tensor", str(tensor), "--parallel.pipeline", str(pipeline),
            "--batch.tokens_per_rank", str(tokens * tensor * pipeline // ranks), "--log.folder", str(folder), *more]


def train(folder: Path, ranks: int, *more: str, **sizes: int) -> list[float]:
    """The losses of a run, step by step."""
    done = subprocess.run(command(folder, ranks, *more, **sizes), capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return losses(folder)


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "steps.jsonl").read_text().splitlines()]


def logged(folder: Path, name: str) -> list[float]:
    return [json.loads(line)[name] for line in (folder / "steps.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], list[float]]:
    """12 steps of one process that holds all documents, in float64: what every way to share attention must give."""
    folder = tmp_path_factory.mktemp("alone")
    train(folder, 1, "--run.steps", "12", "--run.dtype", "float64", "--attention.mode", "home")
    return logged(folder, "loss"), logged(folder, "grad_norm")


@pytest.mark.multiprocess
@pytest.mark.parametrize(("ranks", "tensor", "mode", "ping_pong", "more"), [
    (2, 1, "disaggregated", "true", ()),
    (2, 1, "disaggregated", "false", ("--parallel.fsdp", "false")),
    (2, 1, "disaggregated", "true", ("--attention.placement", "given", "--model.recompute", "full",
                                     "--model.tile_tokens", "100")),
    (2, 2, "disaggregated", "true", ()),
    pytest.param(1, 1, "disaggregated", "true", (), marks=pytest.mark.slow),
    pytest.param(2, 1, "disaggregated", "true", ("--model.compile", "on"), marks=pytest.mark.slow),
    pytest.param(2, 1, "disaggregated", "true", ("--attention.state", "keep"), marks=pytest.mark.slow),
    pytest.param(2, 1, "disaggregated", "true", ("--attention.cost", "table.json"), marks=pytest.mark.slow),
    pytest.param(2, 1, "per_document_cp", "true", ("--parallel.fsdp", "false"), marks=pytest.mark.slow),
    pytest.param(2, 1, "home", "true", (), marks=pytest.mark.slow),
    pytest.param(4, 2, "disaggregated", "true", (), marks=pytest.mark.slow),
    pytest.param(4, 1, "disaggregated", "true", (), marks=pytest.mark.slow),
    pytest.param(4, 1, "per_document_cp", "false", (), marks=pytest.mark.slow),
    pytest.param(4, 1, "home", "false", ("--parallel.fsdp", "false"), marks=pytest.mark.slow),
])
def test_the_loss_does_not_depend_on_what_is_about_speed(
    ranks: int, tensor: int, mode: str, ping_pong: str, more: tuple[str, ...], alone: tuple[list[float], list[float]],
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
    if "table.json" in more:
        monkeypatch.chdir(tmp_path)
        analytic_table(model_named("tiny"), 1e11).save("table.json")
    losses = train(tmp_path, ranks, "--run.steps", "12", "--run.dtype", "float64", "--attention.mode", mode,
                   "--batch.ping_pong", ping_pong, *more, tensor=tensor)
    assert losses == pytest.approx(alone[0], abs=1e-10)
    assert logged(tmp_path, "grad_norm") == pytest.approx(alone[1], rel=1e-8)
    assert losses[-1] < losses[0]
    if mode == "disaggregated" and ranks // tensor > 1:
        assert sum(logged(tmp_path, "bytes_per_layer")) > 0      # attention did travel


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_document_that_fills_the_batch_is_one_with_ping_pong(tmp_path: Path) -> None:
    """Half of its pairs lie between the nano-batches."""
    one = ("--run.steps", "6", "--run.dtype", "float64")
    alone = train(tmp_path / "alone", 1, *one, "--attention.mode", "home", tokens=2048, longest=2048)
    for ranks, placement in ((1, "given"), (2, "balanced"), (4, "given")):
        folder = tmp_path / f"{ranks}"
        losses = train(folder, ranks, *one, "--attention.placement", placement, tokens=2048, longest=2048)
        assert losses == pytest.approx(alone, abs=1e-10)
        assert logged(folder, "grad_norm") == pytest.approx(logged(tmp_path / "alone", "grad_norm"), rel=1e-8)


def train_in_micro_batches(folder: Path, ranks: int, *more: str, **sizes: int) -> list[float]:
    """The learning rate of a step does not depend on the number of steps."""
    return train(folder, ranks, "--batch.micro_batches", "3", "--optimizer.min_lr_ratio", "1", "--run.dtype", "float64",
                 *more, tokens=384, **sizes)


@pytest.fixture(scope="module")
def alone_in_micro_batches(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """12 steps of three micro-batches in one process."""
    return train_in_micro_batches(tmp_path_factory.mktemp("alone"), 1, "--run.steps", "12", "--attention.mode", "home")


@pytest.mark.multiprocess
@pytest.mark.parametrize(("ranks", "tensor", "pipeline", "mode", "more"), [
    (2, 1, 2, "disaggregated", ()),
    pytest.param(2, 1, 2, "disaggregated", ("--batch.ping_pong", "false"), marks=pytest.mark.slow),
    pytest.param(4, 1, 2, "disaggregated", ("--model.recompute", "full"), marks=pytest.mark.slow),
    pytest.param(2, 1, 2, "home", (), marks=pytest.mark.slow),
    pytest.param(4, 2, 2, "disaggregated", (), marks=pytest.mark.slow),
    pytest.param(4, 2, 2, "home", ("--parallel.fsdp", "false"), marks=pytest.mark.slow),
    pytest.param(4, 1, 2, "per_document_cp", ("--parallel.fsdp", "false"), marks=pytest.mark.slow),
])
def test_the_loss_does_not_depend_on_stages(ranks: int, tensor: int, pipeline: int, mode: str, more: tuple[str, ...],
                                            alone_in_micro_batches: list[float], tmp_path: Path) -> None:
    curve = train_in_micro_batches(tmp_path, ranks, "--run.steps", "12", "--attention.mode", mode, *more,
                                   tensor=tensor, pipeline=pipeline)
    assert curve == pytest.approx(alone_in_micro_batches, abs=1e-10)
    assert curve[-1] < curve[0]
    assert logged(tmp_path, "bubble_share") == [pytest.approx(1 - 3 / 4)] * 12  # 3 micro-batches through 2 stages
    assert (sum(logged(tmp_path, "served_in_bubbles")) > 0) == (mode == "disaggregated")


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_run_goes_on_with_other_stages(alone_in_micro_batches: list[float], tmp_path: Path) -> None:
    saving = ("--checkpoint.folder", str(tmp_path / "saved"))
    for pipeline, num_steps in ((2, 4), (1, 8)):         # as many ranks as stages
        curve = train_in_micro_batches(tmp_path / "log", pipeline, "--run.steps", str(num_steps), *saving,
                                       pipeline=pipeline)
    assert curve == pytest.approx(alone_in_micro_batches[:8], abs=1e-10)


@pytest.mark.multiprocess
def test_a_killed_run_resumes_where_it_was(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", 2, "--run.steps", "12")
    options = ("--run.steps", "12", "--checkpoint.folder", str(tmp_path / "saved"), "--checkpoint.every", "3")
    process = subprocess.Popen(command(tmp_path / "cut", 2, *options), stdout=subprocess.DEVNULL,
                               stderr=subprocess.DEVNULL, start_new_session=True)
    deadline = time.monotonic() + 120
    while not list((tmp_path / "saved").glob("step_*/manifest.json")) and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert len(losses(tmp_path / "cut")) < 12
    train(tmp_path / "cut", 2, *options)
    assert losses(tmp_path / "cut") == whole                     # as many ranks: the same operations and shapes


@pytest.mark.multiprocess
def test_a_changed_run_over_an_old_folder_is_refused_and_loses_nothing(tmp_path: Path) -> None:
    options = ("--run.steps", "3", "--checkpoint.folder", str(tmp_path / "saved"))
    train(tmp_path / "log", 1, *options)
    before = {path: path.read_bytes() for path in tmp_path.rglob("step*/*") if path.is_file()}
    before[tmp_path / "log/steps.jsonl"] = (tmp_path / "log/steps.jsonl").read_bytes()
    for name, value, words in (("model.tied", "true", "model.tied is False there and True here"),
                               ("run.dtype", "float64", "run.dtype is 'float32' there and 'float64' here")):
        changed = command(tmp_path / "log", 1, *options, f"--{name}", value)
        done = subprocess.run(changed, capture_output=True, text=True, timeout=240)
        assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
        assert "holds step_00000003 of another run: " in done.stderr and words in done.stderr
        assert all(path.read_bytes() == content for path, content in before.items())


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_second_run_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    options = ("--run.steps", "1000", "--checkpoint.folder", str(tmp_path / "saved"), "--checkpoint.every", "5")
    first = subprocess.Popen(command(tmp_path / "log", 1, *options), stdout=subprocess.DEVNULL,
                             stderr=subprocess.DEVNULL, start_new_session=True)
    deadline = time.monotonic() + 120
    while not list((tmp_path / "saved").glob("step_*/manifest.json")) and time.monotonic() < deadline:
        time.sleep(0.05)
    second = subprocess.run(command(tmp_path / "other", 1, *options), capture_output=True, text=True, timeout=120)
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    assert second.returncode == 2 and second.stderr.count("\n") == 1
    assert "is in use by process " in second.stderr and " since 20" in second.stderr


@pytest.mark.multiprocess
def test_sigterm_saves_and_exits_well(tmp_path: Path) -> None:
    options = ("--run.steps", "1000", "--checkpoint.folder", str(tmp_path / "saved"))
    process = subprocess.Popen(command(tmp_path / "log", 2, *options), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                               text=True)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not ((tmp_path / "log/steps.jsonl").exists() and losses(tmp_path / "log")):
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert list((tmp_path / "saved").glob("step_*/manifest.json")), output
    steps = len(losses(tmp_path / "log"))
    more = train(tmp_path / "log", 1, "--run.steps", str(steps + 2), "--checkpoint.folder", str(tmp_path / "saved"))
    assert len(more) == steps + 2                                # goes on, on another number of ranks


@pytest.mark.multiprocess
def test_a_trace_shows_every_rank(tmp_path: Path) -> None:
    train(tmp_path, 2, "--run.steps", "2", "--log.trace_step", "2")
    events = json.loads((tmp_path / "trace_step_2.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert {event["pid"] for event in spans} == {0, 1}
    assert {"exchange", "attention forward", "attention backward", "optimizer"} <= {event["name"] for event in spans}
    assert all(event["dur"] >= 0 for event in spans)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_memory_is_flat_over_300_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", str(2**17))     # glibc gives back what is freed: peaks are held
    train(tmp_path, 2, "--run.steps", "300", tokens=512)
    peak = logged(tmp_path, "memory_bytes")
    assert peak[-1] <= 1.05 * peak[99]
