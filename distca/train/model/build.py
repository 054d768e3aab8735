"""What a rank trains with: its share of the decoder, the optimizer and its schedule, and the neighbouring stages.

Compile what runs between attention calls, once for rows of any length.

The compiler sees a segment's `compute` and nothing around it: FSDP gathers before and shards after, attention exchanges
by lengths that change with every batch. Segments of one class share their graphs, and the number of tokens is marked as
one that changes, so that new packings compile nothing.

Keep activations for backward, keep only what was expensive, or keep nothing and compute it again.

Residual additions stand outside of what is computed again: their results are the next segment's input, which is kept
anyway. So a recomputed feed-forward stops before its last product, whose result no gradient needs.

Say how a decoder's segments run: compiled, over tiles of their tokens, with their inputs kept on the host.

Attach it after the decoder is spread over its mesh. Whatever is chosen, the loss is that of plain segments to the
dtype's rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from distca.planning.tick_plans import layers_of_stages
from distca.runtime.transport import C10dPointToPoint
from distca.train.model.decoder import Decoder, Rotary, Segment
from distca.train.model.huggingface import load_hf
from distca.train.model.offload import Offload
from distca.train.model.parallel import parallelize
from distca.train.model.shape import DecoderShape
from distca.train.model.tiles import Tiles, in_tiles, over_tiles
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


def any_rows(function: Callable[..., Any]) -> Callable[..., Any]:
    """Tell the compiler that the first dimension of every tensor it is given changes."""

    def call(*inputs: Any) -> Any:
        for tensor in tree_leaves(inputs):
            if isinstance(tensor, torch.Tensor) and tensor.ndim:
                torch._dynamo.maybe_mark_dynamic(tensor, 0)
        return function(*inputs)

    return call


def compiled(compute: Callable[..., Any], backend: str = "inductor") -> Callable[..., Any]:
    return any_rows(torch.compile(compute, backend=backend))


Result = TypeVar("Result")
_PRODUCTS = frozenset({torch.ops.aten.mm.default, torch.ops.aten.addmm.default})


def again(recompute: str, function: Callable[..., Result], *inputs: Any) -> Result:
    """function(*inputs). Of "full" only the inputs are kept for backward, of "selective" also matrix products."""
    if recompute == "selective" and torch.compiler.is_compiling():
        recompute = "none"                                       # what the compiler does by itself
    if recompute == "none" or not torch.is_grad_enabled():
        return function(*inputs)
    kept = partial(checkpoint, function, *inputs, use_reentrant=False, preserve_rng_state=False)
    result: Result = kept(context_fn=_selective) if recompute == "selective" else kept()
    return result


def _selective() -> Any:
    return create_selective_checkpoint_contexts(_keeps)


def _keeps(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in _PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE


def run_segments(
    decoder: Decoder, *, compile: bool = False, tile_tokens: int = 0, offload: Offload | None = None,
    backend: str = "inductor",
) -> None:
    """Tiles and offloading keep a segment's inputs alone, so that they take the place of its `recompute`."""
    for segment in decoder.segments:
        assert isinstance(segment, Segment)
        compute = compiled(segment.compute, backend) if compile else segment.compute
        if tile_tokens or offload is not None:
            segment.recompute = "none"
            segment.run = partial(_by_tiles, segment, compute, tile_tokens, offload)
        else:
            segment.run = compute if compile else None


def _by_tiles(
    segment: Segment, compute: Callable[..., Any], tile_tokens: int, offload: Offload | None, *inputs: Any
) -> Any:
    run = partial(in_tiles, compute, list(segment.parameters()), tile_tokens, segment.rows_multiple, *inputs)
    if offload is None or not torch.is_grad_enabled():
        return run()
    entering = [x for x in inputs if isinstance(x, torch.Tensor) and x.requires_grad]  # x and attention's output
    for tensor in entering:
        offload.send(tensor)
    results = run()
    for tensor in entering:
        offload.settle(tensor)
    if isinstance(results, tuple):
        x, *attended = results
        offload.send(x)
        offload.recomputed(x, attended, partial(_before, segment, inputs[-1], tile_tokens))
    return results


def _before(segment: Segment, rotary: Rotary, tile_tokens: int, x: torch.Tensor) -> Any:
    """Queries, keys and values once more, for attention's backward; it comes before the segment's own."""
    if isinstance(segment, FSDPModule):
        segment.unshard()
    tiles = Tiles(rotary[0].shape[0], tile_tokens, segment.rows_multiple)
    return over_tiles(lambda x, cos, sin: segment.pre(x, (cos, sin)), tiles, [x, *map(tiles.whole, rotary)])
