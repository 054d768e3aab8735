"""Predict a batch's attention seconds from a table of equal shards, and compare with what was measured.

shipped  the shipped table of the cuDNN kernel, scaled by heads: what `distca simulate` charges with it
sum      a table of this GPU with these heads, added up task by task: what it charges with a profile
fill     the same seconds spread over multiprocessors tile by tile, and what does not depend on the work

Few heads and long keys make tiles few and long: a rank's forward may be five waves of tiles on 132 multiprocessors,
the last of them partly empty. `fill` deals every launch's tiles to the multiprocessor that is free first. A tile's time
is its share of the table's, with the table's own waves taken out. How wide tiles are, in which order they are dealt,
and what launches, small copies and tiles that only fill a launch's grid cost, the kernel does not say. The probes do:
batches made for that, none of them replayed, and what fits them best is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heapreplace
from statistics import median
from typing import Any

import numpy as np
import torch
from attention_replay import Batch, shards

from distca.cost.latency_table import LatencyTable, peak_rate
from distca.cost.shipped import shipped_table
from distca.cost.work import attention_backward_flops, attention_flops
from distca.kernels.cudnn import CudnnKernel, Mask, bucket
from distca.simulate.costs import Costs
from distca.spec import ModelShape, cluster_named, model_named

TILE = 128
DEALT_TILES = 16        # for each multiprocessor, the last ones: how more than these are dealt no longer matters
GRADIENT_BYTES = 10     # of a partial gradient that is added up: read in bf16, sum read and written in float32


@dataclass(frozen=True, slots=True)
class Launch:
    """One call of the device: rows whose tiles are dealt to multiprocessors together."""

    q_len: np.ndarray
    k_len: np.ndarray
    causal: np.ndarray   # aligned with the end of the keys in forward, squares in backward; else all see all
    grid_tiles: int      # with those that only fill the grid, over all heads


@dataclass(frozen=True, slots=True)
class Call:
    """All launches of a forward or a backward, and the small copies around them."""

    launches: tuple[Launch, ...]
    backward: bool
    num_copies: int
    copied_bytes: int


def calls(batch: Batch, heads: int, kv_heads: int, dim: int) -> tuple[Call, Call]:
    """What the cuDNN kernel makes of a batch."""
    prepared = CudnnKernel().prepare(batch.rows, torch.device("cpu"))
    ways = []
    for backward, parts in ((False, prepared.forward), (True, prepared.backward)):
        launches = []
        for part in parts:
            rows, mask = part.rows, part.mask
            along = rows.k_len if backward else rows.q_len       # what tiles are cut from
            grid = bucket(len(rows)) * -(-bucket(int(along.max()), TILE) // TILE) * heads
            launches.append(Launch(rows.q_len, rows.k_len, np.full(len(rows), mask != Mask.NONE), grid))
        copies, moved = 0, 0
        if backward and not prepared.keys_in_place:
            spans = sum(len(part.k.bounds) + len(part.q.bounds) for part in parts)
            copies = 2 * spans
            moved = (2 * kv_heads * GRADIENT_BYTES * sum(int(part.rows.k_len.sum()) for part in parts)
                     + heads * GRADIENT_BYTES * sum(int(part.rows.q_len.sum()) for part in parts)) * dim
        elif not backward and not prepared.forward_in_place:
            copies = 6 * sum(len(part.q.bounds) for part in parts)
            moved = heads * GRADIENT_BYTES * 2 * sum(int(part.rows.q_len.sum()) for part in parts) * dim
        ways.append(Call(tuple(launches), backward, copies, moved))
    return ways[0], ways[1]


@dataclass(frozen=True, slots=True)
class Dealing:
    """How a launch's tiles go to multiprocessors; a width of 0 is work that divides evenly."""

    width: int
    longest_first: bool = False


DEALINGS = (Dealing(0), *(Dealing(width, order) for width in (64, 128, 256) for order in (False, True)))


def tile_shares(launch: Launch, row: int, backward: bool, width: int) -> np.ndarray:
    """Relative work of a row's tiles in their order: of queries, last ones first, in forward; of keys in backward."""
    q_len, k_len, causal = int(launch.q_len[row]), int(launch.k_len[row]), bool(launch.causal[row])
    if backward:
        begin = np.arange(0, k_len, width)
        return (q_len - begin if causal else np.full(len(begin), q_len)).astype(np.float64)
    end = np.minimum(np.arange(width, q_len + width, width), q_len)
    keys = k_len - q_len + end if causal else np.full(len(end), k_len)
    return keys[::-1].astype(np.float64)


def makespan(seconds: np.ndarray, workers: int) -> float:
    """When the last is done if each goes to the worker that is free first."""
    if len(seconds) <= workers:
        return float(seconds.max(initial=0.0))
    even = max(len(seconds) // workers - DEALT_TILES, 0) * workers  # whole rounds
    free = [float(seconds[:even].sum()) / workers] * workers
    heapify(free)
    for one in seconds[even:].tolist():
        heapreplace(free, free[0] + one)
    return max(free)


def launch_seconds(
    launch: Launch, backward: bool, rows: np.ndarray, heads: int, workers: int, dealing: Dealing
) -> float:
    """`rows` are the seconds of each row on a device that it fills evenly."""
    if dealing.width == 0:
        return float(rows.sum())
    tiles = []
    for row, seconds in enumerate(rows.tolist()):
        share = tile_shares(launch, row, backward, dealing.width)
        tiles.append(np.tile(share * (seconds * workers / heads / share.sum()), heads))
    dealt = np.concatenate(tiles)
    return makespan(-np.sort(-dealt) if dealing.longest_first else dealt, workers)


def row_seconds(table: LatencyTable, launch: Launch, backward: bool) -> np.ndarray:
    """Of every row on a filled device. Backward tables hold a square and the rectangle before it together."""
    q, k = launch.q_len.astype(np.float64), launch.k_len.astype(np.float64)
    if backward:
        squares = table.seconds(q, q, backward=True)
        return np.where(launch.causal, squares, table.seconds(q, q + k, backward=True) - squares)
    return table.seconds(q, np.where(launch.causal, np.maximum(k, q), _as_aligned(q, k)))


def _as_aligned(q: np.ndarray, k: np.ndarray) -> np.ndarray:
    """Keys of an aligned shard with as many pairs as these queries have when all see all keys."""
    return np.maximum(k + 0.5 * (q - 1), q)


@dataclass(frozen=True, slots=True, eq=False)
class Device:
    """What `fill` knows: tile work from a table, and costs beside it."""

    table: LatencyTable
    heads: int
    kv_heads: int
    dim: int
    workers: int
    copy_rate: float
    dealings: tuple[Dealing, Dealing]      # forward, backward
    beside: tuple[np.ndarray, np.ndarray]  # forward, backward: seconds of a launch, of a copy, of an empty tile

    def split(self, call: Call) -> tuple[float, np.ndarray]:
        """Seconds of tiles and bytes, and how many launches, copies and empty tiles come to that."""
        busy = call.copied_bytes / self.copy_rate
        empty = 0
        for launch in call.launches:
            rows = row_seconds(self.table, launch, call.backward)
            busy += launch_seconds(launch, call.backward, rows, self.heads, self.workers, self.dealings[call.backward])
            along = launch.k_len if call.backward else launch.q_len
            empty += launch.grid_tiles - self.heads * int((-(-along // TILE)).sum())
        return busy, np.array([len(call.launches), call.num_copies, empty], dtype=np.float64)

    def seconds(self, call: Call) -> float:
        busy, counts = self.split(call)
        return busy + float(counts @ self.beside[call.backward])


def fitted(counts: np.ndarray, rest: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Seconds of each thing counted, none below 0, that leave the least weighted squares of `rest`."""
    keep = counts.any(axis=0)
    found = np.zeros(counts.shape[1])
    while keep.any():
        found[:] = 0.0
        found[keep] = np.linalg.lstsq(counts[:, keep] * weight[:, None], rest * weight, rcond=None)[0]
        if (found >= 0).all():
            return found
        keep &= found > 0
    return np.zeros(counts.shape[1])


def table_from(
    content: dict[str, Any], workers: int, heads: int, dealings: tuple[Dealing, Dealing]
) -> LatencyTable:
    """As it would be on a device that the shards of every point fill evenly; with even dealings, as measured."""
    points = [one for one in content["measured"] if one["kind"] == "table"]
    q_len, kv_len = (np.array(sorted({one[name] for one in points})) for name in ("q_len", "kv_len"))
    shape = len(q_len), len(kv_len)
    even = np.full((2, *shape), np.nan)
    for one in points:
        at = int(np.searchsorted(q_len, one["q_len"])), int(np.searchsorted(kv_len, one["kv_len"]))
        for way, name in enumerate(("forward", "backward")):
            count = one[f"{name}_count"]
            even[(way, *at)] = median(one[name]) / count / unevenness(
                one["q_len"], one["kv_len"], count, bool(way), heads, workers, dealings[way])
    whole = ~(np.isnan(even[0]) & (q_len[:, None] <= kv_len)).any(axis=0)
    if whole.sum() < 2 or kv_len[whole][-1] < q_len[-1]:
        raise ValueError(f"the table has all its points for kv_len {kv_len[whole].tolist()} only, of "
                         f"{kv_len.tolist()}; measure again with a larger --budget-seconds")
    kv_len, even = kv_len[whole], even[:, :, whole]              # beyond, pairs run at the peak's rate
    options = content["options"]
    model = model_named(options["model"])
    about = {"device": content["host"]["device"], "model": model.name, "tp": options["tp"], "num_heads": heads,
             "num_kv_heads": model.kv_heads_per_rank(options["tp"]), "head_dim": model.head_dim,
             "kernel": options["kernel"]}
    return LatencyTable(about["device"], q_len, kv_len, even[0], even[1], peak_rate(q_len, kv_len, even[0]), about)


def unevenness(
    q_len: int, kv_len: int, count: int, backward: bool, heads: int, workers: int, dealing: Dealing
) -> float:
    """Time of equal shards over what it would be if multiprocessors could share tiles."""
    shard = shards(count, q_len, kv_len).rows
    if not backward:
        parts = [Launch(shard.q_len, shard.k_len, np.full(count, True), 0)]
    else:
        parts = [Launch(shard.q_len, shard.q_len, np.full(count, True), 0)]
        if kv_len > q_len:
            parts.append(Launch(shard.q_len, shard.k_len - shard.q_len, np.full(count, False), 0))
    if dealing.width == 0:
        return 1.0
    work = [float(tile_shares(part, 0, backward, dealing.width).sum()) for part in parts]
    taken = [launch_seconds(part, backward, np.full(count, much), heads, workers, dealing)
             for part, much in zip(parts, work, strict=True)]
    return sum(taken) / (count * sum(work))


@dataclass(frozen=True, slots=True)
class Replay:
    """One rank's batch: measured seconds, and each prediction over them."""

    gpus: int
    context: int
    batch: int
    half: int
    rank: int
    backward: bool
    pairs: int
    num_tasks: int
    seconds: float
    predicted: dict[str, float]

    def error(self, name: str) -> float:
        return self.predicted[name] / self.seconds - 1


PREDICTORS = ("shipped", "sum", "fill")


def predict(content: dict[str, Any]) -> tuple[list[Replay], dict[str, Any]]:
    """Every replayed batch with its predictions, and what was fitted."""
    options = content["options"]
    model, tp, workers = model_named(options["model"]), options["tp"], content["host"]["num_multiprocessors"]
    heads, kv_heads, dim = model.heads_per_rank(tp), model.kv_heads_per_rank(tp), model.head_dim
    even = DEALINGS[0], DEALINGS[0]
    measured = table_from(content, workers, heads, even)
    plain = Device(measured, heads, kv_heads, dim, workers, content["copy_bytes_per_second"], even,
                   (np.zeros(3), np.zeros(3)))
    probes = [one for one in content["measured"] if one["kind"] == "probe"]
    device, tried = fit_device(content, plain, probes)
    costs = Costs.of(model, cluster_named(options["cluster"]), tp, shipped_table("h200_cudnn"))
    replays = []
    for one in (one for one in content["measured"] if one["kind"] == "replay"):
        batch = Batch.from_json(one)
        if not len(batch.rows):
            continue
        q, k, aligned = np.array(one["tasks"], dtype=np.float64).T
        keys = np.where(aligned > 0, np.maximum(k, q), _as_aligned(q, k))
        for call, name in zip(calls(batch, heads, kv_heads, dim), ("forward", "backward"), strict=True):
            replays.append(Replay(
                one["gpus"], one["context"], one["batch"], one["half"], one["rank"], call.backward, one["pairs"],
                len(q), median(one[name]), {
                    "shipped": float(costs.attention.shards(q, np.maximum(keys, q), call.backward).sum()),
                    "sum": float(measured.seconds(q, keys, backward=call.backward).sum()),
                    "fill": device.seconds(call)}))
    found = {
        way: {"tile_width": device.dealings[at].width, "longest_first": device.dealings[at].longest_first,
              "seconds_per": dict(zip(("launch", "copy", "empty_tile"), device.beside[at].tolist(), strict=True)),
              "median_probe_error_by_dealing": tried[at],
              "probe_errors": dict(zip((one["name"] for one in probes), _errors(device, probes, bool(at)),
                                       strict=True))}
        for at, way in enumerate(("forward", "backward"))}
    return replays, found


def fit_device(
    content: dict[str, Any], plain: Device, probes: Sequence[dict[str, Any]]
) -> tuple[Device, tuple[dict[str, float], dict[str, float]]]:
    """The device whose dealing fits the probes best, forward and backward apart, and every dealing's median error."""
    tried: tuple[dict[str, float], dict[str, float]] = ({}, {})
    best: list[tuple[float, Dealing, np.ndarray]] = [(np.inf, DEALINGS[0], np.zeros(3)) for _ in range(2)]
    for dealing in DEALINGS if probes else ():
        both = dealing, dealing
        device = replace(plain, table=table_from(content, plain.workers, plain.heads, both), dealings=both)
        beside = _fit(device, probes, False), _fit(device, probes, True)
        device = replace(device, beside=beside)
        for way in (False, True):
            error = median(map(abs, _errors(device, probes, way)))
            tried[way][f"{dealing.width}{' longest first' if dealing.longest_first else ''}"] = error
            if error < best[way][0]:
                best[way] = error, dealing, beside[way]
    dealings = best[0][1], best[1][1]
    table = table_from(content, plain.workers, plain.heads, dealings)
    return replace(plain, table=table, dealings=dealings, beside=(best[0][2], best[1][2])), tried


def _fit(device: Device, probes: Sequence[dict[str, Any]], backward: bool) -> np.ndarray:
    split = [device.split(call) for call in _probe_calls(device, probes, backward)]
    seconds = _probe_seconds(probes, backward)
    counts, busy = np.array([counts for _, counts in split]), np.array([busy for busy, _ in split])
    return fitted(counts, seconds - busy, 1 / seconds)


def _errors(device: Device, probes: Sequence[dict[str, Any]], backward: bool) -> list[float]:
    """Predicted over measured, less 1."""
    predicted = np.array([device.seconds(call) for call in _probe_calls(device, probes, backward)])
    return (predicted / _probe_seconds(probes, backward) - 1).tolist() if len(probes) else []


def _probe_calls(device: Device, probes: Sequence[dict[str, Any]], backward: bool) -> list[Call]:
    return [calls(Batch.from_json(one), device.heads, device.kv_heads, device.dim)[backward] for one in probes]


def _probe_seconds(probes: Sequence[dict[str, Any]], backward: bool) -> np.ndarray:
    return np.array([median(one["backward" if backward else "forward"]) for one in probes])


def summary(replays: Sequence[Replay], model: ModelShape, tp: int) -> list[dict[str, Any]]:
    """Per pool size, context and direction, and over all: median and worst absolute error of each prediction."""
    rows = []
    keys = [*sorted({(one.gpus, one.context, one.backward) for one in replays}), (None, None, None)]
    for gpus, context, backward in keys:
        some = [one for one in replays if gpus is None or (one.gpus, one.context, one.backward) == (
            gpus, context, backward)]
        if not some:
            continue
        row: dict[str, Any] = {"gpus": gpus, "context": context, "direction": None if gpus is None else (
            "backward" if backward else "forward"), "num_batches": len(some),
            "num_ranks": len({(one.gpus, one.rank) for one in some}),
            "median_seconds": median(one.seconds for one in some)}
        flops = sum((attention_backward_flops if one.backward else attention_flops)(one.pairs, model, tp)
                    for one in some)
        row["tflops"] = flops / sum(one.seconds for one in some) / 1e12
        for name in PREDICTORS:
            errors = [one.error(name) for one in some]
            row[name] = {"median_error": median(map(abs, errors)), "worst_error": max(map(abs, errors)),
                         "median_bias": median(errors)}
        rows.append(row)
    return rows
