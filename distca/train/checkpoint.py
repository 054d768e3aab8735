"""Save a run so that it can go on, whatever killed it and on however many ranks.

Tensors are copied first and written by a background thread, so training goes on meanwhile; what a save leaves behind
when it is cut short is passed over by name, and the last good checkpoint is used. torch.distributed.checkpoint does the
sharding: every tensor is stored under its own name with its global shape, so another number of ranks can read it. Ranks
may hold different names, as the stages of a pipeline do: together they are the model, and each reads its own.
"""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict, set_state_dict
from torch.distributed.checkpoint.storage import WriteResult

from distca.train.manifest import (
    FORMAT,
    VERSION,
    Manifest,
    check_folder,
    judge,
    make_room,
    newest_good,
    prune,
    read_manifest,
    step_name,
    write_manifest,
)

METADATA = ".metadata"
LOG = logging.getLogger("distca")
Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class TrainState:
    """What a run needs to go on besides the tensors."""

    step: int                # steps done
    loader: dict[str, Any]   # position of the batch that comes next
    num_ranks: int           # that saved it


def describe(model: torch.nn.Module) -> dict[str, str]:
    """Name, dtype and global shape of all that this rank's model holds."""
    return {name: f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
            for name, value in get_model_state_dict(model).items() if isinstance(value, torch.Tensor)}


def describe_whole(model: torch.nn.Module, group: dist.ProcessGroup | None = None) -> dict[str, str]:
    """What all ranks of the group hold together, every rank taking part: what a checkpoint must match."""
    parts = [describe(model)]
    if dist.is_initialized():
        parts *= dist.get_world_size(group)
        dist.all_gather_object(parts, parts[0], group=group)
    whole: dict[str, str] = {}
    for part in parts:
        assert all(whole.get(name, told) == told for name, told in part.items())
        whole |= part
    return whole


def latest(folder: str | Path, model: torch.nn.Module) -> Path | None:
    """The newest good checkpoint for this model; a newer one that is torn or foreign is named in a warning."""
    return newest_good(Path(folder), describe_whole(model))


def load(path: str | Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer,
         group: dist.ProcessGroup | None = None) -> TrainState:
    """Fill the model and the optimizer in place; every rank of the group takes part.

    To be called before the first backward. Parameter groups keep the options they were built with: a weight decay or
    learning rate that was changed is meant. Random states come back on the number of ranks that saved them.
    """
    return _load(Path(path), model, optimizer, describe_whole(model, group), group)


def _load(path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, whole: Mapping[str, str],
          group: dist.ProcessGroup | None) -> TrainState:
    verdict, reason = judge(path, whole)
    if verdict != "good":
        raise ValueError(f"checkpoint {path} is {verdict}: {reason}")
    manifest = read_manifest(path)
    state, optimizer_state = _state(model, optimizer, manifest.optimizer)
    rank, num_ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    rng = _rng_states(model)
    with_rng = (manifest.num_ranks, manifest.rng) == (num_ranks, sorted(rng))
    if with_rng:
        state["rng"] = {str(rank): rng}
    else:
        LOG.info("checkpoint %s was saved by %d ranks on %s: random states start anew from the seed", path,
                 manifest.num_ranks, "+".join(manifest.rng))
    try:
        dcp.load(state, storage_reader=dcp.FileSystemReader(path), process_group=group,
                 no_dist=not dist.is_initialized())
    except dcp.CheckpointException as error:                     # not an Exception
        raise RuntimeError(f"checkpoint {path} could not be read: {_cause(error)}") from error
    set_state_dict(model, optimizer if manifest.optimizer else (), model_state_dict=state["model"],
                   optim_state_dict=optimizer_state)
    if with_rng:
        _set_rng_states(rng)
    return TrainState(manifest.step, manifest.loader, manifest.num_ranks)


class Checkpointer:
    """Saves in the background, one checkpoint at a time, and resumes from the last good one; the same on every rank."""

    def __init__(self, folder: str | Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, *,
                 keep: int = 2, resume: bool = True) -> None:
        if keep < 1:
            raise ValueError(f"checkpoint.keep = {keep}: keep at least 1")
        self.folder, self.keep, self.model, self.optimizer = Path(folder), keep, model, optimizer
        self._group = dist.new_group(backend="gloo") if dist.is_initialized() else None
        self._rank, self._num_ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self._pending: tuple[int, Future[Any]] | None = None
        self._newest: int | None = None                          # saved, being saved, or resumed from
        self._check_folder(resume)
        self._whole = describe_whole(model, self._group)

    @property
    def in_flight(self) -> bool:
        return self._pending is not None and not self._pending[1].done()

    def resume(self) -> TrainState | None:
        """Go on from the newest good checkpoint, if there is one."""
        path = self._from_first(lambda: newest_good(self.folder, self._whole))
        if path is None:
            return None
        state = _load(path, self.model, self.optimizer, self._whole, self._group)
        self._newest = state.step
        return state

    def save(self, step: int, loader_state: Mapping[str, Any]) -> None:
        """Copy everything, then write it in the background; waits first for the save before. A step is saved once."""
        self.finish()
        if step == self._newest:
            return
        with_optimizer = len(self.optimizer.state) > 0
        state, _ = _state(self.model, self.optimizer, with_optimizer)
        rng = _rng_states(self.model)
        state["rng"] = {str(self._rank): rng}
        manifest = Manifest(
            FORMAT, VERSION, step, self._num_ranks, str(torch.__version__), self._whole, with_optimizer,
            sorted(rng), json.loads(json.dumps(loader_state)), {})
        stager = DefaultStager(StagingOptions(False, False, False, False))       # staged when async_save returns
        future = dcp.async_save(state, storage_writer=_Writer(self.folder, manifest, self.keep), async_stager=stager,
                                process_group=self._group, no_dist=self._group is None)
        stager.close()
        self._pending, self._newest = (step, cast("Future[Any]", future)), step

    def finish(self) -> None:
        """Wait until the save in flight is complete; raises if it failed, and the one before it is then still there.

        To be called before the process group goes.
        """
        if self._pending is None:
            return
        (step, future), self._pending = self._pending, None
        error = future.exception()
        if error is None:
            return
        self._newest = None
        raise RuntimeError(f"checkpoint {self.folder / step_name(step)} was not written: {_cause(error)}") from error

    def _check_folder(self, resume: bool) -> None:
        """Every rank can write, and all see the same folder; otherwise the same one line on every rank."""
        error = None
        try:
            check_folder(self.folder, resume=resume)
        except ValueError as refused:
            error = str(refused)
        for line in self._from_all(error):
            if line is not None:
                raise ValueError(line)
        marker = self.folder / self._from_first(lambda: f".shared-{secrets.token_hex(8)}")
        if self._rank == 0:
            marker.touch()
        self._from_all(None)                                     # nobody looks before it is there
        seen = self._from_all(marker.exists())
        if self._rank == 0:
            marker.unlink()
        if not all(seen):
            raise ValueError(f"checkpoint.folder = {str(self.folder)!r} is another folder on rank {seen.index(False)} "
                             "than on rank 0; name one on a file system that all ranks share")

    def _from_all(self, value: Value) -> list[Value]:
        if self._group is None:
            return [value]
        values: list[Any] = [None] * self._num_ranks
        dist.all_gather_object(values, value, group=self._group)
        return values

    def _from_first(self, ask: Callable[[], Value]) -> Value:
        """Rank 0's answer, on every rank: they must not disagree about what is on disk."""
        answer: list[Any] = [ask() if self._rank == 0 else None]
        if self._group is not None:
            dist.broadcast_object_list(answer, src=0, group=self._group)
        return cast(Value, answer[0])


class _Writer(dcp.FileSystemWriter):
    """Writes into a clean folder; its first rank adds the manifest and drops what is no longer kept."""

    def __init__(self, folder: Path, manifest: Manifest, keep: int) -> None:
        super().__init__(folder / step_name(manifest.step))
        self.folder, self.manifest, self.keep = folder, manifest, keep
        self.target = folder / step_name(manifest.step)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan                                              # the folder is made below, before anyone writes

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        make_room(self.target, self.manifest.model)
        self.target.mkdir()
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        self.target.mkdir(exist_ok=True)                         # a network file system may show it late
        return super().write_data(plan, planner)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results)
        files: dict[str, int] = {}
        for written in (result.storage_data for part in results for result in part):
            files[written.relative_path] = max(files.get(written.relative_path, 0), written.offset + written.length)
        files[METADATA] = (self.target / METADATA).stat().st_size
        write_manifest(self.target, Manifest(**{**asdict(self.manifest), "files": files}))
        verdict, reason = judge(self.target, self.manifest.model)
        if verdict != "good":
            raise OSError(f"{self.target} reads back {verdict}: {reason}")
        prune(self.folder, self.keep, self.manifest.model)


def _cause(error: BaseException) -> str:
    """In one line, with the rank where it is known."""
    where = ""
    if isinstance(error, dcp.CheckpointException):
        rank, (error, _) = next(iter(error.failures.items()))
        where = f"rank {rank}: "
    return f"{where}{type(error).__name__}: {' '.join(str(error).split())}"


def _state(model: torch.nn.Module, optimizer: torch.optim.Optimizer,
           with_optimizer: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """What is written, by name, and the optimizer's own form around it."""
    model_state, optimizer_state = get_state_dict(model, optimizer if with_optimizer else ())
    state: dict[str, Any] = {"model": model_state}
    if with_optimizer:
        state["optimizer"] = optimizer_state["state"]
    return state, cast("dict[str, Any]", optimizer_state)


def _rng_states(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    states = {"cpu": torch.get_rng_state()}
    kind = next(model.parameters()).device.type
    if kind != "cpu":
        states[kind] = torch.get_device_module(kind).get_rng_state()
    return states


def _set_rng_states(states: Mapping[str, torch.Tensor]) -> None:
    for kind, state in states.items():
        (torch if kind == "cpu" else torch.get_device_module(kind)).set_rng_state(state)
