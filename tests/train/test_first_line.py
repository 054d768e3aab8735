"""A person at a terminal sees at once what starts, before torch is there; a pipe or a refusal gets no such line."""

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

WITHOUT_TORCH = """
import builtins, sys
imported = builtins.__import__
def guarded(name, *rest, **options):
    if name.partition(".")[0] == "torch":
        raise SystemExit(9)
    return imported(name, *rest, **options)
builtins.__import__ = guarded
from distca.cli import main
main(["train", "--run.ranks", "3", "--attention.dedicated", "1", "--log.folder", sys.argv[1], *sys.argv[2:]])
"""


def started(folder: Path, *more: str, terminal: bool) -> tuple[int, str]:
    """Exit code and stderr of a run that ends where torch would be imported."""
    primary, secondary = pty.openpty()
    process = subprocess.Popen([sys.executable, "-c", WITHOUT_TORCH, str(folder), *more], stdout=subprocess.DEVNULL,
                               stderr=secondary if terminal else subprocess.PIPE)
    os.close(secondary)
    if not terminal:
        os.close(primary)
        _, err = process.communicate(timeout=60)
        return process.returncode, err.decode()
    process.wait(timeout=60)
    said = os.read(primary, 4096).decode()
    os.close(primary)
    return process.returncode, said


@pytest.mark.skipif(sys.platform != "linux", reason="what a terminal holds for a process that ended differs elsewhere")
def test_the_first_line_comes_before_torch(tmp_path: Path) -> None:
    code, said = started(tmp_path, terminal=True)
    assert code == 9
    assert said.splitlines() == ["Starting tiny on 3 ranks, 1 of them only serving attention, 8,192 tokens a step, "
                                 "attention disaggregated …"]


def test_a_pipe_gets_none(tmp_path: Path) -> None:
    assert started(tmp_path, terminal=False) == (9, "")


@pytest.mark.skipif(sys.platform != "linux", reason="what a terminal holds for a process that ended differs elsewhere")
def test_a_refusal_is_still_one_line(tmp_path: Path) -> None:
    code, said = started(tmp_path, "--parallel.tensor", "3", terminal=True)
    assert code == 2 and said.splitlines()[0].startswith("distca: error: ") and len(said.splitlines()) == 1
