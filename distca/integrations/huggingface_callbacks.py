"""Callbacks that report attention work and waits in the Trainer's logs, printed or as metrics beside the loss.

Metrics are means over the optimizer steps since the last log. Work is planned; bytes and seconds are measured on the
logging rank.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers import Trainer, TrainerCallback

from distca.integrations.huggingface import warn_once
from distca.integrations.packed import attached, latest_plan
from distca.planning.plan import Plan
from distca.runtime.recorder import Recorder
from distca.trace import StepTrace

FIGURES = ("attention_work_at_home", "attention_work", "attention_moved_bytes", "attention_wait_seconds",
           "attention_seconds_saved")


class AttentionWork(TrainerCallback):
    """Print the max/mean of attention work over ranks, at home and as planned, whenever the Trainer logs."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, float]] = []                # since the last log: (home, planned) per step

    def on_step_end(self, args: Any, state: Any, control: Any, **about: Any) -> None:
        if state.is_world_process_zero:
            summary = latest_plan(about["model"]).summary()
            self.seen.append((summary.work_max_over_mean_at_home, summary.work_max_over_mean))

    def on_log(self, args: Any, state: Any, control: Any, **about: Any) -> None:
        if self.seen:
            home, planned = np.mean(self.seen, axis=0)
            self.seen.clear()
            print(f"step {state.global_step}: attention work max/mean {home:.2f} at home, {planned:.2f} with distca",
                  flush=True)


class AttentionLogs(TrainerCallback):
    """Add five metrics to every training log, for TensorBoard, W&B, MLflow and `trainer.state.log_history`.

    `AttentionLogs.add_to(trainer)` inserts it before the reporting callbacks, so that they see its metrics.
    """

    def __init__(self) -> None:
        self.seen: list[tuple[float, ...]] = []
        self.recorder: Recorder | None = None

    @classmethod
    def add_to(cls, trainer: Trainer) -> AttentionLogs:
        callback = cls()
        trainer.callback_handler.callbacks.insert(0, callback)
        return callback

    def on_train_begin(self, args: Any, state: Any, control: Any, **about: Any) -> None:
        if getattr(args, "packing", False) and getattr(args, "packing_strategy", None) == "wrapped":
            warn_once("packing_strategy is 'wrapped', which loses the documents' boundaries: each row is attended as "
                      "one document, and neighbours in it see each other; choose 'bfd', or distca.data.Collator")
        self.recorder = Recorder(args.device)
        for module in about["model"].modules():
            if (served := attached(module)) is not None:
                served.attention.record(self.recorder)

    def on_step_begin(self, args: Any, state: Any, control: Any, **about: Any) -> None:
        assert self.recorder is not None
        self.recorder.begin_step()

    def on_step_end(self, args: Any, state: Any, control: Any, **about: Any) -> None:
        assert self.recorder is not None
        plan = latest_plan(about["model"])
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        self.seen.append(figures(plan, self.recorder.end_step(rank, state.global_step), rank))

    def on_log(self, args: Any, state: Any, control: Any, **about: Any) -> None:
        logs = about.get("logs")
        if self.seen and logs is not None and "loss" in logs:
            found = dict(zip(FIGURES, np.mean(self.seen, axis=0).tolist(), strict=True))
            self.seen.clear()
            logs.update(found)
            if state.log_history:
                state.log_history[-1].update(found)


def figures(plan: Plan, trace: StepTrace, rank: int) -> tuple[float, ...]:
    """Return the FIGURES of one optimizer step.

    Seconds saved: attention of the busiest rank at home minus that of the busiest server, both at this rank's measured
    rate, minus this rank's wait.
    """
    summary = plan.summary()
    seconds, wait = (sum(span.stop_seconds - span.start_seconds for span in trace.spans if span.lane == lane)
                     for lane in ("attention", "wait"))
    moved = sum(span.num_bytes for span in trace.spans if span.lane == "wait")
    mean = float(summary.work.mean())
    rate = seconds / float(summary.work[rank]) if summary.work[rank] else 0.0
    saved = rate * mean * (summary.work_max_over_mean_at_home - summary.work_max_over_mean) - wait
    return summary.work_max_over_mean_at_home, summary.work_max_over_mean, float(moved), wait, saved
