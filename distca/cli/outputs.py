"""Files that commands write: what would fail after long work is refused before it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from distca.report.figures import PlannedBatch, ReportData
from distca.validation import UserError, short

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
