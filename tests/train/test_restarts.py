"""A run goes on by itself after the loss of a rank, as if nothing had happened: the same losses and the same weights.

Bit for bit, because a restart has the same ranks and threads, which go on with the same operations on the same shapes.
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
from pathlib import Path
from typing import Any

import pytest
import torch

import distca
from distca.train import launch as launching
from distca.train.checkpoint import neighbour
from distca.train.checkpoint.files import Reader
from distca.train.checkpoint.folder import read_manifest
from distca.train.ending import Failure
from distca.train.launch import launch
from distca.train.settings import Settings, on_fewer_ranks
from tests.support import rank_mains as mains

STEPS = 10
TRIALS = 20  # of the sweep
ROOT = Path(distca.__file__).parents[1]
pytestmark = pytest.mark.multiprocess


def run_in(folder: Path, **values: Any) -> Settings:
    (folder / "deaths.json").write_text("[]")
    return Settings().with_values({
        "run.device": "cpu", "run.threads": 1, "run.steps": STEPS, "run.timeout_seconds": 60, "model.layers": 2,
        "optimizer.warmup_steps": 3, "data.max_document": 200, "batch.tokens_per_rank": 128,
        "checkpoint.folder": str(folder / "saved"), "checkpoint.neighbour_every": 2, "run.restarts": 3,
        "log.folder": str(folder / "log"), **{name.replace("__", "."): value for name, value in values.items()}})


def logged(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "log/steps.jsonl").read_text().splitlines()]


def losses(folder: Path) -> list[float]:
    return [record["loss"] for record in logged(folder)]


def last_saved(folder: Path) -> dict[str, bytes]:
    """Weights, optimizer and the loader's position, as the run left them."""
    path = folder / f"saved/step_{STEPS:08d}"
    manifest = read_manifest(path)
    with Reader(path, manifest) as reader:
        tensors = {name: reader.whole(name).reshape(-1).view(torch.uint8).numpy().tobytes()
                   for name in manifest.tensors if not name.startswith("rng.")}  # which training does not use
    assert len(tensors) > 40
    return tensors | {"loader": json.dumps(manifest.loader).encode()}


def is_in_memory(folder: Path) -> bool:
    """Whether the run has left its checkpoints in memory."""
    token = folder / "saved" / neighbour.TOKEN
    return token.exists() and (neighbour.MEMORY / token.read_text()).exists()


def children(pid: int, what: str) -> list[int]:
    """The processes that a process started with these words in their command."""
    pids = [pid for task in Path(f"/proc/{pid}/task").iterdir() for pid in (task / "children").read_text().split()]
    return [int(pid) for pid in pids if what in Path(f"/proc/{pid}/cmdline").read_text()]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing happened to."""
    folder = tmp_path_factory.mktemp("whole")
    assert launch(run_in(folder), mains.train_and_die) == 0
    assert "restarts" not in logged(folder)[-1]
    return folder


def goes_on(whole: Path, folder: Path, deaths: list[tuple[int, str, int]], capfd: pytest.CaptureFixture[str],
            **values: Any) -> str:
    """Run with these deaths; return what it said on stderr."""
    settings = run_in(folder, **values)
    (folder / "deaths.json").write_text(json.dumps(deaths))
    assert launch(settings, mains.train_and_die) == 0
    said = capfd.readouterr()
    assert losses(folder) == losses(whole) and last_saved(folder) == last_saved(whole)
    assert not is_in_memory(folder)                              # nothing is left behind
    summary = json.loads((folder / "log/summary.json").read_text())
    assert (summary["ended"], summary["steps"], summary["restarts"]) == ("Finished", STEPS, len(deaths))
    assert said.out.count("Finished") == 1 and "Ended early" not in said.out
    for number, (rank, _, _) in enumerate(deaths, 1):
        assert f"distca: rank {rank} was ended by SIGKILL; restart {number} of 3 (run.restarts)" in said.err, said.err
    return said.err


def test_a_killed_rank_is_replaced_and_nothing_is_lost(whole: Path, tmp_path: Path,
                                                      capfd: pytest.CaptureFixture[str]) -> None:
    error = goes_on(whole, tmp_path, [(1, "backward", 4), (0, "writing to memory", 2)], capfd)
    assert error.count("resumed after step 2 from host memory") == 2  # killed in step 4, and while it was saved
    last = logged(tmp_path)[-1]
    assert last["restarts"] == 2 and last["restart_seconds"] > 0
    first, second = (len((tmp_path / f"log/steps.{number}.jsonl").read_text().splitlines()) for number in (1, 2))
    assert first == 3 and second >= 4 and last["repeated_steps"] == first - 2 + second - 2


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("moment", mains.MOMENTS)
def test_killed_at_any_moment(whole: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], moment: str,
                              rank: int) -> None:
    if moment == "naming it complete" and rank == 1:
        pytest.skip("rank 0 alone writes a host's manifest")
    goes_on(whole, tmp_path, [(1 - rank, "backward", 5), (rank, "loading", 0)] if moment == "loading" else
            [(rank, moment, 6)], capfd)


@pytest.mark.slow
def test_without_memory_the_newest_checkpoint_on_disk_is_used(whole: Path, tmp_path: Path,
                                                              capfd: pytest.CaptureFixture[str]) -> None:
    """Also by a run that was to begin anew, and once before there is any."""
    error = goes_on(whole, tmp_path, [(1, "forward", 2), (0, "optimizer", 5)], capfd, checkpoint__neighbour_every=0,
                    checkpoint__every=3, checkpoint__resume=False)
    assert "host memory" not in error


@pytest.mark.slow
@pytest.mark.parametrize("trial", range(TRIALS))
def test_killed_at_a_random_moment(whole: Path, tmp_path: Path, trial: int) -> None:
    """Any rank, while it starts, trains, saves or ends, up to three times."""
    chance = random.Random(trial)
    path = tmp_path / "run.toml"
    path.write_text(run_in(tmp_path, checkpoint__every=chance.choice([0, 3])).to_toml())
    run = subprocess.Popen([sys.executable, "-m", "distca", "train", str(path)], cwd=ROOT, text=True,
                           stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    for _ in range(chance.randrange(1, 4)):
        time.sleep(chance.uniform(1, 12))
        ranks = children(run.pid, "spawn_main") if run.poll() is None else []
        if ranks:
            os.kill(chance.choice(ranks), signal.SIGKILL)
    _, error = run.communicate(timeout=300)
    assert run.returncode == 0 and "Traceback" not in error, error
    assert losses(tmp_path) == losses(whole) and last_saved(tmp_path) == last_saved(whole)
    assert not is_in_memory(tmp_path)


@pytest.mark.slow
def test_a_rank_that_is_stopped_is_replaced_too(whole: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def stop() -> None:
        while not (tmp_path / "log/steps.jsonl").exists() or len(logged(tmp_path)) < 5:
            time.sleep(0.01)
        os.kill(json.loads((tmp_path / "log/rank1.json").read_text())["pid"], signal.SIGSTOP)

    settings = run_in(tmp_path)
    Path(settings.log.folder).mkdir()
    threading.Thread(target=stop, daemon=True).start()
    assert launch(settings, mains.train_impatiently) == 0
    assert losses(tmp_path) == losses(whole) and last_saved(tmp_path) == last_saved(whole)
    error = capfd.readouterr().err
    assert "rank 1 gave no sign of life for 5 s" in error and "restart 1 of 3" in error, error


@pytest.mark.slow
def test_torchrun_restarts_from_memory_too(whole: Path, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(run_in(tmp_path, run__restarts=0).to_toml())
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    run = subprocess.Popen([sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2",
                            "--max-restarts", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}",
                            "-m", "distca", "train", str(path)], cwd=ROOT, text=True,
                           stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                           env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"})
    while not (tmp_path / "log/steps.jsonl").exists() or len(logged(tmp_path)) < 5:
        assert run.poll() is None, run.communicate()
        time.sleep(0.01)
    os.kill(children(run.pid, "distca")[-1], signal.SIGKILL)
    _, error = run.communicate(timeout=300)
    assert run.returncode == 0 and "from host memory" in error, error
    assert losses(tmp_path) == losses(whole) and last_saved(tmp_path) == last_saved(whole)
    assert json.loads((tmp_path / "log/summary.json").read_text())["restarts"] == 1
    assert not is_in_memory(tmp_path)


def test_a_rank_that_dies_again_and_again_ends_the_run_with_one_line(tmp_path: Path,
                                                                     capfd: pytest.CaptureFixture[str]) -> None:
    settings = run_in(tmp_path, run__ranks=1, run__restarts=2)
    Path(settings.log.folder).mkdir()
    assert launch(settings, mains.die) == 128 + signal.SIGKILL
    died = "distca: rank 0 was ended by SIGKILL; "
    assert capfd.readouterr().err == (
        f"{died}restart 1 of 2 (run.restarts), from the newest checkpoint\n"
        f"{died}restart 2 of 2 (run.restarts), from the newest checkpoint\n"
        f"{died}run.restarts is 2 and all have been used\n")
    assert json.loads((tmp_path / "log/rank0.json").read_text())["restarts"] == [2, 2]


@pytest.mark.parametrize(("main", "code", "stop"), [("all_refuse", 2, False),
                                                    ("wait_without_listening", 128 + signal.SIGTERM, True)])
def test_no_restart_after_a_refusal_or_a_stop_signal(tmp_path: Path, capfd: pytest.CaptureFixture[str], main: str,
                                                     code: int, stop: bool) -> None:
    settings = run_in(tmp_path, run__ranks=1)
    Path(settings.log.folder).mkdir()

    def ask() -> None:
        while not list((tmp_path / "log").glob("rank*.json")):
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    if stop:
        threading.Thread(target=ask, daemon=True).start()
    assert launch(settings, getattr(mains, main)) == code
    assert "restart" not in capfd.readouterr().err


def test_a_rank_that_cannot_start_again_is_left_out(whole: Path, tmp_path: Path,
                                                    capfd: pytest.CaptureFixture[str]) -> None:
    """The same batch on the rank that is left; sums of float32 come in another order."""
    settings = run_in(tmp_path)
    (tmp_path / "deaths.json").write_text(json.dumps([(1, "backward", 4)]))
    assert launch(settings, mains.train_without_the_device) == 0
    error = capfd.readouterr().err
    assert error.count("the same batch on fewer ranks, because rank 1 failed twice before a step: run.ranks is 1 and "
                       "batch.tokens_per_rank 256") == 1 and "restart 3 of 3" in error, error
    assert losses(tmp_path) == pytest.approx(losses(whole), rel=1e-3)
    assert [record["tokens"] for record in logged(tmp_path)] == [256] * STEPS


@pytest.mark.parametrize(("ranks", "dedicated", "tensor", "tokens", "fewer"), [
    (8, 0, 1, 4096, (4, 8192)), (3, 1, 1, 100, (2, 200)), (6, 0, 2, 64, (4, 96)), (4, 0, 1, 3, (3, 4)),
    (2, 0, 2, 64, None), (1, 0, 1, 64, None)])
def test_the_same_batch_on_fewer_ranks(ranks: int, dedicated: int, tensor: int, tokens: int,
                                       fewer: tuple[int, int] | None) -> None:
    """7 do not share 32,768 tokens, 4 do; 2 × 96 = 3 × 64; odd tokens could not be cut into ping and pong."""
    found = on_fewer_ranks(Settings().with_values({"run.ranks": ranks, "attention.dedicated": dedicated,
                                                   "parallel.tensor": tensor, "batch.tokens_per_rank": tokens}))
    assert (found and (found.run.ranks, found.batch.tokens_per_rank)) == fewer


@pytest.mark.parametrize(("given", "left"), [("", "0,2"), ("4,5,6", "4,6"), ("4,5", "4,5")])
def test_which_failures_leave_a_device_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str,
                                           left: str) -> None:
    """Its own, twice in a row and before a step; a GPU that ranks share stays."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)            # which also restores it
    if not given:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    ranks = launching._LocalRanks(run_in(tmp_path, run__ranks=3, batch__tokens_per_rank=96), mains.train_and_die)
    own = Failure(0.0, 1, 1, "distca: rank 1 failed: no such device")
    for other in (own._replace(rank=0), own._replace(stepped=True), own._replace(text="distca: error: rank 2 is lost"),
                  own._replace(signal=signal.SIGKILL)):
        assert [ranks._on_fewer_ranks(one) for one in (own, other)] == ["", ""], other
    assert ranks._on_fewer_ranks(own) == "" and "run.ranks is 2 and" in ranks._on_fewer_ranks(own)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == left
    assert (ranks.settings.run.ranks, ranks.settings.batch.tokens_per_rank, ranks.training) == (2, 144, 2)


def test_servers_stay_and_serve_the_restarted_ranks(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The same process serves before and after; the rank that dies is the one whose address servers know."""
    settings = {"run__ranks": 3, "attention__dedicated": 1, "run__steps": 6}
    found = []
    for name, deaths in (("calm", []), ("killed", [(0, "backward", 4), (1, "forward", 2)])):
        folder = tmp_path / name
        folder.mkdir()
        chosen = run_in(folder, **settings)
        (folder / "deaths.json").write_text(json.dumps(deaths))
        assert launch(chosen, mains.train_and_note_servers) == 0
        found.append(losses(folder))
    noted = [json.loads(line) for line in (tmp_path / "killed/servers.jsonl").read_text().splitlines()]
    assert [restarts for restarts, _ in noted] == [0, 1, 2] and len({str(servers) for _, servers in noted}) == 1
    assert len(noted[0][1]) == 1 and found[0] == found[1]
    assert "restart 2 of 3" in capfd.readouterr().err
