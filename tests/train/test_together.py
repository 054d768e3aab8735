"""What runs alone must run together: families, windows, held-out loss, recomputation, tiles, dedicated ranks."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.multiprocess
STEPS, TOKENS = 4, 2048                                          # of a step, in two micro-batches
SMALL = {"vocab_size": 257, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4,
         "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 2048,
         "rms_norm_eps": 1e-6, "rope_theta": 1e4, "tie_word_embeddings": False, "hidden_act": "silu"}
MIXED = {**SMALL, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True,
         "sliding_window": 100, "max_window_layers": 2}
ALTERNATING = {**MIXED, "layer_types": ["sliding_attention", "full_attention"] * 2}
QWEN3 = {**SMALL, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}


def figures(config: dict[str, object], folder: Path, ranks: int, *more: str) -> list[float]:
    """Loss, and held-out loss, of every step of a run in float64."""
    options = dict(zip(more[::2], more[1::2], strict=True))
    taken = int(options.get("--parallel.tensor", 1)) * int(options.get("--parallel.pipeline", 1))
    data = (ranks - int(options.get("--attention.dedicated", 0))) // taken
    (folder / "config.json").write_text(json.dumps(config))
    done = subprocess.run(
        [sys.executable, "-m", "distca", "train", "--model.config", str(folder), "--run.ranks", str(ranks),
         "--run.steps", str(STEPS), "--run.dtype", "float64", "--run.threads", "1", "--run.timeout_seconds", "120",
         "--data.max_document", "900", "--batch.micro_batches", "2", "--eval.every", "2", "--eval.fraction", "0.1",
         "--eval.batches", "2", "--batch.tokens_per_rank", str(TOKENS // 2 // data), "--log.folder",
         str(folder / "log"), *more], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    steps = [json.loads(line) for line in (folder / "log/steps.jsonl").read_text().splitlines()]
    assert [("eval_loss" in step) for step in steps] == [number % 2 == 0 for number in range(1, STEPS + 1)]
    return [step[name] for step in steps for name in ("loss", "eval_loss") if name in step]


@pytest.mark.parametrize(("config", "ranks", "more"), [
    (MIXED, 3, ("--attention.dedicated", "1", "--model.recompute", "full", "--model.tile_tokens", "100")),
    pytest.param(QWEN3, 3, ("--parallel.pipeline", "2", "--attention.dedicated", "1", "--model.recompute", "selective"),
                 marks=pytest.mark.slow),
    pytest.param(QWEN3, 4, ("--parallel.tensor", "2", "--model.recompute", "full", "--model.tile_tokens", "64"),
                 marks=pytest.mark.slow),
    pytest.param(ALTERNATING, 4, ("--parallel.pipeline", "2", "--model.recompute", "full", "--model.tile_tokens",
                                  "100"), marks=pytest.mark.slow),
])
def test_everything_at_once_is_one_process(
    config: dict[str, object], ranks: int, more: tuple[str, ...], tmp_path: Path
) -> None:
    together, alone = tmp_path / "together", tmp_path / "alone"
    together.mkdir()
    alone.mkdir()
    expected = figures(config, alone, 1, "--attention.mode", "home")
    assert figures(config, together, ranks, *more) == pytest.approx(expected, abs=1e-10)
