"""One plan for all ranks, also where they made different ones.

Every rank plans for itself, and the same lengths, settings and tables give the same bits on any host. Where a host has
another table, setting or version after all, its ranks' rows and tasks would not fit the others'. So ranks compare two
numbers before each step, in one reduction, and where the plans differ all take rank 0's, which travels as columns that
are checked. Who trains on other documents cannot be helped that way: then the run ends.
"""

from __future__ import annotations

import hashlib
import logging
import platform
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

import numpy as np
import torch.distributed as dist

from distca.cost.attention_time import AttentionTime
from distca.cost.mixed_pool import MixedTime
from distca.planning.plan_bytes import step_from_bytes, step_to_bytes
from distca.planning.step import StepPlan
from distca.runtime.call import different_plans
from distca.runtime.registry import digest
from distca.train.collectives import all_equal, from_first, gather_json
from distca.train.settings import Settings

LOG = logging.getLogger("distca")


class StepDigests(NamedTuple):
    """Two numbers of a step plan for ranks to compare."""

    data: int  # lengths of the documents, and how many plans each tick, nano-batch and stage has
    plan: int  # where documents live, and every plan

    @classmethod
    def of(cls, step: StepPlan) -> StepDigests:
        plans = step.plans()
        number = {id(plan): at for at, plan in enumerate(plans)}
        calls = [[[[number[id(plan)] for plan in depths] for depths in nanos] for nanos in ticks]
                 for ticks in step.by_stage[:1 if step.is_shared else None]]
        counts = [[[len(depths) for depths in nanos] for nanos in ticks] for ticks in calls]
        lengths = [micro_batch.lengths.tolist() for micro_batch in step.micro_batches]
        documents = [[nano.document.tolist() for nano in micro_batch.nano_batches]
                     for micro_batch in step.micro_batches]
        return cls(_number((lengths, step.layers, counts)), _number((calls, documents, [*map(digest, plans)])))


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
        chosen["attention.cost"] += f" ({_tables(step.plans()[0].cost)})"
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
