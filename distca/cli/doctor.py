"""`distca doctor`: examine a machine or a cluster before the first run on it.

`Examination` is what `distca check` shares: a roll call names the rank that hangs, and rank 0 shows the record. Ranks
that are started here write it to a file instead, which the process that started them shows.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, NamedTuple, NoReturn

import typer

import distca
from distca.cli.options import number, progress, say
from distca.report.doctor import Record, page, report
from distca.train.ending import report_end
from distca.train.launch import quiet_torch, run_ranks
from distca.train.rank_env import rank_in, this_rank
from distca.train.settings import Settings
from distca.train.settings.checks import check_settings
from distca.train.settings.preflight import device_for
from distca.validation import MAX_LOCAL_RANKS, check_whole, write_own

GROUP_GRACE_SECONDS = 30  # the roll call names who hangs before the process group gives up


def doctor_command(
    ranks: Annotated[int | None, number(
        "Ranks to start on this machine; one per GPU, or two on CPUs. Not used under torchrun or srun.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    timeout_seconds: Annotated[int, number("How long a rank waits for another in any step.")] = 120,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Examine this machine, or torchrun's or srun's ranks: versions, links, attention, speed; exit code 1: wrong."""
    check_whole("timeout_seconds", timeout_seconds)
    env, examination = rank_in(os.environ), Examination(examine_group, page, as_json, num_updates=4)
    if env is None or env.rank == 0:
        say("distca doctor: loading torch …")
    if (broken := _without_torch()) is not None:
        raise typer.Exit(examination.show(report([], broken)))
    settings = Settings().with_values({"run.timeout_seconds": timeout_seconds, "run.device": device})
    check_settings(settings)

    def usual() -> int:
        import torch

        return 2 if device_for(settings, 0).type == "cpu" else torch.cuda.device_count()

    examination.run(settings, ranks, usual)


def _without_torch() -> str | None:
    """Return why torch cannot be imported; None if it can be."""
    if find_spec("torch") is None:
        return "is not installed"
    quiet_torch()
    try:
        importlib.import_module("torch")
    except (ImportError, OSError, RuntimeError) as error:        # often a library that torch is linked with is missing
        return f"cannot be imported ({(str(error).splitlines() or [type(error).__name__])[0]})"
    return None


def examine_group(*place: Any) -> Record:
    """Examine the group as one of its ranks."""
    from distca.profiling.doctor import examine

    logging.getLogger("distca").setLevel(logging.WARNING)
    return report(examine(*place))


class Examination(NamedTuple):
    """What to examine and how to show it."""

    examine: Callable[..., Record]  # by a RollCall, the device, a function that starts the process group, and progress
    page: Callable[[Record], list[str]]
    as_json: bool
    num_updates: int
    refusals: tuple[type[Exception], ...] = ()  # errors that end a rank without the roll call

    def show(self, found: Record) -> int:
        """Print what was found; return the exit code."""
        print(json.dumps(found, indent=1) if self.as_json else "\n".join(self.page(found)), flush=True)
        return int(not found["ok"])

    def run(self, settings: Settings, ranks: int | None, usual: Callable[[], int]) -> NoReturn:
        """Examine the launcher's ranks or, without a launcher, local ones, `usual` many by default; then exit."""
        if rank_in(os.environ) is not None:
            distca.end_process(run_ranks(settings, self.as_rank))
        by_default = usual()
        ranks = check_whole("ranks", by_default if ranks is None else ranks, most=MAX_LOCAL_RANKS)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "found.json"
            code = run_ranks(settings.with_values({"run.ranks": ranks}), partial(self.as_rank, file=file))
            raise typer.Exit(code or self.show(json.loads(file.read_text(encoding="utf-8"))))

    def as_rank(self, settings: Settings, *, file: Path | None = None) -> int:
        """Examine as one rank; rank 0 writes the record to the file, or shows it if there is none."""
        from distca.profiling.roll_call import RollCall
        from distca.train.groups import start_group

        env, timeout = this_rank(), settings.run.timeout_seconds
        patient = settings.with_values({"run.timeout_seconds": timeout + GROUP_GRACE_SECONDS})
        call = RollCall(env.address, env.port, env.rank, env.world, timeout_seconds=timeout, report=report_end)
        try:
            with progress(self.num_updates) if env.rank == 0 else nullcontext(lambda name: None) as update:
                device = device_for(settings, env.local_rank)
                join = partial(start_group, patient, device, env.local_world, store=call.for_torch, rank=env.rank,
                               world_size=env.world)
                found = self.examine(call, device, join, update)
        except self.refusals:
            raise
        except (RuntimeError, OSError, ValueError) as error:
            call.lost(error)
        if env.rank == 0 and file is None:
            self.show(found)
        elif env.rank == 0 and file is not None:
            write_own(file, json.dumps(found))
        call.close()                                             # after rank 0 said it: torchrun ends all if one fails
        return int(not found["ok"]) if file is None else 0
