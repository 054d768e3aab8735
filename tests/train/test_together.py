"""What runs alone must run together: families, windows, held-out loss, recomputation, tiles, dedicated ranks."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.training import logged, small_run, train

pytestmark = pytest.mark.multiprocess
STEPS, TOKENS = 4, 2048                                          # of a step, in two micro-batches
SMALL = {"vocab_size": 257, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4,
         "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 2048,
         "rms_norm_eps": 1e-6, "rope_theta": 1e4, "tie_word_embeddings": False, "hidden_act": "silu"}
MIXED = {**SMALL, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True,
         "sliding_window": 100, "max_window_layers": 2}
ALTERNATING = {**MIXED, "layer_types": ["sliding_attention", "full_attention"] * 2}
QWEN3 = {**SMALL, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}


def figures(config: dict[str, object], folder: Path, ranks: int, **values: Any) -> list[float]:
    """Loss, and held-out loss, of every step of a run in float64."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    train(small_run(folder / "log", ranks, TOKENS // 2, **{
        "model__config": str(folder), "run__steps": STEPS, "data__max_document": 900, "batch__micro_batches": 2,
        "eval__every": 2, "eval__fraction": 0.1, "eval__batches": 2, **values}))
    losses, held = logged(folder / "log", "loss"), logged(folder / "log", "eval_loss")
    assert [(loss is not None) for loss in held] == [number % 2 == 0 for number in range(1, STEPS + 1)]
    return [loss for pair in zip(losses, held, strict=True) for loss in pair if loss is not None]


@pytest.mark.parametrize(("config", "ranks", "values"), [
    (MIXED, 3, {"attention__dedicated": 1, "model__recompute": "full", "model__tile_tokens": 100}),
    pytest.param(QWEN3, 3, {"parallel__pipeline": 2, "attention__dedicated": 1, "model__recompute": "selective"},
                 marks=pytest.mark.slow),
    pytest.param(QWEN3, 4, {"parallel__tensor": 2, "model__recompute": "full", "model__tile_tokens": 64},
                 marks=pytest.mark.slow),
    pytest.param(ALTERNATING, 4, {"parallel__pipeline": 2, "model__recompute": "full", "model__tile_tokens": 100},
                 marks=pytest.mark.slow),
])
def test_everything_at_once_is_one_process(
    config: dict[str, object], ranks: int, values: dict[str, Any], tmp_path: Path
) -> None:
    expected = figures(config, tmp_path / "alone", 1, attention__mode="home")
    assert figures(config, tmp_path / "together", ranks, **values) == pytest.approx(expected, abs=1e-10)
