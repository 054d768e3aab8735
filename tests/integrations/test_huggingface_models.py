"""Transformers' models with softcaps, sinks, experts and latent attention give what they give without distca.

They are compared on one document at a time, because gpt-oss's own masks do not tell packed documents apart. Their norms
and routers round to float32 also where all else is float64; different attention seldom changes that, and by 1e-7.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
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
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from distca.integrations.huggingface import enable
from distca.integrations.packed import latest_plan

SIZE: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 1024, "pad_token_id": 0, "bos_token_id": None,
    "eos_token_id": None, "attn_implementation": "sdpa"}
MIXED: dict[str, Any] = {"sliding_window": 20, "layer_types": ["sliding_attention", "full_attention"]}
ROUTED: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT: dict[str, Any] = {                                       # heads of 24 for queries and keys, of 16 for values
    "num_key_value_heads": 4, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
    "v_head_dim": 16, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1,
    "topk_group": 1}
MODELS: dict[str, dict[str, Any]] = {
    "gemma2": {**MIXED, "attn_implementation": "eager", "attn_logit_softcapping": 0.5, "query_pre_attn_scalar": 1},
    "gpt_oss": {**MIXED, "attn_implementation": "eager", "num_local_experts": 4, "num_experts_per_tok": 2,
                "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}},
    "qwen3_moe": {**ROUTED, "num_experts": 4},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v2": {**ROUTED, **LATENT, "q_lora_rank": None, "topk_method": "greedy"},
    "deepseek_v3": {**ROUTED, **LATENT},
    "longcat_flash": {**LATENT, "num_layers": 1, "ffn_hidden_size": 48, "expert_ffn_hidden_size": 16, "moe_topk": 2,
                      "zero_expert_num": 1},                     # two attentions a layer
}
SHARED: dict[str, Any] = {**ROUTED, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1,
                          "n_group": 1, "topk_group": 1}
OTHERS: dict[str, dict[str, Any]] = {
    "olmoe": {**ROUTED, "num_experts": 4}, "glm4_moe": SHARED, "dots1": SHARED, "glm4_moe_lite": {**ROUTED, **LATENT},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16, "moe_num_shared_experts": 1,
                     "moe_layer_start_index": 1},
    "qwen2_moe": {**ROUTED, "num_experts": 4, "shared_expert_intermediate_size": 16}, "solar_open": SHARED,
    "qwen3_next": {**ROUTED, "num_experts": 4, "shared_expert_intermediate_size": 16,
                   "layer_types": ["full_attention"] * 2},
    "granitemoe": MODELS["mixtral"], "minimax_m2": MODELS["mixtral"], "flex_olmo": {**ROUTED, "num_experts": 4},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2}, "afmoe": {**ROUTED, "num_experts": 4}, "youtu": LATENT,
    "exaone_moe": {**ROUTED, "num_experts": 4}, "hy_v3": {**ROUTED, "num_experts": 4}, "minicpm3": LATENT,
    "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "nemotron_h": {**SHARED, "layer_types": ["attention", "moe"]},
    "gemma3n_text": {**MIXED, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 8, "laurel_rank": 4,
                     "vocab_size_per_layer_input": 97, "activation_sparsity_pattern": [0.0] * 2,
                     "intermediate_size": [48] * 2, "altup_num_inputs": 2},
}
BALANCED = ("gpt_oss", "qwen3_moe", "mixtral")                   # have a loss that balances the load of experts
LENGTHS = [3, 130, 1, 40]


def small(kind: str, experts: str = "eager") -> Any:
    """Weights large enough for softcap, sinks and routers to matter. grouped_mm and eager softcaps know no float64."""
    config = hf.AutoConfig.for_model(kind, **{**SIZE, **(MODELS | OTHERS)[kind], "experts_implementation": experts})
    model = hf.AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * (0.2 if parameter.ndim > 1 else 1.0))
    return model if kind == "gemma2" or experts == "grouped_mm" else model.double()


def documents_of(lengths: Sequence[int]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(1, 97, (length,), generator=generator).tolist() for length in lengths]


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    bound = 1e-6 if actual.dtype is torch.float64 else 1e-5
    torch.testing.assert_close(actual, expected, rtol=bound, atol=bound, check_dtype=False)


def plain_losses(one: Any, documents: list[list[int]], edges: list[int]) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The loss of each rank, whose tokens lie between two edges, and all logits; from one document at a time."""
    tokens = [torch.tensor([document]) for document in documents]
    routed = {"output_router_logits": True} if one.config.model_type in BALANCED else {}
    outputs = [one(ids, use_cache=False, **routed) for ids in tokens]
    logits = torch.cat([output.logits[0] for output in outputs])
    labels = torch.cat([torch.cat([ids[0, 1:], torch.tensor([-100])]) for ids in tokens])
    losses = []
    for begin, end in pairwise(edges):
        losses.append(cross_entropy(logits[begin:end], labels[begin:end], reduction="sum") / (labels >= 0).sum())
        if routed:                                               # of the rank's own tokens alone
            layers = zip(*(output.router_logits for output in outputs), strict=True)
            own: Any = tuple(torch.cat(layer)[begin:end] for layer in layers)
            losses[-1] += one.config.router_aux_loss_coef * load_balancing_loss_func(own, 4, 2)
    return losses, logits


def check_step(kind: str, lengths: list[int], rank: int = 0, ranks: int = 1, *, experts: str = "eager",
               checkpointing: bool = False) -> None:
    """Logits and loss of this rank's tokens and gradients of a step of all ranks', as the plain model gives them."""
    one, model = small(kind).train(), small(kind, experts).train()
    if experts == "grouped_mm":
        one.float()
    enable(model, tolerance=0.02)
    assert model.config._experts_implementation == experts
    if checkpointing:
        model.gradient_checkpointing_enable()
    documents = documents_of(lengths)
    every = [rows(documents, other, ranks) for other in range(ranks)]
    row, edges = every[rank], [0, *accumulate(len(other.input_ids) for other in every)]
    losses, expected = plain_losses(one, documents, edges)
    torch.stack(losses).sum().backward()
    got = model(**row.batch(), num_items_in_batch=row.num_items, use_cache=False,
                **({"output_router_logits": True} if kind in BALANCED else {}))
    close(got.logits[0], expected[edges[rank]:edges[rank + 1]])
    close(got.loss, losses[rank])
    loss = cross_entropy(got.logits[0], row.shift_labels, reduction="sum") / row.num_items  # theirs is in float32
    (loss + model.config.router_aux_loss_coef * got.aux_loss if kind in BALANCED else loss).backward()
    for (name, mine), theirs in zip(model.named_parameters(), one.parameters(), strict=True):
        if theirs.grad is None:                                  # experts that no token chose
            continue
        gradient = torch.zeros_like(mine) if mine.grad is None else mine.grad
        if ranks > 1:
            dist.all_reduce(gradient)
        close(gradient, theirs.grad)
        assert gradient.any() or "sinks" not in name
    plan = latest_plan(model)
    assert plan.layout.lengths.tolist() == lengths
    assert ranks == 1 or (plan.tasks.home != plan.tasks.server).any()


@pytest.mark.parametrize("kind", [*MODELS, "gpt2", "gemma3n_text"])
def test_packed_documents_match_the_plain_model(kind: str) -> None:
    check_step(kind, [60, 1, 25], checkpointing=True)


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(OTHERS.keys() - {"gpt2", "gemma3n_text"}))
def test_other_experts_and_latents_match_the_plain_model(kind: str) -> None:
    if kind not in hf.CONFIG_MAPPING:
        pytest.skip(f"transformers {hf.__version__} has no {kind}")
    check_step(kind, [60, 1, 25])


@pytest.mark.parametrize("experts", ["batched_mm", "grouped_mm"])
@pytest.mark.parametrize("kind", ["gpt_oss", "qwen3_moe", "deepseek_v3"])
def test_experts_run_as_the_model_says(kind: str, experts: str) -> None:
    check_step(kind, [60, 1, 25], experts=experts)


def two_ranks(transport: Transport) -> str:
    for kind in MODELS:
        check_step(kind, LENGTHS, transport.rank, 2)
    model = small("qwen3_moe").train()
    enable(model)
    with pytest.raises(ValueError) as refusal:
        model(**rows([[5]], transport.rank, 2).batch(), use_cache=False, output_router_logits=True)
    return str(refusal.value)


@pytest.mark.multiprocess
def test_documents_over_two_ranks_match_the_plain_model() -> None:
    """A rank without tokens would have a load balancing loss of 0 / 0: every rank refuses that."""
    outcomes = run_processes(2, two_ranks, timeout_seconds=60, deadline_seconds=120)
    assert [outcome.error for outcome in outcomes] == [None] * 2
    assert outcomes[0].value == outcomes[1].value
    assert "rank 0: output_router_logits is True and this rank has padding alone" in str(outcomes[0].value)


@pytest.mark.parametrize("kind", ["gemma2", "gpt_oss", "deepseek_v3"])
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
