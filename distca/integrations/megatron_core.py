"""Megatron-Core with balanced attention: a core-attention module for a layer spec.

`enable(layer_spec)` inserts the module into any decoder layer's spec; `gpt_layer_local` is a spec for `--spec`. Every
layer gets the documents as `packed_seq_params` (THD). The pool is the data-parallel ranks of a pipeline stage with the
same tensor-parallel index, because these ranks run the same layers and heads in the same order; ranks of other stages
do not. Batches that are not packed use Megatron's attention.

THD has no field for a row's first position in its document, and Megatron's RoPE begins every sequence at 0. Documents
that span ranks therefore need `follow_positions(model)`: attention and RoPE then use GPTModel's `position_ids`.

With Megatron's dynamic (hybrid) context parallelism, ranks run different numbers of forwards, so the pool of a forward
is the `cp_group` that Megatron dealt its documents to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from distca.integrations import check_version, not_installed
from distca.integrations.document_lengths import PackedEdges, RowSlices, whole_documents
from distca.integrations.packed import PackedAttention, PackedBatch, attach, shared_attention
from distca.runtime.transport import Chosen
from distca.validation import UserError

try:
    import megatron.core
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.transformer.utils import is_layer_window_attention
except ImportError as error:
    raise not_installed("megatron-core", error) from error

check_version("megatron-core", megatron.core.__version__)

_CAUSAL = (AttnMaskType.causal, AttnMaskType.padding_causal)
_ROTATED = ("rope", "learned_absolute", "none")                  # position embeddings that can begin past 0
_POSITIONS = "distca_positions"                                  # attribute of packed_seq_params: [tokens], on the host
_EDGES = "distca_edges"                                          # the same: [0, tokens] of a single document


class BalancedCoreAttention(MegatronModule):
    """Megatron core attention over packed documents, computed on the plan's servers.

    `group` is the pool, by default the data-parallel ranks. Its ranks must run the same layers in the same order.
    `options` are passed to PackedAttention, `others` to Megatron's attention for batches that are not packed.
    """

    def __init__(
        self, config: TransformerConfig, layer_number: int, attn_mask_type: AttnMaskType, attention_type: str,
        attention_dropout: float | None = None, softmax_scale: float | None = None, *,
        group: dist.ProcessGroup | None = None, options: Mapping[str, Any] | None = None, **others: Any,
    ) -> None:
        super().__init__(config=config)
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        _check(config, attn_mask_type, attention_type, dropout)
        self.scale = softmax_scale
        self.window, self.layer_number = _window(config, layer_number), layer_number
        self.group = getattr(others.get("pg_collection"), "dp", None) if group is None else group
        self.options = dict(options or {})
        self.pool: PackedAttention | None = None
        self.unpacked = DotProductAttention(
            config, layer_number, attn_mask_type, attention_type, dropout, softmax_scale, **others)

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor | None, /, *,
        attn_mask_type: AttnMaskType | None = None, attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> torch.Tensor:
        """Attend query [tokens, heads, dim] to key, value [tokens, kv_heads, dim]; return [tokens, heads * dim]."""
        if packed_seq_params is None:
            return self.unpacked(query, key, value, attention_mask, attn_mask_type=attn_mask_type,
                                 attention_bias=attention_bias)
        if attention_bias is not None or attn_mask_type not in (None, *_CAUSAL):
            raise UserError(f"attn_mask_type is {attn_mask_type} and attention_bias "
                            f"{'none' if attention_bias is None else 'given'}; distca serves causal attention without "
                            "a bias")
        if attention_mask is not None:
            raise UserError("attention_mask came with packed_seq_params, which alone say where documents begin; pass "
                            "attention_mask=None")
        if packed_seq_params.local_cp_size is None and packed_seq_params.cp_group is None:
            return self._attend(query, key, value, packed_seq_params).flatten(1)
        if query.ndim == 3:
            return self._attend_dealt(query, key, value, packed_seq_params).flatten(1)
        return self._attend_dealt(*(x.squeeze(1) for x in (query, key, value)), packed_seq_params).flatten(1)[:, None]

    @torch.compiler.disable(reason="distca's attention exchanges with other ranks")
    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packed: PackedSeqParams
    ) -> torch.Tensor:
        if self.pool is None:
            data_parallel = parallel_state.get_data_parallel_group() if self.group is None else self.group
            self.pool = shared_attention(data_parallel, **self.options)
            attach(self, self.pool)
        batch = self.pool.begin_edges(_edges(packed), (query, key, value), training=self.training,
                                      layer=self.layer_number)
        if self.config.expert_model_parallel_size > 1 and self.config.moe_token_dispatcher_type == "allgather":
            _check_equal_tokens(batch)
        return self.pool.attend(query, key, value, batch, scale=self.scale, window=self.window)

    @torch.compiler.disable(reason="distca's attention exchanges with other ranks")
    def _attend_dealt(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packed: PackedSeqParams
    ) -> torch.Tensor:
        """Attend this rank's chunks of documents that dynamic context parallelism dealt to `packed.cp_group`."""
        group, pool = packed.cp_group, shared_attention(packed.cp_group, **self.options)
        rank, ranks = (0, 1) if group is None else (group.rank(), group.size())
        if ranks != (packed.local_cp_size or ranks):
            raise UserError(f"packed_seq_params.local_cp_size is {packed.local_cp_size} but cp_group has {ranks} "
                            "ranks; pass the group that Megatron dealt the documents to")
        attach(self, pool)
        given = _dealt_edges(packed, ranks * len(query))
        batch = pool.begin_once(given.edges, partial(_chunks, given, ranks * len(query), rank, ranks),
                                (query, key, value), layer=self.layer_number, beside=None, in_pool=ranks > 1)
        return pool.attend(query, key, value, batch, scale=self.scale, window=self.window)


def enable(
    layer_spec: ModuleSpec, group: dist.ProcessGroup | None = None, *, tolerance: float = 0.05, kernel: str = "auto",
    state: str = "resend", transport: Chosen = "c10d",
) -> ModuleSpec:
    """Return a copy of a decoder layer's spec with balanced core attention.

    `group` None is Megatron's data-parallel group. Other options are passed to `plan` and CoreAttention.
    """
    attention = getattr(layer_spec.submodules, "self_attention", None)
    if not isinstance(attention, ModuleSpec) or not hasattr(attention.submodules, "core_attention"):
        raise UserError(f"layer_spec builds {getattr(layer_spec.module, '__name__', layer_spec.module)} without "
                        "self-attention that has a core_attention; give the spec of a decoder layer")
    options = {"tolerance": tolerance, "kernel": kernel, "state": state, "transport": transport}
    core = partial(BalancedCoreAttention, group=group, options=options)
    attention = replace(attention, submodules=replace(attention.submodules, core_attention=core))
    return replace(layer_spec, submodules=replace(layer_spec.submodules, self_attention=attention))


def follow_positions(model: torch.nn.Module) -> torch.nn.Module:
    """Let documents span ranks: RoPE and attention of the GPTModel inside use the `position_ids` of its forward.

    A row whose first position is not 0 continues the last document of the previous data-parallel rank. Every pipeline
    stage must then pass `position_ids`.
    """
    found = [part for part in model.modules() if isinstance(part, GPTModel)]
    if not found:
        raise UserError(f"model is a {type(model).__name__} without a GPTModel inside; give one, wrapped or not")
    for gpt in found:
        kind = gpt.position_embedding_type
        if kind not in _ROTATED or gpt.config.apply_rope_fusion:
            what = "apply_rope_fusion is True" if kind in _ROTATED else f"position_embedding_type is {kind!r}"
            raise UserError(f"{what}, which begins every packed sequence at position 0; choose one of: "
                            f"{', '.join(_ROTATED)}, with apply_rope_fusion False")
        gpt.register_forward_pre_hook(_note_positions, with_kwargs=True)
        if kind == "rope":
            gpt.rotary_pos_emb.register_forward_hook(partial(_rotate_by_position, gpt))
    return model


def _note_positions(gpt: Any, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
    """Store positions on `packed_seq_params`, which all attention layers get, and on the model for RoPE."""
    packed = named.get("packed_seq_params")
    position_ids = named.get("position_ids", inputs[1] if len(inputs) > 1 else None)
    gpt.distca_positions = None
    if packed is None:
        return
    if position_ids is None:
        raise UserError("packed_seq_params came without position_ids; pass them to every pipeline stage, or leave out "
                        "follow_positions where documents do not span ranks")
    positions = position_ids.reshape(-1)
    setattr(packed, _POSITIONS, positions.to("cpu", copy=True))  # the buffer may be refilled
    gpt.distca_positions = positions if len(positions) and int(positions[0]) else None


def _rotate_by_position(gpt: Any, rotary: Any, _: Any, angles: torch.Tensor) -> torch.Tensor:
    """Return angles [tokens, 1, 1, dim], one per packed token; Megatron then uses them without slicing."""
    positions = gpt.distca_positions
    return angles if positions is None else rotary.get_emb(int(positions.max()) + 1)[positions]


def _edges(packed: PackedSeqParams) -> PackedEdges:
    """Return the edges of documents; padding after a document counts as part of it, which causal attention hides."""
    if packed.qkv_format != "thd":
        raise UserError(f"packed_seq_params.qkv_format is {packed.qkv_format!r}; give 'thd'")
    edges = packed.cu_seqlens_q if packed.cu_seqlens_q_padded is None else packed.cu_seqlens_q_padded
    key_edges = packed.cu_seqlens_kv if packed.cu_seqlens_kv_padded is None else packed.cu_seqlens_kv_padded
    return PackedEdges(edges, key_edges, getattr(packed, _POSITIONS, None), partial(_check_lengths, packed))


def _check_equal_tokens(batch: PackedBatch) -> None:
    """Refuse unequal tokens per rank where experts' ranks all-gather them: the collective would fail or hang."""
    tokens = [sum(row.length) for row in batch.rows]
    if tokens and min(tokens) < max(tokens):
        raise UserError(f"moe_token_dispatcher_type is 'allgather', for which all ranks need as many tokens, but they "
                        f"have {min(tokens)} to {max(tokens)}; set it to 'alltoall'")


def _dealt_edges(packed: PackedSeqParams, num_tokens: int) -> PackedEdges:
    """Return the edges of whole documents over all ranks of `cp_group`; "sbhd", a single document, has none."""
    if packed.qkv_format != "sbhd":
        return replace(_edges(packed), positions=None)           # chunks say where a row's tokens are
    kept = getattr(packed, _EDGES, None)
    if kept is None or int(kept[-1]) != num_tokens:
        kept = torch.tensor([0, num_tokens])
        setattr(packed, _EDGES, kept)
    return PackedEdges(kept)


def _chunks(given: PackedEdges, num_tokens: int, rank: int, ranks: int) -> RowSlices:
    """Return a rank's slices where context parallelism gives rank r chunks r and 2 · ranks - 1 - r of each document."""
    lengths = given.slices(num_tokens).length
    if ranks == 1:
        return whole_documents(lengths)
    for length in lengths:
        if length % (2 * ranks):
            raise UserError(f"a document has {length} tokens, which {ranks} ranks of its cp_group cannot cut into "
                            f"{2 * ranks} equal chunks; pad it to a multiple of {2 * ranks}")
    cut = [(place * length // (2 * ranks), length // (2 * ranks), document) for document, length in enumerate(lengths)
           for place in (rank, 2 * ranks - 1 - rank)]
    return RowSlices(*zip(*cut, strict=True))


def _check_lengths(packed: PackedSeqParams) -> None:
    """Refuse documents that contradict the other fields of packed_seq_params."""
    if packed.cu_seqlens_q is None:
        return
    real, padded = packed.cu_seqlens_q.diff(), packed.cu_seqlens_q_padded
    if padded is not None and (padded.shape != packed.cu_seqlens_q.shape or bool((real > padded.diff()).any())):
        raise UserError(f"packed_seq_params.cu_seqlens_q has {len(real)} documents, which do not fit the "
                        f"{len(padded) - 1} of cu_seqlens_q_padded; pad each where it ends, or give one of them")
    if packed.max_seqlen_q is not None and len(real) and int(real.max()) > int(packed.max_seqlen_q):
        raise UserError(f"packed_seq_params.max_seqlen_q is {int(packed.max_seqlen_q)} but a document has "
                        f"{int(real.max())} tokens; give the longest one's, or leave it out")


def _check(config: TransformerConfig, mask: AttnMaskType, attention_type: str, dropout: float) -> None:
    """Refuse, when the model is built, attention that is not causal softmax over documents or sliding windows."""
    if attention_type != "self" or config.multi_latent_attention:
        kind = "multi-latent attention" if attention_type == "self" else f"{attention_type}-attention"
        raise UserError(f"this layer has {kind}; distca serves grouped-query self-attention")
    if mask not in _CAUSAL:
        raise UserError(f"attn_mask_type is {mask.name}; distca serves causal attention")
    if dropout:
        raise UserError(f"attention_dropout is {dropout}; set it to 0 to use distca")
    if config.context_parallel_size != 1:
        raise UserError(f"context_parallel_size is {config.context_parallel_size}; set it to 1: distca balances "
                        "documents over data-parallel ranks instead")
    if config.softmax_type != "vanilla":
        raise UserError(f"softmax_type is {config.softmax_type!r}; distca serves 'vanilla'")
    if config.qk_clip:
        raise UserError("qk_clip is True and needs the largest logits, which distca does not keep; set it to False")


def _window(config: TransformerConfig, layer_number: int) -> int | None:
    """Return the keys that a query sees, itself included; Megatron's (left, 0) excludes itself, and -1 means all."""
    if not is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number):
        return None
    left, right = config.window_size
    if right != 0 or left < -1:
        raise UserError(f"window_size is {config.window_size}; distca serves (left, 0)")
    return None if left == -1 else left + 1


gpt_layer_local = enable(get_gpt_layer_local_spec())             # for --spec distca.integrations.megatron_core
