"""Shape of the decoder to train: sizes, and the facts that change what its weights compute (rotary angles, windows).

A shape comes from the catalogue's name or from a config.json; fields of the settings then override it. A family is a
model type of transformers that this decoder computes exactly. Does not import torch.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from distca.models import MODELS, TRAINABLE
from distca.spec import ModelShape, unknown_name
from distca.train.settings import Model
from distca.validation import UserError

SIZES = {"hidden": "hidden", "layers": "num_layers", "heads": "num_heads", "kv_heads": "num_kv_heads",
         "head_dim": "head_dim", "ffn": "ffn", "vocab": "vocab"}  # field of the settings -> field of ModelShape


@dataclass(frozen=True, slots=True)
class Family:
    """A model type of transformers and its differences from Llama."""

    architecture: str        # class in transformers
    qkv_bias: bool = False
    qk_norm: bool = False    # RMSNorm on each head of q and k before the rotation


FAMILIES = {"llama": Family("LlamaForCausalLM"), "mistral": Family("MistralForCausalLM"),
            "qwen2": Family("Qwen2ForCausalLM", qkv_bias=True), "qwen3": Family("Qwen3ForCausalLM", qk_norm=True)}


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Multiply all rotary wavelengths by `factor`."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Multiply long rotary wavelengths by `factor` and keep short ones, with a smooth transition, as Llama 3 does."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN: multiply the wavelengths of slowly turning dimensions by `factor`, keep fast ones, scale cos and sin."""

    factor: float
    original_max_positions: int
    attention_factor: float      # scale of cos and sin
    beta_fast: float = 32.0      # at least this many turns in the original context: unchanged
    beta_slow: float = 1.0       # at most this many: multiplied by the whole factor
    truncate: bool = True        # round both bounds to whole dimensions


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """A ModelShape and the facts that change what its weights compute."""

    model: ModelShape
    rope_theta: float = 500_000.0
    norm_eps: float = 1e-5
    tied: bool = False
    rope_scaling: RopeScaling | None = None
    max_positions: int = 131_072                                 # only written to config.json
    family: str = "llama"
    init_std: float = 0.02                                       # of randomly initialized matrices

    @property
    def qkv_bias(self) -> bool:
        return FAMILIES[self.family].qkv_bias

    @property
    def qk_norm(self) -> bool:
        return FAMILIES[self.family].qk_norm

    def key(self) -> str:
        """Return a key that is equal for shapes with interchangeable weights."""
        sizes = {name: value for name, value in asdict(self.model).items() if name not in ("name", "windows")}
        sizes |= {"tied": self.tied, "qkv_bias": self.qkv_bias, "qk_norm": self.qk_norm}
        return ", ".join(f"{name}={value}" for name, value in sizes.items())


_QWEN = {"rope_theta": 1e6, "norm_eps": 1e-6}
_NAMED: dict[str, dict[str, Any]] = {  # by prefix of the name, the first match; from each config.json
    "tiny": {},
    "llama2": {"rope_theta": 1e4},
    "llama-34b": {"rope_theta": 1e6},
    "llama3-405b": {"rope_scaling": Llama3Scaling(8.0, 1.0, 4.0, 8192)},
    "llama3.2": {"rope_scaling": Llama3Scaling(32.0, 1.0, 4.0, 8192), "tied": True},
    "llama3": {},
    "mistral-small": {"family": "mistral", "rope_theta": 1e8},
    "mistral": {"family": "mistral", "rope_theta": 1e6},
    **{f"qwen2.5-{size}b": {"family": "qwen2", "tied": True, **_QWEN} for size in ("0.5", "1.5", "3")},
    "qwen2.5-7b": {"family": "qwen2", **_QWEN},
    "qwen2.5": {"family": "qwen2", "rope_theta": 1e6},
    **{f"qwen3-{size}b": {"family": "qwen3", "tied": True, **_QWEN} for size in ("0.6", "1.7", "4")},
    "qwen3": {"family": "qwen3", **_QWEN},
}


def named_decoder(name: str) -> DecoderShape:
    """Return the catalogue's decoder of this name."""
    if name not in TRAINABLE:
        raise unknown_name("model.name", name, TRAINABLE)
    return DecoderShape(MODELS[name], **next(facts for begin, facts in _NAMED.items() if name.startswith(begin)))


def decoder_shape(model: Model, vocab: int = 1) -> DecoderShape:
    """Return the decoder that the settings describe, and check that its vocabulary holds the data's `vocab` tokens."""
    source = model.load or model.config
    if source:
        from distca.train.model.huggingface import shape_from_hf  # imports torch

    shape = _with_fields(shape_from_hf(source) if source else named_decoder(model.name), model)
    if not source and model.name == "tiny" and not model.vocab:  # our test model: any vocabulary
        shape = replace(shape, model=replace(shape.model, vocab=max(vocab, shape.model.vocab)))
    check_heads(shape)
    if vocab > shape.model.vocab:
        field, value = next((field, value) for field, value in (
            ("model.load", model.load), ("model.config", model.config), ("model.name", model.name)) if value)
        raise UserError(f"{field} is {value!r} with a vocabulary of {shape.model.vocab} but the data has {vocab} "
                        "different tokens; give that model's own tokenizer as data.tokenizer"
                        + ("" if model.load else f", or set model.vocab to {vocab}"))
    return shape


def check_heads(shape: DecoderShape) -> None:
    """Refuse heads that rotary embeddings cannot rotate or that transformers would not load."""
    model = shape.model
    if model.head_dim % 2:
        raise UserError(f"model {model.name!r}: head_dim is {model.head_dim}; give an even one: rotary "
                        "embeddings rotate pairs of dimensions")
    if shape.family == "llama" and model.hidden % model.num_heads:
        raise UserError(f"model {model.name!r}: hidden is {model.hidden}, not a multiple of its {model.num_heads} "
                        "heads, which transformers' Llama refuses for any head_dim; choose others")


def _with_fields(shape: DecoderShape, model: Model) -> DecoderShape:
    """Return the shape with the fields that the settings override."""
    sizes = {ours: getattr(model, field) for field, ours in SIZES.items() if getattr(model, field)}
    before = shape.model
    if ("hidden" in sizes or "num_heads" in sizes) and "head_dim" not in sizes and (
            before.num_heads * before.head_dim == before.hidden):
        hidden, heads = sizes.get("hidden", before.hidden), sizes.get("num_heads", before.num_heads)
        if hidden % heads:
            raise UserError(f"model.hidden is {hidden} and model.heads is {heads}, which does not divide it; choose "
                            "others, or give model.head_dim")
        sizes["head_dim"] = hidden // heads
    if "head_dim" in sizes:
        sizes["value_dim"] = sizes["head_dim"]
    family, windows = shape.family, before.windows
    if "num_layers" in sizes and windows and not model.window:
        if len(set(windows)) > 1:
            raise UserError(f"model.layers is {sizes['num_layers']} but the model mixes windows over its "
                            f"{before.num_layers} layers; give a model.config with all windows")
        windows = windows[:1] * sizes["num_layers"]
    if model.window:
        windows = (model.window,) * sizes.get("num_layers", before.num_layers) if model.window > 0 else ()
        family = "mistral" if family == "llama" and windows else family  # a Llama with windows is a Mistral
    facts: dict[str, Any] = {"rope_theta": model.rope_theta} if model.rope_theta else {}
    return replace(shape, model=replace(before, **sizes, windows=windows), family=family,
                   tied=(shape.tied or model.tied) and not model.untied, **facts)
