"""What a person sees: lines, a panel, a log with one curve, a summary whose figures are the records'."""

import io
import json
import math
import sys
import types
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from distca.train.display import BARS, Observer, clock, curve, size
from distca.train.run_log import RunSummary, StepRecord, Tally
from distca.train.settings import Settings, load_settings

RECORD = StepRecord(
    step=1, loss=5.5, lr=1e-3, grad_norm=2.25, tokens=8192, seconds=2.0, tokens_per_second=4096.0, work_before=1.75,
    work_after=1.05, bytes_per_layer=12.5e6, exposed_seconds=0.5, host_seconds=0.1, memory_bytes=3 * 10**9,
    plan_seconds=0.01)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings().with_values({"log.folder": str(tmp_path / "runs" / "one"), "run.steps": 4})


def _console(terminal: bool = False) -> Console:
    return Console(file=io.StringIO(), width=100, force_terminal=terminal, color_system=None, highlight=False)


def _text(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def _steps(settings: Settings) -> list[dict[str, float | None]]:
    lines = (_folder(settings) / "steps.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def _folder(settings: Settings) -> Path:
    return Path(settings.log.folder)


def _four() -> list[StepRecord]:
    """Four steps whose means are easy to say."""
    return [replace(RECORD, step=step, loss=6.0 - step, seconds=float(step), tokens_per_second=8192 / step,
                    exposed_seconds=0.1 * step, host_seconds=0.0, work_before=1.0 + step, work_after=1.0,
                    bytes_per_layer=1e6 * step, memory_bytes=step * 10**9) for step in (1, 2, 3, 4)]


def _observed(settings: Settings, records: list[StepRecord], console: Console, **close: bool) -> RunSummary | None:
    observer = Observer(settings, 0, 2, console)
    for record in records:
        observer.step(record)
    return observer.close(**close)


@pytest.mark.parametrize(("every", "shown"), [(1, [1, 2, 3, 4]), (2, [2, 4]), (3, [3, 4]), (100, [4])])
def test_without_a_terminal_there_is_a_line_every_so_many_steps(settings: Settings, every: int,
                                                                shown: list[int]) -> None:
    console = _console()
    _observed(settings.with_values({"log.every": every}), _four(), console)
    lines = [line for line in _text(console).splitlines() if line.startswith("step")]
    assert [int(line.split()[1].partition("/")[0]) for line in lines] == shown
    last = lines[-1]
    for words in ("step 4/4", "loss 2.0000", "2,048 tokens/s", "work 5.00→1.00", "4 MB/layer", "exposed 10.0 %",
                  "memory 4 GB", "norm 2.25", "lr 1.00e-03"):
        assert words in last
    assert "\x1b" not in _text(console)


def test_in_a_terminal_the_panel_shows_the_same_figures_and_is_closed(settings: Settings) -> None:
    console = _console(terminal=True)
    observer = Observer(settings, 0, 2, console)
    observer.step(replace(RECORD, step=3))
    observer.close(stopped=True)
    text = _text(console)
    for words in ("step 3/4", "5.5000", "4,096 tokens/s", "1.75 → 1.05", "12.5 MB a layer", "25.0 % of the step",
                  "3 GB", "tiny on 2 ranks, 8,192 tokens a step", "attention disaggregated"):
        assert words in text
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1  # the cursor comes back
    assert "step 3/4  loss" not in text


def test_the_summary_states_what_the_run_came_to(settings: Settings) -> None:
    console = _console()
    summary = _observed(settings, _four(), console)
    assert summary is not None
    assert (summary.steps, summary.last_step, summary.tokens) == (4, 4, 4 * 8192)
    assert summary.seconds == pytest.approx(10) and summary.tokens_per_second == pytest.approx(4 * 8192 / 10)
    assert (summary.first_loss, summary.final_loss) == (5.0, 2.0)
    assert summary.work_before == pytest.approx((2 + 3 + 4 + 5) / 4) and summary.work_after == pytest.approx(1)
    assert summary.bytes_per_layer == pytest.approx(2.5e6) and summary.exposed_share == pytest.approx(0.1)
    assert summary.memory_bytes == 4 * 10**9 and summary.work_gain == pytest.approx(3.5)
    text = _text(console)
    for words in ("Finished: 4 steps, 32,768 tokens", "0:10 in steps", "5.0000 → 2.0000", "3,277 tokens/s",
                  "3.50 → 1.00", "3.50 times less", "2.5 MB a layer", "10.0 % of the steps", "4 GB at most",
                  settings.log.folder):
        assert words in text
    saved = json.loads((_folder(settings) / "summary.json").read_text())
    assert saved["ended"] == "Finished" and {name: saved.get(name) for name in asdict(summary)} == asdict(summary)


@pytest.mark.parametrize(("records", "stopped", "words"), [
    (4, True, "Finished"), (2, True, "Stopped after step 2 of 4"), (2, False, "Ended early after step 2 of 4"),
    (0, True, "Stopped before the first step"), (0, False, "No step was left"),
])
def test_the_summary_says_how_the_run_ended(settings: Settings, records: int, stopped: bool, words: str) -> None:
    console = _console()
    summary = _observed(settings, _four()[:records], console, stopped=stopped)
    assert words in _text(console) and (summary is None) is (records == 0)


@pytest.mark.parametrize("terminal", [False, True])
def test_faults_are_counted_where_people_look(settings: Settings, terminal: bool) -> None:
    """A line per step that lost some, whatever log.every says; the panel and the summary add them up."""
    lost: list[dict[str, Any]] = [{"faults": count, "repeated_tasks": 4 * count, "fault_seconds": 0.25 * count}
                                  for count in (1, 0, 2)]
    console = _console(terminal)
    summary = _observed(settings.with_values({"log.every": 100}),
                        [replace(RECORD, step=at, servers=3 - at, **one) for at, one in enumerate(lost, 1)], console)
    assert summary is not None
    assert (summary.faults, summary.repeated_tasks, summary.fault_seconds) == (3, 12, 0.75)
    *shown, ended = _text(console).split("Ended early after step 3 of 4")
    assert "3 servers, 12 tasks repeated, 0.75 s" in ended
    if terminal:
        assert "0 serve" in shown[0] and "3 servers, 12 tasks repeated, 0.75 s" in shown[0]
    else:
        lines = [line for line in shown[0].splitlines() if line.startswith("step")]
        assert [line.split()[1] for line in lines] == ["1/4", "3/4"]
        assert "lost: 1 server, 4 tasks repeated, 0.25 s  " in lines[0] and "lost: 2 servers, 8 tasks" in lines[1]
    console = _console(terminal)
    _observed(settings.with_values({"log.folder": f"{settings.log.folder}-calm"}), _four(), console)
    assert "tasks repeated" not in _text(console) and " serve" not in _text(console)


def test_balance_that_gained_nothing_is_not_praised(settings: Settings) -> None:
    console = _console()
    _observed(settings, [replace(RECORD, work_before=1.5, work_after=1.5)], console)
    assert "nothing to gain" in _text(console) and "times less" not in _text(console)


def test_attention_at_home_is_told_what_balancing_would_gain(settings: Settings) -> None:
    console = _console()
    at_home = settings.with_values({"attention.mode": "home"})
    _observed(at_home, [replace(RECORD, work_before=1.5, work_after=1.5)], console)
    assert "attention.mode disaggregated would make it up to 1.50 times less" in _text(console)


def test_the_log_holds_every_step_and_the_settings(settings: Settings) -> None:
    _observed(settings.with_values({"log.every": 50}), _four(), _console())
    assert [replace(RECORD, **cast(dict[str, Any], step)) for step in _steps(settings)] == _four()
    assert load_settings(_folder(settings) / "settings.toml", {}) == settings.with_values({"log.every": 50})


def test_a_resumed_run_continues_the_curve_and_nothing_logged_is_erased(settings: Settings) -> None:
    log = _folder(settings) / "steps.jsonl"
    _observed(settings, _four()[:3], _console())
    first = log.read_bytes()
    _observed(settings, _four()[3:], _console())
    assert log.read_bytes().startswith(first) and len(_steps(settings)) == 4  # goes on: only appended to
    assert [path.name for path in log.parent.glob("steps*")] == ["steps.jsonl"]
    with log.open("a") as file:
        file.write('{"step": 5, "lo')  # torn by a crash
    whole = log.read_bytes()
    _observed(settings, [replace(RECORD, step=3, loss=9.0)], _console())
    assert [(one["step"], one["loss"]) for one in _steps(settings)] == [(1, 5.0), (2, 4.0), (3, 9.0)]
    resumed = log.read_bytes()
    _observed(settings, [RECORD], _console())
    assert [one["step"] for one in _steps(settings)] == [1]
    assert [log.with_name(f"steps.{number}.jsonl").read_bytes() for number in (1, 2)] == [whole, resumed]


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"[" * 100_000, b'{"step": 1e999}\n', b"[1]\n", b'{"step": 0}'])
def test_a_log_that_is_none_is_kept_aside(settings: Settings, content: bytes) -> None:
    log = _folder(settings) / "steps.jsonl"
    log.parent.mkdir(parents=True)
    log.write_bytes(content)
    _observed(settings, [RECORD], _console())
    assert [one["step"] for one in _steps(settings)] == [1]
    assert log.with_name("steps.1.jsonl").read_bytes() == content


def test_a_loss_that_is_no_number_is_still_json(settings: Settings) -> None:
    console = _console()
    _observed(settings, [replace(RECORD, loss=math.nan), replace(RECORD, step=2, grad_norm=math.inf)], console)
    text = (_folder(settings) / "steps.jsonl").read_text()
    assert "NaN" not in text and "Infinity" not in text
    assert [one["loss"] for one in _steps(settings)] == [None, 5.5]
    assert "loss nan" in _text(console)
    saved = (_folder(settings) / "summary.json").read_text()
    assert json.loads(saved)["first_loss"] is None and "NaN" not in saved


def test_other_ranks_are_silent(settings: Settings, capsys: pytest.CaptureFixture[str]) -> None:
    observer = Observer(settings, 1, 2)
    observer.step(RECORD)
    assert observer.close() is None
    assert capsys.readouterr().out == "" and not _folder(settings).exists()


def test_tensorboard_gets_the_figures(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    written, closed = [], []

    class SummaryWriter:
        def __init__(self, folder: str) -> None:
            assert folder == settings.log.folder

        def add_scalar(self, name: str, value: float, step: int) -> None:
            written.append((name, value, step))

        def close(self) -> None:
            closed.append(True)

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", types.SimpleNamespace(SummaryWriter=SummaryWriter))
    _observed(settings.with_values({"log.tensorboard": True}), _four(), _console())
    assert ("loss", 3.0, 3) in written and ("work_after", 1.0, 4) in written and closed == [True]
    assert {step for _, _, step in written} == {1, 2, 3, 4}


def test_missing_tensorboard_is_one_line(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ValueError, match="pip install tensorboard") as refused:
        Observer(settings.with_values({"log.tensorboard": True}), 0, 1, _console())
    assert "\n" not in str(refused.value)


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=60))
def test_tally_is_the_mean_over_records(values: list[float]) -> None:
    tally = Tally()
    for step, value in enumerate(values, start=1):
        tally.add(replace(RECORD, step=step, seconds=value, exposed_seconds=value / 4, work_before=value))
    summary = tally.summary()
    assert summary is not None
    assert summary.work_before == pytest.approx(sum(values) / len(values))
    assert summary.exposed_share == pytest.approx(0.25)
    assert summary.tokens_per_second == pytest.approx(8192 * len(values) / sum(values))


@given(st.lists(st.one_of(st.floats(-1e6, 1e6), st.just(math.nan), st.just(math.inf)), max_size=50))
def test_curve_is_as_long_as_its_values_and_keeps_their_order(values: list[float]) -> None:
    drawn = curve(values)
    assert len(drawn) == len(values)
    finite = [(value, bar) for value, bar in zip(values, drawn, strict=True) if math.isfinite(value)]
    assert all(bar in BARS for _, bar in finite) and drawn.count(" ") == len(values) - len(finite)
    heights = [BARS.index(bar) for _, bar in sorted(finite)]
    assert heights == sorted(heights)


@pytest.mark.parametrize(("number", "text"), [
    (0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (12.5e6, "12.5 MB"), (123_456_789, "123 MB"), (4.2e9, "4.2 GB"),
    (5e12, "5 TB"), (7.3e15, "7300 TB"),
])
def test_sizes_are_readable(number: float, text: str) -> None:
    assert size(number) == text


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0:00"), (61, "1:01"), (3599.6, "1:00:00"), (7322, "2:02:02")])
def test_times_are_readable(seconds: float, text: str) -> None:
    assert clock(seconds) == text


@pytest.mark.parametrize("terminal", [False, True])
def test_a_held_out_loss_is_shown_logged_and_kept(
    terminal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scalars = []

    class SummaryWriter:
        def __init__(self, folder: str) -> None: ...

        def add_scalar(self, name: str, value: float, step: int) -> None:
            if name == "eval_loss":
                scalars.append((value, step))

        def close(self) -> None: ...

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", types.SimpleNamespace(SummaryWriter=SummaryWriter))
    output = io.StringIO()
    console = Console(file=output, width=100, force_terminal=terminal, color_system=None, highlight=False)
    settings = Settings().with_values({"log.folder": str(tmp_path), "run.steps": 3, "log.every": 10,
                                       "log.tensorboard": True})
    observer = Observer(settings, 0, 2, console)
    for record in (RECORD, replace(RECORD, step=2, eval_loss=4.25), replace(RECORD, step=3)):
        observer.step(record)
    summary = observer.close()
    assert summary is not None and summary.eval_loss == 4.25
    said = output.getvalue()
    assert ("4.2500 at step 2" if terminal else "step 2/3  loss 5.5000  held out 4.2500  lr") in said
    assert "held out        4.2500 at the last evaluation" in said
    assert "step 1/3" not in said                                # evaluations are always told, steps by log.every
    logged = [json.loads(line).get("eval_loss") for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert logged == [None, 4.25, None] and scalars == [(4.25, 2)]
    assert json.loads((tmp_path / "summary.json").read_text())["eval_loss"] == 4.25


def test_a_resumed_run_counts_as_one(settings: Settings) -> None:
    """Two starts leave the summary of one: every figure but the time outside steps."""
    whole = _observed(settings, _four(), _console())
    assert whole is not None
    parted = settings.with_values({"log.folder": str(_folder(settings).with_name("two"))})
    _observed(parted, _four()[:2], _console(), stopped=True)
    console = _console()
    again = _observed(parted, _four()[2:], console)
    assert again == whole
    assert "This run goes on after step 2 of 4." in _text(console)
    assert "Finished: 4 steps, 32,768 tokens" in _text(console)
    assert json.loads((_folder(parted) / "summary.json").read_text())["steps"] == 4


def test_a_killed_run_counts_from_its_log(settings: Settings) -> None:
    """No summary was written, and steps that it logged beyond its checkpoint are taken again."""
    killed = Observer(settings, 0, 2, _console())
    for record in _four()[:3]:
        killed.step(replace(record, loss=9.0 if record.step == 3 else record.loss, eval_loss=None, epochs=(0.5, 0.25)))
    assert killed.log is not None
    killed.log.close()
    summary = _observed(settings, _four()[2:], _console())
    assert summary is not None and (summary.steps, summary.first_loss) == (4, 5.0)
    assert summary.seconds == pytest.approx(10)
    assert json.loads((_folder(settings) / "summary.json").read_text())["wall_seconds"] >= 1 + 2


def test_records_of_another_version_are_passed_over(settings: Settings) -> None:
    _folder(settings).mkdir(parents=True)
    (_folder(settings) / "steps.jsonl").write_text('{"step": 1, "loss": 3.0}\n')
    summary = _observed(settings, _four()[1:], _console())
    assert summary is not None and summary.steps == 3


def test_more_of_a_finished_run_says_so(settings: Settings) -> None:
    _observed(settings.with_values({"run.steps": 2}), _four()[:2], _console())
    console = _console()
    _observed(settings, _four()[2:], console)
    assert ("This run had finished its 2 steps. It goes on to step 4, with learning rates of a schedule of 4 steps."
            in _text(console))
    console = _console()
    _observed(settings.with_values({"checkpoint.folder": "saved"}), [], console)
    assert "the newest checkpoint in 'saved' has all 4 of run.steps. For more, give --run.steps 8;" in _text(console)


def test_the_panel_goes_on_with_the_curve_and_the_time(settings: Settings) -> None:
    _observed(settings, _four()[:3], _console(), stopped=True)
    summary = _folder(settings) / "summary.json"
    summary.write_text(json.dumps(json.loads(summary.read_text()) | {"wall_seconds": 7200.0}))
    console = _console(terminal=True)
    _observed(settings, _four()[3:], console)
    assert f"loss            2.0000  {curve([5.0, 4.0, 3.0, 2.0])}" in _text(console)
    assert "2:00:0" in _text(console).partition("about")[0] and "2:00:0" in _text(console).partition("Finished")[2]


@pytest.mark.parametrize("terminal", [False, True])
def test_memory_is_what_is_held_now_beside_the_peak(settings: Settings, terminal: bool) -> None:
    console = _console(terminal=terminal)
    observer = Observer(settings.with_values({"log.every": 1}), 0, 2, console)
    observer.step(replace(RECORD, memory_now_bytes=2 * 10**9))
    observer.close()
    assert "3 GB at the peak, 2 GB now" in _text(console)
    assert _steps(settings)[0]["memory_now_bytes"] == 2e9


def test_a_narrow_terminal_cuts_no_name(settings: Settings) -> None:
    chosen = settings.with_values({"attention.dedicated": 2, "parallel.pipeline": 2, "batch.tokens_per_rank": 2**20})
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None, highlight=False)
    observer = Observer(chosen, 0, 10, console)
    observer.step(RECORD)
    observer.close()
    text = _text(console)
    assert "…" not in text and "10 ranks in 2 stages, 2 of them only serving attention" in text
    assert "tokens a step, attention disaggregated" in " ".join(text.replace("│", " ").split())


def test_the_end_names_the_export_of_what_was_saved(settings: Settings) -> None:
    console = _console()
    _observed(settings.with_values({"checkpoint.folder": "my folder"}), _four(), console)
    *_, export, report = _text(console).splitlines()
    assert export.endswith("distca export 'my folder' my-model") and "distca report " in report
