"""Documents that Megatron-Core's dynamic context parallelism deals to groups of ranks equal one document at a time."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

from distca.runtime.transport import Transport
from tests.integrations import test_megatron_core as plain
from tests.support import trainers
from tests.support.attention import gradient, qkv_of
from tests.support.processes import run_processes, values

HAVE_MEGATRON = importlib.util.find_spec("megatron") is not None
VERSION = tuple(map(int, importlib.metadata.version("megatron-core").split(".")[:2])) if HAVE_MEGATRON else (0, 0)
pytestmark = pytest.mark.skipif(not HAVE_MEGATRON, reason="megatron-core is not installed: pip install "
                                                          "'.[megatron-core]'")
MOST = 96                                                         # tokens of a document that a rank takes by itself
ROWS = {2: [[160, 16, 48, 8], [40, 96, 8]], 4: [[384, 16], [48, 8, 192], [96], [72, 40]]}  # by data-parallel rank


class CpuTorch(plain.CpuTorch):
    def tensor(self, values: Any, *, dtype: torch.dtype | None = None, **_: Any) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype)                  # neither on the GPU nor pinned


def own_chunks(tokens: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """Head and tail of [tokens], as context parallelism cuts a document."""
    return tokens.unflatten(0, (2 * ranks, -1))[[rank, 2 * ranks - 1 - rank]].flatten()


def loader(documents: list[torch.Tensor]) -> Iterator[list[dict[str, torch.Tensor]]]:
    """One packed sample, as Megatron's own dataset gives a data-parallel rank."""
    edges = torch.tensor([0, *(len(document) - 1 for document in documents)]).cumsum(0).int()
    yield [{"tokens": torch.cat([document[:-1] for document in documents]),
            "labels": torch.cat([document[1:] for document in documents]), "cu_seqlens": edges}]


def forward_step(sizes: list[int], samples: Any, model: Any) -> tuple[torch.Tensor, Any]:
    from megatron.core import parallel_state
    from megatron.core.packed_seq_params import PackedSeqParams

    sample = next(samples)
    size, length = int(sample["local_cp_size"]), len(sample["tokens"])
    group = parallel_state.get_hybrid_data_context_parallel_groups(group_size=size) if size > 1 else None
    rank = 0 if group is None else group.rank()
    tokens, labels, positions = (own_chunks(x, rank, size) for x in (
        sample["tokens"], sample["labels"], torch.arange(length)))
    sizes.append(size)
    out = model(tokens[None], positions[None], None, packed_seq_params=PackedSeqParams(
        "sbhd", max_seqlen_q=length, max_seqlen_kv=length, local_cp_size=size, cp_group=group))

    def loss(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        total = torch.nn.functional.cross_entropy(logits[0], labels, reduction="sum")
        return total, torch.tensor(len(labels), dtype=torch.int), total.detach()

    return out, loss


def dealt(transport: Transport, settings: dict[str, Any]) -> list[int]:
    """Loss and gradients of Megatron's own loader and schedule; gives the size of the group of each forward."""
    from megatron.core.datasets import data_schedule
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.pipeline_parallel import get_forward_backward_func, hybrid_cp_schedule

    from distca.integrations.megatron_core import enable

    plain.cpu_megatron(hybrid_context_parallel=True)
    hybrid_cp_schedule.torch = rope_utils.torch = CpuTorch()
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]
    documents = trainers.rows_of_tokens(ROWS[transport.size], plain.VOCAB)
    theirs = plain.gpt(get_gpt_layer_local_spec())
    _, expected = plain.expected_of(theirs, documents)
    ours = plain.gpt(enable(get_gpt_layer_local_spec(), tolerance=0.02), hybrid_context_parallel=True,
                     max_seqlen_per_dp_cp_rank=MOST, calculate_per_token_loss=True, **settings)
    ours.load_state_dict(theirs.state_dict())
    sizes: list[int] = []
    samples = data_schedule.HybridCPDataLoaderWrapper(loader(documents[transport.rank]), ours.config)
    losses = get_forward_backward_func()(
        forward_step_func=partial(forward_step, sizes), model=[ours], num_microbatches=1, data_iterator=[samples],
        seq_length=MOST, micro_batch_size=1)
    actual = plain.summed({"loss": torch.stack(losses).sum(), **{
        name: gradient(x) for name, x in ours.named_parameters()}})
    trainers.assert_same(actual, expected, 1e-9)
    return sizes


def dealt_twice(transport: Transport) -> list[list[int]]:
    replay = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return [dealt(transport, settings) for settings in ({}, replay)]


def packed_over_a_group(transport: Transport) -> list[str]:
    """Attention itself on packed documents of a pair of ranks; gives the refusals."""
    import torch.distributed as dist
    from megatron.core.packed_seq_params import PackedSeqParams

    from distca.integrations.megatron_core import gpt_layer_local
    from distca.kernels import dense_attention

    plain.cpu_megatron()
    core = plain.gpt(gpt_layer_local).decoder.layers[0].self_attention.core_attention
    pairs = [dist.new_group(pair) for pair in ([0, 1], [2, 3])]
    group, lengths = pairs[transport.rank // 2], [[200, 8, 4], [64]][transport.rank // 2]
    generator = torch.Generator().manual_seed(3)                  # the same on every rank
    whole = [torch.randn(sum(lengths), heads, 8, dtype=torch.float64, generator=generator, requires_grad=True)
             for heads in (4, 2, 2)]
    expected = dense_attention(*qkv_of(whole), lengths).flatten(1)
    expected.square().sum().backward()
    mine = torch.cat([own_chunks(document, group.rank(), 2) for document in torch.arange(sum(lengths)).split(lengths)])
    edges = torch.tensor([0, *lengths]).cumsum(0).int()
    leaves = [x.detach()[mine].requires_grad_() for x in whole]

    def attend(edges: torch.Tensor, size: int) -> torch.Tensor:
        return core(*leaves, None, packed_seq_params=PackedSeqParams("thd", edges, edges, local_cp_size=size,
                                                                     cp_group=group))

    actual = attend(edges, 2)
    actual.square().sum().backward()
    torch.testing.assert_close(actual, expected[mine], rtol=1e-10, atol=1e-12)
    for x, of in zip(leaves, whole, strict=True):
        torch.testing.assert_close(gradient(x), gradient(of)[mine], rtol=1e-10, atol=1e-12)
    odd = torch.tensor([0, 2, sum(lengths)], dtype=torch.int32)
    lines: list[str] = trainers.refusals([lambda: attend(odd, 2), lambda: attend(edges, 4)])
    return lines


@pytest.mark.skipif(VERSION < (0, 19), reason="before 0.19, Megatron's own schedule calls backward_step wrongly")
@pytest.mark.multiprocess
@pytest.mark.parametrize("ranks", [2, 4])
def test_dealt_documents_equal_one_document_at_a_time(ranks: int) -> None:
    """Megatron's loader and schedule, as they are; documents lie on one rank, on some and on all."""
    outcomes = values(run_processes(ranks, dealt_twice, deadline_seconds=200.0, timeout_seconds=60.0))
    assert all(first == again for first, again in outcomes)
    assert {size for sizes, _ in outcomes for size in sizes} == {1, 2, 4} - ({4} if ranks == 2 else set())


@pytest.mark.multiprocess
def test_packed_documents_of_two_groups_equal_dense_attention() -> None:
    outcomes = values(run_processes(4, packed_over_a_group, deadline_seconds=100.0, timeout_seconds=60.0))
    for told in outcomes:
        trainers.assert_refused(told, ["a document has 2 tokens, which 2 ranks of its cp_group cannot cut into 4",
                                       "local_cp_size is 4 but cp_group has 2 ranks"])
