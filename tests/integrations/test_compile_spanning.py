"""`torch.compile` around a model whose documents span ranks gives what one process with all tokens gives, eagerly.

As for documents that do not span, the backend runs what was traced without generating code.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters

from distca.data import rows
from distca.runtime.transport import Transport
from tests.integrations import test_huggingface_spanning as eager
from tests.support.processes import run_processes

pytest.importorskip("transformers")
STEPS = [[300], [61, 59, 1], [3, 1, 180, 1, 40], [9, 140]]       # all cut in the middle of a document
EVALUATED = [5, 90, 3]


def compiled_steps(transport: Transport, kind: str, checkpointing: bool, backend: str = "aot_eager") -> list[int]:
    """Loss and gradients of every step, then logits of evaluation; gives the number of graphs after each step."""
    from distca.integrations.huggingface import enable

    one, model = eager.small(kind, attn_implementation="sdpa").train(), eager.small(kind).train()
    attention = enable(model, tolerance=0.02, evaluation="pool")
    if checkpointing:
        model.gradient_checkpointing_enable()
    compiled: Any = torch.compile(model, backend=backend)
    graphs = []
    counters.clear()
    for seed, lengths in enumerate(STEPS):
        row, whole = both(eager.documents_of(lengths, seed), transport)
        results = []
        for forward, taken in ((compiled, row), (one, whole)):
            forward.zero_grad()
            loss = forward(**taken.batch(), num_items_in_batch=row.num_items, use_cache=False).loss
            loss.backward()
            results.append([loss.detach(), *(p.grad for p in forward.parameters())])
        for mine, theirs in zip(*results, strict=True):
            dist.all_reduce(mine)
            eager.close(mine, theirs)
        assert attention.latest is not None and (attention.latest.layout.ranks_per_document() > 1).any()
        graphs.append(counters["stats"]["unique_graphs"])
    row, whole = both(eager.documents_of(EVALUATED), transport)
    with torch.no_grad():
        seen = compiled.eval()(**row.batch(), use_cache=False).logits[0]
        expected = one.eval()(**whole.batch(), use_cache=False).logits[0]
    before = transport.rank * sum(EVALUATED) // transport.size
    eager.close(seen, expected[before:before + len(seen)])
    return graphs


def both(documents: list[list[int]], transport: Transport) -> tuple[Any, Any]:
    """This rank's row of documents in order, and all of them in one row."""
    return rows(documents, transport.rank, transport.size), rows(documents, 0, 1)


@pytest.mark.multiprocess
@pytest.mark.parametrize(("kind", "checkpointing"), [
    ("llama", True), pytest.param("llama", False, marks=pytest.mark.slow),
    pytest.param("gemma3", True, marks=pytest.mark.slow)])
def test_compiled_ranks_match_one_process(kind: str, checkpointing: bool) -> None:
    for outcome in run_processes(2, compiled_steps, kind, checkpointing, timeout_seconds=100, deadline_seconds=250):
        assert outcome.error is None
        assert outcome.value[0] > 0 and outcome.value[2] == outcome.value[-1]  # from the third step on, none are new
