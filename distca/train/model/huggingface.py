"""Read and write the config.json of Hugging Face models, and load their weights into a decoder.

Fields are read exactly as transformers reads them for the model type, with its defaults. Features that this decoder
does not compute (experts, latent attention, other activations, dropout, quantized weights, ...) are refused by name.
Weights (safetensors) are read one tensor at a time and every rank keeps its shard of each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from math import log
from pathlib import Path
from typing import Any

import torch

from distca.models import ARCHITECTURES, CONFIG, IN_YOUR_TRAINER, read_config, shape_of_config
from distca.train.model.decoder import Decoder, write_parameter
from distca.train.model.shape import (
    FAMILIES,
    DecoderShape,
    LinearScaling,
    Llama3Scaling,
    RopeScaling,
    YarnScaling,
    check_heads,
)
from distca.validation import UserError, check_number, check_whole, read_json, short, to_install

_DEFAULTS: dict[str, dict[str, Any]] = {  # transformers' defaults that depend on the model type
    "llama": {"max_position_embeddings": 2048},
    "mistral": {"max_position_embeddings": 131_072, "sliding_window": 4096, "num_key_value_heads": 8},
    "qwen2": {"max_position_embeddings": 32_768, "sliding_window": 4096, "max_window_layers": 28,
              "num_key_value_heads": 32},
    "qwen3": {"max_position_embeddings": 32_768, "sliding_window": 4096, "max_window_layers": 28, "head_dim": 128,
              "num_key_value_heads": 32},
}
_NULLABLE = ("sliding_window", "num_key_value_heads")            # null: no window; as many KV heads as heads
_TRAINED: dict[str, tuple[Any, ...]] = {                         # supported values, the default first
    "hidden_act": ("silu",), "attention_bias": (False,), "mlp_bias": (False,),
    "partial_rotary_factor": (1.0, None), "is_causal": (True,), "attention_dropout": (0.0, None),
    "per_layer_config": (None, {}), "text_config": (None,), "quantization_config": (None, {}),
    "compression_config": (None, {})}
_UNREAD = {"llama": (), "mistral": ("attention_bias", "mlp_bias"), "qwen2": ("attention_bias", "mlp_bias"),
           "qwen3": ("mlp_bias",)}                               # fields of _TRAINED that transformers ignores
_ROPE_TYPES: dict[type, str] = {LinearScaling: "linear", Llama3Scaling: "llama3", YarnScaling: "yarn"}
_ROPE_NAMES = {"original_max_positions": "original_max_position_embeddings"}
SLIDING, FULL = "sliding_attention", "full_attention"


def shape_from_hf(path: str | Path) -> DecoderShape:
    """Return the decoder that a config.json, or the config.json of a folder, describes."""
    config = read_config(path)
    file = Path(path) / CONFIG if Path(path).is_dir() else Path(path)
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        about = "has experts or another decoder than these" if kind in ARCHITECTURES else "is not known"
        raise UserError(f"{file} has model_type {short(kind)}, which {about} and cannot be trained; supported are: "
                        f"{', '.join(FAMILIES)}; or {IN_YOUR_TRAINER}")
    for field, values in _TRAINED.items():
        if field not in _UNREAD[kind] and config.get(field, values[0]) not in values:
            raise UserError(f"{file} has {field} {short(config[field])}; only {values[0]!r} can be trained: change it "
                            "where the weights allow that, or give another model")
    config = _DEFAULTS[kind] | config
    for field, value in _DEFAULTS[kind].items():
        if config[field] is None and field not in _NULLABLE:
            raise UserError(f"{file} has {field} None; give a number, or leave it out for {value}")
    name = file.resolve().parent.name if file.name == CONFIG else file.stem
    model = shape_of_config(config, name, windows=_windows(config, file))
    if model.experts is not None or model.latent is not None:
        what = "experts" if model.experts is not None else "latent attention"
        raise UserError(f"{file} has {what}, which cannot be trained; supported are dense models of type: "
                        f"{', '.join(FAMILIES)}; or {IN_YOUR_TRAINER}")
    rope, scaling = config.get("rope_parameters") or {}, config.get("rope_scaling") or {}
    if rope and scaling and rope != scaling:
        raise UserError(f"{file} has rope_parameters {short(rope)} and rope_scaling {short(scaling)}; leave out one")
    rope = rope or scaling
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        raise UserError(f"{file} has rope_parameters {short(rope)}; give one object of names and values for all")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        turned = short(rope["partial_rotary_factor"])
        raise UserError(f"{file} has rope partial_rotary_factor {turned}; only 1.0 can be trained")
    theta = check_number(f"{file}: rope_theta", next(
        (one["rope_theta"] for one in (rope, config) if "rope_theta" in one), 10_000.0), above=0)
    positions = check_whole(f"{file}: max_position_embeddings", config["max_position_embeddings"])
    if "original_max_position_embeddings" in config:             # has precedence, as in transformers
        rope = rope | {"original_max_position_embeddings": config["original_max_position_embeddings"]}
    shape = DecoderShape(
        model, rope_theta=theta, norm_eps=check_number(f"{file}: rms_norm_eps", config.get("rms_norm_eps", 1e-6),
                                                       least=0),
        tied=_flag(config, file, "tie_word_embeddings"), rope_scaling=_rope_scaling(file, rope, positions, theta),
        max_positions=positions, family=kind,
        init_std=check_number(f"{file}: initializer_range", config.get("initializer_range", 0.02), least=0))
    check_heads(shape)
    return shape


def _flag(config: Mapping[str, Any], file: Path, field: str) -> bool:
    value = config.get(field, False)
    if not isinstance(value, bool):
        raise UserError(f"{file} has {field} {short(value)}; give true or false")
    return value


def config_of(shape: DecoderShape, dtype: str) -> dict[str, Any]:
    """Return the content of a config.json that both old and new versions of transformers can read."""
    model = shape.model
    config: dict[str, Any] = {
        "architectures": [FAMILIES[shape.family].architecture], "model_type": shape.family, "hidden_act": "silu",
        "hidden_size": model.hidden, "intermediate_size": model.ffn, "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads, "num_key_value_heads": model.num_kv_heads, "head_dim": model.head_dim,
        "vocab_size": model.vocab, "rms_norm_eps": shape.norm_eps, "tie_word_embeddings": shape.tied,
        "rope_theta": shape.rope_theta, "rope_scaling": None,
        "max_position_embeddings": shape.max_positions, "initializer_range": shape.init_std, "torch_dtype": dtype}
    if shape.rope_scaling is not None:
        facts = {_ROPE_NAMES.get(name, name): value for name, value in asdict(shape.rope_scaling).items()}
        config["rope_scaling"] = {"rope_type": _ROPE_TYPES[type(shape.rope_scaling)], **facts}
    if shape.family in ("llama", "qwen3"):
        config["attention_bias"] = False
    if shape.family == "llama":
        config["mlp_bias"] = False
    window = next((window for window in model.windows if window is not None), None)
    if shape.family == "mistral":
        config["sliding_window"] = window
    if shape.family in ("qwen2", "qwen3"):
        kinds = [FULL if of_layer is None else SLIDING for of_layer in model.windows] or [FULL] * model.num_layers
        config |= {"use_sliding_window": window is not None, "sliding_window": window, "layer_types": kinds,
                   "max_window_layers": kinds.index(SLIDING) if SLIDING in kinds else model.num_layers}
    return config


def _windows(config: Mapping[str, Any], file: Path) -> tuple[int | None, ...]:
    """Return each layer's window as transformers reads it, or () if no layer has one."""
    kind, layers = config["model_type"], config.get("num_hidden_layers")
    if not isinstance(layers, int) or isinstance(layers, bool) or not 0 < layers < 2**16:
        return ()                                                # shape_of_config refuses this number of layers
    kinds = config.get("layer_types")
    if kinds is not None and not (isinstance(kinds, list) and len(kinds) == layers and all(
            one in (SLIDING, FULL) for one in kinds)):
        raise UserError(f"{file} has layer_types {short(kinds)}; give {layers} of {SLIDING!r} and {FULL!r}")
    if kind == "llama":
        return ()
    window = config["sliding_window"]
    if kind == "mistral":                                        # with layer_types, transformers reads it as Ministral
        kinds = [FULL if window is None else SLIDING] * layers if kinds is None else kinds
        if len(set(kinds)) > 1:
            raise UserError(f"{file} has layer_types that mix windows, which model_type 'mistral' has for all layers "
                            "or none; give the same type for all")
        if SLIDING in kinds:
            return (check_whole(f"{file}: sliding_window", window),) * layers
        return ()
    window = check_whole(f"{file}: sliding_window", window) if _flag(config, file, "use_sliding_window") and (
        window is not None) else None
    if kinds is None and window is not None:
        first = check_whole(f"{file}: max_window_layers", config["max_window_layers"], least=0)
        kinds = [SLIDING if layer >= first else FULL for layer in range(layers)]
    if kinds is None or SLIDING not in kinds:
        return ()
    if window is None:
        raise UserError(f"{file} has layer_types with {SLIDING!r} but no sliding_window that is used; set "
                        "use_sliding_window and sliding_window")
    return tuple(window if one == SLIDING else None for one in kinds)


def _rope_scaling(file: Path, rope: Mapping[str, Any], positions: int, theta: float) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind not in _ROPE_TYPES.values():
        raise UserError(f"{file} has rope_type {short(kind)}; only default, linear, llama3 and yarn can be trained")

    def number(name: str, default: float | None = None) -> float:
        value = rope.get(name)
        return check_number(f"{file}: rope {name}", default if value is None else value, above=0)

    if kind == "linear":
        return LinearScaling(number("factor"))
    original = check_whole(f"{file}: rope original_max_position_embeddings",
                           rope.get("original_max_position_embeddings", positions))
    if kind == "llama3":
        low, high = number("low_freq_factor"), number("high_freq_factor")
        if high <= low:
            raise UserError(f"{file}: rope high_freq_factor is {high} and low_freq_factor {low}; give a larger one")
        return Llama3Scaling(number("factor"), low, high, original)
    if theta <= 1:
        raise UserError(f"{file}: rope_theta is {theta}, which yarn takes the logarithm of; give more than 1")
    factor = number("factor")
    scale, all_dims = rope.get("mscale"), rope.get("mscale_all_dim")
    inferred = _yarn_factor(factor, 1.0)
    if scale and all_dims:
        inferred = _yarn_factor(factor, number("mscale")) / _yarn_factor(factor, number("mscale_all_dim"))
    return YarnScaling(factor, original, number("attention_factor", inferred), number("beta_fast", 32.0),
                       number("beta_slow", 1.0), bool(rope.get("truncate", True)))


def _yarn_factor(factor: float, scale: float) -> float:
    """Return the factor by which YaRN scales cos and sin."""
    return 1.0 if factor <= 1 else 0.1 * scale * log(factor) + 1.0


EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_LAYER_NAMES = {                                                 # layer i: pre of segment i, post of segment i + 1
    "pre.norm": "input_layernorm", "pre.qkv.q": "self_attn.q_proj", "pre.qkv.k": "self_attn.k_proj",
    "pre.qkv.v": "self_attn.v_proj", "pre.q_norm": "self_attn.q_norm", "pre.k_norm": "self_attn.k_norm",
    "post.output": "self_attn.o_proj", "post.norm": "post_attention_layernorm", "post.mlp.gate": "mlp.gate_proj",
    "post.mlp.up": "mlp.up_proj", "post.mlp.down": "mlp.down_proj"}


def hf_name(name: str) -> str:
    """Return the Hugging Face name of a decoder's parameter."""
    if name == "head.weight":
        return HEAD
    _, segment, *path, kind = name.split(".")
    inner = ".".join(path)
    if inner in ("embed", "norm"):
        return {"embed": EMBEDDING, "norm": "model.norm.weight"}[inner]
    layer = int(segment) - (path[0] == "post")
    return f"model.layers.{layer}.{_LAYER_NAMES[inner]}.{kind}"


@torch.no_grad()
def load_hf(folder: str | Path, decoder: Decoder) -> None:
    """Load a folder's weights into a decoder or a pipeline stage, sharded or not. Rotary settings do not change."""
    folder = Path(folder)
    stored, wanted = shape_from_hf(folder).key(), decoder.shape.key()
    if stored != wanted:
        raise UserError(f"{folder} holds a model with {stored} but the decoder has {wanted}; build it with "
                        "shape_from_hf")
    parameters = {hf_name(name): parameter for name, parameter in decoder.named_parameters()}
    whole = {hf_name(name) for name, _ in Decoder(decoder.shape, device="meta").named_parameters()}
    found = set()
    pair = {EMBEDDING, HEAD}
    has_both = decoder.shape.tied and pair <= {name for name, _ in _tensors(folder)}
    first: torch.Tensor | None = None                            # the first read of a tied pair, to compare both
    for name, read in _tensors(folder):
        if has_both and name in pair:
            if first is not None and not torch.equal(first, read()):
                raise UserError(f"{folder} has tie_word_embeddings true but {HEAD} that is not {EMBEDDING}; set it to "
                                "false in config.json, as transformers takes it, or remove the former")
            first = read() if first is None else None
        if name in parameters:
            tensor = read()
            if tensor.shape != parameters[name].shape:
                raise UserError(f"{folder} has {name} with shape {tuple(tensor.shape)} but config.json makes it "
                                f"{tuple(parameters[name].shape)}; the folder is incomplete")
            write_parameter(parameters[name], tensor)
            found.add(name)
        elif not (name in whole or name.endswith("rotary_emb.inv_freq") or (name == HEAD and decoder.shape.tied)):
            raise UserError(f"{folder} has {name}, which this decoder does not; only plain models of its type can be "
                            "loaded")
    missing = sorted(parameters.keys() - found)
    if missing:
        raise UserError(f"{folder} lacks {missing[0]} and {len(missing) - 1} more; the folder is incomplete")


def check_weight_files(folder: str | Path) -> None:
    """Refuse invalid safetensors files before any rank starts; `load_hf` refuses a folder without weights."""
    if any((Path(folder) / file).is_file() for file in (INDEX, SINGLE)):
        for _ in _tensors(Path(folder)):
            pass


def _tensors(folder: Path) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
    """Yield every tensor's name and a function that reads the tensor, valid until the next item."""
    try:
        from safetensors import safe_open
    except ImportError:
        raise UserError("the package safetensors is not installed, which Hugging Face models need; "
                        f"{to_install('safetensors')}") from None
    if (folder / INDEX).is_file():
        content = read_json(folder / INDEX)
        weight_map = content.get("weight_map") if isinstance(content, dict) else None
        if not isinstance(weight_map, dict) or not all(
                isinstance(file, str) and Path(file).name == file for file in weight_map.values()):
            raise UserError(f"{folder}/{INDEX} has no weight_map of file names; give a folder that transformers wrote")
        files = sorted(set(weight_map.values()))
    else:
        files = [SINGLE]
    for file in files:
        if not (folder / file).is_file():
            raise UserError(f"{folder} has no {file}; give a folder with all of a model's safetensors")
        try:
            reader = safe_open(folder / file, framework="pt")
        except Exception as error:                               # SafetensorError derives directly from Exception
            raise UserError(f"{folder / file} is no safetensors file ({error}); give the weights that were saved"
                            ) from None
        with reader as opened:
            for name in opened.keys():  # noqa: SIM118  (not a mapping)
                yield name, partial(opened.get_tensor, name)
