"""How a rank ends: what it reports, to whom, and whether a restart would help.

The launcher's process imports this too, so torch and the runtime are imported where a rank needs them.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from multiprocessing.connection import Connection
from typing import NamedTuple, NoReturn

from distca.train.rank_env import restarts, this_rank
from distca.validation import UserError, plain

MAX_REPORT = 16_384  # characters of a traceback, so that it fits into the pipe's buffer


class Failure(NamedTuple):
    """Why a rank ended: the error that it reported, or its exit code."""

    when: float
    rank: int
    code: int
    text: str
    signal: int | None = None  # the signal that killed the rank; None for SIGABRT and SIGTERM
    final: bool = False  # a refusal or a full disk, for example, which a restart would meet again
    stepped: bool = False  # whether the rank had taken a step since its start


def will_restart(error: BaseException | None) -> bool:
    """Return whether this error makes the launcher start all ranks again."""
    count, most = restarts(os.environ)
    return error is not None and not is_final(error) and count < most


def is_final(error: BaseException) -> bool:
    """Return whether a restart would meet this error again: a refusal or a full disk, but not the loss of a rank."""
    lost = isinstance(error.__cause__, RuntimeError)             # of a checkpoint that could not be written
    return isinstance(error, UserError | OSError) and not lost


def is_transport_error(error: Exception) -> bool:
    from distca.runtime.transport import TransportError

    return isinstance(error, TransportError)


class Report:
    """Reports why this process ends, to the launcher that started it if there is one, else on stderr."""

    launcher: Connection | None = None
    lock = threading.Lock()


def report_step() -> None:
    """Tell the launcher, if it is ours, that this rank has taken its first step since its start."""
    if Report.launcher is not None:
        Report.launcher.send(None)


def end_rank(text: str, code: int = 1, final: bool = False) -> NoReturn:
    """Report `text` and end this rank; if several threads call this, only the first one reports."""
    from distca.runtime.liveness import end_process

    report_end(text, code, final)
    end_process(code)


def report_end(text: str, code: int = 1, final: bool = False) -> None:
    """Report why this rank is about to end."""
    Report.lock.acquire()                                        # never released: other threads wait until the end
    if not text.startswith("distca: "):
        text = f"distca: error: {plain(' '.join(text.split()))}"
    if Report.launcher is not None:
        Report.launcher.send(Failure(time.time(), this_rank().rank, code, text, final=final))
    else:
        print(text, file=sys.stderr, flush=True)
