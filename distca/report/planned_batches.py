"""Several batches of one corpus, planned: the mean and the worst of them, and what the whole corpus looks like.

One batch says little about a corpus: whether it holds the rare long document decides everything. Figures of all batches
are kept, and one of them is shown in full, the one whose slowest rank was furthest above the mean before planning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from distca.report.figures import PlannedBatch, ReportData, byte_text, count_text, plan_page
from distca.report.render import verdict as verdict_of_one
from distca.validation import unit_text
from distca.workload.sequences import CorpusFigures

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
    """What is kept of one of many batches."""

    documents: int
    is_valid: bool
    slowest_before: float      # work of the slowest, in the plan's unit
    slowest: float
    figures: dict[str, float]  # by the names of FIELDS

    @classmethod
    def of(cls, batch: PlannedBatch) -> BatchFigures:
        return cls(batch.plan.layout.num_documents, batch.invalid is None, float(batch.before.work.max()),
                   float(batch.after.work.max()), {name: float(figure(batch)) for name, figure in FIELDS.items()})


@dataclass(frozen=True, slots=True, eq=False)
class PlannedBatches:
    """One batch or several. The corpus is None for what is no corpus; `is_dealt` says that the batches are a sample of
    it, of which means make sense."""

    source: str
    note: str                  # how the batches came about
    corpus: CorpusFigures | None
    is_dealt: bool
    batches: tuple[BatchFigures, ...]
    shown: PlannedBatch        # the worst before planning
    shown_number: int          # from 1

    @classmethod
    def of(
        cls, planned: Iterable[PlannedBatch], source: str, *, note: str = "", corpus: CorpusFigures | None = None,
        is_dealt: bool = False,
    ) -> PlannedBatches:
        """Plans are large: of all but the worst only figures are kept."""
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
        """The shown batch, key by key; where there are more, all of them under `batches`, and the `corpus`."""
        said: dict[str, Any] = self.shown.as_json() | {"valid": self.are_valid}
        if self.is_dealt:
            said["batches"] = {
                "count": len(self.batches), "shown": self.shown_number,
                "mean": {name: float(self.column(name).mean()) for name in FIELDS},
                "worst": {name: float(self.column(name).max()) for name in FIELDS},
                "each": [{"documents": batch.documents, **batch.figures} for batch in self.batches]}
        if self.corpus is not None:
            said["corpus"] = self.corpus.as_json()
        return said

    def page(self) -> ReportData:
        """The page of the shown batch, which opens with what all of them say."""
        data = plan_page(self.shown)
        facts = () if self.corpus is None else _corpus_facts(self.corpus)
        words = [data.subtitle, self.note.rstrip(".")]
        if self.is_dealt:
            words.append(f"Shown is batch {self.shown_number}, the worst before planning")
        subtitle = "".join(f"{one}. " for one in words if one).rstrip()
        return replace(data, title=f"Plan of {self.source}", subtitle=subtitle if self.note else data.subtitle,
                       verdict=self.verdict(), facts=(*data.facts, *facts))

    def verdict(self) -> str:
        """What the figures mean, in a sentence or two."""
        if not self.is_dealt:
            return verdict_of_one(self.shown)
        before, after = self.column("work_max_over_mean_before"), self.column("work_max_over_mean")
        time = sum(batch.slowest for batch in self.batches) / sum(batch.slowest_before for batch in self.batches)
        return (f"The slowest rank did {before.mean():.2f}× the mean work, {before.max():.2f}× in the worst of "
                f"{count_text(len(before), 'batch', 'batches')}; now the slowest server does {after.mean():.2f}×, "
                f"{after.max():.2f}× at worst. Core attention takes {time:.0%} of the time it took, if what travels "
                f"(at most {byte_text(self.column('bytes_sent_max').max())} a layer from one rank) hides behind other "
                "work.")


def quantile_words(corpus: CorpusFigures) -> list[tuple[str, int]]:
    """The quantiles as people call them, and the longest."""
    names = [(f"{100 * level:g} %" if level != 0.5 else "median", length) for level, length in corpus.quantiles]
    return [*names, ("longest", corpus.longest)]


def _badness(batch: PlannedBatch) -> tuple[bool, float]:
    """A plan that failed its proof is worse than any; then the imbalance before planning counts."""
    return batch.invalid is not None, batch.before.work_max_over_mean


def _corpus_facts(corpus: CorpusFigures) -> tuple[tuple[str, str], ...]:
    words = ", ".join(f"{name} {length:,}" for name, length in quantile_words(corpus))
    return (("corpus", f"{corpus.documents:,} documents, {corpus.tokens:,} tokens"), ("document length", words),
            *((f"attention in documents of {unit_text(one.least)} or more",
               f"{one.attention_share:.0%}, of tokens {one.token_share:.0%}")
              for one in corpus.long_documents if one.documents))
