"""Weights of Hugging Face folders into a decoder: people bring the model they have.

A folder is config.json and safetensors, one file or several with an index. Weights are read one at a time and every
rank keeps its own share, so that a sharded decoder never stands whole anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from distca.train.model.decoder import Decoder, write_parameter
from distca.train.model.hf_config import shape_from_hf
from distca.validation import UserError, read_json

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_LAYER_NAMES = {                                                 # of pre, in segment i, and of post, in segment i + 1
    "pre.norm": "input_layernorm",
    "pre.qkv.q": "self_attn.q_proj",
    "pre.qkv.k": "self_attn.k_proj",
    "pre.qkv.v": "self_attn.v_proj",
    "pre.q_norm": "self_attn.q_norm",
    "pre.k_norm": "self_attn.k_norm",
    "post.output": "self_attn.o_proj",
    "post.norm": "post_attention_layernorm",
    "post.mlp.gate": "mlp.gate_proj",
    "post.mlp.up": "mlp.up_proj",
    "post.mlp.down": "mlp.down_proj",
}


def hf_name(name: str) -> str:
    """A parameter's name in the Hugging Face model."""
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
    """Fill a decoder, or a stage of one, sharded or not, with a folder's weights; rotary settings stay its own."""
    folder = Path(folder)
    theirs, ours = shape_from_hf(folder).key(), decoder.shape.key()
    if theirs != ours:
        raise UserError(f"{folder} holds a model with {theirs} but the decoder has {ours}; "
                        "build it with shape_from_hf")
    parameters = {hf_name(name): parameter for name, parameter in decoder.named_parameters()}
    whole = {hf_name(name) for name, _ in Decoder(decoder.shape, device="meta").named_parameters()}
    found = set()
    pair = {EMBEDDING, HEAD}
    twice = decoder.shape.tied and pair <= {name for name, _ in _tensors(folder)}
    first: torch.Tensor | None = None                            # of a head and an embedding that should be one
    for name, read in _tensors(folder):
        if twice and name in pair:
            if first is not None and not torch.equal(first, read()):
                raise UserError(f"{folder} has tie_word_embeddings true but {HEAD} that is not {EMBEDDING}; set it to "
                                "false in config.json, as transformers takes it, or remove the former")
            first = read() if first is None else None
        if name in parameters:
            tensor = read()
            if tensor.shape != parameters[name].shape:
                raise UserError(f"{folder} has {name} with shape {tuple(tensor.shape)} but config.json makes it "
                                f"{tuple(parameters[name].shape)}; the folder is not whole")
            write_parameter(parameters[name], tensor)
            found.add(name)
        elif not (name in whole or name.endswith("rotary_emb.inv_freq")
                  or (name == HEAD and decoder.shape.tied)):
            raise UserError(f"{folder} has {name}, which this decoder does not; only plain models of its type can be "
                            "loaded")
    missing = sorted(parameters.keys() - found)
    if missing:
        raise UserError(f"{folder} lacks {missing[0]} and {len(missing) - 1} more; the folder is not whole")


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
            raise UserError(f"{folder}/{INDEX} has no weight_map of file names; give a folder that transformers wrote")
        files = sorted(set(weight_map.values()))
    else:
        files = [SINGLE]
    for file in files:
        if not (folder / file).is_file():
            raise UserError(f"{folder} has no {file}; give a folder with all of a model's safetensors")
        try:
            reader = safe_open(folder / file, framework="pt")
        except Exception as error:                               # safetensors' own class derives from nothing nearer
            raise UserError(f"{folder / file} is no safetensors file ({error}); give the weights that were saved"
                            ) from None
        with reader as opened:
            for name in opened.keys():  # noqa: SIM118  (not a mapping)
                yield name, partial(opened.get_tensor, name)


def _safetensors(module: str) -> Any:
    from importlib import import_module

    try:
        return import_module(module)
    except ImportError:
        raise UserError("the package safetensors is not installed, which Hugging Face models need; "
                        "pip install safetensors") from None
