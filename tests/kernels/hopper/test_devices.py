"""The Hopper kernel runs on its tensors' device and that device's current stream, whichever device is current."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from distca.kernels import TaskRows
from distca.kernels.hopper.buffers import Counters
from distca.kernels.hopper.kernel import HopperKernel
from distca.kernels.interface import BackwardInputs
from distca.validation import UserError

CPU = torch.device("cpu")


class OnGpu(SimpleNamespace):
    """What the kernel asks a tensor before anything else."""

    is_cuda = True

    def get_device(self) -> int:
        return int(self.device.index)


@pytest.fixture
def entered(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Devices that were made current, with device 0 current before; nothing is computed."""
    devices, current = [], [0]

    @contextmanager
    def device(to: torch.device) -> Iterator[None]:
        devices.append(to.index)
        before, current[0] = current[0], to.index
        try:
            yield
        finally:
            current[0] = before

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: current[0], raising=False)
    return devices


class Reached(Exception):
    pass


class Prepared:
    def kind(self, *tensors: Any) -> None:
        raise Reached


@pytest.mark.parametrize(("index", "made_current"), [(0, []), (1, [1])])
def test_calls_make_the_tensors_device_current(entered: list[int], index: int, made_current: list[int]) -> None:
    x: Any = OnGpu(device=torch.device("cuda", index))
    prepared: Any = Prepared()
    with pytest.raises(Reached):
        HopperKernel().forward(x, x, x, prepared)
    with pytest.raises(Reached):
        HopperKernel().backward(BackwardInputs(x, x, x, x, x, x), prepared)
    assert entered == 2 * made_current


def test_tasks_belong_to_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, x = HopperKernel(num_sms=132), torch.empty(4, 1, 64, dtype=torch.bfloat16)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    prepared = kernel.prepare(TaskRows.documents([4]), torch.device("cuda"))
    assert prepared.device == torch.device("cuda", 3)
    with pytest.raises(UserError, match="q is on cpu, the tasks were prepared for cuda:3"):
        kernel.forward(x, x, x, prepared)


def test_each_stream_has_counters_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first launch on a stream waits for the copies of the tables; a capture takes the first stream's counters."""
    done: list[Any] = []
    capturing = [False]
    stream = SimpleNamespace(cuda_stream=7, wait_event=lambda event: done.append("waits"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: capturing[0], raising=False)
    table: Any = SimpleNamespace(record_stream=lambda on: done.append(on.cuda_stream))
    event: Any = object()
    counters = Counters([table, table], event, torch.zeros(3, dtype=torch.int32), {}, {})
    counters.addresses[7] = counters.first.data_ptr()
    assert counters.address(7) == counters.first.data_ptr() and not done
    stream.cuda_stream, capturing[0] = 9, True
    assert counters.address(9) == counters.first.data_ptr() and not done
    capturing[0] = False
    other = counters.address(9)
    assert other == counters.address(9) != counters.address(7) and done == ["waits", 9, 9]
    assert counters.others[9].tolist() == [0, 0, 0]


def test_without_a_gpu_there_is_one_set() -> None:
    counters = Counters.of([], CPU)
    assert counters.address(7) == counters.address(9) == counters.first.data_ptr()
