"""Help, completion and the first line on the screen, for every command."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import distca

Run = Callable[..., tuple[int, str, str]]
ROOT = Path(distca.__file__).parents[1]
COMMANDS = ((), ("plan",), ("simulate",), ("train",), ("profile",), ("check",), ("doctor",), ("report",),
            ("checkpoint",), ("checkpoint", "verify"), ("serve",))


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_short_and_long_help_are_the_same(run: Run, command: tuple[str, ...]) -> None:
    short, long = run(*command, "-h"), run(*command, "--help")
    assert short == long and short[0] == 0 and "Usage: distca" in short[1] and "-h" in short[1]


def test_help_says_what_k_is(run: Run) -> None:
    for command in ("plan", "simulate", "train", "profile"):
        assert "k is 1024" in " ".join(run(command, "-h")[1].replace("│", " ").split())


def _distca(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "distca", *arguments], capture_output=True, text=True, check=False,
                          env={**os.environ, "PYTHONPATH": str(ROOT), **environment})


def test_shells_complete_commands(tmp_path: Path) -> None:
    done = _distca(_DISTCA_COMPLETE="complete_bash", COMP_WORDS="distca si", COMP_CWORD="1")
    assert done.stdout.split() == ["simulate"]
    without_a_guess = {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}  # of the shell that this runs under
    installed = _distca("--install-completion", "bash", HOME=str(tmp_path), **without_a_guess)
    assert installed.returncode == 0, installed.stderr
    scripts = [path for path in tmp_path.rglob("*") if path.is_file() and "_DISTCA_COMPLETE" in path.read_text()]
    assert scripts and "complete" in (tmp_path / ".bashrc").read_text() + scripts[0].read_text()


def test_what_is_slow_to_start_says_a_line_first(tmp_path: Path) -> None:
    """On a terminal, and before torch is loaded."""
    controller, terminal = pty.openpty()
    code = ("import sys; import distca.cli.profile as command; said = command.say\n"
            "def say(line):\n    said(line); sys.exit('torch' in sys.modules)\n"
            "command.say = say\nfrom distca.cli import main; main(['profile', '--quick'])")
    process = subprocess.Popen([sys.executable, "-c", code], stdout=terminal, stderr=terminal, stdin=terminal,
                               cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)})
    os.close(terminal)
    assert process.wait(60) == 0
    assert os.read(controller, 1000).startswith(b"distca profile: ")
    os.close(controller)


def test_pipes_are_spared_the_line(capsys: pytest.CaptureFixture[str]) -> None:
    from distca.cli.options import say

    say("nobody sees this")
    assert capsys.readouterr() == ("", "")
