"""`distca serve`: join a run that trains, and compute attention for it until it ends or SIGTERM comes."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Annotated

import typer

from distca.cli.options import say
from distca.validation import UserError, check_choice, check_number

DEVICES = ("auto", "cpu", "cuda")


def serve_command(
    join: Annotated[str, typer.Option(
        help="HOST:PORT of the run: its line on the screen, or join in its members.json.")],
    secret_file: Annotated[Path | None, typer.Option(
        help="The run's secret, the file of that name in its folder; without it the variable DISTCA_SECRET.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    patience: Annotated[float, typer.Option(
        help="Seconds to try while the run cannot be joined, also after it let this server go.")] = 60.0,
) -> None:
    """Serve attention to a run: join it, leave on SIGTERM or Ctrl-C, end with it."""
    host, _, port = join.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise UserError(f"join is {join!r}; give HOST:PORT, such as 10.0.0.7:29600")
    check_choice("device", device, DEVICES)
    check_number("patience", patience, least=0)
    say("distca serve: loading torch …")
    import torch

    from distca.runtime.liveness import end_process
    from distca.runtime.pool.server import Server
    from distca.runtime.transport import TransportError
    from distca.train.servers import leave_on_signals, read_secret, secret_in

    logging.basicConfig(format="%(message)s")                    # when it joins, and when the run lets it go
    logging.getLogger("distca").setLevel(logging.INFO)
    secret = secret_in(os.environ) if secret_file is None else read_secret(secret_file)
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("device is 'cuda' but torch finds no GPU here; give cpu or auto")
    where = "cuda" if device != "cpu" and torch.cuda.is_available() else "cpu"
    server = Server(lambda: (host, int(port)), secret, device=where, patience_seconds=patience)
    leave_on_signals(server)
    try:
        served = server.run()
    except TransportError as error:
        raise UserError(str(error)) from None
    print(f"Served {served:,} roles of forward calls.", flush=True)
    end_process(0)
