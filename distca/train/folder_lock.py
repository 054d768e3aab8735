"""One run at a time writes into a checkpoint folder, and a second is told who the first is."""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import time
from pathlib import Path

LOCK = ".lock"
LOG = logging.getLogger("distca")


class FolderLock:
    """Held from here to `release`, or to the end of the process: the kernel lets go of it however that died."""

    def __init__(self, folder: Path, wait_seconds: float = 5.0) -> None:
        self._handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        deadline = time.monotonic() + wait_seconds               # the run before may be ending right now
        while not self._try(folder):
            if time.monotonic() > deadline:
                owner = os.pread(self._handle, 300, 0).decode(errors="replace").strip() or "an unknown process"
                os.close(self._handle)
                raise ValueError(f"checkpoint.folder = {str(folder)!r} is in use by {owner}; stop that run, or name "
                                 "another folder")
            time.sleep(0.1)
        os.ftruncate(self._handle, 0)
        since = time.strftime("%Y-%m-%d %H:%M:%S %z")
        os.pwrite(self._handle, f"process {os.getpid()} on {socket.gethostname()} since {since}\n".encode(), 0)

    def _try(self, folder: Path) -> bool:
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            LOG.warning("checkpoint.folder = %r cannot be locked (%s): see to it yourself that one run uses it",
                        str(folder), error.strerror)
        return True

    def release(self) -> None:
        os.ftruncate(self._handle, 0)
        os.close(self._handle)
