"""Models of transformers with softcaps (Gemma 2) and sinks (gpt-oss): what each gives on one document at a time.

One document at a time because gpt-oss's own masks do not tell packed documents apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

from distca.data import rows
from distca.runtime.transport import Transport
from tests.support.attention import greedy
from tests.support.processes import run_processes

pytest.importorskip("transformers")

import transformers as hf

from distca.integrations.huggingface import enable
from distca.integrations.packed import latest_plan

SIZE: dict[str, Any] = {
    "attn_implementation": "eager",
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 1024, "pad_token_id": 0, "sliding_window": 20,
    "layer_types": ["sliding_attention", "full_attention"], "bos_token_id": None, "eos_token_id": None}
KINDS = ("gemma2", "gpt_oss")


def small(kind: str) -> Any:
    """Weights large enough for softcap and sinks to matter."""
    if kind == "gemma2":
        model: Any = hf.Gemma2ForCausalLM(hf.Gemma2Config(
            **SIZE, attn_logit_softcapping=0.5, query_pre_attn_scalar=1))
    else:
        plain_rotary = {"rope_type": "default", "rope_theta": 10_000.0}
        model = hf.GptOssForCausalLM(hf.GptOssConfig(
            **SIZE, num_local_experts=2, num_experts_per_tok=1, rope_parameters=plain_rotary))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * (0.2 if parameter.ndim > 1 else 1.0))
    return model


def documents_of(lengths: Sequence[int]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(1, 97, (length,), generator=generator).tolist() for length in lengths]


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def check_step(kind: str, lengths: list[int], rank: int = 0, ranks: int = 1, checkpointing: bool = False) -> None:
    """Logits of this rank's tokens and gradients of a step of all ranks', as the plain model gives them."""
    one, model = small(kind).train(), small(kind).train()
    enable(model, tolerance=0.02)
    if checkpointing:
        model.gradient_checkpointing_enable()
    documents = documents_of(lengths)
    row = rows(documents, rank, ranks)
    got = model(**row.batch(), num_items_in_batch=row.num_items, use_cache=False)
    got.loss.backward()
    tokens = [torch.tensor([document]) for document in documents]
    expected = [one(ids, use_cache=False).logits[0] for ids in tokens]
    losses = [cross_entropy(logits[:-1], ids[0, 1:], reduction="sum")
              for logits, ids in zip(expected, tokens, strict=True)]
    (torch.stack(losses).sum() / sum(length - 1 for length in lengths)).backward()
    before = sum(len(rows(documents, other, ranks).input_ids) for other in range(rank))
    here = len(row.input_ids)
    close(got.logits[0, :here], torch.cat(expected)[before:before + here])
    for (name, mine), theirs in zip(model.named_parameters(), one.parameters(), strict=True):
        if theirs.grad is None:                                  # experts that no token chose
            continue
        gradient = torch.zeros_like(mine) if mine.grad is None else mine.grad
        if ranks > 1:
            dist.all_reduce(gradient)
        close(gradient, theirs.grad)
        assert gradient.any() or "sinks" not in name
    assert latest_plan(model).layout.lengths.tolist() == lengths


@pytest.mark.parametrize("kind", KINDS)
def test_packed_documents_match_the_plain_model(kind: str) -> None:
    check_step(kind, [60, 1, 25], checkpointing=True)


def two_ranks(transport: Transport) -> bool:
    for kind in KINDS:
        check_step(kind, [3, 130, 1, 40], transport.rank, 2)
    return True


@pytest.mark.multiprocess
def test_documents_over_two_ranks_match_the_plain_model() -> None:
    outcomes = run_processes(2, two_ranks, timeout_seconds=60, deadline_seconds=120)
    assert [(outcome.error, outcome.value) for outcome in outcomes] == [(None, True)] * 2


@pytest.mark.parametrize("kind", KINDS)
def test_generation_beyond_the_window_matches_the_plain_model(kind: str) -> None:
    """Decoding meets a cache, where softcap and sinks are the model's own formula; one row is padded."""
    one, model = small(kind).eval(), small(kind).eval()
    enable(model)
    prompt, mask = torch.tensor([documents_of([7])[0], documents_of([7, 7])[1]]), torch.ones(2, 7, dtype=torch.int64)
    mask[0, :3] = 0
    for cache in ("dynamic", "static"):
        logits = [torch.stack(each.generate(prompt, attention_mask=mask, max_new_tokens=25, do_sample=False,
                                            cache_implementation=cache, output_logits=True,
                                            return_dict_in_generate=True).logits) for each in (one, model)]
        greedy(logits[0])                                        # both go on with the same tokens
        close(logits[1], logits[0])
