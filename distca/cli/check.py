"""`distca check`: is packing right in your model and trainer?"""

from __future__ import annotations

import json
import logging
import os
import tempfile
import time
from contextlib import nullcontext
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

import distca
from distca.check import causes, config_file
from distca.cli.doctor import GROUP_GRACE_SECONDS
from distca.cli.options import number, progress, say
from distca.train.launch import rank_in, report_end, run_ranks, this_rank
from distca.train.settings import Settings
from distca.train.settings.checks import check_settings
from distca.train.settings.preflight import device_for
from distca.validation import MAX_LOCAL_RANKS, UserError, check_whole, write_own

DTYPES = ("auto", "float64", "float32", "bfloat16")
UPDATES = 200  # progress of an ordinary model; more do no harm


def check_command(
    model: Annotated[str, typer.Argument(help="A folder with config.json, a config.json, or module:function, which "
                                              "returns a model and a batch as the model takes it.")],
    enable: Annotated[bool, typer.Option("--enable", help="Check with distca's attention (Transformers).")] = False,
    ranks: Annotated[int | None, number(
        "Ranks to start on this machine; 2 with --enable or for a function, else 1. Not used under torchrun or srun."
    )] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    dtype: Annotated[str, typer.Option(help=f"Of a model built from a config: {', '.join(DTYPES)}.")] = "auto",
    timeout_seconds: Annotated[int, number("How long a rank waits for another in any probe.")] = 600,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check that packing is right in a model and trainer: documents, positions, loss; exit code 1: wrong."""
    check_whole("timeout_seconds", timeout_seconds)
    if dtype not in DTYPES:
        raise UserError(f"--dtype is {dtype!r}; choose one of: {', '.join(DTYPES)}")
    env, is_function = rank_in(os.environ), config_file(model) is None
    if env is None or env.rank == 0:
        say("distca check: loading torch and transformers …")
    for package in ("torch", *["transformers"] * (enable or not is_function)):
        if find_spec(package) is None:
            raise UserError(f"distca check needs {package}, which is not installed; run: pip install {package}")
    settings = Settings().with_values({"run.timeout_seconds": timeout_seconds, "run.device": device})
    check_settings(settings)
    if not is_function:
        settings = settings.with_values({"run.threads": 1})      # its models are too narrow to share
    main = partial(check_rank, model=model, enable=enable, dtype=dtype, as_json=as_json)
    if env is not None:
        distca.end_process(run_ranks(settings, main))
    ranks = check_whole("ranks", (1 + (enable or is_function)) if ranks is None else ranks, most=MAX_LOCAL_RANKS)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "check.json"
        code = run_ranks(settings.with_values({"run.ranks": ranks}), partial(main, file=file))
        raise typer.Exit(code or _show(json.loads(file.read_text(encoding="utf-8")), as_json))


def check_rank(
    settings: Settings, *, model: str, enable: bool, dtype: str, as_json: bool, file: Path | None = None
) -> int:
    """Examine the model as one rank; rank 0 writes the record to the file, or shows it if there is none."""
    import torch

    from distca.check.examine import examine
    from distca.check.subject import subject_of, with_attention
    from distca.profiling.roll_call import RollCall
    from distca.train.trainer import start_group

    begin = time.monotonic()
    logging.getLogger("distca").setLevel(logging.ERROR)        # such as of single documents, which are ours
    env, timeout = this_rank(), settings.run.timeout_seconds
    patient = settings.with_values({"run.timeout_seconds": timeout + GROUP_GRACE_SECONDS})
    call = RollCall(env.address, env.port, env.rank, env.world, timeout_seconds=timeout, report=report_end)
    try:
        with progress(UPDATES) if env.rank == 0 else nullcontext(lambda name: None) as update:
            place = device_for(settings, env.local_rank)
            update("ranks")
            call.gather("the meeting of all ranks", None)
            start_group(patient, place, env.local_world, store=call.for_torch, rank=env.rank, world_size=env.world)

            def at(what: str) -> None:
                call.step(what)
                update(what)

            at("the model")
            subject = subject_of(model, place, None if dtype == "auto" else getattr(torch, dtype))
            if enable:
                from distca.integrations.huggingface import enable as with_distca
            found = examine(with_attention(subject, with_distca if enable else None), at)
            found["seconds"] = time.monotonic() - begin
    except UserError:
        raise
    except (RuntimeError, OSError, ValueError) as error:
        call.lost(error)
    code = int(not found["ok"])
    if env.rank == 0:
        if file is None:
            _show(found, as_json)
        else:
            write_own(file, json.dumps(found))
            code = 0                                             # the launcher shows it
    call.close()
    return code if file is None else 0


def page(found: dict[str, Any]) -> list[str]:
    """Return the lines that a person reads."""
    ranks = f"{found['ranks']} rank{'s' * (found['ranks'] > 1)}"
    lines = [f"model    {found['model']}; {found['dtype']} on {found['device']}, {ranks}"]
    for batch in dict.fromkeys(one["batch"] for one in found["probes"]):
        some = [one for one in found["probes"] if one["batch"] == batch]
        wrong = [one["probe"] for one in some if one["wrong"]]
        lines.append(f"{'WRONG' if wrong else 'ok':<8} {batch}: {', '.join(wrong or [one['probe'] for one in some])}")
    first = causes(found["findings"])
    lines += [f"{'WRONG':<8} {one['line']}" for one in first]
    lines += [f"{'so':<8} {one['what']}, by {one['size']:.1e}" for one in found["findings"] if one not in first]
    lines += [f"{'note':<8} {one}" for one in found["notes"]]
    count = len(first)
    lines.append(f"{'summary':<8} {len(found['probes'])} probes in {found['seconds']:.0f} s: " + (
        f"{count} thing{'s are' if count > 1 else ' is'} wrong" if count else "packing is right"))
    lines.append(f"{'next':<8} " + ("mend the first line, then check again" if count else
                                    "distca plan LENGTHS says what balancing saves on your documents"))
    return lines


def _show(found: dict[str, Any], as_json: bool) -> int:
    print(json.dumps(found, indent=1) if as_json else "\n".join(page(found)), flush=True)
    return int(not found["ok"])
