"""torchtitan's own pipelines with documents over the data-parallel ranks of each stage equal one document at a time.

torchtitan hands `positions` and the edges of documents to every stage, beside the activations that stages pass on; so
each stage knows where its rows begin, and its data-parallel ranks, which run one schedule, are the pool.
"""

from __future__ import annotations

import importlib
import importlib.util
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist

from distca.data import rows
from distca.runtime.transport import Transport
from tests.integrations import test_torchtitan as plain
from tests.support import on_cpu, trainers
from tests.support.processes import run_processes, values

pytestmark = pytest.mark.skipif(
    not hasattr(dist, "set_timeout") or None in map(importlib.util.find_spec, ("torchtitan", "triton")),
    reason="torchtitan, triton or torch from 2.14, whose schedules take micro-batches, is not installed: pip install "
           "'.[torchtitan]'")
VOCAB, STAGES = 2048, 2
MICRO_BATCHES = [[240], [150, 31, 59], [3, 1, 230, 1, 5], [119, 121]]  # rows of a pipeline are equally long


def whole_config(layers: int) -> Any:
    spec = importlib.import_module("torchtitan.models.llama3").model_registry("debugmodel", attn_backend="varlen")
    spec.model.layers = spec.model.layers[:layers]
    return spec


@cache
def parallelism_of(schedule: str) -> tuple[Any, Any]:
    """torchtitan's settings, and its meshes, which it makes once."""
    from torchtitan.config import ParallelismConfig
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed.utils import set_spmd_backend

    parallelism = ParallelismConfig(
        pipeline_parallel_degree=STAGES, pipeline_parallel_schedule=schedule,
        pipeline_parallel_first_stage_less_layers=0, pipeline_parallel_last_stage_less_layers=0)
    set_spmd_backend(parallelism.spmd_backend)
    return parallelism, ParallelDims.from_config(parallelism, 2 * STAGES)


def pipeline(schedule: str, layers: int, checkpointing: Any) -> tuple[Any, list[Any]]:
    """Schedule and parts of this rank, as torchtitan's trainer makes them."""
    from torchtitan.config import CompileConfig, TrainingConfig

    spec = whole_config(layers)
    parallelism, meshes = parallelism_of(schedule)
    made, parts, _, _ = spec.pipelining_fn(
        plain.balanced_model(spec.model, tolerance=0.02), parallel_dims=meshes,
        training=TrainingConfig(mixed_precision_param="float32", local_batch_size=len(MICRO_BATCHES)),
        parallelism=parallelism, compile_config=CompileConfig(), ac_config=checkpointing, dump_folder="",
        device=torch.device("cpu"), model_config=spec.model, parallelize_fn=spec.parallelize_fn, loss_fn=total_loss)
    return made, parts


def total_loss(logits: torch.Tensor, labels: torch.Tensor, **_: Any) -> tuple[torch.Tensor, dict[str, Any]]:
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"), {}


def expected_of(documents: list[torch.Tensor], layers: int) -> dict[str, torch.Tensor]:
    from torchtitan.models.common.attention import ScaledDotProductAttention

    config = whole_config(layers).model
    for layer in config.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    model = plain.model_of(config)
    logits = [model(document[None, :-1], torch.arange(len(document) - 1)[None])[0] for document in documents]
    loss = trainers.total_loss(torch.cat(logits), documents)
    loss.backward()
    return {"loss": loss.detach(), **{name: x.grad for name, x in model.named_parameters()}}


def pipelined(transport: Transport, schedule: str, layers: int, checkpointing: Any) -> list[int]:
    """Loss and gradients of one step; gives the ranks of this stage's pool."""
    from torch.distributed.tensor import DTensor

    documents = [trainers.rows_of_tokens([lengths], VOCAB)[0] for lengths in MICRO_BATCHES]
    made, parts = pipeline(schedule, layers, checkpointing)
    inputs, kwargs, labels = [], [], []
    for batch in documents:
        row = rows([document[:-1] for document in batch], transport.rank % 2, 2)
        positions = row.position_ids[None]
        inputs.append((row.input_ids[None],))
        kwargs.append({"positions": positions, "attention_masks": parts[0].get_attention_masks(positions)})
        labels.append(rows([document[1:] for document in batch], transport.rank % 2, 2).input_ids[None])
    stages = made._stages if hasattr(made, "_stages") else [made._stage]
    losses: list[torch.Tensor] = []
    made.step(arg_mbs=inputs if any(stage.is_first for stage in stages) else None, kwarg_mbs=kwargs,
              target_mbs=labels if any(stage.is_last for stage in stages) else None, losses=losses,
              loss_kwargs={}, return_outputs=False)
    actual = {}
    for name, x in (named for part in parts for named in part.named_parameters()):
        actual[name.replace("_checkpoint_wrapped_module.", "")] = (
            x.grad.full_tensor() if isinstance(x.grad, DTensor) else x.grad)
    pools = [module.pool for part in parts for module in part.modules() if type(module).__name__ == "BalancedAttention"]
    if losses:
        actual["loss"] = torch.stack(losses).detach().sum()
        dist.all_reduce(actual["loss"], group=pools[0].group)
    expected = expected_of([document for batch in documents for document in batch], layers)
    trainers.assert_same(actual, {name: expected[name] for name in actual})
    assert pools[0].latest.layout.lengths.tolist() == MICRO_BATCHES[-1]
    return dist.get_process_group_ranks(pools[0].group)


def four_ranks(transport: Transport, schedule: str, layers: int) -> list[list[int]]:
    on_cpu.torchtitan()
    from torchtitan.distributed.activation_checkpoint import FullAC

    return [pipelined(transport, schedule, layers, checkpointing) for checkpointing in (None, FullAC.Config())]


@pytest.mark.multiprocess
@pytest.mark.parametrize(("schedule", "layers"), [
    ("1F1B", 2), pytest.param("Interleaved1F1B", 4, marks=pytest.mark.slow),
    pytest.param("InterleavedZeroBubble", 4, marks=pytest.mark.slow)])
def test_stages_equal_one_document_at_a_time(schedule: str, layers: int) -> None:
    outcomes = values(
        run_processes(4, four_ranks, schedule, layers, deadline_seconds=250.0, timeout_seconds=60.0))
    assert outcomes == [[[0, 1]] * 2, [[0, 1]] * 2, [[2, 3]] * 2, [[2, 3]] * 2]
