"""A whole report with every section, at any number of ranks, from plain random figures."""

import numpy as np
import pytest

from distca.report.page import (
    DocumentFigures,
    MemoryFigures,
    ReportData,
    RunFigures,
    Spread,
    StrategyFigures,
    Timeline,
    TransferFigures,
    WorkFigures,
)
from distca.trace import Span, StepTrace

GB = 1e9


def traces(ranks, layers=32, seed=0):
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


def documents(ranks, seed=0):
    rng = np.random.default_rng(seed)
    lengths = (rng.pareto(1.2, 10 * ranks) * 4096 + 256).astype(np.int64)
    pieces = np.maximum(1, lengths // 16384)
    document = np.repeat(np.arange(len(lengths)), pieces)
    nth = np.arange(len(document)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    start = nth * lengths[document] // pieces[document]
    stop = (nth + 1) * lengths[document] // pieces[document]
    home = rng.integers(ranks, size=len(lengths))[document]
    server = np.where(nth % 2 == 1, rng.integers(ranks, size=len(document)), home)
    return DocumentFigures(lengths, document, start, stop, home, server)


def report(ranks, timelines=1, layers=32):
    rng = np.random.default_rng(ranks)
    before = rng.pareto(2, ranks) * 1e9 + 1e8
    after = before.mean() * rng.uniform(0.97, 1.04, ranks)
    matrix = rng.exponential(1e7, (ranks, ranks)) * (rng.random((ranks, ranks)) < 0.3)
    np.fill_diagonal(matrix, 0)
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
        comparison=tuple(strategies), work=WorkFigures(before, after, "causal pairs", 0.05),
        transfers=TransferFigures.of_matrix(matrix, "one layer, forward"),
        timelines=tuple(Timeline(title, traces(ranks, layers, seed)) for seed, title in
                        enumerate(("measured", "predicted")[:timelines])),
        documents=documents(ranks), run=RunFigures(steps, (
            ("loss", 11 * steps**-0.2), ("tokens/s", 1e6 + rng.normal(0, 1e4, len(steps))))),
        memory=MemoryFigures(("weights", "optimizer", "activations", "exchange buffers"), memory, 141 * GB))


@pytest.fixture
def make_report():
    return report


@pytest.fixture
def make_traces():
    return traces
