"""Learn how fast the servers of a run are: each rank measures its own attention, and all compute the same speeds.

Every step the ranks tell each other one number, their seconds of attention. Plans are made ahead of steps, so what a
step teaches is in the plan of the step after the next. Speeds start at 1 with every run, also with one that resumes.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist

from distca.planning import speeds


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
