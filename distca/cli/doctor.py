"""`distca doctor`: examine a machine or a cluster before the first run on it."""

from __future__ import annotations

import importlib
import json
import logging
import os
import tempfile
from contextlib import nullcontext
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

import distca
from distca.cli.options import number, progress, say
from distca.report.doctor import page, report
from distca.train.launch import quiet_torch, rank_in, report_end, run_ranks, this_rank
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
    env = rank_in(os.environ)
    if env is None or env.rank == 0:
        say("distca doctor: loading torch …")
    if (broken := _without_torch()) is not None:
        raise typer.Exit(_show(report([], broken), as_json))
    settings = Settings().with_values({"run.timeout_seconds": timeout_seconds, "run.device": device})
    check_settings(settings)
    if env is not None:
        code = run_ranks(settings, partial(examine_rank, as_json=as_json))
        distca.end_process(code)
    import torch

    usual = 2 if device_for(settings, 0).type == "cpu" else torch.cuda.device_count()
    ranks = check_whole("ranks", usual if ranks is None else ranks, most=MAX_LOCAL_RANKS)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "report.json"
        code = run_ranks(settings.with_values({"run.ranks": ranks}), partial(examine_rank, as_json=as_json, file=file))
        raise typer.Exit(code or _show(json.loads(file.read_text(encoding="utf-8")), as_json))


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


def examine_rank(settings: Settings, *, as_json: bool, file: Path | None = None) -> int:
    """Examine the group as one of its ranks; rank 0 writes the report to the file, or shows it if there is none."""
    from distca.profiling.doctor import examine
    from distca.profiling.roll_call import RollCall
    from distca.train.trainer import start_group

    logging.getLogger("distca").setLevel(logging.WARNING)
    env, timeout = this_rank(), settings.run.timeout_seconds
    patient = settings.with_values({"run.timeout_seconds": timeout + GROUP_GRACE_SECONDS})
    call = RollCall(env.address, env.port, env.rank, env.world, timeout_seconds=timeout, report=report_end)
    try:
        with progress(4) if env.rank == 0 else nullcontext(lambda name: None) as update:
            device = device_for(settings, env.local_rank)
            join = partial(start_group, patient, device, env.local_world, store=call.for_torch, rank=env.rank,
                           world_size=env.world)
            found = report(examine(call, device, join, update))
    except (RuntimeError, OSError, ValueError) as error:
        call.lost(error)
    code = int(not found["ok"])
    if env.rank == 0:
        if file is None:
            _show(found, as_json)
        else:
            write_own(file, json.dumps(found))
            code = 0                                             # the launcher shows it
    call.close()                                                 # after rank 0 said it: torchrun ends all if one fails
    return code if file is None else 0


def _show(found: dict[str, Any], as_json: bool) -> int:
    print(json.dumps(found, indent=1) if as_json else "\n".join(page(found)), flush=True)
    return int(not found["ok"])
