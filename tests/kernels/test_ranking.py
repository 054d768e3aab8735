"""auto's order: by what was measured on the device, for the head dim and windowed or not; else as registered."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from distca import kernels
from distca.kernels import KERNELS, Speed, fastest_first, kernel_named, measured
from distca.kernels.hopper.variants import TILES

GPU = torch.device("cuda")


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
    monkeypatch.setattr(kernels, "MEASURED", tmp_path / "measured.json")
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
    monkeypatch.setattr(kernels, "measured", lambda: pytest.fail("the table was read"))
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
