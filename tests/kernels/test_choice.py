"""Choosing a kernel: auto says once what it took, a name is refused with the reason, tensors are checked by all."""

import logging

import pytest
import torch

import distca.kernels
from distca.kernels import TaskRows, choose, kernel_named


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 64])
def test_auto_on_the_cpu_is_sdpa(dtype: torch.dtype, window: int | None) -> None:
    assert choose("cpu", dtype, 64, window).name == "sdpa"


def test_auto_says_once_what_runs_and_what_does_not(caplog: pytest.LogCaptureFixture, monkeypatch) -> None:
    monkeypatch.setattr(distca.kernels, "_announced", set())
    with caplog.at_level(logging.INFO, logger="distca"):
        for _ in range(3):
            choose("cpu", torch.float32, 64)
    assert len(caplog.messages) == 1
    assert "kernel sdpa" in caplog.messages[0]
    assert "varlen: " in caplog.messages[0]


@pytest.mark.parametrize("name", ["dense", "sdpa"])
def test_a_name_that_fits_is_taken(name: str) -> None:
    assert choose("cpu", torch.float64, 8, name=name) is kernel_named(name)


@pytest.mark.parametrize("name", ["varlen", "cudnn"])
def test_a_name_that_does_not_fit_is_refused_with_the_reason(name: str) -> None:
    with pytest.raises(ValueError, match=f"kernel='{name}' cannot run here: .*cpu.*auto"):
        choose("cpu", torch.bfloat16, 64, name=name)


def test_an_unknown_name_lists_the_known() -> None:
    with pytest.raises(ValueError, match=r"kernel='fast'.*cudnn, varlen, sdpa, dense"):
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
        kernel.backward(q, q, k, k, q, q[..., 0], prepared)


def test_dense_attention_checks_the_lengths() -> None:
    q = torch.zeros(4, 2, 8)
    with pytest.raises(ValueError, match="lengths add up to 5, q has 4"):
        distca.kernels.dense_attention(q, q, q, [2, 3])
