"""Shared checks of user input: numbers, names, files and sizes.

Wrong options, files and arguments raise a UserError before anything is allocated or started. Its message is one line
that names the field, its value and the remedy, and the command line prints it. Any other exception is a bug.

Tokens, GPUs and ranks may be typed as 128k, 1.5M or 64_000. k, M and G are powers of 1024, as is usual for context
lengths: 64K tokens are 65,536. A number with a unit must be whole; nothing is rounded silently.
"""

from __future__ import annotations

import errno
import json
import os
import re
import tomllib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal, TextIO

import numpy as np

MAX_RANKS = 65_536            # of a pool: planning time and memory grow with it; split larger clusters into pools
MAX_DOCUMENTS = 2**22         # of a batch
DOCUMENTS_WHY = "whose plan takes a core a minute and 2 GB"
MAX_CORPUS_DOCUMENTS = 2**25  # of a file of lengths from which batches are drawn
CORPUS_WHY = "which is held in memory; a sample of its lengths, such as every tenth, says as much"
MAX_NAME = 200                # characters of a name
MAX_NUMBER = 1e200            # sums, and products with a unit, are still finite
MAX_TEXT_BYTES = 2**25        # of a file of lengths, a table or a log
MAX_TOML_BYTES = 2**17
MAX_LOCAL_RANKS = 512         # processes of one machine
NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)
MAX_DOTS = 32                 # of a line of TOML: a dotted key creates a table for each of its parts
UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30}
UNITS_HELP = "Numbers may be written as 64_000, 128k or 1.5M; k is 1024, M is 1024 k."
MAX_DIGITS = 30

_COUNT = re.compile(r"([+-]?)([0-9]+(?:_[0-9]+)*)(\.[0-9]+)?([kKmMgG]?)", re.ASCII)


EXTRA_OF = {  # package -> the extra of pyproject.toml that brings it
    "torch": "train", "safetensors": "train", "xxhash": "train", "pyarrow": "data", "jinja2": "data",
    "zstandard": "data", "tokenizers": "text", "tensorboard": "tensorboard", "wandb": "wandb", "matplotlib": "plot",
    "nixl": "nixl",
}


class UserError(ValueError):
    """Refused user input; the message is one line that says what to do."""


def short(value: object) -> str:
    """Format a value for an error: one line, printable, shortened if long."""
    if isinstance(value, int) and not -(10**30) < value < 10**30:
        return "a whole number of more than 30 digits"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def plain(text: str) -> str:
    """Escape characters that a terminal would interpret or reorder."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text)


def check_whole(
    field: str, value: Any, *, least: int = 1, most: int | None = None, why: str = "", remedy: str = ""
) -> int:
    """Return a whole number from `least` to `most`; `why` explains the limit."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise UserError(f"{field} is {short(value)}; {remedy or f'give a whole number of at least {least}'}")
    if most is not None and value > most:
        raise UserError(f"{field} is {short(value)}; give at most {most}{f', {why}' if why else ''}")
    return int(value)


def check_number(
    field: str, value: Any, *, above: float = -np.inf, least: float = -np.inf, most: float = MAX_NUMBER
) -> float:
    """Return a finite number, as a float."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and above < value and max(least, -MAX_NUMBER) <= value <= most:
        return float(value)
    bounds = [f" above {above:g}" if above > -np.inf else "", f" of at least {least:g}" if least > -np.inf else "",
              f" of at most {most:g}" if most < MAX_NUMBER else ""]
    raise UserError(f"{field} is {short(value)}; give a finite number{' and'.join(filter(None, bounds))}")


def to_install(*packages: str) -> str:
    """Return the remedy for packages that are missing: what to run, and the extra that brings them."""
    extra = EXTRA_OF.get(packages[0])
    return f"run: pip install {' '.join(packages)}" + (f", or install distca with the extra {extra}" if extra else "")


def check_name(field: str, value: Any) -> str:
    """Return a name: short, printable text, safe for pages and terminals."""
    if not isinstance(value, str) or not value or len(value) > MAX_NAME or not value.isprintable():
        raise UserError(f"{field} is {short(value)}; give text of 1 to {MAX_NAME} characters that can be printed")
    return value


def check_choice(field: str, value: object, choices: Iterable[str]) -> None:
    if value not in (known := tuple(choices)):
        raise UserError(f"{field} is {value!r}; choose one of: {', '.join(known)}")


@contextmanager
def errors_in(where: object, kind: type[ValueError] = UserError) -> Iterator[None]:
    """Turn errors of this kind into a UserError that begins with where they are, such as a file."""
    try:
        yield
    except kind as error:
        raise UserError(f"{where}: {error}") from None


def read_text(path: str | Path, max_bytes: int = MAX_TEXT_BYTES) -> str:
    """Return the text of a UTF-8 file, or raise a UserError of one line."""
    try:
        with open(path, "rb") as file:
            content = file.read(max_bytes + 1)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; check the path") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{path}: cannot be read ({reason}); give a readable file") from None
    if len(content) > max_bytes:
        raise UserError(f"{path}: more than {max_bytes} bytes, the most that is read of such a file; give less of it")
    try:
        return content.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError:
        raise UserError(f"{path}: not a text file; give UTF-8 text") from None


def open_own(path: str | Path, mode: Literal["w", "a"] = "w") -> TextIO:
    """Open a text file for writing; refuse a symbolic link, which other users of a shared folder may have put there."""
    try:
        return open(path, mode, encoding="utf-8", opener=lambda name, flags: os.open(name, flags | NO_FOLLOW, 0o666))
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise UserError(f"{path} is a symbolic link, which nothing is written through; remove it, or name another "
                        "folder") from None


def write_own(path: str | Path, text: str) -> None:
    """Write a text file; refuse a symbolic link (see `open_own`)."""
    with open_own(path) as file:
        file.write(text)


def parse_json(text: str) -> Any:
    """Return the value of a JSON text, or raise a UserError that names the broken line and column."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"broken JSON at line {error.lineno} column {error.colno} ({error.msg}); repair or rewrite "
                        "the file") from None
    except (ValueError, RecursionError):
        raise UserError("JSON with a number too long or lists too deep to be ours; repair or rewrite it") from None


def read_json(path: str | Path, max_bytes: int = MAX_TEXT_BYTES) -> Any:
    """Return the value of a JSON file; errors name the file."""
    text = read_text(path, max_bytes)
    with errors_in(path):
        return parse_json(text)


def read_toml(path: str | Path) -> dict[str, Any]:
    """Return the tables of a TOML file; errors name the file."""
    text = read_text(path, MAX_TOML_BYTES)
    for number, line in enumerate(text.splitlines(), 1):
        if line.count(".") > MAX_DOTS:
            raise UserError(f"{path}: line {number} has more than {MAX_DOTS} dots; write section.field = value")
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path}: broken TOML ({error}); repair the file") from None
    except (ValueError, RecursionError):
        raise UserError(f"{path}: TOML with a number too long or lists too deep to be ours; repair the file") from None


def is_count(text: str) -> bool:
    """Return whether a text has the form of a number; `parse_count` may still refuse it."""
    return _COUNT.fullmatch(text) is not None


def parse_count(field: str, text: str) -> int:
    """Return the whole number of any size that a text such as 128k stands for."""
    found = _COUNT.fullmatch(text)
    if found is None or len(text) > MAX_DIGITS or (found[3] and not found[4]):
        raise UserError(f"{field} is {short(text)}; give a whole number, such as 64_000, 128k or 1.5M")
    value = Fraction(f"{found[1]}{found[2].replace('_', '')}{found[3] or ''}") * UNITS[found[4].lower()]
    if value.denominator != 1:
        raise UserError(f"{field} is {short(text)}, which is {float(value):g} with k = 1024 and no whole number; give "
                        f"{round(value)}")
    return int(value)


def unit_text(value: int) -> str:
    """Format a number with the largest unit that leaves it whole: 131072 is 128K."""
    for unit in ("g", "m", "k"):
        if value and value % UNITS[unit] == 0:
            return f"{value // UNITS[unit]}{unit.upper()}"
    return f"{value:,}"
