"""Build a rank's pipeline stage of the decoder, its links to neighbouring stages, and the optimizer.

A stage holds whole layers. The segment between two layers is split at a stage boundary: the earlier stage runs `post`,
sends x, and the later stage runs `pre`. Parameters keep the names that they have in the whole decoder, so checkpoints
do not depend on the number of stages.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from distca.planning.schedule import layers_of_stages
from distca.runtime.transport import C10dPointToPoint
from distca.train.model.decoder import Decoder, Segment
from distca.train.model.huggingface import load_hf
from distca.train.model.parallel import parallelize
from distca.train.model.shape import DecoderShape
from distca.train.settings import Settings


def stage_of(decoder: Decoder, stage: int, layers: Sequence[int]) -> Decoder:
    """Return the part of a whole decoder that one stage runs, with `layers[s]` layers on stage s.

    The stage shares its parameters with `decoder`, which must not be used afterwards. Call this before `parallelize`.
    Only the first stage takes tokens and only the last has the head; stages exchange x.
    """
    if len(layers) == 1:
        return decoder
    assert min(layers) > 0 and sum(layers) == decoder.shape.model.num_layers and not decoder.shape.tied
    begin, end = sum(layers[:stage]), sum(layers[:stage + 1])
    segments: list[Any] = list(decoder.segments)[begin:end + 1]
    if stage > 0:
        segments[0] = Segment(pre=segments[0].pre)
    if stage < len(layers) - 1:
        segments[-1] = Segment(post=segments[-1].post)
    part = Decoder(decoder.shape, device="meta")                 # an empty shell, filled below
    part.segments = nn.ModuleList()                              # keys: segment numbers in the whole decoder
    for number, segment in enumerate(segments, start=begin):
        part.segments.add_module(str(number), segment)
    part.head = decoder.head if end == decoder.shape.model.num_layers else None
    return part


def connect(pipeline: DeviceMesh, timeout: timedelta) -> C10dPointToPoint:
    """Connect this rank to its neighbours: one process group for activations, another for gradients."""
    chain = pipeline.mesh.flatten().tolist()
    back = dist.new_group(chain, timeout=timeout, use_local_synchronization=True)
    return C10dPointToPoint(chain, down=pipeline.get_group(), up=back)


def build_decoder(
    settings: Settings, shape: DecoderShape, dtype: torch.dtype, device: torch.device, mesh: DeviceMesh
) -> Decoder:
    """Build this rank's shard of the decoder, with weights drawn from the seed or loaded, the same for any mesh.

    A rank never holds more than its shard and one unsharded tensor.
    """
    layers = layers_of_stages(shape.model.num_layers, settings.parallel.pipeline)
    parameter_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    decoder = stage_of(Decoder(shape, device="meta").to(parameter_dtype), mesh["pipeline"].get_local_rank(), layers)
    parallelize(decoder, mesh, fsdp=settings.parallel.fsdp, dtype=dtype, recompute=settings.model.recompute)
    decoder.to_empty(device=device)
    if settings.model.load:
        load_hf(settings.model.load, decoder)
    else:
        decoder.reset_parameters(torch.Generator().manual_seed(settings.run.seed))
    return decoder


def build_optimizer(decoder: Decoder, settings: Settings) -> torch.optim.Optimizer:
    """Return AdamW without weight decay on norms and biases."""
    chosen = settings.optimizer
    matrices = [p for p in decoder.parameters() if p.ndim >= 2]
    vectors = [p for p in decoder.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": chosen.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=chosen.lr, betas=(chosen.beta1, chosen.beta2), fused=True)


def learning_rate(step: int, settings: Settings) -> float:
    """Return the learning rate: linear warm-up, then cosine decay to lr * min_lr_ratio at the last step."""
    chosen = settings.optimizer
    if step < chosen.warmup_steps:
        return chosen.lr * (step + 1) / chosen.warmup_steps
    progress = (step - chosen.warmup_steps) / max(1, settings.run.steps - chosen.warmup_steps)
    cosine = 0.5 * (1.0 + math.cos(math.pi * min(progress, 1.0)))
    return chosen.lr * (chosen.min_lr_ratio + (1.0 - chosen.min_lr_ratio) * cosine)
