"""Helpers that benchmarks share: gloo ranks on this machine, random text for step plans, a loader of given batches."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from multiprocessing import get_context
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from distca.planning.step import MicroBatch, StepPlan
from distca.runtime.liveness import one_worker_per_group
from distca.spec import ModelShape
from distca.train.batches import Batch, step_plan
from distca.train.data import TrainingRow
from distca.train.settings import Settings
from distca.workload.documents import IGNORED


def num_cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def on_ranks(size: int, main: Callable[..., Any], *args: Any, nccl: bool = False) -> list[Any]:
    """Call `main(*args)` in `size` new processes, the ranks of a gloo group, and return what each rank returned.

    With `nccl` they share the first GPU, each a host of its own to NCCL, which connects them by sockets on loopback.
    """
    with (tempfile.TemporaryDirectory() as folder,
          ProcessPoolExecutor(size, mp_context=get_context("spawn")) as processes):
        calls = [processes.submit(_one_rank, rank, size, folder, nccl, main, args) for rank in range(size)]
        return [call.result() for call in calls]


def _one_rank(rank: int, size: int, folder: str, nccl: bool, main: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    if nccl:
        os.environ.update(NCCL_HOSTID=f"h{rank}", NCCL_SOCKET_IFNAME="lo", GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    one_worker_per_group()
    dist.init_process_group("cpu:gloo,cuda:nccl" if nccl else "gloo", init_method=f"file://{folder}/store", rank=rank,
                            world_size=size, timeout=timedelta(minutes=10))
    try:
        return main(*args)
    finally:
        dist.destroy_process_group()                             # peers of a rank that failed then fail too


def random_batch(plan: StepPlan, rank: int) -> Batch:
    """A data rank's rows: a document has the same text whatever nano-batch or rank its tokens are in."""
    rows = tuple(tuple(_row(micro_batch, number, nano, rank) for nano in range(len(micro_batch.nano_batches)))
                 for number, micro_batch in enumerate(plan.micro_batches))
    return Batch(rows, plan, plan.summary(), 0.0, 0.0, plan.num_labels)


def skewed_batch(rank: int, ranks: int, long: int, short: int, settings: Settings, model: ModelShape) -> Batch:
    """Two documents of `long` tokens, which in order are all that the first rank holds, and short ones."""
    lengths = np.repeat([long, short], [2, 2 * (ranks - 1) * (long // short)])
    return random_batch(step_plan([lengths], settings, model, ranks), rank)


def _row(micro_batch: MicroBatch, number: int, nano: int, rank: int) -> TrainingRow:
    lengths = micro_batch.lengths
    text = np.concatenate([np.random.default_rng([number, document]).integers(0, 256, length)
                           for document, length in enumerate(lengths.tolist())])
    labels = np.append(text[1:], IGNORED)
    labels[np.cumsum(lengths) - 1] = IGNORED                     # a document's last token has no next one
    columns = micro_batch.layouts[nano].tokens(rank)
    document = micro_batch.nano_batches[nano].document[columns.document]
    at = (np.cumsum(lengths) - lengths)[document] + columns.position  # [tokens of the rank]
    tokens, targets, positions = (torch.from_numpy(x) for x in (text[at], labels[at], columns.position))
    return TrainingRow(tokens, targets, positions, micro_batch.key_runs(nano, rank))


class GivenBatches:
    """Batches that return the one that was set last."""

    batch: Batch

    def __init__(self) -> None:
        self.position: dict[str, int | str] = {}

    def next(self) -> Batch:
        return self.batch

    def close(self) -> None: ...
