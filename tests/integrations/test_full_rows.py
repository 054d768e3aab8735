"""`enable` warns once where every row of several training batches is one document, as packed rows without positions."""

from __future__ import annotations

import logging

import pytest
import torch

from distca.data import rows
from distca.runtime.transport import Transport
from tests.support.processes import run_processes, values

pytest.importorskip("transformers")

from distca.integrations import huggingface
from distca.integrations.huggingface import FULL_BATCHES, enable
from tests.support.planted import flat, small


def warned(batches: list[dict[str, torch.Tensor]], caplog: pytest.LogCaptureFixture) -> list[str]:
    huggingface.warn_once.cache_clear()
    caplog.clear()
    model = small("llama").train()
    enable(model)
    with caplog.at_level(logging.WARNING, "distca"):
        for batch in batches:
            model(**{"use_cache": False, **batch})
    return [record.message for record in caplog.records if record.name == "distca"]


def plain(*shape: int) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.ones(shape, dtype=torch.int64)}


def test_packed_rows_without_positions_are_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    (message,) = warned([plain(2, 12)] * (3 * FULL_BATCHES), caplog)
    assert "every row of 4 training batches is one document of 12 tokens" in message and "position_ids" in message


@pytest.mark.parametrize("batches", [
    [plain(2, 12)] * (FULL_BATCHES - 1),
    [plain(1, 5 + at) for at in range(2 * FULL_BATCHES)],
    [flat((4, 8))] * (2 * FULL_BATCHES),
    [{**plain(2, 6), "attention_mask": torch.tensor([[1] * 6, [1] * 4 + [0] * 2])}] * (2 * FULL_BATCHES),
    [plain(2, 12), flat((4, 8)), plain(2, 12)] * FULL_BATCHES,
], ids=["few", "lengths of their own", "packed with positions", "padded", "mixed"])
def test_other_rows_are_not(batches: list[dict[str, torch.Tensor]], caplog: pytest.LogCaptureFixture) -> None:
    assert warned(batches, caplog) == []


def over_ranks(transport: Transport) -> int:
    model = small("llama").train()
    served = enable(model)
    for _ in range(FULL_BATCHES + 1):
        model(**rows([[1] * 24], transport.rank, 2).batch(), use_cache=False)
    assert served.latest is not None and served.latest.layout.lengths.tolist() == [24]
    return max(part._distca_planned.batches for part in model.modules() if hasattr(part, "_distca_planned"))


@pytest.mark.multiprocess
def test_a_long_document_over_ranks_fills_their_rows_rightly() -> None:
    assert values(run_processes(2, over_ranks)) == [0, 0]
