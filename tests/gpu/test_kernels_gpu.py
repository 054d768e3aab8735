"""GPU kernels in low precision: as far from float64 as rounding explains, and no farther."""

import logging
from typing import Any

import numpy as np
import pytest
import torch

import distca.kernels
from distca.kernels import KERNELS, TaskRows, choose, dense_attention, kernel_named, measured
from distca.kernels.interface import BackwardInputs, Scores, gradient_of_sinks, with_sinks
from tests.support.accuracy import check_attention
from tests.support.attention import determinism

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU; torch.cuda.is_available() is False"),
]

ROWS = {
    "documents": [(0, 700, 0, 700, 0), (700, 701, 700, 701, 0), (701, 1024, 701, 1024, 0)],
    "shards of one document share its keys": [(0, 128, 0, 640, 512), (128, 384, 0, 896, 640), (384, 512, 0, 1024, 896)],
    "shards, unsorted, with gaps": [(600, 800, 512, 1000, 288), (0, 300, 0, 400, 100), (900, 1024, 0, 300, 176)],
    "a document after documents it shares nothing with": [(256, 512, 512, 1024, 256), (0, 256, 0, 256, 0)],
    "same queries, partial keys": [(0, 512, 0, 300, 512), (0, 512, 300, 1024, 212), (512, 600, 0, 1024, 2000)],
    "queries before and past their keys": [(0, 500, 100, 300, -50), (500, 1024, 0, 256, -10)],
    "one-token queries": [(i, i + 1, 0, 8 * i + 8, 8 * i + 7) for i in range(64)],
    "nothing": [(0, 4, 5, 5, 0)],
}


def table(name: str) -> TaskRows:
    return TaskRows(*np.array(ROWS[name], dtype=np.int64).T)


def random_inputs(heads: int, kv_heads: int, dim: int, dtype: torch.dtype, tokens: int = 1024) -> list[torch.Tensor]:
    generator = torch.Generator(device="cuda").manual_seed(0)
    shapes = ((tokens, heads, dim), (tokens, kv_heads, dim), (tokens, kv_heads, dim), (tokens, heads, dim))
    return [torch.randn(shape, device="cuda", generator=generator).to(dtype) for shape in shapes]  # q, k, v, dout


def assert_exact(
    name: str, tensors: list[torch.Tensor], rows: TaskRows, window: int | None = None, softcap: float | None = None
) -> None:
    q, k, v, dout = tensors
    try:
        kernel = choose(q.device, q.dtype, q.shape[-1], window, name, softcap=softcap)
    except ValueError as reason:
        pytest.skip(str(reason))
    prepared = kernel.prepare(rows, q.device, Scores(None, window, softcap))
    for _ in range(2):  # the second time everything is cached
        out, lse = kernel.forward(q, k, v, prepared)
        actual = [out, lse, *kernel.backward(BackwardInputs(dout, q, k, v, out, lse), prepared)]
        check_attention(actual, q, k, v, dout, rows, window=window, softcap=softcap)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("name", ["fa4", "varlen", "sdpa", "dense"])
def test_rows(name: str, rows: str) -> None:
    assert_exact(name, random_inputs(8, 2, 128, torch.bfloat16), table(rows))


@pytest.mark.parametrize("window", [1, 100, 400])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("name", ["fa4", "varlen", "sdpa"])
def test_windows(name: str, rows: str, window: int) -> None:
    assert_exact(name, random_inputs(4, 2, 64, torch.bfloat16), table(rows), window)


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(8, 8, 64), (8, 1, 128), (4, 2, 32), (4, 4, 256)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["fa4", "varlen"])
def test_heads_and_dtypes(name: str, dtype: torch.dtype, heads: int, kv_heads: int, dim: int) -> None:
    rows = table("shards of one document share its keys")
    assert_exact(name, random_inputs(heads, kv_heads, dim, dtype), rows)


@pytest.mark.parametrize(("dim", "window", "softcap"), [(128, None, 2.0), (128, 100, 50.0), (256, None, 50.0)])
@pytest.mark.parametrize("rows", ["documents", "shards, unsorted, with gaps"])
@pytest.mark.parametrize("name", ["fa4", "sdpa", "dense"])
def test_softcap(name: str, rows: str, dim: int, window: int | None, softcap: float) -> None:
    q, *others = random_inputs(4, 2, dim, torch.bfloat16)
    assert_exact(name, [3 * q, *others], table(rows), window, softcap)  # scores of 3 and more: a cap of 2 bends most


def test_softcap_in_deterministic_mode() -> None:
    q, *others = random_inputs(4, 2, 128, torch.bfloat16)
    with determinism():
        assert_exact("fa4", [3 * q, *others], table("shards of one document share its keys"), None, 50.0)


@pytest.mark.parametrize("name", ["hopper", "fa4", "varlen", "sdpa"])
def test_sinks(name: str) -> None:
    """Out and the gradients of a softmax with one more key, whose value is 0."""
    rows, (q, k, v, dout) = TaskRows.documents([1024]), random_inputs(8, 2, 128, torch.bfloat16)
    try:
        kernel = choose(q.device, q.dtype, 128, None, name)
    except ValueError as reason:
        pytest.skip(str(reason))
    sinks, prepared = torch.linspace(-3, 6, 8, device="cuda"), kernel.prepare(rows, q.device)
    out, lse = with_sinks(*kernel.forward(q, k, v, prepared), sinks)
    actual = [out, *kernel.backward(BackwardInputs(dout, q, k, v, out, lse), prepared)]
    actual.append(gradient_of_sinks(dout, out, lse, sinks))
    leaves = [x.double().requires_grad_() for x in (q, k, v, sinks)]
    expected_out = dense_attention(leaves[0], leaves[1], leaves[2], [1024], sinks=leaves[3])
    expected = [expected_out, *torch.autograd.grad(expected_out, leaves, dout.double())]
    plain = [x.detach().requires_grad_() for x in (q, k, v, sinks)]
    plain_out = dense_attention(plain[0], plain[1], plain[2], [1024], sinks=plain[3])
    for mine, theirs, right in zip(actual, [plain_out, *torch.autograd.grad(plain_out, plain, dout)], expected,
                                   strict=True):
        error, allowed = ((x.double() - right).norm() for x in (mine, theirs))
        assert error <= 2 * allowed, f"off by {error:.3e}, torch in bfloat16 by {allowed:.3e}"


@pytest.mark.parametrize("name", ["fa4", "varlen", "sdpa"])
def test_inputs_need_not_be_contiguous(name: str) -> None:
    q, k, v, dout = random_inputs(8, 2, 128, torch.bfloat16)
    packed = torch.cat([q, k, v], dim=1)  # as one projection gives them
    views = [*packed.split([8, 2, 2], dim=1), dout.transpose(0, 1).contiguous().transpose(0, 1)]
    assert not any(x.is_contiguous() for x in views)
    assert_exact(name, views, table("documents"))


@pytest.mark.parametrize("name", ["fa4", "varlen"])
def test_backward_where_autograd_runs_it(name: str) -> None:
    """Another thread, and a stream that is not the default one."""
    kernel = kernel_named(name)
    rows = table("shards, unsorted, with gaps")
    q, k, v, dout = random_inputs(8, 2, 128, torch.bfloat16)
    if (reason := kernel.supports(q.device, q.dtype, 128)) is not None:
        pytest.skip(reason)
    prepared = kernel.prepare(rows, q.device)
    expected_out, lse = kernel.forward(q, k, v, prepared)
    expected = kernel.backward(BackwardInputs(dout, q, k, v, expected_out, lse), prepared)

    class Attend(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            out, lse = kernel.forward(q, k, v, prepared)
            ctx.save_for_backward(q, k, v, out, lse)
            return out

        @staticmethod
        def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return kernel.backward(BackwardInputs(dout, *ctx.saved_tensors), prepared)

    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        out = Attend.apply(*leaves)
        actual = torch.autograd.grad(out, leaves, dout)
    torch.cuda.current_stream().wait_stream(stream)
    torch.testing.assert_close(out, expected_out)
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e)


@pytest.mark.parametrize(("dtype", "window"), [(torch.bfloat16, None), (torch.bfloat16, 64), (torch.float16, None),
                                               (torch.float64, None)])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_auto_takes_the_fastest_that_fits(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, head_dim: int, dtype: torch.dtype,
    window: int | None,
) -> None:
    """By the shipped figures of this device, where it has any, and else in the order in which kernels are listed."""
    monkeypatch.setattr(distca.kernels, "_announced", set())
    with caplog.at_level(logging.INFO, logger="distca"):
        chosen = choose("cuda", dtype, head_dim, window)
    assert f"kernel {chosen.name}" in caplog.text
    fit = [name for name in KERNELS
           if kernel_named(name).supports(torch.device("cuda"), dtype, head_dim, Scores(window=window)) is None]
    seconds = {speed.kernel: speed.seconds for speed in measured().get(torch.cuda.get_device_name(), ())
               if dtype == torch.bfloat16 and (speed.head_dim, speed.windowed) == (head_dim, window is not None)}
    timed = [name for name in fit if name in seconds]
    assert chosen.name == (min(timed, key=seconds.__getitem__) if timed else fit[0])
