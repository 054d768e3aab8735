"""`make paper`: the DistCA paper's figures, claim by claim, beside what our simulator and planner find."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from paper.cases import cases
from paper.check import Row, measure_all
from paper.claims import CLAIMS, Verdict, figures_of, marks, verdicts
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from distca.cli import run
from distca.cli.batches import MAX_BATCHES
from distca.cli.options import progress
from distca.cli.simulate import MAX_WORKERS
from distca.validation import UserError, check_whole

QUICK_BATCHES, FULL_BATCHES = 2, 10


app = typer.Typer(pretty_exceptions_enable=False, add_completion=False,
                  context_settings={"help_option_names": ["-h", "--help"]})


@app.command()
def check_paper(
    quick: Annotated[bool, typer.Option("--quick", help="Few batches of few settings: the shape, in seconds.")] = False,
    only: Annotated[str | None, typer.Option(help=f"Some of: {','.join(CLAIMS)}.")] = None,
    batches: Annotated[int | None, typer.Option(
        help=f"Sampled batches of every point; {FULL_BATCHES}, and {QUICK_BATCHES} with --quick.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for one plot per figure.")] = Path("paper"),
    plots: Annotated[bool, typer.Option(help="Draw them.")] = True,
    kept: Annotated[Path | None, typer.Option(
        help="File that keeps what was measured, so that an interrupted check goes on where it was.")] = None,
    workers: Annotated[int | None, typer.Option(help="Processes; as many as there are cores.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the checklist.")] = False,
) -> None:
    """Check the paper's claims: its figure, ours, the setting, and why where they differ."""
    claims = tuple(name.strip() for name in only.split(",")) if only is not None else tuple(CLAIMS)
    figures = figures_of(claims)
    num_batches = batches if batches is not None else QUICK_BATCHES if quick else FULL_BATCHES
    check_whole("batches", num_batches, most=MAX_BATCHES, why="more of them change no mean")
    check_whole("workers", 1 if workers is None else workers, most=MAX_WORKERS, why="one process for each core")
    save = _plotter(out) if plots else None
    with progress(1 + sum(len(cases(figure, quick)) for figure in figures)) as step:
        step("simulating")
        rows = measure_all(figures, quick=quick, num_batches=num_batches,
                           workers=workers or (1 if quick else os.cpu_count() or 1), step=step, kept=kept)
    found = verdicts(claims, rows)
    drawn = save(rows) if save else []
    if as_json:
        print(json.dumps({"batches": num_batches, "quick": quick, "claims": [asdict(verdict) for verdict in found],
                          "rows": rows, "plots": [str(path) for path in drawn]}))
        return
    print_checklist(found, Console())
    if drawn:
        print(f"{len(drawn)} plots in {out}.")


def print_checklist(found: list[Verdict], console: Console) -> None:
    """Print the table of claims, then why those that differ do."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for title, width in (("", None), ("claim and setting", None), ("paper, or aim", 13), ("ours", 13), ("", None)):
        table.add_column(title, max_width=width)
    for verdict in found:
        table.add_row(
            verdict.claim, Text.assemble(verdict.what, "\n", (verdict.setting, "dim")), verdict.paper, verdict.ours,
            Text("agrees", style="green") if verdict.agrees else Text("differs", style="bold yellow"))
    console.print(table)
    for verdict in found:
        if verdict.why:
            console.print(Text.assemble((f"{verdict.claim}, {verdict.what}: ", "bold"), verdict.why, "."))
    agree = sum(verdict.agrees for verdict in found)
    console.print(f"{agree} of {len(found)} agree.")


def _plotter(folder: Path) -> Callable[[dict[str, list[Row]]], list[Path]]:
    """Return the function that draws into the folder; refuse before the long work what would fail after it."""
    try:
        from paper.plots import save_plots
    except ModuleNotFoundError as error:
        raise UserError(f"plots need {error.name}, which is not installed; run: pip install {error.name}, or give "
                        "--no-plots") from None
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"out is {str(folder)!r} and cannot be made ({error.strerror}); give a folder that you may "
                        "write to, or --no-plots") from None
    return lambda rows: save_plots(rows, marks(), folder)


if __name__ == "__main__":
    run(app, "check_paper.py")
