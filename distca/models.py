"""Models by name: a catalogue of the common families, and any Hugging Face config.json.

Families use different field names for the same thing. Nothing is guessed: an error names the field that is missing,
and architectures without a gated feed-forward are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from distca.spec import Experts, Latent, ModelShape, unknown_name
from distca.validation import UserError, check_whole, read_json, short

CONFIG = "config.json"
ARCHITECTURES = (  # model_type: decoders with gated feed-forwards
    "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "gemma3_text", "phi3", "mixtral", "qwen3_moe",
    "gpt_oss", "deepseek_v2", "deepseek_v3")

_MODELS = (  # name, layers, hidden, heads, KV heads, head dim, feed-forward, vocabulary: values of their config.json
    ("llama2-7b", 32, 4096, 32, 32, 128, 11008, 32000), ("llama2-13b", 40, 5120, 40, 40, 128, 13824, 32000),
    ("llama2-70b", 80, 8192, 64, 8, 128, 28672, 32000), ("llama-34b", 48, 8192, 64, 8, 128, 22016, 32016),
    ("llama3-8b", 32, 4096, 32, 8, 128, 14336, 128256), ("llama3-70b", 80, 8192, 64, 8, 128, 28672, 128256),
    ("llama3-405b", 126, 16384, 128, 8, 128, 53248, 128256),
    ("llama3.2-1b", 16, 2048, 32, 8, 64, 8192, 128256), ("llama3.2-3b", 28, 3072, 24, 8, 128, 8192, 128256),
    ("mistral-7b", 32, 4096, 32, 8, 128, 14336, 32768), ("mistral-nemo-12b", 40, 5120, 32, 8, 128, 14336, 131072),
    ("mistral-small-24b", 40, 5120, 32, 8, 128, 32768, 131072),
    ("mistral-large-123b", 88, 12288, 96, 8, 128, 28672, 32768),
    ("qwen2.5-0.5b", 24, 896, 14, 2, 64, 4864, 151936), ("qwen2.5-1.5b", 28, 1536, 12, 2, 128, 8960, 151936),
    ("qwen2.5-3b", 36, 2048, 16, 2, 128, 11008, 151936), ("qwen2.5-7b", 28, 3584, 28, 4, 128, 18944, 152064),
    ("qwen2.5-14b", 48, 5120, 40, 8, 128, 13824, 152064), ("qwen2.5-32b", 64, 5120, 40, 8, 128, 27648, 152064),
    ("qwen2.5-72b", 80, 8192, 64, 8, 128, 29568, 152064),
    ("qwen3-0.6b", 28, 1024, 16, 8, 128, 3072, 151936), ("qwen3-1.7b", 28, 2048, 16, 8, 128, 6144, 151936),
    ("qwen3-4b", 36, 2560, 32, 8, 128, 9728, 151936), ("qwen3-8b", 36, 4096, 32, 8, 128, 12288, 151936),
    ("qwen3-14b", 40, 5120, 40, 8, 128, 17408, 151936), ("qwen3-32b", 64, 5120, 64, 8, 128, 25600, 151936),
    ("gemma2-2b", 26, 2304, 8, 4, 256, 9216, 256000), ("gemma2-9b", 42, 3584, 16, 8, 256, 14336, 256000),
    ("gemma2-27b", 46, 4608, 32, 16, 128, 36864, 256000),
    ("gemma3-1b", 26, 1152, 4, 1, 256, 6912, 262144), ("gemma3-4b", 34, 2560, 8, 4, 256, 10240, 262208),
    ("gemma3-12b", 48, 3840, 16, 8, 256, 15360, 262208), ("gemma3-27b", 62, 5376, 32, 16, 128, 21504, 262208),
    ("phi3-mini", 32, 3072, 32, 32, 96, 8192, 32064), ("phi4-14b", 40, 5120, 40, 10, 128, 17920, 100352),
    ("tiny", 2, 256, 8, 2, 32, 704, 257),
)
_EXPERT_MODELS = (
    ModelShape("mixtral-8x7b", 32, 4096, 32, 8, 128, 14336, 32000, experts=Experts(8, 2, 14336)),
    ModelShape("mixtral-8x22b", 56, 6144, 48, 8, 128, 16384, 32768, experts=Experts(8, 2, 16384)),
    ModelShape("qwen3-30b-a3b", 48, 2048, 32, 4, 128, 6144, 151936, experts=Experts(128, 8, 768)),
    ModelShape("qwen3-235b-a22b", 94, 4096, 64, 4, 128, 12288, 151936, experts=Experts(128, 8, 1536)),
    ModelShape("gpt-oss-20b", 24, 2880, 64, 8, 64, 2880, 201088, experts=Experts(32, 4, 2880)),
    ModelShape("gpt-oss-120b", 36, 2880, 64, 8, 64, 2880, 201088, experts=Experts(128, 4, 2880)),
    ModelShape("deepseek-v2-lite", 27, 2048, 16, 16, 192, 10944, 102400, 128, Experts(64, 6, 1408, 2816, 1),
               Latent(512, 64)),
    ModelShape("deepseek-v3", 61, 7168, 128, 128, 192, 18432, 129280, 128, Experts(256, 8, 2048, 2048, 3),
               Latent(512, 64, 1536)),
)
MODELS = {model.name: model for model in (*(ModelShape(*entry) for entry in _MODELS), *_EXPERT_MODELS)}
TRAINABLE = tuple(name for name, model in MODELS.items()
                  if name.startswith(("llama", "mistral", "qwen", "tiny")) and model.experts is None)

IN_YOUR_TRAINER = "train it in Transformers, torchtitan or Megatron-Core with enable of distca.integrations"


def model_named(name: str) -> ModelShape:
    """Return the shape of a model: by its name in the catalogue, or by the path of a config.json or its folder."""
    if name in MODELS:
        return MODELS[name]
    if Path(name).exists() or name.endswith(".json") or len(Path(name).parts) > 1:
        path = Path(name).resolve()
        return shape_of_config(read_config(name), (path if path.is_dir() else path.parent).name)
    raise UserError(f"{unknown_name('model', name, MODELS)}; or give a folder with a config.json")


def read_config(path: str | Path) -> dict[str, Any]:
    """Read a config.json, given the file or its folder."""
    file = Path(path) / CONFIG if Path(path).is_dir() else Path(path)
    if Path(path).is_dir() and not file.is_file():
        raise UserError(f"{path} has no {CONFIG}; give the folder of a Hugging Face model")
    content = read_json(file)
    if not isinstance(content, dict):
        raise UserError(f"{file} holds a {type(content).__name__}; give a model's {CONFIG}")
    return content


def shape_of_config(
    config: Mapping[str, Any], name: str, *, any_type: bool = False, windows: tuple[int | None, ...] = ()
) -> ModelShape:
    """Return the shape of a config's decoder; for a multimodal model, of its text decoder.

    With `any_type`, a model_type that is not in ARCHITECTURES is accepted, and neither experts nor the feed-forward
    size are read: such callers need only the attention. Sliding windows are not read from the config;
    pass them as `windows`.
    """
    inner = config.get("text_config")
    config = inner if isinstance(inner, Mapping) else config
    kind = config.get("model_type")
    if kind not in ARCHITECTURES and not any_type:
        raise UserError(f"model {name!r}: model_type is {kind!r}; supported are: {', '.join(ARCHITECTURES)}")
    heads = _number(config, name, "num_attention_heads")
    hidden = _number(config, name, "hidden_size")
    latent = None
    if config.get("kv_lora_rank"):
        rope_dim = _number(config, name, "qk_rope_head_dim")
        latent = Latent(_number(config, name, "kv_lora_rank"), rope_dim, int(config.get("q_lora_rank") or 0))
        head_dim, value_dim = (_number(config, name, "qk_nope_head_dim") + rope_dim,
                               _number(config, name, "v_head_dim"))
    else:
        head_dim = _number(config, name, "head_dim", default=hidden // heads)
        value_dim = _number(config, name, "v_head_dim", default=head_dim)
    kv_heads = heads if latent else _number(config, name, "num_key_value_heads", default=heads)
    experts = None if any_type else _experts(config, name)
    guess = experts.ffn if experts else None
    ffn = 4 * hidden if any_type else _number(config, name, "intermediate_size", default=guess)
    return ModelShape(name, _number(config, name, "num_hidden_layers"), hidden, heads, kv_heads, head_dim, ffn,
                      _number(config, name, "vocab_size"), value_dim, experts, latent, windows)


def _experts(config: Mapping[str, Any], name: str) -> Experts | None:
    """Read the experts, by the field names that Mixtral, Qwen, gpt-oss and DeepSeek use."""
    num = next((field for field in ("num_local_experts", "num_experts", "n_routed_experts") if config.get(field)), None)
    if num is None:
        return None
    for field, everywhere in (("decoder_sparse_step", 1), ("mlp_only_layers", [])):
        if config.get(field) not in (None, everywhere):
            raise UserError(f"model {name!r}: {field} is {short(config[field])}, so some layers have no experts; "
                            f"set it to {everywhere}, or use first_k_dense_replace")
    each = next((field for field in ("moe_intermediate_size", "intermediate_size") if config.get(field)),
                "moe_intermediate_size")
    ffn = _number(config, name, each)
    return Experts(_number(config, name, num), _number(config, name, "num_experts_per_tok"), ffn,
                   int(config.get("n_shared_experts") or 0) * ffn, int(config.get("first_k_dense_replace") or 0))


def _number(config: Mapping[str, Any], name: str, field: str, default: int | None = None) -> int:
    value = config.get(field)
    value = default if value is None else value
    if value is None:
        raise UserError(f"model {name!r}: its {CONFIG} has no {field}; add it")
    return check_whole(f"model {name!r}: {field}", value, most=2**31)
