"""torchtitan's own Llama 3 with documents over data-parallel ranks equals itself on one document at a time."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from distca.data import rows
from distca.runtime.transport import Transport
from tests.integrations import test_torchtitan as plain
from tests.support import trainers
from tests.support.processes import run_processes, values

pytestmark = pytest.mark.skipif(
    not all(importlib.util.find_spec(name) is not None for name in ("torchtitan", "triton")),
    reason="torchtitan or triton is not installed: pip install '.[torchtitan]'")
VOCAB = 2048
CASES = {2: [[300], [80, 40], [3, 1, 201, 1, 6]], 4: [[5, 1, 220, 7, 43], [256]]}


def spanning_step(rank: int, ranks: int, lengths: list[int], batch: int) -> None:
    """Logits, loss and gradients of this rank's slices, in `batch` rows of equal tokens, with torchtitan's metadata."""
    import torch.distributed as dist

    from distca.integrations.packed import latest_plan

    documents = [document for row in trainers.rows_of_tokens([lengths], VOCAB) for document in row]
    model = plain.replicated(ranks, tolerance=0.02)
    inputs = [document[:-1] for document in documents]
    row = rows(inputs, rank, ranks)
    labels = rows([document[1:] for document in documents], rank, ranks).input_ids
    position = row.position_ids.view(batch, -1)
    logits = model(row.input_ids.view(batch, -1), position, model.get_attention_masks(position)).flatten(0, 1)
    loss = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
    loss.backward()
    actual = {"loss": loss.detach(), **{name: x.grad for name, x in model.named_parameters()}}
    for x in actual.values():
        dist.all_reduce(x)
    alone = plain.plain_model("llama3")
    whole = torch.cat([alone(one[None], torch.arange(len(one))[None])[0] for one in inputs])
    total = trainers.total_loss(whole, documents)
    total.backward()
    before = sum(len(rows(inputs, other, ranks).input_ids) for other in range(rank))
    torch.testing.assert_close(logits, whole[before:before + len(logits)], rtol=1e-5, atol=1e-5)
    wanted = {"loss": total.detach(), **{name: x.grad for name, x in alone.named_parameters()}}
    trainers.assert_same({name: actual[name] for name in wanted}, wanted)
    assert latest_plan(model).layout.lengths.tolist() == lengths


def every_case(transport: Transport) -> list[str]:
    for lengths in CASES[transport.size]:
        spanning_step(transport.rank, transport.size, lengths, 1)
    spanning_step(transport.rank, transport.size, [100 * transport.size], 2)
    model, position = plain.replicated(transport.size), torch.arange(4)[None] + 9 * transport.rank
    told: list[str] = trainers.refusals([
        lambda: model(torch.zeros(1, 4, dtype=torch.int64), position, model.get_attention_masks(position))])
    return told


@pytest.mark.multiprocess
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_equal_one_document_at_a_time(ranks: int) -> None:
    first, *others = values(run_processes(ranks, every_case, deadline_seconds=200.0, timeout_seconds=60.0))
    assert all(other == first for other in others)
    trainers.assert_refused(first, ["rank 1 begins at position 9 but rank 0, before it, ended at position 3"])
