"""A run that is killed at any moment goes on bit for bit, whatever it was doing: training, saving, being verified.

Each trial starts a run, kills all of it with SIGKILL after a random time or at a chosen call, and lets the same command
finish. Its log must be the log of a run that was never interrupted: as many ranks and threads go on with the same
operations on the same shapes, at offsets that plans alone decide. While runs are killed their folder is verified and
exported by others, which must neither disturb them nor take a half-written checkpoint for a good one.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

STEPS = 14
TRIALS = 40  # at random moments; the chosen ones come on top
BASE = [sys.executable, "-m", "distca"]
WHERE = {  # what a killed process was doing -> (module, function of it)
    "copying tensors": ("distca.train.checkpoint.checkpointer", "local_part"),
    "writing a file": ("distca.train.checkpoint.files", "_write"),
    "between files and manifest": ("distca.train.checkpoint.checkpointer", "tensor_table"),
    "writing the manifest": ("distca.train.checkpoint.folder", "write_manifest"),
    "removing an old one": ("distca.train.checkpoint.folder", "remove"),
    "rewriting the log": ("distca.train.display", "open_log"),
    "loading": ("distca.train.checkpoint.files", "read_at"),
}

Curve = tuple[list[float], float]  # losses, and the seconds that a run takes


def command(folder: Path, *more: str) -> list[str]:
    return [*BASE, "train", "--model.name", "tiny", "--run.ranks", "2", "--run.threads", "1", "--run.steps", str(STEPS),
            "--run.timeout_seconds", "60", "--optimizer.warmup_steps", "3", "--data.max_document", "200",
            "--batch.tokens_per_rank", "256", "--checkpoint.folder", str(folder / "saved"), "--checkpoint.every", "2",
            "--log.folder", str(folder / "log"), *more]


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "log/steps.jsonl").read_text().splitlines()]


def finish(folder: Path, **options: Any) -> None:
    done = subprocess.run(command(folder), capture_output=True, text=True, timeout=200, **options)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr


def kill(process: subprocess.Popen[bytes]) -> None:
    """All of a run, as a machine that loses power does."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Curve:
    folder = tmp_path_factory.mktemp("whole")
    begin = time.monotonic()
    finish(folder)
    return losses(folder), time.monotonic() - begin


def nothing_was_lost(folder: Path, logged: bytes) -> bool:
    """Every line that was ever in a log is still in one."""
    kept = b"".join(path.read_bytes() for path in (folder / "log").glob("steps*.jsonl"))
    return all(line in kept for line in logged.splitlines(keepends=True) if line.endswith(b"\n"))


def log_of(folder: Path) -> bytes:
    path = folder / "log/steps.jsonl"
    return path.read_bytes() if path.exists() else b""


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("trial", range(TRIALS))
def test_killed_at_a_random_moment(whole: Curve, tmp_path: Path, trial: int) -> None:
    chance = random.Random(trial)
    curve, seconds = whole
    for _ in range(chance.randrange(1, 3)):
        process = subprocess.Popen(command(tmp_path), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                                   start_new_session=True)
        time.sleep(chance.uniform(0.3, 1.0) * seconds)
        kill(process)
        logged = log_of(tmp_path)
        verified = subprocess.run([*BASE, "checkpoint", "verify", str(tmp_path / "saved")], capture_output=True,
                                  text=True, timeout=200)
        assert verified.returncode in (0, 1, 2) and "Traceback" not in verified.stderr
        assert "damaged" not in verified.stdout                  # what a kill leaves is torn, never damaged
    finish(tmp_path)
    assert losses(tmp_path) == curve
    assert nothing_was_lost(tmp_path, logged)


KILLER = """
import importlib, os, signal, sys, time
module = importlib.import_module({module!r})
original, calls = getattr(module, {name!r}), [0]
def fatal(*args, **options):
    calls[0] += 1
    if os.environ.get("RANK", "0") == {rank!r} and calls[0] == {at}:
        os.killpg(0, signal.SIGKILL)
    return original(*args, **options)
for loaded in list(sys.modules.values()):
    if getattr(loaded, {name!r}, None) is original:
        setattr(loaded, {name!r}, fatal)
"""


def killed_in(folder: Path, where: str, rank: int, at: int) -> int:
    """Run until rank `rank` calls that function for the time `at`, then kill everything."""
    module, name = WHERE[where]
    main = folder / "killer.py"
    main.write_text(
        "import sys\nfrom distca import cli\n"
        "def _train(settings):\n"
        "    import distca.train.trainer\n" + "".join(
            f"    {line}\n" for line in KILLER.format(module=module, name=name, rank=str(rank), at=at).splitlines()) +
        "    return distca.train.trainer.run(settings)\n"
        "if __name__ == '__main__':\n    import distca.cli.train\n    distca.cli.train._train = _train\n"
        "    cli.main(sys.argv[1:])\n")
    arguments = command(folder)[len(BASE):]
    process = subprocess.Popen([sys.executable, str(main), *arguments], stdout=subprocess.DEVNULL,
                               stderr=subprocess.DEVNULL, start_new_session=True,
                               env={**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *sys.path])})
    return process.wait(timeout=120)


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize(("rank", "at"), [(0, 1), (1, 3)])
@pytest.mark.parametrize("where", WHERE)
def test_killed_while(whole: Curve, tmp_path: Path, where: str, rank: int, at: int) -> None:
    curve, _ = whole
    only_first = where not in ("copying tensors", "writing a file", "loading")
    if where in ("loading", "rewriting the log"):
        half = subprocess.run([*command(tmp_path), "--checkpoint.keep", "9"][:-2], capture_output=True, timeout=200)
        assert half.returncode == 0
        for path in sorted((tmp_path / "saved").glob("step_*"))[1:]:
            (path / "manifest.json").unlink()                    # as if it had been killed earlier
    logged = log_of(tmp_path)
    code = killed_in(tmp_path, where, 0 if only_first else rank, 1 if only_first and where != "removing an old one"
                     else at)
    assert code == -signal.SIGKILL, where                        # it did get there
    finish(tmp_path)
    assert losses(tmp_path) == curve
    assert nothing_was_lost(tmp_path, logged)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_verifying_and_exporting_beside_a_run_disturbs_nobody(whole: Curve, tmp_path: Path) -> None:
    """Exports are killed at random moments too: a folder of that name is then whole or not there."""
    curve, seconds = whole
    chance = random.Random(0)
    process = subprocess.Popen(command(tmp_path), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    exports = 0
    while process.poll() is None:
        verified = subprocess.run([*BASE, "checkpoint", "verify", str(tmp_path / "saved")], capture_output=True,
                                  text=True, timeout=200)
        assert "Traceback" not in verified.stderr
        export = subprocess.Popen([*BASE, "export", str(tmp_path / "saved"), str(tmp_path / f"out{exports}")],
                                  stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
        time.sleep(chance.uniform(0.1, 0.5) * seconds)
        kill(export)
        exports += 1
    assert process.returncode == 0 and losses(tmp_path) == curve
    for folder in tmp_path.glob("out*"):
        if not folder.name.endswith(".partial"):
            assert {"config.json", "model.safetensors"} <= {path.name for path in Path(folder).iterdir()}
    done = subprocess.run([*BASE, "export", str(tmp_path / "saved"), str(tmp_path / "last")],
                          capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "last/model.safetensors").exists()
