"""A small model that trains, saves and resumes: what tests of checkpoints share."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from distca.train.checkpoint import checkpointer as checkpoint
from distca.train.checkpoint import files as checkpoint_files
from distca.train.checkpoint.checkpointer import Checkpointer
from distca.train.checkpoint.files import describe
from distca.train.checkpoint.folder import judge, step_folders

WAIT_SECONDS = 30


class Small(nn.Module):
    """Sizes that no number of ranks divides, a norm shorter than four ranks, a tied head, a buffer, dropout."""

    scale: torch.Tensor
    row = 0  # of the data that this rank trains on

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, width)
        self.up = nn.Linear(width, 14)
        self.down = nn.Linear(14, width)
        self.squeeze = nn.Linear(width, 3)
        self.norm = nn.LayerNorm(3)
        self.expand = nn.Linear(3, width)
        self.head = nn.Linear(width, 9, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.full((2, 5), 0.5))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        x = x + self.down(nn.functional.dropout(torch.relu(self.up(x)), 0.3, self.training))
        return self.head(x + self.expand(self.norm(self.squeeze(x))) * self.scale[0, 0])


def build(kind: str = "plain", seed: int = 0, width: int = 6,
          **options: Any) -> tuple[Small, torch.optim.AdamW]:
    torch.manual_seed(seed)
    model = Small(width)
    if kind == "tensor":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        parallelize_module(model, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if kind != "plain":
        sharded: dict[str, Any] = {} if kind == "data" else {"mesh": mesh["data"]}
        for part in (model.up, model.down):
            fully_shard(part, **sharded)
        fully_shard(model, **sharded)
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    style: dict[str, Any] = {"foreach": True} if kind == "tensor" else {"fused": True}
    optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
                                  lr=1e-2, **style, **options)
    model.row = dist.get_rank() // (2 if kind == "tensor" else 1) if dist.is_initialized() else 0
    torch.manual_seed(100 * seed + model.row)
    return model, optimizer


def train(model: Small, optimizer: torch.optim.AdamW, steps: range) -> None:
    for step in steps:
        tokens = torch.randint(0, 9, (12,), generator=torch.Generator().manual_seed(1000 * step + model.row))
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 / (1 + step)
        nn.functional.cross_entropy(model(tokens), tokens.roll(-1)).backward()
        if dist.is_initialized() and not isinstance(model, FSDPModule):
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def everything(model: Small, optimizer: torch.optim.AdamW) -> dict[str, torch.Tensor]:
    """Every tensor of a run, whole."""
    parts: Any = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    found = {f"model.{name}": value.clone() for name, value in parts[0].items()}
    for name, values in parts[1]["state"].items():
        found |= {f"{name}.{key}": value.clone() for key, value in values.items()}
    return found


def assert_same(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Bit for bit: what was loaded is a copy, and as many ranks go on with the same operations on the same shapes."""
    assert got.keys() == expected.keys() and len(got) > 20
    different = [name for name, value in expected.items() if not torch.equal(got[name], value)]
    assert not different


class Gate:
    """Holds every write until it is opened, so that a save is surely in flight."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()

        def wait_and_write(path: Path, tensors: Any) -> Any:
            assert self.open.wait(WAIT_SECONDS)
            return checkpoint_files.write_file(path, tensors)

        patch.setattr(checkpoint, "write_file", wait_and_write)


def in_flight(saver: Checkpointer) -> bool:
    return saver._pending is not None and not saver._pending[1].done()


def newest(folder: Path, model: Small | None = None) -> Path:
    """The newest folder that is good by its manifest."""
    expected = describe(model or build()[0])
    return [path for path in step_folders(Path(folder)) if judge(path, expected, {})[0] == "good"][-1]


def resumed(folder: Path | str, pair: tuple[Small, torch.optim.AdamW],
            **options: Any) -> checkpoint.TrainState:
    """What a run that resumes gets; the folder is free again."""
    saver = Checkpointer(folder, *pair, **options)
    try:
        state = saver.resume()
        assert state is not None
        return state
    finally:
        saver.close()


def save_steps(folder: Path, steps: tuple[int, ...], keep: int = 10, width: int = 6,
               close: bool = True) -> tuple[tuple[Small, torch.optim.AdamW], Checkpointer]:
    run = build(width=width)
    saver = Checkpointer(folder, *run, keep=keep)
    for step in steps:
        train(*run, range(step, step + 1))
        saver.save(step, {"at": step})
    saver.finish()
    if close:
        saver.close()
    return run, saver
