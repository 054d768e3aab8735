"""Megatron-Core's own pipeline schedules with documents over data-parallel ranks equal one document at a time."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

from distca.data import rows
from distca.runtime.transport import Transport
from tests.integrations import test_megatron_core as plain
from tests.support import trainers
from tests.support.attention import gradient
from tests.support.processes import run_processes, values

pytestmark = pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed: "
                                "pip install '.[megatron-core]'")
VOCAB, STAGES, LAYERS = 64, 2, 4
MICRO_BATCHES = {                                                 # by chunks of a stage, each over its two ranks
    1: [[150, 31, 60], [3, 1, 201, 1, 5], [240], [80, 80]],
    2: [[150, 31, 59], [3, 1, 230, 1, 5], [240], [119, 121]]}    # equally long, as two interleaved stages ask for
SCHEDULE: dict[int, dict[str, Any]] = {
    1: {"variable_seq_lengths": True, "moe_token_dispatcher_type": "alltoall"},  # the one allowed beside them
    2: {"overlap_p2p_comm": True, "batch_p2p_comm": False}}


def stage_of(whole: Any, chunk: int, chunks: int, settings: dict[str, Any]) -> tuple[Any, dict[str, torch.Tensor]]:
    """One chunk of this rank's stage with the whole model's weights, and its parameters by their names there."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    from distca.integrations.megatron_core import enable, follow_positions

    stage, per_chunk = parallel_state.get_pipeline_model_parallel_rank(), LAYERS // STAGES // chunks
    if chunks > 1:
        settings = {**settings, "vp_stage": chunk, "virtual_pipeline_model_parallel_size": chunks}
    model: Any = follow_positions(plain.gpt(
        enable(get_gpt_layer_local_spec(), tolerance=0.02), first=stage == chunk == 0,
        last=stage == STAGES - 1 and chunk == chunks - 1, num_layers=LAYERS, calculate_per_token_loss=True,
        pipeline_model_parallel_size=STAGES, pipeline_dtype=torch.float64, **SCHEDULE[chunks], **settings))
    first = (chunk * STAGES + stage) * per_chunk
    names = {f"decoder.layers.{layer}.": f"decoder.layers.{first + layer}." for layer in range(per_chunk)}
    ours: dict[str, torch.Tensor] = {}
    for name, x in model.named_parameters():
        prefix = next((prefix for prefix in names if name.startswith(prefix)), "")
        ours[names.get(prefix, "") + name[len(prefix):]] = x
    with torch.no_grad():
        for name, x in whole.named_parameters():
            if name in ours:
                ours[name].copy_(x)
    return model, ours


def batches(documents: list[list[torch.Tensor]], rank: int, ranks: int) -> Iterator[tuple[torch.Tensor, torch.Tensor,
            torch.Tensor, Any]]:
    """Tokens, true positions, labels and THD's edges of this rank's part of every micro-batch."""
    from megatron.core.packed_seq_params import PackedSeqParams

    for batch in documents:
        row = rows([document[:-1] for document in batch], rank, ranks)
        labels = rows([document[1:] for document in batch], rank, ranks).input_ids
        begins = (row.position_ids == 0).nonzero().flatten()
        edges = torch.cat([torch.tensor([0, len(labels)]), begins]).unique().int()
        longest = int(edges.diff().max())
        yield (row.input_ids[None], row.position_ids[None], labels,
               PackedSeqParams("thd", edges, edges, max_seqlen_q=longest, max_seqlen_kv=longest))


def forward_step(batches: Any, model: Any) -> tuple[torch.Tensor, Any]:
    tokens, positions, labels, packed = next(batches)
    out = model(tokens, positions, None, packed_seq_params=packed)

    def loss(labels: torch.Tensor, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        total = torch.nn.functional.cross_entropy(logits[0], labels, reduction="sum")
        return total, torch.tensor(len(labels), dtype=torch.int), total.detach()

    return out, partial(loss, labels)


def pipelined(transport: Transport, chunks: int, settings: dict[str, Any]) -> list[int]:
    """Loss and gradients of Megatron's schedule; gives the ranks of this stage's pool."""
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.pipeline_parallel import get_forward_backward_func

    documents = [trainers.rows_of_tokens([lengths], VOCAB)[0] for lengths in MICRO_BATCHES[chunks]]
    plain.cpu_megatron()
    whole = plain.gpt(get_gpt_layer_local_spec(), num_layers=LAYERS)
    _, expected = plain.expected_of(whole, documents)
    plain.cpu_megatron(pipeline_model_parallel_size=STAGES,
                       **{"virtual_pipeline_model_parallel_size": chunks} if chunks > 1 else {})
    parts = [stage_of(whole, chunk, chunks, settings) for chunk in range(chunks)]
    group, replica = parallel_state.get_data_parallel_group(), parallel_state.get_data_parallel_rank()
    losses = get_forward_backward_func()(
        forward_step_func=forward_step, model=[model for model, _ in parts], num_microbatches=len(documents),
        data_iterator=[batches(documents, replica, 2) for _ in parts], seq_length=120, micro_batch_size=1)
    actual = plain.summed({name: gradient(x) for _, ours in parts for name, x in ours.items()}, group)
    if losses:                                                   # of the last stage
        actual["loss"] = plain.summed({"loss": torch.stack(losses).sum()}, group)["loss"]
    trainers.assert_same(actual, {name: expected[name] for name in actual}, 1e-9)
    pool = parts[-1][0].decoder.layers[0].self_attention.core_attention.pool
    assert pool.latest.layout.lengths.tolist() == MICRO_BATCHES[chunks][-1]
    return dist.get_process_group_ranks(pool.group)


def four_ranks(transport: Transport, chunks: int) -> list[list[int]]:
    replay = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return [pipelined(transport, chunks, settings) for settings in ({}, replay)]


@pytest.mark.multiprocess
@pytest.mark.parametrize("chunks", [1, pytest.param(2, marks=pytest.mark.slow)], ids=["1F1B", "interleaved"])
def test_stages_equal_one_document_at_a_time(chunks: int) -> None:
    """Two stages of two ranks: positions reach every stage, and the pool is the ranks of a stage."""
    outcomes = values(run_processes(4, four_ranks, chunks, deadline_seconds=200.0, timeout_seconds=60.0))
    assert outcomes == [[[0, 1]] * 2, [[0, 1]] * 2, [[2, 3]] * 2, [[2, 3]] * 2]
