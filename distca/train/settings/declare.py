"""One field of the settings: its type, its limits, what people are told, and how its value is read and written.

Which fields there are, `settings` says. A value of the wrong type or outside the limits is refused by the field's name.
"""

import math
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from distca.units import parse_count
from distca.validation import MAX_NUMBER, UserError, short

Value = int | float | bool | str
_TYPE_WORDS: dict[type, str] = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


@dataclass(frozen=True, slots=True)
class Limits:
    """`least` and `most` may be reached, `above` and `below` may not."""

    least: float = -math.inf
    above: float = -math.inf
    most: float = math.inf
    below: float = math.inf

    def hold(self, value: float) -> bool:
        return abs(value) < MAX_NUMBER and self.least <= value <= self.most and self.above < value < self.below

    def broken_by(self, value: float) -> str:
        """The limits that a value is outside of, in words; all of them where it is no number."""
        words = {"least": "of at least", "above": "above", "most": "of at most", "below": "below"}
        given = {name: getattr(self, name) for name in words if math.isfinite(getattr(self, name))}
        broken = {name: limit for name, limit in given.items() if not Limits(**{name: limit}).hold(value)}
        return " and ".join(f"{words[name]} {limit:g}" for name, limit in (broken or given).items())


@dataclass(frozen=True, slots=True)
class Known:
    """One field of one section, as people are told about it."""

    name: str  # section.field
    type: type[Value]
    default: Value
    help: str
    choices: tuple[str, ...]
    limits: Limits
    common: bool  # listed by `distca train --help`
    counted: bool = False  # tokens or ranks, which people write as 64k
    when_true: str = ""  # of a text that may also be true or false: what true stands for
    words: tuple[str, ...] = ()  # texts that a number may be instead

    @property
    def wanted(self) -> str:
        return " or ".join((_TYPE_WORDS[self.type], *self.words))

    @property
    def meaning(self) -> str:
        return self.help + (f" One of: {', '.join(self.choices)}." if self.choices else "")


def setting(
    default: Value, help: str, *, choices: tuple[str, ...] = (), common: bool = False, counted: bool = False,
    when_true: str = "", words: tuple[str, ...] = (), **limits: float,
) -> Any:
    return field(default=default, metadata={"help": help, "choices": choices, "limits": Limits(**limits),
                                            "common": common, "counted": counted, "when_true": when_true,
                                            "words": words})


def typed(known: Known, value: object, where: str = "") -> Value:
    """The value if it has the field's type; a whole number will do for a number, and "64k" for tokens and ranks."""
    if known.counted and isinstance(value, str):
        return parse_count(f"{where}{known.name}", value)
    if isinstance(value, str) and value in known.words:
        return value
    if known.type is float and type(value) is int and abs(value) < MAX_NUMBER:
        return float(value)
    if known.when_true and isinstance(value, bool):
        return known.when_true if value else ""
    if not isinstance(value, known.type) or (isinstance(value, bool) and known.type is not bool):
        raise UserError(f"{where}{known.name} is {short(value)}; give {known.wanted}")
    return value


def from_text(known: Known, text: str) -> Value:
    if known.counted:
        return parse_count(known.name, text)
    if text in known.words:
        return text
    if known.type is bool and text.lower() in ("true", "false"):
        return text.lower() == "true"
    if known.when_true and text.lower() in ("true", "false"):
        return known.when_true if text.lower() == "true" else ""
    try:
        if known.type is not bool:
            return known.type(text)
    except ValueError:
        pass
    raise UserError(f"{known.name} is {short(text)}; give {known.wanted}")


def check_limits(known: Known, value: Value) -> None:
    typed(known, value)
    if isinstance(value, str) and not value.isprintable():
        raise UserError(f"{known.name} is {short(value)}; give text that can be printed")
    if known.choices and value not in known.choices:
        near = get_close_matches(str(value).lower(), known.choices, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise UserError(f"{known.name} is {value!r}; {hint}choose one of: {', '.join(known.choices)}")
    if not isinstance(value, str) and not known.limits.hold(value):
        raise UserError(f"{known.name} is {short(value)}; give {_TYPE_WORDS[known.type]} "
                        f"{known.limits.broken_by(value)}".rstrip())


def toml_value(value: Value) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        escaped = "".join(f"\\u{ord(char):04x}" if ord(char) < 32 or ord(char) == 127 else char
                          for char in value.replace("\\", "\\\\").replace('"', '\\"'))
        return f'"{escaped}"'
    return repr(value)
