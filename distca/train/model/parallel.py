"""Shard a decoder over a mesh of data × tensor ranks with PyTorch's tensor parallelism and FSDP2.

Tensor parallelism shards heads, feed-forward columns and the vocabulary, and x by tokens (sequence parallel); q, k, v
and attention's output are this rank's heads of all the row's tokens. FSDP2 then shards every segment over the data
ranks. The embedding, the first segment and the head belong to FSDP's root: they are gathered from the start of
`decoder(run)` until its backward ends. A head on all stages of a pipeline is sharded over the ranks of all stages, and
gathered from the start of a step to its end.

Gradients are summed, not averaged, over data ranks: the loss is already divided by the labels of all ranks. Segments
may run several times before one backward, and several micro-batches may be in flight: gradients accumulate.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from math import prod
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor.parallel as tp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from distca.train.model.decoder import Decoder, Segment


def parallelize(
    decoder: Decoder, mesh: DeviceMesh, *, fsdp: bool, dtype: torch.dtype, recompute: str = "none",
    homes: dist.ProcessGroup | None = None,
) -> None:
    """Shard the decoder, in place, over a mesh with dimensions ("data", "tensor") or ("pipeline", "data", "tensor").

    With a pipeline, `decoder` is this rank's stage (`stage_of`). Compute runs in `dtype`; gradients are reduced in the
    parameters' dtype. Without `fsdp` parameters are replicated over the data ranks. If all stages have the head, it is
    sharded over `homes`, the ranks of all stages with this tensor index. A decoder on the "meta" device stays there:
    call `to_empty` and then `reset_parameters` or `load_hf`.
    """
    for segment in decoder.segments:
        assert isinstance(segment, Segment)
        segment.recompute = recompute
    meshes = [mesh]
    if homes is not None:                                        # of the head
        meshes.append(DeviceMesh.from_group([homes, mesh["tensor"].get_group()], mesh.device_type,
                                            mesh.mesh.flatten(0, 1), mesh_dim_names=("data", "tensor")))
    if not fsdp:                                                 # FSDP with one shard, replicated
        meshes = [_with_replicas(one) for one in meshes]
    if mesh["tensor"].size() > 1:
        _cut_tensors(decoder, *(one["tensor"] for one in meshes))
    _shard(decoder, dtype, *(one["data"] if fsdp else one["replica", "data"] for one in meshes))


def _with_replicas(mesh: DeviceMesh) -> DeviceMesh:
    """Rename dimension "data" to "replica" and insert a new "data" of size 1 after it."""
    assert mesh.mesh_dim_names is not None
    names = (*mesh.mesh_dim_names[:-2], "replica", "data", "tensor")
    alone = dist.new_group([dist.get_rank()], timeout=timedelta(minutes=10), use_local_synchronization=True)
    *outer, tensor = mesh.get_all_groups()
    return DeviceMesh.from_group([*outer, alone, tensor], mesh.device_type, mesh.mesh.unsqueeze(-2),
                                 mesh_dim_names=names)


def _cut_tensors(decoder: Decoder, mesh: DeviceMesh, head_mesh: DeviceMesh | None = None) -> None:
    # x is sharded by tokens, Shard(0), also in norms; projections gather x and reduce-scatter their sum
    gather = tp.PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate())
    gather_local = tp.PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate(),
                                         use_local_output=True)
    by_heads = tp.SequenceParallel(sequence_dim=1, use_local_output=True)  # the norm's weight is replicated
    embed = tp.RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0))
    modules_of_style: dict[tp.ParallelStyle, tuple[str, ...]] = {
        embed: () if head_mesh and decoder.shape.tied else ("embed",),
        tp.SequenceParallel(sequence_dim=0): ("pre.norm", "post.norm", "norm"),
        gather: ("pre.qkv", "post.mlp"),
        tp.ColwiseParallel(): ("pre.qkv.q", "pre.qkv.k", "pre.qkv.v", "post.mlp.gate", "post.mlp.up"),
        by_heads: ("pre.q_norm", "pre.k_norm"),
        tp.RowwiseParallel(output_layouts=Shard(0)): ("post.output", "post.mlp.down"),
        gather_local: ("gather",),
    }
    for segment in decoder.segments:
        names = {name for name, _ in segment.named_modules()}
        tp.parallelize_module(segment, mesh, {name: style for style, modules in modules_of_style.items()
                                              for name in modules if name in names})
        segment.num_shares = mesh.size()                         # type: ignore[assignment]
    if decoder.head is not None or head_mesh is not None:
        style = embed if decoder.head is None else tp.ColwiseParallel()
        tp.parallelize_module(decoder.output, head_mesh or mesh, style)


def _shard(decoder: Decoder, dtype: torch.dtype, mesh: DeviceMesh, head_mesh: DeviceMesh | None = None) -> None:
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=next(decoder.parameters()).dtype,
                                     cast_forward_inputs=False)
    segments = [segment for part in decoder.parts.values() for segment in part]
    modules: list[tuple[nn.Module, DeviceMesh]] = [(one, mesh) for one in (*segments[head_mesh is None:], decoder)]
    if head_mesh is not None:
        modules.insert(0, (decoder.output, head_mesh))
    for module, over in modules:
        alone = over.size() == 1                                 # resharding would only repeat the cast in backward
        keep = alone or over is head_mesh                        # a step gathers the head once, on all stages together
        fully_shard(module, mesh=over, mp_policy=precision, reshard_after_forward=False if keep else None)
        assert isinstance(module, FSDPModule)
        if not alone:                                            # dividing would copy every gradient
            module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)           # gloo has no other reduction
        if over is head_mesh:
            module.set_reshard_after_backward(False)
    decoder.register_forward_hook(_reshard_without_backward)


def _reshard_without_backward(decoder: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """Reshard the root's parameters after a forward without backward; otherwise they stay gathered for backward."""
    if not torch.is_grad_enabled():
        assert isinstance(decoder, FSDPModule)
        decoder.reshard()


@contextmanager
def accumulating(decoder: nn.Module, *, last: bool) -> Iterator[None]:
    """Wrap the backward of each micro-batch of a step: gradients accumulate, and the `last` backward reduces them.

    One reduction per step saves bytes, and no pipeline tick waits for one stage's reduction. Until then a rank holds
    the unsharded gradient of its stage in the parameters' dtype. Micro-batches may be in flight in any order.
    """
    assert isinstance(decoder, FSDPModule)
    decoder.set_requires_gradient_sync(last)
    decoder.set_is_last_backward(last)                           # else prefetch state leaks into the next backward
    try:
        yield
    finally:
        decoder.set_requires_gradient_sync(True)
        decoder.set_is_last_backward(True)


@torch.no_grad()
def clip_grad_norm(
    parameters: Iterable[nn.Parameter], max_norm: float, groups: Iterable[dist.ProcessGroup] = ()
) -> torch.Tensor:
    """Scale all gradients so that their global norm is at most `max_norm`; return the norm before scaling.

    Each rank sums its squares, divided by the number of ranks that hold the same elements. The sum is all-reduced over
    `groups`, the dimensions of the mesh of all training ranks.
    """
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    by_holders: dict[int, list[torch.Tensor]] = {}               # gradients by the number of ranks that hold them
    for grad in grads:
        by_holders.setdefault(_num_holders(grad), []).append(grad.to_local() if isinstance(grad, DTensor) else grad)
    square = torch.stack([nn.utils.get_total_norm(held).square() / num for num, held in by_holders.items()]).sum()
    for group in groups:
        dist.all_reduce(square, group=group)
    norm = square.sqrt()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for held in by_holders.values():
        torch._foreach_mul_(held, scale)
    return norm


def _num_holders(grad: torch.Tensor) -> int:
    """Return the number of ranks that hold each element."""
    if not isinstance(grad, DTensor):
        return 1
    assert not any(placement.is_partial() for placement in grad.placements)
    return prod(grad.device_mesh.size(axis) for axis, placement in enumerate(grad.placements)
                if isinstance(placement, Replicate))
