"""Transformers with documents over ranks gives what one process with all tokens gives, whatever model or mode."""

from __future__ import annotations

import copy
import logging
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from distca.data import rows
from distca.runtime.transport import Transport
from tests.support.processes import run_processes

pytest.importorskip("transformers")

import transformers as hf

from distca.integrations import huggingface
from distca.integrations.huggingface import enable
from distca.integrations.packed import attached, latest_plan

SIZE: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 1024, "pad_token_id": 0}
MIXED: dict[str, Any] = {"sliding_window": 20, "layer_types": ["sliding_attention", "full_attention"]}
LINEAR: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 2,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "num_experts": 0, "mlp_only_layers": [0, 1]}
CASES = {
    2: [[400], [60, 60], [59, 61], [61, 59], [3, 1, 300, 1, 40]],
    4: [[400], [9, 300, 11], [5, 1, 290, 7, 97]],
}


def small(kind: str, **options: Any) -> Any:
    torch.manual_seed(0)
    if kind == "llama":
        return hf.LlamaForCausalLM(hf.LlamaConfig(**SIZE, **options))
    if kind == "gemma3":
        return hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**SIZE, **MIXED, **options))
    return hf.Qwen3NextForCausalLM(hf.Qwen3NextConfig(**SIZE, **LINEAR, **options))


def documents_of(lengths: list[int], seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, 97, (length,), generator=generator).tolist() for length in lengths]


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def check_step(rank: int, ranks: int, kind: str, lengths: list[int], placement: str, checkpointing: bool) -> None:
    """Logits, loss and gradients of a training step, then the same documents in evaluation."""
    one, model = small(kind, attn_implementation="sdpa").train(), small(kind).train()
    enable(model, tolerance=0.02, evaluation="pool")
    if checkpointing:
        model.gradient_checkpointing_enable()
    documents = documents_of(lengths)
    row, whole = rows(documents, rank, ranks, placement=placement), rows(documents, 0, 1)
    got = model(**row.batch(), num_items_in_batch=row.num_items, use_cache=False)
    got.loss.backward()
    expected = one(**whole.batch(), num_items_in_batch=row.num_items, use_cache=False)
    expected.loss.backward()
    begins = torch.tensor([0, *lengths]).cumsum(0)
    document = row.document_ids
    if document is None:
        before = sum(len(rows(documents, other, ranks).input_ids) for other in range(rank))
        here = torch.arange(before, before + len(row.input_ids))
    else:
        here = begins[document] + row.position_ids
    close(got.logits[0, :len(here)], expected.logits[0, here])   # without a rank's padding
    named = [(got.loss.detach(), expected.loss.detach())]
    named += [(p.grad, q.grad) for p, q in zip(model.parameters(), one.parameters(), strict=True)]
    for mine, theirs in named:
        dist.all_reduce(mine)
        close(mine, theirs)
    layout = latest_plan(model).layout
    assert sorted(layout.lengths.tolist()) == sorted(lengths) and layout.num_ranks == ranks
    with torch.no_grad():
        seen = model.eval()(**row.batch()).logits[0, :len(here)]
        close(seen, one.eval()(**whole.batch(), use_cache=False).logits[0, here])
        for _ in range(rank):                                    # generation stays at home, unequally often
            model.generate(torch.tensor([[1, 2, 3 + rank]]), max_new_tokens=2, do_sample=False)


def check_refusals(rank: int) -> list[str]:
    """What each rank is told where documents continue nothing, or a model cannot let them span."""
    told = []
    for kind, position in (("llama", [[0, 1], [3, 4]]), ("qwen3_next", [[0, 1], [2, 3]])):
        model = small(kind).train()
        enable(model)
        whole = torch.arange(2)[None]
        assert model(torch.ones(1, 2, dtype=torch.int64), position_ids=whole, use_cache=False).logits.shape[1] == 2
        try:
            model(torch.ones(1, 2, dtype=torch.int64), position_ids=torch.tensor([position[rank]]), use_cache=False)
        except ValueError as error:
            told.append(str(error))
    return told


def check_sharded(rank: int, ranks: int) -> None:
    """FSDP2 over layers and model: two steps of the optimizer as on one process."""
    one, model = small("llama", attn_implementation="sdpa").train(), small("llama").train()
    enable(model)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizers = [torch.optim.SGD(x.parameters(), lr=0.5) for x in (model, one)]
    for seed in range(2):
        documents = documents_of([200, 30], seed)
        row, whole = rows(documents, rank, ranks), rows(documents, 0, 1)
        mine = model(**row.batch(), num_items_in_batch=row.num_items, use_cache=False).loss
        (ranks * mine).backward()                                # FSDP2 averages over ranks
        one(**whole.batch(), num_items_in_batch=row.num_items, use_cache=False).loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for p, q in zip(model.parameters(), one.parameters(), strict=True):
        close(p.detach().full_tensor(), q.detach())


def two_ranks(transport: Transport) -> list[str]:
    for lengths in CASES[2]:
        check_step(transport.rank, 2, "llama", lengths, "given", checkpointing=False)
    check_step(transport.rank, 2, "gemma3", CASES[2][-1], "given", checkpointing=True)
    check_step(transport.rank, 2, "llama", CASES[2][-1], "balanced", checkpointing=False)
    check_sharded(transport.rank, 2)
    return check_refusals(transport.rank)


def four_ranks(transport: Transport, kinds: tuple[str, ...]) -> bool:
    for kind in kinds:
        for lengths in CASES[4]:
            for placement in ("given", "balanced"):
                check_step(transport.rank, 4, kind, lengths, placement, checkpointing=kind == "gemma3")
    check_step(transport.rank, 4, "llama", [2], "given", checkpointing=False)  # two ranks have nothing but padding
    return True


@pytest.mark.multiprocess
def test_two_ranks_match_one_process() -> None:
    outcomes = run_processes(2, two_ranks, timeout_seconds=60, deadline_seconds=200)
    assert [outcome.error for outcome in outcomes] == [None, None]
    assert outcomes[0].value == outcomes[1].value
    gap, linear = outcomes[0].value
    assert "rank 1 begins at position 3 but rank 0, before it, ended at position 1" in gap
    assert "qwen3_next: its linear_attention layers carry a state" in linear


@pytest.mark.slow
@pytest.mark.multiprocess
def test_four_ranks_match_one_process() -> None:
    outcomes = run_processes(4, four_ranks, ("llama", "gemma3"), timeout_seconds=60, deadline_seconds=280)
    assert [(outcome.error, outcome.value) for outcome in outcomes] == [(None, True)] * 4


def test_models_of_one_config_and_copies_keep_their_own_options() -> None:
    config = hf.LlamaConfig(**SIZE)
    first, second = (hf.LlamaForCausalLM(config).train() for _ in range(2))
    enable(first, tolerance=0.1)
    enable(second, tolerance=0.2)
    copied = copy.deepcopy(first)
    enable(copied, tolerance=0.3)
    again, loaded = copy.deepcopy(copied), pickle.loads(pickle.dumps(copied))
    models = {0.1: first, 0.2: second, 0.3: copied}
    for number, model in enumerate((*models.values(), again, loaded)):
        batch = {"input_ids": torch.ones(1, 4 + number, dtype=torch.int64),
                 "position_ids": torch.arange(4 + number)[None]}
        model(**batch, use_cache=False).logits.sum().backward()
    for number, (tolerance, model) in enumerate([*models.items(), (0.3, again), (0.3, loaded)]):
        plan = latest_plan(model)
        assert (plan.tolerance, plan.layout.lengths.tolist()) == (tolerance, [4 + number])
    named = hf.LlamaForCausalLM(config).train()                  # shares the config, and with it the attention's name
    named(input_ids=torch.ones(1, 30, dtype=torch.int64), use_cache=False)
    assert latest_plan(second).layout.lengths.tolist() == [5] and latest_plan(named).layout.lengths.tolist() == [30]


def test_evaluation_at_home_refuses_what_continues_another_rank() -> None:
    model = small("llama").eval()
    enable(model)
    with pytest.raises(ValueError, match=r"position_ids begin with 7.*enable\(model, evaluation='pool'\)"):
        model(torch.ones(1, 2, dtype=torch.int64), position_ids=torch.tensor([[7, 8]]), use_cache=False)
    with pytest.raises(ValueError, match="evaluation is 'never'; choose one of: home, pool"):
        enable(model, evaluation="never")


def test_layers_that_carry_state_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    huggingface.warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, "distca"):
        for _ in range(2):
            enable(small("qwen3_next"))
    ours = [record.message for record in caplog.records if record.name == "distca"]
    assert [message.count("linear_attention layers carry a state") for message in ours] == [1]


def test_states_that_no_layer_types_name_are_found() -> None:
    config = hf.RecurrentGemmaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, lru_width=32)
    model = hf.RecurrentGemmaForCausalLM(config)
    enable(model)
    assert "its recurrent layers carry a state" in attached(model.model).whole_only
    with pytest.raises(ValueError, match="xlstm: it carries a state along each document and names no attention layers"):
        enable(hf.xLSTMForCausalLM(hf.xLSTMConfig(vocab_size=97, hidden_size=32, num_hidden_layers=1, num_heads=4)))
