"""Training over NCCL on one GPU: each rank is a host of its own to NCCL, which connects them by sockets on loopback."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.multiprocess,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU; torch.cuda.is_available() is False"),
]
TOKENS = 4096  # of a micro-batch on all data ranks
BASE = {"run.device": "cuda", "run.dtype": "float32", "run.steps": 4, "run.timeout_seconds": 100, "model.layers": 8,
        "data.max_document": 2048, "batch.micro_batches": 8, "attention.cost": "h200"}
RUNS: dict[str, tuple[int, dict[str, Any]]] = {                  # ranks and settings
    "four stages": (4, {"parallel.pipeline": 4, "parallel.schedule": "interleaved_2"}),
    "four stages, auto": (4, {"parallel.pipeline": 4}),
    "four stages, same phase": (4, {"parallel.pipeline": 4, "parallel.schedule": "same_phase"}),
    "two stages of two": (4, {"parallel.pipeline": 2, "parallel.schedule": "interleaved_4", "model.recompute": "full"}),
    "two stages of two, 1f1b": (4, {"parallel.pipeline": 2, "parallel.schedule": "1f1b"}),
    "two stages and tensors": (4, {"parallel.pipeline": 2, "parallel.tensor": 2, "parallel.schedule": "interleaved_2",
                                   "model.recompute": "selective"}),
    "two stages and a server": (3, {"parallel.pipeline": 2, "attention.dedicated": 1,
                                    "parallel.schedule": "interleaved_1"}),
}


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def losses(folder: Path, ranks: int, values: dict[str, Any]) -> list[float]:
    """Train over NCCL, one process per rank; the losses of all steps."""
    split = (ranks - values.get("attention.dedicated", 0)) // (
        values.get("parallel.pipeline", 1) * values.get("parallel.tensor", 1))
    options = {**BASE, "batch.tokens_per_rank": TOKENS // split, "log.folder": folder, **values}
    arguments = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    shared = {**os.environ, "WORLD_SIZE": str(ranks), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
              "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "NCCL_SOCKET_IFNAME": "lo",
              "GLOO_SOCKET_IFNAME": "lo"}
    processes = [subprocess.Popen([sys.executable, "-m", "distca", "train", *arguments], text=True,
                                  stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                  env={**shared, "RANK": str(rank), "NCCL_HOSTID": f"h{rank}"})
                 for rank in range(ranks)]
    try:
        said = [process.communicate(timeout=150)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * ranks, "\n".join(said)
    return [json.loads(line)["loss"] for line in (folder / "steps.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, list[float]]:
    """Losses of one rank, with and without tied embeddings."""
    return {tied: losses(tmp_path_factory.mktemp("alone") / "run", 1, {"model.tied": str(tied).lower()})
            for tied in (False, True)}


@pytest.mark.parametrize("name", RUNS)
def test_pipelines_over_nccl_train_like_one_rank(name: str, alone: dict[bool, list[float]], tmp_path: Path) -> None:
    ranks, values = RUNS[name]
    tied = name == "four stages"
    found = losses(tmp_path / "run", ranks, {**values, "model.tied": str(tied).lower()})
    assert found == pytest.approx(alone[tied], abs=1e-5)
    assert found[-1] < found[0]
