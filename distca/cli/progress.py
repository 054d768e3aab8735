"""Show that long work moves on, without a flicker for what is quick."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Timer
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

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
