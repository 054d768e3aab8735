"""Options that several commands have: numbers as people type them, and how a file of lengths is read.

Files that commands write: what would fail after long work is refused before it.

Show that long work moves on, without a flicker for what is quick.
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
from distca.validation import UserError, is_count, parse_count, short

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


PAGE_SUFFIXES = (".html", ".htm")
PLOT_SUFFIXES = (".png", ".svg", ".pdf")

T = TypeVar("T")


def check_output(option: str, path: Path, suffixes: tuple[str, ...] = ()) -> None:
    """A file of this name can be made: it is in a folder, is no folder itself and ends as it should."""
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


def page_writer(option: str, path: Path) -> Callable[[ReportData], None]:
    """What writes a report page into `path`."""
    from distca.report.page import write_page

    return _writer(option, path, PAGE_SUFFIXES, write_page)


def plot_writer(option: str, path: Path) -> Callable[[PlannedBatch], None]:
    """What draws a plan into `path`."""
    check_output(option, path, PLOT_SUFFIXES)
    try:
        from distca.report.plots import save_plot
    except ModuleNotFoundError as error:
        raise UserError(f"{option} needs {error.name}, which is not installed; run: pip install {error.name}"
                        ) from None
    return _writer(option, path, PLOT_SUFFIXES, save_plot)


def _writer(
    option: str, path: Path, suffixes: tuple[str, ...], write: Callable[[T, Path], None]
) -> Callable[[T], None]:
    check_output(option, path, suffixes)

    def guarded(content: T) -> None:
        try:
            write(content, path)
        except OSError as error:
            raise _not_writable(option, path, error) from None

    return guarded


def _not_writable(option: str, path: Path, error: OSError) -> ValueError:
    return UserError(f"{option} is {str(path)!r} and cannot be written ({error.strerror}); give a file in a folder "
                     "that you may write to")


PROGRESS_AFTER_SECONDS = 1.0


class StepHeard(Protocol):
    """Is told what is being done now."""

    def __call__(self, name: str, advance: int = 1) -> None: ...


def say(line: str) -> None:
    """A first line on the screen where what follows takes a while to begin; files and pipes are spared it."""
    if sys.stderr.isatty():
        print(line, file=sys.stderr, flush=True)


@contextmanager
def progress(num_steps: int = 5) -> Iterator[StepHeard]:
    """A progress bar on stderr that appears when the steps take longer than a second."""
    columns = (TextColumn("{task.description:<20}"), BarColumn(), TimeElapsedColumn())
    with_bar = Progress(*columns, console=Console(stderr=True), transient=True)
    task = with_bar.add_task("", total=num_steps)
    timer = Timer(PROGRESS_AFTER_SECONDS, with_bar.start)
    timer.daemon = True

    def step(name: str, advance: int = 1) -> None:
        with_bar.update(task, description=name, advance=advance)

    if with_bar.console.is_terminal:
        timer.start()
    try:
        yield step
    finally:
        timer.cancel()
        if with_bar.live.is_started:
            with_bar.stop()
