"""Runs do not write into each other's folders: a second one is refused, or has a folder of its own."""

import json
import logging
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Never

import pytest

from distca.cli.report import read_log
from distca.train.run_log import LOGGED_IN, OWN_NAME, FolderLock, open_log_folder

SMALL = ["--run.device", "cpu", "--run.threads", "1", "--run.ranks", "1", "--batch.tokens_per_rank", "256",
         "--data.max_document", "256"]


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FolderLock.__init__, "__defaults__", (0.1,))


@pytest.fixture
def opened() -> Iterator[list[FolderLock]]:
    """Locks to let go of."""
    locks: list[FolderLock] = []
    yield locks
    for lock in locks:
        lock.release()


def test_a_log_folder_is_one_runs_at_a_time(tmp_path: Path) -> None:
    first = open_log_folder(tmp_path / "log", None, resumed=False)
    with pytest.raises(ValueError) as refused:
        open_log_folder(tmp_path / "log", None, resumed=False)
    told = str(refused.value)
    assert told.startswith(f"log.folder = '{tmp_path / 'log'}' is in use by process {os.getpid()} on ")
    assert told.endswith("; stop that run, or name another folder") and "\n" not in told
    first.release()
    open_log_folder(tmp_path / "log", None, resumed=False).release()


def test_the_lock_of_a_run_that_was_killed_is_free(tmp_path: Path) -> None:
    script = ("import sys, time; from pathlib import Path; from distca.train.run_log import open_log_folder\n"
              "lock = open_log_folder(Path(sys.argv[1]), None, resumed=False)\n"
              "print('held', flush=True); time.sleep(60)")
    run = subprocess.Popen([sys.executable, "-c", script, str(tmp_path / "log")], stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None and run.stdout.readline() == "held\n"
    with pytest.raises(ValueError, match=f"is in use by process {run.pid} on "):
        FolderLock(tmp_path / "log", "log.folder")
    run.kill()
    run.communicate()
    FolderLock(tmp_path / "log", "log.folder").release()


def test_latest_is_the_newest_of_folders_that_no_two_runs_share(tmp_path: Path, opened: list[FolderLock],
                                                               monkeypatch: pytest.MonkeyPatch) -> None:
    latest = tmp_path / "runs" / "latest"
    monkeypatch.setattr(time, "strftime", lambda *_: "2031-02-03-040506")  # all begin in one second
    for _ in range(3):
        opened.append(open_log_folder(latest, None, resumed=False))
        assert latest.is_symlink() and latest.resolve() == opened[-1].folder
    assert [lock.folder.name for lock in opened] == [f"2031-02-03-040506{more}" for more in ("", "-2", "-3")]
    (opened[-1].folder / "steps.jsonl").write_text('{"step": 1, "loss": 2.5}\n')
    assert read_log(latest).run is not None
    assert sorted(os.listdir(latest.parent)) == [*(lock.folder.name for lock in opened), "latest"]


def test_a_resumed_run_goes_on_in_its_own_folder(tmp_path: Path) -> None:
    latest, saved = tmp_path / "runs" / "latest", tmp_path / "saved"
    saved.mkdir()
    folders = []
    for checkpoints, resumed in ((saved, False), (None, False), (saved, True), (saved, False)):
        lock = open_log_folder(latest, checkpoints, resumed=resumed)
        folders.append(lock.folder)
        lock.release()
    one, other, again, anew = folders
    assert again == one and len({one, other, anew}) == 3 and latest.resolve() == anew


@pytest.mark.parametrize("told", [b"", b"..\n", b"../elsewhere", b"/", b"\xff", b"2031-02-03-040506", b"latest", b"\0"])
def test_checkpoints_name_no_folder_but_a_runs_own(tmp_path: Path, told: bytes) -> None:
    """A folder of checkpoints may come from elsewhere."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / LOGGED_IN).write_bytes(told)
    lock = open_log_folder(tmp_path / "runs" / "latest", tmp_path, resumed=True)
    assert OWN_NAME.fullmatch(lock.folder.name) and lock.folder.parent == tmp_path / "runs"
    assert lock.folder.name.encode() != told and not os.listdir(tmp_path / "elsewhere")
    lock.release()


@pytest.mark.parametrize("kind", ["folder", "link"])
def test_a_latest_of_somebody_is_used_as_it_is(tmp_path: Path, kind: str) -> None:
    (tmp_path / "mine").mkdir()
    latest = tmp_path / "latest"
    latest.mkdir() if kind == "folder" else latest.symlink_to("mine")
    lock = open_log_folder(latest, None, resumed=False)
    assert lock.folder == latest and sorted(os.listdir(tmp_path)) == ["latest", "mine"]
    lock.release()


def test_without_links_the_run_says_where_it_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                  caplog: pytest.LogCaptureFixture) -> None:
    def refuse(*_: Any) -> Never:
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(Path, "symlink_to", refuse)
    monkeypatch.setattr(logging.getLogger("distca"), "propagate", True)
    lock = open_log_folder(tmp_path / "latest", None, resumed=False)
    assert caplog.messages == [f"{tmp_path / 'latest'} cannot be a link (Operation not permitted): this run's log is "
                               f"in {lock.folder}"]
    assert os.listdir(tmp_path) == [lock.folder.name]
    lock.release()


def _train(*more: str) -> list[str]:
    return [sys.executable, "-m", "distca", "train", *SMALL, *more]


@pytest.mark.multiprocess
def test_a_second_run_is_refused_and_the_first_ones_log_stays(tmp_path: Path) -> None:
    command = _train("--run.steps", "100000", "--log.folder", "log")
    log = tmp_path / "log" / "steps.jsonl"
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL) as first:
        try:
            while not log.exists() and first.poll() is None:
                time.sleep(0.05)
            second = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
        finally:
            first.send_signal(signal.SIGTERM)
    assert second.returncode == 2, second.stderr
    line = second.stderr.splitlines()[-1]
    assert line.startswith("distca: error: log.folder = 'log' is in use by process ")
    assert "Traceback" not in second.stderr
    steps = [json.loads(line)["step"] for line in log.read_text().splitlines()]
    assert steps == list(range(1, len(steps) + 1))
    assert not (tmp_path / "log" / "steps.1.jsonl").exists()


@pytest.mark.multiprocess
def test_runs_by_default_have_folders_of_their_own_and_resume_in_them(tmp_path: Path) -> None:
    saving, both = ("--checkpoint.folder", "saved"), ("--checkpoint.folder", "both", "--log.folder", "both")
    for steps, more in (("1", both), ("2", saving), ("1", ("--log.trace_step", "1")), ("3", saving)):
        done = subprocess.run(_train("--run.steps", steps, *more), cwd=tmp_path, capture_output=True,
                              text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        told = shlex.split(done.stdout.splitlines()[-1].partition("distca report ")[2])
        assert more == both or (tmp_path / told[0]).samefile(tmp_path / "runs" / "latest")
    first, second = sorted(path for path in (tmp_path / "runs").iterdir() if not path.is_symlink())
    assert [len((folder / "steps.jsonl").read_text().splitlines()) for folder in (first, second)] == [3, 1]
    assert (second / "step_1.json").exists() and not (first / "step_1.json").exists()
    assert f'folder = "runs/{first.name}"' in (first / "settings.toml").read_text()
