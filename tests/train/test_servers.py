"""Runs whose dedicated servers are killed, stopped, cut off, leave and come: losses and weights keep their bits.

Bits are compared because roles, their cuts and the order of merging do not depend on who is there, and everybody
computes with one thread on tensors of the same shapes and offsets.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from distca.train.settings import Settings
from tests.support.faults import Servers
from tests.support.training import logged, small_run, train

pytestmark = pytest.mark.multiprocess
STEPS = 24


def served_run(folder: Path, trainers: int, roles: int, **values: Any) -> Settings:
    """A run whose servers are processes of the test, which it finds by a file."""
    return small_run(folder / "log", trainers, 768, **{
        "attention__roles": roles, "attention__patience": 0.6, "run__steps": STEPS, "batch__micro_batches": 2,
        "model__layers": 2, "model__hidden": 64, "model__ffn": 64, "model__heads": 4, "model__kv_heads": 2,
        "optimizer__warmup_steps": 2, "checkpoint__folder": str(folder / "saved"), "checkpoint__every": 10, **values})


def results(folder: Path) -> tuple[list[float], list[float], dict[str, bytes]]:
    """Losses and gradient norms of every step, and the bytes of the last checkpoint's tensors."""
    last = max((folder / "saved").glob("step_*"), key=lambda path: int(path.name.rpartition("_")[2]))
    weights = {path.name: path.read_bytes() for path in last.glob("*.safetensors")}
    assert weights
    return logged(folder / "log", "loss"), logged(folder / "log", "grad_norm"), weights


def disturbed(folder: Path, count: int, seed: int, pause_seconds: float, **values: Any) -> tuple[Servers, Any]:
    settings = served_run(folder, **values)
    servers = Servers(folder / "log" / "join.json", count, seed, pause_seconds)
    servers.inject()
    try:
        train(settings)
    finally:
        left = servers.close()
    assert left == 0, f"{left} servers outlived the run after {servers.done}"
    return servers, results(folder)


WAYS: dict[str, dict[str, Any]] = {
    "ping-pong": {"trainers": 2, "roles": 2},
    "pipeline": {"trainers": 2, "roles": 3, "parallel__pipeline": 2, "run__dtype": "float32"},
    "one trainer": {"trainers": 1, "roles": 4, "batch__ping_pong": False},
    "tensor": {"trainers": 2, "roles": 4, "parallel__tensor": 2, "run__dtype": "float32"},
    "three trainers": {"trainers": 3, "roles": 3, "attention__cost": "h200"},
}


def calm(folder: Path, way: str) -> Any:
    train(served_run(folder, **WAYS[way]))                       # without any server: homes run the roles
    return results(folder)


@pytest.mark.parametrize("way", ["ping-pong", "pipeline"])
def test_faults_change_no_bit(way: str, tmp_path: Path) -> None:
    """Ten faults each, at any moment of forward, backward, exchange, plan agreement and save."""
    servers, found = disturbed(tmp_path / "disturbed", 2, 1, 0.25, **WAYS[way], run__steps=STEPS)
    assert found == calm(tmp_path / "calm", way)
    assert sum(logged(tmp_path / "disturbed" / "log", "faults")) > 0, servers.done
