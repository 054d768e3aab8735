"""Seconds of attention on one rank: of a shard in a full batch, of whole batches, and the least that any can take.

Plans are searched on `shard` and judged on `servers`; the runtime, the simulator and the planner charge the same. A
latency table gives the seconds that a shard adds to a batch that fills the device. A whole batch takes a launch and the
tail of its work list more (work_list.py), where the table's kernel is known to have one. Then a shard of fewer queries
than the table's shortest takes as much less forward as it has fewer of the kernel's own tiles.

A table is measured with the heads of one rank. Another head dim is another kernel, so it is refused, but for shipped
tables: there it is scaled by FLOPs, which `note` says, since nobody measured it. Another number of heads is scaled by
pairs times heads, which `note` says too: with launch and tail apart that is 1 to 3 % off in the median between an
H200's tables of 32, 8 and 4 heads, and up to a fifth for the shortest shards. Of a shipped table the one nearest in
heads is taken.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any

import numpy as np
import numpy.typing as npt

from distca.cost.dealing import Tasks, WorkList
from distca.cost.latency_table import LatencyTable, Surface
from distca.cost.shipped_tables import nearest_heads
from distca.spec import ModelShape
from distca.validation import UserError
from distca.workload.placement import Cuts

FloatArray = npt.NDArray[np.float64]
Column = npt.NDArray[Any]

_LONGEST_ITEM = 0.5  # of a rank's backward that the longest item of a document may take


@dataclass(frozen=True, slots=True, eq=False)
class AttentionTime:
    """A latency table bound to the heads of one rank; see `of`."""

    table: LatencyTable
    heads: int
    kv_heads: int
    scale: float                 # of all seconds: another GPU's rate
    work_list: WorkList | None
    note: str | None             # a sentence where the table's heads are not the rank's
    flops: float = 1.0           # of a pair and head, over those of the table's head dim
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
                and all(np.array_equal(a, b, equal_nan=True) for a, b in (
                    (mine.q_len, theirs.q_len), (mine.kv_len, theirs.kv_len),
                    (mine.forward_seconds, theirs.forward_seconds)))
                and (mine.backward_seconds is None) == (theirs.backward_seconds is None)
                and (mine.backward_seconds is None or theirs.backward_seconds is None
                     or np.array_equal(mine.backward_seconds, theirs.backward_seconds, equal_nan=True)))

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[object, ...]:
        return (self.table.name, self.table.peak_pairs_per_second, self.heads, self.kv_heads, self.scale, self.flops,
                self.work_list)

    def cuts(self) -> Cuts:
        """Slices that suit the device, where work is known to come in items.

        A document's first keys are read by all its queries on a server, by one worker: that should not take longer than
        what all workers do beside it.
        """
        if self.work_list is None or self._surfaces[1] is None:
            return Cuts()
        forward, backward = (self._factor / rate for rate in self._best_rates)  # seconds of a pair
        return Cuts(self.work_list.wave_tokens,
                    _LONGEST_ITEM / ((forward + backward) * self.work_list.pairs_at_once))

    def speeds(self, num_servers: int) -> FloatArray:
        """Of each server, over that of the first: `servers` counts seconds times these."""
        return np.ones(num_servers)

    def check_servers(self, num_servers: int) -> None:
        """Refuse a pool of another size than is known."""

    def repeated(self, times: int) -> AttentionTime:
        """The same where each server stands so many times in a row."""
        return self

    def shard(self, q_len: float, kv_len: float, backward: bool = False) -> float:
        """Seconds that queries at the end of their keys add to a full batch; never falls in either length."""
        surface = self._surfaces[backward]
        if surface is None or not 0 <= q_len <= kv_len:
            return self._factor * self.table.seconds(q_len, kv_len, backward=backward)  # says what is wrong
        if q_len < self.table.q_len[0]:
            return float(self.shards(np.array([q_len]), np.array([kv_len]), backward)[0])
        return self._factor * surface.at(q_len, kv_len)

    def shards(self, q_len: Column, kv_len: Column, backward: bool = False) -> FloatArray:
        """The same on arrays."""
        q, kv = np.atleast_1d(np.asarray(q_len, dtype=np.float64)), np.asarray(kv_len, dtype=np.float64)
        seconds = self.table.seconds(q, kv, backward=backward)
        if not backward and self.work_list is not None:
            part = np.minimum(self.work_list.filled(q) / self.table.q_len[0], 1.0)
            seconds = np.maximum(seconds * part, q * (kv - 0.5 * (q - 1)) / self._best_rates[0])
        return self._factor * seconds

    def servers(
        self,
        q_len: Column,
        kv_len: Column,
        server: Column,
        num_servers: int,
        backward: bool = False,
        *,
        aligned: Column | None = None,
        document: Column | None = None,
        kv_start: Column | None = None,
    ) -> FloatArray:
        """Seconds of every server's attention call; 0 without tasks.

        `aligned` is False where all queries see all keys. `document` and `kv_start` say which keys tasks read; without
        them no two tasks share any, which a kernel with a work list can take a few per cent less or more time for.
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
        """What each task adds to a full batch; a rectangle what an aligned shard of as many queries and pairs adds.

        One with fewer keys than half its queries has no such shard, and runs at the rate of a square.
        """
        q, kv = np.asarray(q_len, dtype=np.float64), np.asarray(kv_len, dtype=np.float64)
        as_aligned = np.maximum(np.where(aligned, kv, kv + 0.5 * (q - 1)), q)
        seconds = self.shards(q, as_aligned, backward)
        return np.where(aligned, seconds, seconds * (kv / (as_aligned - 0.5 * (q - 1))))

    def least(self, pairs: Column | float, backward: bool = False, kv_len: Column | float = inf) -> float:
        """Seconds below which no batch of so many pairs can come: all of them at the best rate of any shape.

        Of pairs in documents of `kv_len` tokens, at the best rate of any shape that has no more keys.
        """
        surface = self._surfaces[backward]
        if surface is None:
            self.table.seconds(1, 1, backward=backward)          # says what is missing
        assert surface is not None
        rates = surface.best_rates(np.asarray(kv_len, dtype=np.float64))
        if not backward and self.work_list is not None:          # fewer queries than the table's, in whole tiles
            keys = np.append(surface.kv[1:], inf)
            of_tiles = np.maximum.accumulate(surface.q[0] * keys / surface.seconds[0])
            rates = np.maximum(rates, of_tiles[np.maximum(np.searchsorted(surface.kv, kv_len) - 1, 0)])
        return self._factor * float(np.sum(pairs / np.minimum(rates, self._best_rates[backward])))


def _dims(model: ModelShape) -> str:
    same = model.head_dim == model.value_dim
    return str(model.head_dim) if same else f"{model.head_dim} for keys and {model.value_dim} for values"
