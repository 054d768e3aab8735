"""Options that several commands have: numbers as people type them, and how a file of lengths is read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from distca.planning.tolerance import TOLERANCES, asked_tolerance
from distca.units import is_count, parse_count
from distca.validation import UserError, short
from distca.workload.length_files import FORMATS

COUNT = "COUNT"
TOLERANCE = "0…1|auto"
TOLERANCE_HELP = "How far above the mean the largest work may be, 0 to 1"
AUTO_HELP = f"{', '.join(f'{one:g}' for one in TOLERANCES[:-1])} or {TOLERANCES[-1]:g}"
COLUMN_HELP = ("Column of a table, or key of JSON objects, that holds a document's length, its tokens as a list, or "
               "with --tokenizer its text; `length` or `input_ids` unless given.")


def count(value: Any) -> Any:
    """A whole number as people type it; defaults are numbers already."""
    if not isinstance(value, str):
        return value
    try:
        return parse_count("the value", value)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def counts(field: str, text: str) -> list[int]:
    """One number or several with commas between them."""
    try:
        return [parse_count(field, part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"{field} is {text!r}; give a whole number, or several with commas between them") from None


def tolerance_option(value: Any) -> Any:
    """A number from 0 to 1, or auto; defaults are either already."""
    try:
        return asked_tolerance(value)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def one_source(words: Sequence[str]) -> str:
    """SOURCE, which is one word, or lengths in several."""
    if len(words) > 1 and not all(is_count(part) for word in words for part in word.split(",")):
        raise UserError(f"SOURCE is {' and '.join(map(short, words[:3]))}; give one file or name, or lengths alone")
    return ",".join(words)


Column = Annotated[str | None, typer.Option(help=COLUMN_HELP)]
Format = Annotated[str | None, typer.Option(
    "--format", help=f"What the file is where its name does not say: {', '.join(FORMATS)}.")]
Tokenizer = Annotated[str | None, typer.Option(
    help="A tokenizer.json, or a folder with one: lengths are then those of the texts, as `text` or --column say.")]
