"""Where a run's figures go besides its own log: TensorBoard, Weights & Biases. Neither is needed to train.

Rank 0 alone writes to them, the same figures under the same names as in steps.jsonl; one that is unknown is left out.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from distca.train.metrics import StepRecord
from distca.train.settings import Settings
from distca.validation import UserError

LOGGED = ("loss", "lr", "grad_norm", "tokens_per_second", "seconds", "work_before", "work_after", "bytes_per_layer",
          "exposed_seconds", "host_seconds", "memory_bytes", "plan_seconds", "bubble_share", "served_in_bubbles",
          "attention_seconds", "attention_seconds_max", "linear_seconds", "mfu", "eval_loss", "tolerance")


class Tracker(Protocol):
    def step(self, record: StepRecord) -> None: ...

    def close(self, finished: bool) -> None: ...


def trackers_for(settings: Settings, folder: Path) -> list[Tracker]:
    """Those that the settings name; a ValueError in one line where one cannot start."""
    found: list[Tracker] = []
    if settings.log.tensorboard:
        found.append(_TensorBoard(folder))
    if settings.log.wandb:
        found.append(_WeightsAndBiases(settings, folder))
    return found


def figures(record: StepRecord) -> dict[str, float]:
    """What is known of a step, by name; speeds by the server's number behind a slash."""
    known = {name: value for name in LOGGED if (value := getattr(record, name)) is not None}
    return known | {f"server_speed/{server}": speed for server, speed in enumerate(record.server_speed or ())}


class _TensorBoard:
    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise UserError("log.tensorboard is true but tensorboard is not installed; run: pip install tensorboard, "
                            "or set it to false") from None
        self.writer: Any = SummaryWriter(str(folder))

    def step(self, record: StepRecord) -> None:
        for name, value in figures(record).items():
            self.writer.add_scalar(name, value, record.step)

    def close(self, finished: bool) -> None:
        self.writer.close()


class _WeightsAndBiases:
    """One W&B run for every start, named and grouped by the log folder. WANDB_MODE=offline keeps it on this machine."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        project = settings.log.wandb
        try:
            import wandb
        except ImportError:
            raise UserError(f"log.wandb is {project!r} but wandb is not installed; run: pip install wandb, or set it "
                            "to ''") from None
        name = folder.resolve().name
        try:
            self.run: Any = wandb.init(project=project, dir=str(folder), name=name, group=name, config=asdict(settings),
                                       settings=wandb.Settings(console="off"))  # the terminal is the display's
        except wandb.Error as error:
            said = " ".join(str(error).split())
            raise UserError(f"log.wandb is {project!r} but W&B does not start ({said}); run: wandb login, set "
                            "WANDB_MODE=offline, or set log.wandb to ''") from None

    def step(self, record: StepRecord) -> None:
        self.run.log(figures(record), step=record.step)

    def close(self, finished: bool) -> None:
        self.run.finish(exit_code=0 if finished else 1)
