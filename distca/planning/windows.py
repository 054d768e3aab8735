"""Plans of layers whose queries see a window of keys, in a step that was planned for all keys.

A window makes attention linear in tokens, and ranks have equal tokens: mostly it is level where its queries live, and
only the keys of a window before a slice travel. Where documents are so short, or the window so long, that this is not
level, the causal plan's servers take it, without the keys that nobody sees. A window that holds a whole document hides
nothing, and its plan stays as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from distca.planning.plan import Plan, max_over_mean
from distca.planning.step import StepPlan
from distca.planning.tasks import TaskTable, tasks_at_home
from distca.validation import UserError

Windows = Sequence[int | None]
AT_HOME = "attention in a window stays where its queries live"


def with_windows(step: StepPlan, windows: Windows) -> StepPlan:
    """The step in which layer i has windows[i]; layers without one keep their plans."""
    if all(window is None for window in windows):
        return step
    made: dict[tuple[int, int], Plan] = {}

    def plan(causal: Plan, window: int | None) -> Plan:
        if window is None:
            return causal
        key = id(causal), window
        if key not in made:
            made[key] = windowed(causal, window)
        return made[key]

    by_depth = windows_by_depth(windows, step.layers, shared=step.is_shared)
    num_plans = 1 if step.is_shared else step.num_stages         # stages that share calls have the same plans
    stages = tuple(tuple(tuple(tuple(plan(causal, window) for causal, window in zip(depths, of_stage, strict=False))
                               for depths in nanos) for nanos in ticks)
                   for ticks, of_stage in zip(step.by_stage[:num_plans], by_depth[:num_plans], strict=True))
    return replace(step, by_stage=stages * (step.num_stages // num_plans))


def windows_by_depth(windows: Windows, layers: Sequence[int], *, shared: bool) -> list[list[int | None]]:
    """[stage][depth] windows; where stages share their calls, those of one depth must agree and all are listed."""
    if len(windows) != sum(layers):
        raise UserError(f"windows are of {len(windows)} layers but the step has {sum(layers)}; give one for each")
    begin = np.cumsum(layers) - np.asarray(layers)
    stages = [list(windows[first:first + count]) for first, count in zip(begin.tolist(), layers, strict=True)]
    if not shared:
        return stages
    deepest = max(stages, key=len)
    for stage, own in enumerate(stages):
        for depth, (window, other) in enumerate(zip(own, deepest, strict=False)):
            if window != other:
                raise UserError(
                    f"layer {begin[stage] + depth} (number {depth} of pipeline stage {stage}) has window {window} "
                    f"where number {depth} of another stage has {other}, and stages share their attention calls; use "
                    "one stage, stages whose windows agree, or attention.mode home or per_document_cp")
    return [deepest] * len(stages)


def windowed(causal: Plan, window: int) -> Plan:
    """The plan of the same documents in which a query sees `window` keys, itself included."""
    if window >= int(causal.layout.lengths.max()):
        return causal
    home = replace(causal, tasks=_seen(tasks_at_home(causal.layout), window), window=window, limit=None)
    moved = replace(causal, tasks=_seen(causal.tasks, window), window=window, limit=None)
    at_home, elsewhere = (_level(plan) for plan in (home, moved))
    if elsewhere * (1 + causal.tolerance) < at_home:
        return replace(moved, limit=None if elsewhere <= 1 + causal.tolerance else "servers are those of all keys")
    return replace(home, limit=None if at_home <= 1 + causal.tolerance else AT_HOME)


def _seen(tasks: TaskTable, window: int) -> TaskTable:
    """The tasks without keys before the first query's window, and without those that are left none."""
    kv_start = np.maximum(tasks.kv_start, tasks.q_start - window + 1)
    return replace(tasks, kv_start=kv_start).take(kv_start < tasks.kv_stop)


def _level(plan: Plan) -> float:
    return max_over_mean(plan.work(), plan.speed)

