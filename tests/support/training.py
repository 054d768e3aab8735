"""Whole runs of the trainer on processes that are forked, which start in no time; the launcher has tests of its own."""

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from distca.train.servers import open_pool, serve
from distca.train.settings import Settings, num_roles, num_training
from distca.train.settings.checks import check_settings
from distca.train.trainer import Trainer
from tests.support.pools import SECRET, read_address, write_address
from tests.support.processes import ProcessOutcome, run_processes, values

SMALL: dict[str, Any] = {"model.name": "tiny", "run.dtype": "float64", "run.device": "cpu", "run.threads": 1,
         "run.timeout_seconds": 120, "optimizer.warmup_steps": 3, "data.max_document": 700}
NARROW: dict[str, Any] = {  # for `small_run`: a twelfth of tiny's matrix products, half its heads
    "model__hidden": 64, "model__heads": 4, "model__kv_heads": 2, "model__head_dim": 32, "model__ffn": 176}


def small_run(folder: Path, ranks: int, tokens: int = 1024, **values: Any) -> Settings:
    """Settings of a run with `tokens` tokens in a micro-batch over all data ranks; values are `section__field`."""
    chosen = Settings().with_values({**SMALL, "run.ranks": ranks, "log.folder": str(folder), **{
        name.replace("__", "."): value for name, value in values.items()}})
    groups = (ranks - chosen.attention.dedicated) // (chosen.parallel.tensor * chosen.parallel.pipeline)
    return chosen.with_values({"batch.tokens_per_rank": tokens // groups})


def train_each(transport: Any, runs: tuple[Settings, ...]) -> None:
    """On one of the ranks: the runs one after the other."""
    for settings in runs:
        device = torch.device("cuda", 0) if settings.run.device == "cuda" else torch.device("cpu")
        where = Path(settings.log.folder, "join.json")
        if transport is not None:
            if num_roles(settings):
                where.parent.mkdir(parents=True, exist_ok=True)
            publish = partial(write_address, where)
            Trainer(settings, device, open_pool(settings, device, SECRET, publish)).train()
        else:
            serve(settings, device, SECRET, partial(read_address, where))


def outcomes_of(*runs: Settings, body: Callable[..., Any] = train_each) -> list[ProcessOutcome]:
    """How the ranks ended that trained these runs, all on as many ranks, one after the other."""
    for settings in runs:
        check_settings(settings)
    return run_processes(runs[0].run.ranks, body, runs, timeout_seconds=120, deadline_seconds=280,
                         nccl=runs[0].run.device == "cuda", in_group=num_training(runs[0], runs[0].run.ranks))


def train(*runs: Settings, body: Callable[..., Any] = train_each) -> list[Any]:
    """Train the runs, all on as many ranks; what `body` returned on each rank."""
    return values(outcomes_of(*runs, body=body))


def command_of(settings: Settings, folder: Path) -> list[str]:
    """The same run by the command; its settings are left in a folder."""
    path = folder / f"run-{os.urandom(4).hex()}.toml"
    path.write_text(settings.to_toml())
    return ["train", str(path)]


def logged(folder: Path | str, name: str) -> list[Any]:
    """A figure of every step, None where a step has none."""
    return [json.loads(line).get(name) for line in Path(folder, "steps.jsonl").read_text().splitlines()]
