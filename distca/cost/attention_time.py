"""Seconds of attention on one rank: of a shard in a full batch, of whole batches, and a lower bound.

The planner searches with `shard` and evaluates plans with `servers`; the runtime and the simulator use the same times.
A latency table gives the seconds that a shard adds to a batch that fills the device. If the table's kernel has a work
list, a batch also takes a launch and the tail of that list (dealing.py), and a shard of fewer queries than the table's
shortest takes time in proportion to its whole tiles.

A table is measured with the heads of one rank. Another head dim is another kernel: it is refused, except that shipped
tables are scaled by FLOPs. Another number of heads is scaled by pairs times heads. Between an H200's tables of 32, 8
and 4 heads that is 1 to 3 % off in the median and up to a fifth for the shortest shards. `note` says what was scaled.

Some tables come with the package, so that a plan in seconds needs no GPU. `tables/h200.json` is `h200`; tables of the
same GPU and kernel with other heads are in the folder `tables/h200`, and the one nearest in heads is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache
from importlib.resources import as_file, files
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from distca.cost.dealing import Tasks, WorkList
from distca.cost.latency_table import LatencyTable, Surface
from distca.spec import ModelShape, unknown_name
from distca.validation import UserError
from distca.workload.placement import Cuts

FloatArray = npt.NDArray[np.float64]
Column = npt.NDArray[Any]

_LONGEST_ITEM = 0.5  # share of a rank's backward time that the longest item of a document may take
_TABLES = files("distca.cost") / "tables"


@dataclass(frozen=True, slots=True, eq=False)
class AttentionTime:
    """A latency table bound to the heads of one rank; see `of`."""

    table: LatencyTable
    heads: int
    kv_heads: int
    scale: float                 # factor of all seconds, for another GPU's rate
    work_list: WorkList | None
    note: str | None             # a sentence for the user if times are scaled from other heads
    flops: float = 1.0           # per pair and head, relative to the table's head dim
    _factor: float = field(init=False, repr=False)
    _surfaces: tuple[Surface, Surface | None] = field(init=False, repr=False)
    _best_rates: tuple[float, float] = field(init=False, repr=False)  # pairs per second of the table

    def __post_init__(self) -> None:
        heads = self.table.metadata.get("num_heads", self.heads)
        assert isinstance(heads, int)
        surfaces = self.table.surfaces
        best = tuple(0.0 if surface is None else float(surface.best_rates()) for surface in surfaces)
        object.__setattr__(self, "_factor", self.scale * self.flops * self.heads / heads)
        object.__setattr__(self, "_surfaces", surfaces)
        object.__setattr__(self, "_best_rates", best)

    @classmethod
    def of(cls, table: LatencyTable, model: ModelShape, tp: int = 1, scale: float = 1.0) -> AttentionTime:
        """Bind a table to a model's heads per rank; `scale` multiplies its seconds."""
        if not 0 < scale < float("inf"):
            raise UserError(f"scale is {scale!r}; give a finite number above 0")
        heads, kv_heads = model.heads_per_rank(tp), model.kv_heads_per_rank(tp)
        table = nearest_heads(table, heads, kv_heads, model.head_dim)
        about = table.metadata
        head_dim = about.get("head_dim", model.head_dim)
        is_other_dim = not head_dim == model.head_dim == model.value_dim
        if is_other_dim and not ("shipped" in about and isinstance(head_dim, int)):
            raise UserError(
                f"latency table {table.name!r} was measured with head_dim {head_dim} but model {model.name!r} has "
                f"{_dims(model)}; run distca profile --model {model.name} and give its table as --cost")
        flops = (model.head_dim + model.value_dim) / (2.0 * head_dim) if is_other_dim else 1.0  # type: ignore[operator]
        measured = about.get("num_heads", heads), about.get("num_kv_heads", kv_heads)
        note = None
        if measured != (heads, kv_heads):
            note = (f"attention of {heads} query and {kv_heads} KV heads is scaled from {table.name!r}, measured with "
                    f"{measured[0]} and {measured[1]}; profile with --tp {tp} for its own")
        if is_other_dim:
            note = (f"attention of head_dim {_dims(model)} is scaled by FLOPs from {table.name!r}, measured with "
                    f"{head_dim}: no kernel of it was measured; profile for its own")
        facts = about.get("work_list")
        work_list = WorkList.of(facts, heads, kv_heads) if isinstance(facts, Mapping) else None
        return cls(table, heads, kv_heads, float(scale), work_list, note, flops)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, AttentionTime):
            return NotImplemented
        mine, theirs = self.table, other.table
        return (self._key() == other._key() and mine.metadata == theirs.metadata
                and (mine.backward_seconds is None) == (theirs.backward_seconds is None)
                and all(np.array_equal(getattr(mine, name), getattr(theirs, name), equal_nan=True)
                        for name in ("q_len", "kv_len", "forward_seconds", "backward_seconds")
                        if getattr(mine, name) is not None))

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[object, ...]:
        return (self.table.name, self.table.peak_pairs_per_second, self.heads, self.kv_heads, self.scale, self.flops,
                self.work_list)

    def cuts(self) -> Cuts:
        """Return limits on slices that suit the device, if its kernel has a work list.

        In backward, a document's first keys are one item with all queries that see them on a server. Limiting these
        queries keeps that item from outlasting the work of all other workers, or from being split.
        """
        if self.work_list is None or self._surfaces[1] is None:
            return Cuts()
        forward, backward = (self._factor / rate for rate in self._best_rates)  # seconds of a pair
        return Cuts(self.work_list.wave_tokens,
                    _LONGEST_ITEM / ((forward + backward) * self.work_list.pairs_at_once))

    def speeds(self, num_servers: int) -> FloatArray:
        """Return the speed of each server relative to the first; `servers` returns seconds times these."""
        return np.ones(num_servers)

    def check_servers(self, num_servers: int) -> None:
        """Refuse a pool whose size differs from the number of servers that the cost describes."""

    def repeated(self, times: int) -> AttentionTime:
        """Return the cost of a pool in which each server is repeated `times` times in a row."""
        return self

    def shard(self, q_len: float, kv_len: float, backward: bool = False) -> float:
        """Return the seconds that queries at the end of their keys add to a full batch; monotonic in both lengths."""
        surface = self._surfaces[backward]
        if surface is None or not 0 <= q_len <= kv_len:
            return self._factor * self.table.seconds(q_len, kv_len, backward=backward)  # raises the error
        if q_len < self.table.q_len[0]:
            return float(self.shards(np.array([q_len]), np.array([kv_len]), backward)[0])
        return self._factor * surface.at(q_len, kv_len)

    def shards(self, q_len: Column, kv_len: Column, backward: bool = False) -> FloatArray:
        """Return `shard` for arrays of lengths."""
        q, kv = np.atleast_1d(np.asarray(q_len, dtype=np.float64)), np.asarray(kv_len, dtype=np.float64)
        seconds = self.table.seconds(q, kv, backward=backward)
        if not backward and self.work_list is not None:
            part = np.minimum(self.work_list.filled(q) / self.table.q_len[0], 1.0)
            seconds = np.maximum(seconds * part, q * (kv - 0.5 * (q - 1)) / self._best_rates[0])
        return self._factor * seconds

    def servers(
        self, q_len: Column, kv_len: Column, server: Column, num_servers: int, backward: bool = False, *,
        aligned: Column | None = None, document: Column | None = None, kv_start: Column | None = None,
    ) -> FloatArray:
        """Return the seconds of every server's attention call; 0 without tasks.

        `aligned` is False where all queries see all keys. `document` and `kv_start` say which keys tasks read. Without
        them no tasks are assumed to share keys, which changes the time of a kernel with a work list by a few per cent.
        """
        q, kv = np.asarray(q_len, dtype=np.float64), np.asarray(kv_len, dtype=np.float64)
        kept = np.flatnonzero((q > 0) & (kv > 0))
        kept = kept[np.argsort(np.asarray(server)[kept], kind="stable")]
        q, kv, at = q[kept], kv[kept], np.asarray(server, dtype=np.int64)[kept]
        causal = np.ones(len(q), dtype=bool) if aligned is None else np.asarray(aligned, dtype=bool)[kept]
        seconds = self.tasks(q, kv, causal, backward)
        even = np.bincount(at, weights=seconds, minlength=num_servers).astype(np.float64)
        if self.work_list is None or not len(q):
            return even
        shared = document is not None
        tasks = Tasks(
            seconds, q, np.maximum(kv, np.where(causal, q, 0.0)), causal, at,
            np.asarray(document, dtype=np.int64)[kept] if shared else np.arange(len(q)),
            np.asarray(kv_start, dtype=np.float64)[kept] if shared and kv_start is not None else np.zeros(len(q)))
        launch = self.scale * self.work_list.launch_seconds[backward] * (even > 0)
        return launch + even + self.work_list.tail(tasks, num_servers, backward)

    def tasks(self, q_len: Column, kv_len: Column, aligned: Column, backward: bool = False) -> FloatArray:
        """Return the seconds that each task adds to a full batch.

        A rectangle is charged as the aligned shard with the same queries and pairs. If it has fewer keys than half its
        queries, no such shard exists, and it is charged at the rate of a square.
        """
        q, kv = np.asarray(q_len, dtype=np.float64), np.asarray(kv_len, dtype=np.float64)
        as_aligned = np.maximum(np.where(aligned, kv, kv + 0.5 * (q - 1)), q)
        seconds = self.shards(q, as_aligned, backward)
        return np.where(aligned, seconds, seconds * (kv / (as_aligned - 0.5 * (q - 1))))

    def least(self, pairs: Column | float, backward: bool = False, kv_len: Column | float = inf) -> float:
        """Return a lower bound on the seconds of a batch: all pairs at the best rate of any shape.

        For pairs in documents of `kv_len` tokens, only shapes with at most that many keys count.
        """
        surface = self._surfaces[backward]
        if surface is None:
            self.table.seconds(1, 1, backward=backward)          # raises the error
        assert surface is not None
        rates = surface.best_rates(np.asarray(kv_len, dtype=np.float64))
        if not backward and self.work_list is not None:          # shards shorter than the table's, in whole tiles
            keys = np.append(surface.kv[1:], inf)
            of_tiles = np.maximum.accumulate(surface.q[0] * keys / surface.seconds[0])
            rates = np.maximum(rates, of_tiles[np.maximum(np.searchsorted(surface.kv, kv_len) - 1, 0)])
        return self._factor * float(np.sum(pairs / np.minimum(rates, self._best_rates[backward])))


def _dims(model: ModelShape) -> str:
    same = model.head_dim == model.value_dim
    return str(model.head_dim) if same else f"{model.head_dim} for keys and {model.value_dim} for values"


def shipped_names() -> list[str]:
    """List the tables in this package."""
    if not _TABLES.is_dir():
        return []
    return sorted(entry.name.removesuffix(".json") for entry in _TABLES.iterdir() if entry.name.endswith(".json"))


def find_table(name: str) -> LatencyTable:
    """Return the table in the file of this name, or else the shipped table of this name."""
    if not Path(name).exists() and name in shipped_names():
        return shipped_table(name)
    return LatencyTable.load(name)


@cache
def shipped_table(name: str) -> LatencyTable:
    """Return the measured table of this name, such as `h200`; the same one every time, as times are cached by table."""
    if name not in shipped_names():
        raise unknown_name("latency table", name, shipped_names())
    with as_file(_TABLES / f"{name}.json") as path:
        return LatencyTable.load(path)


def nearest_heads(table: LatencyTable, heads: int, kv_heads: int, head_dim: int) -> LatencyTable:
    """Replace a shipped table by the shipped table nearest in heads; return any other table unchanged."""
    about, name = table.metadata, table.metadata.get("shipped")
    is_exact = (about.get("num_heads"), about.get("num_kv_heads"), about.get("head_dim")) == (heads, kv_heads, head_dim)
    if is_exact or not isinstance(name, str):
        return table
    fitting = [one for one in (table, *other_heads(name)) if one.metadata.get("head_dim") == head_dim]
    return min(fitting, key=lambda one: _distance(one, heads, kv_heads), default=table)


def other_heads(name: str) -> list[LatencyTable]:
    """Load the shipped tables of the same GPU and kernel with other heads."""
    if name not in shipped_names() or not (_TABLES / name).is_dir():  # the name may come from a user's file
        return []
    with as_file(_TABLES / name) as path:
        return [LatencyTable.load(file) for file in sorted(path.glob("*.json"))]


def _distance(table: LatencyTable, heads: int, kv_heads: int) -> Fraction:
    """Return the ratio of KV heads times the ratio of query heads per KV head, each at least 1."""
    about = table.metadata
    q, kv = about["num_heads"], about["num_kv_heads"]
    assert isinstance(q, int) and isinstance(kv, int)
    factors = Fraction(kv, kv_heads), Fraction(q * kv_heads, kv * heads)
    return max(factors[0], 1 / factors[0]) * max(factors[1], 1 / factors[1])
