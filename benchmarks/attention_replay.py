"""Run the attention batches of simulated pools for real, rank after rank, on one GPU.

Pools of 64 and 512 GPUs (llama3-8b, TP 8: each pool rank has 4 query heads and 1 KV head) get their batches from the
simulator's own planning, and every server's rows of every nano-batch run forward and backward. Before that come a
latency table of just these heads, and probes: batches made to tell waves, launches, copies and empty tiles apart.

Measurements are saved as they come and stop when the budget is spent. Predictions are made from the file alone, by
attention_prediction.py, so that they can be made again.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from distca.cost.work import causal_pairs
from distca.kernels import Kernel, TaskRows, choose
from distca.kernels.cudnn import bucket
from distca.planning.step import plan_step
from distca.planning.tasks import TaskTable
from distca.profiling import versions
from distca.simulate.setting import setting
from distca.spec import ModelShape, cluster_named, model_named
from distca.workload.contexts import Source, batch_sequences

CLUSTER, TOLERANCE = "dgx-h200", 0.05
WARM_SECONDS = 1.0
MOST_FAILURES = 5       # one after another: the device is lost
PROBE_SECONDS = 0.02    # of samples, forward and backward each
SLEEP_CYCLES = 3_000_000  # the host queues a whole call meanwhile
MOST_SAMPLES = 5
SAVE_SECONDS = 5.0
MOST_KEYS = 2**22       # tokens of a table point whose shards have keys of their own
FIRST_RANKS = 16        # of a large pool: the others follow while there is time


@dataclass(frozen=True, slots=True)
class Scale:
    """Sizes of everything that is measured; `tiny` is for trying it out on a CPU."""

    q_len: tuple[int, ...]
    kv_len: tuple[int, ...]
    q_tokens: int                        # of a table point
    q_tokens_long: int                   # the same from `long` keys on
    long: int
    pools: tuple[tuple[int, int, int], ...]  # gpus, context, batch number
    tokens_per_rank: int | None          # None is the simulator's own
    unit: int                            # the probes' lengths are multiples of it


FULL = Scale(
    (128, 512, 1_024, 2_048, 4_096, 8_192, 16_384, 32_768),
    (128, 512, 1_024, 2_048, 4_096, 8_192, 16_384, 32_768, 65_536, 131_072, 524_288),
    33_792, 16_896, 65_536,
    ((64, 524_288, 5), (64, 262_144, 5), (64, 131_072, 5), (64, 524_288, 0), (64, 131_072, 0),
     (512, 524_288, 0), (512, 131_072, 0), (512, 262_144, 0)), None, 128)
TINY = Scale((128, 512), (128, 512, 2_048), 512, 512, 2_048, ((64, 2_048, 0), (512, 2_048, 0)), 1_024, 4)


# ------------------------------------------------------------------------------------------------------------- batches


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of one call, and the sizes of the buffers they stand in."""

    rows: TaskRows
    num_q: int
    num_k: int

    @property
    def pairs(self) -> int:
        rows = self.rows
        return int(causal_pairs(rows.q_offset, rows.q_offset + rows.q_len, 0, rows.k_len).sum())

    def as_json(self) -> dict[str, Any]:
        columns = (self.rows.q_begin, self.rows.q_end, self.rows.k_begin, self.rows.k_end, self.rows.q_offset)
        return {"rows": np.stack(columns, axis=1).tolist(), "num_q": self.num_q, "num_k": self.num_k}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Batch:
        columns = np.array(content["rows"], dtype=np.int64).reshape(-1, 5).T
        return cls(TaskRows(*columns), content["num_q"], content["num_k"])


def shards(count: int, q_len: int, kv_len: int, shared: bool = False, full: bool = False) -> Batch:
    """Equal shards at the end of their keys, or of keys that all queries see; with the same keys or with their own."""
    shard = np.arange(count)
    k_begin = shard * 0 if shared else shard * kv_len
    rows = TaskRows.aligned(shard * q_len, (shard + 1) * q_len, k_begin, k_begin + kv_len)
    if full:
        rows = replace(rows, q_offset=rows.k_len)
    return Batch(rows, count * q_len, int(rows.k_end.max()))


def side_by_side(*batches: Batch) -> Batch:
    """The rows of all, each batch in buffers behind the others'."""
    q = np.cumsum([0, *(batch.num_q for batch in batches)]).tolist()
    k = np.cumsum([0, *(batch.num_k for batch in batches)]).tolist()
    parts = [(batch.rows.q_begin + q0, batch.rows.q_end + q0, batch.rows.k_begin + k0, batch.rows.k_end + k0,
              batch.rows.q_offset) for batch, q0, k0 in zip(batches, q, k, strict=False)]
    return Batch(TaskRows(*(np.concatenate(columns) for columns in zip(*parts, strict=True))), q[-1], k[-1])


def server_batch(tasks: TaskTable) -> Batch:
    """What the server of these tasks holds and computes: each query and each key once, a document's in order."""
    q_place, num_q = _places(tasks.document, tasks.q_start, tasks.q_stop)
    k_place, num_k = _places(tasks.document, tasks.kv_start, tasks.kv_stop)
    rows = TaskRows(q_place, q_place + tasks.q_len, k_place, k_place + tasks.kv_len, tasks.q_start - tasks.kv_start)
    return Batch(rows, num_q, num_k)


def _places(document: np.ndarray, start: np.ndarray, stop: np.ndarray) -> tuple[np.ndarray, int]:
    """Where each range begins in a buffer that holds the union of all, and the buffer's length."""
    span = int(stop.max()) + 1
    begin, end = document * span + start, document * span + stop
    order = np.argsort(begin, kind="stable")
    reach = np.maximum.accumulate(end[order])
    first = np.flatnonzero(np.append(True, begin[order][1:] > reach[:-1]))
    low, high = begin[order][first], reach[np.append(first[1:] - 1, len(order) - 1)]
    offset = np.cumsum(high - low) - (high - low)
    at = np.searchsorted(low, begin, side="right") - 1
    return offset[at] + begin - low[at], int((high - low).sum())


def pool_tasks(lengths: np.ndarray, num_pool: int, model: ModelShape, tp: int) -> list[TaskTable]:
    """The tasks of each nano-batch, as a step plan has them."""
    step = plan_step([lengths], model, num_data=num_pool, layers=(1,), tp=tp, placement="balanced", tolerance=TOLERANCE)
    return [plans[0].tasks for plans in step.by_stage[0][0]]


def pool_batches(scale: Scale, model: ModelShape, tp: int) -> Iterator[tuple[dict[str, Any], Batch]]:
    """Every server's batches, small pools first; of a large pool some ranks of each batch first, evenly spread."""
    later = []
    for gpus, context, number in scale.pools:
        sequences = None if scale.tokens_per_rank is None else gpus // tp * scale.tokens_per_rank // context
        chosen = setting(model, cluster_named(CLUSTER), gpus=gpus, context=context, tp=tp, sequences=sequences)
        lengths = np.concatenate(batch_sequences(Source("prolong"), context, chosen.num_sequences, (0, number)))
        for half, tasks in enumerate(pool_tasks(lengths, chosen.num_pool, model, tp)):
            for turn, rank in enumerate(spread(chosen.num_pool)):
                mine = tasks.take((tasks.server == rank) & (tasks.kv_stop > tasks.kv_start))
                if not len(mine.server):
                    continue
                about = {"kind": "replay", "gpus": gpus, "context": context, "batch": number, "half": half,
                         "rank": rank, "tasks": np.stack([mine.q_len, mine.kv_len, mine.kv_stop == mine.q_stop],
                                                         axis=1).tolist()}
                if turn < FIRST_RANKS:
                    yield about, server_batch(mine)
                else:
                    later.append((turn, about, server_batch(mine)))
    yield from ((about, batch) for _, about, batch in sorted(later, key=lambda one: one[0]))


def spread(count: int) -> list[int]:
    """Numbers below `count` in an order whose every beginning is spread evenly."""
    bits = max(count - 1, 1).bit_length()
    order = [int(f"{number:0{bits}b}"[::-1], 2) for number in range(1 << bits)]
    return [number for number in order if number < count]


def table_batches(scale: Scale) -> Iterator[tuple[dict[str, Any], Batch, Batch]]:
    """For each grid point forward and backward: as many shards as give whole waves of tiles, or as fit."""
    for kv_len in scale.kv_len:
        for q_len in (length for length in scale.q_len if length <= kv_len):
            count = -(-(scale.q_tokens_long if kv_len >= scale.long else scale.q_tokens) // q_len)
            own = max(1, min(count, MOST_KEYS // kv_len))
            about = {"kind": "table", "q_len": q_len, "kv_len": kv_len, "forward_count": count, "backward_count": own}
            yield about, shards(count, q_len, kv_len, shared=own < count), shards(own, q_len, kv_len)


def probe_batches(scale: Scale) -> Iterator[tuple[dict[str, Any], Batch]]:
    """Batches that tell waves, launches, small copies and empty tiles apart; most share one built graph."""
    unit = scale.unit
    for tiles in (33, 34, 40, 48, 56, 64):                       # 4 heads: 132 tiles are one wave of an H200
        yield {"kind": "probe", "name": f"{tiles} query tiles"}, shards(1, tiles * unit, 256 * unit, full=True)
        yield {"kind": "probe", "name": f"{tiles} key tiles"}, shards(1, 32 * unit, tiles * unit, full=True)
    for tiles in (33, 50, 64):
        yield {"kind": "probe", "name": f"square of {tiles} tiles"}, shards(1, tiles * unit, tiles * unit)
    long = shards(1, 16 * unit, 1_024 * unit)
    for count in (0, 33, 65):
        small = [shards(count, unit, unit)] if count else []
        yield {"kind": "probe", "name": f"long shard and {count} tiles"}, side_by_side(long, *small)
    for count in (4, 16):
        apart = shards(count, 8 * unit, 128 * unit, shared=True)
        at = np.arange(count)
        rows = TaskRows.aligned(apart.rows.q_begin, apart.rows.q_end, apart.rows.k_begin,
                                (128 - 4 * at) * unit)           # of one document's keys, each shard some
        yield {"kind": "probe", "name": f"{count} shards of shared keys"}, Batch(rows, apart.num_q, 128 * unit)
    for count in (8, 24):
        lengths = np.random.default_rng(count).integers(6 * unit, 60 * unit, count)
        yield ({"kind": "probe", "name": f"{count} documents"},
               Batch(TaskRows.documents(lengths), int(lengths.sum()), int(lengths.sum())))


# ------------------------------------------------------------------------------------------------------------- measure


class Bench:
    """One device, with random tensors as long as the longest batch so far."""

    def __init__(self, kernel: Kernel, model: ModelShape, tp: int, device: torch.device, dtype: torch.dtype) -> None:
        self.kernel, self.device, self.dtype, self.dim = kernel, device, dtype, model.head_dim
        self.heads, self.kv_heads = model.heads_per_rank(tp), model.kv_heads_per_rank(tp)
        self.q = self.dout = self._random(0, self.heads)
        self.k = self.v = self._random(0, self.kv_heads)

    def _random(self, tokens: int, heads: int) -> torch.Tensor:
        return torch.randn(tokens, heads, self.dim, dtype=self.dtype, device=self.device)

    def _reserve(self, batch: Batch) -> None:
        if batch.num_q > len(self.q):
            self.q, self.dout = (self._random(bucket(batch.num_q), self.heads) for _ in range(2))
        if batch.num_k > len(self.k):
            self.k, self.v = (self._random(bucket(batch.num_k), self.kv_heads) for _ in range(2))

    def both(self, batch: Batch, backward: bool = True) -> tuple[list[float], list[float]]:
        """Samples of forward and, where asked for, of backward."""
        self._reserve(batch)
        kernel, prepared = self.kernel, self.kernel.prepare(batch.rows, self.device)
        q, dout = self.q[:batch.num_q], self.dout[:batch.num_q]
        k, v = self.k[:batch.num_k], self.v[:batch.num_k]
        out, lse = kernel.forward(q, k, v, prepared)             # builds the graph, uploads the offsets
        forward = self.seconds(lambda: kernel.forward(q, k, v, prepared))
        if not backward:
            return forward, []
        kernel.backward(dout, q, k, v, out, lse, prepared)
        return forward, self.seconds(lambda: kernel.backward(dout, q, k, v, out, lse, prepared))

    def seconds(self, run: Callable[[], object]) -> list[float]:
        """Three samples, and more while they are short; on a GPU of the device alone, the host being ahead of it."""
        found: list[float] = []
        while len(found) < 3 or (sum(found) < PROBE_SECONDS and len(found) < MOST_SAMPLES):
            found.append(self._once(run))
        return found

    def _once(self, run: Callable[[], object]) -> float:
        if self.device.type != "cuda":
            begin = time.perf_counter()
            run()
            return time.perf_counter() - begin
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(SLEEP_CYCLES)
        first.record()
        run()
        last.record()
        torch.cuda.synchronize()
        return first.elapsed_time(last) / 1e3

    def warm_up(self) -> None:
        """Bring the clocks to where long work leaves them."""
        begin = time.monotonic()
        while self.device.type == "cuda" and time.monotonic() - begin < WARM_SECONDS:
            self.both(shards(4, 8_192, 8_192))

    def copy_rate(self) -> float:
        source = torch.zeros(2**29 if self.device.type == "cuda" else 2**22, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        return 2 * source.numel() / median(self.seconds(lambda: target.copy_(source)))


Run = tuple[dict[str, Any], Callable[[], dict[str, Any]]]


@dataclass(slots=True)
class Session:
    """Measurements so far, in the file after each group of them, and when to stop."""

    path: Path
    content: dict[str, Any]
    deadline: float
    saved: float = field(default=0.0)

    def late(self) -> bool:
        return time.monotonic() > self.deadline

    def run(self, name: str, runs: Iterator[Run]) -> bool:
        """Whether all of them ran in time. One that a kernel refuses is noted and must not cost the others."""
        start, failures = time.monotonic(), 0
        for about, run in runs:
            if self.late() or failures == MOST_FAILURES:
                return False
            try:
                self.content["measured"].append(about | run())
                failures = 0
            except Exception as error:  # cuDNN's own kinds derive from nothing narrower
                failures += 1
                self.content["failed"].append({key: value for key, value in about.items() if key != "tasks"}
                                              | {"error": f"{type(error).__name__}: {error}"[:300]})
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()
            self.content["seconds"][name] = time.monotonic() - start
            if time.monotonic() - self.saved > SAVE_SECONDS:
                self.save()
        print(f"{name}: {self.content['seconds'].get(name, 0.0):.1f} s", file=sys.stderr, flush=True)
        return True

    def save(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        beside = self.path.with_suffix(".part")
        beside.write_text(json.dumps(self.content) + "\n", encoding="utf-8")
        os.replace(beside, self.path)
        self.saved = time.monotonic()


def measure(
    path: Path, *, device: torch.device, kernel_name: str, model_name: str, tp: int, scale: Scale, budget_seconds: float
) -> dict[str, Any]:
    """Table, probes, replays, in this order, until the budget is spent; returns what is in the file."""
    began = time.monotonic()
    model, dtype = model_named(model_name), torch.bfloat16 if device.type == "cuda" else torch.float32
    kernel = choose(device, dtype, model.head_dim, name=kernel_name)
    torch.manual_seed(0)
    bench = Bench(kernel, model, tp, device, dtype)
    gpu = device.type == "cuda"
    properties: Any = torch.cuda.get_device_properties(device) if gpu else None
    session = Session(path, {
        "host": {"device": properties.name if gpu else "CPU",
                 "num_multiprocessors": properties.multi_processor_count if gpu else 1, **versions()},
        "options": {"model": model_name, "tp": tp, "kernel": kernel.name, "tolerance": TOLERANCE, "data": "prolong",
                    "cluster": CLUSTER, "budget_seconds": budget_seconds, "pools": [list(one) for one in scale.pools]},
        "copy_bytes_per_second": bench.copy_rate(), "measured": [], "failed": [], "seconds": {}, "complete": False,
    }, began + budget_seconds)
    bench.warm_up()
    groups = {"table": _table_runs(bench, scale), "probes": _runs(bench, probe_batches(scale)),
              "replays": _runs(bench, pool_batches(scale, model, tp))}
    try:
        finished = [session.run(name, runs) for name, runs in groups.items()]
        session.content["complete"] = all(finished)
    finally:
        session.save()
    return session.content


def _table_runs(bench: Bench, scale: Scale) -> Iterator[Run]:
    for about, forward, backward in table_batches(scale):
        def run(forward: Batch = forward, backward: Batch = backward) -> dict[str, Any]:
            if len(forward.rows) == len(backward.rows):
                return dict(zip(("forward", "backward"), bench.both(forward), strict=True))
            return {"forward": bench.both(forward, backward=False)[0], "backward": bench.both(backward)[1]}
        yield about, run


def _runs(bench: Bench, batches: Iterator[tuple[dict[str, Any], Batch]]) -> Iterator[Run]:
    for about, batch in batches:
        def run(batch: Batch = batch) -> dict[str, Any]:
            return batch.as_json() | {"pairs": batch.pairs} | dict(
                zip(("forward", "backward"), bench.both(batch), strict=True))
        yield about, run
