"""What leaves a run besides its log: the figures of a step by their names, and one line where that cannot be."""

import io
import sys
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from distca.train.display import Observer
from distca.train.run_log import LOGGED, StepRecord, Tally, figures
from distca.train.settings import Settings, load_settings

RECORD = StepRecord(
    step=1, loss=5.5, lr=1e-3, grad_norm=2.25, tokens=8192, seconds=2.0, tokens_per_second=4096.0, work_before=1.75,
    work_after=1.05, bytes_per_layer=12.5e6, exposed_seconds=0.5, host_seconds=0.1, memory_bytes=3 * 10**9,
    plan_seconds=0.01, attention_seconds=0.8, linear_seconds=0.6, mfu=0.4, eval_loss=5.75, tolerance=0.2,
    attention_seconds_max=0.9)


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
