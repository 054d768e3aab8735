"""Logits and gradients of every family equal those of transformers' own classes, document by document."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from distca.models import MODELS, TRAINABLE
from distca.spec import ModelShape
from distca.train.model.build import stage_of
from distca.train.model.decoder import Decoder
from distca.train.model.huggingface import config_of, hf_name, load_hf, shape_from_hf
from distca.train.model.shape import DecoderShape, Llama3Scaling, decoder_shape, named_decoder
from distca.train.settings import Model, Settings
from distca.train.settings.checks import check_settings
from tests.support.decoders import LENGTHS, logits_of, random_tokens

transformers = pytest.importorskip("transformers")
pytest.importorskip("safetensors")

SMALL = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 3, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.2}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 5000.0}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, no groups": ("llama", {"num_key_value_heads": 4}),
    "llama, one key head": ("llama", {"num_key_value_heads": 1}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, head_dim of its own": ("llama", {"head_dim": 12}),
    "llama, llama3 scaling": ("llama", {"rope_parameters": {**LLAMA3, "rope_theta": 5000.0}}),
    "llama, linear scaling": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}),
    "llama, theta, eps": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 200.0},
                                    "rms_norm_eps": 1e-2}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral, windows": ("mistral", {"sliding_window": 9, "head_dim": 16}),
    "qwen2": ("qwen2", {}),
    "qwen2, tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2, yarn": ("qwen2", {"rope_parameters": YARN}),
    "qwen2, yarn as DeepSeek says it": ("qwen2", {"rope_parameters": {
        **YARN, "mscale": 1.0, "mscale_all_dim": 0.5, "beta_fast": 8.0, "beta_slow": 2.0, "truncate": False}}),
    "qwen2, upper windows": ("qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3, tied, yarn": ("qwen3", {"tie_word_embeddings": True, "rope_parameters": YARN, "head_dim": 8}),
    "qwen3, windows mixed in": ("qwen3", {
        "head_dim": 16, "use_sliding_window": True, "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}),
}


def random_model(family: str, seed: int = 0, **changes: Any) -> Any:
    """A small model of transformers with random norms and biases, which ones and zeros would hide."""
    config = transformers.AutoConfig.for_model(family, **{**SMALL, "attn_implementation": "eager", **changes})
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
            elif name.endswith(".bias"):
                parameter.normal_(std=0.5)
    return model


def their_logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    return torch.cat([model(document[None]).logits[0] for document in tokens.split(LENGTHS)])


def loaded(folder: Path) -> Decoder:
    decoder = Decoder(shape_from_hf(folder), device="meta").to_empty(device="cpu")
    load_hf(folder, decoder)
    return decoder


@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_gradients_equal_transformers(kind: str, tmp_path: Path) -> None:
    family, changes = KINDS[kind]
    model = random_model(family, **changes)
    model.save_pretrained(tmp_path)
    decoder, tokens = loaded(tmp_path), random_tokens()
    theirs, ours = their_logits(model, tokens), logits_of(decoder, tokens)
    assert theirs.std() > 0.1
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    labels = torch.randint(0, 97, tokens.shape, generator=torch.Generator().manual_seed(2))
    for logits in (ours, theirs):
        cross_entropy(logits, labels).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    for name, parameter in decoder.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[hf_name(name)], rtol=1e-4, atol=1e-6, msg=name)


def test_windows_and_scalings_do_change_what_is_compared(tmp_path: Path) -> None:
    """Not vacuous: without its windows, or its scaling, a model gives other logits."""
    for kind in ("mistral, windows", "qwen2, upper windows", "qwen3, windows mixed in", "qwen2, yarn",
                 "llama, linear scaling"):
        family, changes = KINDS[kind]
        random_model(family, **changes).save_pretrained(tmp_path / kind)
        decoder = loaded(tmp_path / kind)
        plain = Decoder(replace(decoder.shape, rope_scaling=None, model=replace(decoder.shape.model, windows=())))
        plain.load_state_dict(decoder.state_dict())
        apart = logits_of(plain, random_tokens()) - logits_of(decoder, random_tokens())
        assert apart.abs().max() > 0.01, kind


@pytest.mark.parametrize("kind", KINDS)
def test_a_config_survives_being_written(kind: str, tmp_path: Path) -> None:
    """What `config_of` says means the same to us and to transformers as what it came from."""
    family, changes = KINDS[kind]
    theirs = transformers.AutoConfig.for_model(family, **{**SMALL, **changes})
    theirs.save_pretrained(tmp_path)
    shape = shape_from_hf(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config_of(shape, "float32")))
    assert shape_from_hf(tmp_path) == shape
    again = transformers.AutoConfig.from_pretrained(tmp_path)
    assert type(again) is type(theirs)
    assert again.head_dim == getattr(theirs, "head_dim", 8)      # Qwen2 states none where it is hidden / heads
    for field in ("rms_norm_eps", "tie_word_embeddings", "sliding_window", "layer_types", "vocab_size"):
        assert getattr(again, field, None) == getattr(theirs, field, None), field
    given = theirs.rope_parameters
    assert {name: again.rope_parameters.get(name) for name in given if not name.startswith("mscale")} == {
        name: value for name, value in given.items() if not name.startswith("mscale")}


def test_a_stage_loads_its_own_part(tmp_path: Path) -> None:
    for family in ("qwen2", "qwen3"):
        random_model(family, head_dim=16).save_pretrained(tmp_path / family)
        whole = dict(loaded(tmp_path / family).named_parameters())
        seen = set()
        for stage in range(2):
            part = stage_of(Decoder(shape_from_hf(tmp_path / family), device="meta"), stage, (2, 1))
            load_hf(tmp_path / family, part.to_empty(device="cpu"))
            for name, parameter in part.named_parameters():
                assert torch.equal(parameter, whole[name])       # copies
                seen.add(name)
        assert seen == whole.keys()


def test_old_config_files_are_read(tmp_path: Path) -> None:
    """As Llama 3.1's own: rope_theta beside rope_scaling, no head_dim."""
    random_model("llama").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config.pop("rope_parameters")
    config.pop("head_dim", None)
    config |= {"rope_theta": 5000.0, "rope_scaling": LLAMA3}
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = shape_from_hf(tmp_path)
    assert (shape.rope_theta, shape.rope_scaling, shape.model.head_dim) == (5000.0, Llama3Scaling(8.0, 1.0, 4.0, 32), 8)
    tokens = random_tokens()
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    torch.testing.assert_close(logits_of(loaded(tmp_path), tokens), their_logits(model, tokens), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("family", "left_out"), [
    ("mistral", ("sliding_window", "head_dim")), ("qwen2", ("use_sliding_window", "sliding_window", "layer_types")),
    ("qwen3", ("head_dim", "rms_norm_eps", "layer_types"))])
def test_what_a_config_leaves_out_is_what_transformers_takes(
    family: str, left_out: tuple[str, ...], tmp_path: Path
) -> None:
    transformers.AutoConfig.for_model(family, **SMALL).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({n: v for n, v in config.items() if n not in left_out}))
    shape, theirs = shape_from_hf(tmp_path), transformers.AutoConfig.from_pretrained(tmp_path)
    assert (shape.model.head_dim, shape.norm_eps) == (getattr(theirs, "head_dim", 8), theirs.rms_norm_eps)
    assert set(shape.model.layer_windows) == {theirs.sliding_window}


def test_names_are_those_of_transformers() -> None:
    for family in ("llama", "mistral", "qwen2", "qwen3"):
        for tied in (False, True):
            model = random_model(family, tie_word_embeddings=tied, head_dim=8)
            shape = DecoderShape(ModelShape("small", 3, 32, 4, 2, 8, 56, 97), tied=tied, family=family)
            ours = {hf_name(name): tuple(p.shape) for name, p in Decoder(shape, device="meta").named_parameters()}
            assert ours == {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(("name", "count"), [                    # as their model cards and papers state them
    ("llama3-8b", 8_030_261_248), ("llama3.2-1b", 1_235_814_400), ("mistral-7b", 7_248_023_552),
    ("qwen2.5-0.5b", 494_032_768), ("qwen2.5-7b", 7_615_616_512), ("qwen3-0.6b", 596_049_920),
    ("qwen3-8b", 8_190_735_360)])
def test_named_models_count_as_published(name: str, count: int) -> None:
    assert sum(p.numel() for p in Decoder(named_decoder(name), device="meta").parameters()) == count


@pytest.mark.parametrize(("name", "theta", "eps", "tied", "scaling"), [  # as their config.json say
    ("llama2-7b", 1e4, 1e-5, False, None), ("llama3-8b", 5e5, 1e-5, False, None),
    ("llama3.2-3b", 5e5, 1e-5, True, Llama3Scaling(32.0, 1.0, 4.0, 8192)),
    ("mistral-nemo-12b", 1e6, 1e-5, False, None), ("qwen2.5-3b", 1e6, 1e-6, True, None),
    ("qwen2.5-7b", 1e6, 1e-6, False, None), ("qwen2.5-14b", 1e6, 1e-5, False, None),
    ("qwen2.5-32b", 1e6, 1e-5, False, None), ("qwen3-4b", 1e6, 1e-6, True, None),
    ("qwen3-14b", 1e6, 1e-6, False, None)])
def test_a_name_brings_its_numbers(
    name: str, theta: float, eps: float, tied: bool, scaling: Llama3Scaling | None
) -> None:
    shape = named_decoder(name)
    assert (shape.rope_theta, shape.norm_eps, shape.tied, shape.rope_scaling) == (theta, eps, tied, scaling)
    assert shape.model.windows == ()


def test_every_dense_name_can_be_trained() -> None:
    dense = {name for name, model in MODELS.items() if model.experts is None and model.latent is None}
    assert set(TRAINABLE) == {name for name in dense if not name.startswith(("gemma", "phi"))}
    for name in TRAINABLE:
        shape = named_decoder(name)
        assert shape.model == MODELS[name]
        assert shape.family == ("llama" if name == "tiny" else
                                name.split("-")[0].rstrip("0123456789.") + {"qwen2.5": "2", "qwen3": "3"}.get(
                                    name.split("-")[0], ""))


def test_fields_change_a_named_model() -> None:
    shape = decoder_shape(Model(name="llama3.2-1b", hidden=1024, layers=4, heads=16, kv_heads=4, ffn=2816, vocab=32000,
                                untied=True, rope_theta=1e4))
    assert shape.model == ModelShape("llama3.2-1b", 4, 1024, 16, 4, 64, 2816, 32000)
    assert (shape.tied, shape.rope_theta, shape.family) == (False, 1e4, "llama")
    assert decoder_shape(Model(name="qwen3-0.6b", hidden=512)).model.head_dim == 128     # was not hidden / heads
    assert decoder_shape(Model(name="tiny", hidden=512)).model.head_dim == 64            # was
    windowed = decoder_shape(Model(name="tiny", window=64, layers=3))
    assert (windowed.model.windows, windowed.family) == ((64, 64, 64), "mistral")
    assert decoder_shape(Model(name="qwen2.5-0.5b", window=64)).family == "qwen2"


def test_a_window_of_a_config_can_be_taken_away(tmp_path: Path) -> None:
    transformers.AutoConfig.for_model("mistral", **SMALL).save_pretrained(tmp_path)
    assert decoder_shape(Model(config=str(tmp_path))).model.windows == (4096,) * 3
    assert decoder_shape(Model(config=str(tmp_path / "config.json"), window=-1)).model.windows == ()
    assert decoder_shape(Model(config=str(tmp_path), layers=5)).model.windows == (4096,) * 5


@pytest.mark.parametrize(("values", "words"), [
    ({"model.heads": 6, "model.hidden": 256}, "model.hidden is 256 and model.heads is 6"),
    ({"model.head_dim": 7}, "head_dim is 7; give an even one"),
    ({"model.heads": 6, "model.head_dim": 32}, "hidden is 256, not a multiple of its 6 heads"),
    ({"model.kv_heads": 3}, "num_heads is 8, not a multiple of num_kv_heads 3"),
    ({"model.name": "mixtral-8x7b"}, "model.name is 'mixtral-8x7b'"),
    ({"model.tied": True, "model.untied": True}, "both true"),
    ({"model.load": "here", "model.config": "there"}, "give one of them"),
    ({"model.load": "here", "model.layers": 3}, "model.layers is 3 but model.load is 'here'"),
    ({"model.name": "qwen3-0.6b", "parallel.pipeline": 2, "parallel.schedule": "same_phase"}, "model.untied"),
    ({"model.name": "qwen2.5-0.5b", "parallel.tensor": 4, "run.ranks": 4}, "2 KV heads|14 heads"),
    ({"checkpoint.export": "out"}, "checkpoint.export is 'out' but checkpoint.folder is empty"),
])
def test_settings_that_contradict_are_one_line(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words) as refused:
        check_settings(Settings().with_values(values))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(("family", "changes", "words"), [
    ("llama", {"model_type": "gpt2"}, "model_type 'gpt2', which is not known .* supported are: llama, mistral, qwen2"),
    ("llama", {"model_type": "mixtral"}, "model_type 'mixtral', which has experts .*; or train it in .* with enable"),
    ("llama", {"model_type": "deepseek_v3"}, "model_type 'deepseek_v3', which has experts or another decoder"),
    ("llama", {"model_type": None}, "model_type None"),
    ("llama", {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    ("llama", {"attention_bias": True}, "attention_bias True"),
    ("qwen3", {"attention_bias": True}, "attention_bias True"),
    ("llama", {"mlp_bias": True}, "mlp_bias True"),
    ("llama", {"num_attention_heads": None}, "no num_attention_heads"),
    ("llama", {"num_key_value_heads": 3}, "num_heads is 4, not a multiple of num_kv_heads 3"),
    ("llama", {"num_local_experts": 8, "num_experts_per_tok": 2}, "has experts"),
    ("llama", {"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, "rope_type 'longrope'"),
    ("llama", {"rope_parameters": {"rope_type": "linear"}}, "rope factor is None"),
    ("qwen2", {"layer_types": ["full_attention"]}, "give 3 of 'sliding_attention' and 'full_attention'"),
    ("qwen2", {"layer_types": ["sliding_attention"] * 3}, "no sliding_window that is used"),
    ("mistral", {"layer_types": ["sliding_attention", "full_attention", "full_attention"]}, "mix windows"),
    ("qwen3", {"layer_types": [["full_attention"], 2, None]}, "give 3 of 'sliding_attention' and 'full_attention'"),
    ("llama", {"rope_parameters": {"rope_type": "yarn"}}, "rope factor is None"),
    ("llama", {"model_type": ["llama"]}, "model_type"),
    ("mistral", {"sliding_window": 0}, "sliding_window is 0"),
])
def test_what_we_do_not_compute_is_refused(
    family: str, changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    transformers.AutoConfig.for_model(family, **SMALL).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(ValueError, match=words) as refused:
        shape_from_hf(tmp_path)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(("changes", "words"), [
    ({"num_attention_heads": None}, "model.config is 'mine': model 'mine': its config.json has no num_attention_heads"),
    ({"model_type": "gpt_neox"}, "model_type 'gpt_neox', which is not known and cannot be trained; supported are"),
    ({"model_type": "qwen3_moe"}, "model_type 'qwen3_moe', which has experts"),
    ({"num_key_value_heads": 3}, "not a multiple of num_kv_heads 3"),
    ({"tie_word_embeddings": True}, "model.untied"),
    ({"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 2}, "stages share their attention calls"),
    (None, "mine has no config.json"),
])
def test_a_bad_config_ends_the_command_in_one_line(
    changes: dict[str, Any] | None, words: str, run: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    (tmp_path / "mine").mkdir()
    if changes is not None:
        small = SMALL | {"num_hidden_layers": 4}
        transformers.AutoConfig.for_model("llama", **small).save_pretrained(tmp_path / "mine")
        config = json.loads((tmp_path / "mine/config.json").read_text())
        (tmp_path / "mine/config.json").write_text(json.dumps(config | changes))
    code, _, err = run("train", "--model.config", "mine", "--parallel.pipeline", "2", "--parallel.schedule",
                       "same_phase")
    assert code == 2 and err.count("\n") == 1 and words in err, err


def test_a_vocabulary_that_is_too_small_is_refused(tmp_path: Path) -> None:
    random_model("llama", tie_word_embeddings=True).save_pretrained(tmp_path)
    assert decoder_shape(Model(load=str(tmp_path)), 97).model.vocab == 97
    for model, words in ((Model(load=str(tmp_path)), "model.load .* vocabulary of 97 but the data has 98"),
                         (Model(config=str(tmp_path)), "model.config .* or set model.vocab to 98"),
                         (Model(name="tiny", vocab=90), "model.name is 'tiny' with a vocabulary of 90")):
        with pytest.raises(ValueError, match=words):
            decoder_shape(model, 98)
