"""Pools of different GPUs: every server has its own latency table.

A TOML file names the servers in the order of the pool's ranks, dedicated servers last:

    servers = [
        {ranks = 8, table = "h200"},                  # a shipped table
        {ranks = 8, table = "h100.json"},             # a file of distca profile, in the folder of this file
        {ranks = 4, table = "h200", speed = 0.78},    # a fraction of another table's rate, if none was measured
    ]

Balancing searches with the first table and the relative speeds of the others; the time of a plan is computed from each
server's own table. The unit of work is seconds times the server's speed, so that work / speed gives seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from math import inf
from pathlib import Path
from typing import Any

import numpy as np

from distca.columns import added, freeze
from distca.cost.attention_time import AttentionTime, Column, FloatArray, find_table
from distca.cost.latency_table import LatencyTable
from distca.spec import ModelShape, unknown_name
from distca.validation import MAX_RANKS, UserError, check_name, check_number, check_whole, errors_in, read_toml, short

MAX_KINDS = 64
_LEAST_SPEED, _MOST_SPEED = 1e-3, 1e3
_KEYS = ("ranks", "table", "speed")


@dataclass(frozen=True, slots=True)
class ServerKind:
    """Consecutive servers of the same kind."""

    ranks: int
    table: LatencyTable
    speed: float = 1.0  # of the table's rates


@dataclass(frozen=True, slots=True, eq=False)
class MixedPool:
    """The kinds of servers of a pool, in order."""

    kinds: tuple[ServerKind, ...]

    def __post_init__(self) -> None:
        if not self.kinds:
            raise UserError("servers is empty; name at least one kind of server")

    @property
    def first(self) -> LatencyTable:
        """The table whose linear layers and network count for all servers."""
        return self.kinds[0].table

    def require(self, max_kv_len: int) -> None:
        for one in self.kinds:
            one.table.require(max_kv_len)

    def time(self, model: ModelShape, tp: int = 1, scale: float = 1.0) -> MixedTime:
        """Bind every table to a model's heads per rank; `scale` multiplies all seconds."""
        return MixedTime.of_kinds([AttentionTime.of(one.table, model, tp, scale / one.speed) for one in self.kinds],
                                  [one.ranks for one in self.kinds])


@dataclass(frozen=True, slots=True, eq=False)
class MixedTime(AttentionTime):
    """Attention time of servers of several kinds; the fields of AttentionTime are those of the first kind."""

    kinds: tuple[AttentionTime, ...] = ()
    kind: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))  # [servers]

    def __post_init__(self) -> None:
        AttentionTime.__post_init__(self)
        freeze(self, ("kind",))

    @classmethod
    def of_kinds(cls, kinds: Sequence[AttentionTime], ranks: Sequence[int]) -> MixedTime:
        first = {one.name: getattr(kinds[0], one.name) for one in fields(AttentionTime) if one.init}
        notes = dict.fromkeys(one.note for one in kinds if one.note)
        return cls(**{**first, "note": "; ".join(notes) or None}, kinds=tuple(kinds),
                   kind=np.repeat(np.arange(len(kinds)), ranks))

    def speeds(self, num_servers: int) -> FloatArray:
        rates = np.array([self.kinds[0].least(1.0) / one.least(1.0) for one in self.kinds])
        return np.asarray(rates[self.kind[:num_servers]], dtype=np.float64)

    def check_servers(self, num_servers: int) -> None:
        if len(self.kind) != num_servers:
            raise UserError(f"servers names {len(self.kind)} of them but the pool has {num_servers}; name every rank "
                            "of the pool, of one tensor-parallel index, and the dedicated servers last")

    def repeated(self, times: int) -> MixedTime:
        return MixedTime.of_kinds(self.kinds, (times * np.bincount(self.kind, minlength=len(self.kinds))).tolist())

    def servers(
        self, q_len: Column, kv_len: Column, server: Column, num_servers: int, backward: bool = False, *,
        aligned: Column | None = None, document: Column | None = None, kv_start: Column | None = None,
    ) -> FloatArray:
        """Return each server's seconds by its own table, times its speed."""
        of_task, total = self.kind[np.asarray(server, dtype=np.int64)], np.zeros(num_servers)
        for number, time in enumerate(self.kinds):
            mine = of_task == number
            q, kv, at = (np.asarray(column)[mine] for column in (q_len, kv_len, server))
            rest = {name: None if column is None else np.asarray(column)[mine] for name, column in (
                ("aligned", aligned), ("document", document), ("kv_start", kv_start))}
            total += time.servers(q, kv, at, num_servers, backward, **rest)
        return total * self.speeds(num_servers)

    def least(self, pairs: Column | float, backward: bool = False, kv_len: Column | float = inf) -> float:
        """Return a lower bound on the servers' summed seconds: all are busy to the end, at their best rates."""
        rate = added(1.0 / self.kinds[number].least(1.0, backward) for number in self.kind.tolist())
        return len(self.kind) * float(np.sum(pairs)) / rate

    def __eq__(self, other: object) -> bool:
        return (isinstance(other, MixedTime) and self.kinds == other.kinds
                and np.array_equal(self.kind, other.kind))

    def __hash__(self) -> int:
        return hash((self.kinds, self.kind.tobytes()))


Cost = LatencyTable | MixedPool


def find_cost(name: str) -> Cost:
    """Return a latency table by file or shipped name, or the pool that a TOML file describes."""
    return read_pool(name) if Path(name).suffix == ".toml" else find_table(name)


def time_of(cost: Cost, model: ModelShape, tp: int = 1, scale: float = 1.0) -> AttentionTime:
    if isinstance(cost, MixedPool):
        return cost.time(model, tp, scale)
    return AttentionTime.of(cost, model, tp, scale)


def read_pool(path: str | Path) -> MixedPool:
    """Return the pool in a TOML file."""
    content = read_toml(path)
    with errors_in(path):
        for key in content:
            if key != "servers":
                raise unknown_name("field", key, ("servers",))
        listed = content.get("servers")
        if not isinstance(listed, list) or not 1 <= len(listed) <= MAX_KINDS:
            raise UserError(f"servers is {short(listed)}; give a list of 1 to {MAX_KINDS} kinds, each as "
                            '{ranks = 8, table = "h200"}')
        return MixedPool(tuple(_kind(entry, number, Path(path).parent) for number, entry in enumerate(listed)))


def _kind(entry: Any, number: int, folder: Path) -> ServerKind:
    where = f"servers[{number}]"
    if not isinstance(entry, dict) or not {"ranks", "table"} <= set(entry):
        raise UserError(f'{where} is {short(entry)}; give ranks and table, as in {{ranks = 8, table = "h200"}}')
    for key in entry:
        if key not in _KEYS:
            raise unknown_name(f"field of {where}", key, _KEYS)
    table = check_name(f"{where}.table", entry["table"])
    beside = folder / table
    return ServerKind(check_whole(f"{where}.ranks", entry["ranks"], most=MAX_RANKS),
                      find_table(str(beside) if beside.exists() else table),
                      check_number(f"{where}.speed", entry.get("speed", 1.0), least=_LEAST_SPEED, most=_MOST_SPEED))
