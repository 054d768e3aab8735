"""Shapes from config.json: published parameter counts, the models of transformers themselves, refusals by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from distca.cost.work import layer_parameters
from distca.models import ARCHITECTURES, MODELS, model_named, shape_of_config

# Billions of parameters as published, those a token takes where there are experts, and whether the head is the
# embedding. Norms, biases and vision towers are in some of the counts and in none of ours.
PUBLISHED = {
    "llama2-7b": (6.74, None, False), "llama2-13b": (13.02, None, False), "llama2-70b": (68.98, None, False),
    "llama3-8b": (8.03, None, False), "llama3-70b": (70.55, None, False), "llama3-405b": (405.9, None, False),
    "llama3.2-1b": (1.24, None, True), "llama3.2-3b": (3.21, None, True),
    "mistral-7b": (7.25, None, False), "mistral-nemo-12b": (12.25, None, False),
    "mistral-small-24b": (23.57, None, False), "mistral-large-123b": (122.6, None, False),
    "qwen2.5-0.5b": (0.494, None, True), "qwen2.5-1.5b": (1.54, None, True), "qwen2.5-3b": (3.09, None, True),
    "qwen2.5-7b": (7.62, None, False), "qwen2.5-14b": (14.77, None, False), "qwen2.5-32b": (32.76, None, False),
    "qwen2.5-72b": (72.71, None, False),
    "qwen3-0.6b": (0.596, None, True), "qwen3-1.7b": (1.72, None, True), "qwen3-4b": (4.02, None, True),
    "qwen3-8b": (8.19, None, False), "qwen3-14b": (14.77, None, False), "qwen3-32b": (32.76, None, False),
    "gemma2-2b": (2.61, None, True), "gemma2-9b": (9.24, None, True), "gemma2-27b": (27.2, None, True),
    "gemma3-1b": (1.0, None, True), "gemma3-4b": (3.88, None, True), "gemma3-12b": (11.77, None, True),
    "gemma3-27b": (27.0, None, True), "phi3-mini": (3.82, None, False), "phi4-14b": (14.66, None, False),
    "mixtral-8x7b": (46.7, 12.9, False), "mixtral-8x22b": (140.6, 39.1, False),
    "qwen3-30b-a3b": (30.5, 3.3, False), "qwen3-235b-a22b": (235.0, 22.0, False),
    "gpt-oss-20b": (20.9, 3.6, False), "gpt-oss-120b": (116.8, 5.1, False),
    "deepseek-v2-lite": (15.7, 2.4, False), "deepseek-v3": (671.0, 37.0, False),
}


def billions(name: str, tied: bool, active: bool = False) -> float:
    model = MODELS[name]
    layers = model.num_layers * layer_parameters(model, active=active)
    return (layers + (1 if tied else 2) * model.hidden * model.vocab) / 1e9


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_catalogue_has_as_many_parameters_as_published(name: str) -> None:
    total, active, tied = PUBLISHED[name]
    assert billions(name, tied) == pytest.approx(total, rel=0.02)
    if active is not None:                                       # some count the embedding, some do not
        low, high = (billions(name, tied, active=True) - 1e-9 * count * MODELS[name].hidden * MODELS[name].vocab
                     for count in (1, 0))
        assert 0.95 * low <= active <= 1.05 * high


def test_every_model_of_the_catalogue_is_checked() -> None:
    assert set(PUBLISHED) | {"llama-34b", "tiny"} == set(MODELS)


# -------------------------------------------------------------------------------------------------------- transformers

SMALL: dict[str, Any] = {"num_hidden_layers": 3, "hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2,
                         "head_dim": 16, "intermediate_size": 160, "vocab_size": 320}
SMALL_BY_KIND: dict[str, dict[str, Any]] = {
    "phi3": {"head_dim": None, "pad_token_id": 0}, "mixtral": {"num_local_experts": 5, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 48, "decoder_sparse_step": 1},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "layer_types": ["full_attention"] * 3},
    "gemma3_text": {"layer_types": ["full_attention"] * 3}, "gemma2": {"layer_types": ["full_attention"] * 3},
    "deepseek_v2": {"num_key_value_heads": 6, "kv_lora_rank": 24, "q_lora_rank": 40, "qk_rope_head_dim": 8,
                    "qk_nope_head_dim": 16, "v_head_dim": 12, "n_routed_experts": 8, "num_experts_per_tok": 2,
                    "moe_intermediate_size": 32, "n_shared_experts": 2, "first_k_dense_replace": 1, "n_group": 1,
                    "topk_group": 1, "head_dim": 8},
}
SMALL_BY_KIND["deepseek_v3"] = SMALL_BY_KIND["deepseek_v2"]


@pytest.mark.parametrize("kind", [kind for kind in ARCHITECTURES if kind != "gemma3"])
def test_layers_have_the_weights_of_transformers_own(kind: str) -> None:
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    wanted = {**SMALL, **SMALL_BY_KIND.get(kind, {})}
    config = transformers.AutoConfig.for_model(kind, **{name: value for name, value in wanted.items()
                                                        if value is not None})
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    weights = sum(parameter.numel() for name, parameter in model.model.layers.named_parameters()
                  if parameter.ndim > 1 and not name.endswith("bias"))
    shape = shape_of_config(config.to_dict(), kind)
    assert shape.num_layers * layer_parameters(shape) == pytest.approx(weights, rel=1e-12)
    assert (shape.num_heads, shape.vocab, shape.hidden) == (6, 320, 96)


# --------------------------------------------------------------------------------------------------------------- files


def test_a_folder_and_its_file_name_a_model(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**SMALL, "model_type": "qwen3"}), encoding="utf-8")
    for path in (folder, folder / "config.json"):
        model = model_named(str(path))
        assert (model.name, model.num_layers, model.num_kv_heads, model.head_dim) == ("mine", 3, 2, 16)


def test_values_may_have_a_head_size_of_their_own_without_latents() -> None:
    shape = shape_of_config({**SMALL, "model_type": "mimo_v2_flash", "v_head_dim": 12}, "x", any_type=True)
    assert (shape.head_dim, shape.value_dim) == (16, 12)


def test_the_text_of_a_model_for_images_counts() -> None:
    shape = shape_of_config({"model_type": "gemma3", "text_config": {**SMALL, "model_type": "gemma3_text"}}, "x")
    assert shape.hidden == 96


@pytest.mark.parametrize("content, fragments", [
    ({**SMALL, "model_type": "bert"}, ("model_type is 'bert'", "llama")),
    ({**SMALL, "model_type": "llama", "num_attention_heads": None}, ("no num_attention_heads",)),
    ({**SMALL, "model_type": "llama", "hidden_size": 1.5}, ("hidden_size is 1.5",)),
    ({**SMALL, "model_type": "llama", "num_key_value_heads": 4}, ("not a multiple of num_kv_heads 4",)),
    ({**SMALL, "model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 3}, ("per_token is 3",)),
    ({**SMALL, "model_type": "qwen3_moe", "num_experts": 4, "decoder_sparse_step": 2}, ("decoder_sparse_step is 2",)),
    ([1], ("holds a list",)), ("{", ("broken JSON",)), ("[" * 100_000, ("too deep",)),
])
def test_what_is_no_config_is_named(tmp_path: Path, content: dict[str, Any] | list[int] | str,
                                    fragments: tuple[str, ...]) -> None:
    file = tmp_path / "config.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    with pytest.raises(ValueError) as refusal:
        model_named(str(file))
    assert all(fragment in str(refusal.value) for fragment in fragments)


def test_a_missing_folder_and_an_unknown_name_say_what_to_give() -> None:
    with pytest.raises(ValueError, match="no such file"):
        model_named("no/such/folder")
    with pytest.raises(ValueError, match=r"did you mean 'llama3-8b'.*config\.json"):
        model_named("lama3-8b")
