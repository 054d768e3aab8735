"""Plans of several batches of one corpus: their mean, the worst of them, and statistics of the corpus.

One batch says little about a corpus, because the result depends on whether it contains a rare long document. Figures of
all batches are kept; the batch with the worst imbalance before planning is shown in full.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from distca.report.figures import (
    NO_GAIN,
    BatchColumns,
    PlannedBatch,
    ReportData,
    byte_text,
    count_text,
    seconds_text,
)
from distca.validation import unit_text
from distca.workload.sequences import CorpusFigures

WAYS = ("sent", "received")
FIELDS: dict[str, Callable[[PlannedBatch], float]] = {
    "work_max_over_mean_before": lambda batch: batch.before.work_max_over_mean,
    "work_max_over_mean": lambda batch: batch.after.work_max_over_mean,
    "bytes_total_before": lambda batch: batch.before.bytes_total,
    "bytes_total": lambda batch: batch.after.bytes_total,
    "bytes_sent_max": lambda batch: batch.after.bytes_sent.max(),
    "bytes_received_max": lambda batch: batch.after.bytes_received.max(),
    "plan_seconds": lambda batch: batch.plan_seconds,
}


@dataclass(frozen=True, slots=True)
class BatchFigures:
    """Figures of one batch, kept after its plan is dropped."""

    documents: int
    is_valid: bool
    slowest_before: float      # work of the slowest server, in the plan's unit
    slowest: float
    figures: dict[str, float]  # by the names of FIELDS

    @classmethod
    def of(cls, batch: PlannedBatch) -> BatchFigures:
        return cls(batch.plan.layout.num_documents, batch.invalid is None, float(batch.before.work.max()),
                   float(batch.after.work.max()), {name: float(figure(batch)) for name, figure in FIELDS.items()})


@dataclass(frozen=True, slots=True, eq=False)
class PlannedBatches:
    """One batch, or (`is_dealt`) several that sample a corpus, so that their mean is meaningful."""

    source: str
    note: str                  # how the batches were made
    corpus: CorpusFigures | None  # None if the source is no corpus
    is_dealt: bool
    batches: tuple[BatchFigures, ...]
    shown: PlannedBatch        # the worst before planning
    shown_number: int          # from 1

    @classmethod
    def of(
        cls, planned: Iterable[PlannedBatch], source: str, *, note: str = "", corpus: CorpusFigures | None = None,
        is_dealt: bool = False,
    ) -> PlannedBatches:
        """Keep the worst batch's plan and the figures of all batches, because plans are large."""
        batches: list[BatchFigures] = []
        shown: tuple[int, PlannedBatch] | None = None
        for number, batch in enumerate(planned, 1):
            batches.append(BatchFigures.of(batch))
            if shown is None or _badness(batch) > _badness(shown[1]):
                shown = number, batch
        assert shown is not None, "there is at least one batch"
        return cls(source, note, corpus, is_dealt, tuple(batches), shown[1], shown[0])

    def column(self, name: str) -> np.ndarray:
        """[batches] one of FIELDS."""
        return np.array([batch.figures[name] for batch in self.batches])

    @property
    def are_valid(self) -> bool:
        return all(batch.is_valid for batch in self.batches)

    def as_json(self) -> dict[str, Any]:
        """Return the shown batch's figures, for several batches also `batches` with all of them, and the `corpus`."""
        content: dict[str, Any] = self.shown.as_json() | {
            "valid": self.are_valid, "verdict": self.verdict()}
        if self.is_dealt:
            content["batches"] = {
                "count": len(self.batches), "shown": self.shown_number,
                "mean": {name: float(self.column(name).mean()) for name in FIELDS},
                "worst": {name: float(self.column(name).max()) for name in FIELDS},
                "each": [{"documents": batch.documents, **batch.figures} for batch in self.batches]}
        if self.corpus is not None:
            content["corpus"] = self.corpus.as_json()
        return content

    def page(self) -> ReportData:
        """Build the page: the verdict and all batches first, then, apart, the shown batch in full."""
        data = plan_page(self.shown)
        facts = () if self.corpus is None else _corpus_facts(self.corpus)
        note = f"{self.note.rstrip('.')}. " if self.note else ""
        if not self.is_dealt:
            return replace(data, title=f"Plan of {self.source}", subtitle=f"{note}{data.subtitle}",
                           verdict=self.verdict(), facts=(*data.facts, *facts))
        columns = BatchColumns(
            np.array([batch.documents for batch in self.batches]), self.column("work_max_over_mean_before"),
            self.column("work_max_over_mean"), self.column("bytes_total"), self.shown_number)
        title = f"Batch {self.shown_number} of {len(self.batches)}, the worst before planning"
        pool = self.shown.pool_text.rsplit(", ", 1)              # the documents differ from batch to batch
        return replace(data, title=f"Plan of {self.source}", subtitle=f"{note}{pool[0]}, {self.shown.options_text}",
                       verdict=self.verdict(), facts=facts, batches=columns, detail=(title, f"{pool[1]}.", data.facts))

    def verdict(self) -> str:
        """Summarize all batches: what is gained, over what, and what it costs."""
        if not self.is_dealt:
            return verdict_on_batch(self.shown)
        before, after = self.column("work_max_over_mean_before"), self.column("work_max_over_mean")
        share = sum(batch.slowest for batch in self.batches) / sum(batch.slowest_before for batch in self.batches)
        return (f"{_gain(share)}: the slowest server does {after.mean():.2f}× the mean work, {after.max():.2f}× in the "
                f"worst of {count_text(len(before), 'batch', 'batches')}, instead of {before.mean():.2f}× and "
                f"{before.max():.2f}×. {_price(*(self.column(f'bytes_{way}_max').max() for way in WAYS))}")


def quantile_words(corpus: CorpusFigures) -> list[tuple[str, int]]:
    """Names and lengths of the quantiles, and of the longest document."""
    names = [(f"{100 * level:g} %" if level != 0.5 else "median", length) for level, length in corpus.quantiles]
    return [*names, ("longest", corpus.longest)]


def _badness(batch: PlannedBatch) -> tuple[bool, float]:
    """Sort key: plans that failed validation come last, then those with the worst imbalance before planning."""
    return batch.invalid is not None, batch.before.work_max_over_mean


def _corpus_facts(corpus: CorpusFigures) -> tuple[tuple[str, str], ...]:
    words = ", ".join(f"{name} {length:,}" for name, length in quantile_words(corpus))
    return (("corpus", f"{corpus.documents:,} documents, {corpus.tokens:,} tokens"), ("document length", words),
            *((f"attention in documents of {unit_text(one.least)} or more",
               f"{one.attention_share:.0%}, of tokens {one.token_share:.0%}")
              for one in corpus.long_documents if one.documents))


def plan_page(batch: PlannedBatch) -> ReportData:
    """Build the page of one batch: work before and after planning, traffic, and how documents were cut."""
    facts = [
        ("slowest server's work, × mean",
         f"{batch.before.work_max_over_mean:.2f} → {batch.after.work_max_over_mean:.2f}"),
        ("bytes a layer, forward", byte_text(batch.after.bytes_total)),
        ("busiest sender", byte_text(batch.after.bytes_sent.max())),
        *(() if batch.after.bytes_between_nodes is None else (
            ("between nodes", byte_text(batch.after.bytes_between_nodes)),
            ("busiest node", byte_text(batch.after.bytes_between_nodes_max or 0)))),
        *(() if batch.after.bytes_between_pods is None else (
            ("between pods", byte_text(batch.after.bytes_between_pods)),)),
        ("tasks, of which moved", f"{batch.after.num_tasks:,}, {batch.after.num_moved:,}"),
        ("planning", seconds_text(batch.plan_seconds)),
    ]
    if batch.plan.limit is not None:
        facts.append(("what keeps it above the tolerance", batch.plan.limit))
    if batch.invalid is not None:
        facts.append(("THE PLAN IS NOT VALID", batch.invalid))
    return ReportData(f"Plan of {batch.source}", f"{batch.pool_text}, {batch.options_text}", tuple(facts), plan=batch)


def verdict_on_batch(batch: PlannedBatch) -> str:
    """Summarize one batch: what is gained, over what, and what it costs."""
    before, after = batch.before, batch.after
    if after.num_moved == 0 and before.work_max_over_mean <= 1 + batch.plan.tolerance:
        return (f"The slowest rank does {before.work_max_over_mean:.2f}× the mean work, inside the tolerance: "
                "no query has to move, and balancing gains nothing.")
    return (f"{_gain(after.work.max() / before.work.max())}: the slowest server does {after.work_max_over_mean:.2f}× "
            f"the mean work instead of {before.work_max_over_mean:.2f}×. "
            f"{_price(after.bytes_sent.max(), after.bytes_received.max())}")


def _gain(share: float) -> str:
    """Say how much faster attention gets if it takes this share of its former time, and over what."""
    gained = (f"is {1 / share:.2f}× as fast ({share:.0%} of the time)" if 1 / share >= NO_GAIN else
              f"gains nothing ({share:.0%} of the time)")
    return f"Attention alone {gained}, over no balancing, where each rank computes the attention of its own tokens"


def _price(sent: float, received: float) -> str:
    return (f"The price: in each layer's forward pass up to {byte_text(sent)} leave one rank and up to "
            f"{byte_text(received)} reach one, in buffers of that size, and must hide behind other work.")
