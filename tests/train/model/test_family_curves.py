"""A run's loss is that of a plain loop around transformers' model and AdamW, for every family and any mesh."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from distca.train.data import open_corpora
from distca.train.model.huggingface import shape_from_hf
from distca.train.settings import Settings, load_settings
from tests.support.batches import batches_of

transformers = pytest.importorskip("transformers")
pytest.importorskip("safetensors")

STEPS, TOKENS, MICRO_BATCHES, LR, WARMUP = 10, 256, 2, 5e-3, 3
SMALL = {"vocab_size": 257, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4,
         "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 1024}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64, "rope_theta": 5000.0}
SLIDING, FULL = "sliding_attention", "full_attention"
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"rope_parameters": LLAMA3}),
    "mistral": ("mistral", {"sliding_window": 40}),
    "qwen2": ("qwen2", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 5000.0,
                                            "original_max_position_embeddings": 64}}),
    "qwen3": ("qwen3", {"use_sliding_window": True, "sliding_window": 30,
                        "layer_types": [FULL, SLIDING, FULL, SLIDING]}),
}
MESHES = {"1 rank": (1, 1, 1), "2 ranks": (2, 1, 1), "tensor": (2, 2, 1), "stages": (2, 1, 2), "4 ranks": (4, 1, 1),
          "tensor and stages": (4, 2, 2)}
DEFAULT = {("qwen3", "tensor")}                               # windows in some layers, norms of heads, heads cut


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts of many lengths, and a model of each family with weights, as transformers saves it."""
    made = tmp_path_factory.mktemp("families")
    (made / "texts").mkdir()
    for number, length in enumerate([700, 30, 260, 5, 410, 90, 1500, 12, 333, 64, 850, 205]):
        text = "".join(f"{number * word % 17} and {word % 7}, " for word in range(length // 8 + 1))
        (made / "texts" / f"{number:02}.txt").write_text(text[:length])
    for name, (family, changes) in FAMILIES.items():
        torch.manual_seed(3)
        config = transformers.AutoConfig.for_model(family, **{**SMALL, **changes})
        model = transformers.AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:                          # norms of one and biases of zero would hide some
                    parameter.add_(0.1 * torch.randn_like(parameter))
        model.save_pretrained(made / name)
    return made


def options(folder: Path, family: str) -> dict[str, str]:
    return {"model.load": str(folder / family), "data.source": "text", "data.path": str(folder / "texts"),
            "data.cache": str(folder / "cache"), "data.max_document": "600", "run.steps": str(STEPS),
            "run.dtype": "float64", "run.threads": "1", "run.timeout_seconds": "120",
            "batch.micro_batches": str(MICRO_BATCHES), "optimizer.lr": str(LR), "optimizer.warmup_steps": str(WARMUP),
            "optimizer.min_lr_ratio": "1"}


@cache
def plain_curve(folder: Path, family: str) -> tuple[list[float], list[float]]:
    """Losses and gradient norms of one process with nothing of ours but the batches; and the norms."""
    settings: Settings = load_settings(None, options(folder, family) | {
        "attention.mode": "home", "batch.tokens_per_rank": str(TOKENS), "run.ranks": "1"})
    corpus, _ = open_corpora(settings)
    loader = batches_of(corpus, settings, rank=0, world=1, model=shape_from_hf(folder / family).model)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder / family, attn_implementation="sdpa", dtype=torch.float64)
    groups = [{"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": 0.1},
              {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95))
    losses, norms = [], []
    for step in range(STEPS):
        total, labels = torch.zeros((), dtype=torch.float64), 0
        for row in loader.next().rows:
            starts = [*torch.where(row.positions == 0)[0].tolist(), len(row.tokens)]
            for begin, end in pairwise(starts):
                document = row.tokens[begin:end]
                total = total + cross_entropy(model(document[None]).logits[0, :-1], document[1:], reduction="sum")
                labels += len(document) - 1
        (total / labels).backward()
        losses.append(total.item() / labels)
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        for group in optimizer.param_groups:
            group["lr"] = LR * min(1.0, (step + 1) / WARMUP)
        optimizer.step()
        optimizer.zero_grad()
    loader.close()
    return losses, norms


@pytest.mark.multiprocess
@pytest.mark.parametrize(("family", "mesh"), [
    pytest.param(family, mesh, marks=() if (family, mesh) in DEFAULT else pytest.mark.slow)
    for family in FAMILIES for mesh in MESHES])
def test_the_curve_is_transformers(family: str, mesh: str, folder: Path, tmp_path: Path) -> None:
    """Transformers norms in float32, which bounds how near two curves can stay."""
    ranks, tensor, stages = MESHES[mesh]
    chosen = options(folder, family) | {
        "run.ranks": str(ranks), "parallel.tensor": str(tensor), "parallel.pipeline": str(stages),
        "batch.tokens_per_rank": str(TOKENS * tensor * stages // ranks), "log.folder": str(tmp_path)}
    command = [word for name, value in chosen.items() for word in (f"--{name}", value)]
    done = subprocess.run([sys.executable, "-m", "distca", "train", *command], capture_output=True, text=True,
                          timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    steps = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    losses, norms = plain_curve(folder, family)
    assert losses[0] - losses[-1] > 0.5
    assert [step["loss"] for step in steps] == pytest.approx(losses, abs=1e-4)
    assert [step["grad_norm"] for step in steps] == pytest.approx(norms, rel=1e-2)
