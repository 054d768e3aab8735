"""Run the attention batches of simulated pools for real, rank after rank, on one GPU.

Pools of 64 and 512 GPUs (llama3-8b, TP 8: each pool rank has 4 query heads and 1 KV head) get their batches from the
simulator's own planning, and every server's rows of every nano-batch run forward and backward. Batches take turns on
the device, as those of a training step do: one that leaves it half idle would run at a higher clock by itself.

Measurements are saved as they come and stop when the budget is spent. Predictions are made from the file and the
shipped latency tables alone, by attention_prediction.py, so that they can be made again.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from distca.cost.attention_time import AttentionTime, shipped_table
from distca.cost.work import causal_pairs
from distca.kernels import Kernel, TaskRows, choose
from distca.kernels.interface import BackwardInputs
from distca.models import model_named
from distca.planning.choose import plan_step
from distca.planning.tasks import TaskTable
from distca.profiling.machine import Run, in_turns, versions
from distca.simulate.setting import setting
from distca.spec import ModelShape, cluster_named
from distca.workload.sequences import Source, batch_sequences

CLUSTER, TOLERANCE, TABLE = "dgx-h200", 0.05, "h200"
WARM_SECONDS = 2.0
SECONDS_EACH = 0.08     # of samples of a batch


@dataclass(frozen=True, slots=True)
class Scale:
    """What is replayed; `tiny` is for trying it out on a CPU."""

    pools: tuple[tuple[int, int, int], ...]  # gpus, context, batch number
    tokens_per_rank: int | None              # None is the simulator's own
    together: int                            # batches that take turns on the device


FULL = Scale(((64, 524_288, 5), (64, 262_144, 5), (64, 131_072, 5), (64, 524_288, 0), (64, 131_072, 0),
              (512, 524_288, 0), (512, 131_072, 0), (512, 262_144, 0)), None, 16)
TINY = Scale(((64, 2_048, 0), (512, 2_048, 0)), 1_024, 1)


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
    """The forward tasks of each nano-batch, as the simulator's step plan has them."""
    cost = AttentionTime.of(shipped_table(TABLE), model, tp)
    step = plan_step([lengths], model, num_data=num_pool, layers=(1,), tp=tp, placement="balanced",
                     tolerance=TOLERANCE, cost=cost)
    return [depths[0].tasks for depths in step.plans_of(0)[0]]


def planned_calls(scale: Scale, model: ModelShape, tp: int) -> Iterator[tuple[dict[str, Any], TaskTable, int]]:
    """Every attention call of the pools: what it is of, its tasks, and how many servers there are."""
    for gpus, context, number in scale.pools:
        sequences = None if scale.tokens_per_rank is None else gpus // tp * scale.tokens_per_rank // context
        chosen = setting(model, cluster_named(CLUSTER), gpus=gpus, context=context, tp=tp, sequences=sequences)
        lengths = np.concatenate(batch_sequences(Source("prolong"), context, chosen.num_sequences, (0, number)))
        for half, tasks in enumerate(pool_tasks(lengths, chosen.num_pool, model, tp)):
            about = {"gpus": gpus, "context": context, "batch": number, "half": half}
            yield about, tasks, chosen.num_pool


def pool_batches(scale: Scale, model: ModelShape, tp: int) -> list[tuple[dict[str, Any], Batch]]:
    """Every server's batches, in an order that mixes pools: what the budget cuts off is cut off from all of them."""
    found = []
    for call, tasks, num_pool in planned_calls(scale, model, tp):
        for rank in range(num_pool):
            mine = tasks.take((tasks.server == rank) & (tasks.kv_stop > tasks.kv_start))
            if len(mine.server):
                columns = mine.q_len, mine.kv_len, mine.kv_stop == mine.q_stop, mine.document, mine.kv_start
                found.append((call | {"rank": rank, "tasks": np.stack(columns, axis=1).tolist()}, server_batch(mine)))
    return [found[at] for at in np.random.default_rng(0).permutation(len(found))]


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

    def _reserve(self, batches: Sequence[Batch]) -> None:
        num_q, num_k = (max(getattr(batch, name) for batch in batches) for name in ("num_q", "num_k"))
        if num_q > len(self.q):
            self.q, self.dout = (self._random(num_q * 5 // 4, self.heads) for _ in range(2))
        if num_k > len(self.k):
            self.k, self.v = (self._random(num_k * 5 // 4, self.kv_heads) for _ in range(2))

    def samples(self, batches: Sequence[Batch]) -> list[dict[str, list[float]]]:
        """Of forward and backward of each, all in turns: the clock is what the power for their mix allows."""
        self._reserve(batches)
        runs = [run for batch in batches for run in self._calls(batch)]
        found = in_turns(runs, self.device, budget_seconds=SECONDS_EACH * len(batches), least=3)
        return [{"forward": forward, "backward": backward}
                for forward, backward in zip(found[::2], found[1::2], strict=True)]

    def _calls(self, batch: Batch) -> tuple[Run, Run]:
        kernel, prepared = self.kernel, self.kernel.prepare(batch.rows, self.device)
        q, dout = self.q[:batch.num_q], self.dout[:batch.num_q]
        k, v = self.k[:batch.num_k], self.v[:batch.num_k]
        out, lse = kernel.forward(q, k, v, prepared)
        return (lambda: kernel.forward(q, k, v, prepared),
                lambda: kernel.backward(BackwardInputs(dout, q, k, v, out, lse), prepared))

    def warm_up(self) -> None:
        """Bring the clock to where long work leaves it."""
        begin = time.monotonic()
        while self.device.type == "cuda" and time.monotonic() - begin < WARM_SECONDS:
            self.samples([Batch(TaskRows.documents([8_192] * 4), 32_768, 32_768)])


def measure(
    path: Path, *, device: torch.device, kernel_name: str, model_name: str, tp: int, scale: Scale, budget_seconds: float
) -> dict[str, Any]:
    """Replay until the budget is spent; returns what is in the file."""
    deadline = time.monotonic() + budget_seconds
    model, dtype = model_named(model_name), torch.bfloat16 if device.type == "cuda" else torch.float32
    kernel = choose(device, dtype, model.head_dim, name=kernel_name)
    torch.manual_seed(0)
    bench = Bench(kernel, model, tp, device, dtype)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    measured: list[dict[str, Any]] = []
    content = {
        "host": {"device": name, **versions()},
        "options": {"model": model_name, "tp": tp, "kernel": kernel.name, "tolerance": TOLERANCE, "data": "prolong",
                    "cluster": CLUSTER, "budget_seconds": budget_seconds, "pools": [list(one) for one in scale.pools]},
        "measured": measured, "complete": False,
    }
    bench.warm_up()
    batches = pool_batches(scale, model, tp)
    for at in range(0, len(batches), scale.together):
        if time.monotonic() > deadline:
            break
        group = batches[at:at + scale.together]
        found = bench.samples([batch for _, batch in group])
        measured.extend(about | {"pairs": batch.pairs} | seconds
                        for (about, batch), seconds in zip(group, found, strict=True))
        content["complete"] = len(measured) == len(batches)
        _save(path, content)
    return content


def _save(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".part")
    beside.write_text(json.dumps(content) + "\n", encoding="utf-8")
    os.replace(beside, path)
