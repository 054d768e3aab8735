"""The model under check: from a folder, a config.json or a function of yours, and a plain copy to compare it with.

What is right does not depend on weights or widths. So a large model is built with few layers, narrow and from random
weights, which takes seconds, and its layer types, heads' sizes and routing stay those of its config.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import math
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from distca.check import config_file
from distca.check.batches import WINDOW, Batch, packings, without_labels
from distca.runtime.transport.c10d import first_line
from distca.validation import UserError

Step = Callable[[torch.nn.Module, list[Batch]], Any]
MAX_PARAMETERS = 30_000_000      # of a model that is built as its config says
NARROW = {                       # field of a config -> the most that a narrowed model has of it
    "num_key_value_heads": 2, "vocab_size": 512, "intermediate_size": 256, "moe_intermediate_size": 64,
    "num_local_experts": 8, "num_experts": 8, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2,
    "topk_group": 1, "kv_lora_rank": 64, "q_lora_rank": 64, "shared_expert_intermediate_size": 64}
MAX_GROUP = 2                    # query heads of a key head, in a narrowed model
KERNELS = ("eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3")
ON_GPUS = KERNELS[2:]


@dataclass(frozen=True, slots=True)
class Subject:
    """What is examined. `inner` is the Transformers model in it, if any; `plain` is a copy with nothing added to it."""

    model: torch.nn.Module
    about: str
    device: torch.device
    dtype: torch.dtype
    inner: Any = None
    batch: Batch | None = None           # of this rank, from a function
    step: Step | None = None             # a step of the trainer, from a function

    @property
    def config(self) -> Any:
        return None if self.inner is None else self.inner.config

    @property
    def special_ids(self) -> list[int | None]:
        found: list[int | None] = []
        for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
            one = getattr(self.config, name, None)
            found += one if isinstance(one, list) else [one]
        return found

    @property
    def bound(self) -> float:
        """What rounding explains, relative to the largest output.

        A layer rounds a few dozen sums of its dtype, or of float32, in which norms, softmax and routers are computed
        anyway, and errors grow with the layers they pass.
        """
        layers = getattr(self.config, "num_hidden_layers", 4)
        return 64 * max(torch.finfo(self.dtype).eps, torch.finfo(torch.float32).eps) * (layers + 1)


def subject_of(name: str, device: torch.device, dtype: torch.dtype | None) -> Subject:
    """Build what MODEL names: a folder with a config.json, that file, or `module:function`."""
    file = config_file(name)
    return _from_function(name, device) if file is None else _from_config(file, device, dtype)


def _from_config(file: Path, device: torch.device, dtype: torch.dtype | None) -> Subject:
    import transformers as hf

    try:
        config = hf.AutoConfig.from_pretrained(str(file)).get_text_config(decoder=True)
        full, shapes = copy.deepcopy(config), _on_meta(config)
    except (ValueError, KeyError, TypeError, OSError, RuntimeError, ImportError) as error:
        raise UserError(f"{file}: transformers {hf.__version__} makes no causal language model of it "
                        f"({first_line(error)})") from None
    count, weights = sum(one.numel() for one in shapes.parameters()), [*file.parent.glob("*.safetensors")]
    is_small = count <= MAX_PARAMETERS
    if not is_small:
        try:
            narrow(config)
            _on_meta(config)
        except (ValueError, AttributeError, TypeError, RuntimeError) as error:
            raise UserError(f"{file}: {config.model_type} cannot be narrowed ({first_line(error)}); give a smaller "
                            "one, or a function that returns it") from None
    if isinstance(getattr(config, "sliding_window", None), int):
        config.sliding_window = min(config.sliding_window, WINDOW)
    config._experts_implementation = "eager"                     # the other kinds know no float64
    torch.manual_seed(0)
    model: Any
    if is_small and weights:
        model = hf.AutoModelForCausalLM.from_pretrained(str(file.parent), config=config, dtype=torch.float32,
                                                        use_safetensors=True)
        made = "its weights"
    else:
        model = hf.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        sharpen(model)
        made = "random weights"
    said = f"{config.model_type}, {config.num_hidden_layers} of {full.num_hidden_layers} layers, {made}"
    if not is_small:
        left = sum(one.numel() for one in model.parameters())
        said += f", narrowed to hidden size {config.hidden_size} and {left:,} of {count:,} parameters"
    if getattr(config, "sliding_window", None) != getattr(full, "sliding_window", None):
        said += f", windows of {full.sliding_window} shortened to {config.sliding_window}"
    model.to(device)
    tried = [dtype] if dtype else [torch.float64, torch.float32] if device.type == "cpu" else [torch.float32]
    for one in tried:
        subject = _ready(Subject(model.to(one), said, device, one, inner=model))
        if one is tried[-1] or (
                _is_finite(model, "padded rows") and _is_finite(plain_copy(subject), "one flattened row")):
            break
    return subject


def _is_finite(model: Any, packing: str) -> bool:
    """Return whether a model runs in its dtype, also on padding: eager's masks of padding are not made for float64."""
    batch = without_labels(packings(model.config.vocab_size, [], 0)[packing])
    device = next(model.parameters()).device
    try:
        return bool(model(**{name: one.to(device) if isinstance(one, torch.Tensor) else one
                             for name, one in batch.items()}).logits.isfinite().all())
    except Exception:                                            # the probes say what it is, if float32 does not help
        return False


def _on_meta(config: Any) -> torch.nn.Module:
    import transformers as hf

    with torch.device("meta"):
        found: torch.nn.Module = hf.AutoModelForCausalLM.from_config(config)
    return found


def narrow(config: Any) -> None:
    """Keep a layer of every kind, and make everything narrow but the heads."""
    kinds = list(getattr(config, "layer_types", None) or [])
    heads, kv_heads = config.num_attention_heads, getattr(config, "num_key_value_heads", None)
    latent, head_dim = bool(getattr(config, "kv_lora_rank", None)), getattr(config, "head_dim", None)
    head_dim = head_dim or config.hidden_size // heads
    kv_heads = kv_heads or heads
    for name, most in NARROW.items():
        if isinstance(getattr(config, name, None), int) and getattr(config, name) > most:
            setattr(config, name, most)
    few = min(kv_heads, NARROW["num_key_value_heads"])
    config.num_attention_heads = few * min(heads // kv_heads, MAX_GROUP)
    config.num_key_value_heads = config.num_attention_heads if latent or kv_heads == heads else few
    config.hidden_size = min(config.hidden_size, config.num_attention_heads * (64 if latent else head_dim))
    if "head_dim" in config.to_dict() and not latent:
        config.head_dim = head_dim
    if getattr(config, "first_k_dense_replace", None):
        config.first_k_dense_replace = 1
    places = [kinds.index(kind) for kind in dict.fromkeys(kinds)] or [0]
    config.num_hidden_layers = max(2, len(places))
    if kinds:
        config.layer_types = [kinds[at] for at in places] + kinds[:1] * (config.num_hidden_layers - len(places))
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        setattr(config, name, None)


def _from_function(name: str, device: torch.device) -> Subject:
    """Call the user's function; it returns a model and a batch, and may return a step or a Trainer."""
    place, _, function = name.rpartition(":")
    try:
        if place.endswith(".py"):
            spec = importlib.util.spec_from_file_location(Path(place).stem, place)
            assert spec is not None and spec.loader is not None
            module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        else:
            sys.path.insert(0, os.getcwd())
            module = importlib.import_module(place)
        make = getattr(module, function)
    except (ImportError, OSError, AttributeError) as error:
        raise UserError(f"MODEL is {name!r} and cannot be imported ({first_line(error)}); give module:function or "
                        "file.py:function") from None
    made = make()
    made = _of_trainer(made) if hasattr(made, "training_step") else made if isinstance(made, tuple) else (made,)
    if not 2 <= len(made) <= 3 or not isinstance(made[0], torch.nn.Module) or not isinstance(made[1], Mapping):
        kinds = ", ".join(type(one).__name__ for one in made)
        raise UserError(f"{name} returned {kinds}; return a torch.nn.Module and a dict that it takes by name, and to "
                        "check a trainer its step(model, batches), or a Trainer of Transformers alone")
    model, batch = made[0], {name: one for name, one in made[1].items() if name != "output_router_logits"}
    first = next(model.parameters(), None)
    if first is not None and first.device.type == "cpu" and device.type == "cuda":
        model.to(device)
    dtype = next((one.dtype for one in model.parameters() if one.dtype.is_floating_point), torch.float32)
    sharpen(model)
    kind = type(_inner(model) or model).__name__
    about = f"{kind} of {name}, {sum(one.numel() for one in model.parameters()):,} parameters"
    step = made[2] if len(made) == 3 else None
    return _ready(Subject(model, about, device, dtype, _inner(model), batch, step))


def _of_trainer(trainer: Any) -> tuple[Any, ...]:
    """Return the model, a batch and the step of a Trainer of Transformers or TRL, as its `train` prepares them."""
    trainer.model.config.use_cache = trainer.args.use_cache
    model = trainer.accelerator.prepare(trainer.model)

    def step(model: torch.nn.Module, batches: list[Batch]) -> float:
        count = trainer._get_num_items_in_batch(batches, trainer.args.device)
        trainer.current_gradient_accumulation_steps = len(batches)
        return sum(float(trainer.training_step(model, dict(batch), count)) for batch in batches)

    return model, next(iter(trainer.get_train_dataloader())), step


def _inner(model: torch.nn.Module) -> Any:
    """Return the outermost Transformers model with an output layer, if there is one."""
    hf = sys.modules.get("transformers")
    if hf is None:
        return None
    return next((part for part in model.modules() if isinstance(part, hf.PreTrainedModel)
                 and part.get_output_embeddings() is not None), None)


def _ready(subject: Subject) -> Subject:
    """Train without dropout, which would hide everything."""
    for part in subject.model.modules():
        if isinstance(part, torch.nn.modules.dropout._DropoutNd):
            part.p = 0.0
        for name in ("attention_dropout", "attn_dropout", "hidden_dropout"):
            if isinstance(getattr(part, name, None), float):
                setattr(part, name, 0.0)
    for name in ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob"):
        if getattr(subject.config, name, 0.0):
            setattr(subject.config, name, 0.0)
    if getattr(subject.config, "output_router_logits", False):   # its loss is not that of labels
        subject.config.output_router_logits = False
    subject.model.train()
    return subject


@torch.no_grad()
def sharpen(model: torch.nn.Module) -> None:
    """Scale up weights that are so small that attention is a mean of all keys and hides what is wrong in it."""
    for parameter in model.parameters():
        if parameter.dtype.is_floating_point and parameter.ndim > 1 and not parameter.is_meta:
            size = float(parameter.detach().float().std()) * math.sqrt(parameter.shape[-1])
            if 1e-6 < size < 1:
                parameter.mul_(1 / size)


def plain_copy(subject: Subject, kernel: str = "eager") -> Any:
    """Return the Transformers model rebuilt from its config and weights, with this attention; None if it cannot be."""
    inner = subject.inner
    if inner is None or (kernel in ON_GPUS and subject.device.type != "cuda"):
        return None
    config = copy.deepcopy(inner.config)
    try:
        plain = type(inner)._from_config(config, attn_implementation=kernel, dtype=subject.dtype)
        plain.load_state_dict({name: whole(one) for name, one in inner.state_dict().items()})
    except (ValueError, RuntimeError, ImportError):
        return None
    plain.to(subject.device, subject.dtype)
    return _ready(replace(subject, model=plain, inner=plain)).model


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of which ranks may have shards."""
    found: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return found


def with_attention(subject: Subject, enable: Callable[..., Any] | None) -> Subject:
    """Return the subject with distca's attention, named in what is said about it."""
    if enable is None:
        name = getattr(subject.config, "_attn_implementation", None)
        return subject if name is None else replace(subject, about=f"{subject.about}, attention {name}")
    enable(subject.model)
    return replace(subject, about=f"{subject.about}, distca's attention")


def windows(config: Any) -> list[int | None]:
    """Return the keys that a query of each layer sees by the config (None: all, 0: unknown), if it says."""
    layers = getattr(config, "num_hidden_layers", 0)
    kinds = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    if kinds is None:
        return [] if getattr(config, "attention_chunk_size", None) else [window] * layers
    known = {"full_attention": None, "sliding_attention": window}
    return [known.get(kind, 0) for kind in kinds]
