"""Options that several commands share, checks of output files, and progress on stderr.

Output paths are checked before the long computation whose result is written to them.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Timer
from typing import Annotated, Any, Protocol, TypeVar

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from distca.corpus.lengths import FORMATS
from distca.planning.choose import TOLERANCES, asked_tolerance
from distca.report.figures import PlannedBatch, ReportData
from distca.report.page import write_page
from distca.validation import UserError, is_count, parse_count, short

AUTO_HELP = f"{', '.join(f'{one:g}' for one in TOLERANCES[:-1])} or {TOLERANCES[-1]:g}"
PAGE_SUFFIXES = (".html", ".htm")
PLOT_SUFFIXES = (".png", ".svg", ".pdf")
PROGRESS_AFTER_SECONDS = 1.0

Column = Annotated[str | None, typer.Option(
    help="Column of a table, or key of JSON objects, that holds a document's length, its tokens as a list, or with "
         "--tokenizer its text; `length` or `input_ids` unless given.")]
Format = Annotated[str | None, typer.Option(
    "--format", help=f"What the file is where its name does not say: {', '.join(FORMATS)}.")]
Tokenizer = Annotated[str | None, typer.Option(
    help="A tokenizer.json, or a folder with one: lengths are then those of the texts, as `text` or --column say.")]
Split = Annotated[str | None, typer.Option(
    help="Which split of a folder that holds several, such as train; every file's name or folder says its split.")]
T = TypeVar("T")


def number(help_text: str) -> Any:
    """Declare an option whose value is a whole number as people type it: 128k, 64_000."""
    return typer.Option(parser=_parsed(lambda text: parse_count("the value", text)), metavar="COUNT", help=help_text)


def tolerance_option(auto: str) -> Any:
    """Declare a tolerance option: a number from 0 to 1, or `auto`, which the parameter explains."""
    return typer.Option(parser=_parsed(asked_tolerance), metavar="0…1|auto",
                        help=f"How far above the mean the largest work may be, 0 to 1; auto: {auto}")


def _parsed(parse: Callable[[str], Any]) -> Callable[[Any], Any]:
    """Make a parser for typer, which also passes defaults that are already values."""
    def parsed(value: Any) -> Any:
        try:
            return parse(value) if isinstance(value, str) else value
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None

    return parsed


def counts(field: str, text: str) -> list[int]:
    """Parse one whole number, or several with commas between them."""
    try:
        return [parse_count(field, part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"{field} is {text!r}; give a whole number, or several with commas between them") from None


def one_source(words: Sequence[str]) -> str:
    """Join the words of SOURCE: one file or name, or lengths in several words."""
    if len(words) > 1 and not all(is_count(part) for word in words for part in word.split(",")):
        raise UserError(f"SOURCE is {' and '.join(map(short, words[:3]))}; give one file or name, or lengths alone")
    return ",".join(words)


def check_output(option: str, path: Path, suffixes: tuple[str, ...] = ()) -> None:
    """Refuse a path at which no file can be written, or whose suffix is wrong."""
    if not str(path).isprintable():
        raise UserError(f"{option} is {short(str(path))}; give a name that can be printed")
    if suffixes and path.suffix not in suffixes:
        raise UserError(f"{option} is {str(path)!r}; give a file name that ends in {', '.join(suffixes)}")
    if not path.parent.is_dir():
        raise UserError(f"{option} is {str(path)!r} but the folder {str(path.parent)!r} does not exist; create it "
                        "first")
    if path.is_dir():
        raise UserError(f"{option} is {str(path)!r}, a folder, and cannot be written; give the name of a file")
    try:
        if not path.exists():
            with tempfile.TemporaryFile(dir=path.parent):
                pass
    except OSError as error:
        raise _not_writable(option, path, error) from None


def page_writer(option: str, path: Path | None) -> Callable[[ReportData], None]:
    """Return a function that writes a report page to the path, if there is one."""
    return _writer(option, path, PAGE_SUFFIXES, write_page)


def plot_writer(option: str, path: Path | None) -> Callable[[PlannedBatch], None]:
    """Return a function that saves a plot of a plan to the path, if there is one."""
    if path is None:
        return lambda _: None
    check_output(option, path, PLOT_SUFFIXES)
    from distca.report.plots import save_plot

    return _writer(option, path, PLOT_SUFFIXES, save_plot)


def _writer(
    option: str, path: Path | None, suffixes: tuple[str, ...], write: Callable[[T, Path], None]
) -> Callable[[T], None]:
    if path is None:
        return lambda _: None
    check_output(option, path, suffixes)

    def guarded(content: T) -> None:
        try:
            write(content, path)
        except OSError as error:
            raise _not_writable(option, path, error) from None

    return guarded


def _not_writable(option: str, path: Path, error: OSError) -> UserError:
    return UserError(f"{option} is {str(path)!r} and cannot be written ({error.strerror}); give a file in a folder "
                     "that you may write to")


def say(line: str) -> None:
    """Print a first line on a terminal before a slow start; files and pipes do not get it."""
    if sys.stderr.isatty():
        print(line, file=sys.stderr, flush=True)


class OnProgress(Protocol):
    """Progress callback: receives the name of the current activity."""

    def __call__(self, name: str, advance: int = 1) -> None: ...


@contextmanager
def progress(num_updates: int = 5) -> Iterator[OnProgress]:
    """Show a progress bar on stderr if the work takes longer than a second."""
    columns = (TextColumn("{task.description:<20}"), BarColumn(), TimeElapsedColumn())
    with_bar = Progress(*columns, console=Console(stderr=True), transient=True)
    task = with_bar.add_task("", total=num_updates)
    timer = Timer(PROGRESS_AFTER_SECONDS, with_bar.start)
    timer.daemon = True
    if with_bar.console.is_terminal:
        timer.start()
    try:
        yield lambda name, advance=1: with_bar.update(task, description=name, advance=advance)
    finally:
        timer.cancel()
        if with_bar.live.is_started:
            with_bar.stop()
