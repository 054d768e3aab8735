"""Spread a decoder over a mesh of data × tensor ranks with PyTorch's own engines.

Tensor parallelism cuts heads, feed-forward columns and the vocabulary; between attention calls each tensor rank keeps
its share of the tokens (sequence parallel). Attention sees neither: a segment takes and gives this rank's heads of all
the row's tokens. FSDP2 then shards every segment over the data ranks. The embedding, the first segment and the head
belong to the root: tied or not, they are gathered while `decoder(run)` runs and until its backward ends.

Gradients are sums over data ranks, not means: the loss is already divided by the labels of all ranks. Segments may run
any number of times before one backward; every use adds to the same gradient. So do several micro-batches in flight, as
a pipeline has them: `accumulating` stands around each one's backward.
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
    decoder: Decoder, mesh: DeviceMesh, *, fsdp: bool, dtype: torch.dtype, recompute: str = "none"
) -> None:
    """Spread the decoder over a mesh with dimensions ("data", "tensor"), in place.

    A pipeline's stage (`stage_of`) spreads over its own part of a mesh ("pipeline", "data", "tensor"): give the whole
    mesh. Compute runs in `dtype`; parameters and the reduction of gradients stay in the parameters' own. `recompute`
    is what backward computes again. Without `fsdp` every data rank keeps whole parameters. A decoder on the "meta"
    device stays there: follow with `to_empty` and `reset_parameters` or `load_hf`.
    """
    for segment in decoder.segments:
        assert isinstance(segment, Segment)
        segment.recompute = recompute
    if not fsdp:                                                 # one shard, replicated: the same engine throughout
        mesh = _with_replicas(mesh)
    if mesh["tensor"].size() > 1:
        _cut_tensors(decoder, mesh["tensor"])
    _shard(decoder, mesh["data"] if fsdp else mesh["replica", "data"], dtype)


def _with_replicas(mesh: DeviceMesh) -> DeviceMesh:
    """Return the same ranks and groups with "replica" in place of "data", and a "data" of one rank after it."""
    assert mesh.mesh_dim_names is not None
    names = (*mesh.mesh_dim_names[:-2], "replica", "data", "tensor")
    alone = dist.new_group([dist.get_rank()], timeout=timedelta(minutes=10), use_local_synchronization=True)
    *outer, tensor = mesh.get_all_groups()
    return DeviceMesh.from_group([*outer, alone, tensor], mesh.device_type, mesh.mesh.unsqueeze(-2),
                                 mesh_dim_names=names)


def _cut_tensors(decoder: Decoder, mesh: DeviceMesh) -> None:
    # x is cut by tokens, Shard(0); norms run on it so; what multiplies weights gathers it and scatters its sum
    gather = tp.PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate())
    whole = tp.PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate(), use_local_output=True)
    by_heads = tp.SequenceParallel(sequence_dim=1, use_local_output=True)  # a norm's weight is whole on every rank
    modules_of_style: dict[tp.ParallelStyle, tuple[str, ...]] = {
        tp.RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0)): ("embed",),
        tp.SequenceParallel(sequence_dim=0): ("pre.norm", "post.norm", "norm"),
        gather: ("pre.qkv", "post.mlp"),
        tp.ColwiseParallel(): ("pre.qkv.q", "pre.qkv.k", "pre.qkv.v", "post.mlp.gate", "post.mlp.up"),
        by_heads: ("pre.q_norm", "pre.k_norm"),
        tp.RowwiseParallel(output_layouts=Shard(0)): ("post.output", "post.mlp.down"),
        whole: ("whole",),
    }
    for segment in decoder.segments:
        names = {name for name, _ in segment.named_modules()}
        tp.parallelize_module(segment, mesh, {name: style for style, modules in modules_of_style.items()
                                              for name in modules if name in names})
        segment.num_shares = mesh.size()                         # type: ignore[assignment]
    if decoder.head is not None:
        tp.parallelize_module(decoder.head, mesh, tp.ColwiseParallel())


def _shard(decoder: Decoder, mesh: DeviceMesh, dtype: torch.dtype) -> None:
    own = next(decoder.parameters()).dtype
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=own, cast_forward_inputs=False)
    modules: list[nn.Module] = [*list(decoder.segments)[1:], decoder]
    alone = mesh.size() == 1                                     # sharding again after forward would only cast again
    for module in modules:
        fully_shard(module, mesh=mesh, mp_policy=precision, reshard_after_forward=False if alone else None)
        assert isinstance(module, FSDPModule)
        if not alone:                                            # else one more copy of every gradient, divided by one
            module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)           # gloo knows no other
    decoder.register_forward_hook(_reshard_without_backward)


def _reshard_without_backward(decoder: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """Shard the root's parameters again after a forward without backward; otherwise they stay gathered for it."""
    if not torch.is_grad_enabled():
        assert isinstance(decoder, FSDPModule)
        decoder.reshard()


@contextmanager
def accumulating(decoder: nn.Module, *, last: bool) -> Iterator[None]:
    """Wrap the backward of each micro-batch of a step: gradients add up, and the `last` reduces them.

    They are reduced once a step, not once a micro-batch: that many times fewer bytes, and in a pipeline no tick in
    which all ranks wait for one stage's reduction. Until then a rank holds the whole gradient of its stage, in the
    parameters' own dtype and not yet sharded. Micro-batches may be in flight in any order; parameters are gathered
    again for each.
    """
    assert isinstance(decoder, FSDPModule)
    decoder.set_requires_gradient_sync(last)
    decoder.set_is_last_backward(last)                           # else what is prefetched goes on from one to the next
    try:
        yield
    finally:
        decoder.set_requires_gradient_sync(True)
        decoder.set_is_last_backward(True)


@torch.no_grad()
def clip_grad_norm(
    parameters: Iterable[nn.Parameter], max_norm: float, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """Scale all gradients so that their norm over all ranks is at most `max_norm`; return the norm before that.

    Each rank adds up the squares it holds, a share of them where others hold the same, and one scalar is summed over
    the mesh, then over `group`, a rank of every pipeline stage. All gradients live on one mesh, or on none.
    """
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    by_holders: dict[int, list[torch.Tensor]] = {}               # gradients by how many ranks hold the same
    for grad in grads:
        by_holders.setdefault(_num_holders(grad), []).append(grad.to_local() if isinstance(grad, DTensor) else grad)
    square = torch.stack([nn.utils.get_total_norm(own).square() / num for num, own in by_holders.items()]).sum()
    mesh = grads[0].device_mesh if isinstance(grads[0], DTensor) else None
    assert all((grad.device_mesh if isinstance(grad, DTensor) else None) == mesh for grad in grads)
    for among in [*(mesh.get_all_groups() if mesh else ()), *([group] if group else ())]:
        dist.all_reduce(square, group=among)
    norm = square.sqrt()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for own in by_holders.values():
        torch._foreach_mul_(own, scale)
    return norm


def _num_holders(grad: torch.Tensor) -> int:
    """Return how many ranks hold each element."""
    if not isinstance(grad, DTensor):
        return 1
    assert not any(placement.is_partial() for placement in grad.placements)
    return prod(grad.device_mesh.size(axis) for axis, placement in enumerate(grad.placements)
                if isinstance(placement, Replicate))
