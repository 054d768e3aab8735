"""What a rank trains with: its share of the decoder, the optimizer and its schedule, and the neighbouring stages."""

from __future__ import annotations

import math
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from distca.planning.schedule import layers_of_stages
from distca.runtime.transport import C10dPointToPoint
from distca.train.model.decoder import Decoder
from distca.train.model.huggingface import load_hf
from distca.train.model.parallel import parallelize
from distca.train.model.shape import DecoderShape
from distca.train.settings import Settings
from distca.train.stages import stage_of


def connect(pipeline: DeviceMesh, timeout: timedelta) -> C10dPointToPoint:
    """This rank's neighbours: one process group for activations, another for gradients."""
    chain = pipeline.mesh.flatten().tolist()
    back = dist.new_group(chain, timeout=timeout, use_local_synchronization=True)
    return C10dPointToPoint(chain, down=pipeline.get_group(), up=back)


def build_decoder(
    settings: Settings, shape: DecoderShape, dtype: torch.dtype, device: torch.device, mesh: DeviceMesh
) -> Decoder:
    """This rank's share of the weights, the same on any mesh: drawn from the run's seed, or loaded.

    No rank ever holds more than its share and one whole tensor.
    """
    stages = settings.parallel.pipeline
    own = torch.float64 if dtype == torch.float64 else torch.float32
    decoder = stage_of(Decoder(shape, device="meta").to(own), mesh["pipeline"].get_local_rank(), stages,
                       layers_of_stages(shape.model.num_layers, stages))
    parallelize(decoder, mesh, tensor=settings.parallel.tensor, fsdp=settings.parallel.fsdp, dtype=dtype,
                recompute=settings.model.recompute)
    decoder.to_empty(device=device)
    if settings.model.load:
        load_hf(settings.model.load, decoder)
    else:
        decoder.reset_parameters(torch.Generator().manual_seed(settings.run.seed))
    return decoder


def build_optimizer(decoder: Decoder, settings: Settings) -> torch.optim.Optimizer:
    """AdamW, without weight decay on norms."""
    chosen = settings.optimizer
    matrices = [p for p in decoder.parameters() if p.ndim >= 2]
    vectors = [p for p in decoder.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": chosen.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=chosen.lr, betas=(chosen.beta1, chosen.beta2), fused=True)


def learning_rate(step: int, settings: Settings) -> float:
    """Linear warm-up, then a cosine down to min_lr_ratio at the last step."""
    chosen = settings.optimizer
    if step < chosen.warmup_steps:
        return chosen.lr * (step + 1) / chosen.warmup_steps
    progress = (step - chosen.warmup_steps) / max(1, settings.run.steps - chosen.warmup_steps)
    cosine = 0.5 * (1.0 + math.cos(math.pi * min(progress, 1.0)))
    return chosen.lr * (chosen.min_lr_ratio + (1.0 - chosen.min_lr_ratio) * cosine)
