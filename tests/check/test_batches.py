"""Which document a token is in, what it is compared with, and what a model of a config becomes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.support.refusals import refusal

pytest.importorskip("transformers")

import transformers as hf

from distca.check.batches import alone, changed, packings, renamed, tokens_of
from distca.check.subject import narrow, sharpen, subject_of, windows
from distca.check.visibility import judged


def batch(**given: Any) -> dict[str, Any]:
    made = {name: torch.tensor(value) for name, value in given.items()}
    return {"input_ids": torch.arange(10, 16)[None], **made}


@pytest.mark.parametrize("given", [
    {"position_ids": [[0, 1, 2, 0, 1, 2]]}, {"cu_seq_lens_q": [0, 3, 6]}, {"cu_seqlens": [0, 3, 6]},
    {"attention_mask": [[1, 1, 1, 2, 2, 2]]}, {"attention_mask": [[1, 1, 1, 2, 2, 2]], "position_ids": [[*range(6)]]},
], ids=["positions", "edges", "Megatron's edges", "numbers", "numbers and positions"])
def test_documents_are_read_from_whatever_says_where_they_begin(given: dict[str, Any]) -> None:
    tokens = tokens_of([batch(**given)])
    assert tokens.document.tolist() == [0, 0, 0, 1, 1, 1] and tokens.position.tolist() == [0, 1, 2, 0, 1, 2]


def test_padding_is_of_no_document() -> None:
    tokens = tokens_of([batch(attention_mask=[[0, 0, 1, 1, 1, 1]])])
    assert tokens.document.tolist() == [-1, -1, 0, 0, 0, 0] and tokens.position.tolist() == [0, 0, 0, 1, 2, 3]
    assert tokens.name(1) == "row 0, token 1 (padding)"


def test_a_document_goes_on_on_the_next_rank() -> None:
    ranks = [batch(position_ids=[[0, 1, 0, 1, 2, 3]], labels=[[-100, 11, -100, 13, 14, 15]]),
             batch(position_ids=[[4, 5, 6, 0, 1, 2]], labels=[[10, 11, 12, -100, 14, 15]])]
    tokens = tokens_of(ranks)
    assert tokens.of(1).tolist() == [2, 3, 4, 5, 6, 7, 8]
    assert tokens.name(7) == "rank 1, row 0, token 1 (position 5 of document 1)"
    assert tokens.next_label[5] == -100 and tokens.due_label[5] == 10      # the next rank's first token
    assert tokens.due_label.tolist() == [11, -100, 13, 14, 15, 10, 11, 12, -100, 14, 15, -100]
    one = alone(ranks, tokens, 1)
    assert one["input_ids"].tolist() == [[12, 13, 14, 15, 10, 11, 12]] and one["position_ids"].tolist() == [[*range(7)]]
    assert one["labels"].tolist() == [[-100, 13, 14, 15, 10, 11, 12]]


@pytest.mark.parametrize(("ranks", "message"), [
    ([{"input_ids": torch.zeros(3)}], "no input_ids"),
    ([batch(position_ids=[[0, 1, 2, 0, 1, 2]], cu_seq_lens_q=[0, 4, 6])], "position_ids have 1 at token 4"),
    ([batch(position_ids=[[0, 1, 2, 0, 1, 2]], cu_seq_lens_q=[0, 2, 6])], "position_ids"),
    ([batch(position_ids=[[0, 1, 0, 1, 0, 1]], cu_seq_lens_q=[0, 4, 6])], "position_ids"),
    ([batch(position_ids=[[*range(6)]]), batch(position_ids=[[*range(5, 11)]])], "rank 1 begins at position 5"),
])
def test_batches_that_contradict_themselves_are_named(ranks: list[dict[str, Any]], message: str) -> None:
    assert message in refusal(tokens_of, ranks)


def test_a_change_is_one_token_and_a_renaming_keeps_labels_and_padding() -> None:
    given = [batch(labels=[[-100, 11, 12, 13, 14, 15]], position_ids=[[0, 1, 2, 0, 1, 2]])]
    other = changed(given, tokens_of(given), 4)[0]["input_ids"]
    assert (other != given[0]["input_ids"]).tolist() == [[False] * 4 + [True] + [False]]
    renamed_ids, labels = (renamed(given, [10], 1)[0][name] for name in ("input_ids", "labels"))
    assert renamed_ids[0, 0] == 10 and labels[0, 0] == -100 and torch.equal(renamed_ids[0, 1:], labels[0, 1:])
    assert sorted(renamed_ids[0].tolist()) == list(range(10, 16))
    assert not torch.equal(renamed_ids, given[0]["input_ids"])


def test_who_may_see_a_token() -> None:
    tokens = tokens_of([batch(position_ids=[[0, 1, 2, 0, 1, 2]])])
    every = np.ones(6, dtype=bool)
    assert [(kind, at.tolist()) for kind, at in judged(tokens, 1, every)] == [
        ("other-documents", [3, 4, 5]), ("future", [0])]
    assert list(judged(tokens, 3, np.array([0, 0, 0, 1, 1, 1], dtype=bool))) == []


def test_our_packings_hold_the_same_kind_of_documents() -> None:
    for name, one in packings(97, [0], 0).items():
        tokens = tokens_of([one])
        lengths = np.bincount(tokens.document[tokens.document >= 0]).tolist()
        assert lengths[0] == 41 and (tokens.next_label == tokens.due_label).all(), name
        assert 0 not in tokens.ids[tokens.document >= 0]


@pytest.mark.parametrize(("config", "kinds"), [
    (hf.LlamaConfig(hidden_size=4096, num_attention_heads=32, num_key_value_heads=8), [None, None]),
    (hf.Gemma3TextConfig(num_hidden_layers=12, hidden_size=2560, num_attention_heads=8, head_dim=256), [4096, None]),
    (hf.MistralConfig(sliding_window=4096), [4096, 4096]),
    (hf.DeepseekV3Config(), [None, None]),
], ids=lambda one: getattr(one, "model_type", ""))
def test_large_models_are_narrowed_and_keep_a_layer_of_every_kind(config: Any, kinds: list[int | None]) -> None:
    narrow(config)
    assert windows(config) == kinds
    model = hf.AutoModelForCausalLM.from_config(config)
    assert sum(one.numel() for one in model.parameters()) < 10_000_000


def test_weights_are_only_scaled_up_to_where_attention_tells_keys_apart() -> None:
    layer = torch.nn.Linear(64, 64)
    torch.nn.init.normal_(layer.weight, std=0.02)
    before = layer.weight.detach().clone()
    sharpen(layer)
    ratio = layer.weight / before
    assert float(layer.weight.std()) * 8 == pytest.approx(1) and float(ratio.max()) == pytest.approx(float(ratio.min()))
    once = layer.weight.detach().clone() * 4
    layer.weight.data.copy_(once)
    sharpen(layer)
    assert torch.equal(layer.weight, once)


@pytest.mark.parametrize(("name", "message"), [
    ("nowhere", "give a folder with a config.json"), ("json:nothing", "cannot be imported"),
    ("no_such_module:f", "cannot be imported"), ("os:getcwd", "returned str; return a torch.nn.Module and a dict"),
])
def test_what_is_no_model_is_refused_in_a_line(name: str, message: str) -> None:
    assert message in refusal(subject_of, name, torch.device("cpu"), None)
