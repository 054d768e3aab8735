"""Seconds of attention calls (to be replaced)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from distca.cost.latency_table import LatencyTable
from distca.spec import ModelShape


@dataclass(frozen=True, slots=True)
class AttentionTime:
    table: LatencyTable
    scale: float = 1.0

    @classmethod
    def of(cls, table: LatencyTable, model: ModelShape, tp: int = 1, scale: float = 1.0) -> AttentionTime:
        return cls(table, scale)

    def shard(self, q_len: float, kv_len: float, backward: bool = False) -> float:
        return self.scale * self.table.seconds(q_len, kv_len, backward=backward)

    def shards(self, q_len: np.ndarray, kv_len: np.ndarray, backward: bool = False) -> np.ndarray:
        return self.scale * self.table.seconds(q_len, kv_len, backward=backward)

    def servers(self, q_len, kv_len, server, num_servers, backward=False, *, aligned=None):
        keys = kv_len if aligned is None else np.where(aligned, kv_len, kv_len + 0.5 * (q_len - 1))
        return np.bincount(server, weights=self.shards(q_len, np.maximum(keys, q_len), backward), minlength=num_servers)

    def least(self, pairs: float, backward: bool = False) -> float:
        return 0.0
