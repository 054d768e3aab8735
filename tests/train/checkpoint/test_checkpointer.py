"""What a run finds where one was saved: the last good checkpoint, or why there is none that it may go on from."""

from __future__ import annotations

import gc
import json
import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, Never

import pytest
import torch

from distca.train.checkpoint import checkpointer as checkpoint
from distca.train.checkpoint import folder as checkpoint_folder
from distca.train.checkpoint.checkpointer import Checkpointer, SaveError, load
from distca.train.checkpoint.files import describe
from distca.train.checkpoint.folder import judge, step_folders
from distca.train.run_log import FolderLock
from tests.support import small_runs as runs


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("three")
    runs.save_steps(folder, (1, 2, 3))
    return folder


@pytest.fixture
def copy(three: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(three, tmp_path / "copy"))


@pytest.mark.parametrize("how", ["no manifest", "truncated", "one bit"])
def test_a_torn_or_damaged_checkpoint_is_named_and_the_last_good_one_used(copy: Path, caplog: pytest.LogCaptureFixture,
                                                                          how: str) -> None:
    newest, verdict = copy / "step_00000003", "damaged"
    file = newest / "model-00000.safetensors"
    if how == "no manifest":
        verdict = "torn"
        (newest / checkpoint_folder.MANIFEST).unlink()
    elif how == "truncated":
        os.truncate(file, file.stat().st_size - 1)
    else:
        content = bytearray(file.read_bytes())
        content[-5] ^= 4
        file.write_bytes(content)
    run = runs.build(seed=5)
    with caplog.at_level(logging.WARNING, "distca"):
        state = runs.resumed(copy, run)
    assert state.step == 2 and state.loader == {"at": 2}
    (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert f"{newest} is {verdict} and not used: " in line
    if how == "one bit":
        assert "model-00000.safetensors does not match its checksum in bytes" in line
    with pytest.raises(ValueError, match=r"has no manifest|ends at byte|does not match"):
        load(newest, *run)


def test_a_changed_run_is_refused_by_name(copy: Path) -> None:
    """Other sizes, or other settings that the tensors do not show; nothing begins anew over an old run."""
    saver = Checkpointer(copy, *runs.build(), run={"model.tied": True, "run.dtype": "float32"})
    saver.save(4, {})
    saver.close()
    for width, settings, words in (
        (6, {"model.tied": False, "run.dtype": "float32"}, "model.tied is True there and False here"),
        (6, {"model.tied": True, "run.dtype": "bfloat16"}, "run.dtype is 'float32' there and 'bfloat16' here"),
        (4, {"model.tied": True}, r"down.bias is float32 \[6\] there and float32 \[4\] here")):
        with pytest.raises(ValueError, match=f"holds step_00000004 of another run: {words}; set it back, or name"):
            runs.resumed(copy, runs.build(width=width), run=settings)
        shutil.rmtree(copy / "step_00000003", ignore_errors=True)
    settings = {"model.tied": True, "run.dtype": "float32", "unknown then": 1}
    assert runs.resumed(copy, runs.build(), run=settings).step == 4


def test_a_run_with_nothing_good_left_does_not_begin_anew(tmp_path: Path) -> None:
    runs.save_steps(tmp_path, (1,))
    os.truncate(tmp_path / "step_00000001" / "state-00000.safetensors", 9)
    with pytest.raises(ValueError, match=r"holds step_00000001 but no checkpoint that is whole; restore one"):
        runs.resumed(tmp_path, runs.build())


def test_after_a_damaged_one_an_older_one_without_optimizer_has_none(tmp_path: Path) -> None:
    run = runs.build()
    saver = Checkpointer(tmp_path, *run)
    saver.save(0, {})
    runs.train(*run, range(1))
    saver.save(1, {})
    saver.close()
    file = tmp_path / "step_00000001" / "state-00000.safetensors"
    file.write_bytes(bytes(file.stat().st_size))
    model, optimizer = runs.build(seed=5)
    assert runs.resumed(tmp_path, (model, optimizer)).step == 0
    assert not optimizer.state
    runs.train(model, optimizer, range(1))
    runs.assert_same(runs.everything(model, optimizer), runs.everything(*run))


def test_two_runs_do_not_share_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FolderLock.__init__, "__defaults__", (0.2,))
    first = Checkpointer(tmp_path, *runs.build())
    with pytest.raises(ValueError) as refused:
        Checkpointer(tmp_path, *runs.build())
    assert f"is in use by process {os.getpid()} on " in str(refused.value) and " since 20" in str(refused.value)
    first.close()
    Checkpointer(tmp_path, *runs.build()).close()


def test_safetensors_reads_what_is_written(three: Path) -> None:
    """The files are safetensors to others too, with the tensors' own names."""
    from safetensors.torch import load_file

    run = runs.build(seed=5)
    runs.resumed(three, run)
    found = load_file(three / "step_00000003" / "model-00000.safetensors")
    expected = {name.removeprefix("model."): value for name, value in runs.everything(*run).items()
                if name.startswith("model.")}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())  # copies


def test_older_ones_go_only_once_a_newer_one_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, saver = runs.save_steps(tmp_path, (1, 2, 3), keep=2, close=False)
    assert [path.name for path in step_folders(tmp_path)] == ["step_00000002", "step_00000003"]
    gate = runs.Gate(monkeypatch)
    saver.save(4, {})
    assert runs.in_flight(saver)
    assert [judge(path, describe(run[0]), {})[0] for path in step_folders(tmp_path)][:2] == ["good", "good"]
    assert runs.newest(tmp_path, run[0]).name == "step_00000003"
    gate.open.set()
    saver.close()
    assert [path.name for path in step_folders(tmp_path)] == ["step_00000003", "step_00000004"]


def test_more_files_of_a_crashed_save_do_not_remain(tmp_path: Path) -> None:
    """A save of four ranks was cut short; the same step is then saved by one."""
    (tmp_path / "step_00000001").mkdir()
    for rank in range(4):
        (tmp_path / "step_00000001" / f"state-{rank:05d}.safetensors").touch()
    runs.save_steps(tmp_path, (1,))
    assert sorted(path.name for path in (tmp_path / "step_00000001").iterdir()) == [
        "manifest.json", "model-00000.safetensors", "state-00000.safetensors"]


def test_a_full_disk_says_no_space_and_leaves_the_last_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, saver = runs.save_steps(tmp_path, (1,), keep=1, close=False)

    def full(*_: Any) -> Never:
        raise OSError(28, "No space left on device")

    for module, name, reason in ((checkpoint, "write_file", "rank 0: no space: No space left on device"),
                                 (shutil, "disk_usage", "no space: No space left on device")):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, full)
            saver.save(2, {})
            while runs.in_flight(saver):
                time.sleep(0.01)
            assert saver.failed                                  # known before anybody waits for it
            with pytest.raises(SaveError, match=rf"step_00000002 was not written: {reason}$"):
                saver.finish()
        assert [path.name for path in step_folders(tmp_path)] == ["step_00000001"]
    saver.save(2, {})
    saver.close()
    assert [path.name for path in step_folders(tmp_path)] == ["step_00000002"]


def test_space_is_asked_for_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, saver = runs.save_steps(tmp_path, (1,), close=False)
    needed = sum(file.stat().st_size for file in (tmp_path / "step_00000001").glob("*.safetensors"))
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=needed // 2))
    monkeypatch.setattr(checkpoint, "write_file", None)
    saver.save(2, {})
    with pytest.raises(SaveError, match=r"no space: it needs [\d,]+ bytes and [\d,]+ are free$"):
        saver.finish()
    saver.close()


def test_a_step_is_saved_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, _ = runs.save_steps(tmp_path, (1,))
    again = Checkpointer(tmp_path, *run)
    state = again.resume()
    assert state is not None and state.step == 1

    def never(*_: Any) -> Never:
        raise AssertionError("a complete checkpoint is not written again")

    monkeypatch.setattr(checkpoint, "write_file", never)
    again.save(1, {})
    again.close()


def test_saving_before_the_first_step_changes_nothing(tmp_path: Path) -> None:
    model, optimizer = runs.build()
    saver = Checkpointer(tmp_path, model, optimizer)
    saver.save(0, {"at": 0})
    saver.close()
    assert not optimizer.state
    runs.train(model, optimizer, range(2))
    other, fresh = runs.build(seed=5)
    assert runs.resumed(tmp_path, (other, fresh)).step == 0
    assert not fresh.state
    runs.train(other, fresh, range(2))
    runs.assert_same(runs.everything(other, fresh), runs.everything(model, optimizer))


def test_options_of_the_optimizer_are_the_new_runs_own(three: Path) -> None:
    model, optimizer = runs.build(seed=5, betas=(0.5, 0.6))
    assert runs.resumed(three, (model, optimizer)).step == 3
    assert [(group["betas"], group["lr"], group["weight_decay"]) for group in optimizer.param_groups] == [
        ((0.5, 0.6), 1e-2, 0.1), ((0.5, 0.6), 1e-2, 0.0)]


def count_after_saves(folder: str) -> tuple[int, list[tuple[int, int]]]:
    """The tensors of one save, then tensors and threads alive after each of ten saves."""
    run = runs.build()
    saver = Checkpointer(folder, *run, keep=1)
    runs.train(*run, range(1))
    counts = []
    for step in range(1, 11):
        saver.save(step, {})
        saver.finish()
        gc.collect()
        tensors = sum(issubclass(type(found), torch.Tensor) for found in gc.get_objects())
        counts.append((tensors, threading.active_count()))
    return len(runs.everything(*run)), counts


def test_many_saves_hold_on_to_nothing(tmp_path: Path) -> None:
    """What a save leaves behind adds up, ten times; what a thread that is just ending still holds does not.

    In a process of its own: other tests leave tensors behind that come and go.
    """
    code = ("import json, runpy, sys; names = runpy.run_path(sys.argv[1]); "
            "print(json.dumps(names['count_after_saves'](sys.argv[2])))")
    done = subprocess.run([sys.executable, "-c", code, __file__, str(tmp_path)], capture_output=True, text=True,
                          timeout=100)
    of_a_save, counts = json.loads(done.stdout)
    tensors, threads = zip(*counts, strict=True)
    assert of_a_save > 10 and max(tensors) - tensors[0] < 5 * of_a_save, done.stdout
    assert max(threads) <= threads[0] + 1, done.stdout


def test_bad_settings_are_one_line_before_training(three: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"checkpoint.folder = .* cannot be written"):
        Checkpointer(tmp_path / "file" / "below", *runs.build())
    with pytest.raises(ValueError, match=r"already holds step_00000003"):
        Checkpointer(three, *runs.build(), resume=False)
    with pytest.raises(ValueError, match=r"checkpoint.keep = 0"):
        Checkpointer(tmp_path, *runs.build(), keep=0)
