"""Save a run in the background, and resume it on any number of ranks.

`save` copies the tensors, and a thread writes them while training continues. Every rank writes its part of every
tensor with its offset in the global shape, so another number of ranks can read it. Loading executes no stored code and
verifies every byte it uses. It skips torn and damaged checkpoints with a warning and loads the newest good one.
"""

from __future__ import annotations

import errno
import json
import logging
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from distca.train.checkpoint import folder as folders
from distca.train.checkpoint.files import Part, Reader, describe, local_part, part_of, tensor_table, write_file, writers
from distca.train.checkpoint.folder import DamagedError, Manifest, cause, judge, step_folders, step_name
from distca.train.groups import gather_json, group_of, in_background, on_first
from distca.train.run_log import FolderLock
from distca.validation import UserError

LOG = logging.getLogger("distca")


@dataclass(frozen=True, slots=True)
class TrainState:
    """State of a run besides its tensors."""

    step: int                # completed steps
    loader: dict[str, Any]   # position of the next batch
    num_ranks: int           # number of ranks that saved it


class SaveError(OSError):
    """A checkpoint was not written; the previous one is kept."""


class Saver:
    """One save at a time, in the background."""

    timeout_seconds: float
    _pending: tuple[Path, Future[None]] | None = None            # the save in flight

    @property
    def failed(self) -> bool:
        """Whether the save in flight has failed; `finish` then raises the error."""
        return self._pending is not None and self._pending[1].done() and self._pending[1].exception() is not None

    def finish(self) -> None:
        """Wait until the save in flight is complete, or raise a SaveError.

        It needs the process group. The error's cause is a RuntimeError if another rank was lost.
        """
        if self._pending is None:
            return
        (path, future), self._pending = self._pending, None
        try:
            error = future.exception(timeout=2 * self.timeout_seconds)  # its collectives time out earlier
        except TimeoutError:
            error = OSError(f"it took longer than {2 * self.timeout_seconds:g} s (run.timeout_seconds)")
        if error is not None:
            raise SaveError(f"checkpoint {path} was not written: {' '.join(str(error).split())}") from error


class Checkpointer(Saver):
    """Saves one checkpoint at a time in the background, and resumes from the newest good one; used on every rank.

    `run` holds the settings that must not change on resume; checkpoints with other values are refused. `config` is the
    config.json of an export. `group` has the training ranks, by default all. The folder is locked until `close`.
    """

    def __init__(
        self, folder: str | Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, *, keep: int = 2,
        resume: bool = True, timeout_seconds: float = 600.0, run: Mapping[str, Any] | None = None,
        config: Mapping[str, Any] | None = None, group: dist.ProcessGroup | None = None,
    ) -> None:
        if keep < 1:
            raise UserError(f"checkpoint.keep = {keep}: keep at least 1")
        self.folder, self.keep, self.model, self.optimizer = Path(folder), keep, model, optimizer
        self.run, self.config, self.timeout_seconds = dict(run or {}), dict(config or {}), timeout_seconds
        self._group = group_of_threads(group, timeout_seconds)
        self._rank, self._num_ranks = rank_of(self._group)
        self._newest: int | None = None                          # newest step that was saved, is being saved or loaded
        self._writes: dict[tuple[bool, bool], set[str]] = {}     # `_writes_of`'s results
        self._lock: FolderLock | None = None
        self._check_folder(resume)
        self.whole: dict[str, str] = {}                         # dtype and shape of the whole model's tensors, by name
        for part in gather_json(describe(model), self._group):
            assert all(self.whole.get(name, found) == found for name, found in part.items())
            self.whole |= part

    def resume(self) -> TrainState | None:
        """Load the newest good checkpoint; None if there is none, a UserError if all of them are damaged."""
        damaged: list[str] = []
        for name in on_first(lambda: [path.name for path in reversed(step_folders(self.folder))], self._group):
            path = self.folder / name
            content = on_first(lambda path=path: self._candidate(path, damaged), self._group)  # type: ignore[misc]
            if content is None:
                continue
            manifest = folders.manifest_from(content.encode())
            state = load_on_all(path, partial(load, path, self.model, self.optimizer, manifest, self._group),
                                self._group)
            if state is not None:
                self._newest = state.step
                return state
            damaged.append(name)
        for name in on_first(lambda: damaged[:1], self._group):
            raise UserError(f"checkpoint.folder = {str(self.folder)!r} holds {name} but no checkpoint that is whole; "
                            "restore one, or name another folder to begin anew")
        return None

    def save(self, step: int, loader_state: Mapping[str, Any]) -> None:
        """Wait for the previous save, copy everything, then write it in the background. A step is saved only once."""
        self.finish()
        if step == self._newest:
            return
        saved = in_background(self._write, *self.stage(step, loader_state))
        self._pending, self._newest = (self.folder / step_name(step), saved), step

    def stage(
        self, step: int, loader_state: Mapping[str, Any], hosts: Sequence[str] = (),
        group: dist.ProcessGroup | None = None,
    ) -> tuple[Manifest, list[tuple[Part, torch.Tensor]]]:
        """Copy what this rank writes to host memory; return it with a manifest that lists no files yet.

        Ranks divide what several of them hold; with `hosts`, the host of each rank, only the ranks of one host do.
        They agree on that over `group`, on which no save may be in flight; by default the checkpointer's.
        """
        with_optimizer = len(self.optimizer.state) > 0
        tensors, _ = named_tensors(self.model, self.optimizer, with_optimizer)
        writes = self._writes_of(tensors, with_optimizer, hosts, group or self._group)
        rng = rng_states(self.model)
        tensors = {name: tensor for name, tensor in tensors.items() if name in writes}
        tensors |= {f"rng.{self._rank}.{kind}": state for kind, state in rng.items()}
        staged = [(part_of(name, tensor), local_part(tensor).to("cpu", copy=True)) for name, tensor in tensors.items()]
        return Manifest(
            folders.FORMAT, folders.VERSION, step, self._num_ranks, str(torch.__version__), self.run, with_optimizer,
            sorted(rng), json.loads(json.dumps(loader_state)), self.config, {}, {}), staged

    def _writes_of(self, tensors: Mapping[str, torch.Tensor], with_optimizer: bool, hosts: Sequence[str],
                   group: dist.ProcessGroup | None) -> set[str]:
        """Return the names that this rank writes; all ranks call this at the same time."""
        key = with_optimizer, bool(hosts)
        if key not in self._writes:
            by_rank = [[Part(*part) for part in parts] for parts in gather_json(
                [part_of(*item) for item in tensors.items()], group)]
            sharing = [parts if not hosts or hosts[rank] == hosts[self._rank] else []
                       for rank, parts in enumerate(by_rank)]
            self._writes[key] = writers(sharing)[self._rank]
        return self._writes[key]

    def finish(self) -> None:
        try:
            super().finish()
        except BaseException:
            self._newest = None
            raise

    def close(self) -> None:
        """Finish the save in flight and unlock the folder."""
        try:
            self.finish()
        finally:
            if self._lock is not None:
                self._lock.release()
                self._lock = None

    def _candidate(self, path: Path, damaged: list[str]) -> str | None:
        """Return the manifest of a usable checkpoint. Otherwise warn and return None; raise if it is another run's."""
        verdict, reason = judge(path, self.whole, self.run)
        if verdict == "good":
            return folders.manifest_bytes(folders.read_manifest(path)).decode()
        if verdict == "another run's":
            raise UserError(f"checkpoint.folder = {str(self.folder)!r} holds {path.name} of another run: {reason}; "
                            "set it back, or name another folder")
        if verdict == "damaged":
            damaged.append(path.name)
        LOG.warning("checkpoint %s is %s and not used: %s", path, verdict, reason)
        return None

    def _write(self, manifest: Manifest, staged: Sequence[tuple[Part, torch.Tensor]]) -> None:
        """Write a checkpoint, on the background thread; it succeeds or fails on all ranks together."""
        target = self.folder / step_name(manifest.step)
        sizes = gather_json(sum(part.num_bytes for part, _ in staged), self._group)
        on_first(lambda: self._prepare(target, sum(sizes)), self._group)
        written = gather_json(write_files(target, staged, self._rank), self._group)
        on_first(lambda: self._complete(target, manifest, written), self._group)

    def _prepare(self, target: Path, num_bytes: int) -> None:
        try:
            folders.make_room(target, self.whole, self.run)
            free = shutil.disk_usage(self.folder).free
            if free < num_bytes:
                raise OSError(errno.ENOSPC, f"no space: it needs {num_bytes:,} bytes and {free:,} are free")
            target.mkdir()
        except OSError as error:
            raise UserError(cause(error)) from None

    def _complete(self, target: Path, manifest: Manifest, written: Sequence[Mapping[str, Any]]) -> None:
        """On rank 0, write the manifest and prune old checkpoints; without a manifest, remove this checkpoint."""
        try:
            folders.write_manifest(target, with_files(manifest, written))
            verdict, reason = judge(target, self.whole, self.run)
            if verdict != "good":
                raise OSError(f"{target} reads back {verdict}: {reason}")
            folders.prune(self.folder, self.keep, self.whole, self.run)
        except OSError as error:
            if not (target / folders.MANIFEST).exists():
                shutil.rmtree(target, ignore_errors=True)        # frees its space
            raise UserError(cause(error)) from None

    def _check_folder(self, resume: bool) -> None:
        """Check that the folder is writable, shared by all ranks and unused by other runs, then lock it."""
        error = None
        try:
            folders.check_folder(self.folder, resume=resume)
        except ValueError as refused:
            error = str(refused)
        for line in gather_json(error, self._group):
            if line is not None:
                raise UserError(line)
        marker = self.folder / on_first(lambda: f".shared-{secrets.token_hex(8)}", self._group)
        if self._rank == 0:
            marker.touch()
        gather_json(None, self._group)                           # a barrier
        seen = gather_json(marker.exists(), self._group)
        if self._rank == 0:
            marker.unlink()
        if not all(seen):
            raise UserError(f"checkpoint.folder = {str(self.folder)!r} is another folder on rank {seen.index(False)} "
                            "than on rank 0; name one on a file system that all ranks share")
        on_first(self._take_lock, self._group)

    def _take_lock(self) -> None:
        self._lock = FolderLock(self.folder, "checkpoint.folder")


def write_files(target: Path, staged: Sequence[tuple[Part, torch.Tensor]], rank: int) -> dict[str, Any]:
    """Write a rank's files, and return their facts and blocks, or the error that kept it from that."""
    written: dict[str, Any] = {"files": {}, "blocks": [], "error": None}
    try:
        target.mkdir(exist_ok=True)                              # a network file system may show it late
        for kind in ("model", "state"):
            parts = [part for part in staged if part[0].name.startswith("model.") is (kind == "model")]
            if parts:
                file = target / f"{kind}-{rank:05d}.safetensors"
                written["files"][file.name], blocks = write_file(file, parts)
                written["blocks"] += blocks
    except OSError as error:
        written["error"] = f"rank {rank}: {cause(error)}"
    return written


def with_files(manifest: Manifest, written: Sequence[Mapping[str, Any]]) -> Manifest:
    """Return the manifest with the files that all ranks have written; raise an OSError if one of them could not."""
    for rank in written:
        if rank["error"] is not None:
            raise OSError(rank["error"])
    blocks = [(Part(*part), folders.Block(*block)) for rank in written for part, block in rank["blocks"]]
    files = {name: folders.FileFacts(*facts) for rank in written for name, facts in rank["files"].items()}
    return replace(manifest, files=files, tensors=tensor_table(blocks))


def load_on_all(path: Path, load: Callable[[], TrainState], group: dist.ProcessGroup | None) -> TrainState | None:
    """Load on every rank; warn and return None if any rank finds a changed byte."""
    error, state = None, None
    try:
        state = load()
    except DamagedError as found:
        error = str(found)
    errors = [line for line in gather_json(error, group) if line is not None]
    if errors and rank_of(group)[0] == 0:
        LOG.warning("checkpoint %s is damaged and not used: %s", path, errors[0])
    return None if errors else state


def load(
    path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, manifest: Manifest | None = None,
    group: dist.ProcessGroup | None = None,
) -> TrainState:
    """Fill the model and the optimizer in place, before the first backward; raise DamagedError if a byte has changed.

    Parameter groups keep their current options, because a changed learning rate or weight decay is intended. Random
    states are restored only if the number of ranks is unchanged.
    """
    manifest = manifest or folders.read_manifest(path)
    if not manifest.optimizer:
        optimizer.state.clear()                                  # left by a newer checkpoint that proved damaged
    tensors, optimizer_state = named_tensors(model, optimizer, manifest.optimizer)
    rank, num_ranks = rank_of(group)
    rng = rng_states(model)
    with_rng = (manifest.num_ranks, manifest.rng) == (num_ranks, sorted(rng))
    with Reader(path, manifest) as reader, torch.no_grad():
        for name, tensor in tensors.items():
            reader.fill(name, tensor)
        for kind, state in rng.items() if with_rng else ():
            reader.fill(f"rng.{rank}.{kind}", state)
    set_state_dict(model, optimizer if manifest.optimizer else (), optim_state_dict=optimizer_state, model_state_dict={
        name.removeprefix("model."): tensor for name, tensor in tensors.items() if name.startswith("model.")})
    if with_rng:
        for kind, state in rng.items():
            (torch if kind == "cpu" else torch.get_device_module(kind)).set_rng_state(state)
    else:
        LOG.info("checkpoint %s was saved by %d ranks on %s: random states start anew from the seed", path,
                 manifest.num_ranks, "+".join(manifest.rng))
    return TrainState(manifest.step, manifest.loader, manifest.num_ranks)


def named_tensors(model: torch.nn.Module, optimizer: torch.optim.Optimizer,
                  with_optimizer: bool) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return all tensors by their stored names, and the optimizer's state dict with the same tensors."""
    model_state, optimizer_state = get_state_dict(model, optimizer if with_optimizer else ())
    states = cast("dict[str, Any]", optimizer_state)
    tensors: dict[str, Any] = {f"model.{name}": value for name, value in model_state.items()}
    if with_optimizer:
        tensors |= {f"optimizer.{name}.{key}": value for name, values in states["state"].items()
                    for key, value in values.items()}
    assert all(isinstance(value, torch.Tensor) for value in tensors.values())
    return tensors, states


def group_of_threads(group: dist.ProcessGroup | None, timeout_seconds: float) -> dist.ProcessGroup | None:
    """Create a gloo group of the same ranks for one background thread; None without a process group."""
    if not dist.is_initialized():
        return None
    return group_of(dist.get_process_group_ranks(group), timedelta(seconds=timeout_seconds), "gloo")


def rank_of(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """Return this process's rank in the group, and the group's size."""
    return (dist.get_rank(group), dist.get_world_size(group)) if dist.is_initialized() else (0, 1)


def rng_states(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    states = {"cpu": torch.get_rng_state()}
    kind = next(model.parameters()).device.type
    if kind != "cpu":
        states[kind] = torch.get_device_module(kind).get_rng_state()
    return states
