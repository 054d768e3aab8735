"""What a comparison found: figures of batches, strategies with their best choice, and all of them together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from distca.cost.work import model_parameters
from distca.simulate.execute import Step
from distca.simulate.setting import Setting
from distca.simulate.strategies import Choice


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of one batch under one choice of a strategy, or of the bound."""

    seconds: float
    free_seconds: float        # with links between ranks that take no time
    busy_share: float
    work_max_over_mean: float
    states_gb: float           # of the fullest rank, as are the next ones
    activations_gb: float
    gathered_kv_gb: float
    buffers_gb: float
    peak_memory_gb: float
    memory_max_over_mean: float

    @classmethod
    def of(cls, step: Step, free_seconds: float) -> Figures:
        held = step.memory
        fullest = int(held.total.argmax())
        states, activations, gathered, buffers = (
            float(part[fullest]) / 1e9 for part in (held.states, held.activations, held.gathered_kv, held.buffers))
        return cls(step.seconds, free_seconds, step.busy_share, step.work_max_over_mean, states, activations, gathered,
                   buffers, held.peak / 1e9, float(held.total.max() / held.total.mean()))


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """A strategy with its best choice over all batches, or the bound, which has no choice."""

    name: str
    setting: Setting
    choice: Choice | None
    figures: tuple[Figures, ...]  # [batches]

    def column(self, field: str) -> np.ndarray:
        return np.array([getattr(figures, field) for figures in self.figures])

    @property
    def step_seconds(self) -> float:
        return float(self.column("seconds").mean())

    @property
    def tokens_per_second(self) -> float:
        return self.setting.num_tokens / self.step_seconds

    @property
    def idle_share(self) -> float:
        return float(1 - self.column("busy_share").mean())

    @property
    def exposed_communication_share(self) -> float:
        return float(1 - self.column("free_seconds").sum() / self.column("seconds").sum())

    @property
    def peak_memory_gb(self) -> float:
        return float(self.column("peak_memory_gb").max())

    @property
    def work_max_over_mean(self) -> float:
        return float(self.column("work_max_over_mean").mean())

    def speedup_over(self, other: Outcome) -> tuple[float, float, float]:
        """Speedup over all batches together, in the worst batch and in the best."""
        ratio = other.column("seconds") / self.column("seconds")
        return other.step_seconds / self.step_seconds, float(ratio.min()), float(ratio.max())

    def as_json(self, others: Sequence[Outcome]) -> dict[str, Any]:
        seconds, rest = self.column("seconds"), [other for other in others if other.name != self.name]
        speedups = {other.name: self.speedup_over(other) for other in rest}
        return {
            "tokens_per_second": self.tokens_per_second, "step_seconds": self.step_seconds,
            "step_seconds_range": [float(seconds.min()), float(seconds.max())],
            "idle_share": self.idle_share, "exposed_communication_share": self.exposed_communication_share,
            "peak_memory_gb": self.peak_memory_gb,
            "memory_gb": {name: float(self.column(f"{name}_gb").max())
                          for name in ("states", "activations", "gathered_kv", "buffers")},
            "memory_max_over_mean": float(self.column("memory_max_over_mean").mean()),
            "work_max_over_mean": self.work_max_over_mean,
            "speedup_over": {name: value[0] for name, value in speedups.items()},
            "speedup_range_over": {name: list(value[1:]) for name, value in speedups.items()},
            "pp": self.setting.pp, "choice": self.describe(),
        }

    def describe(self) -> str:
        return "what no strategy can beat" if self.choice is None else self.choice.describe(self.setting)


@dataclass(frozen=True, slots=True, eq=False)
class Comparison:
    """Outcomes of strategies that fit the memory, in display order; the bound; names of strategies that do not fit."""

    source: str
    setting: Setting
    num_batches: int
    tolerance: float | str     # of our strategies, or auto
    outcomes: tuple[Outcome, ...]
    bound: Outcome | None
    too_large: tuple[str, ...]

    @property
    def entries(self) -> tuple[Outcome, ...]:
        return self.outcomes if self.bound is None else (*self.outcomes, self.bound)

    def outcome(self, name: str) -> Outcome:
        return next(outcome for outcome in self.entries if outcome.name == name)

    def as_json(self) -> dict[str, Any]:
        setting = self.setting
        experts = {} if setting.model.experts is None else {
            "ep": setting.ep, "parameters": model_parameters(setting.model),
            "active_parameters": model_parameters(setting.model, active=True)}
        return {
            "model": setting.model.name, **experts, "cluster": setting.cluster.name, "gpus": setting.gpus,
            "tp": setting.tp, "pp": setting.pp, "context": setting.context, "data": self.source,
            "batches": self.num_batches,
            "tokens_per_step": setting.num_tokens, "tokens_per_rank": setting.tokens_per_rank,
            "micro_batches": setting.num_micro_batches, "tolerance": self.tolerance,
            "strategies": {outcome.name: outcome.as_json(self.entries) for outcome in self.entries},
            "too_large": list(self.too_large),
        }
