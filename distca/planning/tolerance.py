"""How level a step should be: asked for as a number, or chosen by the seconds that steps are predicted to take.

Where exchanges hide behind computing, tighter balance is free; where they do not, the bytes that looser balance saves
are time. Which of the two a setting is, only its whole step tells, so `auto` plans it at a few tolerances and keeps the
one that is predicted to be quickest. That takes as many times as long to plan as there are tolerances.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from distca.validation import UserError, short
from distca.workload.packing import check_tolerance

if TYPE_CHECKING:
    from distca.planning.step import StepPlan

AUTO: Literal["auto"] = "auto"
DEFAULT_TOLERANCE = 0.05
TOLERANCES = (0.01, 0.05, 0.2)  # that auto chooses from
StepSeconds = Callable[["StepPlan"], float]


def quickest(plan: Callable[[float], StepPlan], seconds: StepSeconds) -> StepPlan:
    """Of a step's plans at every tolerance the one with the least seconds, the looser where several have."""
    steps = {tolerance: plan(tolerance) for tolerance in TOLERANCES}
    tried = tuple((tolerance, seconds(step)) for tolerance, step in steps.items())
    best = min(reversed(tried), key=lambda one: one[1])[0]
    return replace(steps[best], tried=tried)


def asked_tolerance(value: float | str) -> float | Literal["auto"]:
    """A number from 0 to 1, also as text, or `auto`."""
    if value == AUTO:
        return AUTO
    try:
        number = float(value)
    except ValueError:
        raise UserError(f"tolerance is {short(value)}; give a number from 0 to 1, such as 0.05, or auto") from None
    check_tolerance(number)
    return number
