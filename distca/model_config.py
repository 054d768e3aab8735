"""The shape of a model from its Hugging Face config.json, for everyone who needs one.

Families name the same things differently; what is not found is named, with what the file would have to say. Nothing is
computed that a config does not state: a feed-forward without gate, or attention without heads, is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from distca.spec import Experts, Latent, ModelShape

CONFIG = "config.json"
MOST_CONFIG_BYTES = 10**7
ARCHITECTURES = (  # model_type: decoders with gated feed-forwards
    "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "gemma3_text", "phi3", "mixtral", "qwen3_moe",
    "gpt_oss", "deepseek_v2", "deepseek_v3")


def model_of_folder(path: str | Path) -> ModelShape:
    """The shape that a config.json states, named as the folder that it lies in."""
    folder = Path(path).resolve()
    return shape_of_config(read_config(path), (folder if folder.is_dir() else folder.parent).name)


def read_config(path: str | Path) -> dict[str, Any]:
    """A config.json, or that of a folder."""
    file = Path(path) / CONFIG if Path(path).is_dir() else Path(path)
    try:
        if file.stat().st_size > MOST_CONFIG_BYTES:
            raise ValueError(f"{file} has {file.stat().st_size} bytes; a config.json has less than {MOST_CONFIG_BYTES}")
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{file} cannot be read ({error.strerror}); give a folder with a {CONFIG}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not a config ({str(error)[:100]}); give a model's {CONFIG}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{file} holds a {type(content).__name__}; give a model's {CONFIG}")
    return content


def shape_of_config(config: Mapping[str, Any], name: str) -> ModelShape:
    """The decoder of a config; of a model for text and images that for text."""
    config = _text(config)
    kind = config.get("model_type")
    if kind not in ARCHITECTURES:
        raise ValueError(f"model {name!r}: model_type is {kind!r}; supported are: {', '.join(ARCHITECTURES)}")
    heads = _number(config, name, "num_attention_heads")
    hidden = _number(config, name, "hidden_size")
    value_dim, latent = 0, None
    if config.get("kv_lora_rank"):
        rope_dim = _number(config, name, "qk_rope_head_dim")
        latent = Latent(_number(config, name, "kv_lora_rank"), rope_dim, int(config.get("q_lora_rank") or 0))
        head_dim, value_dim = (_number(config, name, "qk_nope_head_dim") + rope_dim,
                               _number(config, name, "v_head_dim"))
    else:
        head_dim = _number(config, name, "head_dim", default=hidden // heads)
    kv_heads = heads if latent else _number(config, name, "num_key_value_heads", default=heads)
    experts = _experts(config, name)
    ffn = _number(config, name, "intermediate_size", default=experts.ffn if experts else None)
    return ModelShape(name, _number(config, name, "num_hidden_layers"), hidden, heads, kv_heads, head_dim, ffn,
                      _number(config, name, "vocab_size"), value_dim, experts, latent)


def _experts(config: Mapping[str, Any], name: str) -> Experts | None:
    """Counts as Mixtral, Qwen, gpt-oss and DeepSeek name them."""
    num = next((field for field in ("num_local_experts", "num_experts", "n_routed_experts") if config.get(field)), None)
    if num is None:
        return None
    each = next((field for field in ("moe_intermediate_size", "intermediate_size") if config.get(field)),
                "moe_intermediate_size")
    ffn = _number(config, name, each)
    return Experts(_number(config, name, num), _number(config, name, "num_experts_per_tok"), ffn,
                   int(config.get("n_shared_experts") or 0) * ffn, int(config.get("first_k_dense_replace") or 0))


def _text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    inner = config.get("text_config")
    return inner if isinstance(inner, Mapping) else config


def _number(config: Mapping[str, Any], name: str, field: str, default: int | None = None) -> int:
    value = config.get(field)
    value = default if value is None else value
    if value is None:
        raise ValueError(f"model {name!r}: its {CONFIG} has no {field}; add it")
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**31:
        raise ValueError(f"model {name!r}: {field} is {str(value)[:40]!r} in its {CONFIG}; give a whole number above 0")
    return value
