"""What the simulator charges for replayed attention batches, beside what they took.

Charged is `AttentionTime` with the shipped table of this GPU and kernel, and nothing else: no measurement of the replay
enters it. `apart` leaves out which tasks read the same keys. `sum` adds the table up task by task, without launches and
without the end of the work list.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np

from distca.cost.attention_time import AttentionTime, shipped_table
from distca.cost.work import attention_backward_flops, attention_flops
from distca.models import model_named
from distca.spec import ModelShape

PREDICTORS = ("charged", "apart", "sum")
TABLE = "h200"


@dataclass(frozen=True, slots=True)
class Replay:
    """One call of a rank: measured seconds, and each prediction."""

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


def predict(content: dict[str, Any], table: str = TABLE) -> list[Replay]:
    """Every replayed call with its predictions; ranks of one attention call together, as the simulator charges them."""
    options = content["options"]
    charged = AttentionTime.of(shipped_table(table), model_named(options["model"]), options["tp"])
    plain = replace(charged, work_list=None)
    calls: dict[tuple[int, ...], list[dict[str, Any]]] = {}
    for one in content["measured"]:
        calls.setdefault((one["gpus"], one["context"], one["batch"], one["half"]), []).append(one)
    replays: list[Replay] = []
    for ranks in calls.values():
        q_len, kv_len, aligned, document, kv_start = np.concatenate([one["tasks"] for one in ranks]).T
        server = np.repeat(np.arange(len(ranks)), [len(one["tasks"]) for one in ranks])
        for backward in (False, True):
            tasks = q_len, kv_len, server, len(ranks), backward
            found = {"charged": charged.servers(*tasks, aligned=aligned, document=document, kv_start=kv_start),
                     "apart": charged.servers(*tasks, aligned=aligned), "sum": plain.servers(*tasks, aligned=aligned)}
            replays.extend(Replay(
                **{name: one[name] for name in ("gpus", "context", "batch", "half", "rank", "pairs")},
                backward=backward, num_tasks=len(one["tasks"]),
                seconds=median(one["backward" if backward else "forward"]),
                predicted={name: float(seconds[rank]) for name, seconds in found.items()})
                for rank, one in enumerate(ranks))
    return replays


def summary(replays: Sequence[Replay], model: ModelShape, tp: int) -> list[dict[str, Any]]:
    """Per pool size, context and direction, per direction, and over all: absolute errors of each prediction."""
    keys: list[tuple[int | None, int | None, bool | None]] = [
        *sorted({(one.gpus, one.context, one.backward) for one in replays}),
        (None, None, False), (None, None, True), (None, None, None)]
    rows = []
    for gpus, context, backward in keys:
        some = [one for one in replays if gpus in (None, one.gpus) and context in (None, one.context)
                and backward in (None, one.backward)]
        if not some:
            continue
        direction = None if backward is None else "backward" if backward else "forward"
        flops = sum((attention_backward_flops if one.backward else attention_flops)(one.pairs, model, tp)
                    for one in some)
        row: dict[str, Any] = {
            "gpus": gpus, "context": context, "direction": direction, "num_batches": len(some),
            "num_ranks": len({(one.gpus, one.rank) for one in some}),
            "median_seconds": median(one.seconds for one in some),
            "tflops": flops / sum(one.seconds for one in some) / 1e12}
        for name in PREDICTORS:
            errors = [one.error(name) for one in some]
            row[name] = {"median_error": median(map(abs, errors)), "worst_error": max(map(abs, errors)),
                         "median_bias": median(errors)}
        rows.append(row)
    return rows
