"""Logits equal transformers' Llama, and its weights come and go through the folders it writes and reads."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from distca.kernels import dense_attention
from distca.spec import ModelShape
from distca.train.export import hf_name, load_hf, save_hf, shape_from_hf
from distca.train.model import Decoder, DecoderShape, RopeScaling, decoder_shape
from distca.train.settings import Model
from distca.train.stages import stage_of

if TYPE_CHECKING:
    from transformers.models.llama.modeling_llama import LlamaForCausalLM

transformers = pytest.importorskip("transformers")
pytest.importorskip("safetensors")

SCALING = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
           "original_max_position_embeddings": 32}
LENGTHS = [70, 1, 33, 16]
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no groups": {"num_key_value_heads": 4},
    "one key head": {"num_key_value_heads": 1},
    "tied": {"tie_word_embeddings": True},
    "head_dim of its own": {"head_dim": 12},
    "llama3 scaling": {"rope_parameters": {**SCALING, "rope_theta": 5000.0}},
    "theta, eps": {"rope_parameters": {"rope_type": "default", "rope_theta": 200.0}, "rms_norm_eps": 1e-2},
}


def random_llama(seed: int = 0, **changes: Any) -> LlamaForCausalLM:
    config = transformers.LlamaConfig(**{
        "vocab_size": 97, "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 512, "attn_implementation": "eager",
        "initializer_range": 0.2, **changes})
    torch.manual_seed(seed)
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)                     # ones would hide a norm that is never loaded
    return model


def random_tokens(vocab: int = 97) -> torch.Tensor:
    return torch.randint(0, vocab, (sum(LENGTHS),), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def our_logits(decoder: Decoder, tokens: torch.Tensor) -> torch.Tensor:
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    hidden = decoder.hidden(tokens, positions, lambda q, k, v: dense_attention(q, k, v, LENGTHS))
    return hidden @ decoder.head_weight.T


@torch.no_grad()
def their_logits(model: LlamaForCausalLM, tokens: torch.Tensor) -> torch.Tensor:
    return torch.cat([model(document[None]).logits[0] for document in tokens.split(LENGTHS)])


def loaded(folder: Path) -> Decoder:
    decoder = Decoder(shape_from_hf(folder), device="meta").to_empty(device="cpu")
    load_hf(folder, decoder)
    return decoder


@pytest.mark.parametrize("kind", KINDS)
def test_logits_equal_transformers_document_by_document(kind: str, tmp_path: Path) -> None:
    model = random_llama(**KINDS[kind])
    model.save_pretrained(tmp_path)
    tokens = random_tokens()
    theirs = their_logits(model, tokens)
    assert theirs.std() > 0.1
    torch.testing.assert_close(our_logits(loaded(tmp_path), tokens), theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_loads_what_we_save(kind: str, tmp_path: Path) -> None:
    random_llama(**KINDS[kind]).save_pretrained(tmp_path / "theirs")
    decoder = loaded(tmp_path / "theirs")
    decoder.reset_parameters(torch.Generator().manual_seed(5))
    save_hf(tmp_path / "ours", decoder)
    model, report = transformers.LlamaForCausalLM.from_pretrained(
        tmp_path / "ours", attn_implementation="eager", output_loading_info=True)
    assert not any(report[problem] for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokens = random_tokens()
    torch.testing.assert_close(their_logits(model.eval(), tokens), our_logits(decoder, tokens), rtol=1e-5, atol=1e-5)
    assert replace(shape_from_hf(tmp_path / "ours"), model=decoder.shape.model) == decoder.shape


def test_a_stage_loads_its_own_part(tmp_path: Path) -> None:
    random_llama().save_pretrained(tmp_path)
    whole = dict(loaded(tmp_path).named_parameters())
    seen = set()
    for stage in range(2):
        part = stage_of(Decoder(shape_from_hf(tmp_path), device="meta"), stage, 2, (2, 1)).to_empty(device="cpu")
        load_hf(tmp_path, part)
        for name, parameter in part.named_parameters():
            assert torch.equal(parameter, whole[name])
            seen.add(name)
    assert seen == whole.keys()


def test_old_config_files_are_read(tmp_path: Path) -> None:
    """As Llama 3.1's own: rope_theta beside rope_scaling, no head_dim."""
    random_llama().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config.pop("rope_parameters")
    config.pop("head_dim", None)
    config |= {"rope_theta": 5000.0, "rope_scaling": SCALING}
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = shape_from_hf(tmp_path)
    assert (shape.rope_theta, shape.rope_scaling, shape.model.head_dim) == (5000.0, RopeScaling(8.0, 1.0, 4.0, 32), 8)
    tokens = random_tokens()
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    torch.testing.assert_close(our_logits(loaded(tmp_path), tokens), their_logits(model, tokens), rtol=1e-5, atol=1e-5)


def test_several_files_and_an_index(tmp_path: Path) -> None:
    decoder = Decoder(DecoderShape(ModelShape("small", 2, 32, 4, 2, 8, 56, 97)))
    save_hf(tmp_path, decoder)
    save_hf(tmp_path, decoder, shard_bytes=20_000, dtype=torch.bfloat16)
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05}.safetensors"
    again = loaded(tmp_path)
    for name, parameter in decoder.named_parameters():
        assert torch.equal(again.get_parameter(name), parameter.bfloat16().float()), name
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    assert model.dtype == torch.bfloat16
    assert torch.equal(model.lm_head.weight, decoder.head_weight.bfloat16())
    save_hf(tmp_path, decoder)                                   # one file again: the index must not be what is read
    assert torch.equal(loaded(tmp_path).head_weight, decoder.head_weight)


def test_a_sources_other_files_come_along(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    random_llama(eos_token_id=7).save_pretrained(source)
    (source / "tokenizer.json").write_text("{}")
    decoder = loaded(source)
    extended = Decoder(replace(decoder.shape, rope_theta=8e6, max_positions=4096))
    load_hf(source, extended)
    save_hf(target, extended, source=source)
    config = transformers.LlamaConfig.from_pretrained(target)
    assert (config.eos_token_id, config.max_position_embeddings) == (7, 4096)
    assert config.rope_parameters["rope_theta"] == 8e6
    assert (target / "tokenizer.json").exists() and (target / "generation_config.json").exists()
    assert torch.equal(loaded(target).head_weight, decoder.head_weight)


def test_names_are_those_of_transformers() -> None:
    for tied in (False, True):
        model = random_llama(tie_word_embeddings=tied)
        shape = DecoderShape(ModelShape("small", 3, 32, 4, 2, 8, 56, 97), tied=tied)
        ours = {hf_name(name): tuple(p.shape) for name, p in Decoder(shape, device="meta").named_parameters()}
        assert ours == {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def test_settings_take_the_loaded_models_shape(tmp_path: Path) -> None:
    random_llama(tie_word_embeddings=True).save_pretrained(tmp_path)
    shape = decoder_shape(Model(load=str(tmp_path)), 97)
    assert shape.tied and shape.model.vocab == 97
    with pytest.raises(ValueError, match=r"vocabulary of 97 but the data has 98"):
        decoder_shape(Model(load=str(tmp_path)), 98)


@pytest.mark.parametrize("field, value", [
    ("model_type", "qwen2"), ("hidden_act", "gelu"), ("attention_bias", True), ("mlp_bias", True),
    ("rope_parameters", {"rope_type": "yarn", "factor": 2.0}),
])
def test_what_we_do_not_compute_is_refused(field: str, value: bool | dict[str, float | str] | str,
                                           tmp_path: Path) -> None:
    random_llama().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {field: value}))
    with pytest.raises(ValueError, match="rope_type 'yarn'" if field == "rope_parameters" else field):
        shape_from_hf(tmp_path)


def test_broken_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no config\.json"):
        shape_from_hf(tmp_path)
    random_llama().save_pretrained(tmp_path)
    decoder = loaded(tmp_path)
    with pytest.raises(ValueError, match=r"num_layers=3.*num_layers=2"):
        load_hf(tmp_path, Decoder(replace(decoder.shape, model=replace(decoder.shape.model, num_layers=2))))
    from safetensors.torch import load_file, save_file

    tensors = load_file(tmp_path / "model.safetensors")
    save_file({name: x for name, x in tensors.items() if name != "model.norm.weight"}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"lacks model\.norm\.weight"):
        load_hf(tmp_path, decoder)
    save_file({**tensors, "model.extra": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"model\.extra"):
        load_hf(tmp_path, decoder)
    save_file({**tensors, "model.norm.weight": torch.ones(5)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"model\.norm\.weight with shape \(5,\)"):
        load_hf(tmp_path, decoder)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"no model\.safetensors"):
        load_hf(tmp_path, decoder)
