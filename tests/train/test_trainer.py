"""Whole runs in real processes: where attention ran must not change the loss, nor must being interrupted."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from distca.cost.latency_table import analytic_table
from distca.models import model_named
from distca.report.runs import largest_waits, read_ranks, read_traces
from distca.train import trainer as trainer_module
from distca.train.settings import Settings
from distca.train.trainer import Trainer
from tests.support.training import NARROW, command_of, logged, outcomes_of, small_run, train, train_each

STEPS = 8


def losses(folder: Path) -> list[float]:
    return logged(folder, "loss")


def started(settings: Settings, folder: Path) -> subprocess.Popen[str]:
    """A run of the command, in a process group of its own."""
    return subprocess.Popen([sys.executable, "-m", "distca", *command_of(settings, folder)], stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT, text=True, start_new_session=True)


def wait_for(found: Callable[[], object]) -> None:
    deadline = time.monotonic() + 120
    while not found() and time.monotonic() < deadline:
        time.sleep(0.05)


def manifests(folder: Path) -> list[Path]:
    return list(folder.glob("step_*/manifest.json"))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], list[float]]:
    """Some steps of one process that has all documents, in float64: what every way to share attention must give."""
    folder = tmp_path_factory.mktemp("alone")
    train(small_run(folder, 1, run__steps=STEPS, attention__mode="home", **NARROW))
    return losses(folder), logged(folder, "grad_norm")


SLOW = pytest.mark.slow


@pytest.mark.multiprocess
@pytest.mark.parametrize(("ranks", "values"), [
    (2, {}),
    (2, {"batch__ping_pong": False, "parallel__fsdp": False}),
    (2, {"attention__placement": "given", "model__recompute": "full", "model__tile_tokens": 100}),
    (2, {"parallel__tensor": 2}),
    (4, {"attention__ranks_per_node": 2}),
    pytest.param(4, {"attention__ranks_per_node": 3}, marks=SLOW),
    pytest.param(1, {}, marks=SLOW),
    pytest.param(2, {"model__compile": "on"}, marks=SLOW),
    pytest.param(2, {"attention__state": "keep"}, marks=SLOW),
    pytest.param(2, {"attention__cost": "table.json"}, marks=SLOW),
    pytest.param(2, {"attention__mode": "per_document_cp", "parallel__fsdp": False}, marks=SLOW),
    pytest.param(2, {"attention__mode": "home"}, marks=SLOW),
    pytest.param(4, {"parallel__tensor": 2}, marks=SLOW),
    pytest.param(4, {}, marks=SLOW),
    pytest.param(4, {"attention__mode": "per_document_cp", "batch__ping_pong": False}, marks=SLOW),
    pytest.param(4, {"attention__mode": "home", "batch__ping_pong": False, "parallel__fsdp": False}, marks=SLOW),
])
def test_the_loss_does_not_depend_on_what_is_about_speed(
    ranks: int, values: dict[str, Any], alone: tuple[list[float], list[float]], tmp_path: Path,
) -> None:
    if "attention__cost" in values:
        analytic_table(model_named("tiny"), 1e11).save(tmp_path / "table.json")
        values = {"attention__cost": str(tmp_path / "table.json")}
    train(small_run(tmp_path, ranks, run__steps=STEPS, **NARROW, **values))
    curve = losses(tmp_path)
    assert curve == pytest.approx(alone[0], abs=1e-10)
    assert logged(tmp_path, "grad_norm") == pytest.approx(alone[1], rel=1e-8)
    assert curve[-1] < curve[0]
    if "attention__mode" not in values and ranks // values.get("parallel__tensor", 1) > 1:
        assert sum(logged(tmp_path, "bytes_per_layer")) > 0      # attention did travel


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_document_that_fills_the_batch_is_one_with_ping_pong(tmp_path: Path) -> None:
    """Half of its pairs lie between the nano-batches."""
    one: dict[str, Any] = {"tokens": 2048, "run__steps": 6, "data__max_document": 2048, **NARROW}
    train(small_run(tmp_path / "alone", 1, **one, attention__mode="home"))
    for ranks, placement in ((1, "given"), (2, "balanced"), (4, "given")):
        folder = tmp_path / f"{ranks}"
        train(small_run(folder, ranks, **one, attention__placement=placement))
        assert losses(folder) == pytest.approx(losses(tmp_path / "alone"), abs=1e-10)
        assert logged(folder, "grad_norm") == pytest.approx(logged(tmp_path / "alone", "grad_norm"), rel=1e-8)


def in_micro_batches(folder: Path, ranks: int, **values: Any) -> Settings:
    """The learning rate of a step does not depend on the number of steps."""
    return small_run(folder, ranks, tokens=384, **{
        **NARROW, "run__steps": STEPS, "batch__micro_batches": 3, "model__layers": 4, "optimizer__min_lr_ratio": 1.0,
        **values})


@pytest.fixture(scope="module")
def alone_in_micro_batches(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, tuple[list[float], list[float]]]:
    """Losses and norms of steps of three micro-batches in one process, with and without tied embeddings."""
    folder = tmp_path_factory.mktemp("alone")
    train(*(in_micro_batches(folder / f"{tied}", 1, attention__mode="home", model__tied=tied)
            for tied in (False, True)))
    return {tied: (losses(folder / f"{tied}"), logged(folder / f"{tied}", "grad_norm")) for tied in (False, True)}


def scheduled(schedule: str, **values: Any) -> dict[str, Any]:
    return {"parallel__schedule": schedule, **values}


@pytest.mark.multiprocess
@pytest.mark.parametrize(("ranks", "runs"), [
    (2, [scheduled("auto", model__tied=True), scheduled("same_phase"),
         scheduled("interleaved_2", batch__ping_pong=False, model__recompute="selective"),
         scheduled("interleaved_1", model__recompute="full", model__tile_tokens=100, eval__every=4,
                   eval__fraction=0.2)]),
    (3, [scheduled("interleaved_2", attention__dedicated=1, model__tied=True)]),
    pytest.param(2, [scheduled("same_phase", batch__ping_pong=False), scheduled("auto", attention__mode="home"),
                     scheduled("interleaved_2", model__compile="on", model__tied=True),
                     scheduled("interleaved_1", model__compile="on", model__recompute="full"),
                     scheduled("interleaved_2", attention__adapt=True)], marks=SLOW),
    pytest.param(4, [scheduled("interleaved_2", parallel__tensor=2, model__tied=True),
                     scheduled("interleaved_1", parallel__tensor=2, parallel__fsdp=False, model__recompute="full"),
                     scheduled("interleaved_2", parallel__fsdp=False), scheduled("1f1b"),
                     scheduled("interleaved_2", attention__placement="given", model__recompute="selective"),
                     scheduled("same_phase", model__recompute="full"), scheduled("same_phase", parallel__tensor=2),
                     scheduled("auto", parallel__tensor=2, attention__mode="home", parallel__fsdp=False),
                     scheduled("auto", attention__mode="per_document_cp", parallel__fsdp=False)], marks=SLOW),
    pytest.param(4, [scheduled("interleaved_1", parallel__pipeline=4, model__tied=True),
                     scheduled("same_phase", parallel__pipeline=4)], marks=SLOW),
])
def test_the_loss_does_not_depend_on_stages(ranks: int, runs: list[dict[str, Any]],
                                            alone_in_micro_batches: dict[bool, tuple[list[float], list[float]]],
                                            tmp_path: Path) -> None:
    train(*(in_micro_batches(tmp_path / f"{number}", ranks, **{"parallel__pipeline": 2, **values})
            for number, values in enumerate(runs)))
    for number, values in enumerate(runs):
        curve, folder = losses(tmp_path / f"{number}"), tmp_path / f"{number}"
        if not values.get("eval__fraction"):                     # which trains on fewer documents
            want, norms = alone_in_micro_batches[values.get("model__tied", False)]
            assert curve == pytest.approx(want, abs=1e-10), values
            assert logged(folder, "grad_norm") == pytest.approx(norms, rel=1e-8), values
        assert curve[-1] < curve[0]
        bubbles, is_shared = logged(folder, "bubble_share"), "attention__mode" not in values
        if values["parallel__schedule"] in ("same_phase", "1f1b") or not is_shared:
            stages = values.get("parallel__pipeline", 2)
            assert bubbles == [pytest.approx(1 - 3 / (3 + stages - 1))] * STEPS
        else:
            few = "model__tile_tokens" in values or "parallel__pipeline" in values  # idle ticks are filled, or stages
            assert max(bubbles) < (0.35 if few else 0.13)
        assert (sum(logged(folder, "served_in_bubbles")) > 0) == (
            is_shared and values["parallel__schedule"] != "1f1b"), values


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("tied", [False, True])
def test_a_run_goes_on_with_other_stages(alone_in_micro_batches: dict[bool, tuple[list[float], list[float]]],
                                         tied: bool, tmp_path: Path) -> None:
    for pipeline, schedule, num_steps in ((2, "interleaved_2", 3), (1, "auto", 5), (2, "interleaved_1", STEPS)):
        train(in_micro_batches(tmp_path / "log", pipeline, parallel__pipeline=pipeline, run__steps=num_steps,
                               parallel__schedule=schedule, model__tied=tied,
                               checkpoint__folder=str(tmp_path / "saved")))
    assert losses(tmp_path / "log") == pytest.approx(alone_in_micro_batches[tied][0], abs=1e-10)


@pytest.mark.multiprocess
def test_a_killed_run_resumes_where_it_was(tmp_path: Path) -> None:
    plain: dict[str, Any] = {"run__steps": 12, "run__dtype": "float32"}
    train(small_run(tmp_path / "whole", 2, **plain))
    cut = small_run(tmp_path / "cut", 2, **plain, checkpoint__folder=str(tmp_path / "saved"), checkpoint__every=3)
    process = started(cut, tmp_path)
    wait_for(lambda: manifests(tmp_path / "saved"))
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert len(losses(tmp_path / "cut")) < 12
    train(cut)
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")  # as many ranks: the same operations and shapes


@pytest.mark.multiprocess
def test_a_changed_run_over_an_old_folder_is_refused_and_loses_nothing(tmp_path: Path) -> None:
    saved = small_run(tmp_path / "log", 1, run__steps=3, run__dtype="float32",
                      checkpoint__folder=str(tmp_path / "saved"))
    train(saved)
    before = {path: path.read_bytes() for path in tmp_path.rglob("step*/*") if path.is_file()}
    before[tmp_path / "log/steps.jsonl"] = (tmp_path / "log/steps.jsonl").read_bytes()
    for name, value, words in (("model.tied", True, "model.tied is False there and True here"),
                               ("run.dtype", "float64", "run.dtype is 'float32' there and 'float64' here")):
        error = outcomes_of(saved.with_values({name: value}))[0].error
        assert error is not None and error.startswith("UserError: ") and "\n" not in error
        assert "holds step_00000003 of another run: " in error and words in error
        assert all(path.read_bytes() == content for path, content in before.items())


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_second_run_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    saving: dict[str, Any] = {"run__steps": 1000, "checkpoint__folder": str(tmp_path / "saved"), "checkpoint__every": 5}
    first = started(small_run(tmp_path / "log", 1, **saving), tmp_path)
    wait_for(lambda: manifests(tmp_path / "saved"))
    second = started(small_run(tmp_path / "other", 1, **saving), tmp_path)
    output, _ = second.communicate(timeout=120)
    os.killpg(first.pid, signal.SIGKILL)
    first.communicate()
    assert second.returncode == 2 and output.count("\n") == 1, output
    assert "is in use by process " in output and " since 20" in output


@pytest.mark.multiprocess
def test_sigterm_saves_and_exits_well(tmp_path: Path) -> None:
    log, saved = tmp_path / "log", str(tmp_path / "saved")
    process = started(small_run(log, 2, run__steps=1000, checkpoint__folder=saved), tmp_path)
    wait_for(lambda: (log / "steps.jsonl").exists() and losses(log))
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert manifests(tmp_path / "saved"), output
    steps = len(losses(log))
    train(small_run(log, 1, run__steps=steps + 2, checkpoint__folder=saved))  # goes on, on another number of ranks
    assert len(losses(log)) == steps + 2


def stop_while_ranks_agree(transport: Any, runs: tuple[Settings, ...]) -> None:
    """The first rank, or all of them, get SIGTERM while the ranks ask each other after step 2 whether to stop."""
    agree, reduce = Trainer.agreed_to_stop, dist.all_reduce

    def agreed_to_stop(trainer: Trainer) -> bool:
        def and_be_asked(*args: Any, **options: Any) -> None:
            reduce(*args, **options)
            if trainer.step == 2 and (trainer.rank == 0 or trainer.settings.run.seed):
                os.kill(os.getpid(), signal.SIGTERM)

        vars(dist)["all_reduce"] = and_be_asked
        try:
            return agree(trainer)
        finally:
            vars(dist)["all_reduce"] = reduce

    vars(trainer_module)["Trainer"].agreed_to_stop = agreed_to_stop
    train_each(transport, runs)


@pytest.mark.multiprocess
@pytest.mark.parametrize("all_ranks", [0, 1])
def test_a_stop_that_is_asked_for_while_ranks_agree_comes_a_step_later(all_ranks: int, tmp_path: Path) -> None:
    train(small_run(tmp_path, 2, run__steps=6, run__seed=all_ranks), body=stop_while_ranks_agree)
    assert len(losses(tmp_path)) == 3


@pytest.mark.multiprocess
def test_a_trace_shows_every_rank(tmp_path: Path) -> None:
    train(small_run(tmp_path, 2, run__steps=2, log__trace_step=2))
    events = json.loads((tmp_path / "trace_step_2.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert {event["pid"] for event in spans} == {0, 1}
    assert {"exchange", "attention forward", "attention backward", "optimizer"} <= {event["name"] for event in spans}
    assert all(event["dur"] >= 0 for event in spans)
    ranks = read_ranks(tmp_path / "ranks_2.json")
    assert ranks.step == 2 and len(ranks.memory_bytes) == 2 and (ranks.memory_bytes > 1e6).all()
    assert ranks.lengths.sum() == (ranks.q_stop - ranks.q_start)[ranks.home == 0].sum() * 2
    assert ranks.work_after.sum() == ranks.work_before.sum() > 0
    waits = largest_waits(read_traces(tmp_path / "step_2.json"), ranks)
    assert waits and all(wait.waits_for in ("the network", f"rank {1 - wait.rank}") for wait in waits)
    about = json.loads((tmp_path / "run.json").read_text())
    assert about["ranks"] == "2" and f"torch {version('torch')}" in about["versions"]


@pytest.mark.slow
@pytest.mark.multiprocess
def test_memory_is_flat_over_300_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", str(2**17))     # glibc gives back what is freed: peaks are held
    process = started(small_run(tmp_path, 2, tokens=512, run__steps=300, run__dtype="float32"), tmp_path)
    assert process.communicate(timeout=240) and process.returncode == 0
    peak = logged(tmp_path, "memory_bytes")
    assert peak[-1] <= 1.05 * peak[99]
