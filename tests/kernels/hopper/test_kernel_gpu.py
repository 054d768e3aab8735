"""The Hopper kernel on its GPU: as exact as rounding allows, the same bits when asked, replayed with other rows.

What rounding allows is in tests.support.accuracy. Needs torch, pytest and hypothesis alone; with --noconftest also
where nothing else is installed.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distca.kernels.dense import DenseKernel
from distca.kernels.hopper.kernel import HopperKernel, HopperTasks
from distca.kernels.interface import BackwardInputs, TaskRows, merge
from tests.support import hopper_accuracy as accuracy
from tests.support.accuracy import SCORES_AT_ONCE
from tests.support.attention import determinism, task_rows

NAMES, attend, random_rows, shards = accuracy.NAMES, accuracy.attend, accuracy.random_rows, accuracy.shards
assert_exact = accuracy.assert_exact

CPU, GPU = torch.device("cpu"), torch.device("cuda")
HOPPER = HopperKernel()
random_inputs = partial(accuracy.random_inputs, device=GPU)
DIMS = (64, 128, 192, 256)
SHAPES = [(group, dim, window) for group in (1, 4, 7, 8) for dim in DIMS for window in (None, 300)]  # 7 heads pad

MISSING = (HOPPER.supports(GPU, torch.bfloat16, 128) if torch.cuda.is_available()
           else "torch.cuda.is_available() is False")


def gpu(test: Callable[..., None]) -> Callable[..., None]:
    skipped = pytest.mark.skipif(MISSING is not None, reason=f"needs an NVIDIA Hopper GPU; {MISSING}")
    return pytest.mark.gpu(skipped(test))


@pytest.fixture(scope="module")
def compiled() -> None:
    """Compile side by side what the tests would compile one after another."""
    def once(shape: tuple[int, int, int | None]) -> None:
        group, dim, window = shape
        attend(HOPPER, random_inputs(1, 1, group, 1, dim), TaskRows.documents([1]), window)

    for mode in (nullcontext, determinism):
        with mode(), ThreadPoolExecutor(8) as pool:
            list(pool.map(once, SHAPES))


def test_the_check_takes_bf16_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU: the check itself, in many parts, on results that are right and results that are not."""
    monkeypatch.setitem(SCORES_AT_ONCE, "cpu", 2 * 90 * 25)
    for seed, window, scale in ((0, None, None), (1, 20, 0.2)):
        rows = random_rows(seed, 6, 80, 90, apart=bool(seed))
        tensors = accuracy.random_inputs(80, 90, 4, 2, 64, CPU, seed)
        right = attend(DenseKernel(), tensors, rows, window, scale)
        assert_exact(right, tensors, rows, window, scale)
        for i, name in enumerate(NAMES):
            wrong = [x * 1.02 if j == i else x for j, x in enumerate(right)]
            with pytest.raises(AssertionError, match=name):
                assert_exact(wrong, tensors, rows, window, scale)


@gpu
@pytest.mark.parametrize(("group", "dim", "window"), SHAPES)
@pytest.mark.parametrize("apart", [True, False], ids=["queries apart", "queries shared"])
def test_random_rows(compiled: None, group: int, dim: int, window: int | None, apart: bool) -> None:
    rows = random_rows(group + dim, 12, 1500, 2100, apart)
    tensors = random_inputs(1500, 2100, 2 * group, 2, dim)
    assert_exact(attend(HOPPER, tensors, rows, window), tensors, rows, window)


@gpu
@pytest.mark.parametrize(("group", "dim", "window"), SHAPES)
def test_random_rows_where_dq_is_computed_by_itself(compiled: None, group: int, dim: int, window: int | None) -> None:
    rows = random_rows(group + dim, 12, 1500, 2100, apart=False)
    tensors = random_inputs(1500, 2100, 2 * group, 2, dim)
    with determinism():
        actual = attend(HOPPER, tensors, rows, window)
    assert_exact(actual, tensors, rows, window)


@gpu
@pytest.mark.parametrize("num_sms", [112, 1])
@pytest.mark.parametrize("mode", [nullcontext, determinism], ids=["added up", "by itself"])
def test_fewer_multiprocessors(mode: Callable[[], AbstractContextManager[None]], num_sms: int) -> None:
    rows, tensors = random_rows(3, 12, 1500, 2100, apart=True), random_inputs(1500, 2100, 8, 2, 128)
    with mode():
        actual = attend(HopperKernel(num_sms=num_sms), tensors, rows)
    assert_exact(actual, tensors, rows)


@st.composite
def any_rows(draw: st.DrawFn) -> TaskRows:
    def span() -> tuple[int, int]:
        begin = draw(st.integers(0, 400))
        return begin, draw(st.integers(begin, 400))

    table = [(*span(), *span(), draw(st.integers(-400, 420))) for _ in range(draw(st.integers(0, 6)))]
    return TaskRows(*np.array(table, dtype=np.int64).reshape(-1, 5).T)


@gpu
@pytest.mark.parametrize("dim", DIMS[1:])
@given(rows=any_rows(), window=st.none() | st.integers(1, 450), scale=st.none() | st.floats(0.05, 0.3))
@settings(max_examples=60, deadline=None)
def test_any_rows(dim: int, rows: TaskRows, window: int | None, scale: float | None) -> None:
    tensors = random_inputs(400, 400, 4, 1, dim)
    assert_exact(attend(HOPPER, tensors, rows, window, scale), tensors, rows, window, scale)


LONG = {
    "one document": (TaskRows.documents([32_768]), None),
    "one document, window": (TaskRows.documents([32_768]), 4_097),
    "documents off the tile": (TaskRows.documents([20_001, 1, 7_777, 0, 333, 129, 127, 4_400]), None),
    "shards of one document": (shards(48, 129, 32_768), None),
    "shards of one document, window": (shards(48, 129, 32_768), 1_000),
    "one query, 32K keys": (TaskRows.aligned([0], [1], [0], [32_768]), None),
    "32K queries, three keys": (task_rows([0], [32_768], [5], [8], [0]), None),
    "single queries": (shards(300, 1, 4_000), None),
    "keys in parts": (task_rows([0, 0, 0], [8_000] * 3, [0, 5_001, 11_000], [5_001, 11_000, 16_000],
                               [8_000, 2_999, -3_000]), None),
}


@gpu
@pytest.mark.parametrize("dim", DIMS[1:])
@pytest.mark.parametrize("name", LONG)
def test_long_rows(name: str, dim: int) -> None:
    rows, window = LONG[name]
    tensors = random_inputs(int(rows.q_end.max()), int(rows.k_end.max()), 4, 1, dim)
    assert_exact(attend(HOPPER, tensors, rows, window), tensors, rows, window)


GAPS = task_rows([5, 140, 141, 700], [139, 141, 333, 900], [3, 300, 260, 901], [450, 301, 789, 999], [313, 0, 337, 60])


@gpu
@pytest.mark.parametrize("window", [None, 90])
@pytest.mark.parametrize("dim", DIMS)
def test_tokens_outside_all_rows_are_not_touched(dim: int, window: int | None) -> None:
    tensors = random_inputs(1000, 1100, 8, 2, dim)
    spans = {"q": (GAPS.q_begin, GAPS.q_end), "k": (GAPS.k_begin, GAPS.k_end)}
    poisoned = []
    for x, side in zip(tensors, "qkkq", strict=True):
        unused = torch.ones(x.shape[0], dtype=torch.bool, device=GPU)
        for begin, end in zip(*spans[side], strict=True):
            unused[begin:end] = False
        poisoned.append(x.masked_fill(unused[:, None, None], torch.nan))
    assert all(x.isnan().any() for x in poisoned)
    assert_exact(attend(HOPPER, poisoned, GAPS, window), tensors, GAPS, window)


@gpu
def test_what_is_not_a_number_stays_in_its_row() -> None:
    lengths = [333, 50, 401]
    rows, tensors = TaskRows.documents(lengths), random_inputs(784, 784, 8, 2, 128)
    bad = slice(333, 383)
    clean, poisoned = attend(HOPPER, tensors, rows), [x.clone() for x in tensors]
    for x in poisoned:
        x[bad] = torch.nan
    actual = attend(HOPPER, poisoned, rows)
    for name, a, e in zip(NAMES, actual, clean, strict=True):
        assert a[bad].isnan().all(), name
        a[bad] = e[bad]
    assert_exact(actual, tensors, rows)


@gpu
def test_strided_inputs() -> None:
    rows = TaskRows.documents([300, 77])
    q, k, v, dout = random_inputs(377, 377, 8, 2, 128)
    strided = [torch.cat([q, q], dim=2)[..., :128], torch.stack([k, v], dim=1)[:, 0],
               v.transpose(0, 1).contiguous().transpose(0, 1), dout.permute(2, 0, 1).contiguous().permute(1, 2, 0)]
    assert not any(x.is_contiguous() for x in strided)
    assert_exact(attend(HOPPER, strided, rows), strided, rows)


@gpu
def test_rows_of_several_servers_merge_at_home() -> None:
    q, k, v, dout = tensors = random_inputs(900, 900, 8, 2, 128)
    servers = [HOPPER.prepare(task_rows([0], [900], [b], [e], [-b]), GPU)
               for b, e in ((0, 201), (201, 640), (640, 900))]
    out, lse = HOPPER.forward(q, k, v, servers[0])
    for server in servers[1:]:
        out, lse = merge(out, lse, *HOPPER.forward(q, k, v, server))
    parts = [HOPPER.backward(BackwardInputs(dout, q, k, v, out, lse), server) for server in servers]
    total = [sum(x.float() for x in side).to(torch.bfloat16) for side in zip(*parts, strict=True)]
    assert_exact([out, lse, *total], tensors, TaskRows.documents([900]))


RACING = {"shared keys": shards(64, 128, 8_192), "documents": TaskRows.documents([1_024] * 6 + [1_000, 1_048]),
          "queries in many rows": random_rows(5, 40, 8_192, 8_192, apart=False)}


@gpu
@pytest.mark.parametrize("dim", DIMS[1:])
@pytest.mark.parametrize("name", RACING)
def test_deterministic_mode_gives_the_same_bits(name: str, dim: int) -> None:
    rows, tensors = RACING[name], random_inputs(8_192, 8_192, 32, 8, dim)
    with determinism():
        first = attend(HOPPER, tensors, rows)
        for _ in range(3):
            for what, a, e in zip(NAMES, attend(HOPPER, tensors, rows), first, strict=True):
                assert torch.equal(a, e), what                   # no atomic adds: one order of sums
    for what, a, e in zip(NAMES[2:], attend(HOPPER, tensors, rows)[2:], first[2:], strict=True):  # sums to 1 ulp, 2**-7
        assert (a - e).norm(dtype=torch.float32) <= 1e-2 * e.norm(dtype=torch.float32), what


def steady(q_tokens: int = 4_096) -> tuple[list[torch.Tensor], list[TaskRows]]:
    """Inputs, and rows of which the first need the most room."""
    tables = [shards(32, 128, q_tokens), TaskRows.documents([1_000, 1, 2_500]), shards(7, 300, 3_333),
              task_rows([0, 512, 9], [512, 1_024, 9], [0, 0, 5], [512, 1_024, 9], [0, 512, 0]),
              task_rows([0, 0, 300], [700, 700, 900], [0, 500, 900], [500, 900, 1_700], [700, 200, 100]),
              TaskRows.documents([])]
    return random_inputs(q_tokens, q_tokens, 8, 2, 128), tables


@gpu
def test_a_captured_graph_replays_with_other_numbers() -> None:
    (q, k, v, dout), tables = steady()
    for rows in (tables[0], tables[1], shards(2, 128, 700)):
        with determinism():
            prepared = HOPPER.prepare(rows, GPU)
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                for _ in range(2):
                    out, lse = HOPPER.forward(q, k, v, prepared)
                    HOPPER.backward(BackwardInputs(dout, q, k, v, out, lse), prepared)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                out, lse = HOPPER.forward(q, k, v, prepared)
                captured = [out, lse, *HOPPER.backward(BackwardInputs(dout, q, k, v, out, lse), prepared)]
            for number in range(2):
                fresh = random_inputs(q.shape[0], k.shape[0], 8, 2, 128, seed=number)
                for there, here in zip((q, k, v, dout), fresh, strict=True):
                    there.copy_(here)
                graph.replay()
                for name, a, e in zip(NAMES, captured, attend(HOPPER, fresh, rows), strict=True):
                    assert torch.equal(a, e), f"{name} of replay {number}"


@gpu
def test_prepared_calls_neither_allocate_nor_wait() -> None:
    (q, k, v, dout), tables = steady()
    prepared = [HOPPER.prepare(rows, GPU) for rows in tables]

    def step(tasks: HopperTasks) -> None:
        out, lse = HOPPER.forward(q, k, v, tasks)
        HOPPER.backward(BackwardInputs(dout, q, k, v, out, lse), tasks)

    def held() -> tuple[int, int, int]:
        torch.cuda.synchronize()
        return (torch.cuda.memory_reserved(), torch.cuda.memory_stats()["num_device_alloc"],
                torch.cuda.memory_allocated())

    for tasks in prepared * 2:
        step(tasks)
    before = held()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for i in range(20):
            step(prepared[i % len(prepared)])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert held() == before
