"""How long do all plans of a large pipeline's step take? Sampled documents, placed in order and balanced."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from rich.table import Table

from distca.models import model_named
from distca.train.batches import step_plan
from distca.train.settings import load_settings
from distca.workload.documents import sample_lengths
from distca.workload.packing import PLACEMENTS

STAGES, DATA_RANKS, MICRO_BATCHES, TOKENS = 8, 8, 16, 65_536


@dataclass(frozen=True, slots=True)
class Planning:
    """Layouts and plans of all ticks of a step."""

    placement: str
    ping_pong: bool
    documents: int
    plans: int
    plan_seconds: float          # median
    plan_cpu_seconds: float      # median; others on the machine disturb it less
    plan_seconds_all: list[float]
    work_before: float
    work_after: float
    served_in_bubbles: float


def planning(repeats: int) -> list[Planning]:
    model, rows = model_named("llama3-8b"), []
    lengths = [sample_lengths("prolong", DATA_RANKS * TOKENS, seed=number)
               for number in range(MICRO_BATCHES)]
    for ping_pong in (False, True):
        for placement in PLACEMENTS:
            settings = load_settings(None, {
                "model.name": model.name, "parallel.pipeline": str(STAGES),
                "attention.placement": placement}).with_values({"batch.ping_pong": ping_pong})
            seconds, cpu_seconds = [], []
            for _ in range(1 + repeats):                         # the first warms up
                begin, cpu_begin = time.perf_counter(), time.process_time()
                plan = step_plan(lengths, settings, model, DATA_RANKS)
                seconds.append(time.perf_counter() - begin)
                cpu_seconds.append(time.process_time() - cpu_begin)
            summary = plan.summary()
            rows.append(Planning(placement, ping_pong, sum(map(len, lengths)), len(plan.plans), median(seconds[1:]),
                                 median(cpu_seconds[1:]), seconds[1:], summary.work_before, summary.work_after,
                                 summary.served_in_bubbles))
    return rows


def planning_table(rows: Sequence[Planning]) -> Table:
    table = Table(title=f"planning all ticks of {STAGES} stages × {DATA_RANKS} data ranks, "
                        f"{MICRO_BATCHES} micro-batches of {TOKENS} tokens a rank",
                  title_justify="left")
    for title in ("placement", "ping-pong", "plans", "ms", "CPU ms", "work before", "after", "in bubbles"):
        table.add_column(title, justify="left" if title == "placement" else "right", no_wrap=True)
    for row in rows:
        table.add_row(row.placement, "on" if row.ping_pong else "off", str(row.plans), f"{row.plan_seconds * 1e3:.0f}",
                      f"{row.plan_cpu_seconds * 1e3:.0f}",
                      f"{row.work_before:.2f}", f"{row.work_after:.2f}", f"{100 * row.served_in_bubbles:.0f} %")
    return table
