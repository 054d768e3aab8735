"""Ranks that save: any number of them goes on, after any crash, and all say what became of a save."""

from __future__ import annotations

import logging
import os
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from distca.runtime.transport.c10d import C10dTransport
from distca.train.checkpoint import checkpointer as checkpoint
from distca.train.checkpoint import folder as checkpoint_folder
from distca.train.checkpoint.checkpointer import Checkpointer
from distca.train.checkpoint.folder import step_folders
from tests.support import small_runs as runs
from tests.support.processes import run_processes, values

KILLED = 17


def save_in_flight(transport: C10dTransport, folder: str, kinds: tuple[str, str]) -> None:
    """Per kind: what was at step 3, what at step 5, trained on while the save of step 3 was in flight."""
    for kind in kinds:
        run = runs.build(kind)
        runs.train(*run, range(5))
        uninterrupted = runs.everything(*run)
        run = runs.build(kind)
        saver = Checkpointer(Path(folder) / kind, *run)
        assert saver.resume() is None
        runs.train(*run, range(3))
        at_save = runs.everything(*run)
        with pytest.MonkeyPatch.context() as patch:
            gate = runs.Gate(patch)
            saver.save(3, {"epoch": 1, "index": [7]})
            assert runs.in_flight(saver) and not list(Path(folder).glob(f"{kind}/*/{checkpoint_folder.MANIFEST}"))
            runs.train(*run, range(3, 5))
            dist.barrier()
            assert runs.in_flight(saver)
            gate.open.set()
            saver.close()
        assert not runs.in_flight(saver)
        runs.assert_same(runs.everything(*run), uninterrupted)
        if transport.rank == 0:
            torch.save((at_save, uninterrupted), f"{folder}/{kind}.pt")


def resume_each(transport: C10dTransport, folders: list[str], kinds: tuple[str, str], into: str) -> None:
    """Per folder and kind: what is returned, all tensors as loaded and, where the same ranks saved, two steps later."""
    for number, folder in enumerate(folders):
        for kind in kinds:
            run = runs.build(kind, seed=5)
            state = runs.resumed(folder, run)
            loaded = runs.everything(*run)
            later = None
            if state.num_ranks == transport.size and Path(folder).name == kind:
                runs.train(*run, range(3, 5))
                later = runs.everything(*run)
            if transport.rank == 0:
                torch.save((asdict(state), loaded, later), f"{into}/{number}_{kind}.pt")


Saved = dict[str, tuple[int, str, dict[str, torch.Tensor], dict[str, torch.Tensor]]]
KINDS = {1: ("plain", "data"), 2: ("plain", "data"), 4: ("data", "tensor")}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """folder -> (ranks, kind, tensors at the save, tensors two steps later)"""
    found: Saved = {}
    for ranks, kinds in KINDS.items():
        folder = tmp_path_factory.mktemp(f"ranks_{ranks}")
        values(run_processes(ranks, save_in_flight, str(folder), kinds, timeout_seconds=60, deadline_seconds=120))
        found |= {str(folder / kind): (ranks, kind, *torch.load(folder / f"{kind}.pt")) for kind in kinds}
    return found


@pytest.mark.multiprocess
@pytest.mark.parametrize("ranks", KINDS)
def test_any_number_of_ranks_goes_on_and_the_same_number_bit_for_bit(saved: Saved, ranks: int, tmp_path: Path) -> None:
    values(run_processes(ranks, resume_each, list(saved), KINDS[ranks], str(tmp_path), timeout_seconds=60,
                         deadline_seconds=120))
    num_exact = 0
    for kind in KINDS[ranks]:
        for number, (saved_by, saved_as, at_save, uninterrupted) in enumerate(saved.values()):
            state, loaded, later = torch.load(tmp_path / f"{number}_{kind}.pt")
            assert state == {"step": 3, "loader": {"epoch": 1, "index": [7]}, "num_ranks": saved_by}
            runs.assert_same(loaded, at_save)
            if (saved_by, saved_as) == (ranks, kind):
                runs.assert_same(later, uninterrupted)
                num_exact += 1
    assert num_exact == len(KINDS[ranks])


def die_at(stage: str, patch: pytest.MonkeyPatch) -> None:
    """End the process inside the next save."""
    def end(*_: Any, **__: Any) -> None:
        os._exit(KILLED)

    if stage == "nothing written":
        patch.setattr(checkpoint, "write_file", end)
    elif stage == "data written":
        patch.setattr(checkpoint, "tensor_table", end)
    elif stage == "manifest written but not in place":
        patch.setattr(Path, "rename", end)
    elif stage == "old ones half removed":
        patch.setattr(shutil, "rmtree", end)


def crash(transport: C10dTransport, folder: str, stage: str, victim: int) -> None:
    run = runs.build("data")
    saver = Checkpointer(folder, *run, keep=1)
    runs.train(*run, range(1))
    saver.save(1, {"at": 1})
    saver.finish()
    runs.train(*run, range(1, 2))
    dist.barrier()
    with pytest.MonkeyPatch.context() as patch:
        if transport.rank == victim:
            die_at(stage, patch)
        saver.save(2, {"at": 2})
        saver.finish()


def resume_and_save(transport: C10dTransport, folder: str) -> tuple[int, dict[str, int]]:
    run = runs.build("data", seed=5)
    saver = Checkpointer(folder, *run, keep=1)
    begun = saver.resume()
    assert begun is not None
    runs.train(*run, range(begun.step, 3))
    for step in (2, 3):
        saver.save(step, {"at": step})
    saver.finish()
    return begun.step, begun.loader


@pytest.mark.multiprocess
@pytest.mark.parametrize(("ranks", "stage", "good_step"), [
    (1, "nothing written", 1), (2, "data written", 1),
    (1, "manifest written but not in place", 1), (1, "old ones half removed", 2)])
def test_killed_while_saving(tmp_path: Path, caplog: pytest.LogCaptureFixture, ranks: int, stage: str,
                             good_step: int) -> None:
    outcomes = run_processes(ranks, crash, str(tmp_path), stage, 0)
    assert outcomes[0].exit_code == KILLED
    for other in outcomes[1:]:
        assert other.error is not None
        assert other.error.startswith("SaveError: checkpoint ") and "was not written" in other.error
        assert "\n" not in other.error and other.seconds < 15
    assert [path.name for path in step_folders(tmp_path)] == ["step_00000001", "step_00000002"]
    with caplog.at_level(logging.WARNING, "distca"):
        assert runs.resumed(tmp_path, runs.build()).step == good_step
    warned = [record.getMessage() for record in caplog.records]
    assert len(warned) == (good_step == 1)
    assert all("step_00000002 is torn and not used: it has no manifest.json" in line for line in warned)

    begun = values(run_processes(ranks, resume_and_save, str(tmp_path)))[0]
    assert begun == (good_step, {"at": good_step})
    assert [path.name for path in step_folders(tmp_path)] == ["step_00000003"]
    assert runs.newest(tmp_path).name == "step_00000003"


def die_while_both_write(transport: C10dTransport, folder: str) -> None:
    """Rank 1 dies while both ranks write; rank 0 is told."""
    model, optimizer = runs.build("data")
    saver = Checkpointer(folder, model, optimizer)
    saver.save(1, {})
    saver.finish()
    with pytest.MonkeyPatch.context() as patch:
        if transport.rank == 1:
            die_at("nothing written", patch)
        saver.save(2, {})
        saver.finish()


@pytest.mark.multiprocess
def test_a_rank_that_dies_while_saving_is_reported_by_the_others(tmp_path: Path) -> None:
    outcomes = run_processes(2, die_while_both_write, str(tmp_path))
    assert outcomes[1].exit_code == KILLED
    assert "step_00000002 was not written" in (outcomes[0].error or "")
    assert runs.newest(tmp_path).name == "step_00000001"


def disagree(transport: C10dTransport, folder: str) -> list[str]:
    """Ranks that see different folders, and one that cannot write; neither leaves anything behind."""
    errors = []
    for mine in (f"{folder}/{transport.rank}", f"{folder}/shared" if transport.rank == 0 else f"{folder}/file/below"):
        if transport.rank == 0:
            Path(folder, "file").touch()
        dist.barrier()
        with pytest.raises(ValueError) as caught:
            Checkpointer(mine, *runs.build("data"))
        errors.append(str(caught.value))
    return errors


@pytest.mark.multiprocess
def test_ranks_that_do_not_share_a_folder_are_refused_in_one_line(tmp_path: Path) -> None:
    answers = values(run_processes(2, disagree, str(tmp_path)))
    for rank, (apart, unwritable) in enumerate(answers):
        assert f"{tmp_path}/{rank}" in apart and "another folder on rank 1" in apart and "share" in apart
        assert unwritable == answers[0][1] and f"{tmp_path}/file/below" in unwritable and "\n" not in unwritable
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "file"]
