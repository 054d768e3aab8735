"""Whole numbers as people type tokens, GPUs and ranks: 128k, 1.5M, 64_000.

k, M and G are powers of 1024, as the field counts context: 64K tokens are 65,536. A number with a unit has to come out
whole; nothing is rounded in silence.
"""

from __future__ import annotations

import re
from fractions import Fraction

from distca.validation import UserError, short

UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30}
UNITS_HELP = "Numbers may be written as 64_000, 128k or 1.5M; k is 1024, M is 1024 k."
MAX_DIGITS = 30

_COUNT = re.compile(r"([+-]?)([0-9]+(?:_[0-9]+)*)(\.[0-9]+)?([kKmMgG]?)", re.ASCII)


def is_count(text: str) -> bool:
    """Whether a text is written as a number, right or wrong."""
    return _COUNT.fullmatch(text) is not None


def parse_count(field: str, text: str) -> int:
    """The whole number that a text says, or a ValueError that names the field. Whether it is too large, others say."""
    found = _COUNT.fullmatch(text)
    if found is None or len(text) > MAX_DIGITS or (found[3] and not found[4]):
        raise UserError(f"{field} is {short(text)}; give a whole number, such as 64_000, 128k or 1.5M")
    value = Fraction(f"{found[1]}{found[2].replace('_', '')}{found[3] or ''}") * UNITS[found[4].lower()]
    if value.denominator != 1:
        raise UserError(f"{field} is {short(text)}, which is {float(value):g} with k = 1024 and no whole number; give "
                        f"{round(value)}")
    return int(value)


def unit_text(value: int) -> str:
    """A number as people type it, with the largest unit that leaves it whole: 131072 is 128K."""
    for unit in ("g", "m", "k"):
        if value and value % UNITS[unit] == 0:
            return f"{value // UNITS[unit]}{unit.upper()}"
    return f"{value:,}"
