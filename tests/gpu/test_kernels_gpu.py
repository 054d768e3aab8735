"""GPU kernels in low precision: against float64, at most twice the error of the same maths in plain PyTorch."""

import logging

import numpy as np
import pytest
import torch

import distca.kernels
from distca.kernels import TaskRows, choose, kernel_named

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU; torch.cuda.is_available() is False"),
]

NEGLIGIBLE = 1e-4  # plain PyTorch makes no error at all where every query sees one key

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


def plain(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor, rows: TaskRows, window: int | None
) -> list[torch.Tensor]:
    """out, dq, dk, dv in the dtype of q, by PyTorch's matmul, softmax and autograd over one big mask."""
    count = torch.zeros(q.shape[0], k.shape[0], device=q.device)
    for i in range(len(rows)):
        q_position = torch.arange(int(rows.q_len[i]), device=q.device)[:, None] + int(rows.q_offset[i])
        k_position = torch.arange(int(rows.k_len[i]), device=q.device)
        seen = k_position <= q_position
        if window is not None:
            seen &= k_position > q_position - window
        count[rows.q_begin[i] : rows.q_end[i], rows.k_begin[i] : rows.k_end[i]] += seen
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    group = q.shape[1] // k.shape[1]
    queries, keys, values = (x.transpose(0, 1) for x in leaves)
    keys, values = (x.repeat_interleave(group, dim=0) for x in (keys, values))
    scores = (queries @ keys.transpose(1, 2)) * q.shape[-1] ** -0.5 + count.log().to(q.dtype)
    blank = ~count.any(dim=1)[:, None]
    probabilities = scores.masked_fill(blank, 0.0).softmax(dim=-1).masked_fill(blank, 0.0)
    out = (probabilities @ values).transpose(0, 1)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def assert_as_good_as_plain(name: str, tensors: list[torch.Tensor], rows: TaskRows, window: int | None = None) -> None:
    kernel = kernel_named(name)
    q, k, v, dout = tensors
    reason = kernel.supports(q.device, q.dtype, q.shape[-1], window)
    if reason is not None:
        pytest.skip(reason)
    truth = plain(*(x.double() for x in tensors), rows, window)
    same_dtype = plain(*tensors, rows, window)
    prepared = kernel.prepare(rows, q.device, window)
    for _ in range(2):  # the second time everything is cached
        out, lse = kernel.forward(q, k, v, prepared)
        actual = [out, *kernel.backward(dout, q, k, v, out, lse, prepared)]
        oracle = kernel_named("dense")
        exact = oracle.forward(q.double(), k.double(), v.double(), oracle.prepare(rows, q.device, window))[1]
        torch.testing.assert_close(lse.double(), exact, rtol=1e-4, atol=1e-4)
        for what, a, p, t in zip(("out", "dq", "dk", "dv"), actual, same_dtype, truth, strict=True):
            assert a.dtype == q.dtype
            error, allowed = (a - t).norm().item(), 2 * (p - t).norm().item() + NEGLIGIBLE * max(t.norm().item(), 1.0)
            assert error <= allowed, f"{what} is off by {error}, more than the {allowed} allowed"


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("name", ["cudnn", "varlen", "sdpa", "dense"])
def test_rows(name: str, rows: str) -> None:
    assert_as_good_as_plain(name, random_inputs(8, 2, 128, torch.bfloat16), table(rows))


@pytest.mark.parametrize("window", [1, 100, 400])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("name", ["varlen", "sdpa"])
def test_windows(name: str, rows: str, window: int) -> None:
    assert_as_good_as_plain(name, random_inputs(4, 2, 64, torch.bfloat16), table(rows), window)


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(8, 8, 64), (8, 1, 128), (4, 2, 32), (4, 4, 256)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["cudnn", "varlen"])
def test_heads_and_dtypes(name: str, dtype: torch.dtype, heads: int, kv_heads: int, dim: int) -> None:
    rows = table("shards of one document share its keys")
    assert_as_good_as_plain(name, random_inputs(heads, kv_heads, dim, dtype), rows)


@pytest.mark.parametrize("name", ["cudnn", "varlen", "sdpa"])
def test_inputs_need_not_be_contiguous(name: str) -> None:
    q, k, v, dout = random_inputs(8, 2, 128, torch.bfloat16)
    packed = torch.cat([q, k, v], dim=1)  # as one projection gives them
    views = [*packed.split([8, 2, 2], dim=1), dout.transpose(0, 1).contiguous().transpose(0, 1)]
    assert not any(x.is_contiguous() for x in views)
    assert_as_good_as_plain(name, views, table("documents"))


@pytest.mark.parametrize("name", ["cudnn", "varlen"])
def test_backward_where_autograd_runs_it(name: str) -> None:
    """Another thread, and a stream that is not the default one."""
    kernel = kernel_named(name)
    rows = table("shards, unsorted, with gaps")
    q, k, v, dout = random_inputs(8, 2, 128, torch.bfloat16)
    if (reason := kernel.supports(q.device, q.dtype, 128, None)) is not None:
        pytest.skip(reason)
    prepared = kernel.prepare(rows, q.device)
    expected_out, lse = kernel.forward(q, k, v, prepared)
    expected = kernel.backward(dout, q, k, v, expected_out, lse, prepared)

    class Attend(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            out, lse = kernel.forward(q, k, v, prepared)
            ctx.save_for_backward(q, k, v, out, lse)
            return out

        @staticmethod
        def backward(ctx, dout):
            return kernel.backward(dout, *ctx.saved_tensors, prepared)

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


def test_changing_batches_share_graphs() -> None:
    kernel = kernel_named("cudnn")
    q, k, v, dout = random_inputs(8, 2, 128, torch.bfloat16)
    if (reason := kernel.supports(q.device, q.dtype, 128, None)) is not None:
        pytest.skip(reason)
    cudnn = distca.kernels.cudnn
    cudnn._graphs.clear()
    for lengths in ([520, 260, 244], [600, 200, 150, 74], [513, 300, 211]):
        prepared = kernel.prepare(TaskRows.documents(lengths), q.device)
        out, lse = kernel.forward(q, k, v, prepared)
        kernel.backward(dout, q, k, v, out, lse, prepared)
    assert len(cudnn._graphs) == 2  # forward and backward


def test_auto_takes_the_fastest_that_fits(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distca.kernels, "_announced", set())
    with caplog.at_level(logging.INFO, logger="distca"):
        chosen = choose("cuda", torch.bfloat16, 128)
    fits = kernel_named("cudnn").supports(torch.device("cuda"), torch.bfloat16, 128, None) is None
    assert chosen.name == ("cudnn" if fits else "varlen")
    assert f"kernel {chosen.name}" in caplog.text
    assert choose("cuda", torch.bfloat16, 128, window=64).name == "varlen"
    assert choose("cuda", torch.float64, 128).name == "sdpa"
