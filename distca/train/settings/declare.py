"""Declare one field of the settings (type, limits, help text), and parse, check and print its value."""

from __future__ import annotations

import json
import operator
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from distca.validation import MAX_NUMBER, UserError, parse_count, short

Value = int | float | bool | str
MAX_LENGTH = 2**31 - 1       # tokens, as in workload.documents
MAX_FACTOR = 1e12
_TYPE_WORDS: dict[type, str] = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
_LIMITS = {"least": ("of at least", operator.ge), "above": ("above", operator.gt), "most": ("of at most", operator.le),
           "below": ("below", operator.lt)}


@dataclass(frozen=True, slots=True)
class Known:
    """Declaration of one field."""

    name: str  # section.field
    type: type[Value]
    default: Value
    help: str
    choices: tuple[str, ...]
    limits: Mapping[str, float]  # least and most are inclusive, above and below exclusive
    common: bool  # listed by `distca train --help`
    counted: bool  # a number of tokens or ranks, which may be written as 64k
    when_true: str  # for text fields that accept true: the text that true means
    words: tuple[str, ...]  # texts that a number field accepts, such as auto

    @property
    def meaning(self) -> str:
        return self.help + (f" One of: {', '.join(self.choices)}." if self.choices else "")


def setting(
    default: Value, help: str, *, choices: tuple[str, ...] = (), common: bool = False, counted: bool = False,
    when_true: str = "", words: tuple[str, ...] = (), **limits: float,
) -> Any:
    """Declare a field. Without `limits`, numbers range from 0 to MAX_LENGTH (int) or MAX_FACTOR (float)."""
    lower = {} if "above" in limits else {"least": 0.0}
    upper = {} if "below" in limits else {"most": MAX_FACTOR if isinstance(default, float) else MAX_LENGTH}
    given = lower | upper | limits
    return field(default=default, metadata={
        "help": help, "choices": choices, "common": common, "counted": counted, "when_true": when_true, "words": words,
        "limits": {name: given[name] for name in _LIMITS if name in given}})


def typed(known: Known, value: object, where: str = "") -> Value:
    """Return the value as the field's type, or refuse it; ints become floats, and "64k" becomes a count."""
    if known.counted and isinstance(value, str):
        return parse_count(f"{where}{known.name}", value)
    if isinstance(value, str) and value in known.words:
        return value
    if known.type is float and type(value) is int and abs(value) < MAX_NUMBER:
        return float(value)
    if known.when_true and isinstance(value, bool):
        return known.when_true if value else ""
    if not isinstance(value, known.type) or (isinstance(value, bool) and known.type is not bool):
        wanted = " or ".join((_TYPE_WORDS[known.type], *known.words))
        raise UserError(f"{where}{known.name} is {short(value)}; give {wanted}")
    return value


def from_text(known: Known, text: str) -> Value:
    """Parse a value from the command line."""
    value: object = text
    if (known.type is bool or known.when_true) and text.lower() in ("true", "false"):
        value = text.lower() == "true"
    elif known.type in (int, float) and not known.counted and text not in known.words:
        with suppress(ValueError):
            value = known.type(text)
    return typed(known, value)


def check_limits(known: Known, value: Value) -> None:
    """Refuse a value of the wrong type, outside the limits, or not among the choices."""
    typed(known, value)
    if isinstance(value, str) and not value.isprintable():
        raise UserError(f"{known.name} is {short(value)}; give text that can be printed")
    if known.choices and value not in known.choices:
        near = get_close_matches(str(value).lower(), known.choices, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise UserError(f"{known.name} is {value!r}; {hint}choose one of: {', '.join(known.choices)}")
    if not isinstance(value, str | bool):
        broken = [f"{_LIMITS[name][0]} {limit:g}" for name, limit in known.limits.items()
                  if not (abs(value) < MAX_NUMBER and _LIMITS[name][1](value, limit))]
        if broken:
            raise UserError(f"{known.name} is {short(value)}; give {_TYPE_WORDS[known.type]} {' and '.join(broken)}")


def toml_value(value: Value) -> str:
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
