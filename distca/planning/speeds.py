"""How fast each server is beside what plans predict, learnt from the seconds that its attention took.

A hot GPU, an older one, or one that shares its host with somebody takes longer than its work says. Its speed falls
below 1, and balancing gives it less: the pool waits for the largest work over speed. Rates are of measured seconds and
of work that no speed entered, so that what a speed changes does not feed back into it.

One step is noise: only a part of what it says is believed, and a surprise counts as at most twice the speed so far. All
of it is additions, products and comparisons, which every processor rounds alike: ranks that start from the same numbers
plan with the same speeds.
"""

from __future__ import annotations

import numpy as np

_BELIEVED = 0.3              # part of the way from the speed so far to what a step says
_SURPRISE = 2.0              # times the speed so far that a step counts as at most, or its inverse
LEAST, MOST = 0.25, 4.0      # speeds, over the pool's median
_ALIKE = 0.03                # servers so near the median are planned as equals: noise makes no plans


def updated(speed: np.ndarray, work: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Speeds after one more step, in which `work` [servers] took `seconds` [servers]; 1 is the pool's median.

    Of an even number of servers that is the upper one: of two the slower is below 1. A server without work, or without
    a measurement, keeps its speed.
    """
    known = (work > 0) & (seconds > 0) & np.isfinite(seconds)
    if not known.any():
        return speed
    rate = np.divide(work, seconds, out=np.zeros(len(speed)), where=known)
    said = rate / np.sort(rate[known])[known.sum() // 2]
    said = np.clip(np.clip(said, speed / _SURPRISE, speed * _SURPRISE), LEAST, MOST)
    return np.where(known, speed + _BELIEVED * (said - speed), speed)


def planned(speed: np.ndarray) -> np.ndarray:
    """The speeds to plan with: in hundredths, and 1 near it."""
    return np.where(np.abs(speed - 1.0) <= _ALIKE, 1.0, np.round(speed, 2))
