"""What a decoder computes besides its sizes: the same weights mean another model with other rotary angles or windows.

A family is a model type of transformers that this decoder computes exactly. The catalogue's names bring their family's
numbers along, a config.json states its own, and single fields of the settings change either. Nothing here needs torch.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from distca.models import MODELS, TRAINABLE
from distca.spec import ModelShape, unknown_name
from distca.train.settings import Model
from distca.validation import UserError

SIZES = {"hidden": "hidden", "layers": "num_layers", "heads": "num_heads", "kv_heads": "num_kv_heads",
         "head_dim": "head_dim", "ffn": "ffn", "vocab": "vocab"}  # of the settings -> of a ModelShape


@dataclass(frozen=True, slots=True)
class Family:
    """A model type of transformers, and how it differs from Llama."""

    architecture: str        # its class in transformers
    qkv_bias: bool = False
    qk_norm: bool = False    # queries and keys are normed head by head, before the rotation


FAMILIES = {"llama": Family("LlamaForCausalLM"), "mistral": Family("MistralForCausalLM"),
            "qwen2": Family("Qwen2ForCausalLM", qkv_bias=True), "qwen3": Family("Qwen3ForCausalLM", qk_norm=True)}


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """All rotary wavelengths longer by `factor`."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3's stretching of rotary wavelengths: long ones by `factor`, short ones not at all, smooth between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN: dimensions that turn often in the original context stay, slow ones stretch, and cos and sin are scaled."""

    factor: float
    original_max_positions: int
    attention_factor: float      # what cos and sin are multiplied by
    beta_fast: float = 32.0      # turns in the original context from which on nothing stretches
    beta_slow: float = 1.0       # and up to which all does
    truncate: bool = True        # the two bounds lie on whole dimensions


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """A ModelShape and the few facts that change what its weights compute."""

    model: ModelShape
    rope_theta: float = 500_000.0
    norm_eps: float = 1e-5
    tied: bool = False
    rope_scaling: RopeScaling | None = None
    max_positions: int = 131_072                                 # written to config.json; nothing here is cut by it
    family: str = "llama"
    init_std: float = 0.02                                       # of weights that are drawn, not loaded

    @property
    def qkv_bias(self) -> bool:
        return FAMILIES[self.family].qkv_bias

    @property
    def qk_norm(self) -> bool:
        return FAMILIES[self.family].qk_norm

    def key(self) -> str:
        """Equal where weights are interchangeable."""
        sizes = {name: value for name, value in asdict(self.model).items() if name not in ("name", "windows")}
        sizes |= {"tied": self.tied, "qkv_bias": self.qkv_bias, "qk_norm": self.qk_norm}
        return ", ".join(f"{name}={value}" for name, value in sizes.items())


_QWEN = {"rope_theta": 1e6, "norm_eps": 1e-6}
_NAMED: dict[str, dict[str, Any]] = {  # by the beginning of a name, the first that fits; as in their config.json
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
    """Return a decoder of the catalogue."""
    if name not in TRAINABLE:
        raise unknown_name("model.name", name, TRAINABLE)
    return DecoderShape(MODELS[name], **next(facts for begin, facts in _NAMED.items() if name.startswith(begin)))


def decoder_shape(model: Model, vocab: int = 1) -> DecoderShape:
    """Return the decoder that settings ask for, for data of `vocab` different tokens."""
    source = model.load or model.config
    if source:
        from distca.train.model.huggingface import shape_from_hf  # which imports torch

    shape = _with_fields(shape_from_hf(source) if source else named_decoder(model.name), model)
    if not source and model.name == "tiny" and not model.vocab:  # ours, for any data
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
    """Refuse heads that cannot be rotated, or that transformers would not read back."""
    model = shape.model
    if model.head_dim % 2:
        raise UserError(f"model {model.name!r}: head_dim is {model.head_dim}; give an even one, of which rotary "
                        "positions turn one half against the other")
    if shape.family == "llama" and model.hidden % model.num_heads:
        raise UserError(f"model {model.name!r}: hidden is {model.hidden}, not a multiple of its {model.num_heads} "
                        "heads, which transformers' Llama refuses whatever head_dim is; choose others")


def _with_fields(shape: DecoderShape, model: Model) -> DecoderShape:
    """Return the shape with the fields that settings change."""
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
                            f"{before.num_layers} layers; give a model.config that says them for all")
        windows = windows[:1] * sizes["num_layers"]
    if model.window:
        windows = (model.window,) * sizes.get("num_layers", before.num_layers) if model.window > 0 else ()
        family = "mistral" if family == "llama" and windows else family  # Llama with windows
    facts: dict[str, Any] = {"rope_theta": model.rope_theta} if model.rope_theta else {}
    return replace(shape, model=replace(before, **sizes, windows=windows), family=family,
                   tied=(shape.tied or model.tied) and not model.untied, **facts)
