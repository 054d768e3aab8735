"""A whole report with every section, at any number of ranks, from plain random figures."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import distca
from distca.report.figures import (
    PlannedBatch,
    ReportData,
    RunFigures,
    Spread,
    StrategyFigures,
    Timeline,
)
from distca.report.run_sections import HELD_OUT, LOSS
from distca.simulate.memory import Memory
from distca.trace import Span, StepTrace

GB = 1e9


def traces(ranks: int, layers: int = 32, seed: int = 0) -> tuple[StepTrace, ...]:
    """Layers of linear work and attention, then a wait for the slowest, with exchanges on a lane of their own."""
    rng = np.random.default_rng(seed)
    attention = rng.uniform(0.5e-3, 2e-3, (layers, ranks))
    made = []
    for rank in range(ranks):
        now, spans = 0.0, []
        for layer in range(layers):
            spans.append(Span("layer forward", "linear", now, now + 2e-3))
            spans.append(Span("queries and keys", "network", now + 1.5e-3, now + 2.4e-3, 5_000_000 + rank))
            spans.append(Span("attention forward", "attention", now + 2e-3, now + 2e-3 + attention[layer, rank]))
            end = now + 2e-3 + attention[layer].max()
            spans.append(Span("exchange", "wait", now + 2e-3 + attention[layer, rank], end, 1_000_000))
            now = end
        spans.append(Span("AdamW", "optimizer", now, now + 5e-3))
        made.append(StepTrace(rank, 1, tuple(spans)))
    return tuple(made)


def planned(before: list[float] | np.ndarray, after: list[float] | np.ndarray, ranks: int | None = None,
            sent: list[float] | np.ndarray | None = None, moved: int = 0, **changes: Any) -> PlannedBatch:
    """A real plan of equal documents, one per rank, whose summaries say that servers did this work."""
    before, after = np.asarray(before, dtype=float), np.asarray(after, dtype=float)
    ranks = len(before) if ranks is None else ranks
    layout = distca.pack([1024] * ranks, ranks=ranks)
    fields = {name: changes.pop(name) for name in ("tolerance", "tp") if name in changes}
    plan = distca.plan(layout, "tiny", speed=np.ones(len(after)), **fields)
    plan = replace(plan, limit=changes.pop("limit", None))
    batch = PlannedBatch.of(plan, "here", **changes)
    sent = np.zeros(len(after)) if sent is None else np.asarray(sent, dtype=float)
    sides = [replace(batch.after, work=work, work_max_over_mean=float(work.max() / work.mean()), num_moved=count,
                     bytes_sent=bytes_, bytes_received=bytes_[::-1])
             for work, count, bytes_ in ((before, 0, np.zeros(len(before))), (after, moved, sent))]
    return replace(batch, before=sides[0], after=sides[1], backward=sides[1])


def sampled(ranks: int) -> PlannedBatch:
    """A batch of documents from 256 tokens up, a few of them long, as it is planned."""
    lengths = (np.random.default_rng(ranks).pareto(1.2, 10 * ranks) * 4096 + 256).astype(np.int64)
    lengths = np.append(lengths, -int(lengths.sum()) % ranks or ranks)
    return PlannedBatch.of(distca.plan(distca.pack(lengths, ranks=ranks), "llama3-8b"), "sampled")


def report(ranks: int, timelines: int = 1, layers: int = 32) -> ReportData:
    rng = np.random.default_rng(ranks)
    memory = np.array([12 * GB, 24 * GB, 40 * GB, 6 * GB])[:, None] * rng.uniform(0.9, 1.1, (4, ranks))
    strategies = []
    for speed, name in enumerate(("fixed", "variable-length", "wlb-ideal", "disaggregated", "distca")):
        mean = 1e6 * (1 + 0.1 * speed)
        over = {"wlb-ideal": Spread(mean / 1.2e6, 0.9, 1.3)} if speed > 2 else {}
        strategies.append(StrategyFigures(
            name, Spread(mean, 0.95 * mean, 1.04 * mean), 4.2 / (1 + 0.1 * speed), 0.3 - 0.06 * speed, 0.05,
            (60 + speed) * GB, 2 - 0.2 * speed, over))
    steps = np.arange(1, 301)
    return ReportData(
        title=f"{ranks} ranks", subtitle="llama3-8b, 65,536 tokens a rank",
        facts=(("slowest server", "2.31× → 1.04×"), ("throughput", "1.4 M tokens/s")),
        comparison=tuple(strategies), plan=sampled(ranks),
        timelines=tuple(Timeline(title, traces(ranks, layers, seed)) for seed, title in
                        enumerate(("measured", "predicted")[:timelines])),
        runs=(RunFigures(steps, (
            (LOSS, 11 * steps**-0.2), (HELD_OUT, np.where(steps % 50, np.nan, 11.5 * steps**-0.2)),
            ("tokens/s", 1e6 + rng.normal(0, 1e4, len(steps))))),),
        memory=Memory(*memory), memory_capacity_bytes=141 * GB)


@pytest.fixture
def make_report() -> Callable[..., ReportData]:
    return report


@pytest.fixture
def make_traces() -> Callable[..., tuple[StepTrace, ...]]:
    return traces


@pytest.fixture(scope="session")
def make_batch() -> Callable[..., PlannedBatch]:
    return planned


@pytest.fixture(scope="session")
def make_pages() -> Callable[[], tuple[PlannedBatch, ReportData, tuple[StepTrace, ...]]]:
    """A planned batch, a report with two timelines and a trace, all of 8 ranks."""
    return lambda: (sampled(8), report(8, timelines=2, layers=3), traces(8, layers=3))
