"""Make all ranks follow one plan, and compute the same server speeds on all ranks.

Every rank plans on its own; equal lengths, settings and tables give bit-identical plans on any host. In case a host
differs in one of them, ranks compare two digests before each step, in one reduction. If plans differ, all ranks use
rank 0's plan, which is broadcast and validated. If documents differ, the run ends.

With `attention.adapt` each rank measures its attention seconds, and all ranks compute the same speeds from them.
Batches are planned ahead, so a measurement affects the plan after the next. Every run, also a resumed one, starts with
speeds of 1.
"""

from __future__ import annotations

import hashlib
import logging
import platform
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from distca.cost.mixed_pool import MixedTime
from distca.planning.balance import learnt_speeds, rounded_speeds
from distca.planning.plan_bytes import step_from_bytes, step_to_bytes
from distca.planning.step import NO_CALL, StepPlan
from distca.runtime.exchange import different_plans
from distca.runtime.prepared import digest
from distca.train.groups import all_equal, from_first, gather_json
from distca.train.settings import Settings

LOG = logging.getLogger("distca")


class StepDigests(NamedTuple):
    """Two digests of a step plan, which ranks compare."""

    data: int  # of document lengths, layers per stage, and which calls exist
    plan: int  # of layouts and plans

    @classmethod
    def of(cls, step: StepPlan) -> StepDigests:
        lengths = [micro_batch.lengths.tolist() for micro_batch in step.micro_batches]
        documents = [[nano.document.tolist() for nano in micro_batch.nano_batches]
                     for micro_batch in step.micro_batches]
        return cls(_digest((lengths, step.layers, (step.calls != NO_CALL).tolist())),
                   _digest((step.calls.tolist(), documents, [*map(digest, step.plans)])))


class Agreement:
    """Makes the ranks of `trainers` follow one plan; warns once about what differs between them."""

    def __init__(self, settings: Settings, trainers: dist.ProcessGroup | None) -> None:
        self.settings, self.trainers, self.warned = settings, trainers, False

    def __call__(self, own: StepPlan, digests: StepDigests) -> StepPlan:
        """Return the plan that all ranks follow: this rank's own if all are the same, else rank 0's."""
        if all_equal(list(digests), self.trainers):
            return own
        rank = dist.get_rank(self.trainers)
        by_rank = [StepDigests(*one) for one in gather_json(digests, self.trainers)]
        others = [number for number, one in enumerate(by_rank) if one.data != digests.data]
        if others:
            raise different_plans(rank, others)
        if not self.warned:
            odd = [number for number, one in enumerate(by_rank) if one != by_rank[0]]
            facts = gather_json(self.facts(own), self.trainers)
            if rank == 0:
                LOG.warning("ranks %s made another plan than rank 0, and all follow rank 0's; %s", odd,
                            _differences(facts[0], odd[0], facts[odd[0]]))
            self.warned = True
        content = from_first(step_to_bytes(own) if rank == 0 else b"", self.trainers)
        return own if rank == 0 else step_from_bytes(content, own)

    def facts(self, step: StepPlan) -> dict[str, str]:
        """Return the versions and settings that plans depend on, besides document lengths."""
        chosen = {f"{section}.{name}": str(value) for section in ("attention", "batch", "parallel")
                  for name, value in asdict(getattr(self.settings, section)).items()}
        cost = step.plans[0].cost
        kinds = cost.kinds if isinstance(cost, MixedTime) else () if cost is None else (cost,)
        tables = [(one.table.forward_seconds.tolist(), one.table.q_len.tolist(), one.scale) for one in kinds]
        chosen["attention.cost"] += f" ({' '.join(f'{_digest(table):x}' for table in tables)})"
        try:
            own_version = version("distca")
        except PackageNotFoundError:                             # run from a checkout that is not installed
            own_version = "not installed"
        return {"distca": own_version, "numpy": np.__version__, "Python": platform.python_version(), **chosen,
                "model": str(step.model)}


def _differences(first: dict[str, str], rank: int, other: dict[str, str]) -> str:
    found = [f"{name} {other[name]} where rank 0 has {first[name]}" for name in first if other.get(name) != first[name]]
    if not found:
        return (f"rank {rank} has the same versions, settings and cost as rank 0: please report the CPUs of both hosts "
                "and the version of distca")
    return f"rank {rank} has {', '.join(found)}; give every host the same"


def _digest(value: object) -> int:
    """Return 62 bits of a hash of the value's repr."""
    return int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=8).digest(), "little") >> 2


class ServerSpeeds:
    """Relative speeds of the attention servers. A server is one rank of `pool` per tensor index."""

    def __init__(self, pool: dist.ProcessGroup, trainers: dist.ProcessGroup | None) -> None:
        self.rank, self.trainers = dist.get_rank(pool), trainers
        self.latest = np.ones(dist.get_world_size(pool))         # relative to the median, not rounded
        self.slowest_seconds = 0.0                               # largest attention seconds of the last step

    @property
    def for_plans(self) -> np.ndarray:
        return rounded_speeds(self.latest)

    @property
    def for_log(self) -> tuple[float, ...]:
        return tuple(np.round(self.latest, 3).tolist())

    def learn(self, work: np.ndarray, own_seconds: float) -> None:
        """Update from a step in which server s did `work[s]`; a server is as slow as the slowest of its ranks."""
        seconds = torch.zeros(len(self.latest), dtype=torch.float64)
        seconds[self.rank] = own_seconds
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX, group=self.trainers)  # exact: the same bits on every rank
        self.latest = learnt_speeds(self.latest, work, seconds.numpy())
        self.slowest_seconds = float(seconds.max())
