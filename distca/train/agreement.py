"""One plan for all ranks, also where they made different ones.

Every rank plans for itself, and the same lengths, settings and tables give the same bits on any host. Where a host has
another table, setting or version after all, its ranks' rows and tasks would not fit the others'. So ranks compare two
numbers before each step, in one reduction, and where the plans differ all take rank 0's, which travels as columns that
are checked. Who trains on other documents cannot be helped that way: then the run ends.

What ranks tell each other besides tensors, as JSON: nothing that arrives is ever executed. And how long they wait.

torch's own object collectives pickle; a rank that was taken over could then run code on all others.

Learn how fast the servers of a run are: each rank measures its own attention, and all compute the same speeds.

Every step the ranks tell each other one number, their seconds of attention. Plans are made ahead of steps, so what a
step teaches is in the plan of the step after the next. Speeds start at 1 with every run, also with one that resumes.
"""

from __future__ import annotations

import hashlib
import json
import logging
import platform
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from distca.cost.attention_time import AttentionTime
from distca.cost.mixed_pool import MixedTime
from distca.planning import speeds
from distca.planning.plan_bytes import step_from_bytes, step_to_bytes
from distca.planning.step import NO_CALL, StepPlan
from distca.runtime.prepared import different_plans, digest
from distca.train.settings import Settings
from distca.validation import UserError

LOG = logging.getLogger("distca")


class StepDigests(NamedTuple):
    """Two numbers of a step plan for ranks to compare."""

    data: int  # lengths of the documents, and how many plans each tick, nano-batch and stage has
    plan: int  # where documents live, and every plan

    @classmethod
    def of(cls, step: StepPlan) -> StepDigests:
        lengths = [micro_batch.lengths.tolist() for micro_batch in step.micro_batches]
        documents = [[nano.document.tolist() for nano in micro_batch.nano_batches]
                     for micro_batch in step.micro_batches]
        return cls(_number((lengths, step.layers, (step.calls != NO_CALL).tolist())),
                   _number((step.calls.tolist(), documents, [*map(digest, step.plans)])))


class Agreement:
    """Of the ranks of `trainers`; says once what rank 0 finds different elsewhere."""

    def __init__(self, settings: Settings, trainers: dist.ProcessGroup | None) -> None:
        self.settings, self.trainers, self.warned = settings, trainers, False

    def __call__(self, own: StepPlan, digests: StepDigests) -> StepPlan:
        """The step that all ranks follow: their own, or rank 0's where they are not the same."""
        if all_equal(list(digests), self.trainers):
            return own
        rank = dist.get_rank(self.trainers)
        everyone = [StepDigests(*one) for one in gather_json(digests, self.trainers)]
        others = [number for number, one in enumerate(everyone) if one.data != digests.data]
        if others:
            raise different_plans(rank, others)
        if not self.warned:
            odd = [number for number, one in enumerate(everyone) if one != everyone[0]]
            facts = gather_json(self.facts(own), self.trainers)
            if rank == 0:
                LOG.warning("ranks %s made another plan than rank 0, and all follow rank 0's; %s", odd,
                            _differences(facts[0], odd[0], facts[odd[0]]))
            self.warned = True
        content = from_first(step_to_bytes(own) if rank == 0 else b"", self.trainers)
        return own if rank == 0 else step_from_bytes(content, own)

    def facts(self, step: StepPlan) -> dict[str, str]:
        """What plans depend on besides lengths."""
        chosen = {f"{section}.{name}": str(value) for section in ("attention", "batch", "parallel")
                  for name, value in asdict(getattr(self.settings, section)).items()}
        chosen["attention.cost"] += f" ({_tables(step.plans[0].cost)})"
        return {"distca": _own_version(), "numpy": np.__version__, "Python": platform.python_version(), **chosen,
                "model": str(step.model)}


def _differences(first: dict[str, str], rank: int, its: dict[str, str]) -> str:
    found = [f"{name} {its[name]} where rank 0 has {first[name]}" for name in first if its.get(name) != first[name]]
    if not found:
        return (f"rank {rank} has the same versions, settings and cost as rank 0: please report the CPUs of both hosts "
                "and the version of distca")
    return f"rank {rank} has {', '.join(found)}; give every host the same"


def _own_version() -> str:
    try:
        return version("distca")
    except PackageNotFoundError:  # run from a checkout that is not installed
        return "not installed"


def _tables(cost: AttentionTime | None) -> str:
    """A number that stands for what was measured, of each kind of server."""
    kinds = cost.kinds if isinstance(cost, MixedTime) else () if cost is None else (cost,)
    return " ".join(f"{_number((one.table.forward_seconds.tolist(), one.table.q_len.tolist(), one.scale)):x}"
                    for one in kinds)


def _number(value: object) -> int:
    """62 bits of what a value says of itself."""
    return int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=8).digest(), "little") >> 2


Value = TypeVar("Value")


def gather_json(value: Value, group: dist.ProcessGroup | None = None) -> list[Value]:
    """Every rank's value, on every rank, in rank order; only this rank's where there is no process group."""
    if not dist.is_initialized():
        return [value]
    mine = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    size = dist.get_world_size(group)
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(size)]
    dist.all_gather(lengths, torch.tensor([len(mine)]), group=group)
    longest = max(int(length) for length in lengths)
    padded = torch.nn.functional.pad(mine, (0, longest - len(mine)))
    everyone = [torch.empty(longest, dtype=torch.uint8) for _ in range(size)]
    dist.all_gather(everyone, padded, group=group)
    return [json.loads(bytes(part[:int(length)].numpy())) for part, length in zip(everyone, lengths, strict=True)]


def first_says(ask: Callable[[], Value], group: dist.ProcessGroup | None = None) -> Value:
    """Rank 0's answer, or its ValueError, on every rank: they must not disagree about what is on disk."""
    if not dist.is_initialized():
        return ask()
    answer: dict[str, Any] = {}
    if dist.get_rank() == 0:
        try:
            answer = {"value": ask()}
        except ValueError as error:
            answer = {"error": str(error)}
    answer = json.loads(from_first(json.dumps(answer).encode(), group))
    if "error" in answer:
        raise UserError(answer["error"])
    return cast(Value, answer["value"])


def from_first(content: bytes, group: dist.ProcessGroup | None = None) -> bytes:
    """Rank 0's bytes, of which there are some, on every rank."""
    length = torch.tensor([len(content)])
    dist.broadcast(length, src=0, group=group)
    sent = torch.empty(int(length), dtype=torch.uint8)
    if dist.get_rank() == 0:
        sent = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    dist.broadcast(sent, src=0, group=group)
    return sent.numpy().tobytes()


def all_equal(numbers: list[int], group: dist.ProcessGroup | None = None) -> bool:
    """Whether all ranks hold the same numbers, of up to 63 bits; by one reduction."""
    most = torch.tensor([[number, -number] for number in numbers])
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
    return bool((most[:, 0] == -most[:, 1]).all())


def set_timeouts(timeout: timedelta) -> None:
    """Every process group of this process waits this long, also those that a mesh made with torch's 30 minutes."""
    set_one = getattr(dist, "set_timeout", None) or distributed_c10d._set_pg_timeout  # its name before torch 2.15
    for group in list(distributed_c10d._world.pg_map):
        set_one(timeout, group)


class ServerSpeeds:
    """Of attention's pool: a server is a rank of `pool` with its neighbours of all other tensor indices."""

    def __init__(self, pool: dist.ProcessGroup, trainers: dist.ProcessGroup | None) -> None:
        self.rank, self.trainers = dist.get_rank(pool), trainers
        self.latest = np.ones(dist.get_world_size(pool))         # over the median, not rounded
        self.slowest_seconds = 0.0                               # of attention, in the step before

    @property
    def for_plans(self) -> np.ndarray:
        return speeds.planned(self.latest)

    @property
    def for_log(self) -> tuple[float, ...]:
        return tuple(np.round(self.latest, 3).tolist())

    def learn(self, work: np.ndarray, own_seconds: float) -> None:
        """From a step that gave servers so much `work`; of a server's ranks the slowest counts."""
        seconds = torch.zeros(len(self.latest), dtype=torch.float64)
        seconds[self.rank] = own_seconds
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX, group=self.trainers)  # exact: the same bits on every rank
        self.latest = speeds.updated(self.latest, work, seconds.numpy())
        self.slowest_seconds = float(seconds.max())
