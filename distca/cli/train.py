"""`distca train`: read settings from a file and the command line, check them, and launch ranks.

Every field of every section is an option, `--section.field value`, so options are parsed here instead of being declared
one by one; `--help` lists the common ones and `--show-settings` prints all of them as a file to start from.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Annotated, Any

import typer

import distca
from distca.cli.options import number
from distca.train.settings import Settings, known_settings, load_settings, unknown_setting
from distca.train.settings.checks import check_settings
from distca.validation import UNITS_HELP, UserError


def _train(settings: Settings) -> int:
    """Run one rank; only ranks import the trainer and torch."""
    from distca.train.trainer import run

    return run(settings)


def train_command(
    context: typer.Context,
    ranks: Annotated[int | None, number(
        "Ranks to start on this machine, short for --run.ranks; not used under torchrun or srun.")] = None,
    show_settings: Annotated[bool, typer.Option(
        "--show-settings", help="Print the settings as a documented TOML file, and stop.")] = False,
) -> None:
    """Train a decoder with attention balanced over the ranks."""
    path, overrides = parse_arguments(context.args)
    if ranks is not None:
        if "run.ranks" in overrides:
            raise UserError(f"--ranks is {ranks} and --run.ranks is {overrides['run.ranks']}; give one of them")
        overrides["run.ranks"] = str(ranks)
    settings = load_settings(path, overrides)
    if show_settings:
        check_settings(settings)
        print(settings.to_toml(), end="")
        return
    from distca.train.launch import launch
    from distca.train.rank_env import rank_in

    code = launch(settings, _train)
    if rank_in(os.environ) is not None:                         # a rank of torchrun or srun
        distca.end_process(code)
    raise typer.Exit(code)


def parse_arguments(arguments: Sequence[str]) -> tuple[str | None, dict[str, str]]:
    """Return the path, if any, and the values of options `--section.field value` or `--section.field=value`."""
    paths: list[str] = []
    overrides: dict[str, str] = {}
    known = known_settings()
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if not argument.startswith("-"):
            paths.append(argument)
            continue
        name, equals, value = argument.partition("=")
        key = name.removeprefix("--").replace("-", "_")
        if key not in known:
            raise unknown_setting(f"option {name}", key)
        if not equals:
            if not rest:
                raise UserError(f"{name} has no value; write {name} VALUE")
            value = rest.pop(0)
        if key in overrides:
            raise UserError(f"{name} is given twice, as {overrides[key]!r} and {value!r}; give it once")
        overrides[key] = value
    if len(paths) > 1:
        raise UserError(f"CONFIG is {' and '.join(map(repr, paths))}; give one file")
    return (paths[0] if paths else None), overrides


def _common() -> str:
    """Return the text of --help on the common settings and their defaults."""
    lines = [f"--{known.name} {json.dumps(known.default)}: {known.meaning}" for known in known_settings().values()
             if known.common and known.name != "run.ranks"]
    return "\n\n".join([f"Common settings with their defaults; --show-settings prints all. {UNITS_HELP}", *lines])


TRAIN_USAGE: dict[str, Any] = {
    "context_settings": {"allow_extra_args": True, "ignore_unknown_options": True},
    "options_metavar": "[CONFIG.toml] [--section.field VALUE]... [OPTIONS]",
    "epilog": _common(),
}
