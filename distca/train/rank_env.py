"""Which rank this process is, as torchrun, srun or our own launcher says in the environment."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import NamedTuple

from distca.validation import UserError

RESTART_COUNT, MAX_RESTARTS = "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"  # torchrun's
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class RankEnv(NamedTuple):
    """A process's rank and the rendezvous address, in the order of TORCHRUN."""

    rank: int
    world: int
    local_rank: int
    local_world: int
    address: str
    port: int

    def environment(self) -> dict[str, str]:
        return {name: str(value) for name, value in zip(TORCHRUN, self, strict=True)}


def this_rank() -> RankEnv:
    """Return this process's rank; only inside `launch`."""
    env = rank_in(os.environ)
    if env is None:
        raise UserError(f"{', '.join(TORCHRUN)} are not set; start this with distca train, torchrun or srun")
    return env


def restarts(environ: Mapping[str, str]) -> tuple[int, int]:
    """Return how often the ranks of this run have been started again, and how often they may be."""
    return int(environ.get(RESTART_COUNT) or 0), int(environ.get(MAX_RESTARTS) or 0)


def rank_in(environ: Mapping[str, str]) -> RankEnv | None:
    """Return the rank that torchrun, or srun with several tasks, assigned to this process; None without a launcher."""
    if "RANK" in environ and "WORLD_SIZE" in environ:
        missing = [name for name in TORCHRUN if not environ.get(name)]
        if missing:
            raise UserError(f"RANK and WORLD_SIZE are set but {', '.join(missing)} not; start with torchrun, or unset "
                            "RANK and WORLD_SIZE for local ranks")
        rank, world, local_rank, local_world = (_number(environ, name) for name in TORCHRUN[:4])
        return RankEnv(rank, world, local_rank, local_world, environ["MASTER_ADDR"], _number(environ, "MASTER_PORT"))
    if int(environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1:  # srun sets it; a batch script or srun's shell is one task
        return _slurm_rank(environ)
    return None


def _slurm_rank(environ: Mapping[str, str]) -> RankEnv:
    """Return the rank of an srun task. Tasks meet on the first node, at a port derived from the job and step ids."""
    rank, world, local_rank, node, job, step = (_number(environ, f"SLURM_{name}") for name in (
        "PROCID", "STEP_NUM_TASKS", "LOCALID", "NODEID", "JOB_ID", "STEP_ID"))
    address = environ.get("MASTER_ADDR") or first_host(environ["SLURM_STEP_NODELIST"])
    port = int(environ.get("MASTER_PORT") or 20_000 + (job * 16 + step) % 20_000)
    return RankEnv(rank, world, local_rank, _tasks_per_node(environ["SLURM_STEP_TASKS_PER_NODE"])[node], address, port)


def first_host(nodes: str) -> str:
    """Return the first host of a SLURM node list: a[07-09,12],b -> a07."""
    first = re.match(r"[^,\[]*(\[[^\]]*\][^,\[]*)*", nodes)
    assert first is not None
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first.group())


def _tasks_per_node(text: str) -> list[int]:
    """Expand SLURM's list of counts: 8(x2),4 -> [8, 8, 4]."""
    parts = (part.partition("(x") for part in text.split(","))
    return [int(count) for count, _, times in parts for _ in range(int(times.rstrip(")") or 1))]


def _number(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ[name])
    except (KeyError, ValueError):
        raise UserError(f"{name} is {environ.get(name)!r} in the environment; give a whole number, as the launcher "
                        "does") from None
