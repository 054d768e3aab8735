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
from distca.cli.check import check_command
from distca.cli.checkpoint import checkpoint_app, export_command
from distca.cli.doctor import doctor_command
from distca.cli.plan import plan_command
from distca.cli.profile import profile_command
from distca.cli.report import report_command
from distca.cli.serve import serve_command
from distca.cli.simulate import simulate_command
from distca.cli.train import TRAIN_USAGE, train_command
from distca.cli.watch import watch_command
from distca.validation import EXTRA_OF, UserError, plain, to_install

MAX_LINE = 2000  # characters of an error
OURS = "This is a mistake in distca, not in what you gave. Please report it with the lines above and the command."

TO_DO = """distca balances attention over ranks. What would you like to do?

  see what balancing gains on your lengths     distca plan lengths.txt --ranks 16
  predict whole steps on a cluster             distca simulate --gpus 64
  train a decoder                              distca train --ranks 2
  balance attention in your own trainer        distca.integrations: enable(model), or distca.PackedAttention
  see a run or a prediction as a page          distca report runs/latest

Without lengths of your own, plan takes a sampler: distca plan prolong. distca doctor examines this machine.
distca -h lists all commands, and distca COMMAND -h the options of one."""

app = typer.Typer(pretty_exceptions_enable=False, help="Balance attention over ranks.",
                  context_settings={"help_option_names": ["-h", "--help"]})


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context, version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False
) -> None:
    if version:
        print(distca.__version__)
    elif context.invoked_subcommand is None:
        print(TO_DO)


app.add_typer(checkpoint_app, name="checkpoint")
app.command("check")(check_command)
app.command("doctor")(doctor_command)
app.command("export")(export_command)
app.command("plan")(plan_command)
app.command("profile")(profile_command)
app.command("report")(report_command)
app.command("serve")(serve_command)
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
        package = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
        if package in EXTRA_OF:
            _fail(f"this needs {package}, which is not installed; {to_install(package)}")
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
