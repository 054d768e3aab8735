"""What one rank alone got wrong is told to all of them, in the same line, before any attention; then they go on."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

import distca
from distca.data import Collator
from distca.integrations.row_exchange import FIRST_CAPACITY
from distca.kernels import dense_attention
from distca.runtime.transport import Transport
from tests.support.processes import run_processes

pytest.importorskip("transformers")

import transformers as hf

from distca.integrations.huggingface import enable

HEADS = (4, 2, 2)  # of q, k and v, 16 wide


def said(call: Callable[[], Any]) -> str:
    """What a call raises; nothing where it runs."""
    try:
        call()
    except ValueError as error:
        return str(error)
    return ""


def plain(rank: int) -> list[str]:
    """Rank 1's tensors or positions are wrong, one way after another; after each, a right batch runs."""
    attention, told = distca.PackedAttention(), []

    def run(tokens: int = 6, heads: tuple[int, ...] = HEADS, dtype: torch.dtype = torch.float32, keys: int = 6,
            position_ids: torch.Tensor | None = None) -> None:
        q, k, v = (torch.randn(keys if at else tokens, one, 16, dtype=dtype) for at, one in enumerate(heads))
        attention(q, k, v, torch.arange(6) if position_ids is None else position_ids)

    for wrong in ({"position_ids": torch.arange(5)}, {"position_ids": torch.arange(6).float()},
                  {"heads": (4, 2, 1)}, {"heads": (4, 3, 3)}, {"keys": 7}, {"dtype": torch.float64},
                  {"heads": (2, 2, 2)}):
        told.append(said(partial(run, **(wrong if rank else {}))))
        run()
    return told


def with_transformers(rank: int) -> list[str]:
    torch.manual_seed(0)
    model = hf.LlamaForCausalLM(hf.LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2))
    enable(model)
    right: dict[str, Any] = {"input_ids": torch.ones(1, 4, dtype=torch.int64), "position_ids": torch.arange(4)[None],
                             "use_cache": False}
    told = []
    for wrong in ({"attention_mask": torch.tensor([[1, 1, 2, 2]])}, {"attention_mask": torch.zeros(1, 1, 4, 4)},
                  {"attention_mask": torch.tensor([[1, 0, 0, 1]])}, {"cu_seq_lens_q": torch.tensor([0, 5])}):
        told.append(said(partial(model, **right, **(wrong if rank else {}))))
        assert model(**right).logits.isfinite().all()
    told.append(said(lambda: (model.double() if rank else model)(**right)))
    return told


def collated(rank: int) -> list[str]:
    told = []
    for wrong in ({"input_ids": [1, 2], "labels": [1]}, {"input_ids": [1.5]}, {"text": "no tokens"}):
        told.append(said(partial(Collator(), [wrong if rank else {"input_ids": [1, 2, 3]}])))
        row = Collator()([{"input_ids": [7, 8, 9]}])
        assert row["input_ids"].tolist() == [[7, 8, 9]] and row["position_ids"].tolist() == [[0, 1, 2]]
    return told


def many_slices(rank: int) -> bool:
    """A rank with more slices than the table's first rows hold, beside one with a single one, exactly."""
    lengths = [1] * (FIRST_CAPACITY + 5) if rank else [9]
    q, k, v = (torch.randn(sum(lengths), heads, 16, dtype=torch.float64) for heads in HEADS)
    attention = distca.PackedAttention()
    out = attention(q, k, v, torch.cat([torch.arange(length) for length in lengths]))
    assert attention.latest is not None and len(attention.latest.layout.lengths) == FIRST_CAPACITY + 6
    torch.testing.assert_close(out, dense_attention(q, k, v, lengths), rtol=1e-10, atol=1e-12)
    return True


def every_case(transport: Transport) -> tuple[list[str], list[str], list[str], bool]:
    found = plain(transport.rank), with_transformers(transport.rank), collated(transport.rank), many_slices(
        transport.rank)
    dist.barrier()
    return found


KINDS = "rank 0 has 4 query heads and 2 key heads of {dim} in torch.float32 and rank 1 {other}"
EXPECTED = (
    ["rank 1: q has shape (6, 4, 16) and position_ids (5,)", "rank 1: position_ids has shape (6,) and torch.float32",
     "rank 1: q has shape (6, 4, 16), k (6, 2, 16), v (6, 1, 16)", "rank 1: q has 4 heads and k, v have 3",
     "rank 1: q has 6 tokens, k 7 and the documents 6",
     KINDS.format(dim=16, other="4 query heads and 2 key heads of 16 in torch.float64"),
     KINDS.format(dim=16, other="2 query heads and 2 key heads of 16 in torch.float32")],
    ["rank 1: attention_mask has numbers up to 2", "rank 1: attention_mask is a mask of your own",
     "rank 1: attention_mask has padding between the tokens", "rank 1: cu_seq_lens_q is [0, 5] for 4 tokens",
     KINDS.format(dim=8, other="4 query heads and 2 key heads of 8 in torch.float64")],
    ["rank 1: a feature has 2 input_ids, 1 labels", "rank 1: input_ids has shape (1,) and float64",
     "rank 1: a feature has text but no input_ids"],
)


@pytest.mark.multiprocess
def test_what_one_rank_got_wrong_is_told_to_all() -> None:
    first, second = run_processes(2, every_case, timeout_seconds=30, deadline_seconds=90)
    assert first.error is None and second.error is None
    assert first.value == second.value
    *told, many = first.value
    assert many
    for lines, parts in zip(told, EXPECTED, strict=True):
        assert len(lines) == len(parts)
        for line, part in zip(lines, parts, strict=True):
            assert line.startswith(part) and "\n" not in line
