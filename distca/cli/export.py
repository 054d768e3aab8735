"""`distca export`: trained weights as a folder that others load."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from distca.cli.checkpoint import checkpoints_in
from distca.validation import UserError


def export_command(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint.folder, of which the newest good one is taken, or "
                                                    "one step_… folder of it.", show_default=False)],
    out: Annotated[Path, typer.Argument(help="A new folder for config.json, safetensors and tokenizer.",
                                        show_default=False)],
    dtype: Annotated[str, typer.Option(help="Of the files: bfloat16, float16, float32 or float64; by default that of "
                                            "the checkpoint.", show_default=False)] = "",
) -> None:
    """Write a checkpoint's weights as a Hugging Face model that `from_pretrained` opens.

    From any mesh's checkpoint, a tensor at a time, without a GPU. OUT appears when it is complete.
    """
    found = checkpoints_in(checkpoint)
    from distca.train.checkpoint.export import DTYPES, export_newest

    if dtype and dtype not in DTYPES:
        raise UserError(f"--dtype is {dtype!r}; choose one of: {', '.join(DTYPES)}")
    export_newest(found, out, dtype=dtype or None)
