"""The decoder alone, in one process: documents keep apart, weights are drawn alike, checkpointing changes nothing."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from distca.baselines import at_home
from distca.kernels import dense_attention
from distca.models import MODELS
from distca.runtime.attention import CoreAttention
from distca.spec import ModelShape
from distca.train.model.decoder import Decoder, Segment
from distca.train.model.shape import DecoderShape, Llama3Scaling, decoder_shape
from distca.train.settings import Model
from distca.workload.packing import pack
from tests.support.attention import gradient, on_fake_ranks
from tests.support.decoders import hidden_of

SHAPE = DecoderShape(ModelShape("small", 3, 24, 4, 2, 8, 40, 61))


def positions_of(lengths: list[int]) -> torch.Tensor:
    return torch.cat([torch.arange(length) for length in lengths])


def logits_of(decoder: Decoder, tokens: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    hidden = hidden_of(decoder, tokens, positions_of(lengths), lambda q, k, v: dense_attention(q, k, v, lengths))
    return hidden @ decoder.head_weight.T


def random_tokens(num_tokens: int, seed: int = 0, vocab: int = 61) -> torch.Tensor:
    return torch.randint(0, vocab, (num_tokens,), generator=torch.Generator().manual_seed(seed))


def test_segments_have_the_shapes_that_attention_needs() -> None:
    decoder = Decoder(SHAPE)
    assert len(decoder.segments) == 4
    rotary = decoder.rotary(positions_of([5, 2]))
    x, q, k, v = decoder.segments[0](random_tokens(7), rotary)
    assert (x.shape, q.shape, k.shape, v.shape) == ((7, 24), (7, 4, 8), (7, 2, 8), (7, 2, 8))
    again = decoder.segments[1](x, q, rotary)
    assert [one.shape for one in again] == [one.shape for one in (x, q, k, v)]
    assert decoder.segments[-1](x, q).shape == (7, 24)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=2, max_size=5), st.data())
def test_a_token_changes_only_its_own_document_from_there_on(lengths: list[int], data: st.DataObject) -> None:
    decoder = Decoder(SHAPE).double()
    tokens = random_tokens(sum(lengths))
    changed = data.draw(st.integers(0, sum(lengths) - 1))
    other = tokens.clone()
    other[changed] = (other[changed] + 1) % 61
    differs = (logits_of(decoder, tokens, lengths) != logits_of(decoder, other, lengths)).any(dim=1)
    begin = 0
    for length in lengths:
        if begin <= changed < begin + length:
            assert not differs[begin:changed].any() and differs[changed:begin + length].all()
        else:
            assert not differs[begin:begin + length].any()
        begin += length


def test_rotation_depends_on_distance_alone() -> None:
    decoder = Decoder(replace(SHAPE, rope_scaling=Llama3Scaling(8.0, 1.0, 4.0, 64)))
    lengths = [12]
    tokens = random_tokens(12)
    shifted = hidden_of(decoder, tokens, positions_of(lengths) + 1000,
                             lambda q, k, v: dense_attention(q, k, v, lengths)) @ decoder.head_weight.T
    torch.testing.assert_close(shifted, logits_of(decoder, tokens, lengths), rtol=1e-3, atol=1e-5)
    unrotated = hidden_of(decoder, tokens, torch.zeros(12, dtype=torch.int64),
                               lambda q, k, v: dense_attention(q, k, v, lengths)) @ decoder.head_weight.T
    assert (unrotated - shifted).abs().max() > 1e-4


def test_runs_with_a_plan_on_fake_ranks() -> None:
    decoder = Decoder(SHAPE).double()
    layout = pack([200, 30, 26], ranks=2, tokens_per_rank=128)
    plan = at_home(layout, SHAPE.model)
    tokens, lengths = random_tokens(256), layout.lengths.tolist()

    @torch.no_grad()
    def body(attend: CoreAttention) -> float:
        row = layout.tokens(attend.transport.rank)
        begin = torch.tensor([0, *lengths]).cumsum(0)[torch.from_numpy(row.document)]
        index = begin + torch.from_numpy(row.position)
        hidden = hidden_of(decoder, tokens[index], torch.from_numpy(row.position),
                           lambda q, k, v: attend(q, k, v, plan))
        return float((hidden @ decoder.head_weight.T - logits_of(decoder, tokens, lengths)[index]).abs().max())

    assert max(on_fake_ranks(plan, body)) < 1e-12


@pytest.mark.parametrize("tied", [False, True])
def test_recomputation_changes_nothing(tied: bool) -> None:
    """Bit for bit: the same operations on the same shapes run again, and gradients add up in the graph's order."""
    grads = []
    for recompute in ("none", "selective", "full"):
        decoder = Decoder(replace(SHAPE, tied=tied))
        for segment in decoder.segments:
            assert isinstance(segment, Segment)
            segment.recompute = recompute
        logits_of(decoder, random_tokens(20), [13, 7]).square().sum().backward()
        grads.append([gradient(parameter) for parameter in decoder.parameters()])
    assert all(torch.equal(one, other) for others in grads[1:] for one, other in zip(grads[0], others, strict=True))
    assert len(grads[0]) == 2 + 9 * 3 + (not tied)


def _noted(saved: list[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    saved.append(x)
    return x


def test_recomputation_keeps_only_what_enters() -> None:
    kept = {}
    for recompute in ("none", "full"):
        segment = Decoder(SHAPE).segments[1]
        assert isinstance(segment, Segment)
        segment.recompute = recompute
        rotary, saved = Decoder(SHAPE).rotary(positions_of([64])), list[torch.Tensor]()
        with torch.autograd.graph.saved_tensors_hooks(partial(_noted, saved), lambda x: x):
            segment(torch.randn(64, 24, requires_grad=True), torch.randn(64, 4, 8), rotary)
        kept[recompute] = sum(x.numel() for x in saved)
    assert kept["full"] <= 64 * (2 * 24 + 32 + 2 * 8) < kept["none"]  # x on both sides, one of them the next segment's


def test_weights_depend_on_the_generator_alone() -> None:
    one, same, other = (Decoder(SHAPE, generator=torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    pairs = list(zip(one.parameters(), same.parameters(), other.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b, _ in pairs)           # the same draws into the same shapes
    assert not any(torch.equal(a, c) for a, _, c in pairs if a.ndim > 1)
    assert torch.equal(Decoder(SHAPE).head_weight, Decoder(SHAPE).head_weight)


def test_meta_construction_then_reset_gives_the_same_weights() -> None:
    """Bit for bit: the same draws into the same shapes."""
    decoder = Decoder(SHAPE, device="meta")
    assert all(parameter.is_meta for parameter in decoder.parameters())
    decoder.to_empty(device="cpu").reset_parameters(torch.Generator().manual_seed(3))
    expected = Decoder(SHAPE, generator=torch.Generator().manual_seed(3))
    for name, parameter in expected.named_parameters():
        assert torch.equal(parameter, decoder.get_parameter(name)), name


def test_initial_spread() -> None:
    decoder = Decoder(DecoderShape(ModelShape("wide", 8, 256, 4, 2, 64, 512, 1000)))
    expected = {"qkv.q": 0.02, "mlp.gate": 0.02, "embed": 0.02, "head": 0.02, "output": 0.005, "mlp.down": 0.005}
    for name, parameter in decoder.named_parameters():
        for part, std in expected.items():
            if part in name:
                assert float(parameter.detach().std()) == pytest.approx(std, rel=0.05), name
    assert all((p == 1).all() for p in decoder.parameters() if p.ndim == 1)


def test_named_shapes_count_as_published() -> None:
    def count(name: str) -> int:
        return sum(p.numel() for p in Decoder(DecoderShape(MODELS[name]), device="meta").parameters())

    assert count("llama3-8b") == 8_030_261_248                   # Meta's Llama 3 8B
    assert 33.7e9 < count("llama-34b") < 33.8e9                # Code Llama 34B has 33.7 billion


def test_shape_from_settings() -> None:
    assert decoder_shape(Model(name="tiny", tied=True, rope_theta=1e4), 257) == DecoderShape(
        MODELS["tiny"], rope_theta=1e4, tied=True)
    assert decoder_shape(Model(name="tiny"), 5000).model.vocab == 5000
    assert decoder_shape(Model(name="llama3-8b"), 257).model.vocab == 128256


def test_key_tells_weights_apart() -> None:
    assert SHAPE.key() == replace(SHAPE, rope_theta=1.0).key()
    assert SHAPE.key() != replace(SHAPE, tied=True).key()
    assert SHAPE.key() != replace(SHAPE, model=replace(SHAPE.model, ffn=41)).key()


def test_the_benchmark_counts_what_a_decoder_multiplies() -> None:
    """torch counts the products of a step without attention; the benchmark's count is that and 12 for each pair."""
    from one_gpu import model_flops

    model = ModelShape("small", 3, 24, 4, 2, 8, 40, 61)
    decoder, num_tokens = Decoder(DecoderShape(model)), 20
    with FlopCounterMode(display=False) as counted:
        tokens = torch.arange(num_tokens)
        x = hidden_of(decoder, tokens, tokens, lambda q, k, v: q + (k + v).repeat(1, 2, 1))
        (x @ decoder.head_weight.T).sum().backward()
    pairs = num_tokens * (num_tokens + 1) // 2
    assert model_flops(model, [num_tokens]) == counted.get_total_flops() + 12 * 3 * 4 * 8 * pairs
