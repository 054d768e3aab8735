"""The `distca` command: predict what balanced attention saves on your lengths, and train with it.

A user's mistake ends in one line on stderr and exit code 2: modules raise a UserError that names the field, its value
and the remedy, and `run` prints it. Any other exception is a bug in distca: its traceback is printed with a request to
report it, and the exit code is 1.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NoReturn

import typer

import distca
from distca.cli.checkpoint import checkpoint_app, export_command
from distca.cli.doctor import doctor_command
from distca.cli.plan import plan_command
from distca.cli.profile import profile_command
from distca.cli.report import report_command
from distca.cli.simulate import simulate_command
from distca.cli.train import TRAIN_USAGE, train_command
from distca.cli.watch import watch_command
from distca.validation import UserError, plain

MAX_LINE = 2000  # characters of an error
OURS = "This is a mistake in distca, not in what you gave. Please report it with the lines above and the command."

app = typer.Typer(pretty_exceptions_enable=False, help="Balance attention over ranks.",
                  context_settings={"help_option_names": ["-h", "--help"]})


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context, version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False
) -> None:
    if version:
        print(distca.__version__)
    elif context.invoked_subcommand is None:
        print(context.get_help())


app.add_typer(checkpoint_app, name="checkpoint")
app.command("doctor")(doctor_command)
app.command("export")(export_command)
app.command("plan")(plan_command)
app.command("profile")(profile_command)
app.command("report")(report_command)
app.command("simulate")(simulate_command)
app.command("train", **TRAIN_USAGE)(train_command)
app.command("watch")(watch_command)


def main(arguments: Sequence[str] | None = None) -> None:
    run(app, "distca", arguments)


def run(commands: Callable[..., Any], name: str, arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a command line and exit; see the module for how errors end."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal without block characters still gets the numbers
    try:
        status = commands(args=None if arguments is None else list(arguments), prog_name=name, standalone_mode=False)
    except (typer.Abort, KeyboardInterrupt):
        _end(130)
    except MemoryError:
        _fail("not enough memory for what was asked; give fewer ranks, documents or tokens")
    except Exception as error:
        if isinstance(error, OSError | UserError):
            _fail(str(error))
        if hasattr(error, "format_message"):  # an error of click, or of the copy of click in typer
            _fail(error.format_message())
        traceback.print_exc()
        print(f"distca: {OURS}", file=sys.stderr)
        _end(1)
    _end(status if isinstance(status, int) else 0)


def _fail(message: str) -> NoReturn:
    """Print one line of printable characters on stderr, and exit with code 2."""
    line = plain(" ".join(message.split()))
    print(f"distca: error: {line if len(line) <= MAX_LINE else line[:MAX_LINE] + ' …'}", file=sys.stderr)
    _end(2)


def _end(code: int) -> NoReturn:
    """Exit. A rank does not join its process group's threads, which may wait for other ranks or for the GIL."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        distca.end_process(code)
    sys.exit(code)
