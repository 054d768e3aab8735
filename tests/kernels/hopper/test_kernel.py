"""The Hopper kernel around its launches, which hopper_walk.py plays on the CPU, and the compiling of its sources.

Exactness on any tasks is in test_exact.py; here are deterministic gradients, fewer multiprocessors, and what is
refused.
"""

import itertools
import logging
import re
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from distca.kernels import TaskRows
from distca.kernels.hopper import driver as cuda_driver
from distca.kernels.hopper import kernel as hopper
from distca.kernels.hopper import launch as hopper_launch
from distca.kernels.hopper import variants as hopper_variants
from distca.kernels.hopper.kernel import HopperKernel, HopperTasks
from distca.kernels.hopper.tables import TILE_BLOCKS
from distca.kernels.hopper.variants import TILES, Masks, Mode
from distca.kernels.interface import BackwardInputs
from tests.support import hopper_walk
from tests.support.attention import determinism, task_rows

CPU = torch.device("cpu")
HOPPER = HopperKernel()
DOCUMENTS = TaskRows.documents([300, 40, 1, 150])
TWICE = task_rows([0, 100, 0], [200, 300, 50], [0, 20, 300], [200, 320, 310], [0, 90, 20])  # queries in several rows
NOTHING = TaskRows.documents([])


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """The launches of backward: whether each was deterministic."""
    calls = []

    def run_backward(*arguments: Any) -> None:
        calls.append(arguments[-1])
        hopper_walk.launch_backward(*arguments)

    monkeypatch.setattr(hopper, "run_forward", hopper_walk.launch_forward)
    monkeypatch.setattr(hopper, "run_backward", run_backward)
    return calls


@pytest.fixture(name="determinism")
def in_deterministic_mode() -> Iterator[None]:
    with determinism():
        yield


def inputs(kv_heads: int = 2, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """q, k, v, dout of six query heads; the last tokens stand in no row."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn((500, heads, 16), generator=generator, dtype=torch.float64).to(dtype)
            for heads in (6, kv_heads, kv_heads, 6)]


def attend(tensors: list[torch.Tensor], prepared: HopperTasks) -> list[torch.Tensor]:
    """out, lse, dq, dk, dv."""
    q, k, v, dout = tensors
    out, lse = HOPPER.forward(q, k, v, prepared)
    return [out, lse, *HOPPER.backward(BackwardInputs(dout, q, k, v, out, lse), prepared)]


def assert_same(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    """Bit for bit, of equal tables: their walks multiply tiles of the same shapes in the same order."""
    assert all(torch.equal(a, e) for a, e in zip(actual, expected, strict=True))


def test_deterministic_gradients_are_one_call_for_any_rows(launched: list[bool], determinism: None) -> None:
    for rows, num_launches in ((DOCUMENTS, 1), (TWICE, 1), (NOTHING, 0)):
        prepared = HOPPER.prepare(rows, CPU)
        first = attend(inputs(), prepared)
        assert launched == [True] * num_launches
        assert_same(attend(inputs(), prepared), first)
        launched.clear()


@pytest.mark.parametrize("rows", [DOCUMENTS, TWICE], ids=["queries apart", "queries shared"])
def test_deterministic_gradients_can_be_captured(launched: list[bool], determinism: None,
                                                 monkeypatch: pytest.MonkeyPatch, rows: TaskRows) -> None:
    new, known = HOPPER.prepare(rows, CPU), HOPPER.prepare(rows, CPU)
    expected = attend(inputs(), known)
    monkeypatch.setattr(hopper, "_capturing", lambda x: True)
    assert_same(attend(inputs(), known), expected)
    with pytest.raises(ValueError, match=r"no tables for .* \(6, 2, 16\) yet; run once before capturing"):
        attend(inputs(), new)


def test_a_launch_takes_all_multiprocessors_or_as_many_as_it_is_given(
    launched: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hopper, "multiprocessors", lambda device: 132)
    for given, taken in ((None, 132), (20, 20)):
        prepared = HopperKernel(num_sms=given).prepare(DOCUMENTS, CPU)
        attend(inputs(), prepared)
        assert [kind.tables.num_sms for kind in prepared.kinds.values()] == [taken]


def test_each_thread_has_launches_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch's storages are read while other threads run, as autograd's; streams have their own too."""
    monkeypatch.setattr(hopper_launch, "tensor_map", lambda *_: cuda_driver.TensorMap())
    kernel: Any = SimpleNamespace(launch=lambda grid, stream, *maps: [grid, stream, *maps])
    monkeypatch.setattr(hopper_launch, "forward_kernels", lambda *_: [kernel])
    q, k = torch.Size([9, 4, 64]), torch.Size([9, 2, 64])
    launches = hopper_launch.Launches(CPU, q, k, k, Masks(False, False), False, 132)
    place: Any = False, (16, (256, 64, 1)), (32, (128, 64, 1)), (48, (128, 64, 1))
    first, again, elsewhere, beside = (launches.forward(*whose, *place) for whose in ((1, 5), (1, 5), (2, 5), (1, 6)))
    assert first is not None and again is first
    assert elsewhere is not None and elsewhere[0] is not first[0]
    assert beside is not None and beside[0][:2] == [132, 6]  # type: ignore[index]


@pytest.mark.parametrize("scale", [0.0, -0.5, float("nan")])
def test_scales_that_are_not_positive_are_refused(launched: list[bool], scale: float) -> None:
    q, k, v, dout = inputs()
    prepared = HOPPER.prepare(DOCUMENTS, CPU)
    out, lse = HOPPER.forward(q, k, v, prepared, 0.5)
    with pytest.raises(ValueError, match=rf"scale={scale}; .*use kernel='varlen'"):
        HOPPER.forward(q, k, v, prepared, scale)
    with pytest.raises(ValueError, match=rf"scale={scale}; .*use kernel='varlen'"):
        HOPPER.backward(BackwardInputs(dout, q, k, v, out, lse), prepared, scale)


def named_in(cubin: bytes, signatures: dict[str, tuple[str, int, int]]) -> list[SimpleNamespace]:
    """Takes the place of loading a module: it has the functions that its text sections name."""
    assert all(f".text.{name}\0".encode() in cubin for name in signatures)
    return [SimpleNamespace(name=name) for name in signatures]


@pytest.mark.parametrize("group", [pytest.param(1, marks=pytest.mark.slow), 4, pytest.param(7, marks=pytest.mark.slow)])
@pytest.mark.parametrize("head_dim", TILES)
def test_sources_compile_without_serialised_products(head_dim: int, group: int, monkeypatch: pytest.MonkeyPatch,
                                                     tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """All variants; the compiler remarks, as C7510 to C7515 and others, where it makes one wgmma wait for another."""
    try:
        cuda_driver.nvrtc()
    except RuntimeError as error:
        pytest.skip(f"needs NVRTC: {error}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(hopper_variants, "load_functions", named_in)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    device, shape = torch.device("cuda", 0), (head_dim, group)
    keeps = TILES[head_dim].kept_blocks > 0
    heights = (False, True) if TILES[head_dim].tall_blocks > TILE_BLOCKS else (False,)
    with caplog.at_level(logging.WARNING, logger="distca"):
        for windowed, split in itertools.product((False, True), (False, True)):
            masks = Masks(windowed, False)
            for is_tall in heights:
                forward: Any = hopper_variants.forward_kernels.__wrapped__(device, *shape, masks, split, is_tall)
                assert [x.name for x in forward] == ["attention_forward", "attention_merge"][:1 + split]
            merge_keys = ["attention_merge_keys"] * split
            for deterministic in (False, True):
                mode = Mode(deterministic, False, split and deterministic, split)
                backward: Any = hopper_variants.backward_kernels.__wrapped__(device, *shape, masks, mode)
                dq = ["attention_dq" if deterministic else "attention_write_dq"]
                merge_dq = ["attention_merge_dq"] * mode.dq_split
                first = ["attention_delta", "attention_backward"]
                assert [x.name for x in backward] == [*first, *dq, *merge_keys, *merge_dq]
            if keeps:
                mode = Mode(True, True, False, split)
                backward = hopper_variants.backward_kernels.__wrapped__(device, *shape, masks, mode)
                assert [x.name for x in backward][1:] == ["attention_backward", "attention_kept_dq", *merge_keys]
    assert len(list(tmp_path.rglob("*.cubin"))) == 12 + 4 * len(heights) + 6 * keeps
    assert not re.search(r"C751[0-5]|serialized", caplog.text)
