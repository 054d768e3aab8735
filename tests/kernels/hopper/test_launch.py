"""Launches are given the tensor maps and numbers that the kernels' signatures take, in every mode; nothing runs."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from distca.kernels import TaskRows
from distca.kernels.hopper import driver, launch, variants
from distca.kernels.hopper import kernel as hopper
from distca.kernels.hopper.buffers import Kept
from distca.kernels.hopper.kernel import HopperKernel
from distca.kernels.hopper.variants import TILES
from distca.kernels.interface import BackwardInputs, Scores
from tests.support.attention import determinism

CPU = torch.device("cpu")


@dataclass
class Recorded:
    """A kernel that packs what it is launched with."""

    name: str
    types: str
    ran: list[str]

    def launch(self, grid: int, stream: int, *maps: Any) -> Callable[..., None]:
        assert len(maps) == self.types.count("T") and grid > 0, self.name
        layout, _ = driver._layout(self.types)

        def run(*numbers: float) -> None:
            layout.pack(*numbers)
            self.ran.append(self.name.removeprefix("attention_"))

        return run


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that were launched, in order."""
    names: list[str] = []
    monkeypatch.setattr(variants, "_loaded", lambda device, sources, defines, signatures: [
        Recorded(name, types, names) for name, (types, _, _) in signatures.items()])
    for kernels in ("forward_kernels", "backward_kernels"):
        monkeypatch.setattr(launch, kernels, getattr(variants, kernels).__wrapped__)
    monkeypatch.setattr(hopper, "launches_of", launch.Launches)
    monkeypatch.setattr(launch, "tensor_map", lambda *_: None)
    monkeypatch.setattr(launch, "_empty_strided", None)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 7, raising=False)
    monkeypatch.setattr(hopper, "multiprocessors", lambda device: 132)
    return names


@pytest.mark.parametrize("head_dim", TILES)
@pytest.mark.parametrize("scores", [Scores(), Scores(window=100), Scores(softcap=50.0)], ids=["", "window", "softcap"])
@pytest.mark.parametrize("strided", [False, True])
def test_kernels_get_what_they_take(ran: list[str], head_dim: int, scores: Scores, strided: bool) -> None:
    value_dim = TILES[head_dim].value_dim
    for tasks, split in ((TaskRows.documents([300, 40]), False), (TaskRows.aligned([0], [32], [0], [60_000]), True)):
        if split and scores.window is not None:
            continue
        shapes = ((340, 8, head_dim), (60_000, 2, head_dim), (60_000, 2, value_dim), (340, 8, value_dim))
        q, k, v, dout = (torch.empty(*shape[:2], shape[2] + 1, dtype=torch.bfloat16)[..., :-1] if strided else
                         torch.empty(shape, dtype=torch.bfloat16) for shape in shapes)
        for deterministic in (False, True):
            with determinism(deterministic):
                prepared = HopperKernel().prepare(tasks, CPU, scores)
                out, lse = HopperKernel().forward(q, k, v, prepared)
                inputs = BackwardInputs(dout, q, k, v, out, lse)
                HopperKernel().backward(inputs, prepared)
                merge = ["merge"] if split else []
                apart = deterministic or TILES[head_dim].dq_apart
                merge_dq = ["merge_dq"] if split and apart else []
                assert ran == ["forward", *merge, "delta", "backward", "dq" if apart else "write_dq", *merge_dq]
                ran.clear()
                tables = prepared.kind(q, k, v).tables
                vars(tables)["kept"] = Kept(tables.backward, num_places=5, heads=1, num_bytes=64)._replace(
                    table=tables.backward._replace(offsets=(16, 20)))
                HopperKernel().backward(inputs, prepared)
                assert ran == ["delta", *["backward", "kept_dq"] * 2]  # one KV head at a time
                ran.clear()
