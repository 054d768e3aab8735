"""On a GPU: compiled, recomputed, in tiles and offloaded, a step has the loss and gradients of plain eager segments."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters

from distca.kernels import dense_attention
from distca.spec import ModelShape
from distca.train.model.decoder import Decoder
from distca.train.model.loss import chunked_cross_entropy
from distca.train.model.segment_runs import Offload, run_segments
from distca.train.model.shape import DecoderShape
from tests.support.decoders import hidden_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU; torch.cuda.is_available() is False"),
]
SHAPE = DecoderShape(ModelShape("small", 3, 256, 4, 2, 64, 512, 1000))
LENGTHS = ([900, 100, 33], [1500], [64] * 20)


def one_step(lengths: Sequence[int], dtype: torch.dtype, offload_bytes: int = 0, recompute: str = "none",
             compile: bool = False, tile_tokens: int = 0) -> list[torch.Tensor]:
    device = torch.device("cuda")
    decoder = Decoder(SHAPE, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    offload = Offload(device, offload_bytes, page_bytes=2**16, min_bytes=2**12) if offload_bytes else None
    for segment in decoder.segments:
        segment.recompute = recompute  # type: ignore[assignment]
    run_segments(decoder, compile=compile, tile_tokens=tile_tokens, offload=offload)
    tokens = torch.randint(0, 1000, (sum(lengths),), generator=torch.Generator().manual_seed(1)).to(device)
    positions = torch.cat([torch.arange(length) for length in lengths]).to(device)
    with nullcontext() if offload is None else offload.keeping():
        hidden = hidden_of(decoder, tokens, positions, lambda q, k, v: dense_attention(q, k, v, lengths))
    total, _ = chunked_cross_entropy(hidden, decoder.head_weight, tokens.roll(-1), 400, compile)
    (total / len(tokens)).backward()
    assert offload is None or not (offload.sent or offload.resident)
    return [total.detach(), *(parameter.grad for parameter in decoder.parameters() if parameter.grad is not None)]


def error(got: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> float:
    """The largest relative error of a tensor."""
    assert len(got) == len(want)
    return max(float((one.double() - other.double()).norm() / other.double().norm())
               for one, other in zip(got, want, strict=True))


@pytest.mark.parametrize("way", [
    {"recompute": "full"}, {"recompute": "selective"}, {"tile_tokens": 300}, {"offload_bytes": 2**26},
    {"offload_bytes": 2**19, "tile_tokens": 300},
])
def test_float64_is_exact(way: dict[str, Any]) -> None:
    for lengths in LENGTHS:
        assert error(one_step(lengths, torch.float64, **way), one_step(lengths, torch.float64)) < 1e-10


@pytest.mark.parametrize("way", [
    {"compile": True}, {"compile": True, "recompute": "full"},
    {"compile": True, "tile_tokens": 300, "offload_bytes": 2**26},
])
def test_bfloat16_is_as_near_to_float64_as_eager(way: dict[str, Any]) -> None:
    torch._dynamo.reset()
    graphs = []
    for lengths in LENGTHS:
        before = counters["stats"]["unique_graphs"]
        exact = one_step(lengths, torch.float64)
        assert error(one_step(lengths, torch.bfloat16, **way), exact) <= 2 * error(
            one_step(lengths, torch.bfloat16), exact)
        graphs.append(counters["stats"]["unique_graphs"] - before)
    assert not any(graphs[1:])                                   # other lengths compile nothing


@pytest.mark.parametrize("compiled", [False, True])
def test_loss_in_bfloat16(compiled: bool) -> None:
    """Twice a same-dtype run's error at most, with float32 sums of the head's gradient over chunks."""
    generator = torch.Generator("cuda").manual_seed(0)
    hidden, weight = (torch.randn(size, 64, generator=generator, device="cuda").bfloat16().requires_grad_()
                      for size in (5000, 3000))
    labels = torch.randint(0, 3000, (5000,), generator=generator, device="cuda")
    labels[::7] = -100
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    want = F.cross_entropy(exact[0] @ exact[1].T, labels, reduction="sum")
    same = F.cross_entropy((hidden @ weight.T).float(), labels, reduction="sum")
    got, _ = chunked_cross_entropy(hidden, weight, labels, 512, compiled)
    off, theirs_off = (abs(float(x.detach() - want.detach())) for x in (got, same))
    assert off <= 2 * theirs_off + 1e-6 * float(want.detach())
    wanted, theirs, ours = (torch.autograd.grad(x, leaves) for x, leaves in
                            ((want, exact), (same, [hidden, weight]), (got, [hidden, weight])))
    for index in range(2):
        assert (ours[index] - wanted[index]).norm() <= 2 * (theirs[index] - wanted[index]).norm()
