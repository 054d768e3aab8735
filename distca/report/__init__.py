"""What a report shows, as plain numbers, so that drawing needs to know nothing of planning."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, eq=False)
class Side:
    """One way to compute a batch's attention. Bytes are forward, one layer, bf16, and only what crosses ranks."""

    work: np.ndarray            # [servers] causal pairs, or seconds under a latency table
    work_max_over_mean: float
    bytes_sent: np.ndarray      # [servers]
    bytes_received: np.ndarray  # [servers]
    bytes_all_gather: int       # what gathering every document's keys on all its ranks would move
    num_tasks: int
    num_moved: int              # tasks whose server is not their home

    @property
    def bytes_total(self) -> int:
        return int(self.bytes_sent.sum())

    @property
    def bytes_sent_max(self) -> int:
        return int(self.bytes_sent.max())

    @property
    def bytes_received_max(self) -> int:
        return int(self.bytes_received.max())


@dataclass(frozen=True, slots=True)
class SecondsFigures:
    """What one layer's attention takes, where a latency table knows; backward has a plan of its own."""

    forward: float              # the slowest server's
    backward: float
    backward_work_max_over_mean: float
    exchange: float | None      # of the busiest rank, forward, over the network that the table's profile measured


@dataclass(frozen=True, slots=True, eq=False)
class PlanFigures:
    """A batch before, with documents in order and every query computed at home, and after planning."""

    source: str                 # where the documents come from, for people
    num_documents: int
    ranks: int
    tokens_per_rank: int
    model: str
    tp: int
    placement: str
    tolerance: float
    before: Side                # over the ranks that own tokens
    after: Side                 # over all servers: the ranks, then the dedicated ones
    smallest_shard: int
    backward_bytes_total: int
    plan_seconds: float
    invalid: str | None         # why the plan failed its proof
    limit: str | None           # the piece that keeps max/mean above 1 + tolerance
    seconds: SecondsFigures | None = None

    @property
    def servers(self) -> int:
        return len(self.after.work)

    def as_json(self) -> dict[str, object]:
        return {
            "ranks": self.ranks,
            "servers": self.servers,
            "tokens_per_rank": self.tokens_per_rank,
            "documents": self.num_documents,
            "model": self.model,
            "tp": self.tp,
            "placement": self.placement,
            "tasks": self.after.num_tasks,
            "valid": self.invalid is None,
            "tolerance": self.tolerance,
            "work_max_over_mean_before": self.before.work_max_over_mean,
            "work_max_over_mean": self.after.work_max_over_mean,
            "limit": self.limit,
            "bytes_total": self.after.bytes_total,
            "bytes_sent_max": self.after.bytes_sent_max,
            "bytes_received_max": self.after.bytes_received_max,
            "bytes_all_gather": self.after.bytes_all_gather,
            "bytes_backward_total": self.backward_bytes_total,
            "smallest_shard": self.smallest_shard,
            "plan_seconds": self.plan_seconds,
            "attention_seconds": None if self.seconds is None else self.seconds.forward,
            "attention_seconds_backward": None if self.seconds is None else self.seconds.backward,
            "work_max_over_mean_backward": (
                self.after.work_max_over_mean if self.seconds is None else self.seconds.backward_work_max_over_mean),
            "exchange_seconds": None if self.seconds is None else self.seconds.exchange,
        }
