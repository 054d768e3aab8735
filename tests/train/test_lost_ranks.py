"""A rank that is killed or stopped at any moment ends the run with one line that names it, over gloo and over NCCL.

Ranks that share one GPU are hosts of their own in NCCL's eyes (NCCL_HOSTID), which connects them by sockets. Each is
started by itself, as launchers on several machines do: nobody ends the survivors but they themselves.
"""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import distca
from distca.train.launch import launch
from distca.train.settings import Settings
from tests.support import rank_mains as mains

ROOT = Path(distca.__file__).parents[1]
GPU = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs an NVIDIA GPU; torch.cuda.is_available() is False")])
BACKENDS = ["cpu", GPU]
HANG_SECONDS = 15     # in which ranks must start
NEVER_SECONDS = 300
TRIALS = 50  # of each kind in the sweep
AT_ONCE = 10  # trials of the sweep that run beside each other
pytestmark = pytest.mark.multiprocess


IMPATIENT = """
from distca.cli import main
from distca.train import trainer
Liveness = trainer.Liveness
trainer.Liveness = lambda timeout_seconds, on_lost: Liveness(5, on_lost)  # ranks may take longer than that to start
main()
"""
HANGING = """
import time
from distca.cli import main
from distca.train.trainer import Trainer
inner = Trainer.forward_backward
def forward_backward(trainer, batch):
    if trainer.rank == 1 and trainer.step == 5:
        time.sleep(1000)
    return inner(trainer, batch)
Trainer.forward_backward = forward_backward
main()
"""


def command(folder: Path, device: str, timeout_seconds: int, *program: str) -> list[str]:
    options = {"model.name": "tiny", "model.compile": "off", "run.device": device, "run.threads": 1,
               "run.steps": 1_000_000, "run.timeout_seconds": timeout_seconds, "data.max_document": 200,
               "batch.tokens_per_rank": 256, "log.folder": folder}
    return [sys.executable, *(program or ("-m", "distca")), "train",
            *(word for name, value in options.items() for word in (f"--{name}", str(value)))]


@contextmanager
def ranks_of_their_own(
    folder: Path, size: int, device: str, timeout_seconds: int, *program: str
) -> Iterator[list[subprocess.Popen[str]]]:
    """Start every rank in torchrun's environment, on a machine of its own; none outlives the block."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    shared = {"WORLD_SIZE": str(size), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
              "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    processes = [subprocess.Popen(
        command(folder, device, timeout_seconds, *program),
        text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT), **shared, "RANK": str(rank), "NCCL_HOSTID": f"h{rank}"})
        for rank in range(size)]
    try:
        wait_for_a_step(folder, processes[0])
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def wait_for_a_step(folder: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 200
    while not (folder / "steps.jsonl").exists():
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.05)


def last_words(error: str) -> str:
    """What a rank said on stderr, less the line about its kernel."""
    return "".join(line for line in error.splitlines(keepends=True) if not line.startswith("attention kernel "))


def lose(folder: Path, size: int, device: str, how: signal.Signals, victim: int, delay: float) -> list[float]:
    """Seconds from the signal to the end of each survivor, each with the one line that it must end with."""
    program = () if how == signal.SIGKILL else ("-c", IMPATIENT)
    with ranks_of_their_own(folder, size, device, NEVER_SECONDS, *program) as processes:
        time.sleep(delay)
        begin, seconds = time.monotonic(), []
        os.kill(processes[victim].pid, how)
        for rank, process in enumerate(processes):
            if rank != victim:
                error = last_words(process.communicate(timeout=120)[1])
                seconds.append(time.monotonic() - begin)
                reason = "ended in the middle" if how == signal.SIGKILL else "no sign of life for 5 s"
                assert error.count("\n") == 1 and error.startswith(f"distca: error: rank {rank} of {size}: "), error
                assert f"rank {victim} " in error and reason in error and "restart from the last" in error, error
                assert process.returncode == 1, error
        return seconds


@pytest.mark.parametrize("device", BACKENDS)
@pytest.mark.parametrize(("how", "victim"), [(signal.SIGKILL, 1), (signal.SIGSTOP, 0)])
def test_survivors_end_with_one_line(tmp_path: Path, device: str, how: signal.Signals, victim: int) -> None:
    seconds = lose(tmp_path, 2, device, how, victim, 0.3)
    assert max(seconds) < NEVER_SECONDS  # a death is not waited out


@pytest.mark.parametrize("device", BACKENDS)
def test_a_rank_that_hangs_in_its_loop_ends_all_within_the_timeout(tmp_path: Path, device: str) -> None:
    """It gives signs of life, so what tells is the collective that it does not come to."""
    with ranks_of_their_own(tmp_path, 2, device, HANG_SECONDS, "-c", HANGING) as processes:
        for rank, process in enumerate(processes):
            error = last_words(process.communicate(timeout=120)[1])
            assert error.count("\n") == 1 and error.startswith(f"distca: error: rank {rank} of 2: "), error
            assert "restart from the last checkpoint" in error and process.returncode == 1, error


@pytest.mark.slow
@pytest.mark.parametrize("device", BACKENDS)
def test_at_random_moments(tmp_path: Path, device: str) -> None:
    generator = random.Random(0)
    signals = [signal.SIGKILL, signal.SIGSTOP] * TRIALS
    sizes = [generator.choice([2, 2, 3, 4]) for _ in signals]
    cases = [(tmp_path / str(trial), size, device, how, generator.randrange(size), generator.uniform(0, 3))
             for trial, (size, how) in enumerate(zip(sizes, signals, strict=True))]
    with ThreadPoolExecutor(AT_ONCE if device == "cuda" else 1) as pool:
        trials = [pool.submit(lose, *case) for case in cases]
        for count, trial in enumerate(as_completed(trials), 1):
            print(f"{count} of {len(trials)}: {trial.exception() or 'ended as it must'}", flush=True)
    errors = [error for error in (trial.exception() for trial in trials) if error is not None]
    assert not errors, f"{len(errors)} of {len(trials)}: {errors[:3]}"
    for how, begin in ((signal.SIGKILL, 0), (signal.SIGSTOP, 1)):
        seconds = sorted(one for trial in trials[begin::2] for one in trial.result())
        print(f"{device} {how.name}: {TRIALS} trials, {len(seconds)} survivors ended after "
              f"{seconds[len(seconds) // 2]:.1f} s in the median, {seconds[-1]:.1f} s at most")


@pytest.mark.parametrize(("victim", "asked"), [
    pytest.param(0, False, id="stopped", marks=pytest.mark.slow), pytest.param(1, True, id="asked_to_stop_meanwhile")])
def test_a_stopped_local_rank_ends_the_run_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], victim: int, asked: bool,
) -> None:
    def stop() -> None:
        while len(list(tmp_path.glob("rank*.json"))) < 2:
            time.sleep(0.05)
        os.kill(json.loads((tmp_path / f"rank{victim}.json").read_text())["pid"], signal.SIGSTOP)
        if asked:
            os.kill(os.getpid(), signal.SIGTERM)

    settings = Settings().with_values({
        "run.device": "cpu", "run.threads": 1, "run.steps": 1_000_000, "run.timeout_seconds": NEVER_SECONDS,
        "data.max_document": 200, "batch.tokens_per_rank": 256, "log.folder": str(tmp_path)})
    stopper = threading.Thread(target=stop, daemon=True)
    stopper.start()
    assert launch(settings, mains.train_impatiently) == 1
    error = last_words(capfd.readouterr().err)
    assert error.count("\n") == 1 and f"rank {victim} gave no sign of life for 5 s" in error, error
