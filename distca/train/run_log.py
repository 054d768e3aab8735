"""Log a run on disk: its folder, a record per step, a summary, and the same figures in trackers.

A record holds figures over all ranks. `steps.jsonl` holds one curve: if a run resumes before the last logged step, the
earlier log is kept as `steps.1.jsonl`, `steps.2.jsonl` and so on. Nothing logged is ever erased.

A lock lets only one run write into a folder. A log folder called `latest` is a link: every run logs in a new folder
beside it, named after the start time, and the link points to the newest. A resumed run continues in the folder that
its checkpoints name.
"""

from __future__ import annotations

import fcntl
import json
import logging
import math
import os
import re
import shutil
import socket
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from itertools import chain, count, takewhile
from pathlib import Path
from typing import Any, Protocol, TextIO

from distca.train.settings import Settings
from distca.validation import UserError, open_own, to_install, write_own

RECENT = 30  # steps in the mean loss of a summary
SUMMED = ("tokens", "seconds", "exposed_seconds", "host_seconds", "work_before", "work_after", "bytes_per_layer",
          "served_in_bubbles", "attention_seconds", "linear_seconds", "faults", "repeated_tasks", "fault_seconds")
LOGGED = ("loss", "lr", "grad_norm", "tokens_per_second", "seconds", "work_before", "work_after", "bytes_per_layer",
          "exposed_seconds", "host_seconds", "memory_bytes", "plan_seconds", "bubble_share", "served_in_bubbles",
          "attention_seconds", "attention_seconds_max", "linear_seconds", "mfu", "eval_loss", "tolerance",
          "memory_now_bytes", "servers", "faults", "repeated_tasks", "fault_seconds")
LATEST = "latest"
LOCKS = {"checkpoint.folder": ".lock", "log.folder": ".log-lock"}  # one folder may be both
LOGGED_IN = "log_folder"  # file in checkpoint.folder with the name of the run's log folder
OWN_NAME = re.compile(r"\d{4}-\d\d-\d\d-\d{6}(-\d{1,9})?")
LOG = logging.getLogger("distca")


@dataclass(frozen=True, slots=True)
class StepRecord:
    step: int  # the first step is 1
    loss: float  # mean over all labels of all ranks, nats
    lr: float
    grad_norm: float  # before clipping
    tokens: int  # of all ranks
    seconds: float
    tokens_per_second: float
    work_before: float  # largest attention work of a rank over the mean, if every rank computed its own tokens
    work_after: float  # the same ratio with the plan that ran
    bytes_per_layer: float  # total bytes that cross ranks in the forward pass
    exposed_seconds: float  # waiting for exchanges that no computation hid
    host_seconds: float  # waiting for the batch and its plan
    memory_bytes: int
    plan_seconds: float  # making the plan, in the background
    bubble_share: float = 0.0  # share of (tick, stage) pairs without a micro-batch
    served_in_bubbles: float = 0.0  # share of the attention that was computed in bubbles
    eval_loss: float | None = None  # on held-out documents, if an evaluation followed this step
    attention_seconds: float = 0.0  # computing core attention, mean over the training ranks
    linear_seconds: float = 0.0  # computing the rest of the model, mean over the training ranks
    mfu: float | None = None  # model FLOPs over the GPUs' peak FLOPs in the step; None if the peak is unknown
    epochs: tuple[float, ...] | None = None  # how often each source's tokens have been taken since the start
    tolerance: float | None = None  # the chosen one, if attention.tolerance is auto
    attention_seconds_max: float | None = None  # the slowest rank's, with attention.adapt
    server_speed: tuple[float, ...] | None = None  # [servers] relative to the median, with attention.adapt
    memory_now_bytes: int = 0  # held after the step; memory_bytes is the peak
    restarts: int | None = None  # after which the run went on by itself; None before the first
    restart_seconds: float | None = None  # of all restarts: from the last step before to the first step after
    repeated_steps: int | None = None  # logged before a restart and computed again after it
    servers: int | None = None  # dedicated servers that take part, if plans have roles for any
    faults: int | None = None  # dedicated servers that were lost
    repeated_tasks: int | None = None  # tasks in roles whose inputs rank 0 sent again, to another server
    fault_seconds: float | None = None  # from the last sign of life of a lost server to the results that it owed


@dataclass(frozen=True, slots=True)
class RunSummary:
    """Summary of a run, from its first start on; work and bytes are means over its steps."""

    steps: int  # of all starts that logged into the folder
    last_step: int
    tokens: int
    seconds: float  # inside steps
    first_loss: float
    final_loss: float  # of the last step
    recent_loss: float  # mean over the last RECENT steps
    tokens_per_second: float
    work_before: float
    work_after: float
    bytes_per_layer: float
    exposed_share: float  # of the time inside steps
    host_share: float
    memory_bytes: int  # the largest
    bubble_share: float = 0.0
    served_in_bubbles: float = 0.0
    eval_loss: float | None = None  # the latest
    attention_share: float = 0.0  # of the time inside steps
    linear_share: float = 0.0
    mfu: float | None = None  # over the time inside steps
    epochs: tuple[float, ...] | None = None  # of each source, at the end
    restarts: int | None = None  # as in StepRecord
    restart_seconds: float | None = None
    repeated_steps: int | None = None
    faults: int | None = None  # as in StepRecord, over all steps; None if there were none
    repeated_tasks: int | None = None
    fault_seconds: float | None = None

    @property
    def work_gain(self) -> float:
        """Return how many times more attention the busiest rank would have computed without balancing."""
        return self.work_before / self.work_after if self.work_after else 1.0


class Tally:
    """Summarizes records one by one, in constant memory."""

    def __init__(self) -> None:
        self.steps = self.memory_bytes = 0
        self.sums: dict[str, Any] = dict.fromkeys(SUMMED, 0)
        self.used_seconds = 0.0                                  # time the run would take at peak FLOP/s
        self.first: StepRecord | None = None
        self.last: StepRecord | None = None
        self.eval_loss: float | None = None
        self.recent: deque[float] = deque(maxlen=RECENT)

    def add(self, record: StepRecord) -> None:
        self.first, self.last = self.first or record, record
        self.recent.append(record.loss)
        self.eval_loss = self.eval_loss if record.eval_loss is None else record.eval_loss
        self.steps += 1
        self.memory_bytes = max(self.memory_bytes, record.memory_bytes)
        for name in SUMMED:
            self.sums[name] += getattr(record, name) or 0
        self.used_seconds += (record.mfu or 0.0) * record.seconds

    def summary(self) -> RunSummary | None:
        """Return the summary of the records so far; None without records."""
        if self.first is None or self.last is None:
            return None
        sums, seconds = self.sums, max(self.sums["seconds"], 1e-9)
        means = {name: sums[name] / self.steps for name in (
            "work_before", "work_after", "bytes_per_layer", "served_in_bubbles")}
        shares = {f"{name}_share": sums[f"{name}_seconds"] / seconds for name in (
            "exposed", "host", "attention", "linear")}
        faults: dict[str, Any] = {name: sums[name] if sums["faults"] else None for name in (
            "faults", "repeated_tasks", "fault_seconds")}
        return RunSummary(
            steps=self.steps, last_step=self.last.step, tokens=sums["tokens"], seconds=sums["seconds"],
            first_loss=self.first.loss, final_loss=self.last.loss, recent_loss=sum(self.recent) / len(self.recent),
            tokens_per_second=sums["tokens"] / seconds, memory_bytes=self.memory_bytes,
            bubble_share=self.last.bubble_share, eval_loss=self.eval_loss, epochs=self.last.epochs,
            mfu=None if self.last.mfu is None else self.used_seconds / seconds, **means, **shares, **faults)


def as_json(record: StepRecord | RunSummary) -> dict[str, float | list[float] | None]:
    """Return the fields that are not None, by name, with None for numbers that are not finite (JSON has none)."""
    return {name: list(value) if isinstance(value, tuple) else value if math.isfinite(value) else None
            for name, value in asdict(record).items() if value is not None}


def open_log(path: Path, step: int) -> TextIO:
    """Open the log to append this step. If it has this step or later ones, copy it, then cut it before this step."""
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except FileNotFoundError:
        lines = []
    kept = list(takewhile(lambda line: _is_before(line, step), lines))
    if len(kept) < len(lines):
        numbered = (path.with_name(f"{path.stem}.{number}{path.suffix}") for number in count(1))
        shutil.copyfile(path, next(free for free in numbered if not os.path.lexists(free)))
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".steps-", delete=False) as fresh:
            fresh.writelines(kept)
        os.replace(fresh.name, path)
    return open_own(path, "a")


def restart_facts(path: Path, step: float, restarts: int) -> dict[str, Any]:
    """Return what a run's records say from now on of its restarts, before its log is cut before `step`."""
    if not restarts:
        return {}
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    logged = [json.loads(line) for line in lines if _is_before(line, math.inf)]
    last, repeated = logged[-1] if logged else {}, sum(record["step"] >= step for record in logged)
    seconds = time.time() - path.stat().st_mtime if logged else 0.0
    return {"restarts": restarts, "restart_seconds": seconds + last.get("restart_seconds", 0.0),
            "repeated_steps": repeated + last.get("repeated_steps", 0)}


def logged_records(path: Path) -> Iterator[StepRecord]:
    """Yield the records of a log, which an earlier start of the run wrote; skip those with other fields than ours."""
    known = {field.name for field in fields(StepRecord)}
    for line in path.read_bytes().splitlines():
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else math.nan if value is None else value
            for name, value in json.loads(line).items() if name in known}
        with suppress(TypeError):
            yield StepRecord(**values)


def _is_before(line: bytes, step: float) -> bool:
    """Return whether a line of the log is complete and about an earlier step."""
    try:
        return line.endswith(b"\n") and int(json.loads(line)["step"]) < step
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError):
        return False


class Tracker(Protocol):
    """TensorBoard or Weights & Biases; gets the figures of steps.jsonl under the same names, from rank 0."""

    def step(self, record: StepRecord) -> None: ...

    def close(self, finished: bool) -> None: ...


def trackers_for(settings: Settings, folder: Path) -> list[Tracker]:
    """Start the trackers that the settings name; raise a UserError if one cannot start."""
    return [*([_TensorBoard(folder)] if settings.log.tensorboard else []),
            *([_WeightsAndBiases(settings, folder)] if settings.log.wandb else [])]


def figures(record: StepRecord) -> dict[str, float]:
    """Return the figures of a step that are not None, by name; of lists as server_speed/number, epochs/number."""
    known = {name: value for name in LOGGED if (value := getattr(record, name)) is not None}
    known |= {f"epochs/{source}": taken for source, taken in enumerate(record.epochs or ())}
    return known | {f"server_speed/{server}": speed for server, speed in enumerate(record.server_speed or ())}


class _TensorBoard:
    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise UserError("log.tensorboard is true but tensorboard is not installed; "
                            f"{to_install('tensorboard')}, or set it to false") from None
        self.writer: Any = SummaryWriter(str(folder))

    def step(self, record: StepRecord) -> None:
        for name, value in figures(record).items():
            self.writer.add_scalar(name, value, record.step)

    def close(self, finished: bool) -> None:
        self.writer.close()


class _WeightsAndBiases:
    """Makes one W&B run per start, named and grouped by the log folder; WANDB_MODE=offline keeps it on this machine."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        project = settings.log.wandb
        try:
            import wandb
        except ImportError:
            raise UserError(f"log.wandb is {project!r} but wandb is not installed; {to_install('wandb')}, or set "
                            "it to ''") from None
        name = folder.resolve().name
        try:
            self.run: Any = wandb.init(project=project, dir=str(folder), name=name, group=name, config=asdict(settings),
                                       settings=wandb.Settings(console="off"))  # the terminal belongs to the display
        except wandb.Error as error:
            reason = " ".join(str(error).split())
            raise UserError(f"log.wandb is {project!r} but W&B does not start ({reason}); run: wandb login, set "
                            "WANDB_MODE=offline, or set log.wandb to ''") from None

    def step(self, record: StepRecord) -> None:
        self.run.log(figures(record), step=record.step)

    def close(self, finished: bool) -> None:
        self.run.finish(exit_code=0 if finished else 1)


class FolderLock:
    """A lock on a folder until `release` or the end of the process, when the kernel releases it."""

    def __init__(self, folder: Path, setting: str, wait_seconds: float = 5.0) -> None:
        self.folder, self._setting, path = folder, setting, folder / LOCKS[setting]
        try:
            self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        except OSError as error:
            raise UserError(f"{setting} = {str(folder)!r}: {path.name} in it cannot be written ({error.strerror}); "
                            "name a folder that this user may write to") from None
        deadline = time.monotonic() + wait_seconds               # the previous run may be ending right now
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
    """Return whether `folder` is the link `latest` to the newest run's folder: missing so far, or a link we made."""
    if folder.name != LATEST:
        return False
    return bool(OWN_NAME.fullmatch(os.readlink(folder))) if folder.is_symlink() else not folder.exists()


def open_log_folder(folder: Path, checkpoints: Path | None, *, resumed: bool) -> FolderLock:
    """Make and lock this run's log folder; with `resumed` it is the folder that `checkpoints` names, if it exists."""
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
        link.replace(folder)                                     # atomic, for concurrent readers
    except OSError as error:
        LOG.warning("%s cannot be a link (%s): this run's log is in %s", folder, error.strerror, lock.folder)
    return lock


def _new_folder(runs: Path) -> Path:
    runs.mkdir(parents=True, exist_ok=True)
    now = time.strftime("%Y-%m-%d-%H%M%S")
    names = chain([now], (f"{now}-{number}" for number in count(2)))
    while True:
        try:
            (folder := runs / next(names)).mkdir()
            return folder
        except FileExistsError:                                  # another run began in the same second
            continue


def _logged_in(runs: Path, checkpoints: Path) -> Path | None:
    """Return the log folder of the run that saved these checkpoints, if it exists. The file's content is untrusted."""
    try:
        name = (checkpoints / LOGGED_IN).read_text(encoding="utf-8").rstrip("\n")
    except (OSError, ValueError):
        return None
    return runs / name if OWN_NAME.fullmatch(name) and (runs / name).is_dir() else None
