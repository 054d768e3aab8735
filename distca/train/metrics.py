"""What a run says about itself, step by step and at its end.

A record holds figures of the whole run, not of one rank, and a summary is made from records alone.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import asdict, dataclass

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
