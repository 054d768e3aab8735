"""torchtitan with balanced attention: `--override.imports distca.integrations.torchtitan.enable`.

torchtitan's override hook swaps the varlen inner attention of every layer for `BalancedAttention`, a subclass, so that
the trainer goes on building its packing metadata. The pool is the data-parallel ranks of a pipeline stage with the same
tensor-parallel index: those that hold the same layers and heads and run the same schedule, so they call in the same
order whatever other stages do, and torchtitan's pipelining stays as it is.

Inner attention gets the edges of documents but no positions, and torchtitan knows only documents that begin in their
row. So the function that makes edges of positions is wrapped: it notes the positions, and makes edges for rows that
continue another rank's document.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakTensorKeyDictionary

from distca.integrations import check_version, not_installed
from distca.integrations.document_lengths import from_positions
from distca.integrations.packed import attach
from distca.integrations.packed_layers import Options, PackedLayers, layers_over
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

_POSITIONS = WeakTensorKeyDictionary()                           # edges made here -> their positions, on the host
_edges_of = decoder.create_varlen_metadata_for_document          # torchtitan's own


class BalancedAttention(VarlenAttention):
    """Varlen attention computed where the plan says. Evaluation, and one rank by itself, compute at home."""

    @dataclass(kw_only=True, slots=True)
    class Config(VarlenAttention.Config):
        tolerance: float = 0.05
        kernel: str = "auto"
        state: str = "resend"
        transport: str = "c10d"

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.window = _window(config.window_size)
        self.options = Options(config.tolerance, config.kernel, config.state, config.transport)
        self.pool: PackedLayers | None = None

    def parallelize(self, parallel_dims: ParallelDims) -> None:
        if parallel_dims.cp_enabled:
            raise UserError(f"parallelism.context_parallel_degree is {parallel_dims.cp}; set it to 1: distca balances "
                            "documents over data-parallel ranks instead")
        mesh = parallel_dims.get_optional_mesh("batch")
        self._join(None if mesh is None else mesh.get_group())
        super().parallelize(parallel_dims)

    def forward(
        self,
        q_BLNH: torch.Tensor,
        k_BLNH: torch.Tensor,
        v_BLNH: torch.Tensor,
        *,
        attention_masks: VarlenMetadata,
        scale: float | None = None,
        out_transform: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """q [batch, tokens, heads, dim], k and v [batch, tokens, kv_heads, dim] -> out like q."""
        self._check_call(q_BLNH, v_BLNH, attention_masks)
        sinks = None if out_transform is None else _sinks(out_transform)
        if q_BLNH.is_meta:                                       # the pipeline asks for shapes
            return torch.empty_like(q_BLNH)
        dtype = torch.bfloat16 if q_BLNH.is_cuda else v_BLNH.dtype  # as torchtitan's own does on a GPU
        q, k, v = (x.flatten(0, 1).to(dtype) for x in (q_BLNH, k_BLNH, v_BLNH))  # [tokens, heads, dim]
        out = self._attend(q, k, v, attention_masks, scale, sinks)
        return out.view_as(q_BLNH).to(q_BLNH.dtype)

    @torch.compiler.disable(reason="distca's attention exchanges with other ranks; leave 'model' out of "
                                   "compile.components")
    def _attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, metadata: VarlenMetadata, scale: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        edges = metadata.cu_seq_q
        pool = self._join(_data_parallel_group()) if self.pool is None else self.pool
        return pool.attend(q, k, v, edges, positions=_POSITIONS.get(edges), training=self.training, scale=scale,
                           window=self.window, sinks=sinks, key_edges=metadata.cu_seq_k, lasting=edges in _POSITIONS)

    def _join(self, group: dist.ProcessGroup | None) -> PackedLayers:
        self.pool = layers_over(group, self.options)
        attach(self, self.pool)
        return self.pool

    def _check_call(self, q: torch.Tensor, v: torch.Tensor, metadata: VarlenMetadata) -> None:
        if not isinstance(metadata, VarlenMetadata):
            raise UserError(f"attention_masks is a {type(metadata).__name__}; give positions [batch, tokens] that "
                            "restart with every document, from which torchtitan makes VarlenMetadata")
        if v.shape[-1] != q.shape[-1]:
            raise UserError(f"values have head size {v.shape[-1]} and queries {q.shape[-1]}, as in multi-head latent "
                            "attention; distca cannot serve it")
        if q.is_cuda and torch.cuda.is_current_stream_capturing():
            raise UserError("training.disable_cuda_graphs is False; set it: exchanges change with every batch")


@override(target=VarlenAttention.Config, description="attention balanced over data-parallel ranks")
def enable(config: VarlenAttention.Config, **options: Any) -> BalancedAttention.Config:
    """Every varlen attention of the model; `options` are tolerance, kernel, state and transport."""
    _window(config.window_size)
    for module in (decoder, gpt_oss):                            # which calls it by a name of its own
        module.create_varlen_metadata_for_document = document_edges
    return derive(config, BalancedAttention.Config, **options)


def document_edges(positions: torch.Tensor, **options: Any) -> VarlenMetadata:
    """Edges of documents from positions [batch, tokens], also where a row continues the document of the one before."""
    if bool((positions[:, 0] == 0).all()):
        made = _edges_of(positions, **options)
    else:
        lengths = from_positions(positions).length
        host = tuple(torch.tensor([0, *lengths]).cumsum(0).tolist())
        edges = torch.tensor(host, dtype=torch.int32, device=positions.device)
        made = VarlenMetadata(edges, edges, max(lengths), max(lengths),
                              host if options.get("include_host_offsets") else None)
    _POSITIONS[made.cu_seq_q] = positions.to("cpu", copy=True)   # as they are now, whatever the buffer holds later
    return made


def _sinks(out_transform: Any) -> torch.Tensor:
    """gpt-oss's, which it would apply to out and a log-sum-exp with a gradient; distca's has none, and needs none."""
    if getattr(out_transform, "__func__", None) is not gpt_oss.Attention._apply_sinks:
        name = getattr(out_transform, "__qualname__", out_transform)
        raise UserError(f"the model passes out_transform {name} to its attention; distca serves that of gpt-oss "
                        "alone, for its sinks")
    sinks: torch.Tensor = out_transform.__self__.sinks
    return sinks.to_local(grad_placements=sinks.placements) if isinstance(sinks, DTensor) else sinks


def _data_parallel_group() -> dist.ProcessGroup | None:
    """By the name of its mesh: a model that is only sharded is parallelized without asking its modules."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    meshes = {group.group_desc: group for group in dist.distributed_c10d._world.pg_names}
    if "mesh_batch" in meshes:
        return meshes["mesh_batch"]
    if "mesh_pp" not in meshes or any(meshes[name].size() > 1 for name in ("mesh_pp", "mesh_tp", "mesh_cp")):
        raise UserError("torchtitan has made no mesh of data-parallel ranks, over which its attention could be "
                        "balanced; train with its Trainer, or call model.parallelize(parallel_dims)")
    return dist.group.WORLD                                      # which a mesh of all ranks takes without naming it


def _window(window_size: tuple[int, int]) -> int | None:
    """Keys that a query sees, itself among them: torchtitan's (left, 0) counts those before it, and -1 all of them."""
    left, right = window_size
    if right != 0 or left < -1:
        raise UserError(f"window_size is {window_size}; distca serves causal attention: (-1, 0), or (left, 0)")
    return None if left == -1 else left + 1
