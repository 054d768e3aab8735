"""`distca checkpoint` verifies checkpoints; `distca export` writes weights as a folder that Hugging Face loads."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from distca.cli.options import say
from distca.validation import UserError, check_choice, plain

checkpoint_app = typer.Typer(help="Verify checkpoints of `distca train`.", no_args_is_help=True)
Folder = Annotated[Path, typer.Argument(help="A checkpoint.folder, or one step_… folder of it.", show_default=False)]


@checkpoint_app.command("verify")
def verify_command(folder: Folder) -> None:
    """Read every checkpoint and compare all its bytes with their checksums; the exit code is 1 if one is not good.

    A checkpoint whose save was interrupted, or is still running, is torn: no run uses it, and the exit code stays 0.
    """
    say(f"distca checkpoint: reading {plain(str(folder))} …")
    from distca.train.checkpoint.folder import DamagedError, TornError, verify

    bad = 0
    for path in checkpoints_in(folder):
        try:
            manifest = verify(path)
        except DamagedError as error:
            bad += 1
            print(f"{path.name}  damaged: {error}")
        except TornError as error:
            print(f"{path.name}  torn: {error}")
        except ValueError as error:
            bad += 1
            print(f"{path.name}  not read: {error}")
        else:
            num_bytes = sum(facts.num_bytes for facts in manifest.files.values())
            print(f"{path.name}  good: {len(manifest.tensors)} tensors in {len(manifest.files)} files, "
                  f"{num_bytes:,} bytes")
    say("Next: restore what is not good, or remove it; runs resume from the newest good one." if bad else
        f"Next: distca export {shlex.quote(str(folder))} my-model writes the weights for Hugging Face.")
    raise typer.Exit(1 if bad else 0)


def checkpoints_in(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, oldest first, or the folder itself if it is a checkpoint."""
    from distca.train.checkpoint.folder import STEP_NAME, step_folders

    if STEP_NAME.fullmatch(folder.absolute().name) and folder.is_dir():
        return [folder.absolute()]
    found = step_folders(folder)
    if not found:
        raise UserError(f"{folder}: holds no step_… folder; give a checkpoint.folder of distca train, or one of its "
                        "checkpoints")
    return found


def export_command(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint.folder, of which the newest good one is taken, or "
                                                    "one step_… folder of it.", show_default=False)],
    out: Annotated[Path, typer.Argument(help="A new folder for config.json, safetensors and tokenizer.",
                                        show_default=False)],
    dtype: Annotated[str, typer.Option(help="Of the files: bfloat16, float16, float32 or float64; by default that of "
                                            "the checkpoint.", show_default=False)] = "",
) -> None:
    """Write a checkpoint's weights as a Hugging Face model that `from_pretrained` opens.

    Reads checkpoints of any mesh, one tensor at a time, without a GPU. OUT appears only when it is complete.
    """
    say(f"distca export: reading {plain(str(checkpoint))} …")
    found = checkpoints_in(checkpoint)
    from distca.train.checkpoint.export import DTYPES, export_newest

    if dtype:
        check_choice("--dtype", dtype, DTYPES)
    export_newest(found, out, dtype=dtype or None)
    print(f"Next: AutoModelForCausalLM.from_pretrained({str(out)!r}) opens it.")
