"""Whatever a user, or a file from elsewhere, gives a command: one line, exit code 2, little time and memory."""

from __future__ import annotations

import json
import os
import pickle
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Never

import check_paper
import pytest
from typer.main import get_command

import distca
from distca import cli
from tests.support import hostile_files as files

ROOT = Path(distca.__file__).parents[1]
MAX_SECONDS = 5.0            # of the processor's time
MAX_BYTES = 2**30
DIGITS, ESCAPE = files.DIGITS, files.ESCAPE
NO_WHOLE = ("-1", "1.5", "x", "", "nan", "inf", "1e9", files.TOO_MANY_DIGITS, ESCAPE)
NO_NAMES = ("", "x" * 10_000, ESCAPE, "../..", "llama3-8b\n", "\u202egpj")
CONTENT: dict[str, dict[str, bytes]] = {}
NO_PAGES = ("no/x.html", "x.txt", "folder.html", "", "\x1b[2J.html", "/proc/x.html")


def _each(command: tuple[str, ...], option: str, values: Iterable[str]) -> list[tuple[str, ...]]:
    return [(*command, option, value) for value in values]


def option_cases() -> list[tuple[str, ...]]:
    plan, simulate, report = ("plan", "prolong"), ("simulate", "--workers", "1", "--batches", "1"), ("report", "log")
    profile, paper, train = ("profile", "--device", "cpu"), ("paper", "--quick", "--no-plots"), ("train",)
    cases: list[tuple[str, ...]] = []
    more: tuple[str, ...]
    for option, more in (("--ranks", ("0", "1000000000", "1000000", DIGITS)), ("--tp", ("0", "3", DIGITS)),
                         ("--tokens-per-rank", ("0", "999999999999", DIGITS)), ("--max-document", ("0",)),
                         ("--dedicated", ("999999999999", DIGITS)), ("--seed", ())):
        cases += _each(plan, option, (*NO_WHOLE, *more))
    cases += _each(plan, "--tolerance", ("-1", "2", "nan", "inf", "x", "1e308", ""))
    for option in ("--model", "--placement", "--cost"):
        cases += _each(plan, option, NO_NAMES)
    cases += _each(plan, "--html", NO_PAGES) + _each(plan, "--plot", ("no/x.png", "x.txt", "folder.png", ""))
    cases += [("plan", name) for name in (*NO_NAMES, "/proc/self/mem", "/dev/zero", "/", "loop", "no\x00name")]
    cases += [(*plan, "--ranks", "65536", "--max-document", "1"), (*plan, "--no-spanning", "--tokens-per-rank", "600")]
    for option, more in (("--gpus", ("0", "8000000000", DIGITS)), ("--tp", ("0", "3", DIGITS)),
                         ("--context", ("0", "1048576", DIGITS)), ("--sequences", ("0", "1000000000000", DIGITS)),
                         ("--pp", ("0", "1,", "1,x", "33", DIGITS)), ("--batches", ("0", "1000000000000", DIGITS)),
                         ("--micro-batches", ("0", "1000000000000", "1,1000000000000", DIGITS)), ("--seed", ()),
                         ("--workers", ("0", "1000000", DIGITS))):
        cases += _each(simulate, option, (*NO_WHOLE, *more))
    for option in ("--model", "--cluster", "--cost", "--strategies", "--data"):
        cases += _each(simulate, option, NO_NAMES)
    cases += _each(simulate, "--html", NO_PAGES) + _each(simulate, "--trace", ("no/x.json", "folder.html"))
    cases += _each(report, "--out", NO_PAGES) + _each(report, "--step", (*NO_WHOLE, "7", DIGITS))
    cases += _each(report, "--predicted", ("none.json", "folder.html", "loop", "/dev/zero", "log/steps.jsonl"))
    cases += [("report", name) for name in ("none", "empty", "loop", "no\x00name", ESCAPE)]
    for option, more in (("--ranks", ("0", "1", "100000", DIGITS)), ("--tp", ("0", "3", DIGITS)),
                         ("--max-kv-len", ("0", "128", "99999999999999", DIGITS))):
        cases += _each(profile, option, (*NO_WHOLE, *more))
    for option in ("--model", "--kernel", "--device"):
        cases += _each(profile, option, NO_NAMES)
    for option in ("--ranks", "--timeout-seconds"):
        cases += _each(("doctor", "--device", "cpu"), option, (*NO_WHOLE, "0", DIGITS))
    cases += _each(("doctor",), "--device", NO_NAMES)
    served = ("serve", "--join", "127.0.0.1:9")
    cases += _each(("serve",), "--join", (*NO_NAMES, "host", ":9", "host:0", "host:99999", "host:" + DIGITS))
    cases += _each(served, "--device", NO_NAMES) + _each(served, "--patience", ("-1", "nan", "x", ""))
    cases += _each((*served, "--patience", "0"), "--secret-file", ("none", "/dev/zero", "folder.html", "text"))
    cases += [(*served, "--patience", "0")]                      # no secret
    cases += _each(profile, "--output", ("no/x.json", "folder.html", "/proc/x.json"))
    for option in ("--batches", "--workers"):
        cases += _each(paper, option, (*NO_WHOLE, "0", "1000000000000", DIGITS))
    cases += _each(paper, "--only", NO_NAMES)
    cases += [command for name in (*NO_NAMES, "none", "empty", "loop", "/proc", "text", "no\x00name")
              for command in (("checkpoint", "verify", name), ("checkpoint", "convert", name), ("export", name, "out"))]
    return cases + train_cases(train) + [("", ), ("plam",), ("plan",), ("--bogus",), ("train", "a.toml", "b.toml")]


def train_cases(train: tuple[str]) -> list[tuple[str, str, str]]:
    cases = []
    for name in ("run.ranks", "run.steps", "run.timeout_seconds", "run.threads", "batch.micro_batches", "data.seed",
                 "batch.tokens_per_rank", "parallel.tensor", "parallel.pipeline", "checkpoint.keep", "log.trace_step",
                 "model.hidden", "model.layers", "model.kv_heads", "model.vocab"):
        cases += _each(train, f"--{name}", (*NO_WHOLE, "1" + "0" * 18, DIGITS))
    for name in ("optimizer.lr", "optimizer.clip_norm", "model.rope_theta", "attention.tolerance"):
        cases += _each(train, f"--{name}", ("-1", "x", "", "nan", "inf", "1e308", DIGITS, ESCAPE))
    for name in ("run.device", "run.dtype", "model.name", "data.source", "attention.mode", "attention.kernel"):
        cases += _each(train, f"--{name}", NO_NAMES)
    for name in ("log.folder", "checkpoint.folder"):
        cases += _each(train, f"--{name}", ("/proc", "/proc/1/x", "folder.html/../text/x", "/dev/null/x", "no\x00name"))
    cases += _each(train, "--attention.cost", [name for name in NO_NAMES if name])
    cases += _each(train, "--data.mix", ("x", "a:b", ":", ",", "a.jsonl:nan", f"a.jsonl:{DIGITS}", f"{ESCAPE}.jsonl:1",
                                         "none.jsonl:1,loop:2", "text:1"))
    return [*cases, *((*train, *more) for more in (("--ranks", "100000"), ("--log.folder", "no_text"), ("--bogus", "1"),
                                                   ("--run.steps",)))]


def file_cases() -> list[tuple[str, str, str, tuple[str, ...]]]:
    """Every hostile file, to every command that reads its kind."""
    kinds = (
        (files.documents, "json", (("plan",), ("simulate", "--workers", "1", "--data"), ("report", "--plan"))),
        (files.traces, "json", (("report",), ("report", "--predicted"))),
        (files.logs, "jsonl", (("report",),)),
        (files.summaries, "json", (("report",),)),
        (files.tables, "json", (("plan", "prolong", "--cost"), ("simulate", "--workers", "1", "--cost"),
                                ("train", "--attention.cost"))),
        (files.clusters, "toml", (("simulate", "--workers", "1", "--cluster"),)),
        (files.settings, "toml", (("train",),)),
        (files.configs, "model", (("train", "--model.load"),)),
        (files.configs, "json", (("train", "--model.config"),)),
    )
    CONTENT.update({kind.__name__: kind() for kind, _, _ in kinds})
    return [(kind.__name__, name, suffix, command) for kind, suffix, commands in kinds
            for name in CONTENT[kind.__name__] for command in commands]


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is refused is refused before ranks or workers are started."""
    def started(*_: Any) -> Never:
        raise AssertionError("something was started")

    monkeypatch.setattr("distca.train.launch._LocalRanks", started)
    monkeypatch.setattr("torch.multiprocessing.spawn", started)
    monkeypatch.setattr("concurrent.futures.ProcessPoolExecutor", started)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where there is something to trip over."""
    folder = tmp_path_factory.mktemp("hostile") / "in" / "here"  # other tests' files are not two folders above
    folder.mkdir(parents=True)
    for name in ("folder.html", "folder.png", "empty", "log", "no_text"):
        (folder / name).mkdir()
    (folder / "loop").symlink_to("loop")
    (folder / "text").write_text("text")
    (folder / "log" / "steps.jsonl").write_text('{"step": 1, "loss": 1.0}\n')
    (folder / "no_text" / "steps.jsonl").write_bytes(bytes(range(256)))
    return folder


@pytest.fixture
def refuse(folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run a command: one line, or the test fails."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(cli, "app", COMMAND)

    def call(*arguments: str) -> str:
        before, begin = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
        command, *options = arguments
        with pytest.raises(SystemExit) as stop:
            if command == "paper":
                cli.run(PAPER, "check_paper.py", options)
            else:
                cli.main(list(arguments))
        seconds = time.process_time() - begin
        grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
        out, err = capfd.readouterr()
        assert stop.value.code == 2, err[-2000:]
        assert (out, err.count("\n")) == ("", 1) and err.startswith("distca: error: "), err[-2000:]
        assert err[:-1].isprintable() and "not enough memory" not in err and len(err) < 2100
        assert seconds < MAX_SECONDS and grown < MAX_BYTES
        return err

    return call


COMMAND, PAPER = get_command(cli.app), get_command(check_paper.app)  # made once: it takes longer than most refusals
OPTIONS, FILES = option_cases(), file_cases()


@pytest.mark.parametrize("arguments", OPTIONS, ids=lambda arguments: ascii(" ".join(arguments))[:60])
def test_bad_options_get_one_line(refuse: Callable[..., str], arguments: tuple[str, ...]) -> None:
    refuse(*arguments)


@pytest.mark.parametrize(("kind", "name", "suffix", "command"), FILES, ids=lambda value: str(value)[:40])
def test_bad_files_get_one_line_that_names_them(refuse: Callable[..., str], folder: Path, kind: str, name: str,
                                                suffix: str, command: tuple[str, ...]) -> None:
    content = CONTENT[kind][name]
    if suffix == "model":
        (folder / "hostile").mkdir(exist_ok=True)
        (folder / "hostile" / "config.json").write_bytes(content)
        path = "hostile"
    else:
        path = f"hostile.{suffix}"
        (folder / path).write_bytes(content)
    assert path in refuse(*command, path) or kind in ("settings", "tables")


def test_there_are_enough_of_them() -> None:
    assert len(OPTIONS) + len(FILES) >= 300 and {case[0] for case in OPTIONS} >= {
        "doctor", "paper", "plan", "profile", "report", "serve", "simulate", "train"}


@pytest.mark.parametrize("content", [pickle.dumps(print), b"", b"\xff" * 100, b"\x08\0\0\0\0\0\0\0{}", b"{}"])
def test_weights_that_are_no_safetensors_are_refused(refuse: Callable[..., str], tmp_path: Path,
                                                     content: bytes) -> None:
    (tmp_path / "config.json").write_text(json.dumps(files.CONFIG))
    (tmp_path / "model.safetensors").write_bytes(content)
    assert "no safetensors" in refuse("train", "--model.load", str(tmp_path))


@pytest.mark.parametrize("text", ["[]", "{}", '{"weight_map": 5}', '{"weight_map": {"a": "../x"}}',
                                  '{"weight_map": {"a": 5}}', "[" * files.DEEP])
def test_an_index_of_weights_that_is_none_is_refused(refuse: Callable[..., str], tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(files.CONFIG))
    (tmp_path / "model.safetensors.index.json").write_text(text)
    refuse("train", "--model.load", str(tmp_path))


def test_a_long_file_is_not_read_to_its_end(refuse: Callable[..., str], folder: Path) -> None:
    with open(folder / "long.json", "wb") as file:
        file.truncate(2**40)                                     # a hole: it takes no space
    for command in (("plan",), ("report",), ("report", "--predicted"), ("plan", "prolong", "--cost")):
        assert "long.json: more than" in refuse(*command, "long.json")
    os.rename(folder / "long.json", folder / "long.toml")
    for command in (("train",), ("simulate", "--cluster")):
        assert "long.toml: more than" in refuse(*command, "long.toml")
    os.unlink(folder / "long.toml")


def test_nothing_is_written_through_a_link(refuse: Callable[..., str], folder: Path) -> None:
    (folder / "mine").write_text("precious")
    (folder / "x.json").symlink_to("mine")
    small = ("--workers", "1", "--batches", "1", "--gpus", "16", "--context", "8192", "--strategies", "distca")
    assert "symbolic link" in refuse("simulate", *small, "--trace", "x.json")
    assert (folder / "mine").read_text() == "precious"


IN_A_PROCESS = [
    ["plan", "prolong", "--ranks", "1000000000", "--tokens-per-rank", "1"],
    ["simulate", "--gpus", "8000000000"],
    ["train", "dotted.toml"],
    ["report", "deep.json"],
]


MEASURED = """
import re
from pathlib import Path
from distca.cli import main
try:
    main()
finally:  # wait4 would count what the process that forked this one held
    Path("peak").write_text(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
"""


@pytest.mark.parametrize("arguments", IN_A_PROCESS, ids=" ".join)
def test_the_same_in_a_process_of_its_own(tmp_path: Path, arguments: list[str]) -> None:
    """As a user runs it, with an address space that a runaway allocation would not fit."""
    (tmp_path / "dotted.toml").write_bytes(files.tomls()["dotted"])
    (tmp_path / "deep.json").write_bytes(files.not_text()["deep_list"])

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (4 * MAX_BYTES, 4 * MAX_BYTES))
        resource.setrlimit(resource.RLIMIT_CPU, (20, 20))

    process = subprocess.Popen(
        [sys.executable, "-c", MEASURED, *arguments], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, preexec_fn=limit, env={**os.environ, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"})
    assert process.stdout is not None and process.stderr is not None
    out, err = process.stdout.read(), process.stderr.read()
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert (process.returncode, out, err.count("\n")) == (2, "", 1), err
    assert 1024 * int((tmp_path / "peak").read_text()) < MAX_BYTES and used.ru_utime + used.ru_stime < MAX_SECONDS


def test_a_mistake_of_ours_keeps_its_traceback_and_says_what_to_report(monkeypatch: pytest.MonkeyPatch,
                                                                       capfd: pytest.CaptureFixture[str]) -> None:
    def broken(*_: Any) -> int:
        empty: list[int] = []
        return empty[0]

    for make in (broken, lambda *_: int("x")):                   # ours, though a ValueError: nobody refused anything
        monkeypatch.setattr("distca.cli.plan.read_batches", make)
        with pytest.raises(SystemExit) as stop:
            cli.main(["plan", "prolong"])
        err = capfd.readouterr().err
        assert stop.value.code == 1 and err.startswith("Traceback") and "Please report it" in err.splitlines()[-1]
