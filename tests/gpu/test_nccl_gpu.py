"""Attention and training over NCCL, 2, 4 and 8 ranks of one GPU, each a host of its own to NCCL, which uses sockets.

Starting ranks takes longer than most checks do, so each number of ranks starts once: its processes make all checks of
attention and then train all runs, one after the other, and leave what they found in a folder. The same bodies run over
gloo on CPUs (slow there), which tells a mistake in a test from one that only NCCL shows.
"""

import json
import time
import traceback
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from distca.runtime.transport import C10dTransport
from distca.train.settings import Settings
from distca.train.settings.checks import check_settings
from tests.support.exchange_checks import ANYWHERE, AT_THE_END, ON_A_GPU, Ranks, ranks_on
from tests.support.processes import run_processes
from tests.support.training import logged, small_run, train, train_each

pytestmark = pytest.mark.timeout(600)  # the first test of a number of ranks waits for all that these do
NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(),
                            reason="needs an NVIDIA GPU; torch.cuda.is_available() is False")
MARKS = {"cuda": [pytest.mark.gpu, pytest.mark.multiprocess, NO_GPU],
         "cpu": [pytest.mark.slow, pytest.mark.multiprocess]}
BASE: dict[str, Any] = {"run__dtype": "float32", "run__steps": 3, "model__compile": "off", "optimizer__warmup_steps": 2}
DEEP: dict[str, Any] = {"model__layers": 8, "batch__micro_batches": 4, "attention__cost": "h200"}
ALONE: dict[str, dict[str, Any]] = {                             # what one rank trains
    "flat": {}, "deep": DEEP, "tied": {**DEEP, "model__tied": True},
    "bf16": {"run__dtype": "bfloat16", "model__heads": 4, "model__head_dim": 64}}
# By ranks: what they train alike, and settings.
RUNS: dict[int, dict[str, tuple[str, dict[str, Any]]]] = {
    1: {name: (name, {}) for name in ALONE},
    2: {"data": ("flat", {}),
        "data, kept": ("flat", {"attention__state": "keep", "parallel__fsdp": False, "batch__ping_pong": False})},
    4: {"data": ("bf16", {}),
        "data, transport auto": ("flat", {"attention__transport": "auto"}),
        "data, in two hops": ("flat", {"attention__ranks_per_node": 2}),
        "tensors and data": ("flat", {"parallel__tensor": 2}),
        "first steps": ("flat", {"run__steps": 2, "checkpoint__folder": "saved"}),
        "resumed on another mesh": ("flat", {"parallel__tensor": 2, "checkpoint__folder": "saved"}),
        "four stages": ("tied", {"parallel__pipeline": 4, "parallel__schedule": "interleaved_2"}),
        "four stages, same phase": ("deep", {"parallel__pipeline": 4, "parallel__schedule": "same_phase"}),
        "two stages of two": ("deep", {"parallel__pipeline": 2, "parallel__schedule": "interleaved_4",
                                       "model__recompute": "full"}),
        "two stages of two, 1f1b": ("deep", {"parallel__pipeline": 2, "parallel__schedule": "1f1b"})},
    8: {"data, in two hops": ("flat", {"attention__ranks_per_node": 4}),
        "stages, data and tensors": ("deep", {"parallel__pipeline": 2, "parallel__tensor": 2,
                                              "parallel__schedule": "interleaved_2",
                                              "model__recompute": "selective"})},
}
SERVED: dict[str, tuple[int, str, dict[str, Any]]] = {           # dedicated servers are processes outside the group
    "two stages and two servers": (4, "deep", {"parallel__pipeline": 2, "attention__dedicated": 2,
                                               "parallel__schedule": "interleaved_1"}),
    "four servers": (8, "flat", {"attention__dedicated": 4})}
CHECKS = {"cpu": (ANYWHERE, ()), "cuda": ((*ANYWHERE, *ON_A_GPU), AT_THE_END)}  # before and after the runs
Seen = tuple[Path, str]  # what a number of ranks left, and how they ended


def settings_of(folder: Path, device: str, ranks: int, name: str) -> Settings:
    alike, values = RUNS[ranks][name]
    if "checkpoint__folder" in values:
        values = {**values, "checkpoint__folder": str(folder / values["checkpoint__folder"])}
    return small_run(folder / name, ranks, run__device=device, **{**BASE, **ALONE[alike], **values})


def everything(transport: C10dTransport, device: str, folder: Path, runs: tuple[Settings, ...]) -> None:
    """On one of the ranks: checks, of which each leaves what was wrong, runs, and the checks that come last."""
    before, after = CHECKS[device] if transport.size > 1 else ((), ())
    for check in before:
        make(check, transport, device, folder)
    for settings in runs:
        began = time.monotonic()
        train_each(transport, (settings,))
        print(f"rank {transport.rank} of {transport.size}, {Path(settings.log.folder).name}: "
              f"{time.monotonic() - began:.1f} s", flush=True)
    for check in after:
        make(check, transport, device, folder)


def make(check: Callable[[Ranks], None], transport: C10dTransport, device: str, folder: Path) -> None:
    began, wrong = time.monotonic(), ""
    try:
        check(ranks_on(transport, device))
    except Exception:
        wrong = traceback.format_exc()
    (folder / f"{check.__name__}.{transport.rank}").write_text(wrong)
    print(f"rank {transport.rank} of {transport.size}, {check.__name__}: {time.monotonic() - began:.1f} s {wrong}",
          flush=True)
    dist.barrier()


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Seen]:
    @cache
    def once(device: str, ranks: int) -> Seen:
        folder = tmp_path_factory.mktemp(f"{device}-{ranks}")
        runs = tuple(settings_of(folder, device, ranks, name) for name in RUNS[ranks])
        for settings in runs:
            check_settings(settings)
        outcomes = run_processes(ranks, everything, device, folder, runs, timeout_seconds=60.0, deadline_seconds=240.0,
                                 nccl=device == "cuda")
        return folder, "; ".join(f"rank {rank}: {one.error or f'exit code {one.exit_code}'}"
                                 for rank, one in enumerate(outcomes))

    return once


@pytest.mark.parametrize(("device", "ranks", "name"), [
    pytest.param(device, ranks, check.__name__, marks=MARKS[device])
    for device, (before, after) in CHECKS.items() for ranks in RUNS if ranks > 1 for check in (*before, *after)])
def test_attention_is_exact(device: str, ranks: int, name: str, seen: Callable[[str, int], Seen]) -> None:
    folder, ended = seen(device, ranks)
    for rank in range(ranks):
        said = folder / f"{name}.{rank}"
        assert said.exists(), f"rank {rank} did not end this check; {ended}"
        assert not said.read_text(), f"rank {rank}: {said.read_text()}"


@pytest.mark.parametrize(("device", "ranks", "name"), [
    pytest.param(device, ranks, name, marks=MARKS[device])
    for device in CHECKS for ranks in RUNS if ranks > 1 for name in RUNS[ranks]])
def test_training_has_the_losses_of_one_rank(
    device: str, ranks: int, name: str, seen: Callable[[str, int], Seen]
) -> None:
    (alone, _), (folder, ended), alike = seen(device, 1), seen(device, ranks), RUNS[ranks][name][0]
    assert (folder / name / "steps.jsonl").exists(), ended
    assert compared(folder / name, alone, alike) == {"first steps": [1, 2], "resumed on another mesh": [3]}.get(
        name, [1, 2, 3])


@pytest.mark.parametrize(("device", "name"), [
    pytest.param(device, name, marks=MARKS[device]) for device in CHECKS for name in SERVED])
def test_servers_change_no_loss(device: str, name: str, seen: Callable[[str, int], Seen], tmp_path: Path) -> None:
    (alone, _), (ranks, alike, values) = seen(device, 1), SERVED[name]
    train(small_run(tmp_path, ranks, run__device=device, **{**BASE, **ALONE[alike], **values}))
    assert compared(tmp_path, alone, alike) == [1, 2, 3]
    members = json.loads((tmp_path / "members.json").read_text())["members"]
    assert [one["role"] for one in members].count("server") == values["attention__dedicated"]


def compared(folder: Path, alone: Path, alike: str) -> list[int]:
    """The steps of a run, whose losses must be those of the same run on one rank."""
    steps, losses = (logged(folder, about) for about in ("step", "loss"))
    expected = [logged(alone / alike, "loss")[step - 1] for step in steps]
    assert losses == pytest.approx(expected, abs=1e-2 if alike == "bf16" else 1e-5)
    return steps
