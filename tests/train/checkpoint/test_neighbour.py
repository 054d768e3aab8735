"""A checkpoint in memory outlives its processes and one host, and gives back what was saved, on any mesh."""

import errno
import logging
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from distca.runtime.transport import C10dTransport
from distca.train.checkpoint import checkpointer as checkpoint
from distca.train.checkpoint import neighbour
from distca.train.checkpoint.checkpointer import Checkpointer, SaveError
from distca.train.checkpoint.folder import MANIFEST, read_manifest, step_folders
from distca.train.checkpoint.neighbour import NeighbourCheckpoints, forget, partners
from distca.validation import UserError
from tests.support import small_runs as runs
from tests.support.processes import run_processes, values

HOSTS = {2: "ab", 4: "aabb", 3: "abc"}  # of the ranks, by their number


def opened(
    folder: str, kind: str, seed: int, num_ranks: int
) -> tuple[tuple[runs.Small, torch.optim.AdamW], NeighbourCheckpoints]:
    """A run whose ranks are on several hosts: each with a memory of its own."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    host = HOSTS[num_ranks][rank] if num_ranks > 1 else "a"
    memory = Path(folder, f"memory-{host}")
    memory.mkdir(exist_ok=True)
    pair = runs.build(kind, seed=seed)
    saver = Checkpointer(Path(folder, "saved"), *pair, timeout_seconds=30)
    return pair, NeighbourCheckpoints(saver, None, host, memory)


def ended(copies: NeighbourCheckpoints) -> None:
    """As the end of a process would, which leaves the memory as it is."""
    if copies.checkpoints._lock is not None:
        copies.checkpoints._lock.release()


def save(transport: C10dTransport, folder: str, kind: str) -> dict[str, torch.Tensor]:
    pair, copies = opened(folder, kind, 0, dist.get_world_size())
    for step in (1, 2):
        runs.train(*pair, range(step, step + 1))
        copies.save(step, {"at": step})
    runs.train(*pair, range(3, 4))                               # while the second is written: it holds copies
    copies.finish()
    runs.train(*pair, range(4, 6))
    ended(copies)
    return runs.everything(*pair)


def go_on(transport: C10dTransport, folder: str, kind: str) -> tuple[Any, dict[str, torch.Tensor]]:
    pair, copies = opened(folder, kind, 7, dist.get_world_size())
    state = copies.resume()
    assert state is not None
    runs.train(*pair, range(state.step + 1, 6))
    ended(copies)
    return (state.step, state.loader), runs.everything(*pair)


@pytest.mark.multiprocess
@pytest.mark.parametrize(("kind", "ranks", "lost"), [
    ("data", 2, ""), ("data", 2, "b"), ("plain", 2, "a"),
    *(pytest.param(kind, ranks, lost, marks=pytest.mark.slow) for kind, ranks in (("tensor", 4), ("data", 3))
      for lost in ("", "a", "b"))])
def test_a_restart_on_a_new_host_goes_on_bit_for_bit(tmp_path: Path, kind: str, ranks: int, lost: str) -> None:
    """With dropout, so that random states matter."""
    before = values(run_processes(ranks, save, str(tmp_path), kind))[0]
    if lost:
        shutil.rmtree(tmp_path / f"memory-{lost}")
    for state, after in values(run_processes(ranks, go_on, str(tmp_path), kind)):
        assert state == (2, {"at": 2})
        runs.assert_same(after, before)


def save_beside_the_disk(transport: C10dTransport, folder: str) -> tuple[int, str]:
    """Rank 0 is slow on the disk; meanwhile a checkpoint is saved in memory, the first one."""
    pair, copies = opened(folder, "data", 0, 2)
    write_file, finished = vars(checkpoint)["write_file"], threading.Event()

    def slow(path: Path, tensors: Any) -> Any:
        if dist.get_rank() == 0 and "saved" in str(path):
            assert finished.wait(20)
        return write_file(path, tensors)

    vars(checkpoint)["write_file"] = slow
    runs.train(*pair, range(1, 2))
    copies.checkpoints.save(1, {"at": 1})
    runs.train(*pair, range(2, 3))
    copies.save(2, {"at": 2})
    copies.finish()
    finished.set()
    copies.checkpoints.finish()
    state = copies.resume()
    ended(copies)
    assert state is not None
    return state.step, runs.newest(Path(folder, "saved"), runs.build()[0]).name


@pytest.mark.multiprocess
def test_saving_in_memory_and_on_disk_do_not_mix(tmp_path: Path) -> None:
    outcomes = run_processes(2, save_beside_the_disk, str(tmp_path))
    assert values(outcomes) == [(2, "step_00000001")] * 2


def whole_of(transport: C10dTransport, folder: str, kind: str) -> dict[str, torch.Tensor]:
    pair, copies = opened(folder, kind, 7, dist.get_world_size())
    assert copies.resume() is not None
    ended(copies)
    return runs.everything(*pair)


def save_two(transport: C10dTransport, folder: str, kind: str) -> dict[str, torch.Tensor]:
    pair, copies = opened(folder, kind, 0, dist.get_world_size())
    runs.train(*pair, range(1, 3))
    copies.save(2, {"at": 2})
    copies.finish()
    ended(copies)
    return runs.everything(*pair)


@pytest.mark.multiprocess
@pytest.mark.parametrize(("kind", "ranks", "fewer", "lost"), [
    ("data", 3, 2, "c"), pytest.param("tensor", 4, 2, "b", marks=pytest.mark.slow),
    pytest.param("data", 2, 4, "b", marks=pytest.mark.slow)])
def test_other_ranks_get_the_same_weights(tmp_path: Path, kind: str, ranks: int, fewer: int, lost: str) -> None:
    """One host fewer: the files of its ranks come from the neighbour."""
    before = values(run_processes(ranks, save_two, str(tmp_path), kind))[0]
    shutil.rmtree(tmp_path / f"memory-{lost}")
    for after in values(run_processes(fewer, whole_of, str(tmp_path), "data")):
        runs.assert_same(after, before)


@pytest.fixture
def one(tmp_path: Path) -> Iterator[tuple[Any, NeighbourCheckpoints]]:
    """One rank that has saved step 1 on disk and step 2 in memory."""
    pair, copies = opened(str(tmp_path), "plain", 0, 1)
    runs.train(*pair, range(1, 2))
    copies.checkpoints.save(1, {"at": 1})
    copies.checkpoints.finish()
    runs.train(*pair, range(2, 3))
    copies.save(2, {"at": 2})
    copies.finish()
    yield pair, copies
    ended(copies)


def test_the_newest_good_one_is_used(one: tuple[Any, NeighbourCheckpoints], caplog: pytest.LogCaptureFixture) -> None:
    _, copies = one
    (path,) = step_folders(copies.folder)

    def step() -> int:
        state = copies.resume()
        assert state is not None
        return state.step

    assert step() == 2
    copies.checkpoints.save(3, {"at": 3})
    copies.checkpoints.finish()
    assert step() == 3                                           # on disk
    shutil.rmtree(copies.checkpoints.folder / "step_00000003")
    copies.checkpoints.run["model.rope_theta"] = 1.0             # known to neither: no difference
    assert step() == 2
    file = path / "model-00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-5] ^= 4
    file.write_bytes(content)
    with caplog.at_level(logging.WARNING, "distca"):
        assert step() == 1
    assert f"checkpoint {path} is damaged and not used: {file.name} does not match its checksum" in caplog.text
    os.truncate(file, 10)
    assert step() == 1 and "is in the memory of no host that is left" in caplog.text
    (path / MANIFEST).unlink()
    assert step() == 1


def test_another_runs_memory_is_not_used(one: tuple[Any, NeighbourCheckpoints]) -> None:
    _, copies = one
    copies.checkpoints.save(2, {"at": 2})
    copies.checkpoints.finish()
    (path,) = step_folders(copies.folder)
    manifest = read_manifest(path)
    assert manifest.step == 2 and copies._newest() is not None
    copies.checkpoints.whole["head.weight"] = "float32 [9, 7]"
    assert copies._newest() is None


def test_only_the_newest_stays_and_nothing_after_the_end(one: tuple[Any, NeighbourCheckpoints]) -> None:
    _, copies = one
    assert copies.folder.stat().st_mode & 0o777 == 0o700
    assert (copies.checkpoints.folder / neighbour.TOKEN).stat().st_mode & 0o777 == 0o600
    copies.save(3, {"at": 3})
    copies.finish()
    assert [path.name for path in step_folders(copies.folder)] == ["step_00000003"]
    copies.close()
    assert not copies.folder.exists()


def test_forgetting_removes_what_the_token_names_and_nothing_else(one: tuple[Any, NeighbourCheckpoints],
                                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    _, copies = one
    monkeypatch.setattr(neighbour, "MEMORY", copies.folder.parent)
    token = copies.checkpoints.folder / neighbour.TOKEN
    name = token.read_text()
    for text in ("", "..", f"../{name}", f"{name}/..", "\0"):
        token.write_text(text)
        forget(token.parent)
        assert copies.folder.exists()
    token.write_text(name)
    forget(token.parent)
    assert not copies.folder.exists() and token.parent.exists()
    forget(token.parent)


def test_full_memory_names_the_remedy_and_keeps_the_last_one(one: tuple[Any, NeighbourCheckpoints],
                                                             monkeypatch: pytest.MonkeyPatch) -> None:
    _, copies = one

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(checkpoint, "write_file", full)
    copies.save(3, {"at": 3})
    with pytest.raises(SaveError, match=r"step_00000003 was not written: rank 0: no space: .*docker: --shm-size.* "
                                        "or set checkpoint.neighbour_every to 0"):
        copies.finish()
    assert [path.name for path in step_folders(copies.folder)] == ["step_00000002"]


def test_a_folder_that_others_may_enter_is_refused(one: tuple[Any, NeighbourCheckpoints]) -> None:
    _, copies = one
    copies.folder.chmod(0o755)
    with pytest.raises(UserError, match="is not a folder of this user alone; remove it"):
        NeighbourCheckpoints(copies.checkpoints, None, "a", copies.folder.parent)


def test_every_file_has_a_copy_on_the_next_host() -> None:
    assert partners(["a"]) == [None] and partners(["a", "a"]) == [None, None]
    assert partners(["a", "b"]) == [1, 0]
    assert partners(["a", "a", "b", "b", "c", "c"]) == [2, 3, 4, 5, 0, 1]
    assert partners(["a", "a", "a", "b"]) == [3, 3, 3, 0]        # hosts of different sizes
    assert partners(["a", "b", "a", "b"]) == [1, 0, 3, 2]        # ranks dealt round robin
