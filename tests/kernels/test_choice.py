"""Choosing a kernel: auto says once what it took, a name is refused with the reason, tensors are checked by all.

auto's order is that of the seconds measured on the device, for the head dim and windowed or not; else the registry's.
"""

import dataclasses
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import distca.kernels
from distca.kernels import KERNELS, Speed, TaskRows, choose, fastest_first, kernel_named, measured
from distca.kernels import flash as fa4
from distca.kernels.hopper import kernel as hopper
from distca.kernels.hopper.variants import TILES
from distca.kernels.interface import BackwardInputs, Scores
from distca.kernels.sdpa import SdpaKernel

GPU = torch.device("cuda")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 64])
def test_auto_on_the_cpu_is_sdpa(dtype: torch.dtype, window: int | None) -> None:
    assert choose("cpu", dtype, 64, window).name == "sdpa"


def test_auto_says_once_what_runs(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distca.kernels, "_announced", set())
    with caplog.at_level(logging.INFO, logger="distca"):
        for _ in range(3):
            choose("cpu", torch.float32, 64)
    assert caplog.messages == ["attention kernel sdpa for torch.float32, head_dim 64 on cpu"]  # none is for CPUs but it


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A GPU to be described, with NVRTC and flash-attn-4 at hand; nothing has been announced yet."""
    described = SimpleNamespace(capability=(9, 0), nvrtc_error=None, has_fa4=True)

    def nvrtc() -> None:
        if described.nvrtc_error is not None:
            raise RuntimeError(described.nvrtc_error)

    monkeypatch.setattr(distca.kernels, "_announced", set())
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: described.capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA Made Up")
    monkeypatch.setattr(hopper, "nvrtc", nvrtc)
    monkeypatch.setattr(fa4, "is_installed", lambda: described.has_fa4)
    return described


@pytest.mark.parametrize(
    ("described", "dtype", "head_dim", "window", "taken", "reason"),
    [
        ({"capability": (8, 0)}, torch.bfloat16, 128, None, "varlen", "Made Up is compute capability 8.0, not 9.0"),
        ({"capability": (10, 0)}, torch.bfloat16, 128, None, "fa4", "Made Up is compute capability 10.0, not 9.0"),
        ({"capability": (10, 0)}, torch.bfloat16, 128, 64, "fa4", "Made Up is compute capability 10.0, not 9.0"),
        ({"capability": (10, 0), "has_fa4": False}, torch.bfloat16, 64, None, "varlen", "is compute capability 10.0"),
        ({"nvrtc_error": "libnvrtc cannot be loaded"}, torch.bfloat16, 128, None, "fa4", "libnvrtc cannot be loaded"),
        ({}, torch.float16, 128, None, "fa4", "dtype is torch.float16; give bfloat16"),
        ({}, torch.bfloat16, 96, None, "fa4", "head_dim is 96; give 64, 128 or 256"),
    ],
)
def test_auto_says_once_why_it_is_not_hopper(
    gpu: SimpleNamespace, caplog: pytest.LogCaptureFixture, described: dict[str, Any], dtype: torch.dtype,
    head_dim: int, window: int | None, taken: str, reason: str,
) -> None:
    vars(gpu).update(described)
    with caplog.at_level(logging.INFO, logger="distca"):
        assert [choose("cuda", dtype, head_dim, window).name for _ in range(3)] == [taken] * 3
    assert len(caplog.messages) == 1
    assert f"attention kernel {taken} for" in caplog.messages[0]
    assert "(not hopper: " in caplog.messages[0] and reason in caplog.messages[0]
    with pytest.raises(ValueError, match="kernel='hopper' cannot run here: ") as refused:
        choose("cuda", dtype, head_dim, window, name="hopper")
    assert reason in str(refused.value)


def test_a_softcap_is_for_kernels_that_have_it(
    gpu: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    assert choose("cpu", torch.float32, 64, softcap=50.0) == SdpaKernel()
    for head_dim in (64, 128, 256):
        assert choose("cuda", torch.bfloat16, head_dim, 64, softcap=30.0).name == "hopper"
    gpu.has_fa4 = False
    with caplog.at_level(logging.INFO, logger="distca"):
        assert choose("cuda", torch.float16, 128, softcap=50.0) == SdpaKernel()
    assert "softcap 50.0" in caplog.text and "fa4: flash-attn-4 is not installed; pip install" in caplog.text
    with pytest.raises(ValueError, match=r"'varlen' cannot run here: softcap is 50\.0, it takes None; use "):
        choose("cuda", torch.bfloat16, 128, name="varlen", softcap=50.0)
    with pytest.raises(ValueError, match=r"softcap=0\.0; give a positive number, or None"):
        choose("cpu", torch.float32, 64, softcap=0.0)
    gpu.has_fa4 = True
    for head_dim in (128, 256):
        assert choose("cuda", torch.float16, head_dim, 64, softcap=30.0) == fa4.Fa4Kernel()
    gpu.capability = (10, 0)
    assert choose("cuda", torch.bfloat16, 128, softcap=30.0).name == "fa4"
    with pytest.raises(ValueError, match=r"softcap is 30\.0, for which FlashAttention-4 has no backward with"):
        choose("cuda", torch.bfloat16, 256, name="fa4", softcap=30.0)


@pytest.mark.parametrize(("capability", "taken", "taken_without_fa4"), [
    ((8, 0), {64: "varlen", 128: "varlen", 192: "varlen", 256: "varlen"}, {128: "varlen"}),
    ((9, 0), {64: "hopper", 96: "fa4", 128: "hopper", 192: "fa4", 256: "hopper"}, {96: "varlen", 192: "varlen"}),
    ((10, 0), {64: "fa4", 128: "fa4", 192: "varlen", 256: "fa4"}, {128: "varlen", 256: "varlen"}),
    ((12, 0), {64: "fa4", 128: "fa4", 192: "varlen", 256: "varlen"}, {128: "varlen"}),
])
def test_what_runs_where_nobody_measured(
    gpu: SimpleNamespace, capability: tuple[int, int], taken: dict[int, str], taken_without_fa4: dict[int, str]
) -> None:
    """By head dim, as the table in docs/design/kernels.md says."""
    gpu.capability = capability
    assert {dim: choose("cuda", torch.bfloat16, dim).name for dim in taken} == taken
    wide_keys = "hopper" if capability == (9, 0) else "sdpa"
    assert choose("cuda", torch.bfloat16, 192, value_dim=128).name == wide_keys
    gpu.has_fa4 = False
    assert {dim: choose("cuda", torch.bfloat16, dim).name for dim in taken_without_fa4} == taken_without_fa4


@pytest.mark.parametrize("softcap", [None, 30.0])
def test_flash_attention_4_is_told_of_the_softcap(softcap: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []

    def forward(q: torch.Tensor, *_: Any, softcap: float | None, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        told.append(softcap)
        return q, q.new_zeros(q.shape[1::-1])

    def backward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, softcap: float, **__: Any) -> Any:
        told.append(softcap)
        return q, k, v

    monkeypatch.setattr(fa4, "_interface", lambda: SimpleNamespace(_flash_attn_fwd=forward, _flash_attn_bwd=backward))
    kernel = fa4.Fa4Kernel()
    prepared = kernel.prepare(TaskRows.documents([4]), torch.device("cpu"), Scores(softcap=softcap))
    q, k = torch.zeros(4, 4, 8), torch.zeros(4, 2, 8)
    out, lse = kernel.forward(q, k, k, prepared)
    kernel.backward(BackwardInputs(q, q, k, k, out, lse), prepared)
    assert told == [softcap, softcap or 0.0]                     # each direction has a word of its own for none


@pytest.mark.parametrize("window", [None, 64])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_auto_on_hopper_is_hopper(
    gpu: SimpleNamespace, caplog: pytest.LogCaptureFixture, head_dim: int, window: int | None
) -> None:
    with caplog.at_level(logging.INFO, logger="distca"):
        assert [choose("cuda", torch.bfloat16, head_dim, window).name for _ in range(3)] == ["hopper"] * 3
    assert len(caplog.messages) == 1 and "attention kernel hopper for" in caplog.messages[0]
    assert "not" not in caplog.messages[0]


@pytest.mark.parametrize("name", ["dense", "sdpa"])
def test_a_name_that_fits_is_taken(name: str) -> None:
    assert choose("cpu", torch.float64, 8, name=name) is kernel_named(name)


@pytest.mark.parametrize("name", ["varlen", "fa4", "hopper"])
def test_a_name_that_does_not_fit_is_refused_with_the_reason(name: str) -> None:
    with pytest.raises(ValueError, match=f"kernel='{name}' cannot run here: .*cpu.*auto"):
        choose("cpu", torch.bfloat16, 64, name=name)


def test_an_unknown_name_lists_the_known() -> None:
    with pytest.raises(ValueError, match=r"kernel='fast'.*auto or one of hopper, fa4, varlen, sdpa, dense"):
        kernel_named("fast")


def test_integers_are_nobodys() -> None:
    with pytest.raises(ValueError, match=r"no kernel takes torch\.int32"):
        choose("cpu", torch.int32, 64)


@pytest.mark.parametrize("name", ["dense", "sdpa"])
def test_kernels_check_their_inputs(name: str) -> None:
    kernel = kernel_named(name)
    prepared = kernel.prepare(TaskRows.documents([4]), torch.device("cpu"))
    q, k = torch.zeros(4, 4, 8), torch.zeros(4, 3, 8)
    with pytest.raises(ValueError, match="4 heads"):
        kernel.forward(q, k, k, prepared)
    with pytest.raises(ValueError, match="4 heads"):
        kernel.backward(BackwardInputs(q, q, k, k, q, q[..., 0]), prepared)


def test_dense_attention_checks_the_lengths() -> None:
    q = torch.zeros(4, 2, 8)
    with pytest.raises(ValueError, match="lengths add up to 5, q has 4"):
        distca.kernels.dense_attention(q, q, q, [2, 3])


@pytest.fixture
def speeds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    rows = [
        Speed("hopper", 128, False, 500.0, 300.0),
        Speed("varlen", 128, False, 600.0, 250.0),               # faster forward, slower in all
        Speed("fa4", 128, False, 400.0, 500.0),                # the fastest: backward has more to do
        Speed("varlen", 128, True, 400.0, 400.0),
        Speed("hopper", 128, True, 300.0, 300.0),
    ]
    content = {"devices": {"NVIDIA Known": {"speeds": [dataclasses.asdict(row) for row in rows]}}}
    (tmp_path / "measured.json").write_text(json.dumps(content))
    monkeypatch.setattr(distca.kernels, "MEASURED", tmp_path / "measured.json")
    measured.cache_clear()
    yield
    measured.cache_clear()


@pytest.mark.parametrize(
    "device, dtype, head_dim, window, expected",
    [
        ("NVIDIA Known", torch.bfloat16, 128, None, ["fa4", "hopper", "varlen", "sdpa", "dense"]),
        ("NVIDIA Known", torch.bfloat16, 128, 64, ["varlen", "hopper", "fa4", "sdpa", "dense"]),
        ("NVIDIA Known", torch.bfloat16, 64, None, ["hopper", "fa4", "varlen", "sdpa", "dense"]),
        ("NVIDIA Known", torch.float16, 128, None, ["hopper", "fa4", "varlen", "sdpa", "dense"]),
        ("NVIDIA New", torch.bfloat16, 128, None, ["hopper", "fa4", "varlen", "sdpa", "dense"]),
    ],
)
def test_kernels_are_ordered_by_forward_and_backward_together(
    speeds: None, monkeypatch: pytest.MonkeyPatch, device: str, dtype: torch.dtype, head_dim: int, window: int | None,
    expected: list[str],
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: device)
    assert fastest_first(GPU, dtype, head_dim, window) == expected


def test_a_cpu_asks_for_no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distca.kernels, "measured", lambda: pytest.fail("the table was read"))
    assert fastest_first(torch.device("cpu"), torch.bfloat16, 128, None) == list(KERNELS)


@pytest.mark.parametrize("window", [None, 4_096])
@pytest.mark.parametrize("head_dim", TILES)
def test_every_head_dim_of_ours_has_been_measured(head_dim: int, window: int | None) -> None:
    speeds = [speed for speed in measured()["NVIDIA H200"] if speed.head_dim == head_dim
              and speed.windowed == (window is not None)]
    assert "hopper" in {speed.kernel for speed in speeds}


def test_the_shipped_figures_name_kernels_that_exist() -> None:
    for device, speeds in measured().items():
        assert device.startswith("NVIDIA ")
        for speed in speeds:
            assert kernel_named(speed.kernel).name == speed.kernel
            assert 0 < speed.backward_tflops < 1000 and 0 < speed.forward_tflops < 1000
