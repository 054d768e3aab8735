"""Buffers that trainers refill for every batch: attention follows their contents, however these were written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from distca.integrations.document_lengths import PackedEdges
from distca.integrations.packed import PackedAttention
from distca.integrations.row_exchange import RowTable
from distca.kernels import dense_attention
from distca.runtime.transport.c10d import C10dTransport
from tests.support.processes import run_processes, values

TOKENS, DOCUMENTS = 24, 6
Attend = Callable[..., torch.Tensor]  # of q, k, v, buffer and layer


def in_inference_mode(buffer: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return buffer.copy_(new)


def through_numpy(buffer: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    buffer.numpy()[...] = new.numpy()
    return buffer


def through_dlpack(buffer: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    torch.from_dlpack(buffer).copy_(new)
    return buffer


def other_memory(buffer: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    buffer.data = new.clone()
    return buffer


REFILLS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "copy_": lambda buffer, new: buffer.copy_(new),
    "inference mode": in_inference_mode,
    ".data": lambda buffer, new: (buffer.data.copy_(new), buffer)[1],
    "numpy": through_numpy,
    "dlpack": through_dlpack,
    "staging": lambda buffer, new: buffer.copy_(new.clone(), non_blocking=True),
    "storage": lambda buffer, new: (buffer.untyped_storage().copy_(new.clone().untyped_storage()), buffer)[1],
    "set_": lambda buffer, new: buffer.set_(new.clone()),  # type: ignore[call-overload]
    "other memory": other_memory,
    "new tensor": lambda buffer, new: new.clone(),
}
UNCOUNTED = ("inference mode", ".data", "numpy", "dlpack", "storage")
MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "grad": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}
LAYERS: tuple[tuple[int | None, ...], ...] = (                   # a forward begins with its lowest, or with none
    (0, 1, 2), (0,), (0, 1), (0, 0, 1), (0, 2, 4), (0, 2, 1), (None, None, None), (0, None, 1), (None, 0))
NUMBERED = 6


def random_lengths(rng: np.random.Generator) -> list[int]:
    """Of as many tokens every time, as in a static buffer."""
    cuts = np.sort(rng.choice(np.arange(1, TOKENS), int(rng.integers(0, DOCUMENTS)), replace=False))
    return np.diff([0, *cuts, TOKENS]).tolist()


def positions_of(lengths: list[int]) -> torch.Tensor:
    return torch.cat([torch.arange(length) for length in lengths])


def edges_of(lengths: list[int]) -> torch.Tensor:
    """Always as many: documents that are not there are empty."""
    return torch.tensor([0, *np.cumsum(lengths), *[TOKENS] * (DOCUMENTS - len(lengths))], dtype=torch.int32)


def plain() -> tuple[Attend, Callable[[list[int]], torch.Tensor]]:
    return PackedAttention(), positions_of


def layers() -> tuple[Attend, Callable[[list[int]], torch.Tensor]]:
    served = PackedAttention()

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, edges: torch.Tensor, *, layer: int | None
               ) -> torch.Tensor:
        return served.attend(q, k, v, served.begin_edges(PackedEdges(edges), (q, k, v), training=True, layer=layer))

    return attend, edges_of


def megatron() -> tuple[Attend, Callable[[list[int]], torch.Tensor]]:
    if find_spec("megatron") is None:
        pytest.skip("megatron-core is not installed")
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.enums import AttnMaskType

    from distca.integrations.megatron_core import BalancedCoreAttention

    config = TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=4, num_query_groups=2,
                               attention_dropout=0.0)
    alone: Any = SimpleNamespace(tp=SimpleNamespace(size=lambda: 1, rank=lambda: 0))
    core = BalancedCoreAttention(config, 1, AttnMaskType.causal, "self", pg_collection=alone)
    core.pool = PackedAttention()

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, edges: torch.Tensor, *, layer: int) -> torch.Tensor:
        core.layer_number = layer
        packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=edges, cu_seqlens_kv=edges)
        return core(q, k, v, None, packed_seq_params=packed).unflatten(1, (4, 4))

    return attend, edges_of


def forwards(seed: int, make: Callable[[], tuple[Attend, Callable[[list[int]], torch.Tensor]]], numbered: bool) -> None:
    """Six forwards over one buffer, or two that take turns, refilled in any way; each call against the dense answer."""
    rng = np.random.default_rng(seed)
    attend, content = make()
    buffers = []
    for _ in range(int(rng.integers(1, 3))):
        with torch.inference_mode(bool(rng.integers(4) == 0)):
            buffers.append(content(random_lengths(rng)))
    for _ in range(6):
        at, lengths = int(rng.integers(len(buffers))), random_lengths(rng)
        mode = list(MODES)[rng.integers(len(MODES))]
        usable = ("new tensor", "inference mode", ".data") if buffers[at].is_inference() else tuple(REFILLS)
        how = usable[rng.integers(len(usable))]
        with torch.inference_mode(buffers[at].is_inference()):
            buffers[at] = REFILLS[how](buffers[at], content(lengths))
        pattern = LAYERS[rng.integers(NUMBERED if numbered else len(LAYERS))]
        with MODES[mode]():
            leaves = [torch.randn(TOKENS, heads, 4, dtype=torch.float64, requires_grad=mode == "grad")
                      for heads in (4, 2, 2)]
            replay = mode == "grad" and bool(rng.integers(2)) and not buffers[at].is_inference()
            for layer in pattern:
                call = partial(attend, leaves[0], leaves[1], leaves[2], buffers[at], layer=layer)
                out = checkpoint(call, use_reentrant=False) if replay else call()
                expected = dense_attention(leaves[0], leaves[1], leaves[2], lengths)
                assert torch.allclose(out, expected, rtol=1e-10, atol=1e-10), (seed, how, mode, pattern, layer)
        if mode == "grad":
            if replay and how != "new tensor":                   # the next batch is fetched before this one's backward
                REFILLS[how](buffers[at], content(random_lengths(rng)))
            dout = torch.randn_like(out)
            for mine, dense in zip(torch.autograd.grad(out, leaves, dout), torch.autograd.grad(expected, leaves, dout),
                                   strict=True):
                torch.testing.assert_close(mine, dense, rtol=1e-10, atol=1e-10)


MAKERS = {"plain": (plain, False), "plain, numbered": (plain, True), "layers": (layers, False),
          "megatron": (megatron, True)}


@pytest.mark.parametrize("kind", MAKERS)
def test_any_buffer_refilled_in_any_way(kind: str) -> None:
    for seed in range(25):
        forwards(seed, *MAKERS[kind])


@pytest.mark.slow
@pytest.mark.parametrize("kind", MAKERS)
def test_many_buffers_refilled_in_any_way(kind: str) -> None:
    for seed in range(25, 600):
        forwards(seed, *MAKERS[kind])


def test_document_ids_refilled_beside_positions() -> None:
    """Positions stay, and a number of a document joins it with its second part or not."""
    attention = PackedAttention()
    q, k, v = (torch.randn(4, heads, 4, dtype=torch.float64) for heads in (4, 2, 2))
    positions, ids = torch.tensor([0, 1, 0, 1]), torch.tensor([7, 7, 8, 8])
    first = attention(q, k, v, positions, document_ids=ids)
    torch.testing.assert_close(first, dense_attention(q, k, v, [2, 2]), rtol=1e-10, atol=1e-10)
    positions.data.copy_(torch.tensor([2, 3, 0, 1]))
    ids.data.fill_(7)
    order = torch.tensor([2, 3, 0, 1])
    expected = dense_attention(q[order], k[order], v[order], [4])[order]
    torch.testing.assert_close(attention(q, k, v, positions, document_ids=ids), expected, rtol=1e-10, atol=1e-10)


def test_compiled_layers_follow_a_buffer() -> None:
    attention = PackedAttention()

    def model(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
        out = attention(q, k, v, buffer, layer=0)
        return attention(out.sin(), k, v, buffer, layer=1)

    compiled, buffer = torch.compile(model, backend="eager"), torch.arange(TOKENS)
    q, k, v = (torch.randn(TOKENS, heads, 4, dtype=torch.float64) for heads in (4, 2, 2))
    for seed, how in enumerate(UNCOUNTED):
        lengths = random_lengths(np.random.default_rng(seed))
        REFILLS[how](buffer, positions_of(lengths))
        expected = dense_attention(dense_attention(q, k, v, lengths).sin(), k, v, lengths)
        torch.testing.assert_close(compiled(q, k, v, buffer), expected, rtol=1e-10, atol=1e-10)


def test_transformers_follow_a_buffer() -> None:
    hf = pytest.importorskip("transformers")
    from distca.integrations.huggingface import enable

    torch.manual_seed(0)
    config = hf.LlamaConfig(vocab_size=97, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
                            num_attention_heads=4, num_key_value_heads=2, initializer_range=0.5)
    model = hf.LlamaForCausalLM(config).double()
    enable(model)
    alone = hf.LlamaForCausalLM(hf.LlamaConfig(**config.to_diff_dict())).double()
    alone.load_state_dict(model.state_dict())
    batch = {"input_ids": torch.arange(1, TOKENS + 1)[None], "position_ids": torch.arange(TOKENS)[None]}
    with torch.no_grad():
        for seed, how in enumerate(REFILLS):
            lengths = random_lengths(np.random.default_rng(seed))
            batch["position_ids"] = REFILLS[how](batch["position_ids"], positions_of(lengths)[None])
            with (torch.enable_grad, torch.no_grad, torch.inference_mode)[seed % 3]():
                mine = model(**batch, use_cache=False).logits[0]
            theirs = [alone(document[None]).logits[0] for document in batch["input_ids"][0].split(lengths)]
            torch.testing.assert_close(mine.detach(), torch.cat(theirs), rtol=1e-8, atol=1e-8)


def rank_refills(transport: C10dTransport) -> list[int]:
    """What this rank's buffer says changes in some forwards, the other rank's in others; collectives of lengths."""
    counted: list[int] = []
    gather = RowTable._gather

    def counting(table: RowTable, *args: Any) -> list[list[int]]:
        counted[-1] += 1
        return gather(table, *args)

    pytest.MonkeyPatch().setattr(RowTable, "_gather", counting)
    attention, buffer = PackedAttention(tolerance=0.02), torch.arange(TOKENS)
    lengths: list[list[int]] = [[TOKENS], [TOKENS]]
    for number, (rank, how, pattern) in enumerate(cases()):
        rng = np.random.default_rng(number)
        lengths[rank] = random_lengths(rng)
        for one in range(2):                                     # both write, one of them what is there already
            if one == transport.rank:
                REFILLS[how](buffer, positions_of(lengths[one]))
        counted.append(0)
        q, k, v = (torch.randn(TOKENS, heads, 4, dtype=torch.float64) for heads in (4, 2, 2))
        for layer in pattern:
            expected = dense_attention(q, k, v, lengths[transport.rank])
            torch.testing.assert_close(attention(q, k, v, buffer, layer=layer), expected, rtol=1e-10, atol=1e-10)
    return counted


def cases() -> Iterator[tuple[int, str, tuple[int | None, ...]]]:
    for number, how in enumerate((*UNCOUNTED, "copy_")):
        for pattern in ((0, 1, 2), (None, None)):
            yield number % 2, how, pattern


@pytest.mark.multiprocess
def test_ranks_agree_when_only_one_has_other_documents() -> None:
    first, second = values(run_processes(2, rank_refills, timeout_seconds=30, deadline_seconds=90))
    assert first == second == [1 if pattern[0] == 0 else 2 for _, _, pattern in cases()]

