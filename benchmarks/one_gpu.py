"""What benchmarks of training on one GPU share: a decoder with its optimizer, driven as the trainer drives it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from common import random_batch
from torch.distributed.device_mesh import init_device_mesh

from distca.runtime.attention import CoreAttention
from distca.runtime.pipeline import Pipeline
from distca.spec import ModelShape
from distca.train.batches import Batch, StageWork, step_plan
from distca.train.model.build import build_optimizer, connect
from distca.train.model.decoder import Decoder
from distca.train.model.parallel import clip_grad_norm, parallelize
from distca.train.model.segment_runs import Offload, run_segments
from distca.train.model.shape import DecoderShape
from distca.train.settings import load_settings

PEAK_FLOPS = {"NVIDIA H200": 989e12, "NVIDIA H100 80GB HBM3": 989e12}  # bf16 without sparsity, by the vendor


class OneGpu:
    """A rank that is all there is: the trainer's own decoder, loss, attention, clipping and optimizer."""

    def __init__(
        self, model: ModelShape, loss_chunk_tokens: int, attention: type[CoreAttention] = CoreAttention,
        device: str = "cuda", tied: bool = False,
    ) -> None:
        self.device, self.dtype = torch.device(device, 0), torch.bfloat16 if device == "cuda" else torch.float32
        if device == "cuda":
            torch.cuda.set_device(self.device)
        if not dist.is_initialized():
            backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        self.settings = load_settings(None, {"run.ranks": "1", "batch.ping_pong": "false"})
        self.model, self.loss_chunk_tokens = model, loss_chunk_tokens
        self.mesh = init_device_mesh(device, (1, 1, 1), mesh_dim_names=("pipeline", "data", "tensor"))
        self.decoder = Decoder(DecoderShape(model, tied=tied), device="meta").to(torch.float32)
        parallelize(self.decoder, self.mesh, fsdp=True, dtype=self.dtype)
        self.decoder.to_empty(device=self.device)
        self.decoder.reset_parameters(torch.Generator(self.device).manual_seed(0))
        self.optimizer = build_optimizer(self.decoder, self.settings)
        self.attention = attention(dist.group.WORLD)
        self.neighbours = connect(self.mesh["pipeline"], timedelta(seconds=600))
        self.choose()

    def choose(
        self, *, compile: bool = False, recompute: str = "none", tile_tokens: int = 0, offload_bytes: int = 0
    ) -> None:
        """Run the same weights another way."""
        torch._dynamo.reset()
        offload = Offload(self.device, offload_bytes) if offload_bytes else None
        for segment in self.decoder.segments:
            segment.recompute = recompute  # type: ignore[assignment]
        run_segments(self.decoder, compile=compile, tile_tokens=tile_tokens, offload=offload)
        self.work = StageWork(self.decoder, self.attention, tensor=1, dtype=self.dtype, device=self.device,
                              loss_chunk_tokens=self.loss_chunk_tokens, compiled=compile, offload=offload)

    def batch(self, lengths: Sequence[int], seed: int = 0) -> Batch:
        """Random tokens of the whole vocabulary in documents of these lengths."""
        batch = random_batch(step_plan([np.asarray(lengths)], self.settings, self.model, 1), 0)
        (row,), = batch.micro_batches
        text = torch.randint(0, self.model.vocab, (len(row.tokens) + 1,), generator=torch.Generator().manual_seed(seed))
        row = replace(row, tokens=text[:-1], labels=torch.where(row.labels < 0, row.labels, text[1:]))
        return replace(batch, micro_batches=((row,),))

    def step(self, batch: Batch) -> tuple[float, float]:
        """One optimizer step as the trainer makes it; its seconds, waited for, and its loss."""
        self.wait()
        began = time.perf_counter()
        self.work.begin(batch)
        plans = batch.plan.plans_of(0)
        self.attention.expect((plan for rows in plans for row in rows for plan in row), self.device)
        Pipeline(self.work, self.attention, self.neighbours).step(batch.plan.ticks, plans)
        norm = clip_grad_norm(self.decoder.parameters(), self.settings.optimizer.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        loss = float(self.work.total) / batch.num_labels
        assert np.isfinite(float(norm))
        self.wait()
        return time.perf_counter() - began, loss

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def model_flops(model: ModelShape, lengths: Sequence[int]) -> float:
    """Of a step without recomputation: products and attention, backward twice forward; the embedding is no product."""
    heads = model.num_heads * model.head_dim
    layer = model.hidden * (2 * heads + 2 * model.num_kv_heads * model.head_dim + 3 * model.ffn)
    pairs = sum(length * (length + 1) / 2 for length in lengths)
    linear = 6.0 * (model.num_layers * layer + model.vocab * model.hidden) * sum(lengths)
    return linear + 12.0 * model.num_layers * heads * pairs
