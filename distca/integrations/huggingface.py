"""Transformers with balanced attention: `enable(model)`, or `attn_implementation="distca"` after importing this file.

Transformers builds a model's masks once per forward and passes them to every layer. Our mask is a `PackedMask`, a
reference to its forward; no dense mask exists. The first layer reads this rank's documents, exchanges lengths and
plans; the other layers, and layers replayed by gradient checkpointing, use that plan. A pre-forward hook records which
model runs, because options of `enable` belong to the model and its copies.

Only training (training mode, gradients enabled) uses the pool. Evaluation and generation are computed locally, so ranks
may run different numbers of batches. With `evaluation="pool"` documents may span ranks in evaluation too, and all ranks
must evaluate the same number of batches.

Supported are models with causal softmax attention over documents or sliding windows, and models that mix it with layers
that carry a state along a document, if documents do not span ranks. Other models are refused by name.
"""

from __future__ import annotations

import logging
import sys
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from distca.cost.latency_table import LatencyTable
from distca.integrations import STATEFUL, check_version, layer_types, not_installed, stateful_layers
from distca.integrations.document_lengths import DOCUMENTS, RowSlices, from_arguments
from distca.integrations.packed import PackedAttention, PackedBatch, Qkv, attach, attached
from distca.kernels import kernel_named
from distca.models import shape_of_config
from distca.planning.plan import Plan
from distca.runtime.prepared import Shapes
from distca.runtime.transport import Chosen
from distca.validation import UserError, check_choice

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
_LAYER_TYPES = {"full_attention", "sliding_attention", "attention"}
FULL_BATCHES = 4                                                 # of one document a row, before a warning
_PER_TOKEN = {"mlp", "moe"}                                      # layers of their own in Nemotron-H
_KEYS_CHOSEN = ("attention_chunk_size", "index_topk")            # chunked attention, keys chosen by an indexer
_DROPOUTS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")
_LOG = logging.getLogger("distca")


def enable(
    model: torch.nn.Module, group: dist.ProcessGroup | None = None, *, tolerance: float = 0.05, kernel: str = "auto",
    state: str = "resend", transport: Chosen = "c10d", cost: LatencyTable | None = None,
    evaluation: str = "home",
) -> PackedAttention:
    """Balance this model's attention over the ranks of `group`, or refuse the model by name. Call it on every rank.

    `group` None is the default group, also if torch.distributed is initialized later. A separate group
    (`dist.new_group()`) lets exchanges overlap with the trainer's collectives. `evaluation` "pool" lets documents span
    ranks in evaluation too; every rank then runs the same number of batches. Other options are passed to CoreAttention
    and `plan`.
    """
    inner = next((part for part in model.modules() if isinstance(part, PreTrainedModel)), None)
    if inner is None:
        raise UserError(f"model is a {type(model).__name__} without a transformers model inside; give a "
                        "PreTrainedModel, wrapped or not")
    check_choice("evaluation", evaluation, EVALUATION)
    _check_config(inner.config)
    if not inner._can_set_attn_implementation():
        raise _refused(inner.config, "its attention does not go through transformers' AttentionInterface")
    if any(getattr(part, "is_causal", True) is False for part in inner.modules()):
        raise _refused(inner.config, "its attention is not causal")
    if getattr(inner, "_is_stateful", False) and not layer_types(inner.config):
        raise _refused(inner.config, "it carries a state along each document and names no attention layers")
    if kernel != "auto":
        kernel_named(kernel)
    served = _Served.of(inner.config, evaluation == "pool", group=group, tolerance=tolerance, kernel=kernel,
                        state=state, transport=transport, cost=cost)
    for part in inner.modules():                                 # the innermost models build the masks
        if isinstance(part, PreTrainedModel) and not any(isinstance(one, PreTrainedModel) for one in part.children()):
            if attached(part) is None:
                part.register_forward_pre_hook(_enter, with_kwargs=True)
            attach(part, served)
    inner.set_attn_implementation(NAME)
    if served.whole_only is not None:
        warn_once(f"distca balances the attention layers of {inner.config.model_type} alone: {served.whole_only}, and "
                  "ask distca check whether that state ends with its document")
    return served.attention


def _check_config(config: PreTrainedConfig) -> None:
    """Refuse a model whose attention is not causal softmax over documents or sliding windows."""
    if config.is_encoder_decoder or getattr(config, "add_cross_attention", False):
        raise _refused(config, "it has cross-attention")
    if config.get_text_config(decoder=True) is not config:
        raise _refused(config, "it has several parts, such as text and images; enable its language model alone")
    if not getattr(config, "is_causal", True) or getattr(config, "use_bidirectional_attention", None):
        raise _refused(config, "its attention is not causal")
    kinds = layer_types(config)
    others = kinds - _LAYER_TYPES - _PER_TOKEN - (STATEFUL if kinds & _LAYER_TYPES else set())
    others |= {name for name in _KEYS_CHOSEN if getattr(config, name, None) is not None}
    if others:
        raise _refused(config, f"it has layers of other kinds: {', '.join(sorted(others))}")
    for name in _DROPOUTS:
        if getattr(config, name, 0.0):
            raise _refused(config, f"{name} is {getattr(config, name)}; set it to 0")


def _stateful_reason(config: PreTrainedConfig) -> str | None:
    """Return why documents of this model cannot span ranks, or None if they can."""
    kinds = stateful_layers(config)
    return None if not kinds else (f"its {', '.join(kinds)} layers carry a state along each document, which does not "
                                   "cross ranks; give every rank whole documents")


def _refused(config: Any, reason: str) -> ValueError:
    return UserError(f"distca cannot serve the attention of {config.model_type}: {reason}")


@torch.compiler.disable(reason="looks at values")
def _enter(module: torch.nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
    """Record the running model before its masks are built, and refuse masks of which transformers makes something else.

    It converts any mask to ones and zeros, which would merge the documents of 1, 1, 2, 2 into one.
    """
    served = attached(module)
    served.forward, served.generates, served.refused = None, named.get("past_key_values") is not None, None
    masks = *inputs[1:2], named.get("attention_mask")
    for mask in masks:
        if not isinstance(mask, torch.Tensor) or mask.ndim != 2 or mask.dtype.is_floating_point:
            continue
        if (mask > 1).any():
            served.refused = UserError(
                f"attention_mask has numbers up to {int(mask.max())}, as if it numbered documents; give 1 for tokens "
                "and 0 for padding, and documents by position_ids that restart or by cu_seq_lens_q")
        elif named.get("output_router_logits") and not mask.any():
            served.refused = UserError(
                "output_router_logits is True and this rank has padding alone, over which transformers' load "
                "balancing loss is 0 / 0; set it to False, or give every rank tokens")
    has_masks = any(isinstance(mask, dict | PackedMask) or getattr(mask, "ndim", 2) > 2 for mask in masks)
    _RUNNING.set(None if has_masks and not module.training else served)  # masks of a static cache already exist


class _Forward:
    """One forward of a model: created with its first mask; its first layer sets the batch."""

    def __init__(self, served: _Served) -> None:
        self.served, self.attention, self.refused = served, served.attention, served.refused
        self.in_pool = served.pool_evaluation and not served.generates
        self.windows: set[int | None] = set()
        self.padding: torch.Tensor | None = None                 # [rows, tokens], false for padding
        self.records_gradients = False
        self.batch: PackedBatch | None = None
        self.kept: torch.Tensor | None = None                    # index of the tokens that are not padding

    def mask(self, config: PreTrainedConfig, window: int | None, padding: torch.Tensor | None) -> PackedMask:
        self.windows.add(window)
        self.padding = padding
        self.records_gradients = torch.is_grad_enabled()         # checkpointing disables them inside layers
        return PackedMask(self, window, config)

    def begin(self, module: torch.nn.Module, qkv: Qkv, about: dict[str, Any]) -> PackedBatch:
        if self.batch is None:
            query, slices = qkv[0], self._read(qkv[0], about)
            if not (self.in_pool or (module.training and self.records_gradients)):
                self.batch = self.attention.at_home(slices)
                return self.batch
            shapes = Shapes.of(*(x.transpose(1, 2)[0] for x in qkv))
            self.batch = self.attention.begin(slices, query.device, shapes)
            if self.served.whole_only is not None and self.batch.spans:
                raise _refused(module.config, self.served.whole_only)
            self.served.watch(self.batch, query.shape[0], query.shape[2])
        return self.batch

    def _read(self, query: torch.Tensor, about: dict[str, Any]) -> RowSlices | ValueError:
        """Return this rank's slices, or the error of its batch."""
        try:
            if self.refused is not None:
                raise self.refused
            slices, kept = from_arguments(about, self.padding, (query.shape[0], query.shape[2]))
        except ValueError as error:
            return error
        self.kept = None if kept is None else torch.from_numpy(kept).to(query.device)
        return slices


class _ReadsMaskError(UserError, AttributeError):
    """An attribute that our mask has not, and no dense mask can be given: `hasattr` is false as ever."""


@dataclass(frozen=True, slots=True)
class PackedMask:
    """The mask that layers get: a reference to its forward."""

    forward: _Forward
    window: int | None
    config: PreTrainedConfig

    def __getattr__(self, name: str) -> Any:
        _RUNNING.set(None)                                       # layers read masks when all have been built
        raise _ReadsMaskError(_refused(self.config, f"it reads {name!r} of its mask, to make one of its own"))

    def contiguous(self) -> PackedMask:
        """Return self; `generate` calls this on masks of static caches."""
        return self


@dataclass(slots=True)
class _Served:
    """State of an enabled model, or of all models with one config that set attn_implementation="distca"."""

    attention: PackedAttention
    pool_evaluation: bool
    whole_only: str | None                                       # why documents cannot span ranks
    forward: _Forward | None = field(default=None, repr=False)   # whose masks are being built
    generates: bool = False                                      # fills a cache; ranks are not synchronized
    refused: ValueError | None = field(default=None, repr=False)  # error of this forward's batch
    batches: int = 0                                             # in a row, whose rows were one document each,
    row_len: int = 0                                             # of this length

    def watch(self, batch: PackedBatch, rows: int, row_len: int) -> None:
        """Warn if every row of several training batches is one document of the same length, as packed rows look."""
        if row_len < 2 or batch.slices.length != (row_len,) * rows or batch.spans:
            self.batches = 0
            return
        self.batches, self.row_len = (self.batches + 1 if row_len == self.row_len else 1), row_len
        if self.batches == FULL_BATCHES:
            warn_once(f"every row of {FULL_BATCHES} training batches is one document of {row_len:,} tokens; if rows "
                      "are packed, documents see each other, for nothing says where they begin: give position_ids "
                      "that restart (DataCollatorWithFlattening) or use distca.data.Collator; distca check examines it")

    @classmethod
    def of(cls, config: PreTrainedConfig, pool_evaluation: bool, **options: Any) -> _Served:
        names = "num_hidden_layers", *config.attribute_map       # some have another name in the file
        fields = {**config.to_dict(), **{name: getattr(config, name, None) for name in names}}
        shape = shape_of_config(fields, config.model_type, any_type=True)
        return cls(PackedAttention(model=shape, **options), pool_evaluation, _stateful_reason(config))

    @property
    def latest(self) -> Plan | None:
        return self.attention.latest

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy the options but not the forwards."""
        return _Served, (self.attention, self.pool_evaluation, self.whole_only)


_RUNNING: ContextVar[_Served | None] = ContextVar("running", default=None)  # the model whose masks are being built


def packed_mask(
    batch_size: int, q_length: int, kv_length: int, q_offset: Any = 0, kv_offset: Any = 0, **about: Any
) -> PackedMask | torch.Tensor | None:
    """Return a PackedMask, or sdpa's dense mask if a cache already holds keys (Transformers' mask interface)."""
    begins_at_zero = isinstance(q_offset, int) and isinstance(kv_offset, int) and q_offset == kv_offset == 0
    if q_length != kv_length or not begins_at_zero:
        if not torch.compiler.is_compiling():
            _RUNNING.set(None)
        return sdpa_mask(batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset,
                         kv_offset=kv_offset, **about)
    if about.get("use_vmap"):
        raise _refused(about["config"], "it adds a mask of its own")
    return _mask_of_forward(about["config"], about.get("local_size"), about.get("attention_mask"))


@torch.compiler.disable(reason="distca makes no mask but notes a forward")
def _mask_of_forward(config: PreTrainedConfig, window: int | None, padding: torch.Tensor | None) -> PackedMask:
    served = _RUNNING.get()
    if served is None:                                           # a model without `enable`: of the default group
        if attached(config) is None:
            _check_config(config)
            attach(config, _Served.of(config, False))
        served = attached(config)
        assert served is not None
    forward = served.forward
    if forward is None or forward.batch is not None or window in forward.windows:
        forward = served.forward = _Forward(served)              # a forward builds each kind of mask only once
    return forward.mask(config, window, padding)


def packed_attention(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any,
    dropout: float = 0.0, scaling: float | None = None, **about: Any,
) -> tuple[torch.Tensor, None]:
    """Attend query [rows, heads, tokens, dim]; return [rows, tokens, heads, dim] (Transformers' interface)."""
    if not isinstance(attention_mask, PackedMask):
        return _ordinary(module, (query, key, value), attention_mask, dropout, scaling, about)
    return _attend(module, (query, key, value), attention_mask, dropout, scaling, about), None


@torch.compiler.disable(reason="distca's attention exchanges with other ranks, by lengths that change with every batch")
def _attend(
    module: torch.nn.Module, qkv: Qkv, mask: PackedMask, dropout: float, scaling: float | None, about: dict[str, Any]
) -> torch.Tensor:
    _RUNNING.set(None)                                           # all masks have been built
    _check_call(module, qkv, dropout, about)
    device, forward = qkv[0].device.type, mask.forward
    if torch.is_autocast_enabled(device):                        # rotary embeddings may leave q and k wider than v
        qkv = tuple(x.to(torch.get_autocast_dtype(device)) for x in qkv)  # type: ignore[assignment]
    batch = forward.begin(module, qkv, about)
    q, k, v = (_flat(x, forward.kept) for x in qkv)              # [tokens, heads, dim]
    out = forward.attention.attend(q, k, v, batch, scale=scaling, window=mask.window, softcap=about.get("softcap"),
                                   sinks=about.get("s_aux"))
    rows, _, row_len, _ = qkv[0].shape
    if forward.kept is not None:
        out = out.new_zeros(rows * row_len, *out.shape[1:]).index_copy(0, forward.kept, out)
    return out.view(rows, row_len, *out.shape[1:])


def _flat(x: torch.Tensor, kept: torch.Tensor | None) -> torch.Tensor:
    """Reshape [rows, heads, tokens, dim] to [tokens of all rows, heads, dim], without padding."""
    tokens = x.transpose(1, 2).flatten(0, 1)
    return tokens if kept is None else tokens.index_select(0, kept)


def _check_call(module: torch.nn.Module, qkv: Qkv, dropout: float, about: dict[str, Any]) -> None:
    config, num_queries, num_keys = module.config, qkv[0].shape[2], qkv[1].shape[2]
    if about.get("position_bias") is not None:
        raise _refused(config, "it passes position_bias to attention")
    if about.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        raise _refused(config, "its attention is not causal")
    if dropout:
        raise _refused(config, f"attention dropout is {dropout}; set it to 0")
    if num_keys != num_queries:
        raise _refused(config, f"{num_queries} queries and {num_keys} keys came with a mask for equally many")


def _ordinary(
    module: torch.nn.Module, qkv: Qkv, attention_mask: torch.Tensor | None, dropout: float, scaling: float | None,
    about: dict[str, Any],
) -> tuple[torch.Tensor, None]:
    """Call Transformers' attention, for decoding with a cache and for the user's masks."""
    if module.training and qkv[0].shape[2] == qkv[1].shape[2]:
        given = "none" if attention_mask is None else f"one of shape {tuple(attention_mask.shape)}"
        error = UserError(f"attention_mask is a mask of your own ({given}) and training with distca makes its own; "
                           "give attention_mask [rows, tokens] or nothing, and documents by position_ids or "
                           "cu_seq_lens_q")
        served = _RUNNING.get()
        _RUNNING.set(None)
        if served is not None and torch.is_grad_enabled():
            served.attention.begin(error, qkv[0].device)         # other ranks are waiting for a batch
        raise error
    unread = next((name for name in DOCUMENTS if about.get(name) is not None), None)
    if unread is not None:
        raise UserError(f"{unread} came with a cache or with a mask of your own, which alone decide what is seen; "
                        f"leave out {unread}, or the mask or cache")
    if not torch.compiler.is_compiling():
        _log_decoding()
    if about.get("softcap") is None and about.get("s_aux") is None:
        return sdpa_attention_forward(module, *qkv, attention_mask, dropout, scaling, **about)
    if attention_mask is not None and attention_mask.dtype is torch.bool:
        attention_mask = attention_mask.logical_not().to(qkv[0].dtype) * torch.finfo(qkv[0].dtype).min
    modules = (sys.modules[above.__module__] for above in type(module).__mro__)
    eager = next(one.eager_attention_forward for one in modules if hasattr(one, "eager_attention_forward"))
    out, _ = eager(module, *qkv, attention_mask, scaling=scaling, dropout=dropout, **about)  # with softcap and sinks
    return out, None


@cache
def _log_decoding() -> None:
    _LOG.info("with a cache or a given mask, attention is computed locally by transformers' sdpa")


@cache
def warn_once(message: str) -> None:
    """Log a warning once, on rank 0."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        _LOG.warning(message)


AttentionInterface.register(NAME, packed_attention)
AttentionMaskInterface.register(NAME, packed_mask)
