"""A batch may say more than once where documents begin: either all of it says the same, or it is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from distca.integrations.document_lengths import PackedEdges, RowSlices, from_arguments, from_edges
from distca.integrations.packed import PackedAttention
from distca.integrations.row_exchange import join_slices
from tests.support.refusals import refusal

TOKENS = 12


def random_lengths(rng: np.random.Generator) -> list[int]:
    cuts = np.sort(rng.choice(np.arange(1, TOKENS), int(rng.integers(0, 5)), replace=False))
    return np.diff([0, *cuts, TOKENS]).tolist()


def every_way(lengths: list[int]) -> dict[str, Any]:
    """One row's documents in all the ways to say them."""
    number = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))[None]
    edges = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    return {"position_ids": torch.cat([torch.arange(length) for length in lengths])[None], "cu_seq_lens_q": edges,
            "cu_seq_lens_k": edges.long(), "max_length_q": max(lengths), "max_length_k": torch.tensor(max(lengths)),
            "document_ids": number + 5, "seq_idx": number.int()}


def read(named: dict[str, Any]) -> list[int]:
    """Lengths of the documents, as attention on one rank takes them."""
    slices, kept = from_arguments(named, None, (1, TOKENS))
    assert kept is None
    return join_slices([slices]).lengths.tolist()


def test_any_set_of_arguments_agrees_or_is_refused() -> None:
    refused = 0
    for seed in range(800):
        rng = np.random.default_rng(seed)
        lengths, others = random_lengths(rng), random_lengths(rng)
        ways = every_way(lengths)
        named = {name: value for name, value in ways.items() if rng.integers(2)}
        if "position_ids" not in named and ("cu_seq_lens_q" not in named or "document_ids" in named):
            named["position_ids"] = ways["position_ids"]
        if "cu_seq_lens_k" in named:
            named["cu_seq_lens_q"] = ways["cu_seq_lens_q"]
        assert read(named) == lengths
        spoken = [name for name in named if not name.startswith("max")]
        if others == lengths or len(spoken) < 2:
            continue
        name = spoken[rng.integers(len(spoken))]
        named[name] = every_way(others)[name]
        edges = named.get("cu_seq_lens_q")
        others_say = {"cu_seq_lens_k", "seq_idx", "document_ids"} & named.keys()
        if edges is None or (others_say and name != "position_ids") or "document_ids" in named or not counts_on(
                named.get("position_ids"), edges.tolist()):
            assert refusal(read, named), (seed, name, lengths, others)
            refused += 1
        else:
            assert read({**named, "max_length_q": None, "max_length_k": None}) == edges.diff().tolist()
    assert refused > 300                                         # not vacuous


def counts_on(position_ids: torch.Tensor | None, edges: list[int]) -> bool:
    """Whether positions begin no document inside of one, but for zeros to its end, which may be padding."""
    pieces = [] if position_ids is None else np.split(position_ids[0].numpy(), edges[1:-1])
    return all(not np.trim_zeros(piece[1:], "b").size or np.trim_zeros(piece[1:], "b").all() for piece in pieces)


@pytest.mark.parametrize(("changes", "words"), [
    ({"cu_seq_lens_q": None}, "cu_seq_lens_k came without cu_seq_lens_q"),
    ({"cu_seq_lens_k": torch.tensor([0, 4, 12])}, "lengths of keys differ"),
    ({"max_length_q": 4}, "max_length_q is 4 but a document has 5 tokens"),
    ({"position_ids": torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2, 3, 4, 0, 1]])},
     "cu_seq_lens_q does not begin a document at token 5 but position_ids and document_ids begin one with position 0"),
    ({"document_ids": None, "position_ids": torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2, 3, 4, 0, 1]])},
     "cu_seq_lens_q does not begin a document at token 5 but position_ids begin one with position 0"),
    ({"document_ids": None, "position_ids": torch.tensor([[0, 1, 2, 5, 6, 7, 8, 9, 0, 1, 2, 3]])},
     "cu_seq_lens_q begins a document at token 3 but position_ids go on with position 5"),
    ({"document_ids": None, "position_ids": torch.arange(7, 19)[None]},
     "cu_seq_lens_q begins a document at token 3 but position_ids go on with position 10"),
    ({"document_ids": torch.zeros(1, 11, dtype=torch.int64)}, r"document_ids has shape \(1, 11\)"),
    ({"position_ids": None}, "document_ids came with cu_seq_lens_q but without position_ids"),
    ({"seq_idx": torch.tensor([[0] * 4 + [1] * 4 + [2] * 4])}, "seq_idx goes from 0 to 0 at token 3"),
    ({"cu_seqlens": torch.tensor([0, 12])}, "attention got cu_seqlens, which distca does not read"),
    ({"packed_seq_params": object()}, "attention got packed_seq_params"),
])
def test_contradictions_are_named(changes: dict[str, Any], words: str) -> None:
    named = {name: value for name, value in (every_way([3, 5, 4]) | changes).items() if value is not None}
    with pytest.raises(ValueError, match=words):
        read(named)


def test_what_cumulative_lengths_leave_to_positions() -> None:
    edges = torch.tensor([0, 3, 5, 6])
    counted, padded = torch.arange(6)[None], torch.tensor([[0, 1, 2, 0, 1, 0]])
    whole = RowSlices((0, 0, 0), (3, 2, 1))
    assert from_edges(edges, (1, 6), counted) == from_edges(edges, (1, 6), padded) == from_edges(edges, (1, 6)) == whole
    assert from_edges(torch.tensor([0, 6]), (1, 6), torch.tensor([0, 1, 2, 0, 0, 0])).length == (6,)  # padded
    assert from_edges(torch.tensor([0, 3, 6]), (1, 6), torch.tensor([7, 8, 9, 0, 1, 2])) == RowSlices((7, 0), (3, 3))
    rows = torch.tensor([[4, 5, 6], [7, 8, 0]])                  # the second continues the first
    assert from_edges(torch.tensor([0, 5, 6]), (2, 3), rows) == RowSlices((4, 7, 0), (3, 2, 1))


def test_layers_refuse_positions_that_contradict_their_edges() -> None:
    q, k, v = (torch.randn(6, heads, 8) for heads in (2, 1, 1))
    for positions, words in ((torch.tensor([0, 1, 2, 0, 1, 2]), "does not begin a document at token 3"),
                             (torch.tensor([3, 4, 5, 0, 1, 2]), "does not begin a document at token 3"),
                             (torch.arange(5), "positions have shape")):
        with pytest.raises(ValueError, match=words):
            given = PackedEdges(torch.tensor([0, 6]), positions=positions)
            PackedAttention().begin_edges(given, (q, k, v), training=True)


def small(attention: str = "sdpa") -> Any:
    hf = pytest.importorskip("transformers")
    import distca.integrations.huggingface  # noqa: F401  (registers the attention)

    torch.manual_seed(0)
    return hf.LlamaForCausalLM(hf.LlamaConfig(
        vocab_size=97, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.5, attn_implementation=attention)).double()


@torch.no_grad()
def test_transformers_use_document_ids_beside_cumulative_lengths() -> None:
    """Two parts of a document, the later one first."""
    alone, model = small(), small("distca")
    tokens = torch.tensor([[3, 4, 5, 1, 2, 9]])
    batch = {"input_ids": tokens, "position_ids": torch.tensor([[2, 3, 4, 0, 1, 0]]),
             "document_ids": torch.tensor([[7, 7, 7, 7, 7, 8]]), "cu_seq_lens_q": torch.tensor([0, 3, 5, 6])}
    expected = alone(torch.tensor([[1, 2, 3, 4, 5]])).logits[0][[2, 3, 4, 0, 1]]
    torch.testing.assert_close(model(**batch, use_cache=False).logits[0, :5], expected, rtol=1e-8, atol=1e-8)


@torch.no_grad()
def test_transformers_refuse_documents_beside_a_mask_or_a_cache() -> None:
    model = small("distca").eval()
    mask = torch.ones(6, 6, dtype=torch.bool).tril()[None, None]
    tokens = torch.arange(1, 7)[None]
    for name, value in every_way([2, 10]).items():
        if name != "position_ids":
            with pytest.raises(ValueError, match=f"{name} came with a cache or with a mask of your own"):
                model(tokens, attention_mask=mask, use_cache=False, **{name: value})
    held = model(tokens).past_key_values
    with pytest.raises(ValueError, match="cu_seq_lens_q came with a cache"):
        model(tokens[:, :1], past_key_values=held, cu_seq_lens_q=torch.tensor([0, 1]))


@pytest.mark.parametrize(("mask", "changes", "words"), [
    (None, {"cu_seqlens_q_padded": torch.tensor([0, 4, 6, 8])}, "has 2 documents, which do not fit the 3 of"),
    (None, {"cu_seqlens_q_padded": torch.tensor([0, 2, 8])}, "do not fit the 2 of cu_seqlens_q_padded"),
    (None, {"max_seqlen_q": 4}, "max_seqlen_q is 4 but a document has 5 tokens"),
    (None, {"cu_seqlens_kv": torch.tensor([0, 4, 8])}, "lengths of keys differ"),
    (torch.ones(1, 1, 8, 8, dtype=torch.bool), {}, "attention_mask came with packed_seq_params"),
])
def test_megatron_refuses_what_contradicts_its_lengths(
    mask: torch.Tensor | None, changes: dict[str, Any], words: str
) -> None:
    pytest.importorskip("megatron")
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.enums import AttnMaskType

    from distca.integrations.megatron_core import BalancedCoreAttention

    alone: Any = SimpleNamespace(tp=SimpleNamespace(size=lambda: 1, rank=lambda: 0))
    config = TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=2, attention_dropout=0.0)
    core = BalancedCoreAttention(config, 1, AttnMaskType.causal, "self", pg_collection=alone)
    core.pool = PackedAttention()
    edges: dict[str, Any] = {"qkv_format": "thd", "cu_seqlens_q": torch.tensor([0, 3, 8]), "max_seqlen_q": 5}
    q, k, v = torch.randn(3, 8, 2, 8)
    assert core(q, k, v, None, packed_seq_params=PackedSeqParams(**edges)).shape == (8, 16)
    with pytest.raises(ValueError, match=words):
        core(q, k, v, mask, packed_seq_params=PackedSeqParams(**(edges | changes)))
