"""What a run writes: a folder that no two runs share, and its figures for trackers."""

import io
import json
import logging
import math
import os
import shlex
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any, Never

import pytest
from rich.console import Console

from distca.cli.report import read_log
from distca.train.display import Observer
from distca.train.run_log import LOGGED, LOGGED_IN, OWN_NAME, FolderLock, StepRecord, Tally, figures, open_log_folder
from distca.train.settings import Settings, load_settings
from distca.validation import UserError
from tests.support.training import small_run, train, train_each


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
    assert read_log(latest).figures is not None
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


def train_in(transport: Any, runs: tuple[Settings, ...]) -> list[str]:
    """Train one after the other in the folder of their data; what each run printed last, or why it was refused."""
    os.chdir(Path(runs[0].data.path).parent)
    FolderLock.__init__.__defaults__ = (0.1,)
    printed = []
    for settings in runs:
        with redirect_stdout(io.StringIO()) as out:
            try:
                train_each(transport, (settings,))
            except UserError as refused:
                out.write(f"refused: {refused}")
        printed.append(out.getvalue().splitlines()[-1])
    return printed


def in_folder(folder: Path, **values: Any) -> Settings:
    (folder / "words.txt").write_text("to be or not to be " * 100)
    return small_run(Path(values.pop("log", "runs/latest")), 1, tokens=256, data__source="text",
                     data__path=str(folder / "words.txt"), **values)


@pytest.mark.multiprocess
def test_a_second_run_is_refused_and_the_first_ones_log_stays(tmp_path: Path) -> None:
    first = open_log_folder(tmp_path / "log", None, resumed=False)
    (tmp_path / "log" / "steps.jsonl").write_text('{"step": 1, "loss": 2.5}\n')
    [[refused]] = train(in_folder(tmp_path, run__steps=1, log="log"), body=train_in)
    first.release()
    assert refused.startswith("refused: log.folder = 'log' is in use by process ")
    assert (tmp_path / "log" / "steps.jsonl").read_text() == '{"step": 1, "loss": 2.5}\n'
    assert sorted(os.listdir(tmp_path / "log")) == [".log-lock", "steps.jsonl"]


@pytest.mark.multiprocess
def test_runs_by_default_have_folders_of_their_own_and_resume_in_them(tmp_path: Path) -> None:
    [printed] = train(
        in_folder(tmp_path, run__steps=1, checkpoint__folder="both", log="both"),
        in_folder(tmp_path, run__steps=2, checkpoint__folder="saved"),
        in_folder(tmp_path, run__steps=1, log__trace_step=1),
        in_folder(tmp_path, run__steps=3, checkpoint__folder="saved"), body=train_in)
    named = [shlex.split(line.partition("distca report ")[2])[0] for line in printed]
    first, second = sorted(path for path in (tmp_path / "runs").glob("2*") if not path.is_symlink())
    assert named == ["both", f"runs/{first.name}", f"runs/{second.name}", f"runs/{first.name}"]
    assert (tmp_path / "runs" / "latest").samefile(first)
    assert [len((folder / "steps.jsonl").read_text().splitlines()) for folder in (first, second)] == [3, 1]
    assert (second / "step_1.json").exists() and not (first / "step_1.json").exists()
    assert f'folder = "runs/{first.name}"' in (first / "settings.toml").read_text()


# ---- trackers: the figures of a step by their names, and one line where that cannot be

RECORD = StepRecord(
    step=1, loss=5.5, lr=1e-3, grad_norm=2.25, tokens=8192, seconds=2.0, tokens_per_second=4096.0, work_before=1.75,
    work_after=1.05, bytes_per_layer=12.5e6, exposed_seconds=0.5, host_seconds=0.1, memory_bytes=3 * 10**9,
    plan_seconds=0.01, attention_seconds=0.8, linear_seconds=0.6, mfu=0.4, eval_loss=5.75, tolerance=0.2,
    attention_seconds_max=0.9, servers=2, faults=1, repeated_tasks=3, fault_seconds=0.25)


class FakeError(Exception):
    pass


class FakeRun:
    """What a W&B run is asked to do."""

    def __init__(self) -> None:
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.exit_code: int | None = None

    def log(self, values: dict[str, float], step: int) -> None:
        self.logged.append((step, values))

    def finish(self, exit_code: int) -> None:
        self.exit_code = exit_code


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings().with_values({"log.folder": str(tmp_path / "one"), "run.steps": 2, "log.wandb": "long-context"})


@pytest.fixture
def fake_wandb(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., Any]], None]:
    def install(init: Callable[..., Any]) -> None:
        module = types.SimpleNamespace(init=init, Error=FakeError, Settings=dict)
        monkeypatch.setitem(sys.modules, "wandb", module)

    return install


def console() -> Console:
    return Console(file=io.StringIO(), width=200, force_terminal=False, color_system=None, highlight=False)


def observed(settings: Settings, records: list[StepRecord], **close: bool) -> str:
    out = console()
    observer = Observer(settings, 0, 2, out)
    for record in records:
        observer.step(record)
    observer.close(**close)
    assert isinstance(out.file, io.StringIO)
    return out.file.getvalue()


def test_wandb_gets_every_figure_of_every_step(settings: Settings, fake_wandb: Callable[..., None]) -> None:
    asked: list[dict[str, Any]] = []
    run = FakeRun()

    def init(**options: Any) -> FakeRun:
        asked.append(options)
        return run

    fake_wandb(init)
    observed(settings, [RECORD, replace(RECORD, step=2, mfu=None)])
    (options,) = asked
    assert (options["project"], options["dir"], options["name"]) == ("long-context", settings.log.folder, "one")
    assert options["config"]["run"]["steps"] == 2 and options["settings"] == {"console": "off"}
    assert run.logged[0] == (1, {name: getattr(RECORD, name) for name in LOGGED})
    assert run.logged[1][0] == 2 and "mfu" not in run.logged[1][1] and run.logged[1][1]["attention_seconds"] == 0.8
    assert run.exit_code == 0


@pytest.mark.parametrize(("records", "stopped", "code"), [(2, False, 0), (1, True, 0), (1, False, 1), (0, False, 1)])
def test_wandb_hears_how_the_run_ended(
    settings: Settings, fake_wandb: Callable[..., None], records: int, stopped: bool, code: int
) -> None:
    run = FakeRun()
    fake_wandb(lambda **options: run)
    observed(settings, [replace(RECORD, step=step + 1) for step in range(records)], stopped=stopped)
    assert run.exit_code == code


def test_other_ranks_do_not_start_wandb(settings: Settings, fake_wandb: Callable[..., None]) -> None:
    def init(**options: Any) -> FakeRun:
        raise AssertionError("rank 1 started W&B")

    fake_wandb(init)
    assert Observer(settings, 1, 2).close() is None


def test_missing_wandb_is_one_line_that_names_the_package(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match="pip install wandb") as refused:
        Observer(settings, 0, 1, console())
    assert "log.wandb is 'long-context'" in str(refused.value) and "\n" not in str(refused.value)


def test_wandb_that_does_not_start_is_one_line(settings: Settings, fake_wandb: Callable[..., None]) -> None:
    def init(**options: Any) -> FakeRun:
        raise FakeError("api_key not configured\n(no-tty)")

    fake_wandb(init)
    with pytest.raises(ValueError, match=r"api_key not configured \(no-tty\)\); run: wandb login") as refused:
        Observer(settings, 0, 1, console())
    assert "\n" not in str(refused.value)


def test_wandb_itself_takes_a_run_offline(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed; pip install wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    observed(settings, [RECORD, replace(RECORD, step=2)])
    assert list(Path(settings.log.folder).glob("wandb/offline-run-*/*.wandb"))


@pytest.mark.parametrize(("written", "project"), [('"mine"', "mine"), ("true", "distca"), ("false", ""), ('""', "")])
def test_a_project_may_be_named_or_just_wanted(written: str, project: str, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(f"[log]\nwandb = {written}\n")
    assert load_settings(file, {}).log.wandb == project
    assert load_settings(None, {"log.wandb": written.strip('"')}).log.wandb == project


def test_what_is_unknown_is_left_out() -> None:
    assert figures(RECORD) == {name: getattr(RECORD, name) for name in LOGGED}
    assert figures(replace(RECORD, mfu=None)) == {name: getattr(RECORD, name) for name in LOGGED if name != "mfu"}


def test_the_display_says_utilization_and_shares(settings: Settings) -> None:
    plain = settings.with_values({"log.wandb": ""})
    text = observed(plain, [RECORD, replace(RECORD, step=2, seconds=6.0, mfu=0.2)])
    step = text.splitlines()[1]
    for words in ("4,096 tokens/s, MFU 40.0 %", "attention 40.0 %", "linear 30.0 %", "exposed 25.0 %"):
        assert words in step
    assert "MFU 25.0 %" in text                                  # (0.4 · 2 s + 0.2 · 6 s) / 8 s
    assert "20.0 % of the steps in attention, 15.0 % in linear layers" in text
    assert "MFU" not in observed(plain, [replace(RECORD, mfu=None)])


def test_the_last_line_says_how_to_see_the_run(settings: Settings, tmp_path: Path) -> None:
    folder = tmp_path / "with space"
    text = observed(settings.with_values({"log.wandb": "", "log.folder": str(folder)}), [RECORD])
    assert text.splitlines()[-1] == f"Its curves as a page: distca report '{folder}'"


def test_a_summary_knows_utilization_only_where_steps_do() -> None:
    tally = Tally()
    tally.add(replace(RECORD, mfu=None))
    summary = tally.summary()
    assert summary is not None and summary.mfu is None and summary.attention_share == pytest.approx(0.4)


def started_again(settings: Settings, records: list[StepRecord], count: int, age: float = 100.0) -> tuple[str, Any]:
    """Log these after restart `count`, where the last line is `age` seconds old; what was printed and summed up."""
    out = console()
    os.utime(Path(settings.log.folder) / "steps.jsonl", (time.time() - age,) * 2)
    observer = Observer(settings, 0, 2, out, restarts=count)
    for record in records:
        observer.step(record)
    summary = observer.close()
    assert isinstance(out.file, io.StringIO)
    return out.file.getvalue(), summary


def test_a_restart_counts_what_it_cost_and_the_run_is_summed_up_from_its_start(settings: Settings) -> None:
    steps = [replace(RECORD, step=step, loss=10.0 - step, tokens=100, epochs=(0.1 * step,)) for step in range(1, 8)]
    settings = settings.with_values({"run.steps": 7, "log.wandb": ""})
    assert "Finished" not in observed(settings, steps[:5], restarting=True)  # it goes on
    with (Path(settings.log.folder) / "steps.jsonl").open("a") as log:
        log.write('{"step": 6, "lo')                             # cut short by a kill
    started_again(settings, steps[3:6], 1)                       # steps 4 and 5 once more, and 6
    text, summary = started_again(settings, steps[5:], 3, age=50.0)  # and 6 once more
    assert (summary.restarts, summary.repeated_steps, summary.steps, summary.tokens) == (3, 2 + 1, 7, 700)
    assert 150 <= summary.restart_seconds < 170 and (summary.first_loss, summary.final_loss) == (9.0, 3.0)
    assert "Finished: 7 steps, 700 tokens" in text and "3, which took 2:3" in text and "repeated 3 steps" in text
    lines = [json.loads(line) for line in (Path(settings.log.folder) / "steps.jsonl").read_text().splitlines()]
    assert [(line["step"], line.get("restarts"), line.get("repeated_steps")) for line in lines] == [
        (1, None, None), (2, None, None), (3, None, None), (4, 1, 2), (5, 1, 2), (6, 3, 3), (7, 3, 3)]
    read_log(Path(settings.log.folder))                          # a report takes the log as it is


def test_a_restart_that_has_no_step_left_still_sums_up_the_run(settings: Settings) -> None:
    settings = settings.with_values({"log.wandb": ""})
    observed(settings, [replace(RECORD, step=1, loss=math.nan), replace(RECORD, step=2)], restarting=True)
    text, summary = started_again(settings, [], 1)
    assert "Finished: 2 steps" in text and (summary.restarts, summary.repeated_steps) == (1, 0)
    assert math.isnan(summary.first_loss)
