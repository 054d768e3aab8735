"""Plan sliding-window layers from a step that was planned for full attention.

Windowed attention is linear in tokens, and ranks have equal tokens. So computing it at home is mostly balanced, and
only the window of keys before a slice is sent. If documents are too short or the window too long for that, the servers
of the full-attention plan compute it, without the keys that no query sees. If no document exceeds the window, the
full-attention plan is used unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from distca.planning.plan import Plan, max_over_mean
from distca.planning.step import NO_CALL, StepPlan
from distca.planning.tasks import TaskTable, tasks_at_home
from distca.validation import UserError

Windows = Sequence[int | None]
AT_HOME = "attention in a window stays where its queries live"


def with_windows(step: StepPlan, windows: Windows) -> StepPlan:
    """Return the step with window windows[i] in layer i; layers without a window keep their plans."""
    if all(window is None for window in windows):
        return step
    by_depth = windows_by_depth(windows, step.layers, shared=step.is_shared)
    longest = [int(plan.layout.lengths.max()) for plan in step.plans]
    made: dict[tuple[int, int | None], int] = {}                 # (causal plan, window) -> plan
    calls = step.calls[:1 if step.is_shared else None].copy()    # shared calls are the same on every stage
    for call in map(tuple, np.argwhere(calls != NO_CALL).tolist()):
        causal, window = int(calls[call]), by_depth[step.ticks.part[call[1], call[0]]][call[-1]]
        hides = window is not None and window < longest[causal]
        calls[call] = made.setdefault((causal, window if hides else None), len(made))
    plans = tuple(step.plans[causal] if window is None else windowed(step.plans[causal], window)
                  for causal, window in made)
    return replace(step, plans=plans, calls=np.broadcast_to(calls, step.calls.shape))


def windows_by_depth(windows: Windows, layers: Sequence[int], *, shared: bool) -> list[list[int | None]]:
    """Return windows as [part][depth]; if stages share calls, layer i of every part must have the same window."""
    if len(windows) != sum(layers):
        raise UserError(f"windows are of {len(windows)} layers but the step has {sum(layers)}; give one for each")
    begin = np.cumsum(layers) - np.asarray(layers)
    parts = [list(windows[first:first + count]) for first, count in zip(begin.tolist(), layers, strict=True)]
    if not shared:
        return parts
    deepest = max(parts, key=len)
    for part, own in enumerate(parts):
        for depth, (window, other) in enumerate(zip(own, deepest, strict=False)):
            if window != other:
                raise UserError(
                    f"layer {begin[part] + depth} (number {depth} of pipeline part {part}) has window {window} "
                    f"where number {depth} of another part has {other}, and stages share their attention calls; use "
                    "one stage, stages whose windows agree, or attention.mode home or per_document_cp")
    return [deepest] * len(parts)


def windowed(causal: Plan, window: int) -> Plan:
    """Return the plan of the same documents in which a query sees `window` keys, including its own."""
    if window >= int(causal.layout.lengths.max()):
        return causal
    home, moved = (replace(causal, tasks=_seen(tasks, window), window=window, limit=None)
                   for tasks in (tasks_at_home(causal.layout), causal.tasks))
    at_home, elsewhere = (max_over_mean(plan.work(), plan.speed) for plan in (home, moved))
    if elsewhere * (1 + causal.tolerance) < at_home:
        return replace(moved, limit=None if elsewhere <= 1 + causal.tolerance else "servers are those of all keys")
    return replace(home, limit=None if at_home <= 1 + causal.tolerance else AT_HOME)


def _seen(tasks: TaskTable, window: int) -> TaskTable:
    """Drop keys before the first query's window, and tasks without remaining keys."""
    kv_start = np.maximum(tasks.kv_start, tasks.q_start - window + 1)
    return replace(tasks, kv_start=kv_start).take(kv_start < tasks.kv_stop)

