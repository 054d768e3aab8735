"""torchtitan with balanced attention: `--override.imports distca.integrations.torchtitan.enable`.

torchtitan's override hook replaces the varlen inner attention of every layer by its subclass `BalancedAttention`, so
the trainer still builds its packing metadata. The pool is the data-parallel ranks of a pipeline stage with the same
tensor-parallel index, because these ranks run the same layers and heads in the same order.

Inner attention gets the edges of documents but no positions, and torchtitan assumes that every row begins a document.
So the function that turns positions into edges is wrapped: the wrapper keeps the positions, and builds edges for rows
that continue another rank's document.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pkgutil import resolve_name
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakTensorKeyDictionary

from distca.integrations import check_version, not_installed
from distca.integrations.document_lengths import PackedEdges, from_positions
from distca.integrations.packed import PackedAttention, attach, shared_attention
from distca.runtime.transport import Chosen, Transport
from distca.validation import UserError

try:
    from torchtitan.config.override import derive, override
    from torchtitan.distributed.parallel_dims import ParallelDims
    from torchtitan.models.common import decoder
    from torchtitan.models.common.attention import VarlenAttention, VarlenMetadata
    from torchtitan.models.gpt_oss import model as gpt_oss
except ImportError as error:
    raise not_installed("torchtitan", error) from error

check_version("torchtitan", version("torchtitan"))

_POSITIONS = WeakTensorKeyDictionary()                           # edges built here -> positions, on the host
_edges_of = decoder.create_varlen_metadata_for_document          # torchtitan's function


class BalancedAttention(VarlenAttention):
    """Varlen attention computed on the plan's servers; evaluation and single-rank groups compute locally."""

    @dataclass(kw_only=True, slots=True)
    class Config(VarlenAttention.Config):
        tolerance: float = 0.05
        kernel: str = "auto"
        state: str = "resend"
        transport: str = "c10d"

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.window = _window(config.window_size)
        self.options = {name: getattr(config, name) for name in ("tolerance", "kernel", "state")}
        self.options["transport"] = _transport(config.transport)
        self.pool: PackedAttention | None = None

    def parallelize(self, parallel_dims: ParallelDims) -> None:
        if parallel_dims.cp_enabled:
            raise UserError(f"parallelism.context_parallel_degree is {parallel_dims.cp}; set it to 1: distca balances "
                            "documents over data-parallel ranks instead")
        mesh = parallel_dims.get_optional_mesh("batch")
        self._join(None if mesh is None else mesh.get_group())
        super().parallelize(parallel_dims)

    def forward(
        self, q_BLNH: torch.Tensor, k_BLNH: torch.Tensor, v_BLNH: torch.Tensor, *, attention_masks: VarlenMetadata,
        scale: float | None = None, out_transform: Callable[..., torch.Tensor] | None = None, **kwargs: Any,
    ) -> torch.Tensor:
        """Attend q [batch, tokens, heads, dim] to k, v [batch, tokens, kv_heads, dim]; values may have another dim."""
        self._check_call(q_BLNH, attention_masks)
        sinks = None if out_transform is None else _sinks(out_transform)
        if q_BLNH.is_meta:                                       # the pipeline infers shapes
            return v_BLNH.new_empty(*q_BLNH.shape[:3], v_BLNH.shape[3], dtype=q_BLNH.dtype)
        dtype = torch.bfloat16 if q_BLNH.is_cuda else v_BLNH.dtype  # as torchtitan does on a GPU
        q, k, v = (x.flatten(0, 1).to(dtype) for x in (q_BLNH, k_BLNH, v_BLNH))  # [tokens, heads, dim]
        out = self._attend(q, k, v, attention_masks, scale, sinks)
        return out.view(*q_BLNH.shape[:3], -1).to(q_BLNH.dtype)

    @torch.compiler.disable(reason="distca's attention exchanges with other ranks; leave 'model' out of "
                                   "compile.components")
    def _attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, metadata: VarlenMetadata, scale: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        edges, pool = metadata.cu_seq_q, self.pool or self._join(_data_parallel_group())
        given = PackedEdges(edges, metadata.cu_seq_k, _POSITIONS.get(edges), lasting=edges in _POSITIONS)
        batch = pool.begin_edges(given, (q, k, v), training=self.training)
        return pool.attend(q, k, v, batch, scale=scale, window=self.window, sinks=sinks)

    def _join(self, group: dist.ProcessGroup | None) -> PackedAttention:
        self.pool = shared_attention(group, **self.options)
        attach(self, self.pool)
        return self.pool

    def _check_call(self, q: torch.Tensor, metadata: VarlenMetadata) -> None:
        if not isinstance(metadata, VarlenMetadata):
            raise UserError(f"attention_masks is a {type(metadata).__name__}; give positions [batch, tokens] that "
                            "restart with every document, from which torchtitan makes VarlenMetadata")
        if q.is_cuda and torch.cuda.is_current_stream_capturing():
            raise UserError("training.disable_cuda_graphs is False; set it: exchanges change with every batch")


@override(target=VarlenAttention.Config, description="attention balanced over data-parallel ranks")
def enable(config: VarlenAttention.Config, **options: Any) -> BalancedAttention.Config:
    """Balance every varlen attention of the model; `options` are tolerance, kernel, state and transport.

    `transport` may be "module.function" of a function that makes a transport of the pool's process group.
    """
    _window(config.window_size)
    for module in (decoder, gpt_oss):                            # gpt_oss imports the function by name
        module.create_varlen_metadata_for_document = document_edges
    return derive(config, BalancedAttention.Config, **options)


def document_edges(positions: torch.Tensor, **options: Any) -> VarlenMetadata:
    """Return the edges of documents from positions [batch, tokens]; rows may continue the previous row's document."""
    if bool((positions[:, 0] == 0).all()):
        metadata = _edges_of(positions, **options)
    else:
        lengths = from_positions(positions).length
        host = tuple(torch.tensor([0, *lengths]).cumsum(0).tolist())
        edges = torch.tensor(host, dtype=torch.int32, device=positions.device)
        metadata = VarlenMetadata(edges, edges, max(lengths), max(lengths),
                                  host if options.get("include_host_offsets") else None)
    _POSITIONS[metadata.cu_seq_q] = positions.to("cpu", copy=True)   # the buffer may be refilled
    return metadata


def _transport(chosen: str) -> Chosen:
    """Return the name of a transport, or the function of which this is the dotted name."""
    if "." not in chosen:
        return chosen
    try:
        made: Callable[[dist.ProcessGroup | None], Transport] = resolve_name(chosen)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(f"transport is {chosen!r}, which cannot be imported ({error}); name a function, such as "
                        "my_run.servers, in a module on the Python path") from None
    return made


def _sinks(out_transform: Any) -> torch.Tensor:
    """Return the sinks of gpt-oss's out_transform, which needs a gradient through log-sum-exp that distca lacks."""
    if getattr(out_transform, "__func__", None) is not gpt_oss.Attention._apply_sinks:
        name = getattr(out_transform, "__qualname__", out_transform)
        raise UserError(f"the model passes out_transform {name} to its attention; distca serves that of gpt-oss "
                        "alone, for its sinks")
    sinks: torch.Tensor = out_transform.__self__.sinks
    return sinks.to_local(grad_placements=sinks.placements) if isinstance(sinks, DTensor) else sinks


def _data_parallel_group() -> dist.ProcessGroup | None:
    """Find the group by its mesh name: torchtitan does not call `parallelize` if the model is only sharded."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    meshes = {group.group_desc: group for group in dist.distributed_c10d._world.pg_names}
    if "mesh_batch" in meshes:
        return meshes["mesh_batch"]
    if "mesh_pp" not in meshes or any(meshes[name].size() > 1 for name in ("mesh_pp", "mesh_tp", "mesh_cp")):
        raise UserError("torchtitan has made no mesh of data-parallel ranks, over which its attention could be "
                        "balanced; train with its Trainer, or call model.parallelize(parallel_dims)")
    return dist.group.WORLD                                      # a mesh of all ranks reuses WORLD, unnamed


def _window(window_size: tuple[int, int]) -> int | None:
    """Return the keys that a query sees, itself included; torchtitan's (left, 0) excludes itself, and -1 means all."""
    left, right = window_size
    if right != 0 or left < -1:
        raise UserError(f"window_size is {window_size}; distca serves causal attention: (-1, 0), or (left, 0)")
    return None if left == -1 else left + 1
