"""Megatron-Core's own GPT with documents over data-parallel ranks equals itself on one document at a time."""

from __future__ import annotations

import importlib.util
import re
from functools import partial
from typing import Any
from unittest.mock import MagicMock

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
VOCAB = 64
CASES = {2: [[300], [80, 40], [3, 1, 201, 1, 5]], 4: [[5, 1, 220, 7, 40], [256]]}


def cpu_experts() -> None:
    """Stand-ins for the streams of Megatron's token dispatcher, and for what it takes from Transformer Engine."""
    from contextlib import nullcontext

    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    stream = MagicMock()
    torch.cuda.Stream = torch.cuda.current_stream = lambda *_: stream  # type: ignore[assignment, misc]
    torch.cuda.stream = lambda _: nullcontext()  # type: ignore[assignment, return-value]
    moe_utils.te_general_gemm = None
    token_dispatcher.maybe_move_tensor_to_cpu = lambda x, as_numpy=False, **_: x.numpy() if as_numpy else x


def spanning_step(rank: int, ranks: int, lengths: list[int], settings: dict[str, Any], experts: int = 0) -> None:
    """Logits, loss and gradients of this rank's slices against every document by itself.

    `experts`, if there are any, lie on one rank there, and are divided over all ranks here.
    """
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.packed_seq_params import PackedSeqParams

    from distca.integrations.megatron_core import enable, follow_positions
    from distca.integrations.packed import latest_plan

    documents = [document for row in trainers.rows_of_tokens([lengths], VOCAB) for document in row]
    routed: dict[str, Any] = {}
    if experts:
        routed |= {"num_moe_experts": experts, "moe_router_topk": 2, "add_bias_linear": False}
    spec = get_gpt_layer_local_spec(num_experts=experts or None)
    theirs = plain.gpt(spec, **routed)
    alone, expected = plain.expected_of(theirs, [documents])
    if experts:
        plain.cpu_megatron(expert_model_parallel_size=ranks)
        routed["expert_model_parallel_size"] = ranks
    ours = follow_positions(plain.gpt(enable(spec, tolerance=0.02), **routed, **settings))

    def whole(name: str) -> str:
        """A parameter's name where all experts are on one rank."""
        return re.sub(r"experts\.(\d+)", lambda found: f"experts.{int(found[1]) + rank * experts // ranks}", name)

    weights = theirs.state_dict()
    ours.load_state_dict({name: weights[whole(name)] for name in ours.state_dict()})
    row = rows([document[:-1] for document in documents], rank, ranks)
    row_labels = rows([document[1:] for document in documents], rank, ranks).input_ids
    begins = torch.cat([(row.position_ids == 0).nonzero().flatten(), torch.tensor([0, len(row.input_ids)])]).unique()
    edges = begins.int()
    packed = PackedSeqParams("thd", edges, edges, max_seqlen_q=int(edges.diff().max()),
                             max_seqlen_kv=int(edges.diff().max()))
    logits = ours(row.input_ids[None], row.position_ids[None], None, packed_seq_params=packed)[0]
    loss = torch.nn.functional.cross_entropy(logits, row_labels, reduction="sum")
    loss.backward()
    named = {"loss": loss.detach(), **{name: gradient(x) for name, x in ours.named_parameters()}}
    plain.summed({name: x for name, x in named.items() if ".local_experts." not in name})  # an expert's are complete
    before = sum(len(rows([document[:-1] for document in documents], other, ranks).input_ids) for other in range(rank))
    torch.testing.assert_close(logits, torch.cat(alone)[before:before + len(logits)], rtol=1e-9, atol=1e-9)
    trainers.assert_same(named, {name: expected[whole(name)] for name in named}, 1e-9)
    assert latest_plan(ours).layout.lengths.tolist() == lengths


def told(rank: int) -> list[str]:
    """Refusals: a gap between ranks, no positions, and RoPE that cannot begin anywhere."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.packed_seq_params import PackedSeqParams

    from distca.integrations.megatron_core import enable, follow_positions

    model = follow_positions(plain.gpt(enable(get_gpt_layer_local_spec())))
    edges = torch.tensor([0, 4], dtype=torch.int32)
    tokens = torch.zeros(1, 4, dtype=torch.int64)

    def packed() -> Any:
        return PackedSeqParams("thd", edges.clone(), edges.clone(), max_seqlen_q=4, max_seqlen_kv=4)

    fused = plain.gpt(enable(get_gpt_layer_local_spec()))
    fused.config.apply_rope_fusion = True
    lines: list[str] = trainers.refusals([
        lambda: model(tokens, torch.arange(4)[None] + 9 * rank, None, packed_seq_params=packed()),
        lambda: model(tokens, None, None, packed_seq_params=packed()),
        lambda: follow_positions(fused),
        lambda: follow_positions(torch.nn.Linear(1, 1)),
    ])
    return lines


def every_case(transport: Transport) -> list[str]:
    plain.cpu_megatron()
    for number, lengths in enumerate(CASES[transport.size]):
        replay = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
        spanning_step(transport.rank, transport.size, lengths, replay if number == 0 else {})
    return told(transport.rank) if transport.size == 2 else []


def every_dispatcher(transport: Transport) -> list[str]:
    """Unequal tokens are refused by the dispatcher that cannot have them, before Megatron gathers them."""
    cpu_experts()
    cases = [("allgather", [3, 1, 200, 1, 5]), ("alltoall", [3, 1, 201, 1, 5]), ("allgather", [3, 1, 201, 1, 5])]
    lines = []
    for dispatcher, lengths in cases:
        plain.cpu_megatron()
        settings = {"moe_token_dispatcher_type": dispatcher}
        lines += trainers.refusals([partial(spanning_step, transport.rank, transport.size, lengths, settings, 4)])
    return lines


@pytest.mark.multiprocess
def test_experts_over_ranks_equal_one_document_at_a_time() -> None:
    first, second = values(run_processes(2, every_dispatcher, deadline_seconds=200.0, timeout_seconds=60.0))
    assert first == second
    trainers.assert_refused(first, ["'allgather', for which all ranks need as many tokens, but they have 105 to 106"])


@pytest.mark.multiprocess
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_equal_one_document_at_a_time(ranks: int) -> None:
    outcomes = run_processes(ranks, every_case, deadline_seconds=200.0, timeout_seconds=60.0)
    first, *others = values(outcomes)
    assert all(other == first for other in others)
    if ranks == 2:
        trainers.assert_refused(first, ["rank 1 begins at position 9 but rank 0, before it, ended at position 3",
                                     "came without position_ids", "apply_rope_fusion is True", "without a GPTModel"])
