"""What the report page can show, as plain columns, so that drawing needs to know nothing of planning or simulating.

Every part is optional: the page leaves out the sections for which it gets no figures.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from distca.trace import StepTrace


@dataclass(frozen=True, slots=True, eq=False)
class WorkFigures:
    """Attention work before, with every query computed at home, and after."""

    before: np.ndarray               # [ranks]
    after: np.ndarray                # [servers] the ranks, then dedicated servers
    unit: str                        # "causal pairs" or "seconds"
    tolerance: float | None = None   # how far above the mean the largest may be


@dataclass(frozen=True, slots=True, eq=False)
class TransferFigures:
    """Who sends what to whom: one row per (source, destination); rows of the same pair add up."""

    num_ranks: int
    source: np.ndarray       # [pairs]
    destination: np.ndarray  # [pairs]
    num_bytes: np.ndarray    # [pairs]
    note: str                # what the bytes are, for people

    @classmethod
    def of_matrix(cls, num_bytes: np.ndarray, note: str) -> TransferFigures:
        """From a [source, destination] matrix."""
        source, destination = np.nonzero(num_bytes)
        return cls(len(num_bytes), source, destination, num_bytes[source, destination], note)


@dataclass(frozen=True, slots=True, eq=False)
class Timeline:
    """One step on all its ranks, measured or predicted."""

    title: str
    traces: tuple[StepTrace, ...]


@dataclass(frozen=True, slots=True, eq=False)
class DocumentFigures:
    """How documents were cut: one row per task, queries [q_start, q_stop) at home on `home` computed by `server`."""

    lengths: np.ndarray   # [documents]
    document: np.ndarray  # [tasks]
    q_start: np.ndarray   # [tasks]
    q_stop: np.ndarray    # [tasks]
    home: np.ndarray      # [tasks]
    server: np.ndarray    # [tasks]


@dataclass(frozen=True, slots=True, eq=False)
class MemoryFigures:
    kinds: tuple[str, ...]
    num_bytes: np.ndarray               # [kinds, ranks]
    capacity_bytes: float | None = None  # of one rank


@dataclass(frozen=True, slots=True)
class Spread:
    """A mean and the range around it that the batches covered."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, eq=False)
class StrategyFigures:
    """One strategy of a comparison. Shares are of the step."""

    name: str
    tokens_per_second: Spread
    step_seconds: float
    idle_share: float
    exposed_communication_share: float
    peak_memory_bytes: float
    work_max_over_mean: float
    speedup_over: dict[str, Spread] = field(default_factory=dict)  # by the name of another strategy of the comparison


@dataclass(frozen=True, slots=True, eq=False)
class RunFigures:
    """A run step by step; NaN where a step has no figure."""

    step: np.ndarray                             # [steps]
    series: tuple[tuple[str, np.ndarray], ...]   # label with its unit, [steps]


@dataclass(frozen=True, slots=True, eq=False)
class ReportData:
    """A whole page."""

    title: str
    subtitle: str = ""
    facts: tuple[tuple[str, str], ...] = ()      # name and value, for the top of the page
    comparison: tuple[StrategyFigures, ...] = ()
    work: WorkFigures | None = None
    transfers: TransferFigures | None = None
    timelines: tuple[Timeline, ...] = ()
    documents: DocumentFigures | None = None
    memory: MemoryFigures | None = None
    run: RunFigures | None = None
