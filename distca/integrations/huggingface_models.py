"""Which of Transformers' models distca serves, told by their config alone: the others are refused by name.

Served is causal softmax attention over whole documents or windows of them, in all layers or beside layers that carry a
state along a document; those keep documents whole on a rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from distca.models import shape_of_config
from distca.spec import ModelShape
from distca.validation import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_LAYER_TYPES = {"full_attention", "sliding_attention"}
_STATEFUL = {"linear_attention", "mamba", "conv"}                # layers that carry state along a document
_DROPOUTS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")


def check_config(config: PreTrainedConfig) -> None:
    """Refuse, by name, a model whose attention is not causal softmax over whole documents or windows of them."""
    if config.is_encoder_decoder or getattr(config, "add_cross_attention", False):
        raise refused(config, "it has cross-attention")
    if config.get_text_config(decoder=True) is not config:
        raise refused(config, "it has several parts, such as text and images; enable its language model alone")
    if not getattr(config, "is_causal", True) or getattr(config, "use_bidirectional_attention", None):
        raise refused(config, "its attention is not causal")
    kinds = set(getattr(config, "layer_types", None) or [])
    others = kinds - _LAYER_TYPES - (_STATEFUL if kinds & _LAYER_TYPES else set())
    if others or getattr(config, "attention_chunk_size", None) is not None:
        raise refused(config, f"it has layers of other kinds: {', '.join(sorted(others)) or 'chunked_attention'}")
    if getattr(config, "v_head_dim", None) is not None:
        raise refused(config, f"its values have a head size of their own (v_head_dim {config.v_head_dim})")
    for name in _DROPOUTS:
        if getattr(config, name, 0.0):
            raise refused(config, f"{name} is {getattr(config, name)}; set it to 0")


def stateful_reason(config: PreTrainedConfig) -> str | None:
    """Why documents of this model cannot span ranks, where they cannot."""
    kinds = sorted(set(getattr(config, "layer_types", None) or []) & _STATEFUL)
    return None if not kinds else (f"its {', '.join(kinds)} layers carry a state along each document, which does not "
                                   "cross ranks; give every rank whole documents")


def refused(config: PreTrainedConfig, reason: str) -> ValueError:
    return UserError(f"distca cannot serve the attention of {config.model_type}: {reason}")


def shape_of(config: PreTrainedConfig) -> ModelShape:
    """What planning needs to know of a model."""
    return shape_of_config(config.to_dict(), config.model_type, any_type=True)
