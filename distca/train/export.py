"""Hugging Face folders of Llama models, read and written: people bring the model they have and take it back.

A folder is config.json and safetensors, one file or several with an index. Weights are read and written one at a time,
so that a sharded decoder never stands whole anywhere: ranks keep their own shares, and rank 0 writes what all gather.
What this decoder does not compute (biases, other activations, other rotary scalings) is refused by name.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from distca.models import CONFIG, read_config, shape_of_config
from distca.train.checkpoint_files import Reader
from distca.train.checkpoint_folder import read_manifest
from distca.train.model import Decoder, DecoderShape, RopeScaling, write_parameter
from distca.validation import check_number, check_whole, read_json, short

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD_BYTES = 5 * 10**9
_LAYER_NAMES = {                                                 # of pre, in segment i, and of post, in segment i + 1
    "pre.norm": "input_layernorm",
    "pre.qkv.q": "self_attn.q_proj",
    "pre.qkv.k": "self_attn.k_proj",
    "pre.qkv.v": "self_attn.v_proj",
    "post.output": "self_attn.o_proj",
    "post.norm": "post_attention_layernorm",
    "post.mlp.gate": "mlp.gate_proj",
    "post.mlp.up": "mlp.up_proj",
    "post.mlp.down": "mlp.down_proj",
}


def hf_name(name: str) -> str:
    """A parameter's name in a Hugging Face Llama."""
    if name == "head.weight":
        return "lm_head.weight"
    _, segment, *path, _ = name.split(".")
    inner = ".".join(path)
    if inner in ("embed", "norm"):
        return {"embed": "model.embed_tokens.weight", "norm": "model.norm.weight"}[inner]
    layer = int(segment) - (path[0] == "post")
    return f"model.layers.{layer}.{_LAYER_NAMES[inner]}.weight"


def shape_from_hf(folder: str | Path) -> DecoderShape:
    """The decoder that a folder's config.json describes."""
    config = read_config(folder)
    expected = {"model_type": "llama", "hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
    for field, value in expected.items():
        if config.get(field, value) != value:
            raise ValueError(f"{folder}/{CONFIG} has {field} {config[field]!r}; only {value!r} can be loaded")
    model = shape_of_config({"model_type": "llama", **config}, Path(folder).name)
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise ValueError(f"{folder}/{CONFIG} has rope_parameters {short(rope)}; give an object of names and values")
    where = f"{folder}/{CONFIG}:"
    theta = next((one["rope_theta"] for one in (rope, config) if one.get("rope_theta") is not None), 10_000.0)
    return DecoderShape(
        model, rope_theta=check_number(f"{where} rope_theta", theta, above=0),
        norm_eps=check_number(f"{where} rms_norm_eps", config.get("rms_norm_eps", 1e-6), least=0),
        tied=bool(config.get("tie_word_embeddings", False)), rope_scaling=_rope_scaling(folder, rope),
        max_positions=check_whole(f"{where} max_position_embeddings", config.get("max_position_embeddings", 2048)))


@torch.no_grad()
def load_hf(folder: str | Path, decoder: Decoder) -> None:
    """Fill a decoder, or a stage of one, sharded or not, with a folder's weights; rotary settings stay its own."""
    folder = Path(folder)
    theirs, ours = shape_from_hf(folder).key(), decoder.shape.key()
    if theirs != ours:
        raise ValueError(f"{folder} holds a model with {theirs} but the decoder has {ours}; "
                         "build it with shape_from_hf")
    parameters = {hf_name(name): parameter for name, parameter in decoder.named_parameters()}
    whole = {hf_name(name) for name, _ in Decoder(decoder.shape, device="meta").named_parameters()}
    found = set()
    for name, read in _tensors(folder):
        if name in parameters:
            tensor = read()
            if tensor.shape != parameters[name].shape:
                raise ValueError(f"{folder} has {name} with shape {tuple(tensor.shape)} but config.json makes it "
                                 f"{tuple(parameters[name].shape)}; the folder is not whole")
            write_parameter(parameters[name], tensor)
            found.add(name)
        elif not (name in whole or name.endswith("rotary_emb.inv_freq")
                  or (name == "lm_head.weight" and decoder.shape.tied)):
            raise ValueError(f"{folder} has {name}, which this decoder does not; only plain Llama models can be loaded")
    missing = sorted(parameters.keys() - found)
    if missing:
        raise ValueError(f"{folder} lacks {missing[0]} and {len(missing) - 1} more; the folder is not whole")


@torch.no_grad()
def save_hf(
    folder: str | Path,
    decoder: Decoder,
    *,
    dtype: torch.dtype | None = None,
    source: str | Path | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a decoder where transformers can load it; every rank calls this, rank 0 writes.

    `dtype` is that of the files, by default the parameters' own. `source` is the folder the model came from: its
    tokenizer and its other files are taken along, and settings of its config.json that are not the decoder's kept.
    """
    save_file = _safetensors("safetensors.torch").save_file
    folder, writes = Path(folder), not dist.is_initialized() or dist.get_rank() == 0
    if writes:
        folder.mkdir(parents=True, exist_ok=True)
    parameters = {hf_name(name): parameter for name, parameter in decoder.named_parameters()}
    dtype = dtype or next(decoder.parameters()).dtype
    shards = _into_shards({name: p.numel() * dtype.itemsize for name, p in parameters.items()}, shard_bytes)
    index = {}
    for number, names in enumerate(shards, start=1):
        file = SINGLE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        tensors = {}
        for name in names:
            whole = _whole(parameters[name]).to(dtype)
            if writes:
                tensors[name] = whole.cpu().contiguous()
            index[name] = file
        if writes:
            save_file(tensors, folder / file, metadata={"format": "pt"})
    if not writes:
        return
    (folder / (INDEX if len(shards) == 1 else SINGLE)).unlink(missing_ok=True)  # an earlier save's, read before ours
    if len(shards) > 1:
        total = sum(p.numel() * dtype.itemsize for p in parameters.values())
        _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": index})
    kept = {} if source is None else read_config(source)
    kept = {name: value for name, value in kept.items() if name not in ("rope_parameters", "dtype")}  # said otherwise
    _write_json(folder / CONFIG, kept | config_of(decoder.shape, dtype))
    if source is not None and Path(source).resolve() != folder.resolve():
        _take_along(Path(source), folder)


def export_hf(checkpoint: Path, folder: Path, *, shard_bytes: int = SHARD_BYTES) -> None:
    """Write a checkpoint's weights where transformers can load them, in one rename, without a process group.

    The weights are put together a file at a time, whatever ranks saved them.
    """
    save_file = _safetensors("safetensors.torch").save_file
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} already holds something; name a new folder")
    manifest = read_manifest(checkpoint)
    if not manifest.config:
        raise ValueError(f"{checkpoint} does not say which model its weights are; save it again with distca train")
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)                   # of an export that was cut short
    partial.mkdir(parents=True)
    sizes = {name.removeprefix("model."): sum(block.num_bytes for block in tensor.blocks)
             for name, tensor in manifest.tensors.items() if name.startswith("model.")}
    shards = _into_shards(sizes, shard_bytes)
    index: dict[str, str] = {}
    with Reader(checkpoint, manifest) as reader:
        for number, names in enumerate(shards, start=1):
            file = SINGLE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
            save_file({hf_name(name): reader.whole(f"model.{name}") for name in names}, partial / file,
                      metadata={"format": "pt"})
            index |= {hf_name(name): file for name in names}
    if len(shards) > 1:
        _write_json(partial / INDEX, {"metadata": {"total_size": sum(sizes.values())}, "weight_map": index})
    _write_json(partial / CONFIG, manifest.config)
    partial.replace(folder)


def config_of(shape: DecoderShape, dtype: torch.dtype) -> dict[str, Any]:
    """config.json of a shape, with the rotary settings where both old and new transformers look for them."""
    model, scaling = shape.model, None
    if shape.rope_scaling is not None:
        numbers = asdict(shape.rope_scaling)
        scaling = {"rope_type": "llama3", "original_max_position_embeddings": numbers.pop("original_max_positions")}
        scaling |= numbers
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "attention_bias": False,
        "mlp_bias": False, "hidden_size": model.hidden, "intermediate_size": model.ffn,
        "num_hidden_layers": model.num_layers, "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads, "head_dim": model.head_dim, "vocab_size": model.vocab,
        "rms_norm_eps": shape.norm_eps, "tie_word_embeddings": shape.tied, "rope_theta": shape.rope_theta,
        "rope_scaling": scaling, "max_position_embeddings": shape.max_positions,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }


def _rope_scaling(folder: str | Path, rope: dict[str, Any]) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise ValueError(f"{folder}/{CONFIG} has rope_type {kind!r}; only default and llama3 can be loaded")
    where = f"{folder}/{CONFIG}: rope"
    factor, low, high = (check_number(f"{where} {name}", rope.get(name), above=0)
                         for name in ("factor", "low_freq_factor", "high_freq_factor"))
    positions = check_whole(f"{where} original_max_position_embeddings", rope.get("original_max_position_embeddings"))
    return RopeScaling(factor, low, high, positions)


def check_weight_files(folder: str | Path) -> None:
    """Refuse files that are no safetensors, before any rank starts; a folder without weights is refused later."""
    if any((Path(folder) / file).is_file() for file in (INDEX, SINGLE)):
        for _ in _tensors(Path(folder)):
            pass


def _tensors(folder: Path) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
    """Every tensor's name, and how to read it while it is its turn."""
    safe_open = _safetensors("safetensors").safe_open
    if (folder / INDEX).is_file():
        content = read_json(folder / INDEX)
        weight_map = content.get("weight_map") if isinstance(content, dict) else None
        if not isinstance(weight_map, dict) or not all(
                isinstance(file, str) and Path(file).name == file for file in weight_map.values()):
            raise ValueError(f"{folder}/{INDEX} has no weight_map of file names; give a folder that transformers wrote")
        files = sorted(set(weight_map.values()))
    else:
        files = [SINGLE]
    for file in files:
        if not (folder / file).is_file():
            raise ValueError(f"{folder} has no {file}; give a folder with all of a model's safetensors")
        try:
            reader = safe_open(folder / file, framework="pt")
        except Exception as error:                               # safetensors' own class derives from nothing nearer
            raise ValueError(f"{folder / file} is no safetensors file ({error}); give the weights that were saved"
                             ) from None
        with reader as opened:
            for name in opened.keys():  # noqa: SIM118  (not a mapping)
                yield name, partial(opened.get_tensor, name)


def _into_shards(sizes: dict[str, int], shard_bytes: int) -> list[list[str]]:
    """Names in order, as many to a file as fit, at least one."""
    shards: list[list[str]] = []
    room = 0
    for name, size in sizes.items():
        if not shards or size > room:
            shards.append([])
            room = shard_bytes
        shards[-1].append(name)
        room -= size
    return shards


def _whole(parameter: torch.Tensor) -> torch.Tensor:
    """A parameter gathered from all ranks, data ranks before tensor ranks, as they were cut after them."""
    if not isinstance(parameter, DTensor):
        return parameter
    for axis in range(parameter.device_mesh.ndim):
        placements = [Replicate() if before <= axis else placement
                      for before, placement in enumerate(parameter.placements)]
        parameter = parameter.redistribute(placements=placements)
    return parameter.to_local()


def _take_along(source: Path, folder: Path) -> None:
    weights = (".safetensors", ".bin", ".pth", ".pt", ".gguf", ".index.json")
    for file in source.iterdir():
        if file.is_file() and file.name != CONFIG and not file.name.endswith(weights):
            shutil.copyfile(file, folder / file.name)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _safetensors(module: str) -> Any:
    from importlib import import_module

    try:
        return import_module(module)
    except ImportError:
        raise ValueError("the package safetensors is not installed, which Hugging Face models need; "
                         "pip install safetensors") from None
