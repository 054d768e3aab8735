"""Build a rank's pipeline stage of the decoder, its links to neighbouring stages, and the optimizer.

A stage holds one or several parts of whole layers. The segment between two layers is split where parts meet: the
earlier part runs `post`, its stage sends x, and the later part runs `pre`. Parameters keep the names that they have in
the whole decoder, so checkpoints do not depend on the number of stages or parts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from itertools import accumulate, combinations
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from distca.planning.schedule import layers_of_stages
from distca.runtime.transport import C10dPointToPoint
from distca.spec import ModelShape
from distca.train.model.decoder import Decoder, Segment
from distca.train.model.huggingface import load_hf
from distca.train.model.parallel import parallelize
from distca.train.model.shape import DecoderShape
from distca.train.settings import Settings
from distca.train.settings.schedule import pipeline_ticks


def stage_of(
    decoder: Decoder, stage: int, layers: Sequence[int], stages: Sequence[int] | np.ndarray | None = None,
    spreads_head: bool = False,
) -> Decoder:
    """Return what one stage runs of a whole decoder: its parts, with `layers[p]` layers in part p.

    `stages[p]` is the stage of part p, by default p. The stage shares its parameters with `decoder`, which must not be
    used afterwards. Call this before `parallelize`. Only the first part takes tokens; parts exchange x. The head is on
    the last part's stage, or on all of them if it is spread, as it must be if the embedding is tied to it.
    """
    if len(layers) == 1:
        return decoder
    stages = range(len(layers)) if stages is None else stages
    assert min(layers) > 0 and sum(layers) == decoder.shape.model.num_layers
    assert spreads_head or not decoder.shape.tied
    shell = Decoder(decoder.shape, device="meta")                # empty, filled below
    shell.segments, shell.parts = nn.ModuleList(), {}            # keys of segments: numbers in the whole decoder
    edges = [0, *accumulate(layers)]
    for part in (part for part, where in enumerate(stages) if where == stage):
        segments: list[Any] = list(decoder.segments)[edges[part]:edges[part + 1] + 1]
        if part > 0:
            segments[0] = Segment(pre=segments[0].pre)
        if part < len(layers) - 1:
            segments[-1] = Segment(post=segments[-1].post)
        shell.parts[part] = segments
        for number, segment in enumerate(segments, start=edges[part]):
            shell.segments.add_module(str(number), segment)
    if decoder.shape.tied and 0 not in shell.parts:
        shell.segments.add_module("0", Segment(embed=decoder.output))  # type: ignore[arg-type]
    shell.head = decoder.head if spreads_head or len(layers) - 1 in shell.parts else None
    return shell


def connect(pipeline: DeviceMesh, timeout: timedelta) -> C10dPointToPoint:
    """Connect this rank to all other stages: one process group for messages to later stages, another to earlier ones.

    NCCL connects two ranks at their first message, and both wait for it, so every pair exchanges one here.
    """
    chain = pipeline.mesh.flatten().tolist()
    back = dist.new_group(chain, timeout=timeout, use_local_synchronization=True)
    links = C10dPointToPoint(chain, down=pipeline.get_group(), up=back)
    message = torch.zeros(1, device=pipeline.device_type)
    for pair in combinations(range(len(chain)), 2):
        for sender, receiver in (pair, pair[::-1]):
            if links.stage == sender:
                links.send(message, receiver).wait()
            elif links.stage == receiver:
                links.receive(message.shape, message, sender).wait()
    return links


def build_decoder(
    settings: Settings, shape: DecoderShape, dtype: torch.dtype, device: torch.device, mesh: DeviceMesh,
    homes: dist.ProcessGroup | None = None,
) -> Decoder:
    """Build this rank's shard of the decoder, with weights drawn from the seed or loaded, the same for any mesh.

    A rank never holds more than its shard and one unsharded tensor. `homes` are as for `parallelize`.
    """
    ticks = pipeline_ticks(settings, shape.model, shape.tied)
    parameter_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    decoder = stage_of(Decoder(shape, device="meta").to(parameter_dtype), mesh["pipeline"].get_local_rank(),
                       layers_of_stages(shape.model.num_layers, ticks.num_parts), ticks.stage_of, ticks.spreads_head)
    parallelize(decoder, mesh, fsdp=settings.parallel.fsdp, dtype=dtype, recompute=settings.model.recompute,
                homes=homes if ticks.spreads_head else None)
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


def lasting(settings: Settings, shape: DecoderShape, dtype: torch.dtype) -> dict[str, Any]:
    """Return settings that must not change on resume, and whose change the tensors' shapes would not reveal."""
    facts: dict[str, Any] = {"model.tied": shape.tied, "model.rope_theta": shape.rope_theta,
                             "model.window": list(shape.model.windows),
                             "run.dtype": str(dtype).removeprefix("torch."), "architecture": architecture(shape.model)}
    source = "load" if settings.model.load else "config"
    if settings.model.load or settings.model.config:
        scaling = None if shape.rope_scaling is None else asdict(shape.rope_scaling)
        return facts | {f"model.{source}'s norm_eps": shape.norm_eps, f"model.{source}'s rope_scaling": scaling}
    return facts | {"model.name": settings.model.name}


def architecture(model: ModelShape) -> str:
    """Name the sizes of a decoder, to tell another one's checkpoints from this one's."""
    return (f"{model.num_layers} layers, hidden {model.hidden}, feed-forward {model.ffn}, {model.num_heads} heads, "
            f"{model.num_kv_heads} KV heads, head_dim {model.head_dim}, vocab {model.vocab}")
