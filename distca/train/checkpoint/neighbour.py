"""Keep the newest checkpoint in host memory too, here and on the next host, so that a restart costs seconds.

When a rank is lost, its process group is too, and every process of the run starts again. So what must survive belongs
to no process: it is files in /dev/shm, which is memory, in the format of checkpoints on disk. Saving and loading, their
checksums and other meshes are then the same code, and nobody has to be kept alive: neither survivors, which would have
to replace every group that a mesh, FSDP or NCCL holds, nor a keeper process, which could itself die.

A host that is lost takes its memory with it. So each rank also sends its files to a rank of the next host. On a single
host a second copy would protect from nothing and is not made. The ranks of each host write all that the host holds, so
that a restart on the same hosts reads no other host's files; a new host, or another mesh, gets the files that it lacks.

The folder's name is a random token, which `checkpoint.folder` holds: only this user may enter it (mode 700), and a run
finds its own checkpoint only. The run removes the folder when it ends. If all its processes are killed, the folder
stays until the run is started again, which resumes from it if it is the newest.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from distca.train.checkpoint import folder as folders
from distca.train.checkpoint.checkpointer import (
    Checkpointer,
    Saver,
    TrainState,
    group_of_threads,
    load,
    load_on_all,
    named_tensors,
    rank_of,
    rng_states,
    with_files,
    write_files,
)
from distca.train.checkpoint.files import Part, overlap, part_of
from distca.train.checkpoint.folder import Block, DamagedError, Manifest, StoredTensor, cause, step_folders, step_name
from distca.train.groups import gather_json, in_background, on_first
from distca.validation import UserError

Value = TypeVar("Value")

MEMORY = Path("/dev/shm")
TOKEN = ".memory"            # file in checkpoint.folder with the name of the folder in memory
OWN_NAME = re.compile(r"distca-[0-9a-f]{32}")
LOG = logging.getLogger("distca")


class Move(NamedTuple):
    """A file that one rank sends to another."""

    file: str
    num_bytes: int
    source: int
    target: int


class NeighbourCheckpoints(Saver):
    """Saves in the memory of this host and the next, one at a time in the background; used on every training rank."""

    def __init__(self, checkpoints: Checkpointer, group: dist.ProcessGroup | None, host: str,
                 memory: Path = MEMORY) -> None:
        self.checkpoints, self.timeout_seconds = checkpoints, checkpoints.timeout_seconds
        self._group = group_of_threads(group, self.timeout_seconds)
        self._rank, self._num_ranks = rank_of(self._group)
        self._hosts: list[str] = gather_json(host, self._group)
        self._leads = self._hosts.index(host) == self._rank      # the rank that writes its host's manifest
        self.folder = memory / on_first(lambda: _token(checkpoints.folder), self._group)
        self._everywhere(lambda: _open_private(self.folder))

    def save(self, step: int, loader_state: Mapping[str, Any]) -> None:
        """Wait for the previous save, copy everything, then write and send it in the background."""
        self.finish()
        manifest, staged = self.checkpoints.stage(step, loader_state, self._hosts, self._group)
        self._pending = self.folder / step_name(step), in_background(self._write, manifest, staged)

    def resume(self) -> TrainState | None:
        """Load the newest good checkpoint, from memory or from disk; None if there is none."""
        began, manifest = perf_counter(), self._newest()
        on_disk = on_first(self._newest_on_disk, self._group)
        if manifest is None or manifest.step < on_disk:
            return self.checkpoints.resume()
        state = load_on_all(self.folder / step_name(manifest.step), partial(self._load, manifest), self._group)
        if state is None:
            return self.checkpoints.resume()
        if self._rank == 0:
            LOG.info("resumed after step %d from host memory, in %.1f s", manifest.step, perf_counter() - began)
        return state

    def close(self) -> None:
        """Wait for the save in flight, however it ends, and free the memory; the run's last checkpoint is on disk."""
        with suppress(OSError):
            self.finish()
        if self._leads:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _write(self, manifest: Manifest, staged: Sequence[tuple[Part, torch.Tensor]]) -> None:
        """Write and send a checkpoint, on the background thread; it succeeds or fails on all ranks together."""
        target = self.folder / step_name(manifest.step)
        try:
            self._everywhere(lambda: shutil.rmtree(target, ignore_errors=True) if self._leads else None)
            written = self._everywhere(lambda: write_files(target, staged, self._rank))
            whole = with_files(manifest, written)
            self._move(target, [Move(name, whole.files[name].num_bytes, rank, partner)
                                for rank, partner in enumerate(partners(self._hosts)) if partner is not None
                                for name in written[rank]["files"]])
            self._everywhere(lambda: folders.write_manifest(target, whole) if self._leads else None)
        except (OSError, UserError) as error:
            if self._leads:
                shutil.rmtree(target, ignore_errors=True)        # frees its space
            raise OSError(f"{error}; enlarge {self.folder.parent} (docker: --shm-size), which holds two of them, or "
                          "set checkpoint.neighbour_every to 0") from None
        for path in step_folders(self.folder) if self._leads else ():
            if path != target:
                folders.remove(path)

    def _newest(self) -> Manifest | None:
        """Return the newest checkpoint of this run with a manifest, which is written after the files of all ranks."""
        found = next(filter(None, map(self._usable, reversed(step_folders(self.folder)))), None)
        steps = gather_json(-1 if found is None else found.step, self._group)
        first = steps.index(max(steps))
        text = folders.manifest_bytes(found).decode() if found and self._rank == first else None
        text = gather_json(text, self._group)[first]
        return None if text is None else folders.manifest_from(text.encode())

    def _usable(self, path: Path) -> Manifest | None:
        try:
            manifest = folders.read_manifest(path)
        except ValueError:
            return None
        return None if folders.difference(manifest, self.checkpoints.whole, self.checkpoints.run) else manifest

    def _newest_on_disk(self) -> int:
        """Return the newest step that is good by its manifest; -1 if there is none."""
        good = (path for path in reversed(step_folders(self.checkpoints.folder))
                if folders.judge(path, self.checkpoints.whole, self.checkpoints.run)[0] == "good")
        return next((folders.read_manifest(path).step for path in good), -1)

    def _load(self, manifest: Manifest) -> TrainState:
        """Get the files that this host lacks and load the checkpoint."""
        model, optimizer = self.checkpoints.model, self.checkpoints.optimizer
        path = self.folder / step_name(manifest.step)
        held = [name for name, facts in sorted(manifest.files.items())
                if (path / name).is_file() and (path / name).stat().st_size == facts.num_bytes]
        tensors = named_tensors(model, optimizer, manifest.optimizer)[0]
        tensors |= {f"rng.{self._rank}.{kind}": state for kind, state in rng_states(model).items()}
        blocks = needed_blocks(manifest, (part_of(*item) for item in tensors.items()), held)
        missing = {block.file for tensor in blocks.values() for block in tensor.blocks} - set(held)
        held_by, missing_on = gather_json(held, self._group), gather_json(sorted(missing), self._group)
        sources = {name: rank for rank in reversed(range(self._num_ranks)) for name in held_by[rank]}
        lacking = {(self._hosts.index(host), name) for host, names in zip(self._hosts, missing_on, strict=True)
                   for name in names}
        for _, name in sorted(lacking):
            if name not in sources:
                raise DamagedError(f"{name} is in the memory of no host that is left")
        self._move(path, [Move(name, manifest.files[name].num_bytes, sources[name], leader)
                          for leader, name in sorted(lacking)])
        return load(path, model, optimizer, replace(manifest, tensors=blocks), self._group)

    def _move(self, folder: Path, moves: Sequence[Move]) -> None:
        """Send and receive files of the same folder on every host, straight from and into memory, all at once."""
        if not moves:
            return
        self._everywhere(lambda: _reserve({
            folder / move.file: move.num_bytes for move in moves if move.target == self._rank}))
        works, mapped = [], []
        for tag, move in enumerate(moves):
            if self._rank in (move.source, move.target):
                mapped.append(torch.from_file(str(folder / move.file), True, move.num_bytes, dtype=torch.uint8))
                works.append(dist.isend(mapped[-1], group=self._group, group_dst=move.target, tag=tag)
                             if self._rank == move.source else
                             dist.irecv(mapped[-1], group=self._group, group_src=move.source, tag=tag))
        for work in works:
            assert work is not None
            work.wait()
        gather_json(None, self._group)                           # other ranks of this host may read the files now

    def _everywhere(self, call: Callable[[], Value]) -> list[Value]:
        """Call on every rank; return all results, or raise the first rank's error on all."""
        answer: dict[str, Any] = {}
        try:
            answer = {"value": call()}
        except OSError as error:
            answer = {"error": f"rank {self._rank}: {cause(error)}"}
        answers = gather_json(answer, self._group)
        for one in answers:
            if "error" in one:
                raise UserError(one["error"])
        return [one["value"] for one in answers]


def partners(hosts: Sequence[str]) -> list[int | None]:
    """Return for each rank the rank of the next host that keeps its files too; None for all on a single host."""
    ranks = {host: [rank for rank, one in enumerate(hosts) if one == host] for host in hosts}
    names = list(ranks)
    if len(names) == 1:
        return [None] * len(hosts)
    after = dict(zip(names, [ranks[name] for name in names[1:] + names[:1]], strict=True))
    return [after[host][ranks[host].index(rank) % len(after[host])] for rank, host in enumerate(hosts)]


def needed_blocks(manifest: Manifest, parts: Iterable[Part], held: Collection[str]) -> dict[str, StoredTensor]:
    """Return the stored blocks that these parts need, every box once, from a file of this host if it has one."""
    chosen = {}
    for part in parts:
        if part.name in manifest.tensors:
            stored, boxes = manifest.tensors[part.name], dict[tuple[int, ...], Block]()
            for block in sorted(stored.blocks, key=lambda block: block.file not in held):
                if prod(overlap(part, block)[1]):
                    boxes.setdefault((*block.offset, *block.shape), block)
            chosen[part.name] = stored._replace(blocks=list(boxes.values()))
    return chosen


def forget(folder: Path) -> None:
    """Remove what a run with this checkpoint.folder left in the memory of this host."""
    name = _named_in(folder)
    if name is not None:
        shutil.rmtree(MEMORY / name, ignore_errors=True)


def _token(folder: Path) -> str:
    """Return the name of the folder in memory, which `folder` keeps from one start of the run to the next."""
    name = _named_in(folder)
    if name is None:
        name = f"distca-{secrets.token_hex(16)}"
        (folder / TOKEN).unlink(missing_ok=True)
        with open(folder / TOKEN, "x", encoding="utf-8", opener=lambda path, flags: os.open(path, flags, 0o600)) as new:
            new.write(name)
    return name


def _named_in(folder: Path) -> str | None:
    with suppress(OSError, UnicodeDecodeError):
        name = (folder / TOKEN).read_text(encoding="utf-8")
        return name if OWN_NAME.fullmatch(name) else None
    return None


def _open_private(folder: Path) -> None:
    """Make a folder that only this user may enter; raise an OSError if it is someone else's."""
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    if not folder.is_dir() or folder.is_symlink() or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise OSError(f"{folder} is not a folder of this user alone; remove it")


def _reserve(files: Mapping[Path, int]) -> None:
    """Create files of these sizes; raise an OSError if there is no space, where a mapped write would raise SIGBUS."""
    for path, num_bytes in files.items():
        path.parent.mkdir(exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(handle, 0, num_bytes)
        finally:
            os.close(handle)

