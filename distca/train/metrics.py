"""What a run says about itself, step by step and at its end.

A record holds figures of the whole run, not of one rank, and a summary is made from records alone.

Where a run's figures go besides its own log: TensorBoard, Weights & Biases. Neither is needed to train.

Rank 0 alone writes to them, the same figures under the same names as in steps.jsonl; one that is unknown is left out.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from distca.train.settings import Settings
from distca.validation import UserError

RECENT = 30  # steps whose mean loss tells more than the last one's


@dataclass(frozen=True, slots=True)
class StepRecord:
    step: int  # steps done, this one included
    loss: float  # mean over all labels of all ranks, nats
    lr: float
    grad_norm: float  # before clipping
    tokens: int  # of all ranks
    seconds: float
    tokens_per_second: float
    work_before: float  # largest attention work of a rank over the mean, everything computed at home
    work_after: float  # the same by the plan that ran
    bytes_per_layer: float  # forward, crossing ranks, in all
    exposed_seconds: float  # waiting for exchanges that no computing hid
    host_seconds: float  # waiting for the batch and its plan
    memory_bytes: int
    plan_seconds: float  # making the plan, in the background
    bubble_share: float = 0.0  # of the pipeline's ticks, over its stages, in which a stage has no micro-batch
    served_in_bubbles: float = 0.0  # share of the attention that was computed in them
    eval_loss: float | None = None  # on held-out documents, where this step was followed by an evaluation
    attention_seconds: float = 0.0  # computing core attention, mean over the ranks that train
    linear_seconds: float = 0.0  # computing the rest of the model, mean over the ranks that train
    mfu: float | None = None  # model FLOPs over what the GPUs' peak would do in the step; None where that is unknown
    tolerance: float | None = None  # that was chosen, where attention.tolerance is auto
    attention_seconds_max: float | None = None  # the slowest rank's, where attention.adapt measures each one's
    server_speed: tuple[float, ...] | None = None  # of the pool's ranks after this step, over the median; then, too


@dataclass(frozen=True, slots=True)
class RunSummary:
    """A whole run in a few figures; the work and bytes are means over its steps."""

    steps: int  # of this run
    last_step: int
    tokens: int
    seconds: float  # inside steps
    first_loss: float
    final_loss: float  # of the last step
    recent_loss: float  # mean of the last steps, at most RECENT of them
    tokens_per_second: float
    work_before: float
    work_after: float
    bytes_per_layer: float
    exposed_share: float  # of the time inside steps
    host_share: float
    memory_bytes: int  # the largest
    bubble_share: float = 0.0
    served_in_bubbles: float = 0.0
    eval_loss: float | None = None  # the latest
    attention_share: float = 0.0  # of the time inside steps
    linear_share: float = 0.0
    mfu: float | None = None  # over the time inside steps

    @property
    def work_gain(self) -> float:
        """How many times more attention the busiest rank would have computed without balancing."""
        return self.work_before / self.work_after if self.work_after else 1.0


class Tally:
    """A summary of records as they come, in memory that does not grow with them."""

    def __init__(self) -> None:
        self.steps = self.tokens = self.memory_bytes = 0
        self.seconds = self.exposed_seconds = self.host_seconds = 0.0
        self.attention_seconds = self.linear_seconds = self.used_seconds = 0.0
        self.work_before = self.work_after = self.bytes_per_layer = self.served_in_bubbles = 0.0
        self.first: StepRecord | None = None
        self.last: StepRecord | None = None
        self.eval_loss: float | None = None
        self.recent: deque[float] = deque(maxlen=RECENT)

    def add(self, record: StepRecord) -> None:
        self.first, self.last = self.first or record, record
        self.recent.append(record.loss)
        self.eval_loss = self.eval_loss if record.eval_loss is None else record.eval_loss
        self.steps += 1
        self.memory_bytes = max(self.memory_bytes, record.memory_bytes)
        for name in ("tokens", "seconds", "exposed_seconds", "host_seconds", "work_before", "work_after",
                     "bytes_per_layer", "served_in_bubbles", "attention_seconds", "linear_seconds"):
            setattr(self, name, getattr(self, name) + getattr(record, name))
        self.used_seconds += (record.mfu or 0.0) * record.seconds

    def summary(self) -> RunSummary | None:
        """None while nothing was added."""
        if self.first is None or self.last is None:
            return None
        seconds = max(self.seconds, 1e-9)
        return RunSummary(
            steps=self.steps, last_step=self.last.step, tokens=self.tokens, seconds=self.seconds,
            first_loss=self.first.loss, final_loss=self.last.loss,
            recent_loss=sum(self.recent) / len(self.recent), tokens_per_second=self.tokens / seconds,
            work_before=self.work_before / self.steps, work_after=self.work_after / self.steps,
            bytes_per_layer=self.bytes_per_layer / self.steps, exposed_share=self.exposed_seconds / seconds,
            host_share=self.host_seconds / seconds, memory_bytes=self.memory_bytes,
            bubble_share=self.last.bubble_share, served_in_bubbles=self.served_in_bubbles / self.steps,
            eval_loss=self.eval_loss,
            attention_share=self.attention_seconds / seconds, linear_share=self.linear_seconds / seconds,
            mfu=None if self.last.mfu is None else self.used_seconds / seconds)


def as_json(record: StepRecord | RunSummary) -> dict[str, float | list[float] | None]:
    """The fields by name, but those that are unknown; what is no finite number is None, which JSON can say."""
    return {name: list(value) if isinstance(value, tuple) else value if math.isfinite(value) else None
            for name, value in asdict(record).items() if value is not None}


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
