"""`distca check`: is packing right in your model and trainer?"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated

import typer

from distca.check import causes, config_file
from distca.cli.doctor import Examination
from distca.cli.options import number, say
from distca.report.doctor import Record
from distca.train.rank_env import rank_in
from distca.train.settings import Settings
from distca.train.settings.checks import check_settings
from distca.validation import UserError, check_choice, check_whole

if TYPE_CHECKING:
    import torch

    from distca.profiling.roll_call import RollCall

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
    check_choice("--dtype", dtype, DTYPES)
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
    examine = partial(examine_model, model=model, enable=enable, dtype=dtype)
    Examination(examine, page, as_json, UPDATES, refusals=(UserError,)).run(
        settings, ranks, lambda: 1 + (enable or is_function))


def examine_model(
    call: RollCall, device: torch.device, join: Callable[[], object], update: Callable[[str], object], *, model: str,
    enable: bool, dtype: str,
) -> Record:
    """Examine the model as one rank."""
    import torch

    from distca.check.examine import examine
    from distca.check.subject import subject_of, with_attention

    def at(what: str) -> None:
        call.step(what)
        update(what)

    begin = time.monotonic()
    logging.getLogger("distca").setLevel(logging.ERROR)        # such as of single documents, which are ours
    update("ranks")
    call.gather("the meeting of all ranks", None)
    join()
    at("the model")
    subject = subject_of(model, device, None if dtype == "auto" else getattr(torch, dtype))
    if enable:
        from distca.integrations.huggingface import enable as with_distca
    found = examine(with_attention(subject, with_distca if enable else None), at)
    return {**found, "seconds": time.monotonic() - begin}


def page(found: Record) -> list[str]:
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
