"""One run at a time writes into a folder, and a second is told who the first is.

A log folder called `latest` is a link: every run logs in a new folder beside it, named after the time at which it
began, and the link names the newest. A run that resumes goes on in the folder that its checkpoints name.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import socket
import time
from itertools import chain, count
from pathlib import Path

from distca.validation import UserError, write_own

LATEST = "latest"
LOCKS = {"checkpoint.folder": ".lock", "log.folder": ".log-lock"}  # one folder may be both
LOGGED_IN = "log_folder"  # in checkpoint.folder: the name of the run's own log folder
OWN_NAME = re.compile(r"\d{4}-\d\d-\d\d-\d{6}(-\d{1,9})?")
LOG = logging.getLogger("distca")


class FolderLock:
    """Held from here to `release`, or to the end of the process: the kernel lets go of it however that died."""

    def __init__(self, folder: Path, setting: str, wait_seconds: float = 5.0) -> None:
        self.folder, self._setting, path = folder, setting, folder / LOCKS[setting]
        try:
            self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        except OSError as error:
            raise UserError(f"{setting} = {str(folder)!r}: {path.name} in it cannot be written ({error.strerror}); "
                            "name a folder that this user may write to") from None
        deadline = time.monotonic() + wait_seconds               # the run before may be ending right now
        while not self._try():
            if time.monotonic() > deadline:
                owner = os.pread(self._handle, 300, 0).decode(errors="replace").strip() or "an unknown process"
                os.close(self._handle)
                raise UserError(f"{setting} = {str(folder)!r} is in use by {owner}; stop that run, or name another "
                                "folder")
            time.sleep(0.1)
        os.ftruncate(self._handle, 0)
        since = time.strftime("%Y-%m-%d %H:%M:%S %z")
        os.pwrite(self._handle, f"process {os.getpid()} on {socket.gethostname()} since {since}\n".encode(), 0)

    def _try(self) -> bool:
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            LOG.warning("%s = %r cannot be locked (%s): see to it yourself that one run uses it", self._setting,
                        str(self.folder), error.strerror)
        return True

    def release(self) -> None:
        os.ftruncate(self._handle, 0)
        os.close(self._handle)


def each_run_its_own(folder: Path) -> bool:
    """Whether runs log beside this folder: it is to be the link, or is one of ours. Any other is used as it is."""
    if folder.name != LATEST:
        return False
    return bool(OWN_NAME.fullmatch(os.readlink(folder))) if folder.is_symlink() else not folder.exists()


def open_log_folder(folder: Path, checkpoints: Path | None, *, resumed: bool) -> FolderLock:
    """Lock the folder that this run logs in, made where it is missing; `resumed` from these checkpoints or not."""
    if not each_run_its_own(folder):
        folder.mkdir(parents=True, exist_ok=True)
        return FolderLock(folder, "log.folder")
    before = _logged_in(folder.parent, checkpoints) if resumed and checkpoints else None
    lock = FolderLock(before or _new_folder(folder.parent), "log.folder")
    name = lock.folder.name
    if checkpoints is not None:
        write_own(checkpoints / LOGGED_IN, name + "\n")
    link = folder.with_name(f".{LATEST}-{name}")
    try:
        link.unlink(missing_ok=True)
        link.symlink_to(name)
        link.replace(folder)                                     # at once: others may be reading
    except OSError as error:
        LOG.warning("%s cannot be a link (%s): this run's log is in %s", folder, error.strerror, lock.folder)
    return lock


def _new_folder(runs: Path) -> Path:
    runs.mkdir(parents=True, exist_ok=True)
    now = time.strftime("%Y-%m-%d-%H%M%S")
    for name in chain([now], (f"{now}-{number}" for number in count(2))):
        try:
            (runs / name).mkdir()
        except FileExistsError:                                  # of a run that began in the same second
            continue
        return runs / name
    raise AssertionError("unreachable")


def _logged_in(runs: Path, checkpoints: Path) -> Path | None:
    """The folder of the run that saved them, if it is still there. The file may be anybody's: it is but a name."""
    try:
        name = (checkpoints / LOGGED_IN).read_text(encoding="utf-8").rstrip("\n")
    except (OSError, ValueError):
        return None
    return runs / name if OWN_NAME.fullmatch(name) and (runs / name).is_dir() else None
