"""Ranks start together, find each other and end together, whoever launched them."""

import json
import multiprocessing
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest

import distca
from distca import cli
from distca.train import launch as launching
from distca.train.ending import Failure
from distca.train.launch import launch
from distca.train.rank_env import RankEnv, first_host, rank_in, this_rank
from distca.train.settings import Settings
from distca.train.settings.preflight import MemoryKills, check_machine, device_for, dtype_for, threads_for
from tests.support import rank_mains as mains

LOOPBACK, LOOPBACK_6 = "0100007F", "00000000000000000000000001000000"  # as /proc/net/tcp writes 127.0.0.1 and ::1
ROOT = Path(distca.__file__).parents[1]
TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "node3",
            "MASTER_PORT": "29500"}
SRUN = {"SLURM_STEP_NUM_TASKS": "12", "SLURM_PROCID": "9", "SLURM_LOCALID": "1", "SLURM_NODEID": "1",
        "SLURM_STEP_TASKS_PER_NODE": "8,4", "SLURM_STEP_NODELIST": "gpu-[007-008]", "SLURM_JOB_ID": "123456",
        "SLURM_STEP_ID": "0"}


@pytest.fixture(autouse=True)
def not_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*TORCHRUN, *SRUN, "SLURM_CPUS_PER_TASK"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings().with_values({"log.folder": str(tmp_path), "run.threads": 1, "run.device": "cpu"})


def _said(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(tmp_path.glob("rank*.json"))]


def _once_ready(tmp_path: Path, num_ranks: int, act: Callable[..., Any]) -> threading.Thread:
    """Run `act` in a thread as soon as all ranks have said something."""
    def watch() -> None:
        deadline = time.monotonic() + 60
        while len(_said(tmp_path)) < num_ranks:
            if time.monotonic() > deadline:
                return
            time.sleep(0.02)
        act()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.multiprocess
def test_local_ranks_meet(settings: Settings, tmp_path: Path) -> None:
    threads = min(2, os.cpu_count() or 1)  # torch starts no more than there are cores
    assert launch(settings.with_values({"run.threads": threads}), mains.meet) == 0
    said = _said(tmp_path)
    places = [[one[name] for name in ("rank", "local_rank", "world", "ranks")] for one in said]
    assert places == [[0, 0, 2, 2], [1, 1, 2, 2]]
    assert [one["total"] for one in said] == [11.0, 11.0]
    assert [one["threads"] for one in said] == [threads, threads]
    assert len({os.getpid(), *(one["pid"] for one in said)}) == 3
    assert "RANK" not in os.environ
    addresses = [address for one in said for process in one["listening"] for address in process]
    assert addresses and set(addresses) <= {LOOPBACK, LOOPBACK_6}  # the ranks' own, and the launcher's store


@pytest.mark.multiprocess
def test_the_first_failure_ends_all_and_is_the_one_reported(settings: Settings, tmp_path: Path,
                                                            capfd: pytest.CaptureFixture[str]) -> None:
    assert launch(settings, mains.second_fails) == 1
    error = capfd.readouterr().err
    assert error.startswith("distca: rank 1 failed:\nTraceback") and error.endswith("RuntimeError: rank one gave up\n")
    assert not any(_is_running(one["pid"]) for one in _said(tmp_path))


@pytest.mark.multiprocess
def test_what_ranks_refuse_is_said_once_in_one_line(settings: Settings,
                                                    capfd: pytest.CaptureFixture[str]) -> None:
    assert launch(settings, mains.all_refuse) == 2
    assert capfd.readouterr().err == "distca: error: optimizer.lr is -1.0; give a number above 0\n"


@pytest.mark.multiprocess
@pytest.mark.parametrize(("main", "code", "words"), [
    ("foreign_value_error", 1, ["rank 0 failed", "Traceback", "foreign_value_error"]),
    ("second_returns_five", 5, ["rank 1", "exit code 5"]),
    ("second_is_killed", 128 + signal.SIGKILL, ["rank 1", "SIGKILL"]),
])
def test_every_way_to_fail_is_told(settings: Settings, capfd: pytest.CaptureFixture[str], main: str,
                                   code: int, words: list[str]) -> None:
    ranks = 1 if main == "foreign_value_error" else 2
    assert launch(settings.with_values({"run.ranks": ranks}), getattr(mains, main)) == code
    error = capfd.readouterr().err
    assert all(word in error for word in words)


@pytest.mark.multiprocess
@pytest.mark.parametrize(("main", "sent", "code", "saved"), [
    ("stop_when_asked", [signal.SIGTERM], 0, True),
    ("stop_when_asked", [signal.SIGINT], 130, True),
    ("never_stop", [signal.SIGINT, signal.SIGINT], 130, False),
    ("wait_without_listening", [signal.SIGTERM], 128 + signal.SIGTERM, False),
])
def test_signals_reach_the_ranks(settings: Settings, tmp_path: Path,
                                 capfd: pytest.CaptureFixture[str], main: str, sent: list[signal.Signals], code: int,
                                 saved: bool) -> None:
    def send() -> None:
        for number in sent:
            os.kill(os.getpid(), number)
            time.sleep(0.5)

    before = signal.getsignal(signal.SIGTERM)
    sender = _once_ready(tmp_path, 1, send)
    assert launch(settings.with_values({"run.ranks": 1}), getattr(mains, main)) == code
    sender.join()
    (said,) = _said(tmp_path)
    assert said.get("saved", False) is saved
    assert not _is_running(said["pid"])
    assert ("did not stop in time" in capfd.readouterr().err) is (main == "never_stop")
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.multiprocess
def test_a_rank_that_starts_heeds_no_ctrl_c(
    settings: Settings, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A terminal's goes to all processes, also to one that is importing its modules: no traceback of that."""
    sent, ended = list[int](), threading.Event()

    def disturb() -> None:
        while not _said(tmp_path) and not ended.wait(0.02):
            for child in multiprocessing.active_children():
                os.kill(child.pid or 0, signal.SIGINT)
                sent.append(child.pid or 0)

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        assert launch(settings.with_values({"run.ranks": 1}), mains.meet) == 0
    finally:
        ended.set()
        thread.join()
    assert len(sent) > 3 and "Traceback" not in capfd.readouterr().err


@pytest.mark.multiprocess
def test_ranks_that_do_not_stop_in_time_are_ended(settings: Settings, tmp_path: Path) -> None:
    sender = _once_ready(tmp_path, 1, lambda: os.kill(os.getpid(), signal.SIGTERM))
    hasty = settings.with_values({"run.ranks": 1, "run.timeout_seconds": 1})
    assert launch(hasty, mains.never_stop) == 128 + signal.SIGTERM
    sender.join()
    assert not _is_running(_said(tmp_path)[0]["pid"])


def test_a_signal_comes_before_what_others_saw_of_it(settings: Settings, monkeypatch: pytest.MonkeyPatch,
                                                     capsys: pytest.CaptureFixture[str]) -> None:
    """The launcher may see the death after another rank has reported the exchange that it cut."""
    ranks = launching._LocalRanks(settings, mains.meet)
    ranks.processes = {rank: type("Ended", (), {"exitcode": code})
                       for rank, code in enumerate((1, -signal.SIGKILL, -signal.SIGABRT))}
    ranks.ended = {0: 10.0, 1: 10.4, 2: 10.2}
    told = Failure(10.0, 0, 1, "distca: rank 0 failed: an exchange did not complete")
    silent: Any = type("Silent", (), {"poll": staticmethod(lambda: False)})
    teller: Any = type("Told", (), {"poll": lambda _: True, "recv": lambda _: told})()
    ranks.reports = {0: teller, 1: silent, 2: silent}
    for kills, words in ((False, "SIGKILL\n"), (True, "SIGKILL: memory ran out, by the kernel's count")):
        monkeypatch.setattr(MemoryKills, "risen", partialmethod(lambda _, risen: risen, kills))
        assert ranks._code([ranks._failure(rank) for rank in range(3)], []) == 128 + signal.SIGKILL
        assert f"distca: rank 1 was ended by {words}" in capsys.readouterr().err


@pytest.mark.parametrize(("cgroup", "file", "text"), [
    ("0::/user/run\n", "user/run/memory.events", "low 0\nhigh 0\nmax 9\noom 1\noom_kill {}\noom_group_kill 0\n"),
    ("0::/user/run\n", "memory.events", "oom_kill {}\n"),
    ("5:devices:/x\n4:memory:/user/run\n0::/\n", "memory/user/run/memory.oom_control",
     "oom_kill_disable 0\nunder_oom 0\noom_kill {}\n"),
])
def test_the_kernels_count_of_memory_kills_is_found(tmp_path: Path, cgroup: str, file: str, text: str) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(cgroup)
    counts = tmp_path / "sys/fs/cgroup" / file
    assert not MemoryKills.of(tmp_path).risen()
    counts.parent.mkdir(parents=True)
    counts.write_text(text.format(3))
    kills = MemoryKills.of(tmp_path)
    assert (kills.file, kills.before, kills.risen()) == (counts, 3, False)
    counts.write_text(text.format(4))
    assert kills.risen()
    counts.unlink()
    assert not kills.risen()


@pytest.mark.multiprocess
@pytest.mark.parametrize("stopped", [False, True])
def test_ranks_do_not_outlive_their_launcher(tmp_path: Path, stopped: bool) -> None:
    code = f"""if __name__ == "__main__":
    from tests.support import rank_mains
    from distca.train.settings import Settings
    from distca.train.launch import launch
    launch(Settings().with_values({{"log.folder": {str(tmp_path)!r}, "run.ranks": 1}}), rank_mains.never_stop)
"""
    (tmp_path / "launcher.py").write_text(code)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    launcher = subprocess.Popen([sys.executable, str(tmp_path / "launcher.py")], env=environment, cwd=tmp_path)

    def end() -> None:
        if stopped:
            os.kill(_said(tmp_path)[0]["pid"], signal.SIGSTOP)
        launcher.kill()

    _once_ready(tmp_path, 1, end).join()
    assert launcher.wait(timeout=60) == -signal.SIGKILL
    pid = _said(tmp_path)[0]["pid"]
    deadline = time.monotonic() + 20
    while _is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _is_running(pid)


def _ranked(environ: dict[str, str]) -> RankEnv:
    place = rank_in(environ)
    assert place is not None
    return place


def test_torchrun_places_a_process() -> None:
    assert rank_in(TORCHRUN) == RankEnv(5, 8, 1, 4, "node3", 29500)
    assert rank_in(TORCHRUN | SRUN) == rank_in(TORCHRUN)
    assert _ranked(TORCHRUN).environment() == TORCHRUN


def test_srun_places_a_process() -> None:
    place = _ranked(SRUN)
    assert (place.rank, place.world, place.local_rank, place.local_world, place.address) == (9, 12, 1, 4, "gpu-007")
    others = [_ranked(SRUN | {"SLURM_PROCID": str(rank)}) for rank in range(12)]
    assert len({(one.address, one.port) for one in others}) == 1 and 1024 < place.port < 65536
    other_step = _ranked(SRUN | {"SLURM_STEP_ID": "1"})
    assert other_step.port != place.port
    given = _ranked(SRUN | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "4000"})
    assert (given.address, given.port) == ("10.0.0.1", 4000)


@pytest.mark.parametrize("environ", [
    {},
    {"RANK": "0"},
    {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "16"},  # a batch script, before any srun
    {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"},  # a shell or a single task
])
def test_alone_means_local_ranks(environ: dict[str, str]) -> None:
    assert rank_in(environ) is None


@pytest.mark.parametrize(("environ", "words"), [
    ({"RANK": "0", "WORLD_SIZE": "2"}, ["MASTER_ADDR", "LOCAL_RANK", "torchrun"]),
    (TORCHRUN | {"WORLD_SIZE": "two"}, ["WORLD_SIZE", "'two'"]),
    ({name: value for name, value in SRUN.items() if name != "SLURM_LOCALID"}, ["SLURM_LOCALID", "None"]),
])
def test_half_a_place_is_refused(environ: dict[str, str], words: list[str]) -> None:
    with pytest.raises(ValueError) as refused:
        rank_in(environ)
    assert all(word in str(refused.value) for word in words)


@pytest.mark.parametrize(("nodes", "host"), [
    ("n1", "n1"), ("n1,n2", "n1"), ("a[07-09,12],b", "a07"), ("rack[1-2]n[03-04]", "rack1n03"), ("x[5]y,z", "x5y"),
    ("gpu-[001,004-010]", "gpu-001"),
])
def test_first_host_of_a_list(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


def test_joined_ranks_run_in_this_process_with_their_launchers_number(settings: Settings,
                                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SRUN.items():
        monkeypatch.setenv(name, value)
    for name in TORCHRUN:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(launching, "_prepare", lambda settings, place: None)
    seen = []

    def main(settings: Settings) -> int:
        seen.append((settings.run.ranks, os.environ["RANK"], os.environ["WORLD_SIZE"],
                     this_rank().local_world))
        return 7

    assert launch(settings.with_values({"run.ranks": 1}), main) == 7
    assert seen == [(12, "9", "12", 4)]
    with pytest.raises(ValueError, match=r"parallel.tensor is 8 but there are 12 ranks"):
        launch(settings.with_values({"run.ranks": 8, "parallel.tensor": 8}), main)


def test_outside_of_a_launch_there_is_no_place() -> None:
    with pytest.raises(ValueError, match="torchrun"):
        this_rank()


def test_threads_share_the_cores(settings: Settings) -> None:
    cores = len(os.sched_getaffinity(0))
    automatic = settings.with_values({"run.threads": 0})
    assert threads_for(settings, 4, {}) == 1
    assert threads_for(automatic, 1, {}) == cores and threads_for(automatic, 10 * cores, {}) == 1
    assert threads_for(automatic, 8, {"SLURM_PROCID": "0", "SLURM_CPUS_PER_TASK": "6"}) == 6


def test_auto_is_what_fits_the_device(settings: Settings) -> None:
    import torch

    cpu = device_for(settings, 3)
    assert cpu == torch.device("cpu") and dtype_for(settings, cpu) == torch.float32
    assert dtype_for(settings, torch.device("cuda", 0)) == torch.bfloat16
    assert dtype_for(settings.with_values({"run.dtype": "float64"}), cpu) == torch.float64


def _llama_folder(tmp_path: Path, **changes: Any) -> str:
    content = {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96, "intermediate_size": 192,
               "num_hidden_layers": 2, "vocab_size": 257, "model_type": "llama"}
    (tmp_path / "config.json").write_text(json.dumps({**content, **changes}))
    return str(tmp_path)


@pytest.mark.parametrize(("values", "words"), [
    ({"attention.kernel": "fa4"}, ["attention.kernel", "'fa4'", "GPU"]),
    ({"data.source": "text", "data.path": "no/such"}, ["data.path", "no/such"]),
    ({"data.mix": "no/such.jsonl:1,b.parquet:1"}, ["data.mix", "no/such.jsonl"]),
    ({"data.source": "megatron", "data.path": "no/such.bin"}, ["data.path", "no/such.idx"]),
    ({"data.source": "text", "data.path": ".", "data.tokenizer": "none.json"}, ["data.tokenizer", "none.json"]),
    ({"log.folder": "file/runs"}, ["log.folder", "file/runs"]),
    ({"checkpoint.folder": "file"}, ["checkpoint.folder", "'file'"]),
    ({"run.device": "cuda"}, ["run.device", "cuda", "cpu"]),
    ({"log.tensorboard": True}, ["log.tensorboard", "pip install tensorboard"]),
    ({"attention.transport": "symmetric"}, ["attention.transport", "'symmetric'", "'c10d'"]),
    ({"model.load": "no/model"}, ["model.load", "no/model", "config.json"]),
])
def test_what_this_machine_cannot_do_is_refused(settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                values: dict[str, int | str], words: list[str]) -> None:
    import torch

    from distca.train.settings import preflight

    (tmp_path / "file").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(preflight, "find_spec", lambda name: None if name == "tensorboard" else "there")
    with pytest.raises(ValueError) as refused:
        check_machine(settings.with_values(values))
    assert all(word in str(refused.value) for word in words) and "\n" not in str(refused.value)


def test_a_loaded_models_own_heads_are_checked(settings: Settings, tmp_path: Path,
                                               monkeypatch: pytest.MonkeyPatch) -> None:
    from distca.train.settings import preflight

    monkeypatch.setattr(preflight, "find_spec", lambda name: "there")
    loaded = settings.with_values({"model.load": _llama_folder(tmp_path), "run.ranks": 6})
    check_machine(loaded.with_values({"parallel.tensor": 3}))
    with pytest.raises(ValueError, match="3 KV heads"):
        check_machine(loaded.with_values({"parallel.tensor": 2}))
    with pytest.raises(ValueError, match=r"parallel.pipeline is 3 but model .* has 2 layers"):
        check_machine(loaded.with_values({"parallel.pipeline": 3}))
    _llama_folder(tmp_path, tie_word_embeddings=True)
    with pytest.raises(ValueError, match=r"parallel.pipeline is 2 but the output layer .* is its embedding"):
        check_machine(loaded.with_values({"parallel.pipeline": 2, "parallel.schedule": "same_phase"}))
    check_machine(loaded.with_values({"parallel.pipeline": 2}))  # which puts the head on all stages
    _llama_folder(tmp_path, intermediate_size="wide")
    with pytest.raises(ValueError, match=r"intermediate_size is 'wide'; give a whole number"):
        check_machine(loaded)


def test_bad_settings_start_nothing(settings: Settings, monkeypatch: pytest.MonkeyPatch,
                                    capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(launching, "_LocalRanks", None)
    with pytest.raises(SystemExit) as stop:
        cli.main(["train", "--batch.tokens_per_rank", "33", "--log.folder", settings.log.folder])
    captured = capsys.readouterr()
    assert (stop.value.code, captured.out) == (2, "")
    assert captured.err.startswith("distca: error: batch.tokens_per_rank is 33") and captured.err.count("\n") == 1


@pytest.mark.parametrize("code", [0, 3])
def test_the_commands_exit_code_is_the_runs(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    monkeypatch.setattr(launching, "launch", lambda settings, main: code)
    with pytest.raises(SystemExit) as stop:
        cli.main(["train"])
    assert stop.value.code == code


@pytest.mark.slow
@pytest.mark.multiprocess
def test_torchrun_starts_the_same_mains(tmp_path: Path) -> None:
    code = ("import sys\nfrom tests.support import rank_mains\nfrom distca.train.launch import launch\n"
            "from distca.train.settings import Settings\n"
            f"sys.exit(launch(Settings().with_values({{'log.folder': {str(tmp_path)!r}}}), rank_mains.meet))\n")
    (tmp_path / "main.py").write_text(code)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1",
         "--nproc-per-node", "2", str(tmp_path / "main.py")],
        env={**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}, cwd=tmp_path,
        capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert [one["total"] for one in _said(tmp_path)] == [11.0, 11.0]


# ---- a person at a terminal sees at once what starts, before torch is imported; a pipe or a refusal gets no such line

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
