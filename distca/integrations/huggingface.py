"""Transformers with balanced attention: `enable(model)`, or `attn_implementation="distca"` after importing this file.

Transformers builds a model's masks once per forward, ahead of its layers, and hands them to every layer. Ours is no
mask but a `PackedMask`: the forward it belongs to. The first layer reads this rank's documents, exchanges lengths and
plans; the others find the plan there, and so does a layer that gradient checkpointing replays. No dense mask exists.

Only training leaves home: a module in training mode, in a forward that records gradients. Evaluation and generation
talk to nobody, so ranks may run unequal numbers of batches of them; `evaluation="pool"` lets documents of evaluation
span ranks, which then evaluate in step. What a model was enabled with stays with the model, also in its copies: a hook
says which model runs, ahead of its masks.
"""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from threading import local
from typing import Any

import torch
import torch.distributed as dist

from distca.cost.latency_table import LatencyTable
from distca.integrations import check_version, not_installed
from distca.integrations.document_lengths import DOCUMENTS, RowSlices, from_arguments
from distca.integrations.huggingface_models import check_config, refused, shape_of, stateful_reason
from distca.integrations.packed import PackedAttention, PackedBatch, attach, attached
from distca.kernels import kernel_named
from distca.planning.plan import Plan
from distca.runtime.prepared import Shapes
from distca.runtime.transport import Transport
from distca.validation import UserError

try:
    import transformers
    from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
except ImportError as error:
    raise not_installed("transformers", error) from error

check_version("transformers", transformers.__version__)

NAME = "distca"
EVALUATION = ("home", "pool")
_LOG = logging.getLogger("distca")


def enable(
    model: torch.nn.Module,
    group: dist.ProcessGroup | None = None,
    *,
    tolerance: float = 0.05,
    kernel: str = "auto",
    state: str = "resend",
    transport: str | Transport = "c10d",
    cost: LatencyTable | None = None,
    evaluation: str = "home",
) -> PackedAttention:
    """Balance this model's attention over the ranks of `group`, or refuse it by name. Call it on every rank.

    `group` None is the default group, also where torch.distributed is initialized later. A group of its own
    (`dist.new_group()`) lets exchanges pass the trainer's collectives. The rest is CoreAttention's and plan's.
    `evaluation` "pool" lets documents span ranks in evaluation too, which every rank then runs as often as the others.
    """
    inner = next((part for part in model.modules() if isinstance(part, PreTrainedModel)), None)
    if inner is None:
        raise UserError(f"model is a {type(model).__name__} without a transformers model inside; give a "
                        "PreTrainedModel, wrapped or not")
    if evaluation not in EVALUATION:
        raise UserError(f"evaluation is {evaluation!r}; choose one of: {', '.join(EVALUATION)}")
    check_config(inner.config)
    if not inner._can_set_attn_implementation():
        raise refused(inner.config, "its attention does not go through transformers' AttentionInterface")
    if any(getattr(part, "is_causal", True) is False for part in inner.modules()):
        raise refused(inner.config, "its attention is not causal")
    if kernel != "auto":
        kernel_named(kernel)
    attention = PackedAttention(group, model=shape_of(inner.config), tolerance=tolerance, kernel=kernel, state=state,
                                transport=transport, cost=cost)
    served = _Served(attention, evaluation == "pool", stateful_reason(inner.config))
    for part in _mask_makers(inner):
        if attached(part) is None:
            part.register_forward_pre_hook(_enter, with_kwargs=True)
        attach(part, served)
    inner.set_attn_implementation(NAME)
    if served.whole_only is not None:
        warn_once(f"distca balances the attention layers of {inner.config.model_type} alone: {served.whole_only}")
    return attention


def _mask_makers(model: PreTrainedModel) -> list[PreTrainedModel]:
    """The innermost models, without the heads around them."""
    models = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    return [part for part in models if not any(isinstance(below, PreTrainedModel) for below in part.children())]


@torch.compiler.disable(reason="looks at values")
def _enter(module: torch.nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
    """Ahead of a model's masks: whose they are, and that they are no numbers of documents.

    Transformers makes a mask of ones and zeros of whatever it is given, and documents 1, 1, 2, 2 become one.
    """
    served = attached(module)
    served.forward, served.generates, served.refused = None, named.get("past_key_values") is not None, None
    masks = *inputs[1:2], named.get("attention_mask")
    for mask in masks:
        if isinstance(mask, torch.Tensor) and mask.ndim == 2 and not mask.dtype.is_floating_point and (mask > 1).any():
            served.refused = UserError(
                f"attention_mask has numbers up to {int(mask.max())}, as if it numbered documents; give 1 for tokens "
                "and 0 for padding, and documents by position_ids that restart or by cu_seq_lens_q")
    is_made = any(isinstance(mask, dict | PackedMask) or getattr(mask, "ndim", 2) > 2 for mask in masks)
    _RUNNING.served = None if is_made and not module.training else served  # a static cache's masks come ready made


class _Forward:
    """One forward of one model, on all its layers; made with its first mask, filled by its first layer."""

    def __init__(self, served: _Served) -> None:
        self.served, self.attention, self.refused = served, served.attention, served.refused
        self.in_pool = served.pool_evaluation and not served.generates
        self.windows: set[int | None] = set()
        self.padding: torch.Tensor | None = None                 # [rows, tokens], true for tokens that count
        self.records = False
        self.batch: PackedBatch | None = None
        self.kept: torch.Tensor | None = None                    # index of the tokens that are not padding

    def mask(self, window: int | None, padding: torch.Tensor | None) -> PackedMask:
        self.windows.add(window)
        self.padding = padding
        self.records = torch.is_grad_enabled()                   # of the model; checkpointed layers see otherwise
        return PackedMask(self, window)

    def begin(
        self, module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, about: dict[str, Any]
    ) -> PackedBatch:
        if self.batch is None:
            slices = self._read(query, about)
            if self.in_pool or (module.training and self.records):
                shapes = Shapes(query.shape[1], key.shape[1], query.shape[3], query.dtype, query.device)
                self.batch = self.attention.begin(slices, query.device, shapes)
                if self.served.whole_only is not None and self.batch.spans:
                    config: Any = module.config
                    raise refused(config, self.served.whole_only)
            else:
                self.batch = self.attention.at_home(slices)
        return self.batch

    def _read(self, query: torch.Tensor, about: dict[str, Any]) -> RowSlices | ValueError:
        """This rank's slices, or what is wrong with its batch."""
        num_rows, _, row_len, _ = query.shape
        try:
            if self.refused is not None:
                raise self.refused
            slices, kept = from_arguments(about, self.padding, num_rows, row_len)
        except ValueError as error:
            return error
        self.kept = None if kept is None else torch.from_numpy(kept).to(query.device)
        return slices


@dataclass(frozen=True, slots=True)
class PackedMask:
    """What layers get for a mask."""

    forward: _Forward
    window: int | None

    def contiguous(self) -> PackedMask:
        """As `generate` asks of the masks it makes for static caches."""
        return self


@dataclass(slots=True)
class _Served:
    """What a model keeps, or models that were only given the attention's name and share a config."""

    attention: PackedAttention
    pool_evaluation: bool = False
    whole_only: str | None = None                                # why documents cannot span ranks
    forward: _Forward | None = field(default=None, repr=False)   # whose masks are being made
    generates: bool = False                                      # into a cache, each rank at its own pace
    refused: ValueError | None = field(default=None, repr=False)  # what is wrong with the batch of this forward

    @property
    def latest(self) -> Plan | None:
        return self.attention.latest

    def __deepcopy__(self, memo: dict[int, Any]) -> _Served:
        """A copy of a model has the same group and options, and forwards of its own."""
        return memo.setdefault(id(self), _Served(copy.deepcopy(self.attention), self.pool_evaluation, self.whole_only))

    def __reduce__(self) -> tuple[Any, ...]:
        return _Served, (self.attention, self.pool_evaluation, self.whole_only)


class _Running(local):
    """The enabled model whose masks are being made in this thread."""

    served: _Served | None = None


_RUNNING = _Running()


def _served(config: PreTrainedConfig) -> _Served:
    """A model that was only given the attention's name is served over the default group."""
    if _RUNNING.served is not None:
        return _RUNNING.served
    if attached(config) is None:
        check_config(config)
        attach(config, _Served(PackedAttention(model=shape_of(config)), False, stateful_reason(config)))
    return attached(config)


def packed_mask(
    batch_size: int, q_length: int, kv_length: int, q_offset: Any = 0, kv_offset: Any = 0, **about: Any
) -> PackedMask | torch.Tensor | None:
    """Transformers' mask interface. With a cache that holds something, the dense mask of ordinary attention."""
    begins_at_zero = isinstance(q_offset, int) and isinstance(kv_offset, int) and q_offset == kv_offset == 0
    if q_length != kv_length or not begins_at_zero:
        if not torch.compiler.is_compiling():
            _RUNNING.served = None
        return sdpa_mask(batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset,
                         kv_offset=kv_offset, **about)
    if about.get("use_vmap"):
        raise refused(about["config"], "it overlays a mask of its own")
    return _mask_of_forward(about["config"], about.get("local_size"), about.get("attention_mask"))


@torch.compiler.disable(reason="distca makes no mask but notes a forward")
def _mask_of_forward(config: PreTrainedConfig, window: int | None, padding: torch.Tensor | None) -> PackedMask:
    served = _served(config)
    forward = served.forward
    if forward is None or forward.batch is not None or window in forward.windows:
        forward = served.forward = _Forward(served)              # makes each kind of mask once, then layers run
    return forward.mask(window, padding)


def packed_attention(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any,
    dropout: float = 0.0, scaling: float | None = None, **about: Any,
) -> tuple[torch.Tensor, None]:
    """Transformers' attention interface: query [rows, heads, tokens, dim] -> out [rows, tokens, heads, dim]."""
    if not isinstance(attention_mask, PackedMask):
        return _ordinary(module, query, key, value, attention_mask, dropout, scaling, about)
    return _attend(module, query, key, value, attention_mask, dropout, scaling, about), None


@torch.compiler.disable(reason="distca's attention exchanges with other ranks, by lengths that change with every batch")
def _attend(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: PackedMask,
    dropout: float, scaling: float | None, about: dict[str, Any],
) -> torch.Tensor:
    _RUNNING.served = None                                       # its masks are made
    _check_call(module, key, query, dropout, about)
    forward = mask.forward
    query, key, value = _one_dtype(query, key, value)
    batch = forward.begin(module, query, key, about)
    flat = [_flat(x, forward.kept) for x in (query, key, value)]  # [tokens, heads, dim]
    out = forward.attention.attend(flat[0], flat[1], flat[2], batch, scale=scaling, window=mask.window,
                                   softcap=about.get("softcap"), sinks=about.get("s_aux"))
    rows, heads, row_len, dim = query.shape
    if forward.kept is not None:
        out = out.new_zeros(rows * row_len, heads, dim).index_copy(0, forward.kept, out)
    return out.view(rows, row_len, heads, dim)


def _flat(x: torch.Tensor, kept: torch.Tensor | None) -> torch.Tensor:
    """[rows, heads, tokens, dim] -> [tokens of all rows, heads, dim], without padding."""
    rows, heads, row_len, dim = x.shape
    tokens = x.transpose(1, 2).reshape(rows * row_len, heads, dim)
    return tokens if kept is None else tokens.index_select(0, kept)


def _one_dtype(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """As autocast does for torch's own attention: rotary embeddings may leave q and k wider than v."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return list(tensors)
    return [x.to(torch.get_autocast_dtype(device)) for x in tensors]


def _check_call(
    module: torch.nn.Module, key: torch.Tensor, query: torch.Tensor, dropout: float, about: dict[str, Any]
) -> None:
    config: Any = module.config
    if about.get("position_bias") is not None:
        raise refused(config, "it passes position_bias to attention")
    if about.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        raise refused(config, "its attention is not causal")
    if dropout:
        raise refused(config, f"attention dropout is {dropout}; set it to 0")
    if key.shape[2] != query.shape[2]:
        raise refused(config, f"{query.shape[2]} queries meet {key.shape[2]} keys under a mask for as many")


def _ordinary(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    attention_mask: torch.Tensor | None, dropout: float, scaling: float | None, about: dict[str, Any],
) -> tuple[torch.Tensor, None]:
    """Decoding, where one token meets a cache, as transformers does it."""
    if module.training and query.shape[2] == key.shape[2]:
        given = "none" if attention_mask is None else f"one of shape {tuple(attention_mask.shape)}"
        error = UserError(f"attention_mask is a mask of your own ({given}) and training with distca makes its own; "
                           "give attention_mask [rows, tokens] or nothing, and documents by position_ids or "
                           "cu_seq_lens_q")
        served, _RUNNING.served = _RUNNING.served, None
        if served is not None and torch.is_grad_enabled():
            served.attention.begin(error, query.device)          # other ranks are waiting for a batch
        raise error
    unread = next((name for name in DOCUMENTS if about.get(name) is not None), None)
    if unread is not None:
        raise UserError(f"{unread} came with a cache or with a mask of your own, which alone say what is seen; leave "
                        f"out {unread}, or the mask or cache")
    if not torch.compiler.is_compiling():
        _say_decoding()
    if about.get("softcap") is None and about.get("s_aux") is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **about)
    if attention_mask is not None and attention_mask.dtype is torch.bool:
        attention_mask = attention_mask.logical_not() * torch.finfo(query.dtype).min
    out, _ = _formula(type(module))(module, query, key, value, attention_mask, scaling=scaling,
                                    dropout=dropout, **about)
    return out, None


def _formula(kind: type[torch.nn.Module]) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """The model's own eager attention, which knows its softcap and sinks; every model has it under this name."""
    modules = (sys.modules[above.__module__] for above in kind.__mro__)
    found: Callable[..., Any] = next(module.eager_attention_forward for module in modules
                                     if hasattr(module, "eager_attention_forward"))
    return found


@cache
def _say_decoding() -> None:
    _LOG.info("queries meet keys of a cache or under a given mask: attention runs at home as transformers' sdpa")


@cache
def warn_once(message: str) -> None:
    """Once, and on one rank."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        _LOG.warning(message)


AttentionInterface.register(NAME, packed_attention)
AttentionMaskInterface.register(NAME, packed_mask)
