"""Training on a GPU: four ranks that share it reach the losses of one rank that has it to itself."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.multiprocess,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU; torch.cuda.is_available() is False"),
]
TOKENS = 32_768  # of all ranks


def losses(folder: Path, ranks: int, dtype: str) -> list[float]:
    options = {"run.steps": 8, "run.ranks": ranks, "run.device": "cuda", "run.dtype": dtype, "run.timeout_seconds": 100,
               "data.max_document": 8192, "batch.tokens_per_rank": TOKENS // ranks, "log.folder": folder}
    arguments = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    done = subprocess.run([sys.executable, "-m", "distca", "train", *arguments], capture_output=True, text=True,
                          timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line)["loss"] for line in (folder / "steps.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(("dtype", "difference"), [("float32", 1e-5), ("bfloat16", 1e-2)])
def test_four_ranks_on_one_gpu_train_like_one(dtype: str, difference: float, tmp_path: Path) -> None:
    alone, four = losses(tmp_path / "alone", 1, dtype), losses(tmp_path / "four", 4, dtype)
    assert four == pytest.approx(alone, abs=difference)
    assert four[-1] < four[0] - 0.5
