"""Any config.json of our families gives transformers' logits, in the trainer, exported and enabled, or is refused.

Configs are drawn field by field: what a family reads, what it ignores, what others read, and what nobody does.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from distca.train.model.decoder import Decoder
from distca.train.model.huggingface import config_of, hf_name, load_hf, shape_from_hf
from distca.train.model.shape import FAMILIES
from tests.support.decoders import LENGTHS, logits_of, random_tokens
from tests.support.refusals import refusal

transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")

transformers.logging.disable_progress_bar()

ABSENT = "left out"
S, F = "sliding_attention", "full_attention"
BASE = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512, "initializer_range": 0.2,
        "rms_norm_eps": 1e-5}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
ROPES: list[Any] = [
    None, {}, {"rope_type": "default"}, {"rope_type": "default", "rope_theta": 300.0},
    {"type": "linear", "factor": 2.0},
    {"rope_type": "linear", "factor": 4, "rope_theta": 500.0}, {"rope_type": "linear"}, {"rope_type": None},
    {"rope_type": "dynamic", "factor": 2.0}, {"rope_type": "su"},
    {"type": "yarn", "rope_type": "default", "factor": 4.0}, LLAMA3, {**LLAMA3, "original_max_position_embeddings": 32},
    {**LLAMA3, "original_max_position_embeddings": None},
    {**LLAMA3, "original_max_position_embeddings": 32, "low_freq_factor": 4.0, "high_freq_factor": 1.0},
    {**LLAMA3, "original_max_position_embeddings": 32, "low_freq_factor": 2.0, "high_freq_factor": 2.0},
    {"rope_type": "yarn", "factor": 4.0}, YARN, {**YARN, "factor": None}, {**YARN, "factor": 0.5, "beta_fast": None},
    {**YARN, "attention_factor": 0.7, "beta_fast": 8, "beta_slow": 3, "truncate": False},
    {**YARN, "mscale": 0.7, "mscale_all_dim": 0.2, "truncate": None}, {**YARN, "mscale": 0.7, "mscale_all_dim": 0},
    {**YARN, "beta_fast": 1, "beta_slow": 32}, {**YARN, "beta_fast": 0},
    {"rope_type": "longrope", "factor": 2.0, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4,
     "original_max_position_embeddings": 16},
    {"rope_type": "proportional", "rope_theta": 100.0, "partial_rotary_factor": 0.5},
    {"rope_type": "default", "partial_rotary_factor": 0.5}, {"rope_type": "linear", "factor": 2, "mrope_section": [4]},
    {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}, {"rope_type": "default", "rope_theta": None},
    {F: {"rope_type": "default", "rope_theta": 7.0}, S: {"rope_type": "linear", "factor": 2.0}}]
FIELDS: dict[str, list[Any]] = {
    "rope_parameters": ROPES, "rope_scaling": ROPES, "rope_theta": [50.0, 500, 1e6, None],
    "partial_rotary_factor": [0.5, 1.0, None], "original_max_position_embeddings": [16, 64, None],
    "max_position_embeddings": [16, 64, 4096, None, ABSENT],
    "sliding_window": [None, 5, 100, 0, -1, ABSENT], "use_sliding_window": [True, False, None, "false", 1, ABSENT],
    "max_window_layers": [0, 1, 2, 3, 99, -1, ABSENT],
    "layer_types": [None, [F] * 3, [S] * 3, [S, F, S], [F, F, S], [F] * 2, ["attention"] * 3, ["chunked_attention"] * 3,
                    [], ["linear_attention", F, F]],
    "attention_bias": [True, False], "mlp_bias": [True, False], "qkv_bias": [True, False], "bias": [True],
    "head_dim": [8, 12, 16, 7, ABSENT], "num_key_value_heads": [1, 2, 4, 3, ABSENT],
    "num_attention_heads": [2, 4], "num_hidden_layers": [2, 3], "intermediate_size": [40, ABSENT],
    "vocab_size": [64, 97], "rms_norm_eps": [1e-5, 1e-2, 0.5, None, ABSENT], "layer_norm_eps": [0.1],
    "hidden_act": ["silu", "swish", "gelu", "gelu_pytorch_tanh", "relu", None], "hidden_activation": ["gelu"],
    "tie_word_embeddings": [True, False, None, "false", ABSENT], "initializer_range": [0.3, ABSENT],
    "pretraining_tp": [1, 2], "attention_dropout": [0.0, 0, 0.1], "hidden_dropout": [0.2], "resid_pdrop": [0.2],
    "logit_scale": [0.5], "logits_scaling": [2.0], "final_logit_softcapping": [3.0], "attn_logit_softcapping": [3.0],
    "query_pre_attn_scalar": [3], "attention_multiplier": [0.3], "embedding_multiplier": [2.0], "scale_emb": [2],
    "residual_multiplier": [0.5], "torch_dtype": ["float16", "bfloat16"], "dtype": ["float64", "bfloat16"],
    "quantization_config": [None, {}, {"quant_method": "fp8"}, {"quant_method": "bitsandbytes", "load_in_4bit": True}],
    "auto_map": [{"AutoModelForCausalLM": "modeling_x.XForCausalLM"}],
    "pad_token_id": [0, 5, None, -1], "bos_token_id": [3, None], "eos_token_id": [[4, 5], 7, None],
    "architectures": [["LlamaForSequenceClassification"], ["Qwen2ForCausalLM"], [], None],
    "is_causal": [False, True, None], "use_bidirectional_attention": [True], "is_decoder": [True],
    "per_layer_config": [{}, None, {"1": {"sliding_window": 3}}, {"0": {"num_key_value_heads": 1}}],
    "text_config": [{"vocab_size": 5}, None], "no_rope_layers": [[0, 1, 1]], "use_qk_norm": [True],
    "attention_chunk_size": [4], "num_experts": [0, 4], "kv_lora_rank": [0, None],
    "rope_interleaved": [True], "position_embedding_type": ["absolute"], "num_nextn_predict_layers": [1],
    "use_cache": [False], "unknown_thing": [{"a": 1}]}
SINGLE = [(family, field, value) for field, values in FIELDS.items() for value in values for family in FAMILIES]


def drawn(seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """A config, and what is unusual about it: one field, in the order of SINGLE, or from then on two to four."""
    rng = random.Random(seed)
    if seed < len(SINGLE):
        family, field, value = SINGLE[seed]
        changes = {field: value}
    else:
        family = rng.choice(list(FAMILIES))
        changes = {field: rng.choice(FIELDS[field]) for field in rng.sample(list(FIELDS), rng.randint(2, 4))}
    config = {**BASE, "model_type": family, "architectures": [FAMILIES[family].architecture]}
    if rng.random() < 0.5:                                       # short enough to be seen
        config |= {"sliding_window": 9, "use_sliding_window": True, "max_window_layers": rng.choice([0, 1])}
    return {field: value for field, value in (config | changes).items() if value != ABSENT}, changes


def their_model(folder: Path) -> Any:
    config = transformers.AutoConfig.from_pretrained(folder)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(std=0.2)
    return model.eval()


@torch.no_grad()
def their_logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    documents = tokens.split(LENGTHS)
    logits = torch.cat([model(document[None], use_cache=False).logits[0] for document in documents])
    assert logits.isfinite().all()
    return logits


@torch.no_grad()
def enabled_logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """All documents in one row."""
    from distca.integrations.huggingface import enable

    enable(model)
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    return model(tokens[None], position_ids=positions[None], use_cache=False).logits[0]


def written(folder: Path, config: dict[str, Any], weights: Mapping[str, torch.Tensor]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    safetensors.save_file({name: weight.detach().clone() for name, weight in weights.items()},
                          folder / "model.safetensors", {"format": "pt"})
    return folder


def loaded(folder: Path) -> Decoder:
    decoder = Decoder(shape_from_hf(folder), device="meta").to_empty(device="cpu")
    load_hf(folder, decoder)
    return decoder


def close(ours: torch.Tensor, theirs: torch.Tensor, about: object) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4 * max(1.0, float(theirs.abs().max())),
                               msg=lambda text: f"{about}: {text}")


def outcome(seed: int, folder: Path) -> str:
    """Whether we refuse a config, or transformers cannot run it, or everybody computes the same; raises elsewhere."""
    config, changes = drawn(seed)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    about = (seed, config["model_type"], changes)
    try:
        shape = shape_from_hf(folder)
    except ValueError as error:
        words = str(error).replace(str(folder), "")
        assert "\n" not in words
        assert any(part in words for field in changes for part in named_as(field)), (about, words)
        return "refused"
    tokens = random_tokens() % config["vocab_size"]
    model = their_model(folder)                                  # what we take, transformers must run
    theirs = their_logits(model, tokens)
    weights = {name: weight for name, weight in model.state_dict().items() if not (
        name == "lm_head.weight" and model.config.tie_word_embeddings)}
    decoder = loaded(written(folder, config, weights))
    with torch.no_grad():
        close(logits_of(decoder, tokens), theirs, about)
    try:
        close(enabled_logits(model, tokens), theirs, about)
    except ValueError as error:                                  # by a field that Llama ignores and others do not
        assert "distca cannot serve" in str(error), about
    ours = {hf_name(name): parameter for name, parameter in decoder.named_parameters()}
    out = written(folder / "out", config_of(shape, "float32"), ours)
    assert shape_from_hf(out) == replace(shape, model=replace(shape.model, name="out")), about
    again = transformers.AutoModelForCausalLM.from_pretrained(out, attn_implementation="eager").eval()
    close(their_logits(again, tokens), theirs, about)
    return "same"


def named_as(field: str) -> tuple[str, ...]:
    """How a refusal may name a field: rope's fields by themselves, experts by their kind, heads and layers by ours."""
    return {"rope_parameters": ("rope",), "rope_scaling": ("rope",), "num_experts": ("expert",),
            "num_key_value_heads": ("num_kv_heads",), "original_max_position_embeddings": ("original_max",),
            "num_hidden_layers": ("layer_types",), "num_attention_heads": ("num_heads",),
            "use_sliding_window": ("use_sliding_window", "sliding")}.get(field, (field,))


def seeds_of(seeds: list[int], folder: Path) -> Counter[str]:
    return Counter(outcome(seed, folder / str(seed)) for seed in seeds)


def test_a_sample_of_configs(tmp_path: Path) -> None:
    found = seeds_of(random.Random(7).sample(range(2 * len(SINGLE)), 90), tmp_path)
    assert found["same"] > 40 and found["refused"] > 10          # not vacuous


@pytest.mark.slow
@pytest.mark.parametrize("part", range(8))
def test_every_value_of_every_field(part: int, tmp_path: Path) -> None:
    seeds_of(list(range(part, 3 * len(SINGLE), 8)), tmp_path)


@pytest.mark.parametrize(("family", "changes"), [
    ("mistral", {"sliding_window": 9, "layer_types": [F] * 3}),
    ("mistral", {"sliding_window": 9, "layer_types": [S] * 3}),
    ("mistral", {"sliding_window": 9, "layer_types": None}),
    ("qwen2", {"attention_bias": True}),
    ("llama", {"rope_parameters": YARN, "original_max_position_embeddings": 16}),
])
def test_fields_that_were_read_otherwise(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    config = {**BASE, "model_type": family, "architectures": [FAMILIES[family].architecture], **changes}
    model, tokens = their_model(written(tmp_path, config, {})), random_tokens()
    theirs = their_logits(model, tokens)
    with torch.no_grad():
        close(logits_of(loaded(written(tmp_path, config, model.state_dict())), tokens), theirs, changes)
    close(enabled_logits(model, tokens), theirs, changes)


@pytest.mark.parametrize(("family", "changes", "words"), [
    ("llama", {"is_causal": None}, "is_causal None; only True"),
    ("llama", {"attention_dropout": 0.1}, "attention_dropout 0.1; only 0.0"),
    ("qwen3", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    ("qwen2", {"rope_scaling": YARN, "rope_parameters": {"rope_type": "default"}}, "rope_parameters .* leave out one"),
    ("llama", {"rope_parameters": {**LLAMA3, "high_freq_factor": 1.0}}, "high_freq_factor is 1.0 and low_freq_factor"),
    ("mistral", {"sliding_window": None, "layer_types": [S] * 3}, "sliding_window is None"),
    ("qwen3", {"head_dim": None}, "head_dim None; give a number, or leave it out for 128"),
    ("llama", {"tie_word_embeddings": "false"}, "tie_word_embeddings 'false'; give true or false"),
])
def test_what_is_refused(family: str, changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**BASE, "model_type": family, **changes}))
    with pytest.raises(ValueError, match=words):
        shape_from_hf(tmp_path)


def test_a_head_beside_a_tied_embedding(tmp_path: Path) -> None:
    """Transformers leaves them apart where they differ, so the file contradicts its config."""
    config = {**BASE, "model_type": "llama", "tie_word_embeddings": True}
    weights = their_model(written(tmp_path, config, {})).state_dict()
    loaded(written(tmp_path, config, weights))                   # both, and the same
    weights["lm_head.weight"] = weights["lm_head.weight"] + 1
    assert "tie_word_embeddings true but lm_head.weight" in refusal(loaded, written(tmp_path, config, weights))


def test_drawn_weights_follow_initializer_range(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**BASE, "model_type": "llama", "initializer_range": 0.3}))
    weight = Decoder(shape_from_hf(tmp_path)).head_weight         # 97 * 32 draws: their std is off by 1.3 %, one sigma
    assert abs(float(weight.detach().std()) / 0.3 - 1) < 0.1


@pytest.mark.parametrize(("kind", "changes"), [
    ("Mistral", {"layer_types": [F] * 3}), ("Ministral", {"layer_types": [F, S, F]}), ("Gemma2", {}), ("Olmo3", {}),
    ("Gemma3Text", {"layer_types": [S, F, S]}), ("Cohere2", {}), ("Starcoder2", {}), ("Phi3", {"pad_token_id": 0})])
def test_enabled_layers_have_the_windows_that_transformers_gives_them(kind: str, changes: dict[str, Any]) -> None:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**BASE, "sliding_window": 9, **changes})
    model = getattr(transformers, f"{kind.removesuffix('Text')}ForCausalLM")._from_config(
        config, attn_implementation="eager", dtype=torch.float32).eval()
    tokens = random_tokens()
    theirs = their_logits(model, tokens)
    close(enabled_logits(model, tokens), theirs, kind)
    window, config.sliding_window = config.sliding_window, 1000
    assert (their_logits_of(model, tokens) - theirs).abs().max() > 0.01 and window == 9  # not vacuous


def their_logits_of(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    model.set_attn_implementation("eager")
    return their_logits(model, tokens)
