"""Predict an attention kernel's time from measurements, because equal pairs are not equal seconds for short shards.

A table holds times over a grid of (q_len, kv_len), queries aligned with the end of their keys. Between grid points
throughput is interpolated, bilinearly in the logarithms of the lengths, since throughput is nearly flat where time
grows quadratically. Planners search on these times, so `seconds` is monotonic in q_len and kv_len: the interpolated
times are sampled on a grid SUBDIVISIONS times finer, capped by the next measurement, raised to their running maximum
and joined by straight lines. Monotonic measurements are reproduced exactly, and a saturated kernel to within 0.1 %.
Every rank builds its own surface and must get the same bits on any CPU. numpy's log and exp differ between CPUs, so
only sums, products, quotients and square roots are used, whose rounding IEEE 754 defines.

Below the grid's smallest lengths a shard costs what the smallest costs, because a partial tile takes a whole tile's
time. Beyond the largest lengths every further pair is charged at the saturated peak. Callers first check with `require`
that the table reaches their longest document, so that the second rule is never used by accident.
"""

import json
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from distca.cost.work import attention_backward_flops, attention_flops
from distca.spec import MAX_RATE, ModelShape
from distca.validation import UserError, check_name, check_number, check_whole, errors_in, read_json, short
from distca.workload.documents import check_lengths

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
AnyArray = npt.NDArray[Any]

FORMAT = "distca-latency-table"
VERSION = 1
SUBDIVISIONS = 16  # a power of two: intervals are halved
MAX_LENGTHS = 64    # per side of the measured grid
MAX_HEADS = 2**20
LEAST_SECONDS, MOST_SECONDS = 1e-12, 1e6  # of one call
SATURATED_Q_LEN = 128  # attention kernels reach their peak once a shard fills a tile of queries

_SQRT_HALF, _LOG_2 = 0.7071067811865476, 0.6931471805599453
_LAST_ODD = 23  # |s| <= 0.1716, so the terms after s²³/23 are below 2e-20
_KEYS = ("name", "q_len", "kv_len", "forward_seconds", "backward_seconds", "peak_pairs_per_second", "metadata")


def _pairs(q_len: FloatArray, kv_len: FloatArray) -> FloatArray:
    """Return the pairs of a whole-prefix shard, smooth in fractional lengths."""
    return q_len * (kv_len - (q_len - 1) / 2)


@dataclass(frozen=True, slots=True, eq=False)
class Surface:
    """Monotonic times over (q_len, kv_len), bilinear between the points of a fine grid."""

    q: FloatArray  # [fine q]
    kv: FloatArray  # [fine kv]
    seconds: FloatArray  # [fine q, fine kv]
    peak: float  # pairs per second charged beyond the grid
    q_list: list[float]  # the same as Python floats, which are several times faster for one shard at a time
    kv_list: list[float]
    seconds_lists: list[list[float]]

    @classmethod
    def through(cls, q_len: IntArray, kv_len: IntArray, seconds: FloatArray, peak: float) -> "Surface":
        rate = _pairs(q_len[:, None].astype(np.float64), kv_len.astype(np.float64)) / seconds  # [q, kv]
        for at in range(1, len(q_len)):  # no shard has q_len > kv_len: use the rate of the longest that exists
            rate[at] = np.where(np.isnan(rate[at]), rate[at - 1], rate[at])
        q, kv = _refined(q_len), _refined(kv_len)
        shard_q = np.minimum(q[:, None], kv)  # [fine q, fine kv]
        i, u = _bracket(_log(q_len), _log(shard_q))
        j, v = _bracket(_log(kv_len), _log(kv))
        fine = _pairs(shard_q, kv) / _bilinear(rate, i, j, u, v)
        fine = np.minimum(fine, _ceiling(q_len, kv_len, seconds, shard_q, kv))
        fine = np.maximum.accumulate(np.maximum.accumulate(fine, axis=0), axis=1)
        return cls(q, kv, fine, peak, q.tolist(), kv.tolist(), fine.tolist())

    def at(self, q_len: float, kv_len: float) -> float:
        q_axis, kv_axis = self.q_list, self.kv_list
        q = min(max(q_len, q_axis[0]), q_axis[-1])
        kv = min(max(kv_len, kv_axis[0]), kv_axis[-1])
        i = bisect_right(q_axis, q, 1, len(q_axis) - 1) - 1
        j = bisect_right(kv_axis, kv, 1, len(kv_axis) - 1) - 1
        low, high = self.seconds_lists[i], self.seconds_lists[i + 1]
        v = (kv - kv_axis[j]) / (kv_axis[j + 1] - kv_axis[j])
        below = low[j] + v * (low[j + 1] - low[j])
        above = high[j] + v * (high[j + 1] - high[j])
        seconds = below + (q - q_axis[i]) / (q_axis[i + 1] - q_axis[i]) * (above - below)
        if q_len > q or kv_len > kv:
            q_len, kv_len = max(q_len, q), max(kv_len, kv)
            seconds += (q_len * (kv_len - (q_len - 1) / 2) - q * (kv - (q - 1) / 2)) / self.peak
        return seconds

    def best_rates(self, kv_len: FloatArray | float = inf) -> FloatArray:
        """Return the pairs per second that no shard of at most `kv_len` keys exceeds.

        Between the points of the fine grid seconds are bilinear, and pairs exceed their bilinear interpolation by at
        most step² / 8, where step is the distance of the queries' grid points. Beyond the grid pairs run at the peak.
        """
        pairs = _pairs(self.q[:, None], self.kv)  # [fine q, fine kv], less than those of shards where q > kv
        rate = pairs / self.seconds
        corners = np.maximum.reduce([rate[:-1, :-1], rate[1:, :-1], rate[:-1, 1:], rate[1:, 1:]])
        fewest = _pairs(self.q[:-1, None], np.maximum(self.q[:-1, None], self.kv[:-1]))
        step = np.diff(self.q)[:, None]
        bend = step * step / 8
        with np.errstate(divide="ignore"):
            inside = np.where(bend < fewest, corners * fewest / np.maximum(fewest - bend, 0.0), np.inf)
        most = _pairs(np.minimum(self.q[1:, None], self.kv[1:]), self.kv[1:]) / self.seconds[:-1, :-1]
        real = self.q[:-1, None] <= self.kv[1:]  # cells with a shard in them
        up_to = np.maximum.accumulate(np.where(real, np.minimum(inside, most), 0.0).max(axis=0))  # [fine kv - 1]
        cell = np.clip(np.searchsorted(self.kv, kv_len) - 1, 0, len(up_to) - 1)
        beyond = np.asarray(kv_len) > min(self.q[-1], self.kv[-1])
        return np.where(beyond, np.maximum(up_to[cell], self.peak), up_to[cell])

    def at_many(self, q_len: FloatArray, kv_len: FloatArray) -> FloatArray:
        q = np.clip(q_len, self.q[0], self.q[-1])
        kv = np.clip(kv_len, self.kv[0], self.kv[-1])
        i, u = _bracket(self.q, q)
        j, v = _bracket(self.kv, kv)
        extra = _pairs(np.maximum(q_len, q), np.maximum(kv_len, kv)) - _pairs(q, kv)
        return _bilinear(self.seconds, i, j, u, v) + extra / self.peak


def _bracket(axis: FloatArray, x: FloatArray) -> tuple[npt.NDArray[np.intp], FloatArray]:
    """Return the interval of the axis that contains each x, and its position in that interval, from 0 to 1."""
    index = np.clip(np.searchsorted(axis, x, side="right") - 1, 0, len(axis) - 2)
    return index, (x - axis[index]) / (axis[index + 1] - axis[index])


def _bilinear(
    grid: FloatArray, i: npt.NDArray[np.intp], j: npt.NDArray[np.intp], u: FloatArray, v: FloatArray
) -> FloatArray:
    below = grid[i, j] + v * (grid[i, j + 1] - grid[i, j])
    above = grid[i + 1, j] + v * (grid[i + 1, j + 1] - grid[i + 1, j])
    return np.asarray(below + u * (above - below), dtype=np.float64)


def _ceiling(q_len: IntArray, kv_len: IntArray, seconds: FloatArray, q: FloatArray, kv: FloatArray) -> FloatArray:
    """Return the cap of each shard (q, kv): the running maximum at the next grid point in both lengths."""
    above_q = np.searchsorted(q_len, q)
    above_kv = np.searchsorted(kv_len, np.maximum(kv, q_len[above_q]))
    known = np.where(np.isnan(seconds), 0.0, seconds)
    return np.asarray(np.maximum.accumulate(np.maximum.accumulate(known, axis=0), axis=1)[above_q, above_kv])


def _refined(grid: IntArray) -> FloatArray:
    """Refine a grid by SUBDIVISIONS geometric steps in every interval, keeping its own points exactly."""
    fine = grid.astype(np.float64)
    while len(fine) <= (len(grid) - 1) * SUBDIVISIONS:
        fine = np.insert(fine, np.arange(1, len(fine)), np.sqrt(fine[:-1] * fine[1:]))
    return fine


def _log(x: AnyArray) -> FloatArray:
    """Return natural logarithms to two ulps, with the same bits everywhere.

    x = m 2^e with m within a factor √2 of 1, and log m = 2 atanh s = 2 (s + s³/3 + s⁵/5 + …) with s = (m-1) / (m+1).
    """
    m, e = np.frexp(np.asarray(x, dtype=np.float64))             # m in [1/2, 1)
    small = m < _SQRT_HALF
    m, e = np.where(small, 2.0 * m, m), e - small
    s = (m - 1.0) / (m + 1.0)
    square, series = s * s, np.zeros_like(s)
    for odd in range(_LAST_ODD, 1, -2):
        series = series * square + 1.0 / odd
    return np.asarray(e * _LOG_2 + 2.0 * (s + s * (series * square)), dtype=np.float64)


@dataclass(frozen=True, slots=True, eq=False)
class LatencyTable:
    """Measured seconds of one attention call; entries with kv_len < q_len do not exist and are NaN."""

    name: str
    q_len: IntArray  # [q] increasing
    kv_len: IntArray  # [kv] increasing
    forward_seconds: FloatArray  # [q, kv]
    backward_seconds: FloatArray | None  # [q, kv]
    peak_pairs_per_second: float  # saturated forward rate
    metadata: Mapping[str, object]  # device, date, versions, num_heads, num_kv_heads, head_dim
    _forward: Surface = field(init=False, repr=False)
    _backward: Surface | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        q_len, kv_len = _checked_grid("q_len", self.q_len), _checked_grid("kv_len", self.kv_len)
        for end, name in ((0, "smallest"), (-1, "largest")):
            if q_len[end] > kv_len[end]:
                raise UserError(
                    f"q_len's {name} is {q_len[end]} but kv_len's {name} is {kv_len[end]}; queries are aligned with "
                    "the end of their keys, so extend kv_len or trim q_len")
        check_name("name", self.name)
        peak = check_number("peak_pairs_per_second", self.peak_pairs_per_second, above=0, most=MAX_RATE)
        if not isinstance(self.metadata, Mapping):
            raise UserError(f"metadata is {short(self.metadata)}; give an object of names and values")
        for name in ("num_heads", "num_kv_heads", "head_dim"):
            if name in self.metadata:
                check_whole(f"metadata.{name}", self.metadata[name], most=MAX_HEADS)
        forward = _checked_seconds("forward_seconds", self.forward_seconds, q_len, kv_len)
        checked = {"q_len": q_len, "kv_len": kv_len, "forward_seconds": forward, "_backward": None,
                   "_forward": Surface.through(q_len, kv_len, forward, peak)}
        if self.backward_seconds is not None:
            backward = _checked_seconds("backward_seconds", self.backward_seconds, q_len, kv_len)
            surface = Surface.through(q_len, kv_len, backward, peak_rate(q_len, kv_len, backward))
            checked |= {"backward_seconds": backward, "_backward": surface}
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    @overload
    def seconds(self, q_len: float, kv_len: float, *, backward: bool = False) -> float: ...
    @overload
    def seconds(self, q_len: AnyArray, kv_len: AnyArray | float, *, backward: bool = False) -> FloatArray: ...
    @overload
    def seconds(self, q_len: float, kv_len: AnyArray, *, backward: bool = False) -> FloatArray: ...
    def seconds(
        self, q_len: AnyArray | float, kv_len: AnyArray | float, *, backward: bool = False
    ) -> float | FloatArray:
        """Return the seconds for q_len queries at the end of kv_len keys, monotonic in both; 0 without queries."""
        surface = self._backward if backward else self._forward
        if surface is None:
            raise UserError(f"latency table {self.name!r} has no backward_seconds; profile the backward as well")
        if isinstance(q_len, (int, float)) and isinstance(kv_len, (int, float)):
            if not 0 <= q_len <= kv_len:
                raise UserError(f"q_len is {q_len} and kv_len {kv_len}; give 0 <= q_len <= kv_len")
            return surface.at(q_len, kv_len) if q_len else 0.0
        q, kv = np.asarray(q_len, dtype=np.float64), np.asarray(kv_len, dtype=np.float64)
        if q.ndim == kv.ndim == 0:
            return self.seconds(float(q), float(kv), backward=backward)
        if not ((q >= 0) & (q <= kv)).all():
            raise UserError("q_len exceeds kv_len or is negative in some entry; give 0 <= q_len <= kv_len")
        return np.where(q > 0, surface.at_many(q, kv), 0.0)

    @property
    def surfaces(self) -> tuple[Surface, Surface | None]:
        """Forward and backward surface, for callers that evaluate one shard at a time."""
        return self._forward, self._backward

    def require(self, max_kv_len: int) -> None:
        """Refuse documents that are longer than the measured lengths."""
        if max_kv_len > self.kv_len[-1]:
            raise UserError(
                f"latency table {self.name!r} reaches kv_len {self.kv_len[-1]} but the longest document has "
                f"{max_kv_len} tokens; profile with --max-kv-len {max_kv_len}, or cut documents: --max-document "
                f"{self.kv_len[-1]} in plan, --context {self.kv_len[-1]} in simulate")

    def save(self, path: str | Path) -> None:
        forward, backward = (None if grid is None else [[None if np.isnan(one) else one for one in line]
                                                        for line in grid.tolist()]
                             for grid in (self.forward_seconds, self.backward_seconds))
        content = {"format": FORMAT, "version": VERSION, "name": self.name, "q_len": self.q_len.tolist(),
                   "kv_len": self.kv_len.tolist(), "forward_seconds": forward, "backward_seconds": backward,
                   "peak_pairs_per_second": self.peak_pairs_per_second, "metadata": dict(self.metadata)}
        Path(path).write_text(json.dumps(content, allow_nan=False) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> "LatencyTable":
        content = read_json(path)
        with errors_in(path):
            if not isinstance(content, dict) or content.get("format") != FORMAT:
                raise UserError(f"not a latency table: its format is not {FORMAT!r}; give a file that profiling wrote")
            if content.get("version") != VERSION:
                raise UserError(
                    f"version is {content.get('version')!r} but {VERSION} is what can be read; profile again")
            missing = [key for key in _KEYS if key not in content]
            if missing:
                raise UserError(f"latency table without {', '.join(missing)}; profile again")
            return cls(**{key: content[key] for key in _KEYS})


def peak_rate(q_len: IntArray, kv_len: IntArray, seconds: FloatArray) -> float:
    """Return the largest pairs per second of a measured grid."""
    return float(np.nanmax(_pairs(q_len[:, None].astype(np.float64), kv_len.astype(np.float64)) / seconds))


def analytic_table(
    model: ModelShape, flops_per_second: float, *, tp: int = 1, max_kv_len: int = 524_288,
    backward_flops_per_second: float | None = None,
) -> LatencyTable:
    """Make a table without measurements: peak throughput from 128 queries on, a whole tile's time below."""
    if max_kv_len <= SATURATED_Q_LEN:
        raise UserError(f"max_kv_len is {max_kv_len}; give more than the {SATURATED_Q_LEN} tokens of a tile")
    backward_rate = flops_per_second if backward_flops_per_second is None else backward_flops_per_second
    if not (flops_per_second > 0 and backward_rate > 0):
        raise UserError(
            f"flops_per_second is {flops_per_second!r} forward and {backward_rate!r} backward; give numbers above 0")
    octaves = SATURATED_Q_LEN * 2 ** np.arange(int(max_kv_len).bit_length(), dtype=np.int64)
    grid = np.append(octaves[octaves < max_kv_len], max_kv_len)
    q = grid[:, None].astype(np.float64)
    pairs = np.where(q <= grid, _pairs(q, grid.astype(np.float64)), np.nan)  # [q, kv]
    return LatencyTable(
        name=f"analytic {model.name}", q_len=grid, kv_len=grid,
        forward_seconds=attention_flops(pairs, model, tp) / flops_per_second,
        backward_seconds=attention_backward_flops(pairs, model, tp) / backward_rate,
        peak_pairs_per_second=flops_per_second / attention_flops(1, model, tp),
        metadata={"device": "analytic, not measured", "num_heads": model.heads_per_rank(tp),
                  "num_kv_heads": model.kv_heads_per_rank(tp), "head_dim": model.head_dim,
                  "flops_per_second": flops_per_second, "backward_flops_per_second": backward_rate})


def _checked_grid(name: str, values: IntArray) -> IntArray:
    grid = check_lengths(values, name).copy()
    if not 2 <= len(grid) <= MAX_LENGTHS or not (np.diff(grid) > 0).all():
        raise UserError(
            f"{name} is {short(grid.tolist())}; give at least two lengths, at most {MAX_LENGTHS}, each above "
            "the one before")
    grid.setflags(write=False)
    return grid


def _checked_seconds(name: str, values: npt.ArrayLike, q_len: IntArray, kv_len: IntArray) -> FloatArray:
    try:
        if any(isinstance(value, str | bool) for value in np.asarray(values, dtype=object).ravel()):
            raise TypeError
        seconds = np.array(values, dtype=np.float64)
    except (TypeError, ValueError, OverflowError):
        raise UserError(f"{name} is not a table of numbers; give {len(q_len)} rows of {len(kv_len)} seconds") from None
    if seconds.shape != (len(q_len), len(kv_len)):
        raise UserError(f"{name} has shape {seconds.shape}; give {len(q_len)} rows of {len(kv_len)} seconds")
    exists = q_len[:, None] <= kv_len
    bad = exists & ~((seconds >= LEAST_SECONDS) & (seconds <= MOST_SECONDS))
    if bad.any():
        i, j = np.argwhere(bad)[0]
        raise UserError(
            f"{name} at q_len {q_len[i]}, kv_len {kv_len[j]} is {seconds[i, j]}; give seconds above 0, from "
            f"{LEAST_SECONDS:g} to {MOST_SECONDS:g}")
    seconds[~exists] = np.nan
    seconds.setflags(write=False)
    return seconds
